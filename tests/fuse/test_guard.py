"""Mounts whose keeper and server are killed together."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dlfs._native.fuse import KernelConnection
from dlfs.base.units import MIB
from dlfs.mount.background import replace_server
from dlfs.mount.kept import KeptMount
from dlfs.mount.mountpoint import detach, find_mount, is_dead
from tests.fuse.keeping import NEEDS_KEEPER, kept, make_volume
from tests.fuse.mounting import SECONDS_MAX, mounted, parent_of, wait_for_exit
from tests.support.waiting import wait_for

pytestmark = NEEDS_KEEPER

FILE = 2
"""Inode number of the only file, in the root directory."""
LOOKUP, GETATTR, OPEN, READ = 1, 3, 14, 15
"""Operations of requests."""


def attributes(inode: int) -> bytes:
    mode = 0o40555 if inode == 1 else 0o100444
    return struct.pack("=6Q10I", inode, 4096, 8, *bytes(6), mode, 1, *bytes(3), 4096, 0)


def answer(connection: KernelConnection, unique: bytes, body: bytes, error: int = 0) -> None:
    header = struct.pack("=Ii8s", 16 + len(body), error, unique)
    os.write(connection.descriptor, header + body)


def store_what_is_requested(kept: KeptMount, ready: Callable[[], None]) -> None:
    """Serve a file by one thread, which stores a page for which a request waits."""
    connection = kept.connect()
    body = struct.pack("=4I2H2I", 7, 31, 4096, 0, 16, 16, 4096, 1)
    answer(connection, connection.init[8:16], body.ljust(64, b"\0"))

    def serve() -> None:
        while True:
            request = os.read(connection.descriptor, MIB)
            operation, unique, inode = struct.unpack_from("=I8sQ", request, 4)
            if operation == LOOKUP:
                answer(
                    connection, unique, struct.pack("=5Q", FILE, 0, 60, 60, 0) + attributes(FILE)
                )
            elif operation == GETATTR:
                answer(connection, unique, struct.pack("=2Q", 60, 0) + attributes(inode))
            elif operation == OPEN:
                answer(connection, unique, bytes(16))
            elif operation == READ:
                store = struct.pack("=2Q2I", FILE, 0, 4096, 0) + bytes(4096)
                answer(connection, bytes(8), store, error=4)
            else:
                answer(connection, unique, b"", error=-38)

    threading.Thread(target=serve, daemon=True).start()
    ready()
    signal.pause()


def server_of(keeper: int) -> int:
    """Return the first child: there may be another one while the guard is started."""
    return int(Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()[0])


def waits_for_a_page(process: int) -> bool:
    threads = Path(f"/proc/{process}/task").iterdir()
    return any("State:\tD" in (thread / "status").read_text() for thread in threads)


@contextlib.contextmanager
def aborted(directory: Path) -> Iterator[None]:
    """End the requests of a mount after a block; else ``sync`` hangs if the test has failed."""
    try:
        yield
    finally:
        subprocess.run(["umount", "--force", directory], stderr=subprocess.DEVNULL)


def test_a_server_ends_that_waits_for_a_page(tmp_path: Path) -> None:
    directory = tmp_path / "mnt"
    with kept(directory, [store_what_is_requested]) as keeper, aborted(directory):
        wait_for(lambda: find_mount(directory) is not None, "the mount")
        program = subprocess.Popen(["cat", directory / "file"], stderr=subprocess.PIPE)
        server = server_of(keeper)
        wait_for(lambda: waits_for_a_page(server), "the thread that stores")
        os.kill(keeper, signal.SIGKILL)
        os.kill(server, signal.SIGKILL)
        wait_for_exit(server)
        _, message = program.communicate(timeout=SECONDS_MAX)
        assert re.search(b"not connected|connection abort", message)
        assert is_dead(directory)


def processes_of(keeper: int) -> list[int]:
    """Return what runs of a keeper's session: itself, its server and its guard."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, _, _, session = (folder / "stat").read_text().rpartition(") ")[2].split()[:4]
            if int(session) == keeper and state != "Z":
                found.append(int(folder.name))
    return found


@pytest.mark.parametrize("killed", [False, True], ids=["unmounted", "after its keeper"])
def test_a_guard_ends_with_the_mount(tmp_path: Path, killed: bool) -> None:
    with mounted(make_volume(tmp_path), tmp_path / "mnt", tmp_path / "log", fuse="native") as mount:
        keeper = parent_of(mount.pid)
        wait_for(lambda: len(processes_of(keeper)) == 3, "the guard")
        if killed:
            os.kill(keeper, signal.SIGKILL)
        assert (mount / "train" / "d0" / "000").stat().st_size == 5000
        detach(str(mount.directory))
        wait_for(lambda: not processes_of(keeper), "the end of all processes")


def test_a_guard_ends_when_its_keeper_is_replaced(tmp_path: Path) -> None:
    with mounted(make_volume(tmp_path), tmp_path / "mnt", tmp_path / "log", fuse="native") as mount:
        keeper = parent_of(mount.pid)
        wait_for(lambda: len(processes_of(keeper)) == 3, "the guard")
        next_keeper = parent_of(replace_server(mount.directory).pid)
        wait_for(lambda: not processes_of(keeper), "the end of the earlier processes")
        wait_for(lambda: len(processes_of(next_keeper)) == 3, "the next guard")
        detach(str(mount.directory))
        wait_for(lambda: not processes_of(next_keeper), "the end of all processes")
