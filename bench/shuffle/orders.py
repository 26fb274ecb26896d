"""The orders that are compared: DLFS's own, as its readers go by them, and what others do.

An order is ``int64[n_samples]``: the place in storage of each sample, in the order of the epoch.
DLFS's orders come from ``dlfs.sequence`` over a directory of that many samples; there is no data
behind it. Samples are all of one length, so that every chunk holds as many.
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
    """Samples as they lie: sample number ``i`` is the ``i``-th in storage.

    Attributes:
        count: of samples.
        per_chunk: samples in a chunk; the last chunk may hold fewer.
        directory: of all of them.
    """

    count: int
    per_chunk: int
    directory: FrozenDirectory

    @classmethod
    def lay(cls, count: int, per_chunk: int) -> Stored:
        """Lay samples one behind the other."""
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
    """A way to order epochs. A frozen dataclass."""

    @property
    def label(self) -> str:
        """In tables."""
        ...

    def places(self, stored: Stored, *, seed: int, epoch: int) -> NDArray[np.int64]:
        """One epoch: ``int64[n_samples]``, each place in storage once."""
        ...


@dataclass(frozen=True)
class Shuffled:
    """One of DLFS's.

    Attributes:
        shuffle: ``global``, ``chunk`` or None, as ``Dataset.batches`` has it.
        window_chunks: of ``chunk``.
    """

    shuffle: Shuffle | None
    window_chunks: int = 1

    @property
    def label(self) -> str:
        """In tables."""
        if self.shuffle == "chunk":
            return f"chunk, window of {self.window_chunks:,}"
        return "global" if self.shuffle else "none: storage order"

    def places(self, stored: Stored, *, seed: int, epoch: int) -> NDArray[np.int64]:
        """One epoch; an index is a place here, since paths rise as addresses do."""
        options = EpochOptions(
            shuffle=self.shuffle, seed=seed, epoch=epoch, window_chunks=self.window_chunks
        )
        chunk_bytes = stored.per_chunk * SAMPLE_BYTES
        sequence = Sequence(stored.directory, options, chunk_bytes=chunk_bytes)
        return sequence.indices().astype(np.int64)


@dataclass(frozen=True)
class Buffered:
    """A shuffle buffer: of the samples in it, a random one is taken, and the next one put there.

    Attributes:
        capacity: samples in the buffer.
        shard: samples of a shard, whose order is shuffled before; 0: storage order goes in.

    Source: ``tf.data.Dataset.shuffle`` and WebDataset's ``shuffle`` work so.
    """

    capacity: int
    shard: int = 0

    @property
    def label(self) -> str:
        """In tables."""
        shards = f", shards of {self.shard:,} shuffled" if self.shard else ""
        return f"buffer of {self.capacity:,} samples{shards}"

    def places(self, stored: Stored, *, seed: int, epoch: int) -> NDArray[np.int64]:
        """One epoch."""
        random = np.random.default_rng([seed, epoch, self.capacity, self.shard])
        arriving = self._arriving(stored.count, random).tolist()
        capacity = min(self.capacity, stored.count)
        buffer, rest = arriving[:capacity], arriving[capacity:]
        taken = []
        for slot, place in zip(random.integers(0, capacity, len(rest)).tolist(), rest, strict=True):
            taken.append(buffer[slot])
            buffer[slot] = place
        return np.concatenate([np.array(taken, np.int64), random.permutation(buffer)])

    def _arriving(self, count: int, random: np.random.Generator) -> NDArray[np.int64]:
        """What goes into the buffer, in order."""
        if not self.shard:
            return np.arange(count)
        firsts = random.permutation(np.arange(0, count, self.shard))
        return np.concatenate(
            [np.arange(first, min(first + self.shard, count)) for first in firsts]
        )
