"""``SampleContext``: the index, epoch and random numbers of a sample, for its transform.

The random numbers of a ``SampleContext`` are a function of the loader's seed, the epoch and the
sample. They are therefore the same for any number of ranks, workers and threads, and after a
resume. Those of the global generators are not: the threads of a process share them, and every
worker process starts them again.
"""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import numpy.typing as npt
import torch

from dlfs import Batch
from dlfs.adapters.torch.states import State
from dlfs.base.forks import cached_property

_WORD = (1 << 64) - 1


class SampleContext:
    """The position of a sample in the training, and random numbers for it.

    Attributes:
        index: index of the sample in the dataset, 0..N-1.
        epoch: epoch in which the sample was taken.
        position: position of the sample in the epoch's order over all ranks. It distinguishes
            several draws of a sample, in epochs with ``weights`` or ``order``. None for a
            ``SampleDataset``, which does not know the order.

    Threads: one at a time, that of its transform.
    """

    def __init__(self, *, seed: int, epoch: int, index: int, position: int | None) -> None:
        self.index = index
        self.epoch = epoch
        self.position = position
        self._base = seed  # of the loader

    @cached_property
    def seed(self) -> int:
        """64 random bits, 0..2**64-1: a hash of the loader's seed, epoch, index and position."""
        words = (self._base, self.epoch, self.index, self.position or 0)
        data = struct.pack("<4Q", *(word & _WORD for word in words))
        return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")

    @cached_property
    def numpy(self) -> np.random.Generator:
        """Generator of numpy that starts at ``seed``; the same object on each access."""
        return np.random.default_rng(self.seed)

    @cached_property
    def torch(self) -> torch.Generator:
        """CPU generator of PyTorch that starts at ``seed``; the same object on each access."""
        return torch.Generator().manual_seed(self.seed)

    def __repr__(self) -> str:
        return f"SampleContext(index={self.index}, epoch={self.epoch}, position={self.position})"


def make_contexts(
    batch: Batch, positions: npt.NDArray[np.int64], state: State
) -> list[SampleContext]:
    """Make the contexts of a batch's samples.

    Args:
        batch: batch of the epoch; failed samples may have been left out of it.
        positions: position of each requested sample in the epoch's order, ``int64[n]``.
        state: state of the epoch.

    Returns:
        One context for each sample in the batch.
    """
    if len(batch) < len(positions):
        positions = np.delete(positions, [failure.position for failure in batch.failures])
    pairs = zip(batch.indices.tolist(), positions.tolist(), strict=True)
    return [
        SampleContext(seed=state["seed"], epoch=state["epoch"], index=index, position=position)
        for index, position in pairs
    ]
