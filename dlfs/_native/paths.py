"""Packed paths: sorted, merged, and kept with their locations in the order of their addition.

Paths cross the boundary packed: one byte string of all of them, and ``uint64[n + 1]`` offsets
around each. A ``PathTable`` has the samples of a dataset that is being written, and finds a path
among them. A ``PathMerger`` merges sorted blocks of samples.

Threads: a table is used by one thread at a time.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from ctypes import POINTER, byref, c_uint32, c_uint64, cast, string_at
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlfs._native import abi
from dlfs._native.handle import Handle
from dlfs._native.library import check, library
from dlfs.errors import UsageError

LOCATION_BYTES = 16

_TEXT_BYTES = 1 << 22  # most text of a merged block, which ends early if it is full

MALFORMED = abi.PATH_MALFORMED
UNSORTED = abi.PATH_UNSORTED
REPEATED = abi.PATH_REPEATED
BELOW_SAMPLE = abi.PATH_BELOW_SAMPLE
IS_DIRECTORY = abi.PATH_IS_DIRECTORY

_REASONS = {
    MALFORMED: "it breaks a rule of paths",
    UNSORTED: "it is not behind the path before it",
    REPEATED: "it was added already",
    BELOW_SAMPLE: "it is, or lies below, a sample",
    IS_DIRECTORY: "a directory has this path",
}


class PathRefusedError(UsageError):
    """A path breaks a rule of paths.

    Args:
        action: what was done with the path, for the message.
        refusal: the rule, as libdlfs reports it.
        path: the path; of a directory without the slash behind it.

    Attributes:
        rule: the rule that it breaks: ``MALFORMED`` or another constant of this module.
        path: as given.
        sample: path of the sample that it lies below, or is, with ``BELOW_SAMPLE``.
        is_directory: it is the path of a directory rather than of a sample.
    """

    def __init__(self, action: str, refusal: abi.PathRefusal, path: bytes) -> None:
        text = path.decode("utf-8", "surrogateescape")
        super().__init__(f"{action}: {text!r}: {_REASONS[refusal.rule]}")
        self.rule: int = refusal.rule
        self.path = path
        self.sample = path[: refusal.prefix_bytes]
        self.is_directory = bool(refusal.is_directory)


def pack_paths(paths: Sequence[bytes]) -> tuple[NDArray[np.uint8], NDArray[np.uint64]]:
    """Pack paths: bytes ``uint8[n_bytes]``, and offsets around each path, ``uint64[n + 1]``."""
    offsets = np.zeros(len(paths) + 1, np.uint64)
    lengths = np.fromiter(map(len, paths), np.uint64, count=len(paths))
    np.cumsum(lengths, out=offsets[1:])
    return np.frombuffer(b"".join(paths), np.uint8), offsets


def check_packed(text: NDArray[np.uint8], offsets: NDArray[np.uint64]) -> None:
    """Check what C does not check: that offsets rise and stay inside the text.

    Raises:
        UsageError: they do not, or the arrays are of other types.
    """
    if text.dtype != np.uint8 or offsets.dtype != np.uint64 or offsets.ndim != 1:
        raise UsageError(
            f"use packed paths: expected uint8 and uint64, got {text.dtype}, {offsets.dtype}"
        )
    if not (text.flags.c_contiguous and offsets.flags.c_contiguous) or len(offsets) == 0:
        raise UsageError("use packed paths: expected contiguous arrays and at least one offset")
    if offsets[-1] > text.nbytes or np.any(offsets[1:] < offsets[:-1]):
        raise UsageError(f"use packed paths: expected rising offsets up to {text.nbytes}")


def check_samples(
    text: NDArray[np.uint8], offsets: NDArray[np.uint64], locations: NDArray[Any]
) -> None:
    """Check packed paths, and that there are as many locations.

    Raises:
        UsageError: there are not, or an array is not what C takes.
    """
    check_packed(text, offsets)
    expected = (len(offsets) - 1) * LOCATION_BYTES
    if locations.nbytes != expected or not locations.flags.c_contiguous:
        raise UsageError(
            f"use {len(offsets) - 1} samples: expected {expected} bytes of locations, "
            f"got {locations.nbytes}"
        )


def path_at(text: NDArray[np.uint8], offsets: NDArray[np.uint64], number: int) -> bytes:
    """Return one of packed paths."""
    return text[int(offsets[number]) : int(offsets[number + 1])].tobytes()


def sort_paths(text: NDArray[np.uint8], offsets: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Sort packed paths by their bytes.

    Args:
        text: uint8[n_bytes], the paths one after the other.
        offsets: uint64[n_samples + 1] around each path.

    Returns:
        uint64[n_samples]: the numbers of the paths, in the paths' order.

    Raises:
        DeviceError: not enough memory.
    """
    check_packed(text, offsets)
    return _sort(text.ctypes.data, offsets.ctypes.data, len(offsets) - 1)


def _sort(names: int | None, offsets: int, count: int) -> NDArray[np.uint64]:
    order = np.empty(count, np.uint64)
    code = library().dlfs_paths_sort(names, offsets, count, order.ctypes.data)
    check(code, f"sort {count} paths")
    return order


class PathTable:
    """Paths and locations of samples, in the order of their addition, and directories.

    Every rule of paths is checked as they come: that of each path, no path twice, and no path both
    a sample and a directory.
    """

    def __init__(self) -> None:
        self.handle = Handle(library().dlfs_path_table_destroy)
        check(library().dlfs_path_table_create(byref(self.handle)), "make a table of paths")
        self._find = library().dlfs_path_table_find
        self._row = c_uint64()

    def __len__(self) -> int:
        return int(self.view().count)

    def add(
        self,
        text: NDArray[np.uint8],
        offsets: NDArray[np.uint64],
        locations: NDArray[Any] | None,
    ) -> None:
        """Add samples: all, or after an error none.

        Args:
            text: uint8[n_bytes], the paths one after the other, in any order.
            offsets: uint64[n_samples + 1] around each path.
            locations: ``dlfs_location[n_samples]``; None: only check the paths.

        Raises:
            PathRefusedError: a path breaks a rule.
            DeviceError: not enough memory.
        """
        count = len(offsets) - 1
        if locations is None:
            check_packed(text, offsets)
        else:
            check_samples(text, offsets, locations)
        refusal = abi.PathRefusal()
        code = library().dlfs_path_table_add(
            self.handle,
            text.ctypes.data,
            offsets.ctypes.data,
            None if locations is None else locations.ctypes.data,
            count,
            byref(refusal),
        )
        if refusal.rule:
            path = path_at(text, offsets, refusal.index)
            raise PathRefusedError(f"add {count} samples", refusal, path)
        check(code, f"add {count} samples to a table of paths")

    def add_directory(self, path: bytes) -> None:
        """Add a directory, which need not have samples below it.

        Raises:
            PathRefusedError: the path breaks a rule.
            DeviceError: not enough memory.
        """
        refusal = abi.PathRefusal()
        code = library().dlfs_path_table_add_directory(self.handle, path, len(path), byref(refusal))
        if refusal.rule:
            raise PathRefusedError("add a directory", refusal, path)
        check(code, "add a directory to a table of paths")

    def find(self, path: bytes) -> int:
        """Return the row of a sample: its place in the order of addition; -1 if there is none."""
        found = self._find(self.handle, path, len(path), byref(self._row))
        return self._row.value if check(found, "look a path up in a table") else -1

    def sort(self) -> NDArray[np.uint64]:
        """Return the rows of all samples in the order of their paths, ``uint64[n_samples]``.

        Raises:
            DeviceError: not enough memory.
        """
        view = self.view()
        return _sort(view.names, view.offsets, view.count)

    def paths(self, rows: NDArray[np.uint64]) -> list[bytes]:
        """Return the paths of samples by their rows."""
        view = self.view()
        offsets = cast(view.offsets, POINTER(c_uint64))
        base = view.names or 0
        return [
            string_at(base + offsets[row], offsets[row + 1] - offsets[row]) for row in rows.tolist()
        ]

    def location(self, row: int) -> bytes:
        """Return the location of a sample, as ``dlfs_location``."""
        return string_at((self.view().locations or 0) + row * LOCATION_BYTES, LOCATION_BYTES)

    def empty_directories(self) -> list[bytes]:
        """Return the added directories that contain nothing, in path order.

        The order is that of the paths with a slash behind each.
        """
        count_of = library().dlfs_path_table_empty_directories
        size = c_uint64()
        count: int = count_of(self.handle, None, 0, None, 0, byref(size))
        text = np.empty(size.value, np.uint8)
        offsets = np.zeros(count + 1, np.uint64)
        count_of(
            self.handle, text.ctypes.data, text.nbytes, offsets.ctypes.data, count, byref(size)
        )
        return [path_at(text, offsets, number)[:-1] for number in sort_paths(text, offsets)]

    def shrink(self) -> None:
        """Free the index of paths, which is made again when it is needed."""
        library().dlfs_path_table_shrink(self.handle)

    def view(self) -> abi.PathTableView:
        """Return where the paths and locations lie in memory, until the table is changed."""
        view = abi.PathTableView()
        library().dlfs_path_table_get_view(self.handle, byref(view))
        return view


class PathBlock(NamedTuple):
    """Samples in the order of their paths."""

    text: NDArray[np.uint8]
    """The paths one after the other, ``uint8[n_bytes]``."""
    offsets: NDArray[np.uint64]
    """Offsets around each path in the text, ``uint64[n_samples + 1]``."""
    locations: NDArray[Any]
    """``dlfs_location[n_samples]``."""
    rows: NDArray[np.uint64]
    """Row of each sample, ``uint64[n_samples]``: its place in the order of addition."""


class PathMerger:
    """Merges sorted samples of several sources, each given block by block.

    That the paths of a source rise is not checked.

    Args:
        source_count: number of sources.
        block_samples: most samples of a merged block.
    """

    def __init__(self, source_count: int, block_samples: int) -> None:
        self._sources = (abi.PathSource * source_count)()
        self._blocks: list[PathBlock | None] = [None] * source_count
        self._block_samples = block_samples

    def give(self, source: int, block: PathBlock) -> None:
        """Give a source its next block, behind the one that is merged; it is kept until then.

        Raises:
            UsageError: its arrays are not of one length, or of other types.
        """
        check_samples(block.text, block.offsets, block.locations)
        if block.rows.dtype != np.uint64 or len(block.rows) != len(block.offsets) - 1:
            raise UsageError(f"merge {len(block.offsets) - 1} samples: expected a row for each")
        rows = np.ascontiguousarray(block.rows)
        self._blocks[source] = block._replace(rows=rows)
        self._sources[source] = abi.PathSource(
            names=block.text.ctypes.data,
            offsets=block.offsets.ctypes.data,
            locations=block.locations.ctypes.data,
            rows=rows.ctypes.data,
            count=len(rows),
        )

    def wants(self, source: int) -> bool:
        """Return True if a source has no samples left."""
        given = self._sources[source]
        return bool(given.next == given.count)

    def merge(self) -> PathBlock:
        """Merge until one source has no samples left, or a block is full.

        Raises:
            PathRefusedError: two sources have the same path.
            DeviceError: not enough memory.
        """
        given = [block for block in self._blocks if block is not None]
        count = min(self._block_samples, sum(len(block.rows) for block in given))
        text = np.empty(min(_TEXT_BYTES, sum(block.text.nbytes for block in given)), np.uint8)
        offsets = np.zeros(count + 1, np.uint64)
        locations = np.empty(count, given[0].locations.dtype if given else np.uint8)
        rows = np.empty(count, np.uint64)
        target = abi.PathTarget(
            names=text.ctypes.data,
            offsets=offsets.ctypes.data,
            locations=locations.ctypes.data,
            rows=rows.ctypes.data,
            names_bytes=text.nbytes,
            capacity=count,
        )
        repeated = c_uint32()
        merged = library().dlfs_paths_merge(
            self._sources, len(self._sources), byref(target), byref(repeated)
        )
        if merged == -errno.EEXIST:
            block = self._blocks[repeated.value]
            assert block is not None
            path = path_at(block.text, block.offsets, self._sources[repeated.value].next)
            raise PathRefusedError("merge samples", abi.PathRefusal(rule=REPEATED), path)
        check(merged, f"merge {count} samples")
        return PathBlock(
            text[: int(offsets[merged])], offsets[: merged + 1], locations[:merged], rows[:merged]
        )
