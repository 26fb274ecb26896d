"""The type of the file system that an open file lies on, which Python cannot ask for.

Source: statfs(2); Linux, include/uapi/linux/magic.h.
"""

from __future__ import annotations

import ctypes
import os

_STATFS_BYTES = 256
"""Size of the memory for ``struct statfs``, in bytes: twice what the largest one needs."""


def file_system_type(descriptor: int) -> int:
    """Return the type of a file's system, as the kernel numbers them (``f_type``).

    Args:
        descriptor: descriptor of an open file.

    Raises:
        OSError: the system refused.
    """
    memory = ctypes.create_string_buffer(_STATFS_BYTES)
    call = ctypes.CDLL(None, use_errno=True).fstatfs
    call.argtypes = [ctypes.c_int, ctypes.c_char_p]
    if call(descriptor, memory):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    found = ctypes.c_long.from_buffer(memory).value  # the first field of the structure
    return found & 0xFFFFFFFF
