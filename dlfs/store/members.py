"""A volume's members: opening devices, reading every superblock, choosing the generation.

Members may be given in any order; their superblocks number them. Every member has three copies of
its superblock, and the highest generation found valid in any copy on any member is the one in
force: all that it refers to was durable before the first of its copies was written. A copy that is
damaged is reported and does no harm while another one is whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol
from uuid import UUID

from dlfs.block import (
    BlockDevice,
    FileUri,
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
)
from dlfs.format.constants import SUPERBLOCK_BYTES, SUPERBLOCK_MAGIC
from dlfs.format.superblock import Superblock, decode_superblock, letter_for, superblock_offsets

COPY_NAMES = ("A", "B", "tail")


class Opener(Protocol):
    """What opens a device; ``dlfs.block.open_device`` unless devices are to be wrapped."""

    def __call__(self, uri: str, *, writable: bool, engine: str) -> BlockDevice:
        """Open the device that a URI names."""


@dataclass(frozen=True, slots=True)
class SuperblockCopy:
    """One copy of a member's superblock: what it says, or what is wrong with it."""

    name: str
    offset_bytes: int
    superblock: Superblock | None
    error: FormatError | DeviceError | None
    foreign: bool = False
    """Nothing at this place claims to be a superblock."""


@dataclass(frozen=True, slots=True)
class Member:
    """One open member of a volume."""

    number: int
    uuid: UUID
    device: BlockDevice
    member_bytes: int
    """The size that its superblocks are laid out for; the device may be larger."""
    copies: tuple[SuperblockCopy, ...]

    @property
    def newest(self) -> Superblock:
        """The newest superblock of this member's copies."""
        return max(
            (copy.superblock for copy in self.copies if copy.superblock is not None),
            key=lambda superblock: superblock.generation,
        )

    def is_current(self, generation: int) -> bool:
        """Whether the copies that must hold a generation do: its letter and the tail."""
        return all(
            copy.superblock is not None and copy.superblock.generation == generation
            for copy in self.copies
            if copy.name in (letter_for(generation), "tail")
        )


def split_uris(members: str | Sequence[str]) -> tuple[str, ...]:
    """The member URIs of a volume: a sequence, or one text with commas between.

    Paths of files become absolute, so that the URIs hold in other processes.

    Raises:
        UsageError: there is none, or a malformed one.
    """
    uris = split_members(members) if isinstance(members, str) else tuple(members)
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
    engine: str = "auto",
    opener: Opener = open_device,
) -> list[BlockDevice]:
    """Open several devices; when one fails, close the others.

    Raises:
        UsageError: two URIs mean the same device.
        DlfsError: whatever opening one raises.
    """
    devices: list[BlockDevice] = []
    try:
        for uri in uris:
            devices.append(opener(uri, writable=writable, engine=engine))
        seen: dict[str, str] = {}
        for device in devices:
            if device.identity in seen:
                raise UsageError(
                    f"open {device.uri}: expected different members, "
                    f"got the device of {seen[device.identity]} again"
                )
            seen[device.identity] = device.uri
    except BaseException:
        close_devices(devices)
        raise
    return devices


def close_devices(devices: Sequence[BlockDevice]) -> None:
    """Close devices: all of them, whatever becomes of one.

    Raises:
        DlfsError: one could not be closed well.
    """
    failure: DlfsError | None = None
    for device in devices:
        try:
            device.close()
        except DlfsError as error:
            failure = failure or error
    if failure is not None:
        raise failure


def read_copies(device: BlockDevice) -> tuple[SuperblockCopy, ...]:
    """Read the three superblock copies of a device, whatever they are.

    The tail's place is where A or B say that the member ends, else the device's end.

    Raises:
        TruncatedError: the device is smaller than the member was when the volume was made.
    """
    offsets = superblock_offsets(device.size_bytes)
    heads = [_read_copy(device, name, offset) for name, offset in zip("AB", offsets, strict=False)]
    recorded = {copy.superblock.member_bytes for copy in heads if copy.superblock is not None}
    if recorded and max(recorded) > device.size_bytes:
        raise TruncatedError(
            f"open {device.uri}: expected a member of {max(recorded)} bytes, "
            f"got a device of {device.size_bytes}"
        )
    tail = superblock_offsets(max(recorded, default=device.size_bytes))[2]
    return (*heads, _read_copy(device, "tail", tail))


def _read_copy(device: BlockDevice, name: str, offset_bytes: int) -> SuperblockCopy:
    where = f"{device.uri} at byte {offset_bytes}"
    if not 0 <= offset_bytes <= device.size_bytes - SUPERBLOCK_BYTES:
        error = TruncatedError(
            f"{where}: read a superblock: the device has {device.size_bytes} bytes"
        )
        return SuperblockCopy(name, offset_bytes, None, error, foreign=True)
    foreign = False
    try:
        data = device.read(offset_bytes, SUPERBLOCK_BYTES)
        foreign = not data.startswith(SUPERBLOCK_MAGIC)
        superblock = decode_superblock(data, where)
    except (FormatError, DeviceError) as error:
        return SuperblockCopy(name, offset_bytes, None, error, foreign=foreign)
    return SuperblockCopy(name, offset_bytes, superblock, None)


def identify(device: BlockDevice) -> Member:
    """Tell which member of which volume a device is.

    Raises:
        FormatError: it has no whole superblock; VersionError or TruncatedError where that is why.
        DeviceError: no copy could be read.
    """
    copies = read_copies(device)
    whole = [copy.superblock for copy in copies if copy.superblock is not None]
    if whole:
        newest = max(whole, key=lambda superblock: superblock.generation)
        return Member(newest.member_number, newest.member_uuid, device, newest.member_bytes, copies)
    if all(copy.foreign for copy in copies):
        raise FormatError(
            f"open {device.uri}: this is no DLFS volume: expected a superblock at its head "
            f"or its tail, got none in {device.size_bytes} bytes"
        )
    errors = [copy.error for copy in copies if copy.error is not None]
    for kind in (VersionError, DeviceError):
        for error in errors:
            if isinstance(error, kind):
                raise error
    told = "; ".join(f"{copy.name}: {copy.error}" for copy in copies)
    raise FormatError(
        f"open {device.uri}: expected a superblock in one of three places, got {told}"
    )


def assemble(devices: Sequence[BlockDevice]) -> tuple[tuple[Member, ...], Superblock]:
    """Make a volume of its devices, given in any order.

    Returns:
        The members by number, and the superblock in force (of whichever member had it).

    Raises:
        UsageError: a member of another volume, or one given twice.
        NotFoundError: a member is missing.
        FormatError: a device has no superblock, or those of two members contradict each other.
    """
    found = [identify(device) for device in devices]
    newest = max((member.newest for member in found), key=lambda sb: sb.generation)
    by_number: dict[int, Member] = {}
    for member in found:
        _check_belongs(member, newest)
        twin = by_number.setdefault(member.number, member)
        if twin is not member:
            raise UsageError(
                f"open {member.device.uri}: expected each member once, got number {member.number} "
                f"again: {twin.device.uri} is that one too"
            )
    missing = [i for i in range(newest.geometry.member_count) if i not in by_number]
    if missing:
        names = ", ".join(f"{i} ({newest.member_uuids[i]})" for i in missing)
        raise NotFoundError(
            f"open volume {newest.volume_uuid}: expected {newest.geometry.member_count} members, "
            f"got {len(found)}; missing: {names}"
        )
    return tuple(by_number[i] for i in sorted(by_number)), newest


def _check_belongs(member: Member, newest: Superblock) -> None:
    own = member.newest
    if own.volume_uuid != newest.volume_uuid:
        raise UsageError(
            f"open {member.device.uri}: expected a member of volume {newest.volume_uuid}, "
            f"got one of volume {own.volume_uuid}"
        )
    if own.member_uuids != newest.member_uuids or own.geometry != newest.geometry:
        raise FormatError(
            f"open {member.device.uri}: its superblock contradicts that of the volume's newest "
            f"generation, {newest.generation}, in the members or the layout"
        )


def superblock_for(member: Member, newest: Superblock) -> Superblock:
    """The newest superblock, as it stands on one member."""
    return replace(newest, member_number=member.number, member_bytes=member.member_bytes)
