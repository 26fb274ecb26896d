"""Locks of granted writers on files and disks: one byte of the file for each slot.

The kernel owns such a lock together with the open file through which a writer writes (an open file
description), and ends it with the last reference to that. A write in flight holds a reference. So a
free byte means that no write of that slot's writer is under way, however its process ended.

The bytes lie far beyond the end of any file, away from the locks of other programs. ``flock``, the
lock of ordinary writers, does not conflict with them.

Source: fcntl(2), "Open file description locks".
"""

from __future__ import annotations

import fcntl
import os
import struct

SLOTS_MAX = 1024
"""Number of slots of a file."""
COORDINATOR_SLOT = SLOTS_MAX
"""Slot of the coordinator of an import, behind those of its workers. It writes nothing through that
handle: the slot says that it runs."""

_FIRST_BYTE = 1 << 62
_LOCK = struct.Struct("@hhqqi4x")  # struct flock: l_type, l_whence, l_start, l_len, l_pid


def lock_slot(descriptor: int, slot: int) -> bool:
    """Lock the byte of a slot through an open file; return False if another one has it.

    Args:
        descriptor: descriptor of the file, open for writing.
        slot: 0..``SLOTS_MAX`` - 1.

    Raises:
        OSError: the file system has no such locks.
    """
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _encode(slot, 1))
    except BlockingIOError:
        return False
    return True


def are_slots_free(descriptor: int, slot: int | None = None) -> bool:
    """Return True if no other open file has the byte of a slot, or of any slot if it is None.

    Raises:
        OSError: the file system has no such locks.
    """
    asked = _encode(0, SLOTS_MAX) if slot is None else _encode(slot, 1)
    kind, *_ = _LOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, asked))
    return bool(kind == fcntl.F_UNLCK)


def _encode(slot: int, count: int) -> bytes:
    return _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, _FIRST_BYTE + slot, count, 0)
