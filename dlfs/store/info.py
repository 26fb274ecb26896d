"""Describes a volume, its members, its datasets and their samples as plain values for users."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import numpy as np

from dlfs.format.bad_records import count_bad_records, find_bad_records
from dlfs.format.catalog import LAYOUTS, Catalog, DatasetRecord, Records
from dlfs.format.constants import TAG_SOURCE
from dlfs.format.geometry import Geometry
from dlfs.format.journal import find_first_pass
from dlfs.format.paths import display
from dlfs.format.superblock import Superblock, slot_for
from dlfs.store.losses import loss_of
from dlfs.store.members import Member, SuperblockCopy
from dlfs.store.space import allocatable_runs, count_chunks
from dlfs.store.transaction import Generation

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class DatasetInfo:
    """One version of a dataset.

    Attributes:
        name: name of the dataset; bytes that are not UTF-8 are surrogate escapes.
        version: number of the version, >= 1.
        uuid: UUID of this version.
        created: time of its creation, UTC.
        sample_count: number of samples.
        sample_bytes: sum of the lengths of all samples, in bytes.
        stored_bytes: size of its chunks on the volume, including directory and attributes, in
            bytes.
        layout: order in which samples were packed: ``path`` or ``shuffled``.
        seed: seed of that order.
        attribute_bytes: size of its attribute segment in bytes; 0 without columns.
        bad_count: number of bad records that its imports left out.
        content_digest: digest of paths, lengths, CRC32Cs and attributes, in hexadecimal: versions
            on any volumes that have the same one have the same samples.
        packing_digest: digest of the storage order and of the chunk of each sample, in hexadecimal.
    """

    name: str
    version: int
    uuid: UUID
    created: datetime
    sample_count: int
    sample_bytes: int
    stored_bytes: int
    layout: str
    seed: int
    attribute_bytes: int = 0
    bad_count: int = 0
    content_digest: str = ""
    packing_digest: str = ""


@dataclass(frozen=True, slots=True)
class UnfinishedInfo:
    """An import that is not finished: steps of it are on the volume, and no reader sees them.

    Attributes:
        name: name of the dataset that it makes.
        uuid: UUID of that dataset.
        created: time of its first step, UTC.
        sample_count: number of samples so far.
        sample_bytes: sum of their lengths, in bytes.
        stored_bytes: size of the chunks of its samples and its journal, in bytes.
        packed_again: number of samples that its second pass has packed; None in the first pass. In
            the second one the source is not needed any more.
        origin: what the import has noted of its source: ``source``, its name; ``fingerprint``; and
            ``command`` and ``directory``, of the command that began it.
        granted_bytes: size of further chunks, to which its workers may be writing, in bytes.
    """

    name: str
    uuid: UUID
    created: datetime
    sample_count: int
    sample_bytes: int
    stored_bytes: int
    packed_again: int | None
    origin: dict[str, Any]
    granted_bytes: int = 0


@dataclass(frozen=True, slots=True)
class SampleInfo:
    """Location, length and checksum of one sample.

    Attributes:
        index: index of the sample in the dataset.
        path: path of the sample.
        length_bytes: length of the sample in bytes.
        crc32c: CRC32C of the sample's bytes.
        member: URI of the member on which the sample starts.
        offset_bytes: offset of the sample on that member, in bytes.
    """

    index: int
    path: bytes
    length_bytes: int
    crc32c: int
    member: str
    offset_bytes: int


@dataclass(frozen=True, slots=True)
class SuperblockInfo:
    """One copy of a member's superblock.

    Attributes:
        name: name of the copy: ``A``, ``B`` or ``tail``.
        offset_bytes: offset of the copy on the member, in bytes.
        generation: generation that it describes; None if it cannot be read.
        state: ``current``, ``previous``, ``unused``, ``stale`` or ``damaged``.
        problem: defect of a damaged copy; else None.
    """

    name: str
    offset_bytes: int
    generation: int | None
    state: str
    problem: str | None


@dataclass(frozen=True, slots=True)
class MemberInfo:
    """One member of a volume.

    Attributes:
        number: number of the member, >= 0.
        uuid: UUID of the member.
        uri: URI of its device; a placeholder for a member that was not given.
        size_bytes: size of the device when the volume was made, in bytes; 0 if unknown.
        superblocks: its superblock copies; empty if the device cannot be read.
        state: ``current``; ``missing``: the device is not available; ``degraded``: the device has
            no whole and current member, or was lost during reads.
        reason: reason why it is not current; else None.
        queue_pairs_max: most queue pairs that its target allows a process; 0 if unlimited or
            unknown.
    """

    number: int
    uuid: UUID
    uri: str
    size_bytes: int
    superblocks: tuple[SuperblockInfo, ...]
    state: str = "current"
    reason: str | None = None
    queue_pairs_max: int = 0


@dataclass(frozen=True, slots=True)
class VolumeInfo:
    """A volume at one generation.

    Attributes:
        uri: URI of the whole volume, which ``dlfs.open`` takes.
        uuid: UUID of the volume.
        label: human-readable name given when the volume was formatted; may be empty.
        created: time of its creation, UTC.
        generation: number of the generation.
        members: its members, by number.
        chunk_bytes: size of a chunk in bytes.
        block_bytes: unit of I/O in bytes.
        capacity_bytes: size of all chunks, in bytes.
        free_bytes: size of the unused chunks, in bytes.
        dataset_count: number of dataset names.
        replicas: copies of each chunk; capacity and free space count one of them.
        unproven: reason why a newer generation may exist on unreadable members; None if none can.
    """

    uri: str
    uuid: UUID
    label: str
    created: datetime
    generation: int
    members: tuple[MemberInfo, ...]
    chunk_bytes: int
    block_bytes: int
    capacity_bytes: int
    free_bytes: int
    dataset_count: int
    replicas: int = 1
    unproven: str | None = None


def time_of(nanoseconds: int) -> datetime:
    """Convert nanoseconds since 1970 to UTC, rounded down to microseconds."""
    return _EPOCH + timedelta(microseconds=nanoseconds // 1000)


def describe_dataset(record: DatasetRecord, geometry: Geometry) -> DatasetInfo:
    """Return the public description of one catalog record, for which arrays would cost more."""
    extent = record.attribute_extent
    chunks = sum(run.chunk_count for run in (*record.data_runs, *record.directory_runs))
    return DatasetInfo(
        name=display(record.name),
        version=record.version,
        uuid=record.uuid,
        created=time_of(record.created_ns),
        sample_count=record.sample_count,
        sample_bytes=record.sample_bytes,
        stored_bytes=chunks * geometry.chunk_bytes,
        layout=record.layout,
        seed=record.seed,
        attribute_bytes=0 if extent is None else extent.segment_bytes,
        bad_count=_count_bad(record),
        content_digest=record.digests.content,
        packing_digest=record.digests.packing,
    )


def describe_unfinished(record: DatasetRecord, geometry: Geometry) -> UnfinishedInfo:
    """Return the public description of the record of an unfinished import."""
    first = find_first_pass(record.tags)
    counted = first or record
    granted_chunks = count_chunks(record.granted_runs)
    return UnfinishedInfo(
        name=display(record.name),
        uuid=record.uuid,
        created=time_of(record.created_ns),
        sample_count=counted.sample_count,
        sample_bytes=counted.sample_bytes,
        stored_bytes=(count_chunks(record.runs) - granted_chunks) * geometry.chunk_bytes,
        packed_again=None if first is None else record.sample_count - first.sample_count,
        origin=read_origin(record),
        granted_bytes=granted_chunks * geometry.chunk_bytes,
    )


def read_origin(record: DatasetRecord) -> dict[str, Any]:
    """Return what the record of an unfinished import says of its source; empty if unreadable."""
    try:
        found = json.loads(dict(record.tags).get(TAG_SOURCE, b"{}"))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def describe_datasets(records: Records, geometry: Geometry) -> list[DatasetInfo]:
    """Return the public descriptions of records of a catalog, without an object for each record."""
    catalog, positions = records.catalog, records.positions
    table = catalog.table[positions]
    chunks = catalog.sums(catalog.runs[:, 1])[positions, :2].sum(axis=1)
    bad = [0] * len(positions)
    for number in np.flatnonzero(table["tags_bytes"]).tolist():
        bad[number] = _count_bad(records[number])
    fields = zip(
        map(display, catalog.names[positions].tolist()),
        table["version"].tolist(),
        [UUID(bytes=uuid.ljust(16, b"\0")) for uuid in table["uuid"].tolist()],
        map(time_of, table["created_ns"].tolist()),
        table["sample_count"].tolist(),
        table["sample_bytes"].tolist(),
        (chunks * geometry.chunk_bytes).tolist(),
        [LAYOUTS[number] for number in table["layout"].tolist()],
        table["seed"].tolist(),
        table["attributes_bytes"].tolist(),
        bad,
        [bytes(digest).hex() for digest in table["content_digest"].tolist()],
        [bytes(digest).hex() for digest in table["packing_digest"].tolist()],
        strict=True,
    )
    return [DatasetInfo(*each) for each in fields]


def _count_bad(record: DatasetRecord) -> int:
    raw = find_bad_records(record.tags)
    return 0 if raw is None else count_bad_records(raw)


def _describe_copy(copy: SuperblockCopy, generation: int) -> SuperblockInfo:
    found = copy.superblock.generation if copy.superblock is not None else None
    problem = None if copy.error is None else str(copy.error)
    current = copy.name in (slot_for(generation), "tail")
    if found is None:
        # The other slot is first written by generation 2.
        unused = generation == 1 and not current
        state, problem = ("unused", None) if unused else ("damaged", problem)
    elif found == generation:
        state = "current"
    else:
        state = "stale" if current else "previous"
    return SuperblockInfo(copy.name, copy.offset_bytes, found, state, problem)


def free_bytes(geometry: Geometry, catalog: Catalog) -> int:
    """Return the bytes of the free chunks that a writer may allocate."""
    return count_chunks(allocatable_runs(geometry, catalog.free)) * geometry.chunk_bytes


def describe_member(member: Member, superblock: Superblock) -> MemberInfo:
    """Return the public description of a member of the volume of a superblock."""
    lost = loss_of(superblock.volume_uuid, member.uuid)
    degraded = member.state == "current" and lost is not None
    return MemberInfo(
        number=member.number,
        uuid=member.uuid,
        uri=member.device.uri,
        size_bytes=member.member_bytes,
        superblocks=tuple(_describe_copy(copy, superblock.generation) for copy in member.copies),
        state="degraded" if degraded else member.state,
        reason=lost if degraded or member.reason is None else str(member.reason),
        queue_pairs_max=member.device.queue_pairs_max,
    )


def describe_volume(generation: Generation) -> VolumeInfo:
    """Return the public description of a volume."""
    superblock = generation.superblock
    return VolumeInfo(
        uri=",".join(generation.uris),
        uuid=superblock.volume_uuid,
        label=superblock.label,
        created=time_of(superblock.created_ns),
        generation=superblock.generation,
        members=tuple(describe_member(member, superblock) for member in generation.members),
        chunk_bytes=generation.geometry.chunk_bytes,
        block_bytes=generation.geometry.block_bytes,
        capacity_bytes=generation.geometry.capacity_bytes,
        free_bytes=free_bytes(generation.geometry, generation.catalog),
        dataset_count=len(generation.catalog.dataset_names()),
        replicas=generation.geometry.replicas,
        unproven=generation.unproven,
    )
