"""Files below ``incoming`` that programs rename, link or remove while other requests use them.

The kernel names a file by its inode, and the server finds it by its name. The file may be renamed
before the server has found it; then the server looks for it again. If it has lost its names, the
server uses a descriptor: the one that the inode table keeps until the kernel has forgotten the
file, or that of an open handle. So a program that has looked up a name can open the file, even if
another program replaces it at once.

A rename to another dataset runs alone: no other request may add or move a name while the server
counts the names of the moved files.

Threads: one, the FUSE loop (trio); system calls run in worker threads.
"""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TypeVar

import trio

from dlfs.errors import StaleError
from dlfs.staging import entries
from dlfs.staging.directories import Directories
from dlfs.staging.inode_table import Inode, InodeTable
from dlfs.staging.open_files import OpenFiles

TRIES = 20
"""Most times that a file is looked for by its name while programs rename files."""

_GONE = (errno.ENOENT, errno.ESTALE)
_T = TypeVar("_T")


class Moves:
    """Changes of names under way, and the way to a file meanwhile.

    Args:
        table: the inodes; must outlive this object.
        directories: runs system calls in worker threads; must outlive this object.
        files: the open files; must outlive this object.
    """

    def __init__(self, table: InodeTable, directories: Directories, files: OpenFiles) -> None:
        self._table = table
        self._run = directories.run
        self._files = files
        self._turn = trio.Lock()
        self._under_way: set[trio.Event] = set()
        self._begun = 0

    @asynccontextmanager
    async def moving(self) -> AsyncIterator[None]:
        """Rename, link or remove a file in a block, up to the note of it in the table."""
        async with self._turn:
            pass
        with self._registered():
            yield

    @asynccontextmanager
    async def moving_alone(self) -> AsyncIterator[None]:
        """Do the same while no other such block runs."""
        async with self._turn:
            for move in list(self._under_way):
                await move.wait()
            with self._registered():
                yield

    @contextmanager
    def _registered(self) -> Iterator[None]:
        ended = trio.Event()
        self._under_way.add(ended)
        self._begun += 1
        try:
            yield
        finally:
            self._under_way.remove(ended)
            ended.set()

    async def call_on(
        self,
        inode: Inode,
        by_name: Callable[[Inode, bytes], Awaitable[_T]],
        by_descriptor: Callable[[int], _T],
    ) -> _T:
        """Call a function with the directory and the name of a file, or with a descriptor of it.

        A file may be renamed before the function has found it. Then the function is called again,
        with the new name.

        Args:
            inode: inode of the file.
            by_name: the function for a file with a known name.
            by_descriptor: the function for any other file, to run in a worker thread.

        Raises:
            OSError: ESTALE: the file has no known name, and the server has no descriptor of it.
        """
        for tries in range(1, TRIES + 1):
            if not inode.links:
                break
            before, moving = self._begun, bool(self._under_way)
            try:
                return await by_name(*inode.links[-1])
            except (StaleError, OSError) as error:
                is_gone = isinstance(error, StaleError) or error.errno in _GONE
                moving = moving or before != self._begun
                if not is_gone or not moving or tries == TRIES:
                    raise
            for move in list(self._under_way):
                await move.wait()
        unlinked = os.dup(self._unlinked(inode))  # the original may be closed meanwhile
        with entries.closing(unlinked):
            return await self._run(by_descriptor, unlinked)

    def _unlinked(self, inode: Inode) -> int:
        """Return a descriptor of a file without a known name; fail with ESTALE without one."""
        unlinked = self._table.unlinked(inode)
        if unlinked is not None:
            return unlinked
        opened = self._files.any_of(inode)
        if opened is None:
            raise entries.refusal(errno.ESTALE)
        return opened.descriptor
