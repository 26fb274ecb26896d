"""What a transform may know of the sample that it is called with.

Random numbers that a transform takes from a ``SampleContext`` are a function of the loader's seed,
the epoch, and the sample, so that they are the same however many ranks, workers and threads there
are, and after a resume. Those of the global generators are not: the threads of a process share
them, and every worker process begins them anew.
"""

from __future__ import annotations

import hashlib
import struct
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from dlfs import Batch
from dlfs.adapters.torch.states import State

_WORD = (1 << 64) - 1


class SampleContext:
    """A sample's place in the training, and random numbers of its own.

    Attributes:
        index: of the sample in the dataset, 0..N-1.
        epoch: that the sample was taken in.
        position: of the sample in the epoch's order, as all ranks together take it. It tells draws
            of the same sample apart, in epochs with ``weights`` or ``order``. None for a
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
        """A generator of numpy's that begins at ``seed``; the same one each time."""
        return np.random.default_rng(self.seed)

    @cached_property
    def torch(self) -> torch.Generator:
        """A generator of PyTorch's, of the CPU, that begins at ``seed``; the same one each time."""
        return torch.Generator().manual_seed(self.seed)

    def __repr__(self) -> str:
        return f"SampleContext(index={self.index}, epoch={self.epoch}, position={self.position})"


def make_contexts(
    batch: Batch, positions: npt.NDArray[np.int64], state: State
) -> list[SampleContext]:
    """Make the contexts of a batch's samples.

    Args:
        batch: of the epoch; samples that failed may have been left out of it.
        positions: ``int64[n]`` in the epoch's order, of the samples that were asked for.
        state: of the epoch.

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
