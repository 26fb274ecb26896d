"""What a volume, its members and its datasets are, as plain values for users."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from uuid import UUID

from dlfs.format.catalog import DatasetRecord
from dlfs.format.geometry import Geometry
from dlfs.format.paths import display
from dlfs.format.superblock import Superblock, slot_for
from dlfs.store.losses import loss_of
from dlfs.store.members import Member, SuperblockCopy
from dlfs.store.transaction import Generation

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class DatasetInfo:
    """One version of a dataset.

    Attributes:
        name: of the dataset; bytes that are not UTF-8 as surrogate escapes.
        version: 1 and up.
        uuid: of this version.
        created: when it was written, UTC.
        sample_count: samples.
        sample_bytes: the sum of their lengths.
        stored_bytes: what its chunks take on the volume, directory and attributes included.
        layout: order of packing: ``path`` or ``shuffled``.
        seed: of that order.
        attribute_bytes: of its attribute segment; 0 when it has no columns.
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


@dataclass(frozen=True, slots=True)
class SuperblockInfo:
    """One copy of a member's superblock.

    Attributes:
        name: ``A``, ``B`` or ``tail``.
        offset_bytes: on the member.
        generation: that it describes; None when it cannot be read.
        state: ``current``, ``previous``, ``unused``, ``stale`` or ``damaged``.
        problem: what is wrong with a damaged one.
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
        number: 0 and up.
        uuid: of the member.
        uri: of its device; of one that was not given, what it is called.
        size_bytes: of the device when the volume was made; 0 when nobody can tell.
        superblocks: its copies; none when the device cannot be read.
        state: ``current``; ``missing``: its device cannot be had; ``degraded``: its device holds no
            whole and current member, or was lost while it was read.
        reason: why it is not current.
        queue_pairs_max: that its target allows a process at once; 0: it sets no limit, or nobody
            can tell.
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
        uri: of the whole volume: what ``dlfs.open`` takes.
        capacity_bytes: of all chunks.
        free_bytes: of the chunks that nothing holds.
        replicas: copies of each chunk; capacity and free space count one of them.
        unproven: reason why a newer generation may exist on members that could not be read; None:
            none can.
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
    """A time on media as UTC, to the microsecond."""
    return _EPOCH + timedelta(microseconds=nanoseconds // 1000)


def describe_dataset(record: DatasetRecord, geometry: Geometry) -> DatasetInfo:
    """The public description of a catalog record."""
    extent = record.attribute_extent
    return DatasetInfo(
        name=display(record.name),
        version=record.version,
        uuid=record.uuid,
        created=time_of(record.created_ns),
        sample_count=record.sample_count,
        sample_bytes=record.sample_bytes,
        stored_bytes=(record.data_chunks + record.directory_chunks) * geometry.chunk_bytes,
        layout=record.layout,
        seed=record.seed,
        attribute_bytes=0 if extent is None else extent.segment_bytes,
    )


def _describe_copy(copy: SuperblockCopy, generation: int) -> SuperblockInfo:
    found = copy.superblock.generation if copy.superblock is not None else None
    problem = None if copy.error is None else str(copy.error)
    current = copy.name in (slot_for(generation), "tail")
    if found is None:
        # The other slot has never been written before generation 2.
        unused = generation == 1 and not current
        state, problem = ("unused", None) if unused else ("damaged", problem)
    elif found == generation:
        state = "current"
    else:
        state = "stale" if current else "previous"
    return SuperblockInfo(copy.name, copy.offset_bytes, found, state, problem)


def describe_member(member: Member, superblock: Superblock) -> MemberInfo:
    """The public description of a member of the volume that a superblock describes."""
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
    """The public description of a volume."""
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
        free_bytes=generation.catalog.free_chunks * generation.geometry.chunk_bytes,
        dataset_count=len({record.name for record in generation.catalog.datasets}),
        replicas=generation.geometry.replicas,
        unproven=generation.unproven,
    )
