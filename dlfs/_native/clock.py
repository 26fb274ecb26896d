"""The state of the kernel's clock, which Python's ``time`` does not have.

Source: adjtimex(2); Linux, include/uapi/linux/timex.h.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import Structure, c_int, c_long
from dataclasses import dataclass

_UNSYNCHRONIZED = 0x40  # STA_UNSYNC
_PPM_SHIFT = 16
_NOMINAL_TICK_US = 10_000


class _Timex(Structure):
    """``struct timex``, as far as it is read."""

    _fields_ = (
        ("modes", c_int),
        ("offset", c_long),
        ("frequency", c_long),
        ("maxerror", c_long),
        ("esterror", c_long),
        ("status", c_int),
        ("constant", c_long),
        ("precision", c_long),
        ("tolerance", c_long),
        ("seconds", c_long),
        ("microseconds", c_long),
        ("tick", c_long),
        ("rest", c_long * 20),
    )


@dataclass(frozen=True, slots=True)
class KernelClock:
    """State of the kernel's clock.

    Attributes:
        synchronized: True if a service keeps it synchronized with another clock.
        rate: seconds that it advances while the hardware counts one, about 1.
    """

    synchronized: bool
    rate: float


def read_kernel_clock() -> KernelClock:
    """Read the state of the kernel's clock.

    Raises:
        OSError: the system refuses, as in some containers.
    """
    found = _Timex()
    if ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(found)) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), "adjtimex")
    ppm = found.frequency / (1 << _PPM_SHIFT)
    rate = found.tick / _NOMINAL_TICK_US + ppm / 1e6
    return KernelClock(not found.status & _UNSYNCHRONIZED, rate)
