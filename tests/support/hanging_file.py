"""A local file whose reads hang: a file system in user space, served by a child process.

``python -m tests.support.hanging_file FILE MOUNT_POINT`` serves a copy of nothing but FILE, as
``MOUNT_POINT/disk``. A byte on its standard input ``h`` has it leave reads unanswered from then on,
``g`` has it answer these and all others. It says ``.`` after each byte. When it is killed, the
kernel ends the reads with an error.
"""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

NAME = b"disk"


class HangingFile:
    """The file, and its server."""

    def __init__(self, source: Path, mount_point: Path) -> None:
        mount_point.mkdir()
        self.mount_point = mount_point
        self.path = mount_point / os.fsdecode(NAME)
        command = [sys.executable, "-m", "tests.support.hanging_file"]
        self.process = subprocess.Popen(
            [*command, str(source), str(mount_point)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._wait()

    def _wait(self) -> None:
        answer = cast("IO[bytes]", self.process.stdout).read(1)
        assert answer == b"."

    def _say(self, word: bytes) -> None:
        stdin = cast("IO[bytes]", self.process.stdin)
        stdin.write(word)
        stdin.flush()
        self._wait()

    def hang(self) -> None:
        """Leave reads unanswered from now on."""
        self._say(b"h")

    def go_on(self) -> None:
        """Answer all reads."""
        self._say(b"g")

    def close(self) -> None:
        """End the server, and with it the reads that hang."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            cast("IO[bytes]", stream).close()
        subprocess.run(["fusermount3", "-u", "-z", self.mount_point], check=True)


@contextlib.contextmanager
def hanging_file(source: Path, mount_point: Path) -> Iterator[HangingFile]:
    """Serve a file for the duration of a block."""
    file = HangingFile(source, mount_point)
    try:
        yield file
    finally:
        file.close()


def _serve(source: str, mount_point: str) -> None:
    import pyfuse3
    import trio

    descriptor = os.open(source, os.O_RDWR)
    answers = trio.Event()
    answers.set()

    class Server(pyfuse3.Operations):
        async def getattr(self, inode, ctx=None):  # type: ignore[no-untyped-def]
            status = os.fstat(descriptor)
            entry = pyfuse3.EntryAttributes()
            entry.st_ino = inode
            is_root = inode == pyfuse3.ROOT_INODE
            entry.st_mode = 0o40755 if is_root else 0o100644
            entry.st_nlink = 1
            entry.st_size = 0 if is_root else status.st_size
            entry.st_blksize = 4096
            entry.attr_timeout = entry.entry_timeout = 3600
            return entry

        async def lookup(self, parent, name, ctx=None):  # type: ignore[no-untyped-def]
            if name != NAME:
                raise pyfuse3.FUSEError(errno.ENOENT)
            return await self.getattr(pyfuse3.ROOT_INODE + 1)  # type: ignore[no-untyped-call]

        async def open(self, inode, flags, ctx):  # type: ignore[no-untyped-def]
            return pyfuse3.FileInfo(fh=inode, direct_io=True)

        async def read(self, fh, offset, size):  # type: ignore[no-untyped-def]
            await answers.wait()
            return os.pread(descriptor, size, offset)

        async def write(self, fh, offset, data):  # type: ignore[no-untyped-def]
            return os.pwrite(descriptor, data, offset)

        async def fsync(self, fh, datasync):  # type: ignore[no-untyped-def]
            os.fsync(descriptor)

    async def main() -> None:
        nonlocal answers
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pyfuse3.main)
            os.write(1, b".")
            while True:
                await trio.lowlevel.wait_readable(0)
                word = os.read(0, 1)
                if word == b"h":
                    answers = trio.Event()
                elif word == b"g":
                    answers.set()
                else:
                    break
                os.write(1, b".")
            nursery.cancel_scope.cancel()

    pyfuse3.init(Server(), mount_point, {*pyfuse3.default_options, "fsname=dlfs-hanging"})
    try:
        trio.run(main)
    finally:
        pyfuse3.close()


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2])
