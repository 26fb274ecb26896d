"""Samplers that replace PyTorch's, for training loops with a map-style dataset and a DataLoader.

Their only list of indices is that of chosen samples: an epoch's order is computed in blocks. Ranks
take every ``num_replicas``-th index, as with PyTorch's ``DistributedSampler``. A last round that is
not full is completed by the same rule, with the first indices of the epoch, or left out. All ranks
therefore have the same number of indices. The rank is found when an iteration begins
(``placement``), so that a sampler may be made before the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any, Unpack

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
from dlfs.epoch.options import WINDOW_CHUNKS, EpochState, SelectionKeywords, make_options
from dlfs.epoch.placement import PlacementSource
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


class _RankSampler(Sampler[Any]):
    """One rank's batches of indices of the epochs of a dataset, which both samplers have."""

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
        placement: PlacementSource | None = None,
        **choice: Unpack[SelectionKeywords],
    ) -> None:
        check_choice(shuffle, [*_SHUFFLES], option="shuffle", action="order samples")
        options = make_options(
            type(self),
            SelectionKeywords,
            choice,
            batch_size=batch_size,
            seed=seed,
            shuffle=_SHUFFLES[shuffle],
            window_chunks=window_chunks,
            drop_last=drop_last,
        )
        self._finder = PlacementFinder(rank, num_replicas, placement)
        self._dataset = dataset.dataset if isinstance(dataset, SampleDataset) else dataset
        if options.shuffle is None and options.where is not None and options.weights is None:
            chosen = np.sort(self._dataset.order_epoch(options).indices())
            options = replace(options, where=None, order=chosen)
        self._options = options.with_copies()
        whole = self._dataset.start_epoch(self._options.whole())  # also checks the options
        self._total = len(whole)
        self._begin = self._given = whole.state()
        """State of the begin of the next iteration, and behind the last batch."""

    def _share(self, first: int, placement: Placement | None = None) -> Share:
        """Return this rank's share, as of now, of an epoch from a position on."""
        placement = placement or self._finder.find()
        return Share(
            total=self._total,
            first=first,
            batch_size=self._options.batch_size,
            rank=placement.rank,
            world_size=placement.world_size,
            uneven="pad",
            drop_last=self._options.drop_last,
        )

    def __len__(self) -> int:
        return self._share(0).batches

    def _indices(self, state: State, share: Share) -> Iterator[int]:
        """Yield the indices of a share of the epoch of a state, which are computed in blocks.

        Positions behind the epoch's end continue at 0.
        """
        order = None
        if not self._is_index_order(state):
            options = self._options.at(EpochState.from_dict(state))
            order = self._dataset.order_epoch(options)
        ranks = share.world_size
        position, end = share.first + share.rank, share.first + share.samples * ranks
        while position < end:
            first = position % self._total
            count = min(
                len(range(first, self._total, ranks)),
                len(range(position, end, ranks)),
                BLOCK_POSITIONS,
            )
            if order is not None:
                block: npt.NDArray[Any] = order.indices(first, count, stride=ranks)
            else:
                block = first + np.arange(count) * ranks
            yield from with_epoch(block.tolist(), state["epoch"])
            position += count * ranks

    def _is_index_order(self, state: State) -> bool:
        """Return True if an epoch of this state has all samples in index order."""
        return state["shuffle"] is None and not self._options.has_choice

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch; no effect if it is the current epoch already.

        Raises:
            UsageError: it is negative, or Accelerate calls, which would share one rank's batches
                out between all ranks.
        """
        refuse_second_sharding(self._finder, "a sampler")
        if epoch < 0:
            raise UsageError(f"set the epoch: expected 0 or more, got {epoch}")
        if epoch != self._begin["epoch"]:
            self._begin = self._given = {**self._begin, "epoch": epoch, "position": 0}


class DistributedSampler(_RankSampler, TorchSampler[int]):
    """The indices of one rank, in an epoch's order.

    Like PyTorch's, it stays in its epoch until ``set_epoch`` is called, and it has no state. It is
    a subclass of PyTorch's, so that Lightning does not share its indices out once more.

    Args:
        dataset: dataset to sample.
        num_replicas: number of ranks; by default each iteration finds it, as a ``Loader`` does.
        rank: rank of this process, 0..num_replicas-1; by default from the same source.
        shuffle: True or ``global``; ``chunk``; False for index order.
        seed: seed of the order.
        drop_last: True to leave out a last round that is not full, instead of completing it.
        window_chunks: window of ``chunk`` shuffle, as for ``Dataset.batches``.
        placement: mesh, group or function instead of the numbers of ranks, as ``Dataset.batches``
            takes it.
        choice: ``where``, ``weights``, ``draws`` and ``order``, as ``Dataset.batches`` takes them.

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
        placement: PlacementSource | None = None,
        **choice: Unpack[SelectionKeywords],
    ) -> None:
        super().__init__(
            dataset,
            1,
            num_replicas,
            rank,
            shuffle,
            seed,
            drop_last,
            window_chunks=window_chunks,
            placement=placement,
            **choice,
        )
        self.dataset = dataset
        self.shuffle, self.seed, self.drop_last = bool(self._options.shuffle), seed, drop_last

    @property
    def rank(self) -> int:
        """Rank of this process among those that take different samples, as of now."""
        return self._finder.find().rank

    @property
    def num_replicas(self) -> int:
        """Number of ranks that take different samples, as of now."""
        return self._finder.find().world_size

    @property
    def num_samples(self) -> int:
        """Indices of this rank in an epoch."""
        return len(self)

    @property
    def total_size(self) -> int:
        """Indices of all ranks in an epoch."""
        return len(self) * self.num_replicas

    @property
    def epoch(self) -> int:
        """Epoch whose order the next iteration has."""
        return int(self._begin["epoch"])

    def __iter__(self) -> Iterator[int]:
        return self._indices(self._begin, self._share(0, self._finder.find_begun()))


class DistributedBatchSampler(_RankSampler):
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
        seed: seed of the order.
        drop_last: True to leave out a last global batch that is not full, instead of completing its
            last round.
        window_chunks: window of ``chunk`` shuffle, as for ``Dataset.batches``.
        placement: mesh, group or function instead of the numbers of ranks, as ``Dataset.batches``
            takes it.
        choice: ``where``, ``weights``, ``draws`` and ``order``, as ``Dataset.batches`` takes them.

    Raises:
        UsageError: an argument is out of range.
        DlfsError: the dataset cannot be opened.

    Threads: one at a time.
    """

    is_resumed = False
    """True if Lightning has loaded a state and has not begun to train yet."""

    @property
    def batch_size(self) -> int:
        """Samples of this rank in a batch."""
        return self._options.batch_size

    @property
    def sampler(self) -> EpochSetter:
        """Object of which Lightning calls ``set_epoch`` with the epoch that begins."""
        return EpochSetter(self, self._finder)

    def __iter__(self) -> Iterator[list[int]]:
        begin = self._begin
        share = self._share(int(begin["position"]), self._finder.find_begun())
        indices = self._indices(begin, share)
        for number in range(share.batches):
            self._given = {**begin, "position": share.end(number)}
            if number + 1 == share.batches:
                self._given = self._begin = next_epoch(begin)
            yield list(islice(indices, share.batch_size))
        if not share.batches:
            self._given = self._begin = next_epoch(begin)

    def state_dict(self) -> State:
        """Return the state behind the last batch that was given: plain values."""
        state = {**self._given, "dataloader": {"step": self._share(0).step}}
        return {**state, INDEX_ORDER: True} if self._is_index_order(state) else state

    def load_state_dict(self, state: State) -> None:
        """Continue at a state, in its order.

        Args:
            state: value of ``state_dict``, or the state of a ``StatefulDataLoader`` over such a
                sampler.

        Raises:
            UsageError: it is neither, or of another dataset or selection, or of a ``Loader`` in
                storage order (``shuffle=None``).
        """
        plain = plain_state(state, self._total)
        if not plain.pop(INDEX_ORDER, False) and self._is_index_order(plain):
            raise UsageError(
                "resume an epoch: expected a state in an order that samplers have, got a Loader's "
                "storage order (shuffle=None); load it into a Loader"
            )
        epoch = self._dataset.start_epoch(self._options.whole())
        epoch.resume(plain).close()  # raises if the state does not fit
        left = self._share(plain["position"]).batches
        begin = next_epoch(plain) if plain["position"] > 0 and not left else plain
        self._given = self._begin = begin
        batches = len(self)
        self.is_resumed = count_batches(batches, left or batches, is_begun=begin["position"] > 0)
