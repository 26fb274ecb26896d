"""Recognises a member whose superblocks are all damaged, in a volume without replicas.

The superblocks of the other members name the missing member and its layout. A device counts as that
member only if the checksums of the volume hold with its data. This module checks the catalog. The
repair then checks directories, attributes and samples before it writes anything.
"""

from __future__ import annotations

from collections.abc import Sequence

from dlfs.block import BlockDevice, MissingDevice
from dlfs.errors import FormatError
from dlfs.format.geometry import ChunkRun, MemberGroup, usable_bytes
from dlfs.store.members import Member, RemovedMemberError, identify_all, read_copies
from dlfs.store.transaction import Generation, read_catalog


def adopt(devices: Sequence[BlockDevice]) -> tuple[Generation, int] | None:
    """Open a volume of which one device has lost its superblocks, as if the device had them.

    Args:
        devices: devices of all members, in any order.

    Returns:
        The newest generation of the volume and the number of that member; None if the volume has
        another defect.

    Raises:
        FormatError: the catalog is damaged, or its part on that device is.
        DeviceError: a device cannot be read.
    """
    found, refused = identify_all(devices)
    newest = max((member.newest for member in found), key=lambda sb: sb.generation)
    geometry = newest.geometry
    missing = set(newest.member_uuids) - {member.uuid for member in found}
    expected = newest.volume_uuid, newest.generation
    agree = all((m.newest.volume_uuid, m.newest.generation) == expected for m in found)
    if geometry.replicas > 1 or not agree or len(missing) != 1 or len(refused) != 1:
        return None
    device, reason = refused[0]
    if isinstance(device, MissingDevice) or type(reason) not in (FormatError, RemovedMemberError):
        return None  # missing, truncated, or of another version
    uuid = missing.pop()
    number = newest.member_uuids.index(uuid)
    rows_bytes = geometry.group_of_member(number).row_count * geometry.chunk_bytes
    if usable_bytes(device.size_bytes, geometry.data_offset_bytes) < rows_bytes:
        return None
    taken = Member(number, uuid, device, device.size_bytes, read_copies(device))
    members = tuple(sorted([*found, taken], key=lambda member: member.number))
    return Generation(members, newest, read_catalog(members, newest)[0]), number


def holds_data(generation: Generation, number: int) -> bool:
    """Return True if a chunk that the generation refers to lies on the member."""
    runs = list(generation.superblock.catalog_runs)
    for record in generation.catalog.datasets:
        runs += [*record.data_runs, *record.directory_runs]
    group = generation.geometry.group_of_member(number)
    return any(group.has(run) and _touches(run, number, group) for run in runs)


def _touches(run: ChunkRun, number: int, group: MemberGroup) -> bool:
    """Return True if a run of a group has a chunk on a member: chunk L lies on member L mod M."""
    first = run.first_chunk - group.first_chunk
    return (number - group.first_member - first) % group.member_count < run.chunk_count
