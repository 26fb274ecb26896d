"""The sample directory of a dataset as a tree of files and directories.

Directories with samples below them are not stored. The paths of the samples are in byte order, so a
directory is a range of indices. An entry is found by its whole path or by bisection, in O(log N).
Directories without samples are stored, and numbered from N on. The position in a listing is the
index at which the next child starts, those without samples last; it stays valid forever, so a
listing resumes anywhere.

Bytes from media are not trusted: a name that no file system can show, or a listing that would not
advance, raises FormatError.

Threads: one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

from dlfs.base.wording import quote
from dlfs.directory import DirectoryChild, Entry, FrozenDirectory
from dlfs.errors import FormatError, NotFoundError, StaleError
from dlfs.format.constants import COMPONENT_BYTES_MAX, PATH_BYTES_MAX
from dlfs.mount.inode_numbers import DATASET_DEPTH, FILE_DEPTH

PREFIXES_MAX = 4096
"""Most directories whose path prefix is cached; a cached prefix spares decoding a name."""


class TreeNode(NamedTuple):
    """A file (depth 0) or a directory (depth >= 1) of a dataset."""

    depth: int
    sample_index: int
    """The file's sample, or the first sample below the directory.

    For a directory without samples, the number of samples plus the number of the first empty
    directory at or below it.
    """


class Child(NamedTuple):
    """One entry of a directory."""

    name: bytes
    node: TreeNode
    next_index: int
    """Position of the next child."""


class DatasetTree:
    """The tree of one dataset.

    Args:
        directory: the dataset's sample directory; must outlive the tree.
        label: name of the dataset in error messages.
    """

    def __init__(self, directory: FrozenDirectory, *, label: str) -> None:
        self._directory = directory
        self._label = label
        self._count = len(directory)
        self._prefixes: OrderedDict[TreeNode, bytes] = OrderedDict()  # least recently used first

    @property
    def top(self) -> TreeNode:
        """The top directory of the dataset."""
        return TreeNode(DATASET_DEPTH, 0)

    def prefix(self, node: TreeNode) -> bytes:
        """Return the prefix of all paths below a directory: ``b""``, or its path and a slash.

        Raises:
            StaleError: there is no such directory (the number comes from another mount).
        """
        if node.depth == DATASET_DEPTH:
            return b""
        known = self._prefixes.get(node)
        if known is not None:
            self._prefixes.move_to_end(node)
            return known
        components = self.path(node.sample_index).split(b"/")
        if len(components) < node.depth:
            raise StaleError(f"find directory {node} of {self._label}: expected a deeper path")
        return self._cache_prefix(node, b"/".join(components[: node.depth - 1]) + b"/")

    def path(self, index: int) -> bytes:
        """Return the path of a sample, or that of an empty directory and a slash.

        Raises:
            StaleError: there is no such sample (the number comes from another mount).
        """
        end = self._count + self._directory.empty_count
        if index >= end:
            raise StaleError(f"find sample {index} of {self._label}: expected < {end}")
        if index >= self._count:
            return self._directory.empty_name(index - self._count) + b"/"
        return self._directory.name(index)

    def child(self, parent: TreeNode, name: bytes) -> TreeNode:
        """Find an entry of a directory.

        Raises:
            NotFoundError: the directory has no entry of that name.
        """
        path = self.prefix(parent) + name
        if len(path) <= PATH_BYTES_MAX:
            found = self._directory.find_one(path)
            if found >= 0:
                return TreeNode(FILE_DEPTH, found)
            first = self._first_below(path)
            if first >= 0:
                node = TreeNode(parent.depth + 1, first)
                self._cache_prefix(node, path + b"/")
                return node
        raise NotFoundError(f"look {quote(path)} up in {self._label}: no such file or directory")

    def parent(self, node: TreeNode) -> TreeNode:
        """Return the directory that contains a node; the top directory contains itself."""
        if node.depth == DATASET_DEPTH:
            return node
        if node.depth == FILE_DEPTH and node.sample_index >= self._count:
            raise StaleError(f"find file {node} of {self._label}: expected a sample")
        depth = node.depth - 1 if node.depth else self.path(node.sample_index).count(b"/") + 1
        components = self.path(node.sample_index).split(b"/")[: depth - 1]
        if not components:
            return self.top
        return TreeNode(depth, self._first_below(b"/".join(components)))

    def _first_below(self, path: bytes) -> int:
        """Return the index of a directory's node; -1 if there is no directory of this path."""
        below = path + b"/"
        first = self._directory.lower_bound(below)
        if first < self._count and self._directory.name(first).startswith(below):
            return first
        empty = self._directory.empty_at(path)
        return -1 if empty < 0 else self._count + empty

    def listing(self, node: TreeNode) -> Listing:
        """Start to list a directory."""
        return Listing(self._directory, self._label, node, self.prefix(node))

    def _cache_prefix(self, node: TreeNode, prefix: bytes) -> bytes:
        self._prefixes[node] = prefix
        if len(self._prefixes) > PREFIXES_MAX:
            self._prefixes.popitem(last=False)
        return prefix


class Listing:
    """A directory that is being listed, each child once, from any position.

    The listing continues one walk of the directory as long as its caller takes the children one
    after the other; another position starts a new walk.
    """

    def __init__(
        self, directory: FrozenDirectory, label: str, node: TreeNode, prefix: bytes
    ) -> None:
        self._directory = directory
        self._label = label
        self._node = node
        self._prefix = prefix
        self._count = len(directory)
        self._walk: Iterator[DirectoryChild] = iter(())
        self._child: Child | None = None
        self._index = self._next_index = -1  # of the child that was returned last

    def child(self, position: int) -> Child | None:
        """Return the child at a position (0, or a child's ``next_index``), or None at the end.

        Raises:
            FormatError: the names are malformed or out of order.
        """
        index = max(position, self._node.sample_index)
        if index != self._index:
            if index != self._next_index:
                self._walk = self._children(index)
            self._index = self._next_index = -1  # a walk that fails does not continue
            self._child = self._describe(next(self._walk, None))
            self._index = index
            self._next_index = -1 if self._child is None else self._child.next_index
        return self._child

    def _children(self, index: int) -> Iterator[DirectoryChild]:
        """List the directory from an index on: files and directories with samples, then others."""
        prefix, count = self._prefix[:-1], self._count
        if index < count:
            yield from self._directory.walk(prefix, index)
        for child in self._directory.walk_empty(prefix, max(index - count, 0)):
            entry = Entry(child.name, True, count + child.number)
            yield DirectoryChild(entry, count + child.next_number)

    def _describe(self, found: DirectoryChild | None) -> Child | None:
        if found is None:
            return None
        name = found.entry.name
        if name in (b"", b".", b"..") or len(name) > COMPONENT_BYTES_MAX or b"\0" in name:
            raise FormatError(
                f"list {quote(self._prefix)} of {self._label}: {quote(name)} is no file name"
            )
        depth = self._node.depth + 1 if found.entry.is_directory else FILE_DEPTH
        return Child(name, TreeNode(depth, found.entry.first_index), found.next_index)
