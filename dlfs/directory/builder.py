"""The directory of a dataset that is being written: mutable, in memory.

Paths may come in any order; a path's row is its place in that order. They are sorted, outside of
the interpreter's lock, when they are listed or frozen. Every rule that a sealed directory must keep
is checked as paths come in: the rules of a path, no path twice, and no path that is both a sample
and a directory. A sample takes its path and 34 to 39 bytes.

Threads: one at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from uuid import UUID

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dlfs._native import paths as native
from dlfs._native.paths import PathRefusedError, PathTable, pack_paths
from dlfs._native.segment import SegmentBuilder
from dlfs.errors import DlfsError, ExistsError, LimitError, NotFoundError, UsageError
from dlfs.format.constants import PATH_BYTES_MAX
from dlfs.format.location import LOCATION, pack_locations, unpack_location
from dlfs.format.paths import display, path_bytes

DIRECTORY_PATH_BYTES_MAX = PATH_BYTES_MAX - 1
"""Greatest length of the path of an empty directory: it is stored with a slash behind it."""

SAMPLES_MAX = 1 << 48
"""Most samples of one dataset (FORMAT.md, "Directory segment")."""

_LISTED = 4096  # paths that are made at a time
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
        self._table = PathTable()
        self._order: NDArray[np.uint64] = np.empty(
            0, np.uint64
        )  # sorted order of the first rows; later rows are not sorted yet

    def __len__(self) -> int:
        return len(self._table)

    def __contains__(self, path: object) -> bool:
        return isinstance(path, bytes) and self._table.find(path) >= 0

    def __iter__(self) -> Iterator[bytes]:
        """Iterate over the paths in path order."""
        rows = self.rows().view(np.uint64)
        for first in range(0, len(rows), _LISTED):
            yield from self._table.paths(rows[first : first + _LISTED])

    def get(self, path: bytes) -> Location:
        """Return the location of a sample.

        Raises:
            NotFoundError: it was not added.
        """
        row = self._table.find(path)
        if row < 0:
            raise NotFoundError(f"look up {display(path)!r}: no such sample was added")
        packed = np.frombuffer(self._table.location(row), LOCATION)
        return Location(*unpack_location(packed[0]))

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
        if len(self) + len(paths) > SAMPLES_MAX:
            raise LimitError(
                f"add {len(paths)} samples: expected at most {SAMPLES_MAX} in a dataset"
            )
        text, offsets = pack_paths(paths)
        try:
            self._table.add(text, offsets, locations)
        except PathRefusedError as error:
            raise explain_refusal(error) from error

    def add_directory(self, path: bytes) -> None:
        """Add a directory, which need not have samples below it. One that exists stays as it is.

        Raises:
            ExistsError: a sample has this path, or it lies below one.
            UsageError: the path breaks a rule of paths.
            LimitError: the path is too long.
        """
        try:
            self._table.add_directory(path)
        except PathRefusedError as error:
            raise explain_refusal(error) from error

    def empty_directories(self) -> list[bytes]:
        """Return the added directories that contain neither samples nor others, in path order."""
        return self._table.empty_directories()

    def check(self, paths: Sequence[bytes]) -> None:
        """Raise the errors that ``add_many`` would raise for these paths; add nothing."""
        text, offsets = pack_paths(paths)
        try:
            self._table.add(text, offsets, None)
        except PathRefusedError as error:
            raise explain_refusal(error) from error

    def rows(self) -> NDArray[np.int64]:
        """Return the row of each sample, ``int64[n_samples]`` in index order: 0 was added first."""
        if len(self._order) != len(self):
            self._order = self._table.sort()
        return self._order.view(np.int64)

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
        order = self.rows().view(np.uint64)
        self._table.shrink()
        with SegmentBuilder(
            dataset_uuid=dataset_uuid.bytes, data_bytes=data_bytes, chunk_bytes=chunk_bytes
        ) as builder:
            builder.add_directories(self.empty_directories())
            builder.add_table(self._table, order)
            segment = builder.finish(parts)
        return FrozenParts(
            segment.entries, segment.names, segment.sample_count, segment.sample_bytes
        )


def explain_refusal(error: PathRefusedError) -> DlfsError:
    """Return the error that says what is wrong with a path that libdlfs refused."""
    path = error.path
    noun = "directory" if error.is_directory else "sample"
    action = f"add the {noun} {display(path)!r}"
    if error.rule == native.REPEATED:
        return ExistsError(f"{action}: it was added already")
    if error.rule == native.IS_DIRECTORY:
        return ExistsError(f"{action}: a directory has this path")
    if error.rule == native.BELOW_SAMPLE and error.sample == path:
        return ExistsError(f"{action}: a sample has this path")
    if error.rule == native.BELOW_SAMPLE:
        sample = display(error.sample)
        return ExistsError(f"{action}: {sample!r} is a sample, it cannot be a directory")
    if error.rule == native.MALFORMED:
        return _explain_malformed(path, action)
    return error


def _explain_malformed(path: bytes, action: str) -> DlfsError:
    try:
        path_bytes(path)
    except (LimitError, UsageError) as error:
        return error
    return LimitError(
        f"{action}: expected at most {DIRECTORY_PATH_BYTES_MAX} bytes, got {len(path)}"
    )
