"""The contract of BlockDevice, tested for each kind of device."""

from __future__ import annotations

import errno
import gc
import os
import random
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dlfs.base.units import KIB, MIB
from dlfs.block import (
    RECORD_OFFSET_BYTES,
    BlockDevice,
    Kind,
    QueuePair,
    SpdkDevice,
    aligned_buffer,
    open_device,
    operation_error,
)
from dlfs.block.device import NativeBackedDevice
from dlfs.errors import (
    ClosedError,
    DeviceError,
    LockedError,
    UsageError,
)
from tests.contract.openers import FILE_KINDS, KINDS, SIZE_BYTES, Opener, opener_for
from tests.support.forked import run_forked
from tests.support.scripts import hear, running


@pytest.fixture(params=KINDS)
def opener(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opener]:
    with opener_for(request, request.param, tmp_path) as made:
        yield made


@pytest.fixture
def device(opener: Opener) -> Iterator[BlockDevice]:
    with opener(True) as made:
        yield made


def pattern(length: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(length)


def test_is_a_block_device(device: BlockDevice) -> None:
    assert isinstance(device, BlockDevice)
    assert device.size_bytes == SIZE_BYTES
    assert device.block_bytes in (512, 1024, 2048, 4096)
    assert device.writable
    assert device.native.size_bytes == SIZE_BYTES


def test_starts_zeroed_and_keeps_what_is_written(opener: Opener) -> None:
    with opener(True) as device:
        assert device.read(0, SIZE_BYTES) == bytes(SIZE_BYTES)
        data = pattern(64 * KIB)
        device.write(4096, data)
        device.write(SIZE_BYTES - 4096, data[:4096])
        device.flush()
    with opener(False) as device:
        assert device.read(4096, len(data)) == data
        assert device.read(SIZE_BYTES - 4096, 4096) == data[:4096]
        assert device.read(0, 4096) == bytes(4096)


def test_the_smallest_block_works(device: BlockDevice) -> None:
    block = device.block_bytes
    device.write(3 * block, pattern(block))
    assert device.read(2 * block, 3 * block) == bytes(block) + pattern(block) + bytes(block)


def test_writes_from_any_memory(device: BlockDevice) -> None:
    data = pattern(8192)
    misaligned = bytearray(8193)
    misaligned[1:] = data
    device.write(0, memoryview(misaligned)[1:])
    assert device.read(0, 8192) == data
    device.write(8192, np.frombuffer(data, np.uint32))
    assert device.read(8192, 8192) == data


def test_empty_transfers_do_nothing(device: BlockDevice) -> None:
    device.write(0, b"")
    assert device.read(0, 0) == b""


def test_refuses_ranges_that_are_not_whole_blocks_inside(device: BlockDevice) -> None:
    for offset, length in (
        (1, 4096), (0, 4095), (SIZE_BYTES, 4096), (SIZE_BYTES - 4096, 8192), (-4096, 4096),
        (0, -512), (1 << 62, 4096), (0, 1 << 62), (1 << 64, 4096),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=r"\d bytes"):
            device.read(offset, length)
        if 0 <= length <= SIZE_BYTES:
            with pytest.raises(UsageError, match=r"\d bytes"):
                device.write(offset, bytes(length))


def test_a_read_only_device_refuses_writes(opener: Opener) -> None:
    with opener(False) as device, device.queue_pair(2) as queue:
        assert not device.writable
        with pytest.raises(DeviceError) as caught:
            device.write(0, bytes(4096))
        assert caught.value.errno == errno.EROFS
        assert device.uri in str(caught.value)
        with pytest.raises(DeviceError):
            queue.submit(Kind.WRITE, aligned_buffer(4096, 4096), 0, 1)
        with pytest.raises(UsageError, match="read-only"):
            device.lock_exclusive("a test")


def test_a_queue_pair_completes_every_tag_once(device: BlockDevice) -> None:
    block, count = 4096, 64
    data = pattern(block * count)
    device.write(0, data)
    buffers = {tag: aligned_buffer(block, block) for tag in range(count)}
    order = list(buffers)
    random.Random(7).shuffle(order)
    done: list[int] = []
    with device.queue_pair(8) as queue:
        assert queue.depth == 8
        for tag in order:
            while not queue.submit(Kind.READ, buffers[tag], tag * block, tag):
                done += taken(queue.poll(-1), block)
        while queue.in_flight:
            done += taken(queue.poll(1000), block)
        assert queue.poll(-1) == []
    assert sorted(done) == list(range(count))
    assert b"".join(bytes(buffers[tag]) for tag in range(count)) == data


def taken(completions: list[tuple[int, int]], length: int) -> list[int]:
    assert all(result == length for _, result in completions)
    return [tag for tag, _ in completions]


def test_a_full_queue_pair_refuses_an_operation(device: BlockDevice) -> None:
    buffer = aligned_buffer(4096, 4096)
    with device.queue_pair(2) as queue:
        assert queue.submit(Kind.READ, buffer, 0, 1)
        assert queue.submit(Kind.READ, aligned_buffer(4096, 4096), 0, 1)
        assert not queue.submit(Kind.READ, buffer, 0, 3)
        assert queue.in_flight == 2
        while queue.in_flight:
            assert {tag for tag, _ in queue.poll(-1)} == {1}


def test_writes_go_through_queue_pairs(device: BlockDevice) -> None:
    data = pattern(256 * KIB)
    buffer = aligned_buffer(len(data), 4096)
    buffer[:] = np.frombuffer(data, np.uint8)
    with device.queue_pair(4) as queue:
        for tag in range(4):
            part = buffer[tag * 64 * KIB : (tag + 1) * 64 * KIB]
            assert queue.submit(Kind.WRITE, part, tag * 64 * KIB, tag)
        while queue.in_flight:
            taken(queue.poll(-1), 64 * KIB)
    device.flush()
    assert device.read(0, len(data)) == data


def test_a_queue_pair_refuses_what_is_misaligned(device: BlockDevice) -> None:
    buffer = aligned_buffer(8192, 4096)
    with device.queue_pair(1) as queue:
        for bad, offset in (
            (buffer[1:4097], 0),
            (buffer[:100], 0),
            (buffer[:0], 0),
            (buffer[:4096], 100),
            (buffer[:4096], SIZE_BYTES),
            (buffer[:4096], -4096),
        ):
            with pytest.raises(UsageError, match="at byte"):
                queue.submit(Kind.READ, bad, offset, 0)
        with pytest.raises(UsageError, match="writable"):
            queue.submit(Kind.READ, bytes(4096), 0, 0)
        assert queue.in_flight == 0


def test_depth_is_limited(device: BlockDevice) -> None:
    for depth in (0, -1, 4097):
        with pytest.raises(UsageError, match="depth"):
            device.queue_pair(depth)


def test_closing_a_queue_pair_waits_for_what_is_in_flight(device: BlockDevice) -> None:
    data = pattern(MIB)
    device.write(0, data)
    buffer = aligned_buffer(MIB, 4096)
    with device.queue_pair(16) as queue:
        for tag in range(16):
            part = buffer[tag * 64 * KIB : (tag + 1) * 64 * KIB]
            assert queue.submit(Kind.READ, part, tag * 64 * KIB, tag)
    assert buffer.tobytes() == data
    queue.close()
    with pytest.raises(ClosedError):
        queue.poll()


def test_a_queue_pair_may_move_between_threads(device: BlockDevice) -> None:
    data = pattern(4096)
    device.write(0, data)
    buffer = aligned_buffer(4096, 4096)
    with device.queue_pair(4) as queue:
        for tag in range(4):
            mover = threading.Thread(target=queue.submit, args=(Kind.READ, buffer, 0, tag))
            mover.start()
            mover.join()
            assert queue.poll(-1) == [(tag, 4096)]
    assert buffer.tobytes() == data


def test_many_threads_read_and_write_at_once(device: BlockDevice) -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for round_number in range(8):
                data = pattern(16 * KIB, number * 100 + round_number)
                device.write(number * 16 * KIB, data)
                assert device.read(number * 16 * KIB, 16 * KIB) == data
        except (AssertionError, DeviceError) as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_device_that_nothing_refers_to_is_freed_at_once(opener: Opener) -> None:
    gc.disable()
    try:
        device = opener(True)
        device.write(0, bytes(4096))
        assert device.read(0, 4096) == bytes(4096)
        freed = weakref.ref(device)
        del device
        assert freed() is None
    finally:
        gc.enable()


def test_a_closed_device_raises_closed_error(opener: Opener) -> None:
    device = opener(True)
    device.close()
    device.close()
    for use in (
        lambda: device.read(0, 4096),
        lambda: device.write(0, bytes(4096)),
        device.flush,
        lambda: device.queue_pair(1),
        lambda: device.native,
    ):
        with pytest.raises(ClosedError, match="closed"):
            use()


def test_identity_is_that_of_the_device(opener: Opener) -> None:
    with opener(False) as one, opener(True) as other:
        assert one.identity == other.identity


def test_one_writer_at_a_time(opener: Opener) -> None:
    with opener(True) as first, opener(True) as second:
        first.lock_exclusive("the first writer")
        with pytest.raises(LockedError) as caught:
            second.lock_exclusive("the second writer")
        message = str(caught.value)
        assert "the first writer" in message
        assert f"pid {os.getpid()}" in message
        assert second.uri in message
        with pytest.raises(UsageError, match="already"):
            first.lock_exclusive("again")
        first.unlock()
        first.unlock()
        second.lock_exclusive("the second writer")
        second.close()
        first.lock_exclusive("the first writer again")


def test_locking_leaves_everything_but_the_record_alone(opener: Opener) -> None:
    with opener(True) as device:
        device.write(0, pattern(SIZE_BYTES))
        if not is_leased(device):
            device.lock_exclusive("a writer", record=False)
            assert device.read(0, SIZE_BYTES) == pattern(SIZE_BYTES)
            device.unlock()
            assert device.read(0, SIZE_BYTES) == pattern(SIZE_BYTES)
        device.lock_exclusive("a writer")
        device.unlock()
        expected = bytearray(pattern(SIZE_BYTES))
        expected[RECORD_OFFSET_BYTES : RECORD_OFFSET_BYTES + 4096] = bytes(4096)
        assert device.read(0, SIZE_BYTES) == bytes(expected)


def is_leased(device: BlockDevice) -> bool:
    """Return True if the record itself is the lock, so that there always is one."""
    return isinstance(device, NativeBackedDevice) and device.locks_by_record


def test_a_stale_or_malformed_record_excludes_no_writer(opener: Opener) -> None:
    with opener(True) as device, opener(True) as other:
        for junk in (b"DLFS-LOCK 1\n{\n", b"\xff" * 4096, b"DLFS-LOCK 1\n" + b"[" * 4000 + b"\n"):
            device.write(RECORD_OFFSET_BYTES, junk.ljust(4096, b"\0"))
            device.lock_exclusive("a writer", record=False)
            with pytest.raises(LockedError, match="a writer" if is_leased(device) else "no record"):
                other.lock_exclusive("another")
            device.unlock()


# Python 3.12 warns of any fork of a process with threads; here such a fork is under test.
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_reads_and_harms_nobody(opener: Opener) -> None:
    data = pattern(4096)
    with opener(True) as device, opener(True) as other:
        device.write(0, data)
        device.lock_exclusive("the parent")
        queue = device.queue_pair(4)
        buffer = aligned_buffer(4096, 4096)
        assert run_forked(use_in_child, device, queue, data) == 0
        assert queue.submit(Kind.READ, buffer, 0, 5)
        assert queue.poll(-1) == [(5, 4096)]
        assert buffer.tobytes() == data
        with pytest.raises(LockedError):
            other.lock_exclusive("another")
        queue.close()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_closes_what_a_thread_of_its_parent_uses(opener: Opener) -> None:
    """The thread, and what it would give back, exist in the parent only."""
    with opener(True) as device:
        if not isinstance(device, NativeBackedDevice):
            pytest.skip("a device in Python has no queue pairs of its own")
        used, done = threading.Event(), threading.Event()

        def use() -> None:
            with device.pooled_queue():
                used.set()
                done.wait()

        thread = threading.Thread(target=use)
        thread.start()
        try:
            assert used.wait(100)
            assert run_forked(device.close) == 0
        finally:
            done.set()
            thread.join()
        device.write(0, pattern(4096))


def use_in_child(device: BlockDevice, queue: QueuePair, data: bytes) -> None:
    """Use the device of a parent process."""
    with pytest.raises(ClosedError):
        queue.poll()
    queue.close()
    if isinstance(device, SpdkDevice):
        with pytest.raises(ClosedError, match="does not survive fork"):
            device.read(0, 4096)
    else:
        assert device.read(0, 4096) == data
    device.unlock()
    device.close()


@pytest.mark.parametrize(
    "opener", [kind for kind in KINDS if kind.values[0] in FILE_KINDS], indirect=True
)
def test_a_lock_ends_with_its_process(opener: Opener) -> None:
    with opener(True) as device:
        script = (
            "import os, signal, sys; from dlfs.block import open_device;"
            "d = open_device(sys.argv[1], writable=True); d.lock_exclusive('a dying writer');"
            "print('locked', flush=True); sys.stdin.read()"
        )
        with running(script, device.uri) as writer:
            assert hear(writer) == "locked"
            with pytest.raises(LockedError, match=rf"a dying writer.*pid {writer.pid}"):
                device.lock_exclusive("the next")
            writer.kill()
            writer.wait()
        device.lock_exclusive("the next")


def test_an_error_names_device_action_offset_and_length(device: BlockDevice) -> None:
    error = operation_error(device.uri, Kind.READ, 8192, 4096, -errno.EIO)
    assert isinstance(error, DeviceError)
    assert error.errno == errno.EIO
    assert str(error).startswith(f"read {device.uri} at byte 8192, 4096 bytes")


def test_opens_again_by_its_uri(opener: Opener) -> None:
    with opener(True) as device:
        device.write(0, pattern(4096))
        with open_device(device.uri) as again:
            assert again.identity == device.identity
            assert again.read(0, 4096) == pattern(4096)
