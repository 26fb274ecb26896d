"""One dataset's sample directory, seen as a tree of files and directories.

Directories are not stored anywhere: the samples' paths are in byte order, so a directory is a run
of indices, a child is found by its whole path or by bisection, and the position in a listing is the
index where the next child starts. That makes a position valid for ever and a listing resumable in
O(log N) wherever it stopped, however many children there are.

What comes from media is believed only as far as it cannot hurt: names that no file system can show,
and listings that would not advance, are FormatErrors.

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
"""Directories whose path is remembered: each spares decoding names at the next lookup."""

_AFTER_SLASH = b"0"  # the byte behind "/": what ends the run of a directory
_LIST_FEW = 32  # names decoded at a time where directories come one after the other
_LIST_MANY = 1024  # ... and where files do


class Node(NamedTuple):
    """A file (depth 0) or a directory (depth >= 1)."""

    depth: int
    sample_index: int
    """Of the file, or of the first sample below the directory."""


class Child(NamedTuple):
    """One entry of a directory."""

    name: bytes
    node: Node
    next_index: int
    """Where the next child starts: the position to go on from."""


@dataclass
class _Window:
    """Names decoded ahead for one listing."""

    first: int
    names: list[bytes]


class DatasetTree:
    """The tree of one dataset.

    Args:
        directory: of the dataset; borrowed.
        label: what errors call the dataset.
    """

    def __init__(self, directory: FrozenDirectory, *, label: str) -> None:
        self._directory = directory
        self._label = label
        self._count = len(directory)
        self._prefixes: OrderedDict[Node, bytes] = OrderedDict()

    @property
    def top(self) -> Node:
        """The dataset's own directory."""
        return Node(DATASET_DEPTH, 0)

    def prefix(self, node: Node) -> bytes:
        """What the paths below a directory start with: ``b""``, or its path and a slash.

        Raises:
            StaleError: there is no such directory (a number from another mount).
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
        return self._remember(node, b"/".join(components[: node.depth - 1]) + b"/")

    def path(self, index: int) -> bytes:
        """The path of a sample.

        Raises:
            StaleError: there is no such sample (a number from another mount).
        """
        if index >= self._count:
            raise StaleError(f"find sample {index} of {self._label}: expected < {self._count}")
        return self._directory.name(index)

    def child(self, parent: Node, name: bytes) -> Node:
        """Find an entry of a directory.

        Raises:
            NotFoundError: there is none of that name.
        """
        path = self.prefix(parent) + name
        if len(path) <= PATH_BYTES_MAX:
            found = self._directory.find_one(path)
            if found >= 0:
                return Node(FILE_DEPTH, found)
            below = path + b"/"
            first = self._directory.lower_bound(below)
            if first < self._count and self._directory.name(first).startswith(below):
                node = Node(parent.depth + 1, first)
                self._remember(node, below)
                return node
        raise NotFoundError(f"look {quote(path)} up in {self._label}: no such file or directory")

    def parent(self, node: Node) -> Node:
        """The directory that holds a file or a directory; the dataset's own is its own parent."""
        if node.depth == DATASET_DEPTH:
            return node
        depth = node.depth - 1 if node.depth else self.path(node.sample_index).count(b"/") + 1
        components = self.path(node.sample_index).split(b"/")[: depth - 1]
        if not components:
            return self.top
        prefix = b"/".join(components) + b"/"
        return Node(depth, self._directory.lower_bound(prefix))

    def listing(self, node: Node) -> Listing:
        """Begin to list a directory."""
        prefix = self.prefix(node)
        last = self._count
        if prefix:
            last = self._directory.lower_bound(prefix[:-1] + _AFTER_SLASH)
        return Listing(self._directory, self._label, node, prefix, last)

    def _remember(self, node: Node, prefix: bytes) -> bytes:
        self._prefixes[node] = prefix
        if len(self._prefixes) > PREFIXES_MAX:
            self._prefixes.popitem(last=False)
        return prefix


class Listing:
    """One directory being listed, from any position, each child once.

    It keeps the names it has decoded ahead, so that asking for children one after the other decodes
    each name once.
    """

    def __init__(
        self, directory: FrozenDirectory, label: str, node: Node, prefix: bytes, last: int
    ) -> None:
        self._directory = directory
        self._label = label
        self._node = node
        self._prefix = prefix
        self._last = last
        self._window = _Window(0, [])
        self._ahead = _LIST_FEW

    def child(self, position: int) -> Child | None:
        """The child at a position (0, or a child's ``next_index``); None at the end.

        Raises:
            FormatError: the names are malformed or out of order.
        """
        index = max(position, self._node.sample_index)
        if index >= self._last:
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
            return Child(name, Node(FILE_DEPTH, index), index + 1)
        behind = self._directory.lower_bound(self._prefix + name + _AFTER_SLASH)
        if behind <= index:
            raise FormatError(f"list {quote(self._prefix)} of {self._label}: names out of order")
        return Child(name, Node(self._node.depth + 1, index), behind)

    def _name(self, index: int) -> bytes:
        window = self._window
        at = index - window.first
        if not 0 <= at < len(window.names):
            # Where the window ends: files in a row. Elsewhere: a directory was passed over.
            follows = at == len(window.names) and at > 0
            self._ahead = min(2 * self._ahead, _LIST_MANY) if follows else _LIST_FEW
            count = min(self._ahead, self._last - index)
            window = self._window = _Window(index, self._directory.names(index, count))
            at = 0
        return window.names[at]
