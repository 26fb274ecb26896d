"""The sample directory of a sealed dataset: paths, indices, locations, listings.

Its bytes are those on media, in memory that may be shared with other processes. The entries part is
loaded from the start; the names part when the first path is looked up or listed. Directories of the
path tree are not stored: the names are in path order, so a directory is a range of indices, found
by bisection.

Threads: any at once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from heapq import merge
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dlfs._native.directory import NativeDirectory
from dlfs._native.paths import pack_paths
from dlfs.base.closing import Closing
from dlfs.base.forks import Lock, cached_property
from dlfs.base.wording import quote
from dlfs.directory.indices import check_indices
from dlfs.errors import FormatError, UsageError
from dlfs.format.location import LOCATION, unpack_locations
from dlfs.format.paths import path_problem

_PIECE_SAMPLES = 1 << 18  # locations decoded at a time
_LIST_FEW = 32  # names decoded at a time while subdirectories follow each other
_LIST_MANY = 4096  # names decoded at a time while files follow each other
_AFTER_SLASH = b"0"  # the byte after "/": it ends the range of a directory's paths


class Entry(NamedTuple):
    """One child of a directory."""

    name: bytes
    """Last component of the path."""
    is_directory: bool
    first_index: int
    """Index of the sample itself, or of the first sample below the directory.

    For a directory without samples, the index that its first sample would have.
    """


class DirectoryChild(NamedTuple):
    """One child of a directory, and where its listing continues."""

    entry: Entry
    next_index: int
    """Index of the first sample of the next child."""


class EmptyChild(NamedTuple):
    """A subdirectory without samples, and where the listing of these continues."""

    name: bytes
    number: int
    """Number of the first empty directory at or below it."""
    next_number: int
    """Number of the first empty directory after it."""


def _listing_key(entry: Entry) -> bytes:
    """Return what a listing is sorted by."""
    return entry.name + b"/" if entry.is_directory else entry.name


class FrozenDirectory(NativeDirectory, Closing):
    """The directory of one dataset.

    Args:
        entries: the entries part, aligned to 64 bytes; kept, never written.
        load_names: returns the names part, aligned likewise; called once, when names are first
            needed, and again only after it raised.
        label: name of the directory in errors.
        release: frees the memory; called once by ``close``.
        descriptors: returns the descriptors of the parts' files, entries first.

    Raises:
        FormatError: the entries part is malformed.
    """

    def __init__(
        self,
        entries: NDArray[np.uint8],
        load_names: Callable[[], NDArray[np.uint8]],
        *,
        label: str = "the directory",
        release: Callable[[], None] | None = None,
        descriptors: Callable[[], Sequence[int]] = tuple,
    ) -> None:
        super().__init__(entries, label=label)
        self._load_names = load_names
        self._loading = Lock()
        self._release = release
        self._descriptors = descriptors

    def __len__(self) -> int:
        return self.count

    def load_names(self) -> None:
        """Load the names now, not when the first path is looked up or listed."""
        if self._names is None:
            _ = self.handle  # raises ClosedError if another thread has closed the directory
            with self._loading:
                if self._names is None:
                    self.attach_names(self._load_names())

    # ---- paths to indices ----------------------------------------------------------------------

    def find(self, paths: Sequence[bytes]) -> NDArray[np.int64]:
        """Find the indices of paths, ``int64[n_paths]``; -1 where no sample has the path.

        Raises:
            FormatError: the tree or the names are malformed.
        """
        return self.find_packed(*pack_paths(paths))

    def name(self, index: int) -> bytes:
        """Return the path of one sample, 0 <= index < ``len``."""
        return self.names(index, 1)[0]

    def names_of(self, indices: ArrayLike) -> list[bytes]:
        """Return the paths of samples by their indices, in any order.

        Raises:
            UsageError: an index is out of range, or no integer.
            FormatError: the names are malformed.
        """
        action = "look paths up by index"
        return super().names_of(check_indices(indices, len(self), option="indices", action=action))

    # ---- indices to locations ------------------------------------------------------------------

    @property
    def locations(self) -> NDArray[Any]:
        """Return all locations as on media: ``LOCATION[n_samples]``, a read-only view.

        They are not checked: a caller compares addresses and lengths with ``data_bytes``.
        """
        return self.packed_locations().view(LOCATION)

    def addresses(self, indices: ArrayLike | None = None) -> NDArray[np.uint64]:
        """Return the addresses in the data space of some samples, or of all, ``uint64[n]``.

        Raises:
            UsageError: as ``lengths``.
        """
        return unpack_locations(self._select(indices))[0]

    def lengths(self, indices: ArrayLike | None = None) -> NDArray[np.int64]:
        """Return the lengths in bytes of some samples, or of all, ``int64[n]``.

        Raises:
            UsageError: an index is out of range, or no integer.
        """
        return unpack_locations(self._select(indices))[1].view(np.int64)

    @cached_property
    def largest_bytes(self) -> int:
        """Length of the largest sample in bytes, at most ``data_bytes``; 0 without samples."""
        pieces = range(0, len(self), _PIECE_SAMPLES)
        found = (
            int(unpack_locations(self.locations[first : first + _PIECE_SAMPLES])[1].max())
            for first in pieces
        )
        return min(max(found, default=0), self.data_bytes)

    @cached_property
    def sample_bytes(self) -> int:
        """Sum of the lengths of all samples in bytes."""
        pieces = range(0, len(self), _PIECE_SAMPLES)
        return sum(
            int(unpack_locations(self.locations[first : first + _PIECE_SAMPLES])[1].sum())
            for first in pieces
        )

    def crcs(self, indices: ArrayLike | None = None) -> NDArray[np.uint32]:
        """Return the CRC32C of some samples, or of all, ``uint32[n]``.

        Raises:
            UsageError: as ``lengths``.
        """
        return unpack_locations(self._select(indices))[2]

    # ---- the tree of directories ---------------------------------------------------------------

    def subtree_range(self, prefix: bytes) -> tuple[int, int]:
        """Return the range of indices first..last-1 below a directory. The root is ``b""``."""
        if not prefix:
            return 0, len(self)
        return self.lower_bound(prefix + b"/"), self.lower_bound(prefix + _AFTER_SLASH)

    def is_directory(self, prefix: bytes) -> bool:
        """Return True if this is the path of a directory. The root always is one."""
        first, last = self.subtree_range(prefix)
        return first < last or not prefix or self.empty_at(prefix) >= 0

    def empty_directories(self, prefix: bytes = b"") -> list[bytes]:
        """Return paths of directories without samples at or below a path, in listing order.

        Those that contain others are not listed: a path is that of the deepest.

        Raises:
            FormatError: the names are malformed.
        """
        first = self.empty_lower_bound(prefix + b"/") if prefix else 0
        last = self.empty_lower_bound(prefix + _AFTER_SLASH) if prefix else self.empty_count
        return [path[:-1] for path in self.empty_names(first, last - first)]

    def empty_name(self, number: int) -> bytes:
        """Return the path of an empty directory, 0 <= number < ``empty_count``."""
        return self.empty_names(number, 1)[0][:-1]

    def empty_at(self, prefix: bytes) -> int:
        """Return the number of the first empty directory at or below a path; -1 if none is there.

        Raises:
            FormatError: the names are malformed.
        """
        base = prefix + b"/" if prefix else b""
        number = self.empty_lower_bound(base)
        found = number < self.empty_count and self.empty_names(number, 1)[0].startswith(base)
        return number if found else -1

    def children(self, prefix: bytes, start_after: bytes | None = None) -> Iterator[Entry]:
        """List one directory, in path order: a subdirectory is sorted as its name and "/".

        Takes time in proportion to the files in it, and a bisection for each subdirectory, whatever
        its size.

        Args:
            prefix: the directory's path; ``b""`` is the root. Nothing is listed when it is not a
                directory.
            start_after: name of a child; the listing starts after it.

        Raises:
            FormatError: the names are malformed or out of order.
        """
        base = prefix + b"/" if prefix else b""
        first = 0 if start_after is None else self._behind(base + start_after)
        found = (child.entry for child in self.walk(prefix, first))
        if self.empty_at(prefix) < 0:
            return found
        empty = (
            Entry(child.name, True, self.lower_bound(base + child.name + b"/"))
            for child in self.walk_empty(prefix)
        )
        if start_after is not None:
            is_directory = self.is_directory(base + start_after)
            after = _listing_key(Entry(start_after, is_directory, 0))
            empty = (entry for entry in empty if _listing_key(entry) > after)
        return merge(found, empty, key=_listing_key)

    def walk_empty(self, prefix: bytes, number: int = 0) -> Iterator[EmptyChild]:
        """List the subdirectories of a directory that have no samples below them.

        Args:
            prefix: the directory's path; ``b""`` is the root.
            number: number of an empty directory; the subdirectories before its are left out.

        Raises:
            FormatError: the names are malformed or out of order.
        """
        base = prefix + b"/" if prefix else b""
        at = max(number, self.empty_lower_bound(base))
        while at < self.empty_count:
            path = self.empty_names(at, 1)[0]
            if not path.startswith(base) or path == base:
                return
            name = path[len(base) :].partition(b"/")[0]
            following = self.empty_lower_bound(base + name + _AFTER_SLASH)
            if following <= at or not name:
                raise FormatError(f"list {quote(base)} in {self.label}: names out of order")
            first, last = self.subtree_range(base + name)
            if first == last:
                yield EmptyChild(name, at, following)
            at = following

    def walk(self, prefix: bytes, first: int = 0) -> Iterator[DirectoryChild]:
        """List one directory as ``children`` does, from the child at an index on.

        Args:
            prefix: the directory's path; ``b""`` is the root.
            first: index of the first sample of a child, such as a ``next_index``; 0 is the first
                child.

        Raises:
            FormatError: the names are malformed or out of order.
        """
        begin, last = self.subtree_range(prefix)
        index = max(begin, first)
        base = prefix + b"/" if prefix else b""
        batch = _LIST_FEW
        while index < last:
            names = self.names(index, min(batch, last - index))
            following = index + len(names)
            for child in self._children_in(names, index, base):
                yield child
                index = child.next_index
            # After a large subdirectory was skipped: decode few names again.
            batch = _LIST_FEW if index > following else min(2 * batch, _LIST_MANY)

    def _children_in(self, names: list[bytes], first: int, base: bytes) -> Iterator[DirectoryChild]:
        """Yield the children whose first samples are among decoded names."""
        at = 0
        while at < len(names):
            path = names[at]
            if not path.startswith(base):
                raise FormatError(f"list {quote(base)} in {self.label}: names out of order")
            name, slash, _ = path[len(base) :].partition(b"/")
            behind = at + 1
            if slash:
                end = base + name + _AFTER_SLASH
                behind = bisect_left(names, end, behind)
                if behind == len(names):
                    behind = self.lower_bound(end) - first
                    if behind < len(names):
                        raise FormatError(f"list {quote(base)} in {self.label}: names out of order")
            yield DirectoryChild(Entry(name, bool(slash), first + at), first + behind)
            at = behind

    def _behind(self, path: bytes) -> int:
        """Return the index after a sample or a directory with this path."""
        first, last = self.subtree_range(path)
        if first == last:
            return self.lower_bound(path + (b"\0" if self.empty_at(path) < 0 else b"/"))
        return last

    # ---- memory --------------------------------------------------------------------------------

    def memory(self) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Return the entries part and the names part, which must not be changed.

        Raises:
            FormatError: the names are malformed.
            ClosedError: the directory is closed.
        """
        self.load_names()
        assert self._names is not None
        return self._entries, self._names

    def verify(self) -> None:
        """Check every block of both parts against their checksums, and the rules of their content.

        Raises:
            ChecksumError: a block is bad.
            FormatError: names are out of order, samples are not listed in storage order or lie in
                chunks as none may, the CRC32C of a sample is not that of its parts, or an empty
                directory is a sample or contains one.
        """
        self.load_names()
        self.verify_own()
        bad = self.verify_parts()
        if bad is not None:
            raise FormatError(
                f"verify {self.label}: expected the CRC32C of sample {bad} "
                f"{quote(self.name(bad))} to be that of its parts"
            )
        before = b""
        for first in range(0, len(self), _LIST_MANY):
            names = self.names(first, min(_LIST_MANY, len(self) - first))
            if any(a >= b for a, b in pairwise([before, *names])):
                raise FormatError(f"verify {self.label}: names out of order at index {first}")
            before = names[-1]
        self._verify_empty()

    def _verify_empty(self) -> None:
        """Check that empty directories are in order, and neither contain nor are anything else."""
        for before, path in pairwise([b"", *self.empty_names(0, self.empty_count)]):
            plain = path[:-1]
            parents = [plain[:at] for at, byte in enumerate(plain) if byte == ord("/")]
            first, last = self.subtree_range(plain)
            taken = first < last or self.find([plain, *parents]).max() >= 0
            nested = bool(before) and path.startswith(before)
            if path_problem(plain) or not path.endswith(b"/") or path <= before or nested or taken:
                raise FormatError(
                    f"verify {self.label}: {quote(plain)} is no empty directory of its own"
                )

    def close(self) -> None:
        """Release the memory. Idempotent. Views of ``locations`` must be gone."""
        super().close()
        release, self._release = self._release, None
        if release:
            release()

    def entries_descriptor(self) -> int:
        """Return the descriptor of the entries part's file, for other processes to map.

        Raises:
            UsageError: it lies in no file.
        """
        return self._descriptor(0)

    def names_descriptor(self) -> int:
        """Return the descriptor of the names part's file; see ``entries_descriptor``."""
        self.load_names()
        return self._descriptor(1)

    def _descriptor(self, part: int) -> int:
        descriptors = self._descriptors()
        if part >= len(descriptors) or descriptors[part] < 0:
            raise UsageError(f"share {self.label}: expected it in a file, got plain memory")
        return descriptors[part]

    def _select(self, indices: ArrayLike | None) -> NDArray[Any]:
        locations = self.locations
        if indices is None:
            return locations
        action = "look samples up by index"
        chosen = check_indices(indices, len(self), option="indices", action=action)
        picked: NDArray[Any] = locations[chosen]
        return picked
