"""The inodes below ``incoming`` that the kernel knows: their numbers and names.

An inode is added when the kernel first learns of a file or directory. It is removed when the kernel
has forgotten it, no handle on it is open and no other inode lies in it. Two names of one file (hard
links) are one inode, found by the file's identity in the staging area. Numbers are consecutive and
never reused, so a new file that gets the identity of a deleted one is a new inode.

The kernel serialises changes of one directory, and starts a change only after look-ups in that
directory have been answered. So an answer is still true when it is noted here.

A program may open a file that has lost its names since the kernel looked it up. So the table keeps
a descriptor of such a file until the kernel has forgotten the inode. The number of these
descriptors is limited; the oldest are closed first.

Bookkeeping without other I/O. Threads: one, the FUSE loop.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

from dlfs.errors import StaleError
from dlfs.staging.inode_numbers import ROOT

Identity = tuple[int, int]
"""Device and inode number of a file on the staging area's file system."""

UNLINKED_MAX = 256
"""Most descriptors of files without a known name.

A program needs such a descriptor only from the look-up of a name until the file is open.
"""


class Inode:
    """A file or directory below ``incoming``, or ``incoming`` itself.

    Attributes:
        number: inode number on the mount.
        identity: device and inode number in the staging area.
        links: its known names, as pairs of directory and name; a directory has one.
        lookups: look-ups that the kernel has not forgotten yet.
        children: links of other inodes in this directory.
        handles: open file and directory handles.
        last_status: attributes of a removed file or directory, which programs may still use.
        backing: file to which the kernel passes reads and writes of the open handles through; 0 if
            they come to the server.
    """

    __slots__ = (
        "__weakref__",
        "backing",
        "children",
        "handles",
        "identity",
        "last_status",
        "links",
        "lookups",
        "number",
    )

    def __init__(self, number: int, identity: Identity) -> None:
        self.number = number
        self.identity = identity
        self.links: list[tuple[Inode, bytes]] = []
        self.lookups = 0
        self.children = 0
        self.handles: set[Any] = set()
        self.last_status: os.stat_result | None = None
        self.backing = 0

    @property
    def path(self) -> bytes:
        """Path below ``incoming``, for messages; incomplete for a removed file."""
        parts: list[bytes] = []
        inode = self
        while inode.links:
            inode, name = inode.links[-1]
            parts.append(name)
        return b"/".join(reversed(parts))

    def is_in(self, dataset: Inode) -> bool:
        """Return True if the file lies in a dataset."""
        inode = self
        while inode.links:
            if inode is dataset:
                return True
            inode = inode.links[-1][0]
        return False

    def dataset(self) -> Inode:
        """Return the dataset that the file lies in, a directory in ``incoming``, or itself.

        Raises:
            StaleError: the file or a directory above it was removed.
        """
        inode = self
        while inode.links:
            parent = inode.links[-1][0]
            if parent.number == ROOT:
                return inode
            inode = parent
        raise StaleError(f"find file {self.number} below incoming: it was removed or sealed")


class InodeTable:
    """All inodes below ``incoming`` of one mount.

    Args:
        identity: identity of the directory ``datasets`` of the staging area.
    """

    def __init__(self, identity: Identity) -> None:
        self.root = Inode(ROOT, identity)
        self._by_number = {ROOT: self.root}
        self._by_identity = {identity: self.root}
        self._unlinked: dict[Inode, int] = {}  # O_PATH descriptors, the oldest first
        self._last_number = ROOT

    def __len__(self) -> int:
        return len(self._by_number)

    def close(self) -> None:
        """Close the descriptors of all files without a name."""
        for inode in list(self._unlinked):
            self._close_unlinked(inode)

    def get(self, number: int) -> Inode:
        """Return an inode by its number.

        Raises:
            StaleError: there is none; the number comes from another mount.
        """
        inode = self._by_number.get(number)
        if inode is None:
            raise StaleError(f"find file {number} below incoming: this mount has not shown it")
        return inode

    def find(self, identity: Identity) -> Inode | None:
        """Return the inode of a file that has a name, or None if the kernel does not know it."""
        return self._by_identity.get(identity)

    def note_lookup(
        self, parent: Inode, name: bytes, identity: Identity, *, directory: bool
    ) -> Inode:
        """Note that a look-up of a name found a file; add its inode if it is new."""
        inode = self._by_identity.get(identity)
        if inode is None:
            self._last_number += 1
            inode = Inode(self._last_number, identity)
            self._by_number[inode.number] = self._by_identity[identity] = inode
        self._add_link(inode, parent, name, only=directory)
        inode.lookups += 1
        return inode

    def note_removal(
        self, parent: Inode, name: bytes, identity: Identity, *, last: bool
    ) -> Inode | None:
        """Note that a name was removed.

        Args:
            parent: directory of the name.
            name: the removed name.
            identity: identity of the file that had the name.
            last: True if the file has no other name.

        Returns:
            The inode of the file, or None if the kernel does not know it.
        """
        inode = self._by_identity.get(identity)
        if inode is None:
            return None
        if (parent, name) in inode.links:
            inode.links.remove((parent, name))
            parent.children -= 1
        if last:
            self._detach(inode)
        self._drop_if_unused(inode)
        self._drop_if_unused(parent)
        return inode

    def keep_open(self, inode: Inode, descriptor: int) -> None:
        """Keep a file open that has lost a name, if it has no other known name.

        Args:
            inode: inode of the file, which the kernel may have forgotten.
            descriptor: descriptor of the file, opened with O_PATH; the table duplicates it.
        """
        if inode.links or inode in self._unlinked or inode.number not in self._by_number:
            return
        with suppress(OSError):  # too many open files: the inode becomes stale
            self._unlinked[inode] = os.dup(descriptor)
        while len(self._unlinked) > UNLINKED_MAX:
            self._close_unlinked(next(iter(self._unlinked)))

    def unlinked(self, inode: Inode) -> int | None:
        """Return the O_PATH descriptor of a file without a known name, or None."""
        return self._unlinked.get(inode)

    def note_rename(
        self, old: tuple[Inode, bytes], new: tuple[Inode, bytes], identity: Identity
    ) -> Inode | None:
        """Note that a file was renamed."""
        inode = self._by_identity.get(identity)
        if inode is None:
            return None
        if old in inode.links:
            inode.links.remove(old)
            old[0].children -= 1
        self._add_link(inode, *new, only=False)
        self._drop_if_unused(old[0])
        return inode

    def forget(self, number: int, lookups: int) -> None:
        """Note that the kernel has forgotten that many look-ups of an inode."""
        inode = self._by_number.get(number)
        if inode is not None:
            inode.lookups -= lookups
            self._drop_if_unused(inode)

    def note_close(self, inode: Inode, handle: Any) -> None:
        """Note that a handle on an inode was closed."""
        inode.handles.discard(handle)
        self._drop_if_unused(inode)

    # ---- inside ----------------------------------------------------------------------------------

    def _add_link(self, inode: Inode, parent: Inode, name: bytes, *, only: bool) -> None:
        if (parent, name) in inode.links:
            return
        if only:
            self._drop_links(inode)
        inode.links.append((parent, name))
        parent.children += 1

    def _drop_links(self, inode: Inode) -> None:
        for parent, _ in inode.links:
            parent.children -= 1
        links, inode.links = inode.links, []
        for parent, _ in links:
            self._drop_if_unused(parent)

    def _detach(self, inode: Inode) -> None:
        """Note that the file has no name any more; another file may get its identity."""
        if self._by_identity.get(inode.identity) is inode:
            del self._by_identity[inode.identity]
        self._drop_links(inode)

    def _close_unlinked(self, inode: Inode) -> None:
        descriptor = self._unlinked.pop(inode, None)
        if descriptor is not None:
            os.close(descriptor)

    def _drop_if_unused(self, inode: Inode) -> None:
        while inode is not self.root and inode.lookups <= 0 and not inode.children:
            if inode.handles or self._by_number.pop(inode.number, None) is None:
                return
            self._close_unlinked(inode)
            if self._by_identity.get(inode.identity) is inode:
                del self._by_identity[inode.identity]
            if not inode.links:
                return
            links, inode.links = inode.links, []
            for parent, _ in links:
                parent.children -= 1
            for parent, _ in links[1:]:
                self._drop_if_unused(parent)
            inode = links[0][0]
