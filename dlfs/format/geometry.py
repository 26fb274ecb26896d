"""Maps volume chunks to members and offsets, and dataset addresses to volume chunks.

A volume has groups of members; ``dlfs format`` makes one group. The chunks of a group are numbered
round-robin over its members: chunk L of the group is on its member L % M, in row L // M. With
replicas, that is its copy 0; copy c is on member (L % M + c) % M, in row L // M of the c-th of as
many equal bands of rows. A volume chunk is a group's chunk plus the number of the group's first
chunk. Between the numbers of two groups at least one is unused, so no run of chunks joins groups.

A dataset numbers its own chunks 0..C-1; its runs, in order, say which volume chunks they are. All
values here are plain and immutable; any thread may use them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from dlfs.base.units import format_bytes
from dlfs.errors import UsageError
from dlfs.format.constants import (
    BLOCK_BYTES_MAX,
    BLOCK_BYTES_MIN,
    CHUNK_BYTES_MAX,
    CHUNK_BYTES_MIN,
    CHUNKS_MIN,
    DATA_OFFSET_BYTES_MIN,
    MEMBER_BYTES_MAX,
    MEMBERS_MAX,
    REPLICAS_MAX,
    SUPERBLOCK_A_OFFSET_BYTES,
    SUPERBLOCK_B_OFFSET_BYTES,
    SUPERBLOCK_BYTES,
)


@dataclass(frozen=True, slots=True, order=True)
class ChunkRun:
    """Consecutive chunks of the volume: ``first_chunk .. first_chunk + chunk_count - 1``."""

    first_chunk: int
    chunk_count: int

    @property
    def end_chunk(self) -> int:
        """Number of the chunk after the last one."""
        return self.first_chunk + self.chunk_count


@dataclass(frozen=True, slots=True)
class MemberRange:
    """A range of one member that holds a range of a data space."""

    member: int
    offset_bytes: int
    length_bytes: int


@dataclass(frozen=True, slots=True)
class MemberGroup:
    """Consecutive members that share their own range of the volume's chunks."""

    first_chunk: int
    """Number of the group's first volume chunk."""
    first_member: int
    member_count: int
    row_count: int
    """Rows of chunks on each member of the group, of all copies together."""
    replicas: int = 1
    evacuating: bool = False
    """True while the chunks of the group are moved to other groups; then none is allocated."""

    @property
    def band_rows(self) -> int:
        """Rows of each member that one copy of all chunks occupies."""
        return self.row_count // self.replicas

    @property
    def chunk_count(self) -> int:
        """Number of chunks of the group, not counting further copies."""
        return self.band_rows * self.member_count

    @property
    def end_chunk(self) -> int:
        """Number of the volume chunk after the group's last one."""
        return self.first_chunk + self.chunk_count

    def has(self, run: ChunkRun) -> bool:
        """Return True if the group has all chunks of a run, of which there is at least one."""
        return run.chunk_count > 0 and self.first_chunk <= run.first_chunk <= (
            self.end_chunk - run.chunk_count
        )

    @property
    def members(self) -> range:
        """Numbers of the group's members."""
        return range(self.first_member, self.first_member + self.member_count)


@dataclass(frozen=True, slots=True)
class Geometry:
    """The distribution of a volume's chunks over its members.

    Args:
        chunk_bytes: length of a chunk.
        block_bytes: unit of I/O, in bytes.
        data_offset_bytes: offset of row 0 on each member.
        replicas: copies of each chunk, on different members.
        groups: all groups, in the order of their members and chunks; at least one.
    """

    chunk_bytes: int
    block_bytes: int
    data_offset_bytes: int
    replicas: int
    groups: tuple[MemberGroup, ...]

    @classmethod
    def of_one_group(
        cls,
        member_count: int,
        chunk_bytes: int,
        block_bytes: int,
        data_offset_bytes: int,
        row_count: int,
        replicas: int = 1,
    ) -> Geometry:
        """Return the geometry of a volume whose members form one group, from chunk 0 on.

        Args:
            member_count: members of the volume.
            chunk_bytes: length of a chunk.
            block_bytes: unit of I/O, in bytes.
            data_offset_bytes: offset of row 0 on each member.
            row_count: rows of chunks on each member.
            replicas: copies of each chunk.
        """
        group = MemberGroup(0, 0, member_count, row_count, replicas)
        return cls(chunk_bytes, block_bytes, data_offset_bytes, replicas, (group,))

    @property
    def member_count(self) -> int:
        """Number of members of all groups."""
        return sum(group.member_count for group in self.groups)

    @property
    def was_grown(self) -> bool:
        """True if the volume has several groups of members, or its first group has left it."""
        return len(self.groups) > 1 or self.groups[0].first_chunk > 0

    @property
    def chunk_total(self) -> int:
        """Number of chunks of the volume, not counting further copies."""
        return sum(group.chunk_count for group in self.groups)

    @property
    def capacity_bytes(self) -> int:
        """Bytes of all chunks together, not counting further copies."""
        return self.chunk_total * self.chunk_bytes

    def group_of(self, volume_chunk: int) -> MemberGroup | None:
        """Return the group that has a volume chunk; None if no group has it."""
        return next((g for g in self.groups if g.first_chunk <= volume_chunk < g.end_chunk), None)

    def group_of_member(self, member: int) -> MemberGroup:
        """Return the group of a member of the volume."""
        return next(group for group in self.groups if member in group.members)

    def contains(self, run: ChunkRun) -> bool:
        """Return True if one group has all chunks of a run, of which there is at least one."""
        return any(group.has(run) for group in self.groups)

    def with_groups(self, groups: Sequence[MemberGroup]) -> Geometry:
        """Return the geometry of a volume with these groups, of which there is at least one.

        The members are numbered through in the order of the groups.
        """
        numbered: list[MemberGroup] = []
        count = 0
        for group in groups:
            numbered.append(replace(group, first_member=count))
            count += group.member_count
        return replace(self, groups=tuple(numbered))

    def locate(self, volume_chunk: int, copy: int = 0) -> tuple[int, int]:
        """Find a copy of a chunk.

        Args:
            volume_chunk: 0 .. chunk_total - 1.
            copy: 0 .. replicas - 1.

        Returns:
            The member's number and the copy's byte offset on it.

        Raises:
            UsageError: the volume has no such chunk or copy.
        """
        group = self.group_of(volume_chunk)
        if group is None or not 0 <= copy < self.replicas:
            chunks = " or ".join(f"{g.first_chunk}..{g.end_chunk - 1}" for g in self.groups)
            raise UsageError(
                f"locate a chunk: expected {chunks}, in {self.replicas} copies, "
                f"got copy {copy} of chunk {volume_chunk}"
            )
        row, member = divmod(volume_chunk - group.first_chunk, group.member_count)
        row += copy * group.band_rows
        member = group.first_member + (member + copy) % group.member_count
        return member, self.data_offset_bytes + row * self.chunk_bytes

    @classmethod
    def for_members(
        cls,
        member_sizes: Sequence[int],
        chunk_bytes: int,
        block_bytes: int,
        replicas: int = 1,
    ) -> Geometry:
        """Lay out a new volume over its members; the smallest member decides the number of rows.

        Args:
            member_sizes: bytes of each member, in member order.
            chunk_bytes: a power of two, 4 KiB .. 64 MiB.
            block_bytes: a power of two, 512 .. 64 KiB, at most chunk_bytes.
            replicas: copies of each chunk: 1 .. 4, at most as many as there are members.

        Raises:
            UsageError: a size is not allowed, there are too many members, or they are too small.
        """
        check_sizes(chunk_bytes, block_bytes)
        count = len(member_sizes)
        if not 1 <= count <= MEMBERS_MAX:
            raise UsageError(f"lay out a volume: expected 1..{MEMBERS_MAX} members, got {count}")
        if not 1 <= replicas <= min(count, REPLICAS_MAX):
            raise UsageError(
                f"lay out a volume: expected 1..{min(count, REPLICAS_MAX)} replicas on {count} "
                f"members, got {replicas}"
            )
        smallest = min(member_sizes)
        data_offset = max(DATA_OFFSET_BYTES_MIN, chunk_bytes)
        row_count = max(0, usable_bytes(smallest, data_offset) // chunk_bytes)
        if row_count // replicas * count < CHUNKS_MIN:
            rows = -(-CHUNKS_MIN // count) * replicas
            expected = data_offset + rows * chunk_bytes + SUPERBLOCK_BYTES
            raise UsageError(
                f"lay out a volume: member {member_sizes.index(smallest)} is too small: expected "
                f"at least {expected} bytes ({format_bytes(expected)}) for {rows} chunks of "
                f"{format_bytes(chunk_bytes)} on each of {count} members, got {smallest} bytes"
            )
        if max(member_sizes) > MEMBER_BYTES_MAX:
            raise UsageError(
                f"lay out a volume: expected members of at most {MEMBER_BYTES_MAX} bytes, "
                f"got {max(member_sizes)}"
            )
        return cls.of_one_group(count, chunk_bytes, block_bytes, data_offset, row_count, replicas)


def check_sizes(chunk_bytes: int, block_bytes: int) -> None:
    """Check the two sizes that a volume is formatted with.

    Raises:
        UsageError: one is not a power of two in its range, or a block is larger than a chunk.
    """
    for name, value, low, high in (
        ("a chunk", chunk_bytes, CHUNK_BYTES_MIN, CHUNK_BYTES_MAX),
        ("a block", block_bytes, BLOCK_BYTES_MIN, BLOCK_BYTES_MAX),
    ):
        if value.bit_count() != 1 or not low <= value <= high:
            raise UsageError(
                f"lay out a volume: expected {name} of a power of two in {low}..{high} bytes, "
                f"got {value}"
            )
    if block_bytes > chunk_bytes:
        raise UsageError(
            f"lay out a volume: expected a block of at most the chunk's {chunk_bytes} bytes, "
            f"got {block_bytes}"
        )


def superblock_offsets(member_bytes: int) -> tuple[int, int, int]:
    """Return the byte offsets of superblocks A and B and of the tail copy on a member."""
    tail = member_bytes // SUPERBLOCK_BYTES * SUPERBLOCK_BYTES - SUPERBLOCK_BYTES
    return SUPERBLOCK_A_OFFSET_BYTES, SUPERBLOCK_B_OFFSET_BYTES, tail


def usable_bytes(member_bytes: int, data_offset_bytes: int) -> int:
    """Return the bytes between data offset and tail superblock; negative if there are too few."""
    return superblock_offsets(member_bytes)[2] - data_offset_bytes


@dataclass(frozen=True, slots=True)
class DataSpace:
    """A range of bytes distributed over a volume: a dataset's data, its directory, or the catalog.

    Args:
        geometry: geometry of the volume.
        runs: the volume chunks that hold the space, in order.
    """

    geometry: Geometry
    runs: tuple[ChunkRun, ...]
    _starts: list[int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        counts = (run.chunk_count for run in self.runs)
        object.__setattr__(self, "_starts", list(accumulate(counts, initial=0)))

    @property
    def chunk_count(self) -> int:
        """Number of chunks of the space."""
        return self._starts[-1]

    @property
    def size_bytes(self) -> int:
        """Length of the space in bytes."""
        return self.chunk_count * self.geometry.chunk_bytes

    def volume_chunk(self, chunk: int) -> int:
        """Return the number of the volume chunk that holds a chunk of the space.

        Raises:
            UsageError: the space has no such chunk.
        """
        if not 0 <= chunk < self.chunk_count:
            raise UsageError(
                f"resolve a chunk: expected 0..{self.chunk_count - 1} of this space, got {chunk}"
            )
        number = bisect_right(self._starts, chunk) - 1
        return self.runs[number].first_chunk + chunk - self._starts[number]

    def resolve(self, address: int, copy: int = 0) -> tuple[int, int]:
        """Return the member and the byte offset on it of one copy of the byte at an address.

        Raises:
            UsageError: the address is outside the space, or there is no such copy.
        """
        chunk, offset = divmod(address, self.geometry.chunk_bytes)
        member, base = self.geometry.locate(self.volume_chunk(chunk), copy)
        return member, base + offset

    def member_ranges(
        self, address: int, length_bytes: int, copy: int = 0
    ) -> Iterator[MemberRange]:
        """Divide a range of the space into ranges of members, in order.

        The chunks of a run on a group of one member make one range; else each range lies in one
        chunk, and the ranges of all copies cover the same addresses.

        Raises:
            UsageError: the range leaves the space, or there is no such copy.
        """
        if address < 0 or length_bytes < 0 or address + length_bytes > self.size_bytes:
            raise UsageError(
                f"cut a range: expected it within 0..{self.size_bytes} bytes, "
                f"got {length_bytes} bytes at {address}"
            )
        while length_bytes > 0:
            taken = min(length_bytes, self._bytes_in_a_row(address))
            yield MemberRange(*self.resolve(address, copy), taken)
            address += taken
            length_bytes -= taken

    def _bytes_in_a_row(self, address: int) -> int:
        """Return a number of bytes from an address on that are consecutive on its member."""
        chunk_bytes = self.geometry.chunk_bytes
        chunk, offset = divmod(address, chunk_bytes)
        group = self.geometry.group_of(self.volume_chunk(chunk))
        if group is None or group.member_count > 1:
            return chunk_bytes - offset
        number = bisect_right(self._starts, chunk)
        return (self._starts[number] - chunk) * chunk_bytes - offset


def split_runs(
    runs: Sequence[ChunkRun], chunk_count: int
) -> tuple[tuple[ChunkRun, ...], tuple[ChunkRun, ...]]:
    """Divide runs after the first ``count`` chunks."""
    first: list[ChunkRun] = []
    remaining: list[ChunkRun] = []
    for run in runs:
        taken = min(run.chunk_count, chunk_count)
        chunk_count -= taken
        if taken:
            first.append(ChunkRun(run.first_chunk, taken))
        if taken < run.chunk_count:
            remaining.append(ChunkRun(run.first_chunk + taken, run.chunk_count - taken))
    return tuple(first), tuple(remaining)
