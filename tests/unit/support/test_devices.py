"""The devices that record, stop and fail."""

from __future__ import annotations

import errno
import random
import signal
from collections.abc import Iterator

import numpy as np
import pytest

from dlfs.base.units import KIB
from dlfs.block import Kind, MemoryDevice, aligned_buffer
from dlfs.errors import DeviceError, DeviceLostError, LimitError, TruncatedError, UsageError
from tests.support.devices import (
    Faults,
    FaultyDevice,
    FlushEvent,
    RecordingDevice,
    StoppingDevice,
    StopPoint,
    WriteEvent,
    WriteLog,
)
from tests.support.faults import fault_library
from tests.support.forked import run_forked

SIZE = 16 * KIB


@pytest.fixture
def memory(request: pytest.FixtureRequest) -> Iterator[MemoryDevice]:
    with MemoryDevice(request.node.name, SIZE, writable=True) as device:
        yield device
    MemoryDevice.forget(request.node.name)


def test_recording_rebuilds_every_prefix(memory: MemoryDevice) -> None:
    memory.write(0, b"0" * SIZE)
    device = RecordingDevice(memory)
    device.write(0, b"a" * 1024)
    device.flush()
    device.write(512, b"b" * 1024)
    with device.queue_pair(1) as queue:
        buffer = aligned_buffer(512, 512)
        buffer[:] = ord("c")
        assert queue.submit(Kind.WRITE, buffer, 8192, 1)
        assert not queue.submit(Kind.WRITE, buffer, 4096, 2)
        assert queue.poll(-1) == [(1, 512)]
        assert queue.submit(Kind.READ, buffer, 0, 3)
    log = device.log
    assert [type(event) for event in log.events] == [WriteEvent, FlushEvent, WriteEvent, WriteEvent]
    assert log.images(0) == [b"0" * SIZE]
    assert log.images(1) == log.images(2) == [b"a" * 1024 + b"0" * (SIZE - 1024)]
    assert log.images(4) == [memory.read(0, SIZE)]


def test_recorded_writes_tear_at_sectors(memory: MemoryDevice) -> None:
    device = RecordingDevice(memory)
    device.write(0, b"a" * 2048)
    seen = {log_image(device.log.torn_images(0, random.Random(seed))[0]) for seed in range(200)}
    assert len(seen) == 16
    assert device.log.torn_images(1, random.Random(0)) == device.log.images(1)


def log_image(image: bytes) -> bytes:
    sectors = [image[i : i + 512] for i in range(0, 2048, 512)]
    assert all(sector in (bytes(512), b"a" * 512) for sector in sectors)
    assert image[2048:] == bytes(SIZE - 2048)
    return image


def test_recorded_writes_reorder_only_between_flushes(memory: MemoryDevice) -> None:
    device = RecordingDevice(memory)
    device.write(0, b"a" * 512)
    device.flush()
    device.write(512, b"b" * 512)
    device.write(1024, b"c" * 512)
    seen = set()
    for seed in range(200):
        (image,) = device.log.reordered_images(4, random.Random(seed))
        assert image[:512] == b"a" * 512
        seen.add((image[512:513], image[1024:1025]))
    assert seen == {(b, c) for b in (b"\0", b"b") for c in (b"\0", b"c")}


def test_one_log_orders_several_devices(memory: MemoryDevice) -> None:
    with MemoryDevice("second", SIZE, writable=True) as second:
        log = WriteLog()
        one, two = RecordingDevice(memory, log), RecordingDevice(second, log)
        one.write(0, b"1" * 512)
        two.write(0, b"2" * 512)
        one.flush()
        assert [event.device for event in log.events] == [0, 1, 0]
        assert [image[:1] for image in log.images(1)] == [b"1", b"\0"]
        found = {log.reordered_images(3, random.Random(s))[1][:1] for s in range(50)}
        assert found == {b"\0", b"2"}
        assert all(log.reordered_images(3, random.Random(s))[0][:1] == b"1" for s in range(50))
    MemoryDevice.forget("second")


def test_what_is_too_large_is_not_recorded() -> None:
    with MemoryDevice("huge", 1 << 30) as huge, pytest.raises(LimitError, match="record mem:huge"):
        RecordingDevice(huge)
    MemoryDevice.forget("huge")


def test_stops_after_so_many_writes(memory: MemoryDevice) -> None:
    point = StopPoint(2, torn_blocks=1)
    device = StoppingDevice(memory, point)
    device.flush()
    device.write(0, b"a" * 1024)
    device.flush()
    device.write(1024, b"b" * 1024)
    for _ in range(2):
        with pytest.raises(DeviceError, match="after 2 writes"):
            device.write(2048, b"c" * 1024)
    for use in (device.flush, lambda: device.read(0, 512)):
        with pytest.raises(DeviceError, match="after 2 writes"):
            use()
    with device.queue_pair(1) as queue, pytest.raises(DeviceError, match="after 2 writes"):
        queue.submit(Kind.READ, aligned_buffer(512, 512), 0, 0)
    assert memory.read(0, 4096) == b"a" * 1024 + b"b" * 1024 + b"c" * 512 + bytes(1536)


def test_stops_before_the_flush_that_follows(memory: MemoryDevice) -> None:
    device = StoppingDevice(memory, StopPoint(1))
    device.write(0, b"a" * 512)
    with pytest.raises(DeviceError):
        device.flush()


def test_kills_its_own_process(memory: MemoryDevice) -> None:
    def work() -> None:
        device = StoppingDevice(memory, StopPoint(1, action="kill"))
        device.write(0, b"a" * 512)
        device.write(512, b"b" * 512)

    assert run_forked(work) == -signal.SIGKILL


def test_faults_are_native_and_named(memory: MemoryDevice) -> None:
    with FaultyDevice(memory, Faults(error_per_million=10**6)) as device:
        assert device.native.kind == "fault"
        with pytest.raises(DeviceError, match=r"^read mem:.* at byte 512, 512 bytes"):
            device.read(512, 512)
        with pytest.raises(DeviceError, match="write"):
            device.write(512, bytes(512))


def test_faults_of_each_kind(memory: MemoryDevice) -> None:
    name = memory.name
    other = MemoryDevice(name)
    with (
        FaultyDevice(other, Faults(short_per_million=10**6)) as device,
        pytest.raises(TruncatedError),
    ):
        device.read(0, 1024)
    other = MemoryDevice(name)
    with FaultyDevice(other, Faults(flip_per_million=10**6)) as device:
        assert int(np.unpackbits(np.frombuffer(device.read(0, 512), np.uint8)).sum()) == 1
    other = MemoryDevice(name)
    with FaultyDevice(other, Faults(bad_first_bytes=1024, bad_length_bytes=1)) as device:
        assert device.read(0, 1024) == bytes(1024)
        with pytest.raises(DeviceError):
            device.read(1024, 512)


def test_impossible_chances_are_refused(memory: MemoryDevice) -> None:
    with pytest.raises(UsageError):
        FaultyDevice(memory, Faults(error_per_million=10**6 + 1))


def test_a_lost_device_says_so_until_it_is_back(memory: MemoryDevice) -> None:
    with FaultyDevice(memory, Faults(lost_from=2)) as device:
        device.read(0, 4096)
        with pytest.raises(DeviceLostError, match="at byte 4096"):
            device.read(4096, 4096)
        with pytest.raises(DeviceLostError, match="flush"):
            device.flush()
        with pytest.raises(DeviceLostError, match="queue pair"):
            device.queue_pair(1)
        device.lose(False)
        device.read(4096, 4096)
        device.lose()
        with pytest.raises(DeviceLostError):
            device.read(0, 4096)


def test_only_a_faulty_device_can_be_lost(memory: MemoryDevice) -> None:
    assert fault_library().dlfs_device_fault_lose(memory.native.handle, 1) == -errno.EINVAL
