"""Directories of the spool, held by descriptors as long as they are in use, and a while longer.

A directory is opened from the nearest one that is held above it, one name at a time, and checked to
be the one that was meant; so a path is never given to the system as a whole, and renaming a
directory, or putting a symbolic link in its place, leads nobody astray.

Threads: one, the FUSE loop (trio).
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
from dlfs.staging.inode_numbers import INCOMING
from dlfs.staging.inode_table import Node

HELD_MAX = 1024
"""Descriptors of directories that are kept open for the next use."""

THREADS = 16
"""System calls on the spool at the same time: more would only wait for one disk together."""

_P = ParamSpec("_P")
_T = TypeVar("_T")


@dataclass(eq=False)
class _Held:
    descriptor: int
    users: int = 0
    dropped: bool = False

    def close_if_unused(self) -> None:
        if self.dropped and not self.users:
            os.close(self.descriptor)


class Directories:
    """The directories of a spool.

    Args:
        root: descriptor of the one that holds the datasets; borrowed.
    """

    def __init__(self, root: int) -> None:
        self._root = _Held(root, users=1)
        self._held: OrderedDict[Node, _Held] = OrderedDict()
        self._limiter = trio.CapacityLimiter(THREADS)

    async def run(self, call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Make a system call in a thread."""
        return await trio.to_thread.run_sync(lambda: call(*args, **kwargs), limiter=self._limiter)

    @asynccontextmanager
    async def hold(self, node: Node) -> AsyncIterator[int]:
        """An O_PATH descriptor of a directory, for the length of the block.

        Raises:
            StaleError: it was removed.
            OSError: ESTALE: it is another one now.
        """
        held = self._known(node) or await self._open(node)
        held.users += 1
        try:
            yield held.descriptor
        finally:
            held.users -= 1
            held.close_if_unused()

    def drop(self, node: Node) -> None:
        """Let go of a directory that was removed."""
        held = self._held.pop(node, None)
        if held is not None:
            held.dropped = True
            held.close_if_unused()

    def close(self) -> None:
        """Let go of all."""
        for node in list(self._held):
            self.drop(node)

    def _known(self, node: Node) -> _Held | None:
        if node.number == INCOMING:
            return self._root
        held = self._held.get(node)
        if held is not None:
            self._held.move_to_end(node)
        return held

    async def _open(self, node: Node) -> _Held:
        names: list[bytes] = []
        above = node
        while (start := self._known(above)) is None:
            if not above.places:
                raise StaleError(f"find directory {node.number} below incoming: it was removed")
            above, name = above.places[-1]
            names[:0] = [name, b"files"] if above.number == INCOMING else [name]
        start.users += 1
        try:
            descriptor = await self.run(entries.open_below, start.descriptor, names, node.identity)
        finally:
            start.users -= 1
            start.close_if_unused()
        self.drop(node)  # somebody else may have been as quick
        held = self._held[node] = _Held(descriptor)
        while len(self._held) > HELD_MAX:
            self.drop(next(iter(self._held)))
        return held
