"""Ranges of samples: into a buffer of the caller and in pieces, verified, from the right copy."""

from __future__ import annotations

import mmap
import tracemalloc
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from dlfs._native.parts import SamplePart
from dlfs.base.units import KIB, MIB
from dlfs.errors import ChecksumError, DeviceError, UsageError
from dlfs.reader import parts, read_into, read_pieces
from tests.support.devices import Faults, FaultyNativeDevice
from tests.unit.reader.conftest import CHUNK_BYTES, Bench

LARGE = np.random.default_rng(5).bytes(5 * CHUNK_BYTES + 4321)
SAMPLES = {b"empty": b"", b"large": LARGE, b"small": b"a few bytes"}
EMPTY_INDEX, LARGE_INDEX, SMALL_INDEX = range(3)
PIECE = 3000  # of no multiple of a block


@pytest.fixture(autouse=True)
def _limits(monkeypatch: pytest.MonkeyPatch) -> None:
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
        ):
            with pytest.raises(UsageError, match="read a part of sample"):
                reader.native.read_part(part, room)


def test_a_flipped_bit_fails_the_reads_that_touch_its_part_and_no_others(
    bench: Callable[..., Bench],
) -> None:
    made = bench(SAMPLES)
    bad = range(3 * CHUNK_BYTES, 4 * CHUNK_BYTES)
    made.corrupt(LARGE_INDEX, bit=8 * (bad.start + 5))
    address = int(made.laid.directory.addresses([LARGE_INDEX])[0])
    _, offset = made.member_offset(address + bad.start)
    with made.reader() as reader:
        named = (
            f"sample 1 'large' of dataset 'test': .* at byte {offset}, bytes {bad.start} to "
            f"{bad.stop - 1} of {len(LARGE)} bytes: expected CRC32C"
        )
        for ask in (
            lambda: reader.get(LARGE_INDEX),
            lambda: reader.read([SMALL_INDEX, LARGE_INDEX]),
            lambda: read_into(reader, LARGE_INDEX, bytearray(len(LARGE)), 0),
            lambda: read_into(reader, LARGE_INDEX, bytearray(1), bad.start),
            lambda: read_into(reader, LARGE_INDEX, bytearray(1), bad.stop - 1),
        ):
            with pytest.raises(ChecksumError, match=named):
                ask()
        for sound in (range(bad.start), range(bad.stop, len(LARGE))):
            room = bytearray(len(sound))
            read_into(reader, LARGE_INDEX, room, sound.start)
            assert room == LARGE[sound.start : sound.stop]
        given: deque[bytes] = deque()
        with pytest.raises(ChecksumError, match=named):
            given.extend(map(bytes, read_pieces(lambda: reader, LARGE_INDEX)))
        assert b"".join(given) == LARGE[: bad.start // PIECE * PIECE]


def test_chunks_of_a_range_stay_in_memory(bench: Callable[..., Bench]) -> None:
    with bench(SAMPLES).reader() as reader:
        room = bytearray(len(LARGE))
        read_into(reader, LARGE_INDEX, room, 0)
        before = reader.stats()["read_bytes"]
        for start in range(0, len(LARGE), 1000):
            piece = bytearray(min(1000, len(LARGE) - start))
            read_into(reader, LARGE_INDEX, piece, start)
            assert piece == LARGE[start : start + 1000]
        assert reader.stats()["read_bytes"] == before


def test_ranges_of_a_sample_that_is_larger_than_memory(bench: Callable[..., Bench]) -> None:
    """Each chunk is read once where the ranges follow one another."""
    data = np.random.default_rng(1).bytes(40 * CHUNK_BYTES + 77)
    with bench({b"large": data}).reader(memory_bytes=4 * CHUNK_BYTES) as reader:
        for start in range(0, len(data), PIECE):
            piece = bytearray(min(PIECE, len(data) - start))
            read_into(reader, 0, piece, start)
            assert piece == data[start : start + PIECE]
        assert reader.stats()["read_bytes"] <= 1.1 * len(data)


def test_many_threads_read_each_chunk_once(bench: Callable[..., Bench]) -> None:
    with bench(SAMPLES).reader() as reader:

        def read(start: int) -> bytes:
            room = bytearray(min(3000, len(LARGE) - start))
            read_into(reader, LARGE_INDEX, room, start)
            return bytes(room)

        starts = range(0, len(LARGE), 3000)
        with ThreadPoolExecutor(8) as pool:
            assert b"".join(pool.map(read, starts)) == LARGE
        assert reader.stats()["read_bytes"] <= len(LARGE) + CHUNK_BYTES


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
            assert str(caught.value).count("Input/output error") == 1
        assert reader.get(SMALL_INDEX) == SAMPLES[b"small"]


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
