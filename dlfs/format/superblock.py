"""The superblock: 4096 bytes that make a block device a member of a volume (FORMAT.md, section 3).

Each member has three copies: A, B and the tail. Generation G is written to the slot
``slot_for(G)``, so the copy of G - 1 is never overwritten while G is being written.

libdlfs decodes superblocks as well (native/src/volume), for programs without Python. This decoder
is here because it has words for what is wrong, and checks what a writer encodes by the same rules.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from uuid import UUID

from dlfs._native.checksums import crc32c
from dlfs.base.wording import quote
from dlfs.errors import (
    ChecksumError,
    FormatError,
    LimitError,
    TruncatedError,
    UsageError,
    VersionError,
)
from dlfs.format.constants import (
    CATALOG_BYTES_MAX,
    CATALOG_EXTENTS_MAX,
    CATALOG_HEADER_BYTES,
    CHUNK_END_MAX,
    CHUNKS_MIN,
    DATA_OFFSET_BYTES_MIN,
    DRAFT,
    GENERATION_MAX,
    GROUPS_MAX,
    LABEL_BYTES_MAX,
    MEMBER_BYTES_MAX,
    MEMBERS_MAX,
    REMOVED_BUCKETS,
    REPLICAS_MAX,
    SUPERBLOCK_BYTES,
    SUPERBLOCK_MAGIC,
    TIME_NS_MAX,
    VERSION_MAJOR,
    VERSION_MINOR,
)
from dlfs.format.geometry import ChunkRun, Geometry, MemberGroup, check_sizes, usable_bytes

# magic, major, minor, size, incompat, ro_compat, volume, member, number, count, chunk, block,
# data offset, groups, draft, member bytes, generation, created, replicas, catalog runs, catalog
# bytes, catalog CRC, label bytes, label
_HEAD = struct.Struct("<8sHHIQQ16s16sIIIIQIIQQQIIQII64s")
_DRAFT_OFFSET = 92
_GROUPS_OFFSET = 3584
_GROUP = struct.Struct("<QQIHH")
"""First chunk, rows, members, state, reserved."""
_RUNS_OFFSET = 256
_RUN = struct.Struct("<QQ")
_MEMBERS_OFFSET = 512
_REMOVED_OFFSET = 1536
_REMOVED = struct.Struct(f"<{REMOVED_BUCKETS}I")
_CRC_OFFSET = SUPERBLOCK_BYTES - 4
_CRC = struct.Struct("<I")

DECODED_MAX = 64
"""Superblocks that stay decoded: opening a volume reads the same ones several times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Superblock:
    """A decoded superblock; it is stored on the member with ``member_uuids[member_number]``."""

    volume_uuid: UUID
    member_uuids: tuple[UUID, ...]
    member_number: int
    member_bytes: int
    geometry: Geometry
    generation: int
    created_ns: int
    catalog_runs: tuple[ChunkRun, ...]
    catalog_bytes: int
    catalog_crc32c: int
    label: str = ""
    removed: tuple[int, ...] = (0,) * REMOVED_BUCKETS
    """Highest removed version of the names in each bucket."""
    ro_compat: int = 0
    """Feature bits that a writer must know. This code knows none."""
    version: tuple[int, int] = (VERSION_MAJOR, VERSION_MINOR)

    @property
    def member_uuid(self) -> UUID:
        """UUID of the member that this superblock is stored on."""
        return self.member_uuids[self.member_number]

    def last_removed(self, name: bytes) -> int:
        """Return the highest removed version of a dataset; new versions are above it.

        It is that of the name's bucket, which another name may share. 0 if none was removed.
        """
        return self.removed[_bucket(name)]

    @property
    def writable(self) -> bool:
        """True if this code knows every feature that a writer must know."""
        return not self.ro_compat


@dataclass(frozen=True, slots=True)
class UnknownSuperblock:
    """An intact superblock that a newer dlfs wrote, with features unknown to this code."""

    volume_uuid: UUID
    generation: int


def _bucket(name: bytes) -> int:
    return crc32c(name) % REMOVED_BUCKETS


def with_removed(superblock: Superblock, removed: Iterable[tuple[bytes, int]]) -> Superblock:
    """Return a superblock that also records these (name, version) pairs as removed."""
    buckets = list(superblock.removed)
    for name, version in removed:
        buckets[_bucket(name)] = max(buckets[_bucket(name)], version)
    return replace(superblock, removed=tuple(buckets))


def slot_for(generation: int) -> str:
    """Return the superblock slot of a generation: ``"A"`` if it is even, ``"B"`` if odd."""
    return "B" if generation % 2 else "A"


def encode_superblock(superblock: Superblock) -> bytes:
    """Encode a superblock.

    Returns:
        4096 bytes.

    Raises:
        UsageError: a field is out of its range or disagrees with another.
        LimitError: the catalog is too large or in too many pieces.
    """
    sb = superblock
    label = sb.label.encode()
    if len(label) > LABEL_BYTES_MAX:
        raise UsageError(
            f"encode a superblock: expected a label of at most {LABEL_BYTES_MAX} bytes, "
            f"got {len(label)}"
        )
    if len(sb.catalog_runs) > CATALOG_EXTENTS_MAX or sb.catalog_bytes > CATALOG_BYTES_MAX:
        raise LimitError(
            f"encode a superblock: expected a catalog of at most {CATALOG_BYTES_MAX} bytes in "
            f"{CATALOG_EXTENTS_MAX} extents, got {sb.catalog_bytes} bytes in {len(sb.catalog_runs)}"
        )
    problem = _problem(sb)
    if problem:
        raise UsageError(f"encode a superblock: {problem}")
    block = bytearray(SUPERBLOCK_BYTES)
    geo = sb.geometry
    _HEAD.pack_into(
        block, 0, SUPERBLOCK_MAGIC, *sb.version, SUPERBLOCK_BYTES, 0, sb.ro_compat,
        sb.volume_uuid.bytes, sb.member_uuid.bytes, sb.member_number, geo.member_count,
        geo.chunk_bytes, geo.block_bytes, geo.data_offset_bytes, len(geo.groups), DRAFT,
        sb.member_bytes, sb.generation, sb.created_ns, geo.replicas, len(sb.catalog_runs),
        sb.catalog_bytes, sb.catalog_crc32c, len(label), label,
    )  # fmt: skip
    for number, run in enumerate(sb.catalog_runs):
        _RUN.pack_into(block, _RUNS_OFFSET + 16 * number, run.first_chunk, run.chunk_count)
    for number, uuid in enumerate(sb.member_uuids):
        at = _MEMBERS_OFFSET + 16 * number
        block[at : at + 16] = uuid.bytes
    _REMOVED.pack_into(block, _REMOVED_OFFSET, *sb.removed)
    for number, group in enumerate(geo.groups):
        at = _GROUPS_OFFSET + _GROUP.size * number
        values = group.first_chunk, group.row_count, group.member_count, group.evacuating
        _GROUP.pack_into(block, at, *values, 0)
    _CRC.pack_into(block, _CRC_OFFSET, crc32c(bytes(block[:_CRC_OFFSET])))
    return bytes(block)


def decode_superblock(data: bytes | bytearray | memoryview, where: str) -> Superblock:
    """Decode and check a superblock.

    Args:
        data: at least 4096 bytes; what follows is ignored.
        where: the device's URI and the byte offset, for errors.

    Raises:
        TruncatedError: there are fewer than 4096 bytes.
        FormatError: no superblock is there, or a field is out of its range.
        ChecksumError: its CRC32C does not match.
        VersionError: it is of another major version or draft, or needs a feature unknown to this
            code.
    """
    if len(data) < SUPERBLOCK_BYTES:
        raise TruncatedError(
            f"{where}: read a superblock: expected {SUPERBLOCK_BYTES} bytes, got {len(data)}"
        )
    try:
        return _decode(bytes(data[:SUPERBLOCK_BYTES]))
    except FormatError as error:
        raise type(error)(f"{where}: read a superblock: {error}") from error


@lru_cache(maxsize=DECODED_MAX)
def _decode(block: bytes) -> Superblock:
    """Decode and check a superblock; the same bytes once.

    Raises:
        FormatError: as ``decode_superblock``, without the place.
    """
    _check_frame(block)
    try:
        sb = _parse(block)
    except ValueError as error:
        raise FormatError(str(error)) from error
    problem = _problem(sb)
    if not problem and sb.member_uuid.bytes != block[48:64]:
        problem = (
            f"expected its member UUID to be number {sb.member_number} of the volume's, "
            f"{sb.member_uuid}, got {UUID(bytes=block[48:64])}"
        )
    if problem:
        raise FormatError(problem)
    return sb


def decode_unknown(data: bytes) -> UnknownSuperblock | None:
    """Return the volume and generation of an intact superblock with unknown features, else None.

    Such a superblock may be newer than the others of its member, which this code can read.
    """
    block = data[:SUPERBLOCK_BYTES]
    if len(block) < SUPERBLOCK_BYTES:
        return None
    head = _HEAD.unpack_from(block)
    magic, major, incompat, draft = head[0], head[1], head[4], head[14]
    if (magic, major, draft) != (SUPERBLOCK_MAGIC, VERSION_MAJOR, DRAFT) or not incompat:
        return None
    if _CRC.unpack_from(block, _CRC_OFFSET) != (crc32c(block[:_CRC_OFFSET]),):
        return None
    return UnknownSuperblock(UUID(bytes=head[6]), head[16])


def _check_frame(block: bytes) -> None:
    """Check magic, checksum, major version, draft and features, in this order."""
    magic, major, _minor, size, incompat = struct.unpack_from("<8sHHIQ", block)
    if magic != SUPERBLOCK_MAGIC:
        raise FormatError(f"expected the magic {quote(SUPERBLOCK_MAGIC)}, got {quote(magic)}")
    (recorded,) = _CRC.unpack_from(block, _CRC_OFFSET)
    actual = crc32c(block[:_CRC_OFFSET])
    if recorded != actual:
        raise ChecksumError(f"expected CRC32C {recorded:#010x}, got {actual:#010x}")
    if major != VERSION_MAJOR:
        raise VersionError(f"expected format version {VERSION_MAJOR}, got {major}")
    (draft,) = struct.unpack_from("<I", block, _DRAFT_OFFSET)
    if draft != DRAFT:
        raise VersionError(
            f"expected draft {DRAFT} of the format, got {draft}: this "
            "volume was made by another state of development of DLFS: import it again"
        )
    if size != SUPERBLOCK_BYTES:
        raise FormatError(f"expected a size of {SUPERBLOCK_BYTES} bytes, got {size}")
    if incompat:
        raise VersionError(
            f"expected no features that a reader must know, "
            f"got {incompat:#x}; a newer dlfs made this volume"
        )


def _parse(block: bytes) -> Superblock:
    """Decode the fields. Raises ValueError if one cannot be represented."""
    (
        _magic, major, minor, _size, _incompat, ro_compat, volume, _member, number, count,
        chunk_bytes, block_bytes, data_offset, group_count, _draft, member_bytes, generation,
        created_ns, replicas, run_count, catalog_bytes, catalog_crc, label_bytes, label,
    ) = _HEAD.unpack_from(block)  # fmt: skip
    if not 1 <= count <= MEMBERS_MAX:
        raise ValueError(f"expected 1..{MEMBERS_MAX} members, got {count}")
    if run_count > CATALOG_EXTENTS_MAX:
        raise ValueError(f"expected at most {CATALOG_EXTENTS_MAX} catalog runs, got {run_count}")
    if label_bytes > LABEL_BYTES_MAX:
        raise ValueError(f"expected a label of at most {LABEL_BYTES_MAX} bytes, got {label_bytes}")
    groups = _parse_groups(block, group_count, replicas)
    in_groups = sum(group.member_count for group in groups)
    if in_groups != count:
        raise ValueError(f"expected groups of {count} members, got {in_groups}")
    runs = _RUN.iter_unpack(block[_RUNS_OFFSET : _RUNS_OFFSET + 16 * run_count])
    uuids = block[_MEMBERS_OFFSET : _MEMBERS_OFFSET + 16 * count]
    return Superblock(
        volume_uuid=UUID(bytes=volume),
        member_uuids=tuple(UUID(bytes=uuids[at : at + 16]) for at in range(0, 16 * count, 16)),
        member_number=number,
        member_bytes=member_bytes,
        geometry=Geometry(chunk_bytes, block_bytes, data_offset, replicas, groups),
        generation=generation,
        created_ns=created_ns,
        catalog_runs=tuple(ChunkRun(first, length) for first, length in runs),
        catalog_bytes=catalog_bytes,
        catalog_crc32c=catalog_crc,
        label=label[:label_bytes].decode(),
        removed=_REMOVED.unpack_from(block, _REMOVED_OFFSET),
        ro_compat=ro_compat,
        version=(major, minor),
    )


def _parse_groups(block: bytes, count: int, replicas: int) -> tuple[MemberGroup, ...]:
    """Decode the table of groups. Raises ValueError if it cannot be represented."""
    if not 1 <= count <= GROUPS_MAX:
        raise ValueError(f"expected 1..{GROUPS_MAX} groups of members, got {count}")
    groups: list[MemberGroup] = []
    first_member = 0
    for number in range(count):
        at = _GROUPS_OFFSET + _GROUP.size * number
        first_chunk, rows, members, state, _ = _GROUP.unpack_from(block, at)
        if state > 1:
            raise ValueError(f"expected group {number} to have state 0 or 1, got {state}")
        groups.append(
            MemberGroup(first_chunk, first_member, members, rows, max(1, replicas), state == 1)
        )
        first_member += members
    return tuple(groups)


def _problem(sb: Superblock) -> str | None:
    """Return the reason why a superblock's fields are invalid, or None."""
    for name, value, low, high in (
        ("generation", sb.generation, 1, GENERATION_MAX),
        ("member number", sb.member_number, 0, sb.geometry.member_count - 1),
        (
            "number of member UUIDs",
            len(sb.member_uuids),
            sb.geometry.member_count,
            sb.geometry.member_count,
        ),
        ("member size in bytes", sb.member_bytes, 1, MEMBER_BYTES_MAX),
        ("creation time", sb.created_ns, 0, TIME_NS_MAX),
        ("replicas", sb.geometry.replicas, 1, min(sb.geometry.member_count, REPLICAS_MAX)),
        ("catalog bytes", sb.catalog_bytes, CATALOG_HEADER_BYTES, CATALOG_BYTES_MAX),
        ("catalog CRC32C", sb.catalog_crc32c, 0, (1 << 32) - 1),
    ):
        if not low <= value <= high:
            return f"expected {name} in {low}..{high}, got {value}"
    if len(set(sb.member_uuids)) != sb.geometry.member_count:
        return "expected a different UUID for each member, got one twice"
    problem = _geometry_problem(sb.geometry, sb.member_number, sb.member_bytes)
    return problem or _catalog_problem(sb)


def _geometry_problem(geo: Geometry, member_number: int, member_bytes: int) -> str | None:
    """Return the reason why a geometry does not fit a member of this size, or None."""
    try:
        check_sizes(geo.chunk_bytes, geo.block_bytes)
    except UsageError as error:
        return str(error)
    if geo.data_offset_bytes < DATA_OFFSET_BYTES_MIN or geo.data_offset_bytes % geo.chunk_bytes:
        return (
            f"expected a data offset of at least {DATA_OFFSET_BYTES_MIN} bytes, a multiple of "
            f"{geo.chunk_bytes}, got {geo.data_offset_bytes}"
        )
    problem = _groups_problem(geo)
    if problem is not None:
        return problem
    usable = usable_bytes(member_bytes, geo.data_offset_bytes)
    row_count = geo.group_of_member(member_number).row_count
    if geo.chunk_total < CHUNKS_MIN or row_count * geo.chunk_bytes > usable:
        return (
            f"expected at least {CHUNKS_MIN} chunks, in rows within {usable} usable bytes, "
            f"got {row_count} rows of {geo.chunk_bytes} bytes"
        )
    return None


def _groups_problem(geo: Geometry) -> str | None:
    """Return the reason why a table of groups is invalid, or None."""
    if not 1 <= len(geo.groups) <= GROUPS_MAX:
        return f"expected 1..{GROUPS_MAX} groups of members, got {len(geo.groups)}"
    next_chunk = next_member = 0
    for number, group in enumerate(geo.groups):
        if group.first_chunk < next_chunk or group.first_member != next_member:
            return f"expected group {number} from chunk {next_chunk} on, got {group.first_chunk}"
        if group.member_count < geo.replicas or group.chunk_count < 1:
            return (
                f"expected group {number} to have chunks in {geo.replicas} copies, got "
                f"{group.row_count} rows on {group.member_count} members"
            )
        if group.end_chunk >= CHUNK_END_MAX:
            return f"expected chunks up to {CHUNK_END_MAX}, got {group.end_chunk}"
        rows_max = (MEMBER_BYTES_MAX - geo.data_offset_bytes) // geo.chunk_bytes
        if group.row_count > rows_max:
            return f"expected at most {rows_max} rows in group {number}, got {group.row_count}"
        next_chunk = group.end_chunk + 1  # an unused number keeps runs of two groups apart
        next_member = group.first_member + group.member_count
    return None


def _catalog_problem(sb: Superblock) -> str | None:
    """Return the reason why the catalog cannot be where a superblock says, or None."""
    total = sb.geometry.chunk_total
    end = 0
    for run in sorted(sb.catalog_runs):
        if run.first_chunk < end or not sb.geometry.contains(run):
            return (
                f"expected catalog runs apart from each other within {total} chunks, "
                f"got {run.chunk_count} chunks from {run.first_chunk}"
            )
        end = run.end_chunk
    run_bytes = sum(run.chunk_count for run in sb.catalog_runs) * sb.geometry.chunk_bytes
    if run_bytes < sb.catalog_bytes:
        return f"expected catalog runs for {sb.catalog_bytes} bytes, got {run_bytes} bytes"
    return None
