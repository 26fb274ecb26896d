"""Aligned buffers and pools: alignment, lifetime past close, wrong use."""

import gc

import numpy as np
import pytest

from dlfs._native.memory import KINDS, AlignedBuffer, BufferPool
from dlfs.errors import ClosedError, DeviceError, UsageError
from dlfs.units import MIB


@pytest.mark.parametrize(
    ("size_bytes", "alignment"), [(1, 4096), (5000, 4096), (2 * MIB, 2 * MIB), (5 * MIB, 2 * MIB)]
)
def test_buffer_is_zeroed_and_aligned(size_bytes: int, alignment: int) -> None:
    with AlignedBuffer(size_bytes) as buffer:
        assert buffer.address % alignment == 0
        assert len(buffer) == buffer.size_bytes == size_bytes == buffer.array.size
        assert not buffer.array.any()
        assert buffer.kind in KINDS


def test_view_and_array_share_the_memory() -> None:
    with AlignedBuffer(100) as buffer:
        buffer.view[3:6] = b"abc"
        assert buffer.array[3:6].tobytes() == b"abc"
        buffer.array[4] = ord("x")
        assert bytes(buffer.view[3:6]) == b"axc"
        assert buffer.array.ctypes.data == buffer.address


def test_memory_outlives_close_with_its_arrays() -> None:
    buffer = AlignedBuffer(3 * MIB)
    array = buffer.array[10:20]
    array[:] = 7
    buffer.close()
    buffer.close()
    del buffer
    gc.collect()
    assert array.tolist() == [7] * 10


def test_closed_buffer_is_refused() -> None:
    buffer = AlignedBuffer(1)
    buffer.close()
    for name in ("address", "array", "view"):
        with pytest.raises(ClosedError, match="closed"):
            getattr(buffer, name)


@pytest.mark.parametrize("size_bytes", [0, -1, 1 << 63])
def test_buffer_of_no_size_is_refused(size_bytes: int) -> None:
    with pytest.raises(UsageError):
        AlignedBuffer(size_bytes)


def test_buffer_larger_than_any_memory_is_an_error() -> None:
    with pytest.raises(DeviceError, match="Cannot allocate memory"):
        AlignedBuffer(1 << 61)


def test_pool_gives_each_buffer_once() -> None:
    with BufferPool(buffer_bytes=512, buffer_count=3) as pool:
        buffers = [pool.acquire() for _ in range(3)]
        assert pool.acquire() is None
        assert pool.free_count == 0
        taken = [buffer for buffer in buffers if buffer is not None]
        for i, buffer in enumerate(taken):
            assert buffer.ctypes.data % 512 == 0
            buffer[:] = i
        assert [int(buffer.sum()) for buffer in taken] == [0, 512, 1024]
        pool.release(taken[1])
        assert pool.free_count == 1
        with pytest.raises(UsageError):
            pool.release(taken[1])
        with pytest.raises(UsageError):
            pool.release(np.zeros(512, np.uint8))
        again = pool.acquire()
        assert again is not None
        assert again.ctypes.data == taken[1].ctypes.data


def test_pool_outlives_close_with_its_arrays() -> None:
    pool = BufferPool(buffer_bytes=1 * MIB, buffer_count=4)
    buffer = pool.acquire()
    assert buffer is not None
    buffer[:] = 3
    pool.close()
    pool.close()
    with pytest.raises(ClosedError):
        pool.acquire()
    with pytest.raises(ClosedError):
        pool.release(buffer)
    with pytest.raises(ClosedError):
        _ = pool.free_count
    del pool
    gc.collect()
    assert int(buffer.sum()) == 3 * MIB


@pytest.mark.parametrize(("size", "count"), [(0, 1), (100, 1), (512, 0), (-512, 1), (512, 1 << 32)])
def test_pool_of_wrong_sizes_is_refused(size: int, count: int) -> None:
    with pytest.raises(UsageError):
        BufferPool(buffer_bytes=size, buffer_count=count)


def test_pool_larger_than_any_memory_is_an_error() -> None:
    with pytest.raises(DeviceError, match="Cannot allocate memory"):
        BufferPool(buffer_bytes=1 << 60, buffer_count=4)
