"""The orders that are compared: those of DLFS's readers, and those of shuffle buffers.

An order is ``int64[n_samples]``: the position in storage of each sample, in the order of the epoch.
DLFS's orders come from ``dlfs.sequence`` over a directory of so many samples, without data. All
samples have one length, so that every chunk has the same number of samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from dlfs.arguments import Shuffle
from dlfs.directory import DirectoryBuilder, FrozenDirectory
from dlfs.epoch_options import EpochOptions
from dlfs.sequence import Sequence

SAMPLE_BYTES = 4096
_DATASET = UUID("00000000-0000-4000-8000-0000000005f1")


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
        parts = builder.freeze(_DATASET, chunks * per_chunk * SAMPLE_BYTES)
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
        arriving = self._arriving(stored.count, random).tolist()
        capacity = min(self.capacity, stored.count)
        buffer, later = arriving[:capacity], arriving[capacity:]
        chosen = random.integers(0, capacity, len(later)).tolist()
        taken = []
        for number, sample in zip(chosen, later, strict=True):
            taken.append(buffer[number])
            buffer[number] = sample
        return np.concatenate([np.array(taken, np.int64), random.permutation(buffer)])

    def _arriving(self, count: int, random: np.random.Generator) -> NDArray[np.int64]:
        """Return the samples in the order in which they enter the buffer."""
        if not self.shard:
            return np.arange(count)
        firsts = random.permutation(np.arange(0, count, self.shard))
        return np.concatenate(
            [np.arange(first, min(first + self.shard, count)) for first in firsts]
        )
