"""Copies single samples through a buffer of the thread.

Source: ``dlfs/reader.h``.
"""

from __future__ import annotations

import ctypes
import errno
import threading
from collections.abc import Callable
from ctypes import c_void_p
from typing import Any

SCRATCH_BYTES_MIN = 1 << 16
"""First size of the buffer through which a thread copies single samples, in bytes."""

SCRATCH_BYTES_MAX = 1 << 20
"""Most bytes of a sample that is copied singly; larger samples are read as batches."""


def _grow(scratch: threading.local, bytes_before: int) -> ctypes.Array[Any]:
    """Allocate a larger buffer through which a thread copies single samples."""
    memory = ctypes.create_string_buffer(max(SCRATCH_BYTES_MIN, 4 * bytes_before))
    scratch.memory = memory
    return memory


def copy_sample(
    get: Callable[..., int],
    handle: c_void_p | None,
    index: int,
    flags: int,
    scratch: threading.local,
) -> tuple[bytes | None, int]:
    """Copy one sample.

    Args:
        get: ``dlfs_reader_get``, or a function with its signature.
        handle: first argument of ``get``.
        index: index of the sample, 0..N-1.
        flags: flags of ``get``.
        scratch: owner of the thread's buffer.

    Returns:
        The bytes, or None; and the result of ``get``: a length, or a negative code. A sample of
        more than ``SCRATCH_BYTES_MAX`` is not copied: -ERANGE.
    """
    memory: ctypes.Array[Any] = getattr(scratch, "memory", None) or _grow(scratch, 0)
    try:
        length = get(handle, index, memory, ctypes.sizeof(memory), flags)
        while length == -errno.ERANGE and ctypes.sizeof(memory) < SCRATCH_BYTES_MAX:
            memory = _grow(scratch, ctypes.sizeof(memory))
            length = get(handle, index, memory, ctypes.sizeof(memory), flags)
    finally:
        del handle  # a traceback that refers to this frame does not keep the reader open
    if length < 0:
        return None, length
    return ctypes.string_at(memory, length), length
