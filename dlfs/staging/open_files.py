"""Files that programs have open below ``incoming``: read and written by descriptors on the spool.

Threads: the FUSE loop (trio); what may wait for a disk runs in a thread.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass

import trio
from pyfuse3 import FileInfo, FUSEError

from dlfs.staging import entries
from dlfs.staging.directories import Directories
from dlfs.staging.inode_numbers import INCOMING
from dlfs.staging.inode_table import Node, NodeTable

ROUND_SECONDS = 0.1
ROUNDS = 20
"""How often a seal looks again, while no file was closed, whether those open for writing still are.

The kernel tells us of the last close of a file in the background, some time after the program was
told; counting rounds instead of seconds is patient where this process gets no time to run.
"""


@dataclass(eq=False)
class OpenFile:
    """A file handle.

    Attributes:
        node: of the file.
        descriptor: on the spool.
        writable: it was opened to be written.
    """

    node: Node
    descriptor: int
    writable: bool


class OpenFiles:
    """All open files of a mount, by handle.

    Args:
        table: where their nodes are; borrowed.
        directories: whose threads make the system calls; borrowed.
    """

    def __init__(self, table: NodeTable, directories: Directories) -> None:
        self._table = table
        self._run = directories.run
        self._files: dict[int, OpenFile] = {}
        self._last_handle = INCOMING

    def close(self) -> None:
        """Close all, whatever programs still wanted of them."""
        for file in self._files.values():
            os.close(file.descriptor)
        self._files.clear()

    def add(self, node: Node, descriptor: int, flags: int) -> FileInfo:
        """Give a handle to a file that was opened with these flags."""
        self._last_handle += 1
        file = OpenFile(node, descriptor, is_writing(flags))
        self._files[self._last_handle] = file
        node.handles.add(file)
        return FileInfo(fh=self._last_handle)

    def get(self, fh: int | None) -> OpenFile | None:
        """The file of a handle."""
        return None if fh is None else self._files.get(fh)

    def of_nameless(self, node: Node) -> OpenFile:
        """A handle on a file that has no name any more.

        Raises:
            FUSEError: ESTALE: nobody has it open.
        """
        for handle in node.handles:
            if isinstance(handle, OpenFile):
                return handle
        raise FUSEError(errno.ESTALE)

    async def writer_in(self, dataset: Node) -> OpenFile | None:
        """A file of a dataset that is open for writing, and stays so for a while."""
        writers = self._writers(dataset)
        rounds = ROUNDS
        while writers and rounds:
            await trio.sleep(ROUND_SECONDS)
            before, writers = len(writers), self._writers(dataset)
            rounds = ROUNDS if len(writers) < before else rounds - 1
        return next(iter(writers), None)

    def _writers(self, dataset: Node) -> list[OpenFile]:
        return [file for file in self._files.values() if file.writable and file.node.is_in(dataset)]

    # ---- handlers --------------------------------------------------------------------------------

    async def read(self, fh: int, off: int, size: int) -> bytes:
        """Read."""
        return await self._run(os.pread, self._files[fh].descriptor, size, off)

    async def write(self, fh: int, off: int, buf: bytes) -> int:
        """Write."""
        return await self._run(entries.write_all, self._files[fh].descriptor, buf, off)

    async def release(self, fh: int) -> None:
        """Close a file."""
        file = self._files.pop(fh)
        self._table.closed(file.node, file)
        os.close(file.descriptor)

    async def fsync(self, fh: int, datasync: bool) -> None:
        """Make a file durable on the spool."""
        await self._run(os.fdatasync if datasync else os.fsync, self._files[fh].descriptor)


def is_writing(flags: int) -> bool:
    """Whether a file is opened to be written."""
    return flags & os.O_ACCMODE in (os.O_WRONLY, os.O_RDWR)
