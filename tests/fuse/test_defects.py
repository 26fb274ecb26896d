"""An exception that no handler should raise fails one request, is logged, and the mount goes on.

The server runs in a thread of the test, so that the test can plant the defect.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
import trio

import dlfs
from dlfs.mount.mount_view import MountView
from dlfs.mount.mountpoint import unmount
from dlfs.mount.options import MountOptions
from dlfs.mount.server import serve_view
from dlfs.mount.view import ShownVolume
from tests.fuse.mounting import SECONDS_MAX, errno_of, served_by

pytestmark = pytest.mark.fuse


def fail(*_arguments: object) -> NoReturn:
    raise RuntimeError("a planted defect")


class Defective:
    """A volume whose datasets cannot be opened, because of a defect."""

    def __init__(self, volume: dlfs.Volume) -> None:
        self.refresh = volume.refresh
        self.datasets = volume.datasets
        self.uuid, self.label = volume.uuid, volume.label
        self.capacity_bytes, self.free_bytes = volume.capacity_bytes, volume.free_bytes

    dataset = fail


@contextlib.contextmanager
def served(shown: ShownVolume, directory: Path, options: MountOptions) -> Iterator[None]:
    """Mount a volume by a server in a thread for the duration of a block."""
    directory.mkdir()
    ready = threading.Event()
    view = MountView([shown])
    arguments = (view, str(directory), options, lambda _path, _transport: ready.set())
    server = threading.Thread(target=trio.run, args=(serve_view, *arguments), daemon=True)
    server.start()
    assert ready.wait(SECONDS_MAX)
    try:
        yield
        assert server.is_alive()
    finally:
        if server.is_alive():
            unmount(directory)
        server.join(SECONDS_MAX)
    assert not server.is_alive()


def test_a_defect_of_a_look_up(
    own_volume: Path, server: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "mnt"
    with (
        dlfs.open(str(own_volume)) as volume,
        served(Defective(volume), directory, MountOptions(**served_by(server))),
    ):
        for _ in range(2):
            assert errno_of(lambda: os.stat(directory / "train" / "a")) == errno.EIO
            assert os.listdir(directory) == ["train"]
    assert "RuntimeError: a planted defect" in caplog.text
