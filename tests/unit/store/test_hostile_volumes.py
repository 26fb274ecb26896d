"""Volumes that name files, hosts and devices of others: none is opened or connected to.

The kernel says so: inotify reports each opening of a file, by Python or by C, and a socket that
listens sees each connection.
"""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

import dlfs
from dlfs.base.units import KIB, MIB
from dlfs.format.constants import LOCATION_RECORD_OFFSET_BYTES
from dlfs.format.locations import LocationRecord
from tests.golden import c_reader
from tests.support.files import write_at
from tests.unit.store.test_places import fill, read_record

IN_OPEN = 0x20
SIZE = 3 * MIB
NAME = "nqn.2024-01.org.example"


class Watch:
    """Notices that a file is opened, by any process."""

    def __init__(self, path: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        assert self._descriptor >= 0
        assert libc.inotify_add_watch(self._descriptor, os.fsencode(path), IN_OPEN) >= 0

    def was_opened(self) -> bool:
        """Return True if the file was opened since this was asked last."""
        try:
            return bool(os.read(self._descriptor, 4096))
        except BlockingIOError:
            return False

    def close(self) -> None:
        os.close(self._descriptor)


def test_the_watch_notices(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with closing(Watch(tmp_path / "file")) as watch:
        assert not watch.was_opened()
        (tmp_path / "file").read_bytes()
        assert watch.was_opened()


@contextmanager
def traps(folder: Path) -> Iterator[tuple[list[str], Watch, socket.socket]]:
    """Yield URIs that must not be opened, and what notices that one is."""
    folder.mkdir()
    secret = folder / "secret"
    secret.write_bytes(bytes(SIZE))
    with (
        closing(Watch(secret)) as watch,
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        listener.setblocking(False)
        port = listener.getsockname()[1]
        times = "connect_ms=1000&reconnect_ms=0&timeout_ms=1000"
        uris = [
            str(secret),
            f"file:{folder.parent}/given/../traps/secret",
            f"nvme-tcp://127.0.0.1:{port}/{NAME}:a?nsid=1&{times}",
            f"nvme-tcp+discover://127.0.0.1:{port}?{times}",
            f"spdk:trtype=TCP traddr=127.0.0.1 trsvcid={port} subnqn={NAME}:a nsid=1",
            "mem:64MiB",
            f"http://127.0.0.1:{port}/",
        ]
        yield uris, watch, listener


def touched(watch: Watch, listener: socket.socket) -> bool:
    try:
        listener.accept()[0].close()
    except BlockingIOError:
        return watch.was_opened()
    return True


def replace_record(file: str, uris: list[str]) -> None:
    """Make the location record on a device name other places for the members of the last group."""
    found = read_record(file)
    names = {**found.uris, **dict(zip(list(found.uris)[-len(uris) :], uris, strict=True))}
    content = LocationRecord(found.volume_uuid, found.generation + 9, names).encode()
    write_at(file, LOCATION_RECORD_OFFSET_BYTES, content)


def use(given: list[str], source: Path) -> None:
    """Do with a volume all that opens its members."""
    volume = ",".join(given)
    for verb in (
        ["info", volume],
        ["verify", volume],
        ["ls", volume],
        ["cat", volume, "data", "a"],
        ["repair", volume],
        ["import", str(source), volume, "--name", "more"],
    ):
        subprocess.run([sys.executable, "-m", "dlfs.cli", *verb], capture_output=True, check=False)
    for read in (lambda: dlfs.open(given).close(), lambda: c_reader.read_volume(given)):
        with pytest.raises((dlfs.DlfsError, c_reader.Failed)):
            read()


@pytest.mark.timeout(240)
@pytest.mark.parametrize("left", [False, True])
def test_no_place_of_a_record_is_opened(tmp_path: Path, *, left: bool) -> None:
    (tmp_path / "given").mkdir()
    first = str(tmp_path / "given" / "first")
    source = tmp_path / "source"
    source.mkdir()
    (source / "file").write_bytes(b"x")
    dlfs.format_volume(first, size_bytes=SIZE, chunk_bytes=16 * KIB)
    with traps(tmp_path / "traps") as (uris, watch, listener):
        others = [str(tmp_path / "given" / f"other{number}") for number in range(len(uris))]
        with dlfs.open(first) as volume:
            fill(volume)
            volume.grow(others, size_bytes=SIZE)
        if left:  # a device that was a member, whose record alone leads to the volume
            with open(first, "r+b") as device:
                device.write(bytes(128 * KIB))
                device.seek(-4 * KIB, os.SEEK_END)
                device.write(bytes(4 * KIB))
        replace_record(first, uris)
        use([first], source)
        assert not touched(watch, listener)
