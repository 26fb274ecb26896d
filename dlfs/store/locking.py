"""Locks a volume for one writer: every member, member 0 first.

Every writer locks member 0 first, so that two writers of one volume conflict there and nowhere
else. The other members are then locked in parallel, because each may have to wait until the lease
of a dead writer expires. Readers take no lock.

``when_unlocked`` waits for the lock of another writer, and logs who has it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from dlfs.base.closing import close_all
from dlfs.base.threads import ThreadPool
from dlfs.block import BlockDevice, SharedNamespaceDevice
from dlfs.errors import LockedError

RETRY_S = 0.01
"""Time between two attempts to lock a volume that another writer has locked, in seconds."""

NOTE_S = 3.0
"""Time for which a writer waits for the lock before it logs which writer has it, in seconds."""

_log = logging.getLogger("dlfs")
_Result = TypeVar("_Result")


def lock_members(devices: Sequence[BlockDevice], holder: str) -> None:
    """Lock every member, or none.

    Args:
        devices: devices of the members, in order, writable.
        holder: description of the writer for messages.

    Raises:
        LockedError: another writer has locked a member; the message names both.
        DeviceError: a device failed.
    """
    first, *others = devices
    try:
        first.lock_exclusive(holder)
        if others:
            _lock_in_parallel(others, holder)
    except BaseException:
        unlock_members(devices)
        raise


def _lock_in_parallel(devices: Sequence[BlockDevice], holder: str) -> None:
    with ThreadPool(len(devices), thread_name_prefix="dlfs-lock") as pool:
        attempts = [pool.submit(device.lock_exclusive, holder) for device in devices]
        try:
            for attempt in attempts:
                attempt.result()
        except BaseException:
            for device in devices:  # the pool waits for all attempts
                if isinstance(device, SharedNamespaceDevice):
                    device.cancel_lock_wait()
            raise


def unlock_members(devices: Sequence[BlockDevice]) -> None:
    """Release every lock, starting with the last member.

    Raises:
        DeviceError: a lock could not be released; the others were.
    """
    close_all([device.unlock for device in reversed(devices)])


def when_unlocked(change: Callable[[], _Result], timeout_s: float) -> _Result:
    """Call a function that needs the volume's lock, again while another writer has the lock.

    Raises:
        LockedError: the volume was locked for the whole time; the message names the writer.
        DlfsError: as the function.
    """
    begin, is_noted = time.monotonic(), False
    while True:
        try:
            return change()
        except LockedError as error:
            waited_s = time.monotonic() - begin
            if waited_s >= timeout_s:
                raise
            if waited_s >= NOTE_S and not is_noted:
                _log.warning("%s; waiting for it", error)
                is_noted = True
        time.sleep(RETRY_S)
