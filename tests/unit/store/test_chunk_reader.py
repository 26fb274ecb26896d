"""Reading ranges of a space: what one copy does not give is read from another."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import numpy as np
import pytest

from dlfs.base.units import KIB, MIB
from dlfs.block import BlockDevice, MemoryDevice, MissingDevice
from dlfs.errors import DeviceError, DeviceLostError, NotFoundError
from dlfs.format.geometry import ChunkRun, DataSpace, Geometry
from dlfs.store.chunk_reader import CopyOrder, copy_orders, read_blocks, scan_space
from tests.support.devices import Faults, FaultyDevice

GEOMETRY = Geometry.of_one_group(3, 16 * KIB, 512, MIB, 800, 2)
SPACE = DataSpace(GEOMETRY, (ChunkRun(5, 300), ChunkRun(700, 40)))
CONTENT = np.random.default_rng(1).integers(0, 256, SPACE.size_bytes, np.uint8)


@pytest.fixture
def members() -> Iterator[list[MemoryDevice]]:
    names = [f"reader-{uuid.uuid4().hex}" for _ in range(3)]
    devices = [MemoryDevice(name, 16 * MIB, writable=True) for name in names]
    for copy in range(2):
        at = 0
        for piece in SPACE.member_ranges(0, SPACE.size_bytes, copy):
            devices[piece.member].write(piece.offset_bytes, CONTENT[at : at + piece.length_bytes])
            at += piece.length_bytes
    yield devices
    for name, device in zip(names, devices, strict=True):
        device.close()
        MemoryDevice.forget(name)


FAULTS = [
    Faults(lost_from=1),
    Faults(lost_from=40),
    Faults(lost_from=40, lost_polls=True),
    Faults(error_per_million=10**6),
    Faults(seed=3, short_per_million=300_000, reorder=True),
]


@pytest.mark.parametrize("faults", FAULTS)
@pytest.mark.parametrize("number", range(3))
def test_one_failing_member(members: list[MemoryDevice], faults: Faults, number: int) -> None:
    devices: list[BlockDevice] = list(members)
    devices[number] = faulty = FaultyDevice(members[number], faults)
    try:
        assert np.array_equal(read_blocks(devices, SPACE, 0, SPACE.size_bytes), CONTENT)
        faulty.lose()  # before anything is asked of it
        assert np.array_equal(read_blocks(devices, SPACE, 512, 100_000), CONTENT[512:100_512])
    finally:
        faulty.native.close()


@pytest.mark.parametrize("number", range(3))
def test_a_missing_member(members: list[MemoryDevice], number: int) -> None:
    devices: list[BlockDevice] = list(members)
    devices[number] = MissingDevice("gone", NotFoundError("no such file"))
    found = [window.memory.copy() for window in scan_space(devices, SPACE)]
    assert np.array_equal(np.concatenate(found), CONTENT)
    for copy in range(2):
        failed = [
            failure
            for window in scan_space(devices, SPACE, CopyOrder(copy=copy, only=True))
            for failure in window.failures
        ]
        assert all(f.absent and isinstance(f.error, DeviceLostError) for f in failed)
        assert {SPACE.resolve(f.address, copy)[0] for f in failed} == {number}
        assert len(failed) == sum(
            SPACE.resolve(address, copy)[0] == number
            for address in range(0, SPACE.size_bytes, GEOMETRY.chunk_bytes)
        )


@pytest.mark.parametrize("lost_polls", [False, True])
def test_two_failing_members(members: list[MemoryDevice], lost_polls: bool) -> None:
    faults = Faults(lost_from=20, lost_polls=lost_polls)
    failing = [FaultyDevice(device, faults) for device in members[:2]]
    try:
        with pytest.raises(DeviceError):
            read_blocks([*failing, members[2]], SPACE, 0, SPACE.size_bytes)
    finally:
        for device in failing:
            device.native.close()


def test_choices_ask_for_copies_in_order() -> None:
    address = 3 * GEOMETRY.chunk_bytes  # of volume chunk 8: on members 2 and 0
    assert CopyOrder().order(SPACE, address) == [0, 1]
    assert CopyOrder(copy=1).order(SPACE, address) == [1, 0]
    assert CopyOrder(avoid=2).order(SPACE, address) == [1, 0]
    assert CopyOrder(avoid=0).order(SPACE, address) == [0, 1]
    assert CopyOrder(copy=1, only=True).order(SPACE, address) == [1]
    assert len(copy_orders(GEOMETRY)) == 5
    assert copy_orders(Geometry.of_one_group(3, 4096, 512, MIB, 10)) == [CopyOrder()]
