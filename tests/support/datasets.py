"""Writes datasets to block devices without a volume, for tests of readers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

import numpy as np

from dlfs._native.packing import Packer
from dlfs.block import BlockDevice
from dlfs.directory import DirectoryBuilder, FrozenDirectory
from dlfs.format.geometry import ChunkRun, Geometry
from dlfs.format.location import LOCATION

UUID_OF_TESTS = UUID("00000000-0000-4000-8000-0000000000d1")


def random_samples(
    count: int, seed: int = 0, *, low: int = 0, high: int = 6000
) -> dict[bytes, bytes]:
    """Return samples of ``low`` to ``high - 1`` random bytes in seven class folders, by path."""
    random = np.random.default_rng(seed)
    lengths = random.integers(low, high, count).tolist()
    return {b"class%d/%05d" % (i % 7, i): random.bytes(length) for i, length in enumerate(lengths)}


@dataclass(frozen=True)
class LaidDataset:
    """A written dataset: the arguments of a reader and the samples that it must return."""

    geometry: Geometry
    runs: tuple[ChunkRun, ...]
    directory: FrozenDirectory
    samples: tuple[bytes, ...]
    """Contents of the samples, in index order."""


def lay_dataset(
    devices: Sequence[BlockDevice],
    samples: Mapping[bytes, bytes],
    *,
    chunk_bytes: int,
    block_bytes: int = 4096,
    order_seed: int = 0,
    first_chunk: int = 0,
    fragment_chunks: int = 0,
    replicas: int = 1,
) -> LaidDataset:
    """Pack samples onto devices and freeze their directory.

    Args:
        devices: writable devices, one for each member.
        samples: contents by path.
        chunk_bytes: chunk size.
        block_bytes: block size.
        order_seed: seed of the packing order.
        first_chunk: chunk of the volume in which the data begins.
        fragment_chunks: split the data into runs of so many chunks, with a gap of one chunk after
            each; 0: one run.
        replicas: copies of each chunk.

    Returns:
        The dataset as it is on the devices.
    """
    paths = sorted(samples)
    lengths = np.array([len(samples[path]) for path in paths], np.int64)
    offsets = np.concatenate(([0], np.cumsum(lengths)))[:-1].astype(np.int64)
    source = np.frombuffer(b"".join(samples[path] for path in paths) or b"\0", np.uint8)
    order = np.random.default_rng(order_seed).permutation(len(paths)).astype(np.uint64)
    chunks = int(np.sum(-(-(lengths + block_bytes) // chunk_bytes) + 1)) + 1
    data = np.zeros(chunks * chunk_bytes, np.uint8)
    locations = np.zeros(len(paths), LOCATION)
    packer = Packer(chunk_bytes=chunk_bytes, block_bytes=block_bytes)
    packer.pack(
        source,
        offsets,
        lengths,
        order=order,
        window=data,
        window_address=0,
        locations=locations,
    )
    chunk_count = max(1, -(-packer.address // chunk_bytes))
    runs = _runs(chunk_count, first_chunk, fragment_chunks)
    rows = -(-runs[-1].end_chunk // len(devices)) * replicas
    geometry = Geometry.of_one_group(
        len(devices), chunk_bytes, block_bytes, 1 << 20, rows, replicas
    )
    at = 0
    for run in runs:
        for chunk in range(run.first_chunk, run.end_chunk):
            for copy in range(replicas):
                member, offset = geometry.locate(chunk, copy)
                devices[member].write(offset, data[at : at + chunk_bytes])
            at += chunk_bytes
    builder = DirectoryBuilder()
    addresses = locations["address"]
    builder.add_many(
        paths,
        addresses & np.uint64((1 << 56) - 1),
        lengths,
        locations["crc32c"],
    )
    parts = builder.freeze(
        UUID_OF_TESTS,
        chunk_count * chunk_bytes,
        chunk_bytes=chunk_bytes,
        parts=packer.parts,
    )
    directory = FrozenDirectory(parts.entries, load_names=lambda: parts.names, label="test")
    return LaidDataset(
        geometry, tuple(runs), directory, tuple(bytes(samples[path]) for path in paths)
    )


def _runs(chunk_count: int, first_chunk: int, fragment_chunks: int) -> list[ChunkRun]:
    if not fragment_chunks:
        return [ChunkRun(first_chunk, chunk_count)]
    runs = []
    while chunk_count > 0:
        count = min(fragment_chunks, chunk_count)
        runs.append(ChunkRun(first_chunk, count))
        first_chunk += count + 1
        chunk_count -= count
    return runs
