"""Large samples: into a caller's buffer and in pieces, verified, from whatever copy is right."""

from __future__ import annotations

import mmap
import sys
import tracemalloc
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest

from dlfs._native.batch import NativeFailure
from dlfs._native.parts import SamplePart
from dlfs.errors import ChecksumError, DeviceError, UsageError
from dlfs.reader import LargeSample, parts, read_into, read_pieces
from dlfs.units import KIB, MIB
from tests.support.devices import Faults, FaultyNativeDevice
from tests.unit.reader.conftest import CHUNK_BYTES, Bench

LARGE = np.random.default_rng(5).bytes(5 * CHUNK_BYTES + 4321)
SAMPLES = {b"empty": b"", b"large": LARGE, b"small": b"a few bytes"}
EMPTY_INDEX, LARGE_INDEX, SMALL_INDEX = range(3)
PIECE = 3000  # of no multiple of a block

TraceFunction = Callable[[FrameType, str, Any], Any]


@pytest.fixture(autouse=True)
def _limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a sample of a few chunks count as large."""
    monkeypatch.setattr(parts, "WHOLE_BYTES_MAX", 2 * CHUNK_BYTES)
    monkeypatch.setattr(parts, "PIECE_BYTES", PIECE)


LAYOUTS: list[dict[str, Any]] = [
    {"members": 1},
    {"members": 3},
    {"members": 3, "replicas": 2},
    {"members": 2, "device_block_bytes": 4096, "fragment_chunks": 2},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
@pytest.mark.parametrize("index", [EMPTY_INDEX, LARGE_INDEX, SMALL_INDEX])
def test_all_ways_give_the_sample(
    bench: Callable[..., Bench], layout: dict[str, Any], index: int
) -> None:
    with bench(SAMPLES, **layout).reader() as reader:
        expected = [*SAMPLES.values()][index]
        assert reader.get(index) == expected
        room = bytearray(b"x" * (len(expected) + 7))
        assert read_into(reader, index, room, 0) == len(expected)
        assert bytes(room) == expected + b"x" * 7
        pieces = [bytes(piece) for piece in read_pieces(lambda: reader, index)]
        assert b"".join(pieces) == expected
        assert all(0 < len(piece) <= PIECE for piece in pieces)


@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_any_part_of_a_sample(bench: Callable[..., Bench], layout: dict[str, Any]) -> None:
    random = np.random.default_rng(7)
    with bench(SAMPLES, **layout).reader() as reader:
        for _ in range(50):
            start, length = random.integers(0, len(LARGE) + 100, 2).tolist()
            room = bytearray(length)
            expected = LARGE[start : start + length]
            assert read_into(reader, LARGE_INDEX, room, start) == len(expected)
            assert room == expected + bytes(length - len(expected))


def test_a_buffer_is_any_object_with_writable_memory(bench: Callable[..., Bench]) -> None:
    with bench(SAMPLES).reader() as reader:
        array = np.zeros((2, 1024), np.uint16)
        assert read_into(reader, LARGE_INDEX, array, 0) == array.nbytes
        assert array.tobytes() == LARGE[: array.nbytes]
        with mmap.mmap(-1, 8192) as memory:
            assert read_into(reader, LARGE_INDEX, memory, 0) == 8192
            assert memory[:] == LARGE[:8192]
        assert read_into(reader, LARGE_INDEX, bytearray(), 0) == 0
        for bad in (b"read-only", np.zeros((4, 4))[:, ::2], 5):
            with pytest.raises(UsageError, match="expected"):
                read_into(reader, LARGE_INDEX, bad, 0)  # type: ignore[arg-type]


def test_native_parts_stay_within_the_sample(bench: Callable[..., Bench]) -> None:
    with bench(SAMPLES, members=2).reader() as reader:
        room = memoryview(bytearray(100))
        for part in (
            SamplePart(3, 0),
            SamplePart(LARGE_INDEX, len(LARGE) - 99),
            SamplePart(LARGE_INDEX, (1 << 64) - 50),
            SamplePart(SMALL_INDEX, 0),
            SamplePart(LARGE_INDEX, 0, avoided_member=2),
        ):
            with pytest.raises(UsageError, match="read a part of sample"):
                reader.native.read_part(part, room)


def test_a_damaged_sample_is_never_given_whole(bench: Callable[..., Bench]) -> None:
    made = bench(SAMPLES)
    made.corrupt(LARGE_INDEX, bit=8 * (len(LARGE) - 1))
    with made.reader() as reader:
        named = r"sample 1 'large' of dataset 'test'.*expected CRC32C"
        with pytest.raises(ChecksumError, match=named):
            reader.get(LARGE_INDEX)
        with pytest.raises(ChecksumError, match=named):
            read_into(reader, LARGE_INDEX, bytearray(len(LARGE)), 0)
        given: deque[bytes] = deque()
        pieces = map(bytes, read_pieces(lambda: reader, LARGE_INDEX))
        with pytest.raises(ChecksumError, match=named) as caught:
            given.extend(pieces)
        assert b"".join(given) == LARGE[: len(LARGE) // PIECE * PIECE]
        assert "were given out before that was known" in caught.value.__notes__[0]


@pytest.mark.parametrize("bit", [0, 8 * 3 * CHUNK_BYTES, 8 * (len(LARGE) - 1)])
def test_the_right_copy_is_found(bench: Callable[..., Bench], bit: int) -> None:
    made = bench(SAMPLES, members=3, replicas=2)
    made.corrupt(LARGE_INDEX, bit=bit)
    with made.reader() as reader:
        assert reader.get(LARGE_INDEX) == LARGE
        room = bytearray(len(LARGE))
        read_into(reader, LARGE_INDEX, room, 0)
        assert room == LARGE
        assert b"".join(map(bytes, read_pieces(lambda: reader, LARGE_INDEX))) == LARGE


@pytest.mark.parametrize("replicas", [1, 2])
def test_parts_of_a_verified_sample_are_right(bench: Callable[..., Bench], replicas: int) -> None:
    made = bench(SAMPLES, members=2, replicas=replicas)
    with made.reader() as reader:
        LargeSample(reader, LARGE_INDEX).verify()
    made.corrupt(LARGE_INDEX, bit=8 * 2 * CHUNK_BYTES)
    with made.reader() as reader:
        sample = LargeSample(reader, LARGE_INDEX)
        if replicas == 1:
            with pytest.raises(ChecksumError, match="sample 1 'large'"):
                sample.verify()
            return
        sample.verify()
        for start in range(0, len(LARGE), 7001):
            room = memoryview(bytearray(min(7001, len(LARGE) - start)))
            sample.read_part(room, start)
            assert room == LARGE[start : start + 7001]


def test_an_unreadable_sector_is_reported_with_its_sample(bench: Callable[..., Bench]) -> None:
    made = bench(SAMPLES, members=2)
    address = int(made.laid.directory.addresses([LARGE_INDEX])[0]) + 3 * CHUNK_BYTES
    member, offset = made.member_offset(address)
    natives: list[Any] = [device.native for device in made.devices]
    faults = Faults(bad_first_bytes=offset // 512 * 512, bad_length_bytes=512)
    natives[member] = FaultyNativeDevice(natives[member], faults, uri="mem:")
    with made.reader(natives) as reader:
        for ask in (
            lambda: reader.get(LARGE_INDEX),
            lambda: read_into(reader, LARGE_INDEX, bytearray(len(LARGE)), 0),
            lambda: [*read_pieces(lambda: reader, LARGE_INDEX)],
        ):
            with pytest.raises(DeviceError, match="sample 1 'large' of dataset 'test'") as caught:
                ask()
            assert made.devices[member].uri in str(caught.value)
        assert reader.get(SMALL_INDEX) == SAMPLES[b"small"]


def test_a_read_by_another_thread_hides_no_failure(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = bench(SAMPLES)
    address = int(made.laid.directory.addresses([LARGE_INDEX])[0]) + 3 * CHUNK_BYTES
    _, offset = made.member_offset(address)
    faults = Faults(bad_first_bytes=offset // 512 * 512, bad_length_bytes=512)
    native = FaultyNativeDevice(made.devices[0].native, faults, uri="mem:")
    with made.reader([native]) as reader:
        sample = LargeSample(reader, LARGE_INDEX)
        read_native = reader.native.read_part
        failed = False

        def read_part(part: SamplePart, buffer: memoryview) -> NativeFailure:
            nonlocal failed
            found = read_native(part, buffer)
            failed = found.code < 0
            return found

        def switch_threads(frame: FrameType, _event: str, _value: object) -> TraceFunction:
            """Read another part between the failure and the next line, as another thread may."""
            nonlocal failed
            if failed and frame.f_code is LargeSample._read.__code__:
                failed = False
                sample.read_part(memoryview(bytearray(100)), 0)
            return switch_threads

        monkeypatch.setattr(reader.native, "read_part", read_part)
        before = sys.gettrace()
        sys.settrace(switch_threads)
        try:
            with pytest.raises(DeviceError, match="sample 1 'large'"):
                sample.read_part(memoryview(bytearray(100)), 3 * CHUNK_BYTES)
        finally:
            sys.settrace(before)


def test_a_copy_is_read_where_one_has_an_unreadable_sector(bench: Callable[..., Bench]) -> None:
    made = bench(SAMPLES, members=2, replicas=2)
    natives: list[Any] = [device.native for device in made.devices]
    faults = Faults(bad_first_bytes=0, bad_length_bytes=32 * MIB)
    natives[0] = FaultyNativeDevice(natives[0], faults, uri="mem:")
    with made.reader(natives) as reader:
        assert reader.get(LARGE_INDEX) == LARGE
        assert b"".join(map(bytes, read_pieces(lambda: reader, LARGE_INDEX))) == LARGE


def test_a_large_sample_has_its_bytes_in_memory_once(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "PIECE_BYTES", 256 * KIB)
    data = bytes(8 * MIB)
    with bench({b"large": data}).reader() as reader:
        tracemalloc.start()
        try:
            assert len(reader.get(0)) == len(data)
            of_get = tracemalloc.get_traced_memory()[1]
            tracemalloc.reset_peak()
            assert sum(len(piece) for piece in read_pieces(lambda: reader, 0)) == len(data)
            of_pieces = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert of_get < 1.5 * len(data)
    assert of_pieces < 2 * MIB
