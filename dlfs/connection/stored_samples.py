"""Samples that were written before, read as a stream in the order of their paths.

A ``StoredSamples`` has the samples of one directory segment and their attribute segment: those of a
step of an unfinished import, of a sealed version, or of a writer that has encoded its own. Both
segments are read in excerpts, so that memory does not depend on their length, and every block is
verified when it is read.

Threads: one at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from dlfs._native.directory import NativeDirectory
from dlfs.attributes.stored import StoredColumns
from dlfs.directory import PathBlock
from dlfs.errors import FormatError
from dlfs.format.catalog import DatasetRecord
from dlfs.format.geometry import ChunkRun, DataSpace
from dlfs.format.journal import STEP_HEADER_BYTES
from dlfs.format.location import LOCATION
from dlfs.format.paths import display
from dlfs.store.chunk_reader import FIRST_COPY_FIRST, CopyOrder, copy_orders, read_into
from dlfs.store.excerpts import BLOCK_BYTES, Cursor, Excerpts, SegmentReader
from dlfs.store.journal import Step
from dlfs.store.transaction import Generation

NAMES_IN_BLOCK = 16
"""Names that one offset in the names part stands for."""
_LOCATION_BYTES = LOCATION.itemsize
UNFINISHED = "the unfinished import of"
"""Text before the name of the dataset in the errors of steps, which tells them from others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentSizes:
    """The lengths of a directory segment and of the attribute segment of the same samples.

    Attributes:
        uuid: UUID of the dataset in both.
        sample_count: number of samples.
        entries_bytes: length of the directory's entries part.
        names_bytes: length of its names part.
        attributes_bytes: length of the attribute segment; 0 without one.
        attributes_head_bytes: length of its head.
    """

    uuid: UUID
    sample_count: int
    entries_bytes: int
    names_bytes: int
    attributes_bytes: int = 0
    attributes_head_bytes: int = 0


class StoredSamples:
    """The samples of a directory segment, in the order of their paths.

    Args:
        directory: reads the directory segment.
        attributes: reads the attribute segment.
        sizes: their lengths.

    Attributes:
        sample_count: number of samples.
        columns: their columns.

    Raises:
        FormatError: a segment is malformed, or that of other samples.
        DeviceError: a read failed.
    """

    def __init__(
        self, directory: SegmentReader, attributes: SegmentReader, sizes: SegmentSizes
    ) -> None:
        self.sample_count = sizes.sample_count
        self._where = directory.where
        self._entries = Excerpts(directory, 0, sizes.entries_bytes)
        self._names = Excerpts(directory, sizes.entries_bytes, sizes.names_bytes)
        self._directory = self._open(directory.orders, sizes)
        header = self._entries.memory[:BLOCK_BYTES].view("<u8")
        self._names_checksums_at, self._locations_at = int(header[12]), int(header[14])
        self._parts_at = int(header[22])
        head = self._entries.memory[: self._locations_at].view("<u4")
        entries_table = head[BLOCK_BYTES // 4 :]
        self._entries.cover(entries_table, self._locations_at)
        self._names.cover(head[self._names_checksums_at // 4 :])
        self.columns = StoredColumns(
            attributes,
            sizes.attributes_bytes,
            sizes.attributes_head_bytes,
            dataset_uuid=sizes.uuid,
            sample_count=sizes.sample_count,
        )

    def _open(self, orders: Sequence[CopyOrder], sizes: SegmentSizes) -> NativeDirectory:
        """Read the head of the directory from the first copies that have it intact, and open it."""
        problem: FormatError | None = None
        entries = self._entries
        for choice in orders:
            entries.read(0, BLOCK_BYTES, choice)
            head_bytes = int(entries.memory[112:120].view("<u8")[0])  # where locations begin
            if head_bytes % BLOCK_BYTES == 0 and head_bytes <= sizes.entries_bytes:
                entries.read(BLOCK_BYTES, head_bytes, choice)
            try:
                directory = NativeDirectory(entries.memory, label=self._where)
                expected = sizes.uuid, sizes.sample_count, sizes.names_bytes
                got = directory.dataset_uuid, directory.count, directory.names_bytes
                if got != expected:
                    raise FormatError(f"read {self._where}: expected {expected}, got {got}")
            except FormatError as error:
                problem = problem or error
            else:
                directory.attach_names(self._names.memory)
                return directory
        assert problem is not None
        raise problem

    @property
    def parts(self) -> NDArray[np.uint32]:
        """CRC32C of each part of a sample larger than a chunk, by chunk; empty without such.

        Raises:
            FormatError, DeviceError: they are malformed, or cannot be read.
        """
        count = len(self._directory.parts)
        if count:
            start = self._parts_at
            Cursor(self._entries, start, start + 4 * count).need(start, start + 4 * count)
        return self._directory.parts

    @property
    def empty_directories(self) -> list[bytes]:
        """Paths of the directories without samples.

        Raises:
            FormatError, DeviceError: they are malformed, or cannot be read.
        """
        count = self._directory.empty_count
        if not count:
            return []
        blocks = -(-self.sample_count // NAMES_IN_BLOCK)
        more = -(-count // NAMES_IN_BLOCK)
        offsets_end = 8 * (blocks + more + 1)
        at = Cursor(self._names, 8 * blocks, offsets_end).need(8 * blocks, offsets_end)
        begin, end = self._text_range(at.view("<u8"))
        Cursor(self._names, begin, end).need(begin, end)
        return [path[:-1] for path in self._directory.empty_names(0, count)]

    def blocks(
        self, block_samples: int, *, first_address: int, first_row: int
    ) -> Iterator[PathBlock]:
        """Yield the samples in the order of their paths.

        Args:
            block_samples: most samples of a block, a multiple of 16.
            first_address: address at which the data space of these samples begins.
            first_row: row of the first sample.

        Raises:
            FormatError: a block of the directory is wrong (ChecksumError), or malformed.
            DeviceError: a read failed.
        """
        name_blocks = -(-self.sample_count // NAMES_IN_BLOCK)
        start, end = self._locations_at, self._locations_at + _LOCATION_BYTES * self.sample_count
        locations = Cursor(self._entries, start, end)
        offsets = Cursor(self._names, 0, 8 * (name_blocks + 1))
        text = Cursor(self._names, 8 * (name_blocks + 1), len(self._names.memory))
        first = 0
        while first < self.sample_count:
            last = min(self.sample_count, first + block_samples - first % NAMES_IN_BLOCK)
            low, high = first // NAMES_IN_BLOCK, -(-last // NAMES_IN_BLOCK)
            text.need(*self._text_range(offsets.need(8 * low, 8 * (high + 1)).view("<u8")))
            paths, ends = self._directory.packed_names(first, last - first)
            last = first + len(ends) - 1
            raw = locations.need(start + _LOCATION_BYTES * first, start + _LOCATION_BYTES * last)
            found = raw.view(LOCATION).copy()
            found["address"] += np.uint64(first_address)
            rows = np.arange(first_row + first, first_row + last, dtype=np.uint64)
            yield PathBlock(paths, ends, found, rows)
            first = last

    def _text_range(self, offsets: NDArray[np.uint64]) -> tuple[int, int]:
        """Return the range of the names part between the first and the last of some offsets."""
        begin, end = int(offsets[0]), int(offsets[-1])
        if not begin <= end <= len(self._names.memory):
            raise FormatError(f"read {self._where}: expected rising offsets of names")
        return begin, end


def stored_step(base: Generation, record: DatasetRecord, step: Step) -> StoredSamples:
    """Open the samples of a step of an unfinished import.

    Raises:
        FormatError, DeviceError: as ``StoredSamples``.
    """
    header = step.header
    what = f"step {header.number} of {UNFINISHED} {display(record.name)!r}"
    start = step.address + STEP_HEADER_BYTES
    sizes = SegmentSizes(
        uuid=record.uuid,
        sample_count=header.sample_count,
        entries_bytes=header.entries_bytes,
        names_bytes=header.names_bytes,
        attributes_bytes=header.attributes_bytes,
        attributes_head_bytes=header.attributes_head_bytes,
    )
    runs = record.journal_runs
    return StoredSamples(
        _reader(base, runs, start, what),
        _reader(
            base, runs, start + sizes.entries_bytes + sizes.names_bytes, f"attributes of {what}"
        ),
        sizes,
    )


def stored_version(base: Generation, record: DatasetRecord) -> StoredSamples:
    """Open the samples of a sealed version.

    Raises:
        FormatError, DeviceError: as ``StoredSamples``.
    """
    what = f"dataset {display(record.name)!r} version {record.version}"
    extent = record.attribute_extent
    sizes = SegmentSizes(
        uuid=record.uuid,
        sample_count=record.sample_count,
        entries_bytes=record.entries_bytes,
        names_bytes=record.names_bytes,
        attributes_bytes=0 if extent is None else extent.segment_bytes,
        attributes_head_bytes=0 if extent is None else extent.head_bytes,
    )
    attribute_runs = record.split_data_runs(base.geometry.chunk_bytes)[1]
    return StoredSamples(
        _reader(base, record.directory_runs, 0, f"the directory of {what}"),
        _reader(base, attribute_runs, 0, f"the attributes of {what}"),
        sizes,
    )


def encoded_samples(
    directory: Sequence[NDArray[np.uint8]],
    attributes: Sequence[NDArray[np.uint8]],
    uuid: UUID,
    sample_count: int,
) -> StoredSamples:
    """Return samples whose segments are in memory.

    Args:
        directory: the parts of the directory segment: entries and names.
        attributes: the parts of the attribute segment, the head first; none without columns.
        uuid: UUID of the dataset in both.
        sample_count: number of samples.
    """
    sizes = SegmentSizes(
        uuid=uuid,
        sample_count=sample_count,
        entries_bytes=directory[0].nbytes,
        names_bytes=directory[1].nbytes,
        attributes_bytes=sum(part.nbytes for part in attributes),
        attributes_head_bytes=attributes[0].nbytes if attributes else 0,
    )

    def reader(parts: Sequence[NDArray[np.uint8]], where: str) -> SegmentReader:
        return SegmentReader(partial(_copy_parts, parts), [FIRST_COPY_FIRST], where)

    return StoredSamples(
        reader(directory, "the new samples"), reader(attributes, "their attributes"), sizes
    )


def _reader(base: Generation, runs: Sequence[ChunkRun], start: int, where: str) -> SegmentReader:
    """Return a reader of the segment that begins at an address in the space of some runs."""
    space = DataSpace(base.geometry, tuple(runs))

    def read(offset: int, memory: NDArray[np.uint8], choice: CopyOrder) -> None:
        read_into(base.sources, space, start + offset, memory, choice)

    return SegmentReader(read, copy_orders(base.geometry), where)


def _copy_parts(
    parts: Sequence[NDArray[np.uint8]], offset: int, memory: NDArray[np.uint8], _choice: Any
) -> None:
    """Copy the bytes of parts, one after the other, from an offset on."""
    done = 0
    for part in parts:
        if offset < part.nbytes and done < memory.nbytes:
            piece = part[offset : offset + memory.nbytes - done]
            memory[done : done + piece.nbytes] = piece
            done += piece.nbytes
            offset = 0
        else:
            offset = max(0, offset - part.nbytes)
