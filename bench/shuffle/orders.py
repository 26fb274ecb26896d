"""The orders that are compared: those of DLFS's readers, and those of shuffle buffers.

An order is ``int64[n_samples]``: the position in storage of each sample, in the order of the epoch.
DLFS's orders come from ``dlfs.epoch.order`` over a directory of so many samples, without data. All
samples have one length, so that every chunk has the same number of samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from dlfs.base.arguments import Shuffle
from dlfs.directory import DirectoryBuilder, FrozenDirectory
from dlfs.epoch.options import WINDOW_CHUNKS, EpochOptions
from dlfs.epoch.order import Sequence

SAMPLE_BYTES = 4096
_DATASET = UUID("00000000-0000-4000-8000-0000000005f1")


@dataclass(frozen=True)
class Size:
    """Sizes of the measurements.

    Attributes:
        chunks: number of chunks of the measured dataset.
        per_chunk: samples of a chunk.
        batch: samples of a batch.
        batches: sizes of batches for the variance of classes.
        classes: number of classes of the measured dataset.
        windows: windows of chunk shuffle, in chunks.
        seeds: number of seeds of the orders.
        digits_windows: windows of chunk shuffle of the digits, in chunks.
        digits_seeds: number of seeds of weights and orders.
        epochs: epochs of a training.
        budget_chunks: memory budget in chunks; windows up to eight times as large are read with it.
    """

    chunks: int = 4096
    per_chunk: int = 64
    batch: int = 256
    batches: tuple[int, ...] = (32, 256, 1024)
    classes: int = 100
    windows: tuple[int, ...] = (1, 4, 16, WINDOW_CHUNKS, 256, 1024)
    seeds: int = 5
    digits_windows: tuple[int, ...] = (1, 4, 16, 32)
    digits_seeds: int = 10
    epochs: int = 12
    budget_chunks: int = 64


TINY = Size(
    chunks=64,
    per_chunk=8,
    batch=16,
    batches=(16, 32),
    classes=8,
    windows=(1, 8),
    seeds=2,
    digits_windows=(1,),
    digits_seeds=2,
    epochs=2,
    budget_chunks=4,
)
"""Sizes for tests and ``--tiny``."""


@dataclass(frozen=True, eq=False)
class Stored:
    """Samples in storage: sample number ``i`` is the ``i``-th in storage.

    Attributes:
        count: number of samples.
        per_chunk: samples in a chunk; the last chunk may have fewer.
        directory: directory of all samples.
    """

    count: int
    per_chunk: int
    directory: FrozenDirectory

    @classmethod
    def lay(cls, count: int, per_chunk: int) -> Stored:
        """Return samples that are stored one after the other."""
        builder = DirectoryBuilder()
        builder.add_many(
            [b"%09d" % number for number in range(count)],
            np.arange(count, dtype=np.uint64) * SAMPLE_BYTES,
            np.full(count, SAMPLE_BYTES, np.uint64),
            np.zeros(count, np.uint32),
        )
        chunks = -(-count // per_chunk)
        chunk_bytes = per_chunk * SAMPLE_BYTES
        parts = builder.freeze(_DATASET, chunks * chunk_bytes, chunk_bytes=chunk_bytes)
        return cls(count, per_chunk, FrozenDirectory(parts.entries, lambda: parts.names))


class Order(Protocol):
    """A way to order the samples of an epoch. A frozen dataclass."""

    @property
    def label(self) -> str:
        """Name shown in tables."""
        ...

    def positions(self, stored: Stored, *, seed: int, epoch: int) -> NDArray[np.int64]:
        """One epoch: ``int64[n_samples]``, each place in storage once."""
        ...


@dataclass(frozen=True)
class Shuffled:
    """An order of DLFS.

    Attributes:
        shuffle: ``global``, ``chunk`` or None, as for ``Dataset.batches``.
        window_chunks: window of ``chunk``, in chunks.
    """

    shuffle: Shuffle | None
    window_chunks: int = 1

    @property
    def label(self) -> str:
        if self.shuffle == "chunk":
            return f"chunk, window of {self.window_chunks:,}"
        return "global" if self.shuffle else "none: storage order"

    def positions(self, stored: Stored, *, seed: int, epoch: int) -> NDArray[np.int64]:
        """Return one epoch. Indices are positions in storage, as paths rise with addresses."""
        options = EpochOptions(
            shuffle=self.shuffle, seed=seed, epoch=epoch, window_chunks=self.window_chunks
        )
        chunk_bytes = stored.per_chunk * SAMPLE_BYTES
        sequence = Sequence(stored.directory, options, chunk_bytes=chunk_bytes)
        return sequence.indices().astype(np.int64)


@dataclass(frozen=True)
class Buffered:
    """A shuffle buffer: a random sample is taken out of it, and the next one takes its position.

    Attributes:
        capacity: samples in the buffer.
        shard: samples of a shard; the order of shards is shuffled first. 0: samples enter the
            buffer in storage order.

    Source: ``tf.data.Dataset.shuffle`` and WebDataset's ``shuffle`` work like this.
    """

    capacity: int
    shard: int = 0

    @property
    def label(self) -> str:
        shards = f", shards of {self.shard:,} shuffled" if self.shard else ""
        return f"buffer of {self.capacity:,} samples{shards}"

    def positions(self, stored: Stored, *, seed: int, epoch: int) -> NDArray[np.int64]:
        random = np.random.default_rng([seed, epoch, self.capacity, self.shard])
        samples, step = np.arange(stored.count), self.shard or stored.count
        firsts = random.permutation(np.arange(0, stored.count, step)) if self.shard else [0]
        arriving = np.concatenate([samples[first : first + step] for first in firsts]).tolist()
        capacity = min(self.capacity, stored.count)
        buffer, later = arriving[:capacity], arriving[capacity:]
        chosen = random.integers(0, capacity, len(later)).tolist()
        taken = []
        for number, sample in zip(chosen, later, strict=True):
            taken.append(buffer[number])
            buffer[number] = sample
        return np.concatenate([np.array(taken, np.int64), random.permutation(buffer)])
