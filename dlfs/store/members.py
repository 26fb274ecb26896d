"""Opens the members of a volume, reads every superblock and chooses the generation.

Members may be given in any order; their superblocks number them. Every member has three copies of
its superblock. The highest generation that is valid in any copy on any member is the current one:
all its data was durable before the first of its superblocks was written. A damaged copy is reported
and does no harm while another copy is whole. A copy of a higher generation that needs a feature
unknown to this code is not damaged: the volume is refused as too new, because the older generation
is no longer in force.

With replicas, a subset of the members is enough for reading. An absent member is **missing** (not
given, or its device fails) or **degraded** (its device has no whole superblock, or a stale one). A
``MissingDevice`` takes its place for reads, and no writer opens such a volume. A member that lags
by one generation is not absent: a crash during a commit leaves that, and its data is complete
(FORMAT.md, section 8.2).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol
from uuid import UUID

from dlfs.base.closing import close_all
from dlfs.base.deadlines import limit_device, share_for
from dlfs.base.units import format_count
from dlfs.block import (
    BlockDevice,
    FileUri,
    MissingDevice,
    format_path,
    open_device,
    parse_uri,
    split_members,
)
from dlfs.errors import (
    DeviceError,
    DlfsError,
    FormatError,
    NotFoundError,
    TruncatedError,
    UsageError,
    VersionError,
    drop_tracebacks,
)
from dlfs.format.constants import (
    LOCATION_RECORD_BYTES_MAX,
    LOCATION_RECORD_OFFSET_BYTES,
    SUPERBLOCK_BYTES,
    SUPERBLOCK_MAGIC,
)
from dlfs.format.geometry import superblock_offsets, usable_bytes
from dlfs.format.locations import LocationRecord
from dlfs.format.superblock import (
    Superblock,
    UnknownSuperblock,
    decode_superblock,
    decode_unknown,
    slot_for,
)

Members = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""The URIs of a volume's members: one text with commas between them, or several; or paths."""

COPY_NAMES = ("A", "B", "tail")

LAG_MAX = 1
"""Generations by which a valid member may lag: a crash between the superblocks of a commit."""


class RemovedMemberError(FormatError):
    """The device was a member until an earlier generation, or its superblocks are lost."""


class Opener(Protocol):
    """A function that opens devices: ``dlfs.block.open_device``, or one that wraps its devices."""

    def __call__(self, uri: str, *, writable: bool) -> BlockDevice:
        """Open the device that a URI names."""


@dataclass(frozen=True, slots=True)
class SuperblockCopy:
    """One copy of a member's superblock: its content, or the error of reading it."""

    name: str
    offset_bytes: int
    superblock: Superblock | None
    error: FormatError | DeviceError | None
    foreign: bool = False
    """True if the bytes do not start with the magic of a superblock."""
    unknown: UnknownSuperblock | None = None
    """Volume and generation of an intact copy that needs an unknown feature; else None."""


@dataclass(frozen=True, slots=True)
class Member:
    """One member of a volume and its device, or the placeholder of its device."""

    number: int
    uuid: UUID
    device: BlockDevice
    member_bytes: int
    """Size for which its superblocks are laid out, in bytes; the device may be larger."""
    copies: tuple[SuperblockCopy, ...]
    reason: DlfsError | None = None
    """Reason why the member is not read; None if it is read."""

    @property
    def state(self) -> str:
        """State of the member: ``current``, ``degraded`` or ``missing``."""
        if self.reason is None:
            return "current"
        device_failed = isinstance(self.reason, DeviceError)
        return "missing" if isinstance(self.device, MissingDevice) or device_failed else "degraded"

    @property
    def source(self) -> BlockDevice:
        """Device to read the member from; a ``MissingDevice`` with the reason if it is absent."""
        if self.reason is None or isinstance(self.device, MissingDevice):
            return self.device
        return MissingDevice(self.device.uri, self.reason)

    def __str__(self) -> str:
        text = f"member {self.number} ({self.uuid}), {self.device.uri}"
        return text if self.reason is None else f"{text}: {self.state}: {self.reason}"

    @property
    def newest(self) -> Superblock:
        """Newest superblock of the member's copies."""
        return max(
            (copy.superblock for copy in self.copies if copy.superblock is not None),
            key=lambda superblock: superblock.generation,
        )

    def is_current(self, generation: int) -> bool:
        """Return True if the tail and the slot of a generation hold that generation."""
        return all(
            copy.superblock is not None and copy.superblock.generation == generation
            for copy in self.copies
            if copy.name in (slot_for(generation), "tail")
        )


Identified = dict[int, Member]
"""Members that were identified, by ``id`` of their device."""


def split_uris(members: Members) -> tuple[str, ...]:
    """Return the member URIs of a volume, given as a sequence or as one text with commas.

    A path object is one file, whatever characters it has. Paths of files become absolute, so that
    other processes can use the URIs.

    Raises:
        UsageError: there is no URI, or a malformed one.
    """
    if isinstance(members, os.PathLike):
        members = [members]
    if isinstance(members, str):
        uris = split_members(members)
    else:
        uris = tuple(m if isinstance(m, str) else format_path(os.fspath(m)) for m in members)
    if not uris:
        raise UsageError("open a volume: expected the URIs of its members, got none")
    return tuple(_absolute(uri) for uri in uris)


def _absolute(uri: str) -> str:
    parsed = parse_uri(uri)
    return format_path(str(Path(parsed.path).absolute())) if isinstance(parsed, FileUri) else uri


def open_devices(
    uris: Sequence[str],
    *,
    writable: bool = False,
    opener: Opener = open_device,
) -> list[BlockDevice]:
    """Open several devices; if one fails, close the others.

    Raises:
        UsageError: two URIs name the same device.
        DlfsError: as the opener raises it.
    """
    devices: list[BlockDevice] = []
    try:
        for uri in uris:
            devices.append(opener(uri, writable=writable))
        seen: dict[str, str] = {}
        for device in devices:
            if device.identity in seen:
                raise UsageError(
                    f"open {device.uri}: expected different members, "
                    f"got the device of {seen[device.identity]} again; name each once"
                )
            seen[device.identity] = device.uri
    except BaseException:
        close_devices(devices)
        raise
    return devices


def read_locations(device: BlockDevice) -> LocationRecord | None:
    """Return the location record of a device, or None."""
    if device.size_bytes < LOCATION_RECORD_OFFSET_BYTES + LOCATION_RECORD_BYTES_MAX:
        return None
    with suppress(DeviceError, FormatError):  # it may have become smaller
        content = device.read(LOCATION_RECORD_OFFSET_BYTES, LOCATION_RECORD_BYTES_MAX)
        return LocationRecord.decode(content)
    return None


def reopening_uris(devices: Iterable[BlockDevice]) -> tuple[str, ...]:
    """Return the URIs that open devices again, without members that were not given.

    A URI that only a record names, and that was refused, is none of them.
    """
    return tuple(
        device.uri
        for device in devices
        if not isinstance(device, MissingDevice) or (device.given and not device.refused)
    )


def close_devices(devices: Sequence[BlockDevice]) -> None:
    """Close all devices, also after one has failed to close.

    Raises:
        DlfsError: a device failed to close.
    """
    close_all([device.close for device in devices])


def check_superblock_fits(device: BlockDevice, action: str) -> None:
    """Check that superblocks can be read and written on a device.

    Raises:
        UsageError: its blocks are larger than a superblock.
    """
    if SUPERBLOCK_BYTES % device.block_bytes:
        raise UsageError(
            f"{action} {device.uri}: expected a device with blocks of 512 to {SUPERBLOCK_BYTES} "
            f"bytes, got blocks of {device.block_bytes}; a namespace can often be formatted with "
            f"others ('nvme id-ns' lists them, 'nvme format --block-size=4096' takes one)"
        )


def read_copies(device: BlockDevice) -> tuple[SuperblockCopy, ...]:
    """Read the three superblock copies of a device, valid or not.

    The tail copy lies where copy A or B says that the member ends, else at the end of the device.

    Raises:
        TruncatedError: the device is smaller than the member was when the volume was made.
        UsageError: the device's blocks are larger than a superblock.
    """
    check_superblock_fits(device, "open")
    first, second, _ = superblock_offsets(device.size_bytes)
    head = b""  # or the first bytes at once, if they can all be read
    if second + SUPERBLOCK_BYTES <= device.size_bytes:
        with suppress(DeviceError):
            head = device.read(0, second + SUPERBLOCK_BYTES)
    heads = [
        _read_copy(device, "A", first, head[:SUPERBLOCK_BYTES]),
        _read_copy(device, "B", second, head[second:]),
    ]
    recorded = {copy.superblock.member_bytes for copy in heads if copy.superblock is not None}
    if recorded and max(recorded) > device.size_bytes:
        raise TruncatedError(
            f"open {device.uri}: expected a member of {max(recorded)} bytes, "
            f"got a device of {device.size_bytes}"
        )
    tail = superblock_offsets(max(recorded, default=device.size_bytes))[2]
    return (*heads, _read_copy(device, "tail", tail))


def _read_copy(
    device: BlockDevice, name: str, offset_bytes: int, data: bytes = b""
) -> SuperblockCopy:
    """Decode a superblock copy; read it, unless its bytes are given."""
    where = f"{device.uri} at byte {offset_bytes}"
    if not 0 <= offset_bytes <= device.size_bytes - SUPERBLOCK_BYTES:
        error = TruncatedError(
            f"{where}: read a superblock: the device has {device.size_bytes} bytes"
        )
        return SuperblockCopy(name, offset_bytes, None, error, foreign=True)
    try:
        data = data or device.read(offset_bytes, SUPERBLOCK_BYTES)
        superblock = decode_superblock(data, where)
    except (FormatError, DeviceError) as error:
        foreign = bool(data) and not data.startswith(SUPERBLOCK_MAGIC)
        drop_tracebacks(error)
        return SuperblockCopy(name, offset_bytes, None, error, foreign, decode_unknown(data))
    return SuperblockCopy(name, offset_bytes, superblock, None)


def identify(device: BlockDevice) -> Member:
    """Identify the member and volume of a device by its superblocks.

    Raises:
        FormatError: no superblock is whole; VersionError or TruncatedError if that is the cause.
        VersionError: the newest superblock needs a feature that this code does not know.
        DeviceError: no copy could be read.
    """
    copies = read_copies(device)
    whole = [copy.superblock for copy in copies if copy.superblock is not None]
    if whole:
        newest = max(whole, key=lambda superblock: superblock.generation)
        check_known(copies, newest)
        return Member(newest.member_number, newest.member_uuid, device, newest.member_bytes, copies)
    if copies[0].foreign and copies[1].foreign and (locations := read_locations(device)):
        raise RemovedMemberError(
            f"open {device.uri}: expected a superblock, got none: it was a member of volume "
            f"{locations.volume_uuid} until that was shrunk, or it is one whose superblocks are "
            f"lost, which 'dlfs repair' restores"
        )
    if all(copy.foreign for copy in copies):
        raise FormatError(
            f"open {device.uri}: this is no DLFS volume: expected a superblock at its head "
            f"or its tail, got none in {device.size_bytes} bytes; 'dlfs format' makes one of it"
        )
    errors = [copy.error for copy in copies if copy.error is not None]
    for kind in (VersionError, DeviceError):
        for error in errors:
            if isinstance(error, kind):
                raise error
    text = "; ".join(f"{copy.name}: {copy.error}" for copy in copies)
    raise FormatError(
        f"open {device.uri}: expected a superblock in one of three places, got {text}"
    )


def check_known(copies: Sequence[SuperblockCopy], newest: Superblock) -> None:
    """Check that no copy is of a newer generation of the volume, with features unknown here.

    Args:
        copies: superblock copies of a device.
        newest: newest superblock that this code can read.

    Raises:
        VersionError: there is such a copy; the older generation must not be read in its place.
    """
    for copy in copies:
        unknown = copy.unknown
        if unknown is None or unknown.volume_uuid != newest.volume_uuid:
            continue
        if unknown.generation > newest.generation:
            assert copy.error is not None
            raise copy.error


def describe_swapped(devices: Sequence[BlockDevice], volume_uuid: UUID) -> str | None:
    """Return an error text if a device holds another volume than expected; None if none does.

    Devices that are missing, unreadable or no members are ignored.
    """
    for device in devices:
        if isinstance(device, MissingDevice):
            continue
        with suppress(DeviceError, FormatError), limit_device(share_for(len(devices), 1)):
            found = identify(device).newest.volume_uuid
            if found != volume_uuid:
                return (
                    f"{device.uri} now holds volume {found}, expected volume {volume_uuid}: it "
                    "was formatted again, or is another device; open the volume anew"
                )
    return None


def assemble(
    devices: Sequence[BlockDevice], identified: Identified | None = None
) -> tuple[tuple[Member, ...], Superblock]:
    """Assemble a volume from its devices, given in any order.

    Args:
        devices: devices of the members.
        identified: members whose superblocks were just read; see ``identify_all``.

    Returns:
        The members by number, and the current superblock. With replicas, some members may be absent
        and have a reason.

    Raises:
        UsageError: a device is a member of another volume, or two are the same member.
        NotFoundError: a member is missing.
        FormatError: a device has no superblock, or those of two members contradict each other.
        VersionError: a device has a newer generation, which needs a feature unknown to this code.
        DeviceError: a device cannot be read.
    """
    found, refused = identify_all(devices, identified)
    newest = max((member.newest for member in found), key=lambda sb: sb.generation)
    for device, reason in refused:
        if isinstance(reason, VersionError):
            check_known(read_copies(device), newest)
    by_number: dict[int, Member] = {}
    for member in found:
        checked = _checked(member, newest)
        if isinstance(checked, DlfsError):
            refused.append((member.device, checked))
            continue
        twin = by_number.setdefault(checked.number, checked)
        if twin is not checked:
            raise UsageError(
                f"open {member.device.uri}: expected each member once, got number {member.number} "
                f"again: {twin.device.uri} is that one too"
            )
    members = _complete(by_number, refused, newest)
    absent = [member for member in members if member.reason is not None]
    if len(absent) >= newest.geometry.replicas:
        raise _too_few(absent, newest)
    return members, newest


def identify_all(
    devices: Sequence[BlockDevice], identified: Identified | None = None
) -> tuple[list[Member], list[tuple[BlockDevice, DlfsError]]]:
    """Return the members that were identified, and the other devices with the reason.

    Args:
        devices: devices to identify.
        identified: members whose superblocks were just read; each is taken out and not read again.
    """
    found: list[Member] = []
    refused: list[tuple[BlockDevice, DlfsError]] = []
    for device in devices:
        if isinstance(device, MissingDevice):
            if device.given:
                refused.append((device, device.reason))
            continue
        if identified and (member := identified.pop(id(device), None)):
            found.append(member)
            continue
        try:
            with limit_device(share_for(len(devices), 1)):
                found.append(identify(device))
        except (DeviceError, FormatError) as error:
            drop_tracebacks(error)
            refused.append((device, error))
    if not found:  # raise an error like the first, or like the first of a member that stayed
        reasons = [reason for _, reason in refused]
        staying = [reason for reason in reasons if not isinstance(reason, RemovedMemberError)]
        first, *others = staying or reasons
        more = f" (and {format_count(len(others), 'more device')}: {others[0]})" if others else ""
        raise same_kind(first, f"{first}{more}")
    return found, refused


def _checked(member: Member, newest: Superblock) -> Member | DlfsError:
    """Compare a member with the current generation.

    Returns:
        The member, with a reason if it is stale; an error if it was replaced.

    Raises:
        UsageError: it is a member of another volume.
        FormatError: its superblock contradicts the newest.
    """
    own = member.newest
    if own.volume_uuid != newest.volume_uuid:
        raise UsageError(
            f"open {member.device.uri}: expected a member of volume {newest.volume_uuid}, "
            f"got one of volume {own.volume_uuid}; name the members of one volume"
        )
    older = own.generation < newest.generation
    agrees = older or own == superblock_for(member, newest)
    # The other sizes never change; members and groups may differ between generations.
    if not agrees or replace(own.geometry, groups=()) != replace(newest.geometry, groups=()):
        raise FormatError(
            f"open {member.device.uri}: its superblock contradicts that of the volume's newest "
            f"generation, {newest.generation}, in the members, the layout or the catalog: they "
            f"were written apart from each other"
        )
    if member.uuid not in newest.member_uuids:
        text = f"open {member.device.uri}: it was member {member.number} until generation "
        group = own.geometry.group_of_member(own.member_number)
        if group.first_chunk in [g.first_chunk for g in newest.geometry.groups]:
            return FormatError(f"{text}{own.generation}, and was replaced")
        return RemovedMemberError(f"{text}{own.generation}, and was removed")
    member = replace(member, number=newest.member_uuids.index(member.uuid))
    rows = newest.geometry.group_of_member(member.number).row_count
    usable = usable_bytes(member.member_bytes, newest.geometry.data_offset_bytes)
    if rows * newest.geometry.chunk_bytes > usable:
        raise FormatError(
            f"open {member.device.uri}: expected room for {rows} rows of chunks, as generation "
            f"{newest.generation} needs it, got {usable} usable bytes"
        )
    if newest.geometry.replicas > 1 and own.generation + LAG_MAX < newest.generation:
        reason = FormatError(
            f"open {member.device.uri}: it is stale: expected generation {newest.generation}, "
            f"got {own.generation}"
        )
        return replace(member, reason=reason)
    return member


def _complete(
    by_number: dict[int, Member],
    refused: Sequence[tuple[BlockDevice, DlfsError]],
    newest: Superblock,
) -> tuple[Member, ...]:
    """Return all members by number; the absent ones get the devices that were not identified.

    Which unidentified device is which member is unknown; they are assigned in their order.
    """
    count = newest.geometry.member_count
    missing = [number for number in range(count) if number not in by_number]
    if len(refused) > len(missing):  # members that were removed are no mistake of the caller
        refused = [pair for pair in refused if not isinstance(pair[1], RemovedMemberError)]
    records = (read_locations(member.device) for member in by_number.values())
    if len(refused) > len(missing) and any(
        record is not None and record.volume_uuid == newest.volume_uuid for record in records
    ):
        # A device that cannot be read may have been removed, too: the others are on record.
        unread = [
            p for p in refused if isinstance(p[0], MissingDevice) or isinstance(p[1], DeviceError)
        ]
        refused = [pair for pair in refused if pair not in unread]
        refused += unread[: max(0, len(missing) - len(refused))]
    if len(refused) > len(missing):
        device, reason = refused[-1]
        raise same_kind(
            reason,
            f"open volume {newest.volume_uuid}: expected its {format_count(count, 'member')} "
            f"alone, got {device.uri} besides: {reason}",
        )
    for number, (device, reason) in zip(missing, refused, strict=False):
        uuid = newest.member_uuids[number]
        by_number[number] = Member(number, uuid, device, 0, (), reason)
    for number in missing[len(refused) :]:
        uuid = newest.member_uuids[number]
        error = NotFoundError("it was not given")
        device = MissingDevice(f"member {number}", error, given=False)
        by_number[number] = Member(number, uuid, device, 0, (), error)
    return tuple(by_number[number] for number in range(count))


def _too_few(absent: Sequence[Member], newest: Superblock) -> DlfsError:
    count = newest.geometry.member_count
    text = "; ".join(
        f"{member.number} ({member.uuid})"
        + (f", {member.device.uri}: {member.reason}" if member.copies or _is_given(member) else "")
        for member in absent
    )
    reasons = [m.reason for m in absent if m.reason is not None]
    given = [m.reason for m in absent if m.reason is not None and _is_given(m)]
    hint = "" if given else "; name every member, with commas between"
    return same_kind(
        (given or reasons)[0],
        f"open volume {newest.volume_uuid}: expected {count} members, "
        f"got {count - len(absent)}; missing: {text}{hint}",
    )


def _is_given(member: Member) -> bool:
    return not isinstance(member.device, MissingDevice) or member.device.given


def same_kind(error: DlfsError, message: str) -> DlfsError:
    """Return an error of the same class with a longer message."""
    if isinstance(error, DeviceError):
        return type(error)(message, error.errno or errno.EIO)
    return type(error)(message)


def superblock_for(member: Member, newest: Superblock) -> Superblock:
    """Return the newest superblock as it is written to one member."""
    return replace(newest, member_number=member.number, member_bytes=member.member_bytes)
