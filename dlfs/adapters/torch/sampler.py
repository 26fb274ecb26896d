"""Samplers that replace PyTorch's, for training loops with a map-style dataset and a DataLoader.

Their only list of indices is that of chosen samples: an epoch's order is computed in blocks. Ranks
take every ``num_replicas``-th index, as with PyTorch's ``DistributedSampler``. A last round that is
not full is completed by the same rule, with the first indices of the epoch, or left out. All ranks
therefore have the same number of indices. The rank is found when an iteration begins
(``placement``), so that a sampler may be made before the ranks.

``Dataset.batches`` describes the arguments of the order that the samplers do
not list: ``seed``, ``window_chunks``, ``where``, ``weights``, ``draws`` and ``order``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, islice
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Sampler
from torch.utils.data.distributed import DistributedSampler as TorchSampler

from dlfs import Dataset, DatasetView, Shuffle
from dlfs.adapters.torch.dataset import SampleDataset, with_epoch
from dlfs.adapters.torch.lightning_fit import EpochSetter, count_batches
from dlfs.adapters.torch.placement import PlacementFinder, refuse_second_sharding
from dlfs.adapters.torch.shares import Share
from dlfs.adapters.torch.states import INDEX_ORDER, State, next_epoch, plain_state
from dlfs.base.arguments import check_choice
from dlfs.epoch.options import WINDOW_CHUNKS, EpochOptions, EpochState, Weights
from dlfs.epoch.ranks import Placement
from dlfs.errors import UsageError

BLOCK_POSITIONS = 4096
"""Positions of an epoch that are computed at a time."""

_SHUFFLES: dict[bool | str, Shuffle | None] = {
    True: "global",
    False: None,
    "global": "global",
    "chunk": "chunk",
}


class _Order:
    """One rank's part of an epoch, the common implementation of both samplers."""

    def __init__(
        self,
        dataset: Dataset | DatasetView | SampleDataset,
        options: EpochOptions,
        finder: PlacementFinder,
    ) -> None:
        self.finder = finder
        self.dataset = dataset.dataset if isinstance(dataset, SampleDataset) else dataset
        if options.shuffle is None and options.where is not None and options.weights is None:
            chosen = np.sort(self.dataset.order_epoch(options).indices())
            options = replace(options, where=None, order=chosen)
        self.options = options.with_copies()
        whole = self.dataset.start_epoch(self.options.whole())  # also checks the options
        self.total = len(whole)
        self.state = whole.state()

    def blocks(
        self, state: State, first: int, end: int, placement: Placement
    ) -> Iterator[list[int]]:
        """Yield one rank's indices at positions first..end-1, a block at a time.

        Args:
            state: state of the epoch.
            first: first position.
            end: position behind the last one; positions behind the epoch's end continue at 0.
            placement: share of the rank.
        """
        order = None
        if not self.is_index_order(state):
            options = self.options.at(EpochState.from_dict(state))
            order = self.dataset.order_epoch(options)
        ranks = placement.world_size
        position = first + placement.rank
        while position < end:
            begin = position % self.total
            count = min(
                len(range(begin, self.total, ranks)),
                len(range(position, end, ranks)),
                BLOCK_POSITIONS,
            )
            if order is not None:
                block: npt.NDArray[Any] = order.indices(begin, count, stride=ranks)
            else:
                block = begin + np.arange(count) * ranks
            yield with_epoch(block.tolist(), state["epoch"])
            position += count * ranks

    def is_index_order(self, state: State) -> bool:
        """Return True if an epoch of this state has all samples in index order."""
        return state["shuffle"] is None and not self.options.has_choice

    def set_epoch(self, epoch: int) -> bool:
        """Go to the beginning of an epoch; return False if it is the current epoch already."""
        if epoch < 0:
            raise UsageError(f"set the epoch: expected 0 or more, got {epoch}")
        if epoch == self.state["epoch"]:
            return False
        self.state = {**self.state, "epoch": epoch, "position": 0}
        return True


def _shuffle(shuffle: bool | Shuffle) -> Shuffle | None:
    """Return the shuffle of an epoch for a sampler's argument, as PyTorch's samplers take it.

    Raises:
        UsageError: it is no such argument.
    """
    check_choice(shuffle, [*_SHUFFLES], option="shuffle", action="order samples")
    return _SHUFFLES[shuffle]


class DistributedSampler(TorchSampler[int]):
    """The indices of one rank, in an epoch's order.

    Like PyTorch's, it stays in its epoch until ``set_epoch`` is called, and it has no state. It is
    a subclass of PyTorch's, so that Lightning does not share its indices out once more.

    Args:
        dataset: dataset to sample.
        num_replicas: number of ranks; by default each iteration finds it, as a ``Loader`` does.
        rank: rank of this process, 0..num_replicas-1; by default from the same source.
        shuffle: True or ``global``; ``chunk``; False for index order.
        drop_last: True to leave out a last round that is not full, instead of completing it.

    Raises:
        UsageError: an argument is out of range.
        DlfsError: the dataset cannot be opened.

    Threads: one at a time.
    """

    def __init__(
        self,
        dataset: Dataset | DatasetView | SampleDataset,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool | Shuffle = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        window_chunks: int = WINDOW_CHUNKS,
        where: npt.ArrayLike | None = None,
        weights: Weights | None = None,
        draws: int | None = None,
        order: npt.ArrayLike | None = None,
    ) -> None:
        options = EpochOptions(
            seed=seed,
            shuffle=_shuffle(shuffle),
            window_chunks=window_chunks,
            where=where,
            weights=weights,
            draws=draws,
            order=order,
            drop_last=drop_last,
        )
        self._order = _Order(dataset, options, PlacementFinder(rank, num_replicas))
        self.dataset = dataset
        self.shuffle, self.seed, self.drop_last = bool(options.shuffle), seed, drop_last

    @property
    def rank(self) -> int:
        """Rank of this process, as of now."""
        return self._order.finder.find().rank

    @property
    def num_replicas(self) -> int:
        """Number of ranks, as of now."""
        return self._order.finder.find().world_size

    @property
    def num_samples(self) -> int:
        """Indices of this rank in an epoch."""
        return len(self)

    @property
    def total_size(self) -> int:
        """Indices of all ranks in an epoch."""
        placement = self._order.finder.find()
        return self._rounds(placement) * placement.world_size

    @property
    def epoch(self) -> int:
        """Epoch whose order the next iteration has."""
        return int(self._order.state["epoch"])

    def _rounds(self, placement: Placement) -> int:
        total, ranks = self._order.total, placement.world_size
        return total // ranks if self.drop_last else -(-total // ranks)

    def __len__(self) -> int:
        return self._rounds(self._order.finder.find())

    def __iter__(self) -> Iterator[int]:
        order, placement = self._order, self._order.finder.find()
        end = self._rounds(placement) * placement.world_size
        for block in order.blocks(order.state, 0, end, placement):
            yield from block

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch whose order the next iterations have.

        Raises:
            UsageError: it is negative, or Accelerate calls, which would share one rank's batches
                out between all ranks.
        """
        refuse_second_sharding(self._order.finder, "a sampler")
        self._order.set_epoch(epoch)


class DistributedBatchSampler(Sampler[list[int]]):
    """Batches of indices of one rank, in an epoch's order, with a state to resume from.

    The batches are those of a ``Loader``: global batch k has the positions from k * B * W on. The
    epoch advances with its last batch; a call of ``set_epoch`` with that epoch changes nothing. An
    iteration that is left early starts again at its begin, because DataLoader's workers request
    more batches than the loop gets. ``set_epoch`` continues with another order instead.

    A state resumes at any world size and batch size. The next iteration then gives the rest of the
    epoch, and the following iterations whole epochs. With workers, the sampler is ahead of the
    training; torchdata's ``StatefulDataLoader`` has the state that belongs to a step.

    Args:
        dataset: dataset to sample.
        batch_size: samples of this rank in a batch, >= 1.
        num_replicas: number of ranks; by default each iteration finds it, as a ``Loader`` does.
        rank: rank of this process, 0..num_replicas-1; by default from the same source.
        shuffle: True or ``global``; ``chunk``; False for index order.
        drop_last: True to leave out a last global batch that is not full, instead of completing its
            last round.

    Raises:
        UsageError: an argument is out of range.
        DlfsError: the dataset cannot be opened.

    Threads: one at a time.
    """

    def __init__(
        self,
        dataset: Dataset | DatasetView | SampleDataset,
        batch_size: int,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool | Shuffle = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        window_chunks: int = WINDOW_CHUNKS,
        where: npt.ArrayLike | None = None,
        weights: Weights | None = None,
        draws: int | None = None,
        order: npt.ArrayLike | None = None,
    ) -> None:
        if batch_size < 1:
            raise UsageError(f"sample batches: expected batch_size >= 1, got {batch_size}")
        options = EpochOptions(
            batch_size=batch_size,
            seed=seed,
            shuffle=_shuffle(shuffle),
            window_chunks=window_chunks,
            where=where,
            weights=weights,
            draws=draws,
            order=order,
            drop_last=drop_last,
        )
        self._order = _Order(dataset, options, PlacementFinder(rank, num_replicas))
        self.batch_size = batch_size
        self._given = self._order.state  # the state of _order is the begin of the next iteration
        self.is_resumed = False
        """True if Lightning has loaded a state and has not begun to train yet."""

    @property
    def sampler(self) -> EpochSetter:
        """Object of which Lightning calls ``set_epoch`` with the epoch that begins."""
        return EpochSetter(self, self._order.finder)

    def _share(self, first: int) -> Share:
        placement = self._order.finder.find()
        return Share(
            total=self._order.total,
            first=first,
            batch_size=self.batch_size,
            rank=placement.rank,
            world_size=placement.world_size,
            uneven="pad",
            drop_last=self._order.options.drop_last,
        )

    def __len__(self) -> int:
        """Return the number of batches of this rank in a whole epoch."""
        return self._share(0).batches

    def __iter__(self) -> Iterator[list[int]]:
        begin = self._order.state
        first = int(begin["position"])
        share = self._share(first)
        end = first + share.samples * share.world_size
        placement = Placement(share.rank, share.world_size)
        indices = chain.from_iterable(self._order.blocks(begin, first, end, placement))
        for number in range(share.batches):
            self._given = {**begin, "position": share.end(number)}
            if number + 1 == share.batches:
                self._given = self._order.state = next_epoch(begin)
            yield list(islice(indices, self.batch_size))
        if not share.batches:
            self._given = self._order.state = next_epoch(begin)

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch; no effect if it is the current epoch already.

        Raises:
            UsageError: as for ``DistributedSampler.set_epoch``.
        """
        refuse_second_sharding(self._order.finder, "a sampler")
        if self._order.set_epoch(epoch):
            self._given = self._order.state

    def state_dict(self) -> State:
        """Return the state behind the last batch that was given: plain values."""
        state = {**self._given, "dataloader": {"step": self._share(0).step}}
        return {**state, INDEX_ORDER: True} if self._order.is_index_order(state) else state

    def load_state_dict(self, state: State) -> None:
        """Continue at a state, in its order.

        Args:
            state: value of ``state_dict``, or the state of a ``StatefulDataLoader`` over such a
                sampler.

        Raises:
            UsageError: it is neither, or of another dataset or selection, or of a ``Loader`` in
                storage order (``shuffle=None``).
        """
        plain = plain_state(state, self._order.total)
        if not plain.pop(INDEX_ORDER, False) and self._order.is_index_order(plain):
            raise UsageError(
                "resume an epoch: expected a state in an order that samplers have, got a Loader's "
                "storage order (shuffle=None); load it into a Loader"
            )
        epoch = self._order.dataset.start_epoch(self._order.options.whole())
        epoch.resume(plain).close()  # raises if the state does not fit
        left = self._share(plain["position"]).batches
        begin = next_epoch(plain) if plain["position"] > 0 and not left else plain
        self._given = self._order.state = begin
        batches = len(self)
        self.is_resumed = count_batches(batches, left or batches, is_begun=begin["position"] > 0)
