"""Makes a version of a dataset from samples that were written before, in several sorted streams.

``merge_samples`` merges the streams into one directory and one attribute segment, which are in
memory then; it needs no lock. ``write_version`` writes both, as the owner of the volume's lock, and
returns the record to commit.

Threads: one. Memory: the two segments, and blocks of all streams; while the directory is completed,
16 bytes a sample more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from dlfs._native.paths import PathRefusedError
from dlfs._native.segment import SegmentBuilder
from dlfs.attributes.merging import Columns, MergedColumns
from dlfs.base.threads import run_waiting
from dlfs.connection.stored_samples import StoredSamples
from dlfs.directory import FrozenParts, merge_sorted
from dlfs.directory.builder import explain_refusal
from dlfs.fields import FIELDS_COLUMN, FieldEncoder
from dlfs.format.attributes import AttributeHead, decode_head
from dlfs.format.bad_records import BadReport, bad_records_tags
from dlfs.format.catalog import AttributeExtent, DatasetRecord
from dlfs.format.digests import make_digests
from dlfs.format.geometry import ChunkRun
from dlfs.store.chunk_writer import ChunkWriter
from dlfs.store.space import TakenRuns, append_run, count_chunks
from dlfs.store.transaction import Transaction, now_ns

BUFFERED_SAMPLES = 1 << 20
"""Samples of all streams together that are in memory while they are merged."""
BLOCK_SAMPLES_MIN, BLOCK_SAMPLES_MAX = 1 << 10, 1 << 16
"""Samples of one stream that are in memory then."""

Tick = Callable[[int], None]
"""Called with the number of samples that were merged since the last call; with 0 while the
directory is completed. What it raises ends the work."""


@dataclass(frozen=True, slots=True)
class Stream:
    """A sorted stream of samples.

    Attributes:
        samples: the samples.
        first_chunk: chunk of the new data space at which that of these samples begins.
        chunk_count: chunks of these samples.
    """

    samples: StoredSamples
    first_chunk: int
    chunk_count: int

    @property
    def end_chunk(self) -> int:
        """Chunk of the new data space behind those of the samples."""
        return self.first_chunk + self.chunk_count


@dataclass(frozen=True, slots=True)
class EncodedVersion:
    """The directory and the attributes of a version.

    Attributes:
        directory: the directory segment.
        attributes: consecutive parts of the attribute segment, the head first; none without one.
    """

    directory: FrozenParts
    attributes: Sequence[NDArray[np.uint8]]

    @property
    def head(self) -> AttributeHead | None:
        """The head of the attribute segment; None without one."""
        if not self.attributes:
            return None
        return decode_head(self.attributes[0], "the attributes to write")


def attribute_chunks(attributes: Sequence[NDArray[np.uint8]], chunk_bytes: int) -> int:
    """Return the chunks that an attribute segment takes."""
    return -(-sum(part.nbytes for part in attributes) // chunk_bytes)


def merge_samples(
    streams: Sequence[Stream],
    *,
    uuid: UUID,
    chunk_bytes: int,
    directories: Sequence[bytes],
    columns: Columns,
    defaults: Mapping[str, Any],
    encoder: FieldEncoder | None,
    tick: Tick = lambda _samples: None,
) -> EncodedVersion:
    """Merge streams of samples into the segments of one version.

    Args:
        streams: the streams, in any order of their paths.
        uuid: UUID of the new version.
        chunk_bytes: chunk size of the volume.
        directories: paths of directories, which need not have samples, besides those of streams.
        columns: columns that the samples have; see ``MergedColumns``.
        defaults: value of samples of a stream that lacks a column.
        encoder: encoder of the samples' fields; None for samples of bytes.
        tick: see ``Tick``.

    Raises:
        ExistsError: two samples have one path, or a sample has the path of a directory.
        UsageError, LimitError: the path of a directory is malformed.
        FormatError: a stream is malformed (ChecksumError).
        DeviceError: a read failed, or there is not enough memory.
    """
    end_chunk = max((stream.end_chunk for stream in streams), default=0)
    directories = [*directories]
    for stream in streams:
        directories += stream.samples.empty_directories
    # One without samples has no values either, not even defaults: equal columns have equal bytes.
    streams = [stream for stream in streams if stream.samples.sample_count]
    samples = [stream.samples for stream in streams]
    made = MergedColumns(
        [each.columns for each in samples],
        [each.sample_count for each in samples],
        columns,
        defaults=defaults,
        constants={} if encoder is None else {FIELDS_COLUMN: encoder.text},
    )
    builder = SegmentBuilder(dataset_uuid=uuid.bytes, data_bytes=0, chunk_bytes=chunk_bytes)
    with builder:
        try:
            builder.add_directories(sorted(set(directories), key=lambda path: path + b"/"))
            for block in merge_sorted(_blocks(streams, chunk_bytes)):
                builder.add(block.text, block.offsets, block.locations)
                made.append(block.rows)
                tick(len(block.rows))
            attributes = made.freeze(uuid) if columns else []
            chunks = end_chunk + attribute_chunks(attributes, chunk_bytes)
            builder.resize(chunks * chunk_bytes)
            parts = _parts(streams)
            segment = run_waiting(lambda: builder.finish(parts), lambda: tick(0))
        except PathRefusedError as error:
            raise explain_refusal(error) from error
    directory = FrozenParts(
        segment.entries, segment.names, segment.sample_count, segment.sample_bytes
    )
    return EncodedVersion(directory, attributes)


def _blocks(streams: Sequence[Stream], chunk_bytes: int) -> list[Any]:
    """Return the blocks of each stream, whose rows are those of all streams one after the other."""
    count = BUFFERED_SAMPLES // max(1, len(streams))
    count = min(max(count, BLOCK_SAMPLES_MIN), BLOCK_SAMPLES_MAX) // 16 * 16
    blocks, row = [], 0
    for stream in streams:
        address = stream.first_chunk * chunk_bytes
        blocks.append(stream.samples.blocks(count, first_address=address, first_row=row))
        row += stream.samples.sample_count
    return blocks


def _parts(streams: Sequence[Stream]) -> NDArray[np.uint32] | None:
    """Return the CRC32Cs of the parts of samples larger than a chunk, by chunk."""
    found = [(stream.first_chunk, stream.samples.parts) for stream in streams]
    found = [(first, parts) for first, parts in found if len(parts)]
    if not found:
        return None
    table = np.zeros(max(first + len(parts) for first, parts in found), np.uint32)
    for first, parts in found:
        table[first : first + len(parts)] = parts
    return table


def write_version(
    transaction: Transaction,
    encoded: EncodedVersion,
    *,
    name: bytes,
    uuid: UUID,
    layout: str,
    seed: int,
    runs: Sequence[ChunkRun],
    bad: BadReport,
    version: int | None = None,
) -> DatasetRecord:
    """Write the segments of a version, and make them durable; return its record.

    Args:
        transaction: transaction of the writer.
        encoded: the segments.
        name: name of the dataset.
        uuid: UUID of the version.
        layout: order in which its samples were packed.
        seed: seed of that order.
        runs: chunks of its samples, in data order.
        bad: records that imports left out.
        version: number of the version; the next one by default.

    Raises:
        SpaceError: the volume has too little free space.
        DeviceError: a write failed.
    """
    geometry = transaction.geometry
    data_runs, extent = list(runs), None
    if encoded.attributes:
        count = attribute_chunks(encoded.attributes, geometry.chunk_bytes)
        taken = TakenRuns(transaction.space.take_all(count))
        with ChunkWriter(transaction.devices, geometry, taken.take) as chunks:
            chunks.write_parts(encoded.attributes)
            chunks.drain()
        extent = AttributeExtent(
            count_chunks(runs) * geometry.chunk_bytes,
            sum(part.nbytes for part in encoded.attributes),
            encoded.attributes[0].nbytes,
        )
        for run in chunks.runs:
            append_run(data_runs, run)
    directory = encoded.directory
    return DatasetRecord(
        name=name,
        version=transaction.next_version(name) if version is None else version,
        uuid=uuid,
        created_ns=now_ns(),
        sample_count=directory.sample_count,
        sample_bytes=directory.sample_bytes,
        layout=layout,
        seed=seed,
        data_runs=tuple(data_runs),
        data_bytes=count_chunks(data_runs) * geometry.chunk_bytes,
        directory_runs=transaction.write_segment([directory.entries, directory.names]),
        entries_bytes=directory.entries.nbytes,
        names_bytes=directory.names.nbytes,
        attribute_extent=extent,
        tags=bad_records_tags(bad, transaction.base.superblock.catalog_bytes),
        digests=make_digests(directory.entries, directory.names, encoded.head),
    )
