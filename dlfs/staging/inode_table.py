"""What the kernel knows of the tree below ``incoming``: a number for each file, and its names.

A node is made when the kernel is first told of a file or directory and goes when the kernel has
forgotten it, nothing on it is open and no other node lies in it. Two names of one file (hard links)
are one node, found by the file's identity on the spool; numbers are given out one after the other
and never twice, so an identity that the spool's file system uses again is a new node.

The kernel serialises what changes one directory, and takes the request for a change only after the
answers to look-ups in that directory; so what an answer says is still so when it is noted here.

Pure bookkeeping: no I/O. Threads: one, the FUSE loop.
"""

from __future__ import annotations

import os
from typing import Any

from dlfs.errors import StaleError
from dlfs.staging.inode_numbers import INCOMING

Identity = tuple[int, int]
"""Device and inode number on the spool's file system."""


class Node:
    """A file or directory below ``incoming``, or ``incoming`` itself.

    Attributes:
        number: its inode number on the mount.
        identity: on the spool.
        places: the (directory, name) pairs that lead to it and are known; a directory has one.
        lookups: how often the kernel was told of it, less what it has forgotten.
        children: places of other nodes in it.
        handles: what is open on it.
        last: of a directory that is gone, what it was; programs may still have it open.
    """

    __slots__ = (
        "__weakref__",
        "children",
        "handles",
        "identity",
        "last",
        "lookups",
        "number",
        "places",
    )

    def __init__(self, number: int, identity: Identity) -> None:
        self.number = number
        self.identity = identity
        self.places: list[tuple[Node, bytes]] = []
        self.lookups = 0
        self.children = 0
        self.handles: set[Any] = set()
        self.last: os.stat_result | None = None

    @property
    def path(self) -> bytes:
        """Its path below ``incoming``, for people; of a removed one, what is known."""
        parts: list[bytes] = []
        node = self
        while node.places:
            node, name = node.places[-1]
            parts.append(name)
        return b"/".join(reversed(parts))

    def is_in(self, dataset: Node) -> bool:
        """Whether it lies in a dataset."""
        node = self
        while node.places:
            if node is dataset:
                return True
            node = node.places[-1][0]
        return False

    def dataset(self) -> Node:
        """The directory in ``incoming`` that it lies in; itself if it is one.

        Raises:
            StaleError: it was removed, or lies in what was.
        """
        node = self
        while node.places:
            parent = node.places[-1][0]
            if parent.number == INCOMING:
                return node
            node = parent
        raise StaleError(f"find file {self.number} below incoming: it was removed or sealed")


class NodeTable:
    """All nodes of one mount.

    Args:
        identity: of the directory that holds the datasets being written.
    """

    def __init__(self, identity: Identity) -> None:
        self.root = Node(INCOMING, identity)
        self._by_number = {INCOMING: self.root}
        self._by_identity = {identity: self.root}
        self._last_number = INCOMING

    def __len__(self) -> int:
        return len(self._by_number)

    def get(self, number: int) -> Node:
        """A node by its number.

        Raises:
            StaleError: there is none: it is of another mount.
        """
        node = self._by_number.get(number)
        if node is None:
            raise StaleError(f"find file {number} below incoming: this mount has not shown it")
        return node

    def known(self, identity: Identity) -> Node | None:
        """The node of a file that has a name, if the kernel was told of it."""
        return self._by_identity.get(identity)

    def found(self, parent: Node, name: bytes, identity: Identity, *, directory: bool) -> Node:
        """Note that a name leads to a file, and that the kernel is told so."""
        node = self._by_identity.get(identity)
        if node is None:
            self._last_number += 1
            node = Node(self._last_number, identity)
            self._by_number[node.number] = self._by_identity[identity] = node
        self._place(node, parent, name, only=directory)
        node.lookups += 1
        return node

    def removed(self, parent: Node, name: bytes, identity: Identity, *, last: bool) -> Node | None:
        """Note that a name is gone.

        Args:
            parent: where it was.
            name: that is gone.
            identity: of what it led to.
            last: that has no other name.

        Returns:
            What it led to, if the kernel was ever told.
        """
        node = self._by_identity.get(identity)
        if node is None:
            return None
        if (parent, name) in node.places:
            node.places.remove((parent, name))
            parent.children -= 1
        if last:
            self._detach(node)
        self._drop_if_unused(node)
        self._drop_if_unused(parent)
        return node

    def renamed(
        self, old: tuple[Node, bytes], new: tuple[Node, bytes], identity: Identity
    ) -> Node | None:
        """Note that a file has a name instead of another one."""
        node = self._by_identity.get(identity)
        if node is None:
            return None
        if old in node.places:
            node.places.remove(old)
            old[0].children -= 1
        self._place(node, *new, only=False)
        self._drop_if_unused(old[0])
        return node

    def forget(self, number: int, lookups: int) -> None:
        """Note that the kernel has forgotten a node so many times."""
        node = self._by_number.get(number)
        if node is not None:
            node.lookups -= lookups
            self._drop_if_unused(node)

    def closed(self, node: Node, handle: Any) -> None:
        """Note that a handle on a node is closed."""
        node.handles.discard(handle)
        self._drop_if_unused(node)

    # ---- inside ----------------------------------------------------------------------------------

    def _place(self, node: Node, parent: Node, name: bytes, *, only: bool) -> None:
        if (parent, name) in node.places:
            return
        if only:
            self._leave_places(node)
        node.places.append((parent, name))
        parent.children += 1

    def _leave_places(self, node: Node) -> None:
        for parent, _ in node.places:
            parent.children -= 1
        places, node.places = node.places, []
        for parent, _ in places:
            self._drop_if_unused(parent)

    def _detach(self, node: Node) -> None:
        """The file has no name any more, and its identity may be used again."""
        if self._by_identity.get(node.identity) is node:
            del self._by_identity[node.identity]
        self._leave_places(node)

    def _drop_if_unused(self, node: Node) -> None:
        while node is not self.root and node.lookups <= 0 and not node.children:
            if node.handles or self._by_number.pop(node.number, None) is None:
                return
            if self._by_identity.get(node.identity) is node:
                del self._by_identity[node.identity]
            if not node.places:
                return
            places, node.places = node.places, []
            for parent, _ in places:
                parent.children -= 1
            for parent, _ in places[1:]:
                self._drop_if_unused(parent)
            node = places[0][0]
