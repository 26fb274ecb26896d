"""The native server over io_uring: when it is used, and what ends it."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from bench.serving import uring_offered
from dlfs._native.fuse import is_built
from dlfs.mount.mountpoint import device_of, find_mount, unmount
from dlfs.mount.options import MountOptions
from dlfs.mount.supervise.background import mount_volume
from dlfs.mount.supervise.keeper import can_keep
from tests.fuse.mounting import (
    SECONDS_MAX,
    Mount,
    Prepared,
    lacks_uring,
    mounted,
    parent_of,
    run_cli,
    wait_for_exit,
)
from tests.support.waiting import wait_for

pytestmark = [
    pytest.mark.fuse,
    pytest.mark.skipif(not is_built(), reason="built without the native server"),
    pytest.mark.skipif(lacks_uring() is not None, reason=str(lacks_uring())),
]

READERS = 6

GONE = {errno.ENOTCONN, errno.ECONNABORTED, errno.ECANCELED, errno.ENOENT}
"""Errnos of requests to a mount that is ending, or has ended."""


def read_uncached(path: Path) -> bytes:
    """Read a file whose bytes the kernel may have cached, from the server."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return file.read()


def abort(path: Path, control: Path) -> None:
    """End the connection of a mount, as an administrator does."""
    device = device_of(str(path))
    assert device is not None
    control.mkdir()
    subprocess.run(["mount", "-t", "fusectl", "none", control], check=True)
    try:
        (control / device.partition(":")[2] / "abort").write_text("1")
    finally:
        subprocess.run(["umount", control], check=True)


@contextmanager
def reading(mount: Mount, prepared: Prepared) -> Iterator[set[int]]:
    """Read files by several threads in a block; give the errors that they got."""
    failed: set[int] = set()
    wrong: list[bytes] = []
    stop = threading.Event()

    def read(first: int) -> None:
        paths = sorted(prepared.files)
        at = first
        while not stop.is_set():
            path = paths[at % len(paths)]
            at += READERS + 1
            try:
                data = read_uncached(mount / "train" / os.fsdecode(path))
            except OSError as error:
                failed.add(error.errno or 0)
                stop.wait(0.01)
            else:
                if data != prepared.files[path]:
                    wrong.append(path)

    threads = [threading.Thread(target=read, args=(first,)) for first in range(READERS)]
    for thread in threads:
        thread.start()
    try:
        yield failed
    finally:
        stop.set()
        for thread in threads:
            thread.join(SECONDS_MAX)
            assert not thread.is_alive(), "a request was never answered"
    assert not wrong


def test_the_choice(plain_volume: Prepared, tmp_path: Path) -> None:
    directory, log = tmp_path / "mnt", tmp_path / "log"
    directory.mkdir()
    options = MountOptions(fuse="native")
    with uring_offered():
        done = run_cli("mount", plain_volume.volume, directory, "--log", log, "--json")
    report = json.loads(done.stdout)
    transports = [report["transport"]]
    kept = [parent_of(report["pid"]) != 1]
    unmount(directory)
    for offered, wanted in ((False, True), (True, False)):
        with uring_offered(offered):
            mounted = mount_volume(
                str(plain_volume.volume), directory, replace(options, uring=wanted), log=log
            )
        transports.append(mounted.transport)
        kept.append(parent_of(mounted.pid) != 1)
        unmount(directory)
        wait_for_exit(mounted.pid)
    assert transports == ["io_uring", "/dev/fuse", "/dev/fuse"]
    can = can_keep(MountOptions(uring=False))
    assert kept == [False, can, can]
    said = [line.partition(": requests come ")[2] for line in log.read_text().splitlines()]
    assert [words for words in said if words] == [
        f"over io_uring, in {os.cpu_count()} queues",
        "through /dev/fuse: the kernel does not offer io_uring (Linux 6.14 with fuse.enable_uring "
        "does)",
        "through /dev/fuse: io_uring is switched off",
    ]


@pytest.mark.parametrize("how", ["kill", "abort", "lazy", "stop", "term"])
def test_ending_while_in_use(plain_volume: Prepared, tmp_path: Path, how: str) -> None:
    directory = tmp_path / "mnt"
    with mounted(plain_volume.volume, directory, tmp_path / "log", fuse="native", uring=True) as m:
        assert m.transport == "io_uring"
        with reading(m, plain_volume) as failed:
            (directory / "train" / "large").read_bytes()
            if how == "stop":  # requests wait for a server that is suspended, and then go on
                os.kill(m.pid, signal.SIGSTOP)
                os.kill(m.pid, signal.SIGCONT)
                (directory / "train" / "large").read_bytes()
            assert not failed
            if how == "abort":
                abort(directory, tmp_path / "control")
            elif how == "lazy":
                unmount(directory, lazy=True)
            else:
                os.kill(m.pid, signal.SIGKILL if how == "kill" else signal.SIGTERM)
            wait_for_exit(m.pid)
        assert failed <= GONE
        assert (find_mount(directory) is None) == (how in ("lazy", "stop", "term"))


def test_a_server_that_is_bound_to_one_processor(plain_volume: Prepared, tmp_path: Path) -> None:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        with mounted(
            plain_volume.volume, tmp_path / "mnt", tmp_path / "log", fuse="native", uring=True
        ) as mount:
            for processor in allowed:
                os.sched_setaffinity(0, {processor})
                for path, data in plain_volume.files.items():
                    assert read_uncached(mount / "train" / os.fsdecode(path)) == data
            for task in os.listdir(f"/proc/{mount.pid}/task"):
                assert os.sched_getaffinity(int(task)) == {min(allowed)}
    finally:
        os.sched_setaffinity(0, allowed)


def test_threads_yield_while_one_program_reads(plain_volume: Prepared, tmp_path: Path) -> None:
    """So that the program stays on the processor that answers it; see threads/yielding.h."""
    path = tmp_path / "mnt" / "train" / "large"
    with mounted(
        plain_volume.volume, tmp_path / "mnt", tmp_path / "log", fuse="native", uring=True
    ) as mount:

        def yielding() -> bool:
            tasks = [int(task) for task in os.listdir(f"/proc/{mount.pid}/task")]
            return os.SCHED_IDLE in map(os.sched_getscheduler, tasks)

        seen = False
        until = time.monotonic() + SECONDS_MAX
        while not seen and time.monotonic() < until:
            read_uncached(path)
            seen = yielding()
        assert seen == (len(os.sched_getaffinity(0)) > 1)
        wait_for(lambda: not yielding(), "the threads to yield no more")
