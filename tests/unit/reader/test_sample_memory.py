"""The mapping of a reader's sample memory, as users of the memory such as drivers see it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import dlfs
from dlfs.base.units import KIB, MIB
from tests.support.forked import run_forked

COUNT = 40


class User:
    """A user of the memory, which reads it when it is closed: it must still be mapped."""

    def __init__(self, data: np.ndarray) -> None:
        self.data, self.closes, self.read = data, 0, b""

    def close(self) -> None:
        self.closes += 1
        self.read = self.data[:16].tobytes()


@pytest.fixture
def dataset(tmp_path: Path) -> Iterator[dlfs.Dataset]:
    path = str(tmp_path / "volume.img")
    dlfs.format_volume(path, size_bytes=32 * MIB)
    with dlfs.open(path, memory_bytes=2 * MIB) as volume:
        with volume.writer("samples") as writer:
            for number in range(COUNT):
                writer.add(b"%04d" % number, bytes([number]) * (100 * KIB))
        with volume["samples"] as opened:
            yield opened


def address(batch: dlfs.Batch) -> int:
    return batch.data.ctypes.data


def test_batches_lie_in_the_memory_of_the_reader(dataset: dlfs.Dataset) -> None:
    with dataset.read([3, 1]) as one, dataset.read([2]) as other:
        memory = one.sample_memory
        assert memory is not None
        assert memory is other.sample_memory
        assert memory.writable
        assert memory.size_bytes >= 2 * MIB
        assert memory.contains(address(one))
        assert not memory.contains(memory.address + memory.size_bytes)
        assert not memory.contains(memory.address - 1)


def test_batches_of_an_epoch_lie_in_it_too(dataset: dlfs.Dataset) -> None:
    for batch in dataset.batches(4):
        with batch:
            assert batch.sample_memory is not None


def test_a_batch_for_which_it_has_no_room_has_memory_of_its_own(dataset: dlfs.Dataset) -> None:
    with dataset.read(range(COUNT)) as batch:
        assert batch.sample_memory is None


def test_users_are_closed_before_it_is_unmapped(dataset: dlfs.Dataset) -> None:
    with dataset.read([7]) as batch:
        memory = batch.sample_memory
        assert memory is not None
        user = User(batch.data)
    memory.add_user(user)
    dataset.close()
    assert user.closes == 1
    assert len(user.read) == 16
    assert memory.closed
    late = User(np.zeros(16, np.uint8))
    memory.add_user(late)
    assert late.closes == 1


def test_a_batch_of_a_closed_reader_has_none(dataset: dlfs.Dataset) -> None:
    batch = dataset.read([7])
    dataset.close()
    assert batch.sample_memory is None
    assert bytes(batch[0][:2]) == b"\x07\x07"


def test_a_forked_child_finds_none(dataset: dlfs.Dataset) -> None:
    batch = dataset.read([7])
    assert batch.sample_memory is not None

    def look() -> None:
        assert batch.sample_memory is None

    assert run_forked(look) == 0
