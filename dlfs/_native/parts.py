"""Reads of single samples, and of parts of them, for readers and for connections to a service.

Small samples are copied through a buffer of the thread, parts of larger ones into that of a caller.

Source: ``dlfs/reader.h`` and ``part.h``.
"""

from __future__ import annotations

import ctypes
import errno
import threading
from collections.abc import Callable
from ctypes import byref, c_uint8, c_void_p
from dataclasses import dataclass
from typing import Any

from dlfs._native import abi
from dlfs._native.batch import NativeFailure, failure_of

SCRATCH_BYTES_MIN = 1 << 16
"""First size of the buffer through which a thread copies single samples, in bytes."""

SCRATCH_BYTES_MAX = 1 << 20
"""Most bytes of a sample that is copied singly; larger samples are read as batches."""

_new_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
_new_bytes.restype = ctypes.py_object
_new_bytes.argtypes = (c_void_p, ctypes.c_ssize_t)


@dataclass(frozen=True, slots=True)
class SamplePart:
    """Position of a part in a sample; its length is that of the buffer.

    Attributes:
        index: index of the sample, 0..N-1.
        offset_bytes: first byte of the part in the sample.
    """

    index: int
    offset_bytes: int


def copy_part(
    call: Callable[..., int], part: SamplePart, buffer: memoryview
) -> tuple[int, NativeFailure]:
    """Fill a buffer with a part of a sample.

    Args:
        call: ``dlfs_reader_read_part`` of a reader, or a function with the same further arguments.
        part: position of the part.
        buffer: ``uint8[n]``, contiguous and writable; the part is as long as this.

    Returns:
        The code; and the failure, with the same code if the bytes could not be read, else code 0.
    """
    request = abi.Part(index=part.index, offset_bytes=part.offset_bytes, length_bytes=buffer.nbytes)
    failure = abi.Failure()
    memory = (c_uint8 * buffer.nbytes).from_buffer(buffer)
    try:
        code = call(byref(request), memory, byref(failure))
    finally:
        del call  # a traceback that refers to this frame does not keep the reader open
    return code, failure_of(failure)


def make_bytes(length_bytes: int, fill: Callable[[memoryview], None]) -> bytes:
    """Create a ``bytes`` object in place, without a second copy of its content.

    Args:
        length_bytes: length of the object.
        fill: called once with the memory of the object, which it fills and must not keep.
    """
    made: bytes = _new_bytes(None, length_bytes)
    # No other code has the object yet, so its memory may still be written to.
    address = ctypes.cast(ctypes.c_char_p(made), c_void_p).value or 0
    fill(memoryview((c_uint8 * length_bytes).from_address(address)).cast("B"))
    return made


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
