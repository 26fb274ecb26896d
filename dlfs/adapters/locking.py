"""Waits for the lock of a volume, which one writer at a time has."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from dlfs.errors import LockedError

RETRY_S = 0.01
"""Time between two attempts to lock a volume that another writer has locked, in seconds."""

_Result = TypeVar("_Result")


def when_unlocked(change: Callable[[], _Result], timeout_s: float) -> _Result:
    """Call a function that needs the volume's lock, again while another writer has the lock.

    Raises:
        LockedError: the volume was locked for the whole time; the message names the writer.
        DlfsError: as the function.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return change()
        except LockedError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(RETRY_S)
