"""Parts of samples, copied into a caller's buffer: what both kinds of readers call.

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
    """Which bytes of which sample to read.

    Attributes:
        index: of the sample, 0..N-1.
        offset_bytes: where the part starts in the sample.
        avoided_member: number of a member to read around, where there are copies; None: none.
    """

    index: int
    offset_bytes: int
    avoided_member: int | None = None


def copy_part(
    call: Callable[..., int], handle: c_void_p | None, part: SamplePart, buffer: memoryview
) -> tuple[int, NativeFailure]:
    """Fill a buffer with a part of a sample by ``dlfs_reader_read_part`` or its like.

    Args:
        call: the function.
        handle: its first argument.
        part: where the bytes start.
        buffer: ``uint8[n]``, contiguous and writable; the part is as long as this.

    Returns:
        The code; and where the sample lies, with the same code if the sample could not be read, or
        with code 0.
    """
    asked = abi.Part(
        index=part.index,
        offset_bytes=part.offset_bytes,
        length_bytes=buffer.nbytes,
        avoided_member=abi.MEMBER_ANY if part.avoided_member is None else part.avoided_member,
    )
    failure = abi.Failure()
    memory = (c_uint8 * buffer.nbytes).from_buffer(buffer)
    code = call(handle, byref(asked), memory, byref(failure))
    return code, failure_of(failure)


def make_bytes(length_bytes: int, fill: Callable[[memoryview], None]) -> bytes:
    """Make a ``bytes`` object in place: without a second copy of what it holds.

    Args:
        length_bytes: of the object.
        fill: called once with its memory, which it fills and does not keep.
    """
    made: bytes = _new_bytes(None, length_bytes)
    # Nobody else has the object yet, so that it may still be written to.
    address = ctypes.cast(ctypes.c_char_p(made), c_void_p).value or 0
    fill(memoryview((c_uint8 * length_bytes).from_address(address)).cast("B"))
    return made
