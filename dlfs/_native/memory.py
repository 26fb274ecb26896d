"""Aligned memory: mappings of huge pages where there are any, and pools of equal buffers.

The memory lives as long as anything sees it: ``close`` lets go of it, and it is unmapped when the
last array or view of it is gone too. An address is good for as long as its object is kept.
"""

from __future__ import annotations

import errno
import weakref
from ctypes import CDLL, Array, byref, c_uint8, c_uint32, c_void_p
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from dlfs._native.library import check, library
from dlfs.errors import ClosedError, UsageError

KINDS = ("pages", "transparent", "huge")
"""A mapping's pages, by ``DLFS_MEMORY_*``: ordinary, transparent huge, reserved huge."""

_M_MMAP_THRESHOLD = -3
_LARGE_BYTES = 1 << 18

_BUFFER_BYTES_MAX = 1 << 62
_BUFFER_COUNT_MAX = (1 << 32) - 1


def give_back_freed_memory() -> None:
    """Have this process's malloc give blocks of 256 KiB and more back when they are freed.

    By itself glibc takes a large block that was freed as a sign that more of its size will come,
    and then keeps those up to 32 MiB, in an arena of each thread. Source: mallopt(3). Other C
    libraries have no such call: nothing happens.
    """
    mallopt = getattr(CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


def _unmap(address: int, size_bytes: int) -> None:
    library().dlfs_memory_unmap(address, size_bytes)


def _destroy_pool(handle: int) -> None:
    library().dlfs_pool_destroy(handle)


class AlignedBuffer:
    """Zeroed memory, aligned to 2 MiB from 2 MiB on, else to the page; private to the process.

    Args:
        size_bytes: at least 1.

    Raises:
        UsageError: the size is not positive.
        DeviceError: there is not enough memory.

    Owns: the mapping, together with all arrays and views of it.
    """

    def __init__(self, size_bytes: int) -> None:
        if not 0 < size_bytes <= _BUFFER_BYTES_MAX:
            raise UsageError(f"map memory: expected 1 byte or more, got {size_bytes}")
        base, kind = c_void_p(), c_uint32()
        code = library().dlfs_memory_map(size_bytes, byref(base), byref(kind))
        check(code, f"map {size_bytes} bytes")
        address = base.value or 0
        memory = (c_uint8 * size_bytes).from_address(address)
        # Not at exit: arrays may still be in use then, and the process's end unmaps everything.
        weakref.finalize(memory, _unmap, address, size_bytes).atexit = False
        self._memory: Array[c_uint8] | None = memory
        self._address = address
        self.size_bytes = size_bytes
        self.kind: str = KINDS[kind.value]

    @property
    def _open(self) -> Array[c_uint8]:
        if self._memory is None:
            raise ClosedError(f"use a buffer of {self.size_bytes} bytes: it is closed")
        return self._memory

    @property
    def address(self) -> int:
        """Of the first byte; good while this object, or an array of it, is kept.

        Raises:
            ClosedError: the buffer is closed.
        """
        return self._address if self._open else 0

    @property
    def view(self) -> memoryview:
        """The bytes as a writable ``memoryview``.

        Raises:
            ClosedError: the buffer is closed.
        """
        return memoryview(self._open).cast("B")

    @property
    def array(self) -> NDArray[np.uint8]:
        """The bytes as ``uint8[size_bytes]``, writable, without a copy.

        Raises:
            ClosedError: the buffer is closed.
        """
        return np.frombuffer(memoryview(self._open), np.uint8)

    def __len__(self) -> int:
        return self.size_bytes

    def close(self) -> None:
        """Let go of the memory. Does nothing the second time."""
        self._memory = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class BufferPool:
    """Equal, aligned buffers in one mapping.

    Args:
        buffer_bytes: of each, a multiple of 512.
        buffer_count: 1 or more.

    Raises:
        UsageError: a size is out of range.
        DeviceError: there is not enough memory.

    Threads: any at once.
    """

    def __init__(self, *, buffer_bytes: int, buffer_count: int) -> None:
        what = f"make a pool of {buffer_count} buffers of {buffer_bytes} bytes"
        if not (0 < buffer_bytes <= _BUFFER_BYTES_MAX and 0 < buffer_count <= _BUFFER_COUNT_MAX):
            raise UsageError(f"{what}: out of range")
        handle = c_void_p()
        check(library().dlfs_pool_create(buffer_bytes, buffer_count, byref(handle)), what)
        address = handle.value or 0
        size_bytes: int = library().dlfs_pool_bytes(handle)
        memory = (c_uint8 * size_bytes).from_address(library().dlfs_pool_base(handle))
        weakref.finalize(memory, _destroy_pool, address).atexit = False
        self._handle: c_void_p | None = handle
        self._array: NDArray[np.uint8] = np.frombuffer(memoryview(memory), np.uint8)
        self.buffer_bytes = buffer_bytes
        self.buffer_count = buffer_count

    def _open(self) -> c_void_p:
        if self._handle is None:
            raise ClosedError(f"use a pool of buffers of {self.buffer_bytes} bytes: it is closed")
        return self._handle

    @property
    def free_count(self) -> int:
        """Buffers that are not taken.

        Raises:
            ClosedError: the pool is closed.
        """
        count: int = library().dlfs_pool_free_count(self._open())
        return count

    def acquire(self) -> NDArray[np.uint8] | None:
        """Take a buffer, with whatever bytes it has.

        Returns:
            ``uint8[buffer_bytes]``, or None when all are taken: it never waits.

        Raises:
            ClosedError: the pool is closed.
        """
        taken = c_void_p()
        code = library().dlfs_pool_acquire(self._open(), byref(taken))
        if code == -errno.EAGAIN:
            return None
        check(code, "take a buffer of a pool")
        first = (taken.value or 0) - self._array.ctypes.data
        return self._array[first : first + self.buffer_bytes]

    def release(self, buffer: NDArray[np.uint8]) -> None:
        """Give a buffer back; its array must not be used any more.

        Raises:
            UsageError: it is not one of the pool's, or is free already.
            ClosedError: the pool is closed.
        """
        code = library().dlfs_pool_release(self._open(), buffer.ctypes.data)
        check(code, f"give back a buffer of {buffer.nbytes} bytes")

    def close(self) -> None:
        """Let go of the pool; it is freed with the last of its arrays. Idempotent."""
        self._handle = None
        self._array = np.empty(0, np.uint8)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
