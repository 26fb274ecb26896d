"""Opens the devices of a volume: those that the caller gave, and further members of a grown volume.

A volume that was grown records the URIs of its members on each of them (FORMAT.md, section 3.4).
So a caller may give the URIs of some members, such as those before the volume was grown, or of
members that have left it. Records are followed to places like the given ones only (``places``).
Only its superblock makes a device a member. A process also remembers
where the members of the volumes are that it has seen to change, so it finds them although all
devices that it was given are gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from dlfs.base.deadlines import limit_device, share_for
from dlfs.base.wording import quote
from dlfs.block import BlockDevice, MissingDevice, NvmeTcpUri, open_device, parse_uri
from dlfs.errors import (
    DeviceError,
    DlfsError,
    FormatError,
    NotFoundError,
    UsageError,
    drop_tracebacks,
)
from dlfs.format.constants import LOCATION_RECORD_OFFSET_BYTES
from dlfs.format.locations import LocationRecord
from dlfs.format.superblock import Superblock
from dlfs.store.members import (
    Identified,
    Member,
    Opener,
    RemovedMemberError,
    close_devices,
    identify,
    open_devices,
    read_locations,
    reopening_uris,
    same_kind,
)
from dlfs.store.places import RefusedError, follow

RECORDS_MAX = 256
"""Most devices whose location records are read to find the members of a volume."""

_remembered: dict[UUID, LocationRecord] = {}
"""Newest members, and their URIs, of each volume whose members this process has seen to change."""

_removed_uris: dict[UUID, frozenset[str]] = {}
"""URIs of the members that such a volume no longer has."""


def remember_members(
    before: Sequence[Member], superblock: Superblock, members: Sequence[Member]
) -> None:
    """Remember where the members of a volume are, if they have changed.

    Args:
        before: members at an earlier generation.
        superblock: superblock of the newest generation.
        members: its members.
    """
    uuid = superblock.volume_uuid
    if uuid not in _remembered and [m.uuid for m in before] == [m.uuid for m in members]:
        return
    uris = {member.uuid: member.device.uri for member in members if member.reason is None}
    left = {member.device.uri for member in before if member.uuid not in superblock.member_uuids}
    _remembered[uuid] = LocationRecord(uuid, superblock.generation, uris)
    _removed_uris[uuid] = (_removed_uris.get(uuid, frozenset()) | left) - set(uris.values())


def encode_locations(superblock: Superblock, members: Sequence[Member]) -> bytes:
    """Encode the record of the URIs that members have after the next commit.

    Raises:
        LimitError: the URIs are too long.
    """
    uris = {member.uuid: member.device.uri for member in members}
    content = LocationRecord(superblock.volume_uuid, superblock.generation + 1, uris).encode()
    return content + bytes(-len(content) % 4096)


def write_locations(members: Sequence[Member], content: bytes) -> None:
    """Write the record of URIs to members, and flush."""
    for member in members:
        member.device.write(LOCATION_RECORD_OFFSET_BYTES, content)
    for member in members:
        member.device.flush()


def open_members(
    uris: Sequence[str],
    *,
    volume_uuid: UUID | None = None,
    writable: bool = False,
    opener: Opener = open_device,
    identified: Identified | None = None,
) -> list[BlockDevice]:
    """Open the devices of a volume; a ``MissingDevice`` replaces each that cannot be opened.

    ``assemble`` decides whether the volume can be read without those.

    Args:
        uris: URIs of the members, or of some members of a grown volume.
        volume_uuid: UUID of the volume, if what this process remembers of its members may be used.
        writable: True to open the devices for writing.
        opener: function that opens devices.
        identified: gets the members that were identified.

    Raises:
        UsageError: two URIs name the same device, or one is malformed.
        DlfsError: no device can be opened; it is the error of the first.
    """

    def tolerant(uri: str, *, writable: bool) -> BlockDevice:
        try:
            return opener(uri, writable=writable)
        except (DeviceError, NotFoundError) as error:
            return MissingDevice(uri, error)

    if volume_uuid in _remembered:
        staying = [uri for uri in uris if uri not in _removed_uris[volume_uuid]]
        uris = staying or list(_remembered[volume_uuid].uris.values())
    devices = open_devices(uris, writable=writable, opener=tolerant)
    absent = [device for device in devices if isinstance(device, MissingDevice)]
    if len(absent) == len(devices):
        raise same_kind(absent[0].reason, str(absent[0].reason))
    try:
        opened = open_recorded(
            devices,
            volume_uuid,
            writable=writable,
            opener=opener,
            identified=identified,
        )
    except BaseException:
        close_devices(devices)
        raise
    return [*devices, *opened]


def open_recorded(
    devices: Sequence[BlockDevice],
    volume_uuid: UUID | None = None,
    *,
    writable: bool,
    opener: Opener,
    identified: Identified | None = None,
) -> list[BlockDevice]:
    """Open the members of a grown volume that are not among its devices, by its location record.

    A ``MissingDevice`` replaces each that cannot be opened.

    Args:
        devices: devices that the caller has open.
        volume_uuid: UUID of the volume, if what this process remembers of its members may be used.
        writable: True to open the members for writing.
        opener: function that opens devices.
        identified: gets the members that were identified.
    """
    present = [device for device in devices if not isinstance(device, MissingDevice)]
    found, grown = _identify(present)
    if identified is not None:
        identified.update({id(member.device): member for member in found})
    newest = max((member.newest for member in found), key=lambda sb: sb.generation, default=None)
    remembered = None if volume_uuid is None else _remembered.get(volume_uuid)
    if volume_uuid is None and newest is not None:
        volume_uuid = newest.volume_uuid
    if remembered is None and not grown:
        return []
    records = [record for device in present if (record := read_locations(device)) is not None]
    records = [r for r in records if volume_uuid is None or r.volume_uuid == volume_uuid]
    records += [] if remembered is None or (records and found) else [remembered]
    if not records:
        return []
    record = max(records, key=lambda record: record.generation)
    known = {} if remembered is None else remembered.uris
    # A device is where the caller, or a record that was followed, said.
    places = [*known.values(), *reopening_uris(devices)]
    if not found:
        record = _newest_record(record, places, opener)
    wanted = set(record.uris if newest is None else newest.member_uuids)
    wanted -= {member.uuid for member in found}
    given = {device.uri for device in devices}
    opened: list[BlockDevice] = []
    for uuid, recorded in {**known, **record.uris}.items():
        if uuid not in wanted:
            continue
        try:
            uri, opens = _choose(recorded, known.get(uuid), places, opener)
        except RefusedError as error:
            opened.append(MissingDevice(quote(recorded), error, refused=True))
            continue
        if uri not in given:
            opened.append(_open_member(uri, uuid, record, writable, opens))
    if not found:
        return opened
    # A member that was given and cannot be identified has an error of its own already.
    room = max(0, len(wanted) + len(found) - len(devices))
    absent = [device for device in opened if isinstance(device, MissingDevice)]
    surplus = absent[max(0, room - (len(opened) - len(absent))) :]
    return [device for device in opened if device not in surplus]


def _choose(
    recorded: str, known: str | None, places: Sequence[str], opener: Opener
) -> tuple[str, Opener]:
    """Return the URI of a member and the opener for it.

    Args:
        recorded: its URI in the location record.
        known: the URI by which this process had the member open, if it had.
        places: URIs that say which places may be followed to.
        opener: function that opens devices.

    Raises:
        RefusedError: the record may not be followed to that URI.
    """
    try:
        return follow(recorded, places, opener)
    except RefusedError:
        if known is None:
            raise
        return known, opener


def _newest_record(record: LocationRecord, places: Sequence[str], opener: Opener) -> LocationRecord:
    """Return the newest record that a record of a removed device leads to.

    The members that it names may have been removed later, and then have a newer record. Each device
    is asked once, and none at an address that did not answer.

    Raises:
        FormatError: the records name too many devices.
    """
    asked: set[str] = set()
    silent: set[tuple[str, int]] = set()
    waiting = list(record.uris.values())
    while waiting:
        recorded = waiting.pop(0)
        try:
            uri, opens = _choose(recorded, recorded if recorded in places else None, places, opener)
        except RefusedError:
            continue
        if uri in asked or _address(uri) & silent:
            continue
        asked.add(uri)
        if len(asked) > RECORDS_MAX:
            raise FormatError(
                f"open volume {record.volume_uuid} by a removed device: expected at most "
                f"{RECORDS_MAX} devices in the location records that it leads to, got more"
            )
        try:
            found = _read_record(uri, opens)
        except DeviceError:
            silent |= _address(uri)
            continue
        same = found is not None and found.volume_uuid == record.volume_uuid
        if found is not None and same and found.generation > record.generation:
            record = found
            waiting = list(found.uris.values())
    return record


def _address(uri: str) -> set[tuple[str, int]]:
    """Return the address of a namespace, as a set; empty for other devices."""
    parsed = parse_uri(uri)
    return {(parsed.host, parsed.port)} if isinstance(parsed, NvmeTcpUri) else set()


def _read_record(uri: str, opener: Opener) -> LocationRecord | None:
    """Return the location record of a device that may be none, or None.

    Raises:
        DeviceError: the device cannot be opened.
    """
    try:
        device = opener(uri, writable=False)
    except (FormatError, NotFoundError, UsageError):
        return None
    try:
        return read_locations(device)
    finally:
        device.close()


def _identify(devices: Sequence[BlockDevice]) -> tuple[list[Member], bool]:
    """Return the members among some devices, and True if one is, or was, of a grown volume."""
    found: list[Member] = []
    grown = False
    for device in devices:
        try:
            with limit_device(share_for(len(devices), 1)):
                found.append(identify(device))
        except RemovedMemberError:
            grown = True
        except (DeviceError, FormatError):
            continue
    return found, grown or any(member.newest.geometry.was_grown for member in found)


def _open_member(
    uri: str, uuid: UUID, record: LocationRecord, writable: bool, opener: Opener
) -> BlockDevice:
    """Open the device at the URI of a location record.

    It counts only as that member, or as a later one of the volume: it may have left and returned
    since the record was read.
    """
    device: BlockDevice | None = None
    try:
        device = opener(uri, writable=writable)
        member = identify(device)
        later = member.newest.generation > record.generation
        if member.uuid == uuid or (later and member.newest.volume_uuid == record.volume_uuid):
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
