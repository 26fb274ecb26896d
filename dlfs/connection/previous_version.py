"""The samples of a dataset's version that the next version carries over (``Volume.append``).

The next version begins with the chunks that hold the samples of the previous one, so every sample
keeps its address. The directory and the attributes are written anew for all samples, because both
are in the order of the paths.

``SharedChunks`` finds the chunks that a version has in common with one that was read before, so
that a verification or a repair reads them once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from dlfs.attributes import AttributeTable, read_attributes
from dlfs.connection.segment_loading import load_segment
from dlfs.directory import FrozenDirectory
from dlfs.fields import FIELDS_COLUMN, FieldEncoder, find_fields
from dlfs.format.bad_records import BadReport, read_bad_records
from dlfs.format.catalog import DatasetRecord
from dlfs.format.geometry import ChunkRun, Geometry
from dlfs.format.paths import display
from dlfs.store.space import count_chunks
from dlfs.store.transaction import Generation


@dataclass(frozen=True, slots=True)
class PreviousVersion:
    """Samples that are on the volume already, in index order.

    Attributes:
        runs: chunks that hold the samples, in data order, and maybe others.
        first_chunk: number of the chunk in ``runs`` that ``parts`` begins with.
        paths: path of each sample.
        addresses: address of each sample in these chunks, ``uint64[n]``.
        lengths: length of each sample in bytes, ``int64[n]``.
        crcs: CRC32C of each sample, ``uint32[n]``.
        parts: CRC32C of each part of a sample larger than a chunk, by chunk; see
            ``FrozenDirectory.parts``.
        empty_directories: paths of directories without samples.
        columns: ``[n]`` values of each attribute by name.
        encoder: encoder of the samples' fields; None for samples of bytes.
        bad: records that imports left out of the version.
    """

    runs: tuple[ChunkRun, ...]
    paths: list[bytes]
    addresses: NDArray[np.uint64]
    lengths: NDArray[np.int64]
    crcs: NDArray[np.uint32]
    parts: NDArray[np.uint32]
    empty_directories: list[bytes]
    columns: dict[str, NDArray[Any]]
    encoder: FieldEncoder | None
    first_chunk: int = 0
    bad: BadReport = field(default_factory=BadReport)


def load_previous_version(base: Generation, record: DatasetRecord) -> PreviousVersion:
    """Read the directory and the attributes of a version, and verify them.

    Args:
        base: generation that has the dataset; its writer has locked the volume.
        record: record of the version.

    Raises:
        FormatError: the directory or an attribute is malformed.
        DeviceError: a read failed.
    """
    segment = read_attributes(base.sources, base.geometry, record)
    extent = record.attribute_extent
    if segment is None or extent is None:
        table = AttributeTable.empty(record.uuid, record.sample_count)
    else:
        table = AttributeTable.over(segment, extent.head_bytes)
    name = display(record.name)
    fields = find_fields(table, np.arange(record.sample_count), name)
    encoder = FieldEncoder(fields) if fields else None
    columns = {name: table.column(name) for name in table.dtypes}
    if encoder is not None:  # the same text for all samples, however another writer wrote it
        columns[FIELDS_COLUMN] = np.full(record.sample_count, encoder.text, object)
    runs = record.split_data_runs(base.geometry.chunk_bytes)[0]
    with load_segment(base, record, shared=False, locked=True) as directory:
        return PreviousVersion(
            runs=runs,
            paths=directory.names(),
            addresses=directory.addresses(),
            lengths=directory.lengths(),
            crcs=directory.crcs(),
            parts=directory.parts[: count_chunks(runs)].copy(),
            empty_directories=directory.empty_directories(),
            columns=columns,
            encoder=encoder,
            bad=read_bad_records(record.tags).of_version(record.version),
        )


class SharedChunks:
    """The chunks of samples that need not be read again, because an earlier version has them.

    A version that was appended to another begins with the other's chunks. Chunks count as shared
    only if both versions have the same samples there: equal addresses, lengths and checksums.

    Args:
        geometry: geometry of the volume.
        records: datasets in the order in which they are read.
    """

    def __init__(self, geometry: Geometry, records: Sequence[DatasetRecord]) -> None:
        self._earlier: dict[UUID, tuple[UUID, int]] = {}
        """Dataset read before and the length of the common start in bytes, by dataset."""
        self._digests: dict[tuple[UUID, int], bytes | None] = {}
        """Digests of the samples at the start of a dataset, by dataset and length in bytes."""
        last: dict[int, tuple[UUID, tuple[ChunkRun, ...]]] = {}
        for record in records:
            runs = record.split_data_runs(geometry.chunk_bytes)[0]
            if not runs:
                continue
            first = runs[0].first_chunk
            if first in last:
                uuid, others = last[first]
                size_bytes = _common_chunks(runs, others) * geometry.chunk_bytes
                self._earlier[record.uuid] = uuid, size_bytes
                self._digests[uuid, size_bytes] = None
            last[first] = record.uuid, runs

    def size_bytes(self, record: DatasetRecord) -> int:
        """Return the length of the start that a dataset has in common with an earlier one."""
        return self._earlier.get(record.uuid, (None, 0))[1]

    def start(self, record: DatasetRecord, directory: FrozenDirectory) -> int:
        """Return the address of the first chunk to read; all before it were found to be intact."""
        earlier = self._earlier.get(record.uuid)
        known = None if earlier is None else self._digests[earlier]
        if earlier is None or known is None:
            return 0
        return earlier[1] if known == _digest(directory, earlier[1]) else 0

    def add_intact(self, record: DatasetRecord, directory: FrozenDirectory) -> None:
        """Record that all samples of a dataset were read and found to be intact."""
        for uuid, size_bytes in self._digests:
            if uuid == record.uuid:
                self._digests[uuid, size_bytes] = _digest(directory, size_bytes)


def _common_chunks(runs: Sequence[ChunkRun], others: Sequence[ChunkRun]) -> int:
    """Return the number of chunks with which two lists of runs begin alike."""
    count = 0
    for run, other in zip(runs, others, strict=False):
        if run.first_chunk != other.first_chunk:
            break
        count += min(run.chunk_count, other.chunk_count)
        if run.chunk_count != other.chunk_count:
            break
    return count


def _digest(directory: FrozenDirectory, end: int) -> bytes | None:
    """Return a digest of the samples below an address; None if one reaches beyond it."""
    addresses, lengths, crcs = directory.addresses(), directory.lengths(), directory.crcs()
    chosen = np.flatnonzero(addresses < end)
    addresses, lengths, crcs = addresses[chosen], lengths[chosen], crcs[chosen]
    if (addresses + lengths.astype(np.uint64) > end).any():
        return None
    order = np.lexsort((crcs, lengths, addresses))
    found = hashlib.blake2b(digest_size=16)
    for values in (addresses, lengths, crcs):
        found.update(values[order].tobytes())
    return found.digest()
