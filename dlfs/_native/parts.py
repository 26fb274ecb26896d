"""Reads of parts of samples into a caller's buffer, for readers and for connections to a service.

Source: ``part.h``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import byref, c_uint8, c_void_p
from dataclasses import dataclass

from dlfs._native import abi
from dlfs._native.batch import NativeFailure, failure_of

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
    call: Callable[..., int], handle: c_void_p | None, part: SamplePart, buffer: memoryview
) -> tuple[int, NativeFailure]:
    """Fill a buffer with a part of a sample.

    Args:
        call: ``dlfs_reader_read_part``, or a function with its signature.
        handle: first argument of ``call``.
        part: position of the part.
        buffer: ``uint8[n]``, contiguous and writable; the part is as long as this.

    Returns:
        The code; and the failure, with the same code if the bytes could not be read, else code 0.
    """
    request = abi.Part(index=part.index, offset_bytes=part.offset_bytes, length_bytes=buffer.nbytes)
    failure = abi.Failure()
    memory = (c_uint8 * buffer.nbytes).from_buffer(buffer)
    try:
        code = call(handle, byref(request), memory, byref(failure))
    finally:
        del handle  # a traceback that refers to this frame does not keep the reader open
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
