"""Open files below ``incoming``: handles with descriptors of files in the staging area.

Threads: one, the FUSE loop (trio); reads and writes run in worker threads.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass

import trio

from dlfs.staging import entries
from dlfs.staging.directories import Directories
from dlfs.staging.inode_table import Identity, Inode, InodeTable
from dlfs.staging.wire import Backing, Opened

ROUND_SECONDS = 0.1
ROUNDS = 20
"""Rounds without a close after which a seal gives up waiting for files that are open for writing.

The kernel reports the last close of a file in the background, some time after the program's close
has returned. Counting rounds rather than seconds allows for a process that gets no processor time.
"""


@dataclass(eq=False)
class OpenFile:
    """A file handle.

    Attributes:
        inode: inode of the file.
        descriptor: descriptor of the file in the staging area.
        writable: True if it was opened for writing.
    """

    inode: Inode
    descriptor: int
    writable: bool


class OpenFiles:
    """All open files of a mount, by handle.

    Args:
        table: the inodes; must outlive this object.
        directories: the directories of the staging area; must outlive this object.
    """

    def __init__(self, table: InodeTable, directories: Directories) -> None:
        self._table = table
        self._directories = directories
        self._run = directories.run
        self._files: dict[int, OpenFile] = {}
        self._last_handle = 0
        self.backing = Backing()
        """Registers files with the kernel; replaced when the kernel offers that."""

    def close(self) -> None:
        """Close all files, even if programs still use them."""
        for file in self._files.values():
            os.close(file.descriptor)
        self._files.clear()

    def add(self, inode: Inode, descriptor: int, flags: int) -> Opened:
        """Add a handle for a file that was opened with these flags.

        The kernel demands that all handles of a file are passed through, or none. A write to a file
        that sets user or group must clear these bits, so it comes to the server.
        """
        if not inode.handles:
            sets_ids = os.fstat(descriptor).st_mode & (stat.S_ISUID | stat.S_ISGID)
            inode.backing = 0 if sets_ids else self.backing.open(descriptor)
        self._last_handle += 1
        file = OpenFile(inode, descriptor, is_writing(flags))
        self._files[self._last_handle] = file
        inode.handles.add(file)
        return Opened(self._last_handle, inode.backing)

    def get(self, fh: int | None) -> OpenFile | None:
        """Return the file of a handle."""
        return None if fh is None else self._files.get(fh)

    def any_of(self, inode: Inode) -> OpenFile | None:
        """Return one of the handles on a file, which shows it whatever its names are, or None."""
        return next((each for each in inode.handles if isinstance(each, OpenFile)), None)

    async def writer_in(self, dataset: Inode) -> bytes | None:
        """Return the path of a file that stays open for writing for a while, or None.

        Args:
            dataset: the dataset that the file lies in; its names must not change meanwhile.

        Raises:
            OSError: the names of the dataset cannot be read.
        """
        others = await self._find_other_names(dataset)
        writers = self._writers(dataset, others)
        rounds = ROUNDS
        while writers and rounds:
            await trio.sleep(ROUND_SECONDS)
            before, writers = len(writers), self._writers(dataset, others)
            rounds = ROUNDS if len(writers) < before else rounds - 1
        return next(iter(writers), None)

    def _writers(self, dataset: Inode, others: dict[Identity, bytes]) -> list[bytes]:
        """Return paths of the files of a dataset that are open for writing."""
        writers = []
        for file in self._files.values():
            if file.writable and file.inode.is_in(dataset):
                writers.append(file.inode.path)
            elif file.writable and file.inode.identity in others:
                writers.append(others[file.inode.identity])
        return writers

    async def _find_other_names(self, dataset: Inode) -> dict[Identity, bytes]:
        """Find files that are open for writing by a name elsewhere, but have one in a dataset.

        The dataset is searched only if a file that is open for writing elsewhere may have several
        names. The kernel need not know them.

        Returns:
            A path below ``incoming`` for the identity of each file.
        """
        wanted = {
            file.inode.identity
            for file in self._files.values()
            if file.writable and not file.inode.is_in(dataset) and _may_have_other_names(file)
        }
        if not wanted:
            return {}
        async with self._directories.opened(dataset) as directory:
            found = await self._run(entries.find_files, directory, wanted)
        return {identity: dataset.path + b"/" + path for identity, path in found.items()}

    # ---- handlers --------------------------------------------------------------------------------

    async def read(self, fh: int, off: int, size: int) -> bytes:
        """Read from a file."""
        return await self._run(os.pread, self._files[fh].descriptor, size, off)

    async def write(self, fh: int, off: int, buf: bytes | memoryview, *, clears_ids: bool) -> int:
        """Write to a file. With ``clears_ids``, clear the bits that set user and group."""
        descriptor = self._files[fh].descriptor
        if clears_ids:
            entries.clear_ids(descriptor, os.fstat(descriptor))
        return await self._run(entries.write_all, descriptor, buf, off)

    async def release(self, fh: int) -> None:
        """Close a file."""
        file = self._files.pop(fh)
        self._table.note_close(file.inode, file)
        if not file.inode.handles:
            self.backing.close(file.inode.backing)
            file.inode.backing = 0
        os.close(file.descriptor)

    async def fsync(self, fh: int, datasync: bool) -> None:
        """Make a file durable."""
        await self._run(os.fdatasync if datasync else os.fsync, self._files[fh].descriptor)


def _may_have_other_names(file: OpenFile) -> bool:
    """Return True if a file has several names, or only names that the kernel does not know."""
    known = 1 if file.inode.links else 0
    return os.fstat(file.descriptor).st_nlink > known


def is_writing(flags: int) -> bool:
    """Return True if the flags open a file for writing."""
    return flags & os.O_ACCMODE in (os.O_WRONLY, os.O_RDWR)
