"""Open directories of the staging area, cached by inode.

A directory is opened from the nearest cached one above it, one name at a time, and then compared
with the expected identity. No path is ever passed to the system as a whole; so a renamed directory,
or a symbolic link in its place, cannot lead outside the staging area.

Threads: one, the FUSE loop (trio); system calls run in worker threads.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import trio

from dlfs.errors import StaleError
from dlfs.staging import entries
from dlfs.staging.inode_numbers import ROOT
from dlfs.staging.inode_table import Inode

CACHED_MAX = 1024
"""Most directories that stay open for the next use."""

THREADS = 16
"""Most system calls on the staging area at a time: they all use the same disk."""

_P = ParamSpec("_P")
_T = TypeVar("_T")


@dataclass(eq=False)
class _OpenDirectory:
    """A descriptor (O_PATH), closed when it was dropped from the cache and has no user."""

    descriptor: int
    users: int = 0
    dropped: bool = False

    def close_if_unused(self) -> None:
        if self.dropped and not self.users:
            os.close(self.descriptor)


class Directories:
    """The directories of a staging area.

    Args:
        root: descriptor of the directory ``datasets``; must outlive this object.
    """

    def __init__(self, root: int) -> None:
        self._root = _OpenDirectory(root, users=1)
        self._cached: OrderedDict[Inode, _OpenDirectory] = OrderedDict()
        self._limiter = trio.CapacityLimiter(THREADS)

    async def run(self, call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Run a system call in a worker thread."""
        return await trio.to_thread.run_sync(lambda: call(*args, **kwargs), limiter=self._limiter)

    @asynccontextmanager
    async def opened(self, inode: Inode) -> AsyncIterator[int]:
        """Open a directory for the duration of a block; the value is an O_PATH descriptor.

        Raises:
            StaleError: the directory was removed.
            OSError: ESTALE: another directory has its name.
        """
        found = self._known(inode) or await self._open(inode)
        found.users += 1
        try:
            yield found.descriptor
        finally:
            found.users -= 1
            found.close_if_unused()

    def close_one(self, inode: Inode) -> None:
        """Close a directory, which may have been removed, after its last use."""
        found = self._cached.pop(inode, None)
        if found is not None:
            found.dropped = True
            found.close_if_unused()

    def close(self) -> None:
        """Close all directories after their last use."""
        for inode in list(self._cached):
            self.close_one(inode)

    def _known(self, inode: Inode) -> _OpenDirectory | None:
        if inode.number == ROOT:
            return self._root
        found = self._cached.get(inode)
        if found is not None:
            self._cached.move_to_end(inode)
        return found

    async def _open(self, inode: Inode) -> _OpenDirectory:
        names: list[bytes] = []
        above = inode
        while (start := self._known(above)) is None:
            if not above.links:
                raise StaleError(f"find directory {inode.number} below incoming: it was removed")
            above, name = above.links[-1]
            names[:0] = [name, b"files"] if above.number == ROOT else [name]
        start.users += 1
        try:
            descriptor = await self.run(entries.open_below, start.descriptor, names, inode.identity)
        finally:
            start.users -= 1
            start.close_if_unused()
        self.close_one(inode)  # another task may have opened it meanwhile
        found = self._cached[inode] = _OpenDirectory(descriptor)
        while len(self._cached) > CACHED_MAX:
            self.close_one(next(iter(self._cached)))
        return found
