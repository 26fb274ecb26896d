"""Adds a group of members to a volume. No data is moved (FORMAT.md, section 8.6).

The new devices are checked and locked, and their old superblocks are overwritten. Then two
generations with the same datasets are committed, whose superblocks name the new members. The new
devices' superblocks are written first, so a crash leaves the old volume or the new one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

from dlfs.base.units import format_bytes
from dlfs.block import BlockDevice
from dlfs.errors import DeviceError, ExistsError, FormatError, LimitError, UsageError
from dlfs.format.constants import (
    DATA_OFFSET_BYTES_MIN,
    GROUPS_MAX,
    JOINING_BYTES,
    JOINING_OFFSET_BYTES,
    MEMBERS_MAX,
)
from dlfs.format.geometry import Geometry, MemberGroup, usable_bytes
from dlfs.format.joining import JoiningRecord
from dlfs.store.fencing import check_not_running, revoke_grants
from dlfs.store.formatting import check_blocks, check_empty, has_other_data, prepare_file, wipe
from dlfs.store.locking import lock_members, unlock_members
from dlfs.store.members import (
    Member,
    Members,
    Opener,
    close_devices,
    identify,
    open_devices,
    read_locations,
    split_uris,
)
from dlfs.store.recorded import encode_locations, remember_members, write_locations
from dlfs.store.transaction import Generation, Transaction, flush_all


def grow_volume(
    transaction: Transaction,
    members: Members,
    *,
    size_bytes: int | None,
    force: bool,
    opener: Opener,
) -> Generation:
    """Add devices to a volume as one more group of members.

    Args:
        transaction: lock of the volume.
        members: URIs of the new members, or one text with commas.
        size_bytes: size of each that is a new or empty file.
        force: True to overwrite data on the devices.
        opener: function that opens devices.

    Raises:
        ExistsError: a device holds data, and ``force`` is False.
        UsageError: a device is a member already, or there are too few, or they are too small.
        LimitError: the volume would have too many members or groups.
        LockedError: a writer has locked a device, or an import by workers runs.
        SpaceError: the volume has no room for another catalog.
        DeviceError: a device failed.
    """
    base = transaction.base
    uris = split_uris(members)
    _check_count(base.geometry, len(uris))
    check_not_running(transaction.devices, base.catalog.unfinished, "grow a volume")
    made: list[Path] = []
    devices: list[BlockDevice] = []
    try:
        for uri in uris:
            prepare_file(uri, size_bytes, force=force, made=made)
        devices = open_devices(uris, writable=True, opener=opener)
        group = _check_devices(base, devices, force=force)
        lock_members(devices, "dlfs grow")
        _check_devices(base, devices, force=force)
        base = revoke_grants(transaction).base  # workers know the members of now alone
        grown = _commit_group(base, devices, group)
        remember_members(base.members, grown.superblock, grown.members)  # the caller named them
    except BaseException as error:
        _end(devices)
        if isinstance(error, UsageError | ExistsError | LimitError):  # nothing was committed
            for path in made:
                path.unlink(missing_ok=True)
        raise
    _end(devices)
    return grown


def _end(devices: Sequence[BlockDevice]) -> None:
    try:
        unlock_members(devices)
    finally:
        close_devices(devices)


def _check_count(geometry: Geometry, count: int) -> None:
    if count < geometry.replicas:
        raise UsageError(
            f"grow a volume: {geometry.replicas} replicas need at least {geometry.replicas} new "
            f"devices, got {count}"
        )
    total = geometry.member_count + count
    if total > MEMBERS_MAX or len(geometry.groups) >= GROUPS_MAX:
        raise LimitError(
            f"grow a volume: expected at most {MEMBERS_MAX} members in {GROUPS_MAX} groups, "
            f"got {total} in {len(geometry.groups) + 1}"
        )


def _check_devices(base: Generation, devices: Sequence[BlockDevice], *, force: bool) -> MemberGroup:
    """Check the new devices, and return their group of members."""
    geometry = base.geometry
    members = {device.identity: device.uri for device in base.devices}
    for device in devices:
        if device.identity in members:
            raise UsageError(f"grow with {device.uri}: it is a member of the volume already")
        check_blocks(device, geometry.block_bytes, "grow with")
        large = device.size_bytes >= DATA_OFFSET_BYTES_MIN  # else it is refused below
        if not force and large and not _was_left(base, device):
            check_empty(device, "grow with")
    smallest = min(devices, key=lambda device: device.size_bytes)
    usable = usable_bytes(smallest.size_bytes, geometry.data_offset_bytes)
    rows = max(0, usable // geometry.chunk_bytes)
    if rows < geometry.replicas:
        least = geometry.data_offset_bytes + geometry.replicas * geometry.chunk_bytes + 4096
        raise UsageError(
            f"grow with {smallest.uri}: expected at least {least} bytes ({format_bytes(least)}), "
            f"got {smallest.size_bytes}"
        )
    return MemberGroup(
        first_chunk=geometry.groups[-1].end_chunk + 1,
        first_member=geometry.member_count,
        member_count=len(devices),
        row_count=rows,
        replicas=geometry.replicas,
    )


def _was_left(base: Generation, device: BlockDevice) -> bool:
    """Return True if a change of this volume's members left the device, and nothing used it since.

    A record outlives a later volume or file system, so other data at the device's beginning counts.
    """
    superblock = base.superblock
    try:
        member = identify(device)
    except (FormatError, DeviceError):
        joining = JoiningRecord.decode(device.read(JOINING_OFFSET_BYTES, JOINING_BYTES))
        locations = read_locations(device)
        joins = joining is not None and joining.volume_uuid == superblock.volume_uuid
        known = joins or (locations is not None and locations.volume_uuid == superblock.volume_uuid)
        return known and not has_other_data(device, joining=joins)
    same = member.newest.volume_uuid == superblock.volume_uuid
    return same and member.uuid not in superblock.member_uuids


def _commit_group(
    base: Generation, devices: Sequence[BlockDevice], group: MemberGroup
) -> Generation:
    """Commit two generations with the new members, after the record of all members' URIs."""
    geometry = base.geometry
    added = [
        Member(group.first_member + number, uuid4(), device, device.size_bytes, ())
        for number, device in enumerate(devices)
    ]
    members = (*base.members, *added)
    volume_uuid = base.superblock.volume_uuid
    locations = encode_locations(base.superblock, members)  # fails before anything is written
    for member in added:
        record = JoiningRecord(volume_uuid, member.uuid, member.number).encode()
        member.device.write(JOINING_OFFSET_BYTES, record)
    flush_all(devices)
    for device in devices:
        wipe(device)
    flush_all(devices)
    write_locations(members, locations)
    superblock = replace(
        base.superblock,
        member_uuids=tuple(member.uuid for member in members),
        geometry=geometry.with_groups([*geometry.groups, group]),
    )
    grown = Generation(members, superblock, base.catalog)
    grown = Transaction.over(grown).commit(first=added)
    grown = Transaction.over(grown).commit()
    for device in devices:
        device.write(JOINING_OFFSET_BYTES, bytes(JOINING_BYTES))
    flush_all(devices)
    return grown
