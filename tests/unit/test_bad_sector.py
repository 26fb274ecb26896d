"""An unreadable sector costs the samples that have it, and no other, however they are read."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import dlfs
from dlfs.base.units import KIB, MIB
from dlfs.block import BlockDevice, open_device
from dlfs.connection.connection import LocalConnection, OpenOptions
from dlfs.volume.volume import Volume
from tests.support.devices import Faults, FaultyDevice

BLOCK = 512
COUNT = 300
SAMPLES = [random.Random(number).randbytes(16 + number * 37 % 3000) for number in range(COUNT)]
BAD = 123  # the sample in whose middle the sector lies


class Lab:
    """A volume in a file, one sector of which cannot be read."""

    def __init__(self, path: Path) -> None:
        self.uri = str(path)
        dlfs.format_volume(self.uri, size_bytes=8 * MIB, chunk_bytes=64 * KIB, block_bytes=BLOCK)
        with dlfs.open(self.uri) as volume, volume.writer("data") as writer:
            for number, data in enumerate(SAMPLES):
                writer.add(f"{number:03}", data)
        content = path.read_bytes()
        places = [content.index(data) for data in SAMPLES]
        sector = (places[BAD] + len(SAMPLES[BAD]) // 2) // BLOCK
        self.faults = Faults(bad_first_bytes=sector * BLOCK, bad_length_bytes=BLOCK)
        self.lost = {
            number
            for number, (place, data) in enumerate(zip(places, SAMPLES, strict=True))
            if place // BLOCK <= sector <= (place + len(data) - 1) // BLOCK
        }

    def open_device(self, uri: str, *, writable: bool) -> BlockDevice:
        return FaultyDevice(open_device(uri, writable=writable), self.faults)

    @contextmanager
    def open(self, memory_bytes: int = 64 * MIB) -> Iterator[Volume]:
        options = OpenOptions(opener=self.open_device, memory_bytes=memory_bytes)
        with Volume(LocalConnection((self.uri,), options)) as volume:
            yield volume


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    made = Lab(tmp_path / "volume.img")
    assert BAD in made.lost
    assert len(made.lost) < 10
    return made


def test_verify_names_them(lab: Lab) -> None:
    with lab.open() as volume:
        found = [finding.index for finding in volume.verify() if finding.kind == "sample"]
    assert sorted(index for index in found if index is not None) == sorted(lab.lost)


@pytest.mark.parametrize("memory_bytes", [256 * KIB, 64 * MIB])
def test_a_read_of_all_skips_them(lab: Lab, memory_bytes: int) -> None:
    with lab.open(memory_bytes) as volume, volume["data"] as dataset:
        batch = dataset.read(range(COUNT), on_error="skip")
        assert {int(index) for index in batch.indices} == set(range(COUNT)) - lab.lost
        for index, sample in zip(batch.indices, batch, strict=True):
            assert bytes(sample) == SAMPLES[index]


@pytest.mark.parametrize("memory_bytes", [256 * KIB, 64 * MIB])
@pytest.mark.parametrize("shuffle", [None, "global", "chunk"])
def test_an_epoch_skips_them(lab: Lab, memory_bytes: int, shuffle: dlfs.Shuffle | None) -> None:
    seen = []
    with lab.open(memory_bytes) as volume, volume["data"] as dataset:
        for batch in dataset.batches(16, shuffle=shuffle, on_error="skip"):
            for index, sample in zip(batch.indices, batch, strict=True):
                assert bytes(sample) == SAMPLES[index]
                seen.append(int(index))
    assert sorted(seen) == sorted(set(range(COUNT)) - lab.lost)
