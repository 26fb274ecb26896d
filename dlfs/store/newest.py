"""Loads the newest generation of an open volume, whose members may have changed since.

A volume gets members when it grows, and members leave it when it shrinks (FORMAT.md, 8.6 and 8.7).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from dlfs.base.deadlines import is_over
from dlfs.block import BlockDevice, MissingDevice
from dlfs.errors import DeviceError, FormatError, NotFoundError
from dlfs.format.catalog import DatasetRecord
from dlfs.format.geometry import MemberGroup
from dlfs.store.members import Opener, close_devices, identify_all
from dlfs.store.recorded import open_recorded
from dlfs.store.transaction import Generation, load_generation

REOPEN_TIMEOUT_S = 15.0
"""Longest wait for devices that cannot be opened, in seconds, by a program that has the volume open
and must open members that it got since: as long as an open device waits by default."""
REOPEN_PAUSE_S = 0.05
"""Pause between two attempts to open them, in seconds."""


def load_joined(
    devices: list[BlockDevice],
    *,
    opener: Opener,
    load: Callable[[Sequence[BlockDevice]], Generation] = load_generation,
) -> Generation:
    """Load the newest generation, also if members join or leave after the devices were opened.

    Args:
        devices: devices of the volume; those of members that joined are added to it, also if this
            fails.
        opener: function that opens devices.
        load: function that loads a generation of devices.

    Raises:
        DlfsError: as ``load``.
    """
    tried = False
    while True:
        try:
            return load(devices)
        except (DeviceError, FormatError, NotFoundError) as error:
            found = open_recorded(devices, writable=False, opener=opener)
            joined = [device for device in found if not isinstance(device, MissingDevice)]
            # Without any, members may just have left the volume.
            if not joined and (tried or isinstance(error, DeviceError)):
                raise
            tried = not joined
            devices += joined


def load_again(
    opened: Generation,
    devices: list[BlockDevice],
    *,
    opener: Opener,
    load: Callable[[Sequence[BlockDevice]], Generation],
) -> Generation:
    """Load the newest generation of an open volume, also if it has other members by now.

    Args:
        opened: generation that was loaded before.
        devices: its devices; those of other members are added to it, also if this fails.
        opener: function that opens devices.
        load: function that loads a generation of devices.

    Raises:
        DlfsError: as ``load``.
    """
    devices += open_recorded(devices, opened.superblock.volume_uuid, writable=False, opener=opener)
    return load_joined(
        devices, opener=opener, load=lambda found: load(without_removed(opened, found))
    )


def without_removed(before: Generation, devices: Sequence[BlockDevice]) -> list[BlockDevice]:
    """Return the devices without those of members that the volume no longer has.

    Args:
        before: an earlier generation of the volume.
        devices: devices of its members, in order, and any others.
    """
    found = identify_all(devices)[0]
    newest = max((member.newest for member in found), key=lambda sb: sb.generation)
    if newest.volume_uuid != before.superblock.volume_uuid:
        return list(devices)
    if len(devices) <= newest.geometry.member_count:
        return list(devices)
    members = [m.device for m in found if m.uuid in newest.member_uuids]  # also under new UUIDs
    removed = [m.number for m in before.members if m.uuid not in newest.member_uuids]
    return [
        device
        for number, device in enumerate(devices)
        if number not in removed or device in members
    ]


@contextmanager
def newest_generation(opened: Generation, opener: Opener) -> Iterator[Generation]:
    """Load the newest generation of an open volume, also if it has other members by now.

    This waits for members that cannot be opened for the moment, as open devices wait for a target.

    Raises:
        DlfsError: as ``load_generation``.
    """
    count = len(opened.devices)
    deadline = time.monotonic() + REOPEN_TIMEOUT_S
    load = partial(load_generation, known=opened)
    while True:
        devices = opened.devices
        try:
            newest = load_again(opened, devices, opener=opener, load=load)
            break
        except DeviceError:
            close_devices(devices[count:])
            returning = any(
                isinstance(device, MissingDevice) and device.reason.retryable
                for device in devices[count:]
            )
            if not returning or time.monotonic() >= deadline or is_over():
                raise
            time.sleep(REOPEN_PAUSE_S)
        except BaseException:
            close_devices(devices[count:])
            raise
    try:
        yield newest
    finally:
        close_devices(devices[count:])


def is_moved(
    opened: Generation, record: DatasetRecord, newest: Generation, found: DatasetRecord
) -> bool:
    """Return True if a dataset has other chunks, or these are on other members.

    Args:
        opened: an earlier generation.
        record: record of the dataset in it.
        newest: newest generation of the volume.
        found: record of the dataset in that.
    """
    runs = (*record.data_runs, *record.directory_runs)
    return (*found.data_runs, *found.directory_runs) != runs or have_left(opened, record, newest)


def have_left(opened: Generation, record: DatasetRecord, newest: Generation) -> bool:
    """Return True if the volume no longer has the members that had a dataset's chunks."""
    present = set(newest.superblock.member_uuids)
    uuids = opened.superblock.member_uuids
    used = groups_of(opened, record)
    return any(present.isdisjoint(uuids[n] for n in group.members) for group in used)


def groups_of(generation: Generation, record: DatasetRecord) -> list[MemberGroup]:
    """Return the groups of members that have a dataset's chunks."""
    runs = (*record.data_runs, *record.directory_runs)
    return [group for group in generation.geometry.groups if any(map(group.has, runs))]


def close_removed(generation: Generation, devices: Sequence[BlockDevice]) -> None:
    """Close the devices that are no member of a generation."""
    members = {id(device) for device in generation.devices}
    close_devices([device for device in devices if id(device) not in members])
