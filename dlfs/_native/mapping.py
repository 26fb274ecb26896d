"""Maps files into memory without a descriptor of the mapping, which ``mmap.mmap`` keeps.

The mapping is freed with the last array that views it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value


def map_file(descriptor: int, size_bytes: int) -> NDArray[np.uint8]:
    """Map a file, whose descriptor may be closed afterwards.

    Args:
        descriptor: descriptor of the file, open for reading.
        size_bytes: length of the mapping, at least 1; the file must stay that long.

    Returns:
        ``uint8[size_bytes]``, which cannot be written to.

    Raises:
        OSError: the system refuses it.
    """
    address = _libc.mmap(None, size_bytes, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    if address == _FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    # It is unmapped without a bytecode, in which Ctrl-C would be lost, as by a ``Handle``.
    owner: Any = type("Mapped", (ctypes.c_uint8 * size_bytes,), {"__slots__": ("__del__",)})
    mapped = owner.from_address(address)
    mapped.__del__ = partial(_libc.munmap, address, size_bytes)
    memory = np.frombuffer(memoryview(mapped), np.uint8)
    memory.flags.writeable = False
    return memory
