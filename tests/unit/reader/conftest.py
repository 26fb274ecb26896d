"""Small datasets on devices in memory, and readers of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dlfs.base.units import KIB, MIB
from dlfs.block.memory import MemoryDevice
from dlfs.epoch.options import EpochOptions
from dlfs.format.digests import Digests
from dlfs.reader import Epoch, ReaderOptions, SampleReader, Where, make_native_reader
from tests.support.datasets import LaidDataset, lay_dataset

CHUNK_BYTES = 16 * KIB


def batches_of(reader: SampleReader, batch_size: int, **options: Any) -> Epoch:
    """Return an epoch over all samples of a reader, as ``Dataset.batches`` does for a dataset."""
    return Epoch(
        lambda: reader,
        EpochOptions(batch_size=batch_size, **options),
        dataset="test",
        digests=Digests(),
        sample_count=len(reader.directory),
    )


class Bench:
    """A dataset on memory devices, and what is opened on it."""

    def __init__(self, laid: LaidDataset, devices: list[MemoryDevice]) -> None:
        self.laid = laid
        self.devices = devices
        self.where = Where("test", tuple(device.uri for device in devices))
        self._readers: list[SampleReader] = []

    def reader(self, natives: list[Any] | None = None, **options: Any) -> SampleReader:
        options.setdefault("memory_bytes", 1 * MIB)
        options.setdefault("depth", 16)
        native = make_native_reader(
            natives or [device.native for device in self.devices],
            self.laid.geometry,
            self.laid.runs,
            self.laid.directory,
            ReaderOptions(**options),
        )
        reader = SampleReader(native, self.laid.geometry, self.laid.directory, self.where)
        self._readers.append(reader)
        return reader

    def corrupt(self, index: int, bit: int = 0) -> None:
        """Flip one bit of a sample on its member."""
        address = int(self.laid.directory.addresses([index])[0]) + bit // 8
        member, offset = self.member_offset(address)
        device = self.devices[member]
        block = offset // 512 * 512
        data = bytearray(device.read(block, 512))
        data[offset - block] ^= 1 << bit % 8
        device.write(block, bytes(data))

    def member_offset(self, address: int) -> tuple[int, int]:
        chunk, offset = divmod(address, self.laid.geometry.chunk_bytes)
        for run in self.laid.runs:
            if chunk < run.chunk_count:
                member, start = self.laid.geometry.locate(run.first_chunk + chunk)
                return member, start + offset
            chunk -= run.chunk_count
        raise AssertionError("outside the data")

    def close(self) -> None:
        for reader in self._readers:
            reader.close()
        for device in self.devices:
            device.close()
            MemoryDevice.forget(device.name)


@pytest.fixture
def bench(request: pytest.FixtureRequest) -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(
        samples: dict[bytes, bytes],
        *,
        members: int = 1,
        device_block_bytes: int = 512,
        **layout: Any,
    ) -> Bench:
        devices = [
            MemoryDevice(
                f"{request.node.name}-{len(made)}-{i}",
                32 * MIB,
                block_bytes=device_block_bytes,
                writable=True,
            )
            for i in range(members)
        ]
        layout.setdefault("chunk_bytes", CHUNK_BYTES)
        made.append(Bench(lay_dataset(devices, samples, **layout), devices))
        return made[-1]

    yield make
    for one in made:
        one.close()
