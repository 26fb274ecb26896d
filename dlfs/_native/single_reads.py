"""Single samples: copies through a buffer of the thread, and reads that began before.

Source: ``dlfs/reader.h``.
"""

from __future__ import annotations

import ctypes
import errno
import threading
from collections.abc import Callable
from ctypes import byref, c_void_p
from typing import Any

from dlfs._native.handle import Handle
from dlfs._native.library import library

SCRATCH_BYTES_MIN = 1 << 16
"""First size of the buffer through which a thread copies single samples, in bytes."""

SCRATCH_BYTES_MAX = 1 << 20
"""Most bytes of a sample that is copied singly; larger samples are read as batches."""


def _grow(scratch: threading.local, bytes_before: int) -> ctypes.Array[Any]:
    """Allocate a larger buffer through which a thread copies single samples."""
    memory = ctypes.create_string_buffer(max(SCRATCH_BYTES_MIN, 4 * bytes_before))
    scratch.memory = memory
    return memory


def _scratch_of(scratch: threading.local, least_bytes: int) -> ctypes.Array[Any]:
    """Return the thread's buffer for single samples, of at least this size."""
    memory: ctypes.Array[Any] = getattr(scratch, "memory", None) or _grow(scratch, 0)
    while ctypes.sizeof(memory) < least_bytes:
        memory = _grow(scratch, ctypes.sizeof(memory))
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
    memory = _scratch_of(scratch, 0)
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


class NativeBegunRead:
    """A ``dlfs_begun_read``, which ends with ``get`` or ``cancel``.

    Args:
        handle: owner of the read.
        scratch: owner of the thread's buffer.

    Threads: one at a time.
    """

    def __init__(self, handle: Handle, scratch: threading.local) -> None:
        self._handle: Handle | None = handle
        self._scratch = scratch

    def get(self, length_bytes: int) -> bytes | None:
        """Copy the sample.

        Args:
            length_bytes: length of the sample, at most ``SCRATCH_BYTES_MAX``.

        Returns:
            The bytes; None if the devices do not send them within half a millisecond from now, or
            the sample failed, or the read has ended.
        """
        memory = _scratch_of(self._scratch, length_bytes)
        handle, self._handle = self._handle, None
        if handle is None:
            return None
        got = library().dlfs_begun_read_get(byref(handle), memory, ctypes.sizeof(memory))
        return None if got < 0 else ctypes.string_at(memory, got)

    def cancel(self) -> None:
        """Give up the read, without waiting for the devices. Does nothing if it has ended."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.free()
