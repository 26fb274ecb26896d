"""Opens the devices of a volume: those that the caller gave, and further members of a grown volume.

A volume that was grown records the URIs of its members on each of them (FORMAT.md, section 3.4).
So a caller may give the URIs of some members, such as those before the volume was grown, or of
members that have left it. Only its superblock makes a device a member.
"""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from dlfs.arguments import Engine
from dlfs.block import BlockDevice, MissingDevice, open_device
from dlfs.errors import (
    DeviceError,
    DlfsError,
    FormatError,
    NotFoundError,
    UsageError,
    drop_tracebacks,
)
from dlfs.format.locations import LocationRecord
from dlfs.store.members import (
    DepartedError,
    Member,
    Opener,
    close_devices,
    identify,
    open_devices,
    read_locations,
    same_kind,
)


def open_members(
    uris: Sequence[str],
    *,
    writable: bool = False,
    engine: Engine = "auto",
    opener: Opener = open_device,
) -> list[BlockDevice]:
    """Open the devices of a volume; a ``MissingDevice`` replaces each that cannot be opened.

    ``assemble`` decides whether the volume can be read without those.

    Raises:
        UsageError: two URIs name the same device, or one is malformed.
        DlfsError: no device can be opened; it is the error of the first.
    """

    def tolerant(uri: str, *, writable: bool, engine: Engine) -> BlockDevice:
        try:
            return opener(uri, writable=writable, engine=engine)
        except (DeviceError, NotFoundError) as error:
            return MissingDevice(uri, error)

    devices = open_devices(uris, writable=writable, engine=engine, opener=tolerant)
    absent = [device for device in devices if isinstance(device, MissingDevice)]
    if len(absent) == len(devices):
        raise absent[0].reason
    try:
        located = open_located(devices, writable=writable, engine=engine, opener=opener)
    except BaseException:
        close_devices(devices)
        raise
    return [*devices, *located]


def open_located(
    devices: Sequence[BlockDevice], *, writable: bool, engine: Engine, opener: Opener
) -> list[BlockDevice]:
    """Open the members of a grown volume that are not among its devices, by its location record.

    A ``MissingDevice`` replaces each that cannot be opened.
    """
    present = [device for device in devices if not isinstance(device, MissingDevice)]
    if not any(_is_grown(device) for device in present):
        return []
    records = [record for device in present if (record := read_locations(device)) is not None]
    if not records:
        return []
    record = max(records, key=lambda record: record.generation)
    given = {device.uri for device in devices}
    found = [member for device in present if (member := _identify_or_none(device)) is not None]
    uris = (record if found else _newest_record(record, engine, opener)).uris
    superblocks = [member.newest for member in found]
    newest = max(superblocks, key=lambda superblock: superblock.generation, default=None)
    wanted = set(uris if newest is None else newest.member_uuids)
    wanted -= {member.uuid for member in found}
    located = [
        _open_member(uri, uuid, writable, engine, opener)
        for uuid, uri in uris.items()
        if uuid in wanted and uri not in given
    ]
    if not found:
        return located
    # A member that was given and cannot be identified has an error of its own already.
    room = max(0, len(wanted) + len(found) - len(devices))
    absent = [device for device in located if isinstance(device, MissingDevice)]
    surplus = absent[max(0, room - (len(located) - len(absent))) :]
    return [device for device in located if device not in surplus]


def _newest_record(record: LocationRecord, engine: Engine, opener: Opener) -> LocationRecord:
    """Return the newest record that a record of a removed device leads to.

    The members that it names may have been removed later, and then have a newer record.
    """
    newer: LocationRecord | None = record
    while newer is not None:
        record, newer = newer, None
        for uri in record.uris.values():
            found = _read_record(uri, engine, opener)
            same = found is not None and found.volume_uuid == record.volume_uuid
            if found is not None and same and found.generation > record.generation:
                newer = found
    return record


def _read_record(uri: str, engine: Engine, opener: Opener) -> LocationRecord | None:
    try:
        device = opener(uri, writable=False, engine=engine)
    except (DeviceError, FormatError, NotFoundError, UsageError):
        return None
    try:
        return read_locations(device)
    finally:
        device.close()


def _is_grown(device: BlockDevice) -> bool:
    """Return True if the device is, or was, a member of a volume with a table of groups."""
    try:
        return bool(identify(device).newest.geometry.groups)
    except DepartedError:
        return True
    except (DeviceError, FormatError):
        return False


def _identify_or_none(device: BlockDevice) -> Member | None:
    try:
        return identify(device)
    except (DeviceError, FormatError):
        return None


def _open_member(
    uri: str, uuid: UUID, writable: bool, engine: Engine, opener: Opener
) -> BlockDevice:
    """Open the device at the URI of a location record; it counts only as that member."""
    device: BlockDevice | None = None
    try:
        device = opener(uri, writable=writable, engine=engine)
        member = identify(device)
        if member.uuid == uuid:
            return device
        problem: DlfsError = NotFoundError(f"open {uri}: it is member {member.uuid}")
    except (DeviceError, FormatError, NotFoundError, UsageError) as error:
        drop_tracebacks(error)
        problem = error
    if device is not None:
        device.close()
    text = (
        f"{problem}; for the host that grew the volume, member {uuid} was there: add the URI that "
        "it has on this host to the URIs of the volume"
    )
    return MissingDevice(uri, same_kind(problem, text))
