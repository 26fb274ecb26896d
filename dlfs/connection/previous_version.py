"""The version of a dataset that the next version carries over (``Volume.append``).

The next version begins with the chunks that hold the samples of the previous one, so every sample
keeps its address. The directory and the attributes are written anew for all samples, because both
are in the order of the paths: the previous version's are merged with the new samples as a sorted
stream (``dataset.sealing``). Here is what a writer must know before that.

``SharedChunks`` finds the chunks that a version has in common with one that was read before, so
that a verification or a repair reads them once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import numpy as np

from dlfs.attributes import AttributeTable, load_attributes
from dlfs.base.closing import Closing
from dlfs.connection.segment_loading import load_segment
from dlfs.directory import FrozenDirectory
from dlfs.fields import FieldEncoder, find_fields
from dlfs.format.bad_records import BadReport, read_bad_records
from dlfs.format.catalog import DatasetRecord
from dlfs.format.geometry import ChunkRun, Geometry
from dlfs.format.paths import display
from dlfs.store.transaction import Generation

_ROWS_AT_ONCE = 1 << 20


@dataclass(frozen=True, slots=True)
class PreviousVersion(Closing):
    """A version whose samples the next version has as well.

    Attributes:
        record: record of the version.
        runs: chunks that hold its samples, in data order.
        columns: dtype of each column as it is stored, by name; ``object`` for strings.
        names: names of its attributes, each vector once.
        encoder: encoder of its samples' fields; None for samples of bytes.
        bad: records that imports left out of it.
        directory: its directory, to find paths in; closed with this object.
        labels: the label of each class, if they are numbered as a folder of classes numbers them;
            read when it is called, from devices that are open.
    """

    record: DatasetRecord
    runs: tuple[ChunkRun, ...]
    columns: dict[str, np.dtype[Any]]
    names: frozenset[str]
    encoder: FieldEncoder | None
    bad: BadReport
    directory: FrozenDirectory
    labels: Callable[[], dict[str, int]]

    def __contains__(self, path: object) -> bool:
        """Return True if a sample has this path."""
        return isinstance(path, bytes) and self.directory.find_one(path) >= 0

    def find_known(self, paths: Sequence[bytes]) -> bytes | None:
        """Return the first of some paths that a sample has; None if none has."""
        known = np.flatnonzero(self.directory.find(paths) >= 0)
        return paths[int(known[0])] if len(known) else None

    def close(self) -> None:
        """Free the directory. Idempotent."""
        self.directory.close()


def load_previous_version(base: Generation, record: DatasetRecord) -> PreviousVersion:
    """Read the directory of a version and the head of its attributes, and verify them.

    Args:
        base: generation that has the dataset; its writer has locked the volume.
        record: record of the version.

    Raises:
        FormatError: the directory or an attribute is malformed.
        DeviceError: a read failed.
    """
    volume_uuid = base.superblock.volume_uuid
    table = load_attributes(base.sources, base.geometry, record, volume_uuid=volume_uuid, root=None)
    fields = find_fields(table, np.arange(record.sample_count), display(record.name))
    directory = load_segment(base, record, shared=False, locked=True)
    directory.load_names()
    return PreviousVersion(
        record=record,
        runs=record.split_data_runs(base.geometry.chunk_bytes)[0],
        columns={column.name: column.dtype for column in table.head.columns},
        names=frozenset(table.dtypes),
        encoder=FieldEncoder(fields) if fields else None,
        bad=read_bad_records(record.tags).of_version(record.version),
        directory=directory,
        labels=lambda: _class_labels(table),
    )


def _class_labels(table: AttributeTable) -> dict[str, int]:
    """Return the label of each class, if classes are numbered by rising numbers from 0 on."""
    dtypes = table.dtypes
    if "class" not in dtypes or "label" not in dtypes or dtypes["class"].kind != "O":
        return {}
    if dtypes["label"].shape or dtypes["label"].kind not in "iu":
        return {}
    labels: dict[str, int] = {}
    for first in range(0, len(table), _ROWS_AT_ONCE):
        indices = np.arange(first, min(first + _ROWS_AT_ONCE, len(table)))
        names, places = table.distinct("class", indices)
        values = table.column("label", indices)
        found = np.zeros(len(names), values.dtype)
        found[places] = values
        pairs = dict(zip(names, found.tolist(), strict=True))
        if np.any(found[places] != values) or any(
            labels.get(name, label) != label for name, label in pairs.items()
        ):
            return {}  # a class with two labels
        labels |= pairs
    return labels if sorted(labels.values()) == [*range(len(labels))] else {}


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
