"""Tuning of the C library's malloc, for processes that run for long."""

from __future__ import annotations

from ctypes import CDLL

_M_MMAP_THRESHOLD = -3
_LARGE_BYTES = 1 << 18


def give_back_freed_memory() -> None:
    """Make malloc return freed blocks of 256 KiB and more to the system at once.

    By default, glibc raises its threshold when the first large block is freed, and then keeps
    freed blocks of up to 32 MiB in an arena of each thread. Source: mallopt(3). Other C libraries
    have no such call: nothing happens.
    """
    mallopt = getattr(CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
