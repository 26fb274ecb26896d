"""The writer's lock of a volume: that of every member, member 0 first.

Every writer takes member 0 first, so that two writers of one volume meet there and nowhere else.
The others are then taken at once, since each may have to wait for a dead writer's lease to end.
Readers take no lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from dlfs.block import BlockDevice, SharedNamespaceDevice
from dlfs.errors import DlfsError


def lock_members(devices: Sequence[BlockDevice], holder: str) -> None:
    """Take the lock of every member, or of none.

    Args:
        devices: the members, in order, writable.
        holder: what the writer is, for people.

    Raises:
        LockedError: another writer has a member; the message names both.
        DeviceError: a device failed.
    """
    first, *others = devices
    try:
        first.lock_exclusive(holder)
        if others:
            _lock_at_once(others, holder)
    except BaseException:
        unlock_members(devices)
        raise


def _lock_at_once(devices: Sequence[BlockDevice], holder: str) -> None:
    with ThreadPoolExecutor(len(devices), thread_name_prefix="dlfs-lock") as pool:
        attempts = [pool.submit(device.lock_exclusive, holder) for device in devices]
        try:
            for attempt in attempts:
                attempt.result()
        except BaseException:
            for device in devices:  # the pool ends when they have
                if isinstance(device, SharedNamespaceDevice):
                    device.cancel_lock_wait()
            raise


def unlock_members(devices: Sequence[BlockDevice]) -> None:
    """Give back every lock that is held, the last member's first.

    Raises:
        DeviceError: one could not be given back; the others were.
    """
    failure: DlfsError | None = None
    for device in reversed(devices):
        try:
            device.unlock()
        except DlfsError as error:
            failure = failure or error
    if failure is not None:
        raise failure
