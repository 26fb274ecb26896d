"""A filter for the HDF5 library that copies what it is given: what other filters made of a chunk.

The library gives the first filter of a chunk to be undone last. There is one such filter in a
process.

Threads: one at a time, which the package h5py sees to by its lock.

Source: ``H5Z_class2_t`` and ``H5Z_func_t`` in H5Zdevelop.h.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

FILTER = 511
"""Number of the filter; those from 256 to 511 are for tests, and no file has them."""

_RUN = ctypes.CFUNCTYPE(
    ctypes.c_size_t,
    ctypes.c_uint,
    ctypes.c_size_t,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.POINTER(ctypes.c_size_t),
    ctypes.POINTER(ctypes.c_void_p),
)


class _Class(ctypes.Structure):
    """``H5Z_class2_t``: a filter as HDF5 registers it."""

    _fields_ = (
        ("version", ctypes.c_int),
        ("id", ctypes.c_int),
        ("encoder_present", ctypes.c_uint),
        ("decoder_present", ctypes.c_uint),
        ("name", ctypes.c_char_p),
        ("can_apply", ctypes.c_void_p),
        ("set_local", ctypes.c_void_p),
        ("filter", _RUN),
    )


class FilterProbe:
    """The filter. It fails always, so that the library makes no use of the chunk.

    Attributes:
        address: address of the structure that the library registers; valid until the process ends.
        size_bytes: size of the last chunk, or -1 if none was given.
        data: its bytes; empty if they are more than ``size_max``.
        size_max: most bytes of a chunk that are copied.
    """

    size_max = 0

    def __init__(self) -> None:
        self._class = _Class(1, FILTER, 1, 1, b"probe", None, None, _RUN(self._run))
        self.address = ctypes.addressof(self._class)
        self.reset()

    def reset(self) -> None:
        """Forget the last chunk."""
        self.size_bytes = -1
        self.data = b""

    def _run(self, *arguments: Any) -> int:
        size_bytes, room, buffer = arguments[3:]
        self.size_bytes = size_bytes
        # A filter may give the code of its error as a size, and as the size of its buffer.
        if buffer[0] and size_bytes <= min(room[0], self.size_max):
            self.data = ctypes.string_at(buffer[0], size_bytes)
        return 0


@functools.cache
def filter_probe() -> FilterProbe:
    """Return the filter of this process."""
    return FilterProbe()
