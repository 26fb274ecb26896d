"""A mount over a disk that hangs: programs get an error in time, and so ends the mount."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

import dlfs
from dlfs.base.deadlines import CALL_TIMEOUT_MS
from dlfs.base.units import KIB, MIB
from dlfs.mount.mountpoint import find_mount
from tests.fault.silent_world import hang
from tests.fuse.mounting import errno_of, mounted, run_cli, served_by, wait_for_exit
from tests.support.nvme import DEFAULT_NQN, Namespace, ScriptedTarget, Subsystem
from tests.support.volumes import write_dataset
from tests.support.waiting import wait_for

pytestmark = pytest.mark.fuse

FILES = {b"%03d" % number: bytes([number]) * 9000 for number in range(40)}
BOUND_S = CALL_TIMEOUT_MS / 1000
SLACK_S = 10.0
"""More than a busy machine adds."""


@pytest.mark.parametrize(
    ("server", "end"),
    [("native", "SIGTERM"), ("pyfuse3", "SIGTERM"), ("pyfuse3", "umount")],
    indirect=["server"],
)
def test_cat_ends_and_so_does_the_mount(server: str, tmp_path: Path, end: str) -> None:
    subsystem = Subsystem(DEFAULT_NQN, [Namespace(24 * MIB, block_bytes=4096)])
    with ScriptedTarget([subsystem]) as target:
        dlfs.format_volume(target.uri(), chunk_bytes=16 * KIB)
        write_dataset(target.uri(), "train", FILES)
        uri = target.uri(timeout_ms=300, reconnect_ms=300)
        with mounted(uri, tmp_path / "mnt", tmp_path / "log", **served_by(server)) as mount:
            assert (mount / "train/000").read_bytes() == FILES[b"000"]
            target.play(hang())
            began = time.monotonic()
            cat = subprocess.run(
                ["cat", mount / "train/030"], capture_output=True, env=os.environ | {"LC_ALL": "C"}
            )
            assert time.monotonic() - began < BOUND_S + SLACK_S
            assert cat.returncode == 1
            assert os.strerror(errno.ETIMEDOUT).encode() in cat.stderr
            began = time.monotonic()
            for number in range(20, 30):  # what is known to hang is not waited for again
                path = mount / f"train/{number:03d}"
                assert errno_of(path.read_bytes) == errno.ETIMEDOUT
            assert time.monotonic() - began < SLACK_S
            assert len(os.listdir(mount / "train")) == len(FILES)
            began = time.monotonic()
            if end == "umount":
                done = run_cli("umount", mount.directory)
                assert done.returncode == 0, done.stderr
            else:
                os.kill(mount.pid, signal.SIGTERM)
            wait_for(lambda: find_mount(mount.directory) is None, "the end of the mount")
            wait_for_exit(mount.pid)
            assert time.monotonic() - began < BOUND_S + SLACK_S
