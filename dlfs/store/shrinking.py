"""Moves all data off groups of members, and removes them from a volume (FORMAT.md, section 8.7).

1. A commit marks the groups, so that no writer allocates chunks of them any more.
2. Their data is moved to the other groups, step by step (``moving``), each step one commit.
3. A commit leaves the groups out. The URIs of the members that stay are recorded, also on those
   that left: programs that were given only these find the volume. Then the superblocks of the
   members that left are erased.

All steps are rehearsed first, so a change that lacks room is refused before anything is written.
After a crash at any point, shrinking again continues.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dlfs.base.units import format_bytes, format_count
from dlfs.block import parse_uri
from dlfs.errors import SpaceError, UsageError
from dlfs.format.constants import CHUNKS_MIN
from dlfs.format.geometry import ChunkRun, MemberGroup
from dlfs.format.run_arrays import to_array, to_runs
from dlfs.store.fencing import check_not_running, revoke_grants
from dlfs.store.formatting import wipe
from dlfs.store.members import Member
from dlfs.store.moving import Progress, Rehearsal, Transfer, move_all
from dlfs.store.recorded import encode_locations, write_locations
from dlfs.store.space import allocatable_runs, count_chunks
from dlfs.store.transaction import Generation, Transaction, flush_all


@dataclass(frozen=True, slots=True, kw_only=True)
class ShrinkReport:
    """Result of removing members.

    Attributes:
        removed: URIs of the devices that are no members any more.
        moved_bytes: bytes of data that were moved to other members, further copies not counted.
    """

    removed: tuple[str, ...]
    moved_bytes: int


def shrink_volume(
    transaction: Transaction, members: Sequence[int | str], progress: Progress
) -> ShrinkReport:
    """Move all data off the groups of some members, and remove the groups.

    Args:
        transaction: lock of the volume.
        members: numbers or URIs of members; all members of their groups are removed.
        progress: called with the bytes moved and the total bytes.

    Raises:
        UsageError: there is no such member, or no member would be left.
        SpaceError: the data does not fit on the other members, or free chunks are in too many runs
            for a catalog; nothing was changed.
        LockedError: an import by workers runs.
        DeviceError: a device failed; shrinking again continues.
    """
    groups = _find_groups(transaction.base, members)
    unfinished = transaction.base.catalog.unfinished
    check_not_running(transaction.devices, unfinished, "shrink a volume")
    transaction = revoke_grants(transaction)  # workers know the members of now alone
    base = transaction.base
    _check_space(transaction, groups)
    leaving = {group.first_chunk for group in groups}
    rehearsed, _ = _evacuate(base, leaving, lambda _done, _total: None, Rehearsal)
    Rehearsal.over(_without(rehearsed, leaving)).commit()
    base, moved_bytes = _evacuate(base, leaving, progress, Transaction)
    return ShrinkReport(removed=_remove(base, leaving), moved_bytes=moved_bytes)


def _evacuate(
    base: Generation, leaving: set[int], progress: Progress, kind: type[Transaction]
) -> tuple[Generation, int]:
    """Mark groups, and move all data off them.

    Returns:
        The newest generation, and the number of bytes moved.
    """
    if any(not group.evacuating for group in _groups_at(base, leaving)):
        base = _mark(base, leaving, kind)
    return move_all(base, [Transfer(_used(base, _groups_at(base, leaving)))], progress, kind)


def _used(base: Generation, groups: Sequence[MemberGroup]) -> tuple[ChunkRun, ...]:
    """Return the chunks of some groups that records have, each shared chunk once."""
    used = to_runs(base.catalog.used_runs)
    return tuple(run for group in groups for run in used if group.has(run))


def _groups_at(base: Generation, first_chunks: set[int]) -> list[MemberGroup]:
    return [group for group in base.geometry.groups if group.first_chunk in first_chunks]


def _find_groups(base: Generation, members: Sequence[int | str]) -> list[MemberGroup]:
    """Return the groups of some members."""
    name = f"shrink volume {base.superblock.volume_uuid}"
    uris = {parse_uri(member.device.uri): member.number for member in base.members}
    groups: dict[int, MemberGroup] = {}
    for member in members:
        number = uris.get(parse_uri(member)) if isinstance(member, str) else member
        if number is None or not 0 <= number < len(base.members):
            known = ", ".join(f"{m.number} ({m.device.uri})" for m in base.members)
            raise UsageError(f"{name}: expected one of its members, {known}, got {member}")
        group = base.geometry.group_of_member(number)
        groups[group.first_chunk] = group
    if not groups:
        raise UsageError(f"{name}: expected the members to remove, got none")
    remaining = [g for g in base.geometry.groups if g.first_chunk not in groups]
    if not any(not group.evacuating for group in remaining):
        raise UsageError(
            f"{name}: expected another group of members that keeps the data, but the volume has "
            f"{format_count(len(base.geometry.groups), 'group')} of members, and members leave "
            "with their whole group; 'dlfs grow' adds a group"
        )
    return list(groups.values())


def _check_space(transaction: Transaction, groups: Sequence[MemberGroup]) -> None:
    """Check that the data of the groups fits on the others.

    Raises:
        SpaceError: it does not; the message has the numbers.
    """
    base = transaction.base
    leaving = {group.first_chunk for group in groups}
    used = count_chunks(_used(base, groups))
    free = sum(
        run.chunk_count
        for run in allocatable_runs(base.geometry, base.catalog.free)
        if not any(group.has(run) for group in groups)
    )
    free -= 2 * transaction.next_catalog_chunks
    remaining = [g for g in base.geometry.groups if g.first_chunk not in leaving]
    if used > free or sum(group.chunk_count for group in remaining) < CHUNKS_MIN:
        chunk_bytes = base.geometry.chunk_bytes
        needed, available = used * chunk_bytes, max(0, free) * chunk_bytes
        raise SpaceError(
            f"shrink volume {base.superblock.volume_uuid}: its members have {needed} bytes "
            f"({format_bytes(needed)}) of data to move, and the others have room for {available} "
            f"bytes ({format_bytes(available)}); remove datasets, or 'dlfs grow' the volume first"
        )


def _mark(base: Generation, leaving: set[int], kind: type[Transaction]) -> Generation:
    """Commit that the groups are being evacuated."""
    geometry = base.geometry.with_groups(
        [
            replace(group, evacuating=group.evacuating or group.first_chunk in leaving)
            for group in base.geometry.groups
        ]
    )
    superblock = replace(base.superblock, geometry=geometry)
    marked = Generation(base.members, superblock, base.catalog)
    return kind.over(marked).commit()


def _removed(base: Generation, leaving: set[int]) -> list[Member]:
    """Return the members of the groups."""
    numbers = {n for group in _groups_at(base, leaving) for n in group.members}
    return [member for member in base.members if member.number in numbers]


def _without(base: Generation, leaving: set[int]) -> Generation:
    """Return the generation without the groups, for the next commit."""
    geometry = base.geometry
    removed = _removed(base, leaving)
    remaining = [group for group in geometry.groups if group.first_chunk not in leaving]
    staying = [member for member in base.members if member not in removed]
    members = tuple(replace(member, number=number) for number, member in enumerate(staying))
    superblock = replace(
        base.superblock,
        member_uuids=tuple(member.uuid for member in members),
        geometry=geometry.with_groups(remaining),
    )
    free = [run for run in base.catalog.free if any(group.has(run) for group in remaining)]
    return Generation(members, superblock, base.catalog.with_free(to_array(free)))


def _remove(base: Generation, leaving: set[int]) -> tuple[str, ...]:
    """Commit without the groups, and erase the superblocks of their members."""
    smaller = _without(base, leaving)
    locations = encode_locations(base.superblock, smaller.members)  # fails before the commit
    Transaction.over(smaller).commit()
    write_locations(base.members, locations)
    removed = _removed(base, leaving)
    for member in removed:
        wipe(member.device)
    flush_all([member.device for member in removed])
    return tuple(member.device.uri for member in removed)
