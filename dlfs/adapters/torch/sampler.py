"""Samplers in place of PyTorch's, for loops that have a map-style dataset and a DataLoader.

They hold no list of indices: an epoch's order is computed a block at a time. Ranks take every
``num_replicas``-th index, as with PyTorch's ``DistributedSampler``, and the same rule makes up a
last round that is not full: with the first indices of the epoch again, or by leaving it out.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Sampler

from dlfs import Dataset, Shuffle
from dlfs.adapters.torch.dataset import SampleDataset
from dlfs.adapters.torch.placement import find_placement
from dlfs.adapters.torch.states import State, plain_state
from dlfs.arguments import check_choice
from dlfs.errors import UsageError
from dlfs.sequence import WINDOW_CHUNKS

BLOCK_POSITIONS = 4096
"""Positions of an epoch that are computed at a time."""

_SHUFFLES: dict[bool | str, Shuffle | None] = {
    True: "global",
    False: None,
    "global": "global",
    "chunk": "chunk",
}


class _Order:
    """One rank's part of an epoch: what both samplers share."""

    def __init__(
        self,
        dataset: Dataset | SampleDataset,
        num_replicas: int | None,
        rank: int | None,
        shuffle: bool | Shuffle,
        seed: int,
        window_chunks: int,
    ) -> None:
        check_choice(shuffle, [*_SHUFFLES], option="shuffle", action="order samples")
        self.dataset = dataset.dataset if isinstance(dataset, SampleDataset) else dataset
        self.rank, self.num_replicas = find_placement(rank, num_replicas)
        self.total = len(self.dataset)
        # Checks the arguments, too. A shuffle of None is index order here.
        self.state = self.dataset.batches(
            1, shuffle=_SHUFFLES[shuffle], seed=seed, window_chunks=window_chunks
        ).state()

    def blocks(self, first: int, end: int) -> Iterator[list[int]]:
        """This rank's indices at positions first..end-1, a block at a time.

        Args:
            first: position of the epoch.
            end: of the last one, exclusive; those over the number of samples begin again at 0.
        """
        order = None
        if self.state["shuffle"] is not None:
            order = self.dataset.sequence(
                shuffle=self.state["shuffle"],
                seed=self.state["seed"],
                epoch=self.state["epoch"],
                window_chunks=self.state["window_chunks"],
            )
        position = first + self.rank
        while position < end:
            begin = position % self.total
            count = min(
                len(range(begin, self.total, self.num_replicas)),
                len(range(position, end, self.num_replicas)),
                BLOCK_POSITIONS,
            )
            if order is not None:
                block: npt.NDArray[Any] = order.indices(begin, count, stride=self.num_replicas)
            else:
                block = begin + np.arange(count) * self.num_replicas
            yield block.tolist()
            position += count * self.num_replicas

    def set_epoch(self, epoch: int) -> None:
        if epoch < 0:
            raise UsageError(f"set the epoch: expected 0 or more, got {epoch}")
        if epoch != self.state["epoch"]:
            self.state = {**self.state, "epoch": epoch, "position": 0}


class DistributedSampler(Sampler[int]):
    """The indices of one rank, in an epoch's order.

    Args:
        dataset: what is sampled.
        num_replicas: ranks; by default torch.distributed's, if it is initialised by now, else the
            environment's.
        rank: 0..num_replicas-1; likewise.
        shuffle: True or ``global``; ``chunk``; False for index order.
        seed: of the order.
        drop_last: leave out a last round that is not full, rather than fill it up.
        window_chunks: of ``chunk``.

    Raises:
        UsageError: an argument is out of range.
        DlfsError: the dataset cannot be opened.

    Threads: one at a time.
    """

    def __init__(
        self,
        dataset: Dataset | SampleDataset,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool | Shuffle = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        window_chunks: int = WINDOW_CHUNKS,
    ) -> None:
        self._order = _Order(dataset, num_replicas, rank, shuffle, seed, window_chunks)
        ranks = self._order.num_replicas
        self._rounds = self._order.total // ranks if drop_last else -(-self._order.total // ranks)

    def __len__(self) -> int:
        return self._rounds

    def __iter__(self) -> Iterator[int]:
        for block in self._order.blocks(0, self._rounds * self._order.num_replicas):
            yield from block

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iterations have.

        Raises:
            UsageError: it is negative.
        """
        self._order.set_epoch(epoch)


class DistributedBatchSampler(Sampler[list[int]]):
    """Batches of indices of one rank, in an epoch's order; it can be resumed.

    The batches are those of a ``Loader``: global batch k is positions k * B * W and on. A state is
    taken back at any world size and batch size; an iteration then gives what is left of the epoch,
    and those behind it whole epochs. DataLoader's workers ask ahead, so that the sampler stands
    further on than the training does: torchdata's ``StatefulDataLoader`` knows the state that
    belongs to a step.

    Args:
        dataset: what is sampled.
        batch_size: samples of this rank in a batch, >= 1.
        num_replicas: ranks; by default torch.distributed's, if it is initialised by now, else the
            environment's.
        rank: 0..num_replicas-1; likewise.
        shuffle: True or ``global``; ``chunk``; False for index order.
        seed: of the order.
        drop_last: leave out a last global batch that is not full, rather than fill up its last
            round.
        window_chunks: of ``chunk``.

    Raises:
        UsageError: an argument is out of range.
        DlfsError: the dataset cannot be opened.

    Threads: one at a time.
    """

    def __init__(
        self,
        dataset: Dataset | SampleDataset,
        batch_size: int,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool | Shuffle = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        window_chunks: int = WINDOW_CHUNKS,
    ) -> None:
        if batch_size < 1:
            raise UsageError(f"sample batches: expected batch_size >= 1, got {batch_size}")
        self._order = _Order(dataset, num_replicas, rank, shuffle, seed, window_chunks)
        self.batch_size = batch_size
        self._step = batch_size * self._order.num_replicas
        self._drop_last = drop_last

    def _end(self, first: int) -> int:
        """The position at which batches from ``first`` on end."""
        left = self._order.total - first
        unit = self._step if self._drop_last else self._order.num_replicas
        rounds = left // unit if self._drop_last else -(-left // unit)
        return first + rounds * unit

    def __len__(self) -> int:
        """Batches of the next iteration."""
        first = int(self._order.state["position"])
        return -(-(self._end(first) - first) // self._step)

    def __iter__(self) -> Iterator[list[int]]:
        first = int(self._order.state["position"])
        indices = (
            index for block in self._order.blocks(first, self._end(first)) for index in block
        )
        position = first
        while batch := list(islice(indices, self.batch_size)):
            position = min(self._order.total, position + self._step)
            self._order.state = {**self._order.state, "position": position}
            yield batch
        self._order.state = {**self._order.state, "position": 0}

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch; nothing changes if it is the one that it stands in.

        Raises:
            UsageError: it is negative.
        """
        self._order.set_epoch(epoch)

    def state_dict(self) -> State:
        """Where it stands behind the last batch that was given; plain values."""
        return {**self._order.state, "dealt": {"step": self._step}}

    def load_state_dict(self, state: State) -> None:
        """Go on from a state, in its order.

        Args:
            state: what ``state_dict`` returned, or the state of a ``StatefulDataLoader`` over such
                a sampler.

        Raises:
            UsageError: it is none of these, or of another dataset.
        """
        plain = plain_state(state, self._order.total)
        self._order.dataset.batches(1).resume(plain).close()  # it says what is wrong with it
        self._order.state = plain
