"""The directory of a dataset that is being written: mutable, in memory.

Paths may come in any order; a path's row is its place in that order. They are sorted, outside of
the interpreter's lock, when they are listed or frozen. Every rule that a sealed directory must keep
is checked as paths come in: the rules of a path, no path twice, and no path that is both a sample
and a directory.

Threads: one at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from uuid import UUID

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dlfs._native.directory import build_segment, pack_paths, sort_paths
from dlfs.errors import ExistsError, LimitError, NotFoundError, UsageError
from dlfs.format.constants import PATH_BYTES_MAX
from dlfs.format.location import LOCATION, pack_locations, unpack_locations
from dlfs.format.paths import display, path_bytes

DIRECTORY_PATH_BYTES_MAX = PATH_BYTES_MAX - 1
"""Greatest length of the path of an empty directory: it is stored with a slash behind it."""

SAMPLES_MAX = 1 << 48
"""Most samples of one dataset (FORMAT.md, "Directory segment")."""

_ROWS_AT_FIRST = 1024
_SECTIONS_BYTES = 11 * 4096  # header, and the padding of each section
_SAMPLE_BYTES = 32  # location, order, leaf, separators, name offsets, and their checksums
_CHUNK_BYTES = 10  # entries of the table of parts for a chunk of samples, which may need two chunks


def segment_bytes_max(samples: int, path_bytes: int, sample_chunks: int) -> int:
    """Return an upper bound of the length of a directory segment, in bytes.

    Args:
        samples: number of samples.
        path_bytes: sum of the lengths of their paths.
        sample_chunks: sum of the lengths of the samples, in chunks.
    """
    return _SECTIONS_BYTES + samples * _SAMPLE_BYTES + path_bytes + sample_chunks * _CHUNK_BYTES


class Location(NamedTuple):
    """The address, length and CRC32C of a sample."""

    address: int
    """Address in the dataset's data space: chunk number * chunk_bytes + offset in the chunk."""
    length_bytes: int
    crc32c: int


@dataclass(frozen=True, slots=True)
class FrozenParts:
    """An encoded directory segment; on media the names part directly follows the entries part."""

    entries: NDArray[np.uint8]
    names: NDArray[np.uint8]
    sample_count: int
    sample_bytes: int


class DirectoryBuilder:
    """Paths and locations of the samples added so far."""

    def __init__(self) -> None:
        self._paths: dict[bytes, None] = {}  # in the order of rows
        self._order: NDArray[np.uint64] = np.empty(
            0, np.uint64
        )  # sorted order of the first rows; later rows are not sorted yet
        self._directories: set[bytes] = set()  # those that contain other paths
        self._added_directories: set[bytes] = set()
        self._locations = np.empty(_ROWS_AT_FIRST, LOCATION)

    def __len__(self) -> int:
        return len(self._paths)

    def __contains__(self, path: object) -> bool:
        return path in self._paths

    def __iter__(self) -> Iterator[bytes]:
        """Iterate over the paths in path order."""
        return iter(self._sorted_paths())

    def get(self, path: bytes) -> Location:
        """Return the location of a sample. Searches all paths.

        Raises:
            NotFoundError: it was not added.
        """
        if path not in self._paths:
            raise NotFoundError(f"look up {display(path)!r}: no such sample was added")
        row = next(row for row, known in enumerate(self._paths) if known == path)
        address, length, crc = unpack_locations(self._locations[row : row + 1])
        return Location(int(address[0]), int(length[0]), int(crc[0]))

    def add(self, path: bytes, location: Location) -> None:
        """Add one sample. After an error the directory is unchanged.

        Raises:
            ExistsError: the path is there already, or is a directory, or lies below a sample.
            UsageError: the path breaks a rule of paths.
            LimitError: the path, its location or the dataset is too long.
        """
        self.add_many([path], [location.address], [location.length_bytes], [location.crc32c])

    def add_many(
        self,
        paths: Sequence[bytes],
        addresses: ArrayLike,
        lengths: ArrayLike,
        crcs: ArrayLike,
    ) -> None:
        """Add samples. After an error none of them is added.

        Args:
            paths: in any order.
            addresses: uint64[n_samples], below 2**56.
            lengths: uint64[n_samples], bytes, below 2**40.
            crcs: uint32[n_samples].

        Raises:
            ExistsError: a path is there already, or is a directory, or lies below a sample.
            UsageError: a path breaks a rule of paths, or the arguments are not of one length.
            LimitError: a path, a location or the dataset is too long.
        """
        locations = pack_locations(addresses, lengths, crcs)
        if len(locations) != len(paths):
            raise UsageError(
                f"add samples: expected as many locations as paths, "
                f"got {len(locations)} and {len(paths)}"
            )
        first = len(self._paths)
        if first + len(paths) > SAMPLES_MAX:
            raise LimitError(
                f"add {len(paths)} samples: expected at most {SAMPLES_MAX} in a dataset"
            )
        new_directories = self._check(paths)
        self._reserve(first + len(paths))
        self._locations[first : first + len(paths)] = locations
        self._paths.update(dict.fromkeys(paths))
        self._directories |= new_directories

    def add_directory(self, path: bytes) -> None:
        """Add a directory, which need not have samples below it. One that exists stays as it is.

        Raises:
            ExistsError: a sample has this path, or it lies below one.
            UsageError: the path breaks a rule of paths.
            LimitError: the path is too long.
        """
        path_bytes(path)
        if len(path) > DIRECTORY_PATH_BYTES_MAX:
            raise LimitError(
                f"add the directory {display(path)!r}: expected at most "
                f"{DIRECTORY_PATH_BYTES_MAX} bytes, got {len(path)}"
            )
        if path in self._paths:
            raise ExistsError(f"add the directory {display(path)!r}: a sample has this path")
        parents: set[bytes] = set()
        self._check_parents(path, set(), parents, "directory")
        self._added_directories.add(path)
        self._directories |= parents

    def empty_directories(self) -> list[bytes]:
        """Return the added directories that contain neither samples nor others, in path order."""
        return sorted(self._added_directories - self._directories, key=lambda path: path + b"/")

    def check(self, paths: Sequence[bytes]) -> None:
        """Raise the errors that ``add_many`` would raise for these paths; add nothing."""
        self._check(paths)

    def rows(self) -> NDArray[np.int64]:
        """Return the row of each sample, ``int64[n_samples]`` in index order: 0 was added first."""
        if len(self._order) != len(self._paths):
            self._order = sort_paths(*pack_paths(list(self._paths)))
        return self._order.view(np.int64)

    def _sorted_paths(self) -> list[bytes]:
        paths = np.empty(len(self._paths), object)
        paths[:] = list(self._paths)
        in_order: list[bytes] = paths[self.rows()].tolist()
        return in_order

    def freeze(
        self,
        dataset_uuid: UUID,
        data_bytes: int,
        *,
        chunk_bytes: int,
        parts: NDArray[np.uint32] | None = None,
    ) -> FrozenParts:
        """Encode the segment of all that was added. More may be added afterwards.

        Args:
            dataset_uuid: UUID of the dataset, stored in the segment.
            data_bytes: the size of the data space: chunks * chunk_bytes.
            chunk_bytes: chunk size of the volume.
            parts: CRC32C of each part of a sample larger than a chunk, ``uint32[n_chunks]`` for the
                first chunks of the data space; those after them have no such part.

        Raises:
            UsageError: a sample lies outside the data space, or in another; it neither starts a
                chunk nor lies in one; or its CRC32C is not that of its parts.
            DeviceError: not enough memory.
        """
        count = len(self._paths)
        text, offsets = pack_paths(self._sorted_paths())
        locations = self._locations[self.rows()]
        lengths = unpack_locations(locations)[1]
        table = None
        if np.any(lengths > chunk_bytes):
            table = np.zeros(data_bytes // chunk_bytes, np.uint32)
            known = table[:0] if parts is None else parts[: len(table)]
            table[: len(known)] = known
        segment = build_segment(
            text,
            offsets,
            locations.view(np.uint8),
            dataset_uuid=dataset_uuid.bytes,
            data_bytes=data_bytes,
            chunk_bytes=chunk_bytes,
            parts=table,
            empty_directories=[path + b"/" for path in self.empty_directories()],
        )
        sample_bytes = int(lengths.sum(dtype=np.uint64))
        return FrozenParts(segment.entries, segment.names, count, sample_bytes)

    def _reserve(self, rows: int) -> None:
        if rows > len(self._locations):
            grown: NDArray[Any] = np.empty(max(rows, 2 * len(self._locations)), LOCATION)
            grown[: len(self._paths)] = self._locations[: len(self._paths)]
            self._locations = grown

    def _check(self, paths: Sequence[bytes]) -> set[bytes]:
        """Check new paths; return the directories that they add."""
        new: set[bytes] = set()
        directories: set[bytes] = set()
        for path in paths:
            path_bytes(path)
            if path in new or path in self._paths:
                raise ExistsError(f"add the sample {display(path)!r}: it was added already")
            if path in directories or path in self._directories or path in self._added_directories:
                raise ExistsError(f"add the sample {display(path)!r}: a directory has this path")
            new.add(path)
            self._check_parents(path, new, directories, "sample")
        return directories

    def _check_parents(
        self, path: bytes, new: set[bytes], directories: set[bytes], noun: str
    ) -> None:
        """Add the directories that contain a path to ``directories``, up to the first known one."""
        slash = path.rfind(b"/")
        while slash > 0:
            parent = path[:slash]
            if parent in self._directories or parent in directories:
                return
            if parent in self._paths or parent in new:
                raise ExistsError(
                    f"add the {noun} {display(path)!r}: {display(parent)!r} is a sample, "
                    f"it cannot be a directory"
                )
            directories.add(parent)
            slash = path.rfind(b"/", 0, slash)
