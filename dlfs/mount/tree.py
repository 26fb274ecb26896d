"""The sample directory of a dataset as a tree of files and directories.

Directories are not stored. The paths of the samples are in byte order, so a directory is a range of
indices. An entry is found by its whole path or by bisection, in O(log N). The position in a listing
is the index at which the next child starts; it stays valid forever, so a listing resumes anywhere.

Bytes from media are not trusted: a name that no file system can show, or a listing that would not
advance, raises FormatError.

Threads: one.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

from dlfs.directory import FrozenDirectory
from dlfs.errors import FormatError, NotFoundError, StaleError
from dlfs.format.constants import COMPONENT_BYTES_MAX, PATH_BYTES_MAX
from dlfs.staging.inode_numbers import DATASET_DEPTH, FILE_DEPTH
from dlfs.wording import quote

PREFIXES_MAX = 4096
"""Most directories whose path prefix is cached; a cached prefix spares decoding a name."""

_AFTER_SLASH = b"0"  # the byte after "/": prefix + this byte bounds a directory's range
_LIST_FEW = 32  # names decoded at a time in a range of directories
_LIST_MANY = 1024  # names decoded at a time in a range of files


class TreeNode(NamedTuple):
    """A file (depth 0) or a directory (depth >= 1) of a dataset."""

    depth: int
    sample_index: int
    """The file's sample, or the first sample below the directory."""


class Child(NamedTuple):
    """One entry of a directory."""

    name: bytes
    node: TreeNode
    next_index: int
    """Position of the next child."""


@dataclass
class _Window:
    """Decoded names of consecutive samples."""

    first: int
    names: list[bytes]


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
        """Return the path of a sample.

        Raises:
            StaleError: there is no such sample (the number comes from another mount).
        """
        if index >= self._count:
            raise StaleError(f"find sample {index} of {self._label}: expected < {self._count}")
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
            below = path + b"/"
            first = self._directory.lower_bound(below)
            if first < self._count and self._directory.name(first).startswith(below):
                node = TreeNode(parent.depth + 1, first)
                self._cache_prefix(node, below)
                return node
        raise NotFoundError(f"look {quote(path)} up in {self._label}: no such file or directory")

    def parent(self, node: TreeNode) -> TreeNode:
        """Return the directory that contains a node; the top directory contains itself."""
        if node.depth == DATASET_DEPTH:
            return node
        depth = node.depth - 1 if node.depth else self.path(node.sample_index).count(b"/") + 1
        components = self.path(node.sample_index).split(b"/")[: depth - 1]
        if not components:
            return self.top
        prefix = b"/".join(components) + b"/"
        return TreeNode(depth, self._directory.lower_bound(prefix))

    def listing(self, node: TreeNode) -> Listing:
        """Start to list a directory."""
        prefix = self.prefix(node)
        end = self._count
        if prefix:
            end = self._directory.lower_bound(prefix[:-1] + _AFTER_SLASH)
        return Listing(self._directory, self._label, node, prefix, end)

    def _cache_prefix(self, node: TreeNode, prefix: bytes) -> bytes:
        self._prefixes[node] = prefix
        if len(self._prefixes) > PREFIXES_MAX:
            self._prefixes.popitem(last=False)
        return prefix


class Listing:
    """A directory that is being listed, each child once, from any position.

    The listing caches a window of decoded names. A caller that takes the children one after the
    other causes each name to be decoded once.
    """

    def __init__(
        self, directory: FrozenDirectory, label: str, node: TreeNode, prefix: bytes, end: int
    ) -> None:
        self._directory = directory
        self._label = label
        self._node = node
        self._prefix = prefix
        self._end = end  # index after the directory's last sample
        self._window = _Window(0, [])
        self._decode_count = _LIST_FEW

    def child(self, position: int) -> Child | None:
        """Return the child at a position (0, or a child's ``next_index``), or None at the end.

        Raises:
            FormatError: the names are malformed or out of order.
        """
        index = max(position, self._node.sample_index)
        if index >= self._end:
            return None
        path = self._name(index)
        if not path.startswith(self._prefix):
            raise FormatError(f"list {quote(self._prefix)} of {self._label}: names out of order")
        name, slash, _ = path[len(self._prefix) :].partition(b"/")
        if name in (b"", b".", b"..") or len(name) > COMPONENT_BYTES_MAX or b"\0" in name:
            raise FormatError(
                f"list {quote(self._prefix)} of {self._label}: {quote(name)} is no file name"
            )
        if not slash:
            return Child(name, TreeNode(FILE_DEPTH, index), index + 1)
        end = self._directory.lower_bound(self._prefix + name + _AFTER_SLASH)
        if end <= index:
            raise FormatError(f"list {quote(self._prefix)} of {self._label}: names out of order")
        return Child(name, TreeNode(self._node.depth + 1, index), end)

    def _name(self, index: int) -> bytes:
        window = self._window
        at = index - window.first
        if not 0 <= at < len(window.names):
            # The window is left at its end after files only; a jump past it skipped a directory.
            follows = at == len(window.names) and at > 0
            self._decode_count = min(2 * self._decode_count, _LIST_MANY) if follows else _LIST_FEW
            count = min(self._decode_count, self._end - index)
            window = self._window = _Window(index, self._directory.names(index, count))
            at = 0
        return window.names[at]
