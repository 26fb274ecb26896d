"""The sample directory of a dataset as a tree of files and directories.

Directories with samples below them are not stored. The paths of the samples are in byte order, so a
directory is a range of indices. An entry is found by its whole path or by bisection, in O(log N).
Directories without samples are stored, and numbered from N on. The position in a listing is the
index at which the next child starts, those without samples last; it stays valid forever, so a
listing resumes anywhere.

Bytes from media are not trusted: a name that no file system can show, or a listing that would not
advance, raises FormatError.

Threads: any at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

from dlfs.base.wording import quote
from dlfs.directory import FrozenDirectory
from dlfs.errors import FormatError, NotFoundError, StaleError
from dlfs.format.constants import COMPONENT_BYTES_MAX, PATH_BYTES_MAX
from dlfs.format.location import unpack_location
from dlfs.mount.inode_numbers import DATASET_DEPTH, FILE_DEPTH


class TreeNode(NamedTuple):
    """A file (depth 0) or a directory (depth >= 1) of a dataset."""

    depth: int
    sample_index: int
    """The file's sample, or the first sample below the directory.

    For a directory without samples, the number of samples plus the number of the first empty
    directory at or below it.
    """


TOP = TreeNode(DATASET_DEPTH, 0)
"""The top directory of every dataset."""


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
    """

    def __init__(self, directory: FrozenDirectory) -> None:
        self._directory = directory
        self._label = directory.label
        self._count = len(directory)

    @property
    def chunk_bytes(self) -> int:
        """Chunk size of the volume, in bytes."""
        return self._directory.chunk_bytes

    def path(self, node: TreeNode) -> bytes:
        """Return the path of a file or directory; ``b""`` for the top directory.

        Raises:
            StaleError: there is no such file or directory (the number comes from another mount).
        """
        depth, index = node
        if depth == DATASET_DEPTH:
            return b""
        if index < self._count:
            path = self._directory.name(index)
        elif depth != FILE_DEPTH and index < self._count + self._directory.empty_count:
            path = self._directory.empty_name(index - self._count) + b"/"
        else:
            raise self._stale(node)
        if depth == FILE_DEPTH:
            return path
        components = path.split(b"/")
        if len(components) < depth:
            raise self._stale(node)
        return b"/".join(components[: depth - 1])

    def sample(self, index: int) -> tuple[int, int]:
        """Return the length in bytes and the CRC32C of a sample; StaleError if there is none."""
        if index >= self._count:
            raise self._stale(TreeNode(FILE_DEPTH, index))
        return unpack_location(self._directory.locations[index])[1:]

    def child(self, parent: TreeNode, name: bytes) -> TreeNode:
        """Find an entry of a directory, or the directory itself and its parent by ``.`` and ``..``.

        Raises:
            NotFoundError: the directory has no entry of that name.
        """
        if name in (b".", b".."):
            return parent if name == b"." else self.parent(parent)
        base = self.path(parent)
        path = base + b"/" + name if base else name
        if len(path) <= PATH_BYTES_MAX:
            found = self._directory.find_one(path)
            if found >= 0:
                return TreeNode(FILE_DEPTH, found)
            first = self._first_below(path)
            if first >= 0:
                return TreeNode(parent.depth + 1, first)
        raise NotFoundError(f"look {quote(path)} up in {self._label}: no such file or directory")

    def parent(self, node: TreeNode) -> TreeNode:
        """Return the directory that contains a node; the top directory contains itself."""
        path = self.path(node).rpartition(b"/")[0]
        return TreeNode(path.count(b"/") + 2, self._first_below(path)) if path else TOP

    def children(self, node: TreeNode, position: int = 0) -> Iterator[Child]:
        """List a directory from a position on: 0, or the ``next_index`` of a child.

        Raises:
            FormatError: the names are malformed or out of order.
        """
        path, count = self.path(node), self._count
        first = max(position, node.sample_index)
        with_samples = (
            (*child.entry, child.next_index) for child in self._directory.walk(path, first)
        )
        empty = (
            (child.name, True, count + child.number, count + child.next_number)
            for child in self._directory.walk_empty(path, max(first - count, 0))
        )
        for name, is_directory, index, next_index in chain(with_samples, empty):
            if name in (b"", b".", b"..") or len(name) > COMPONENT_BYTES_MAX or b"\0" in name:
                problem = f"{quote(name)} is no file name"
                raise FormatError(f"list {quote(path)} of {self._label}: {problem}")
            depth = node.depth + 1 if is_directory else FILE_DEPTH
            yield Child(name, TreeNode(depth, index), next_index)

    def _first_below(self, path: bytes) -> int:
        """Return the index of a directory's node; -1 if there is no directory of this path."""
        below = path + b"/"
        first = self._directory.lower_bound(below)
        if first < self._count and self._directory.name(first).startswith(below):
            return first
        empty = self._directory.empty_at(path)
        return -1 if empty < 0 else self._count + empty

    def _stale(self, node: TreeNode) -> StaleError:
        return StaleError(f"find {node} of {self._label}: there is no such file or directory")
