"""An epoch's batches as tensors, resumable to the sample at any number of ranks and workers.

The order of an epoch is a function of seed and epoch. Global batch k of world size W and batch size
B is the positions k * B * W and on of it, of which rank r has every W-th. With worker processes,
a rank's batches, not its samples, are dealt to them in turn; DataLoader asks its workers in turn as
well, so that what it gives is the rank's batches in their order, however many workers there are.
The state is therefore (seed, epoch, position) and nothing else.

In each process that reads, native code reads ahead, and transforms run in threads some batches
ahead of the one that is asked for: memory for ``lookahead`` batches beside the dataset's budget.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from copy import copy
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from dlfs import Batch, Dataset, Epoch, OnError, ReadPlan, Shuffle
from dlfs.adapters.torch.forms import ElementType
from dlfs.adapters.torch.labels import Labels
from dlfs.adapters.torch.placement import find_placement
from dlfs.adapters.torch.samples import THREADS, Collate, Recipe, Transform, TransformPool
from dlfs.adapters.torch.states import State, next_epoch, plain_state
from dlfs.adapters.torch.tensors import TensorBatch
from dlfs.errors import DlfsError, UsageError
from dlfs.sequence import WINDOW_CHUNKS

LOOKAHEAD = 2
"""Batches whose transforms are begun before they are asked for."""

_Work = tuple[Batch, State, list[Future[list[Any]]]]


class Loader(IterableDataset[Any]):
    """Iterates over the batches of one epoch after the other.

    An iteration gives what is left of the epoch, from where ``state_dict`` says; behind its last
    batch the state is the beginning of the next epoch. With ``num_workers`` it runs worker
    processes by itself. It may also be the dataset of a ``DataLoader`` or of torchdata's
    ``StatefulDataLoader`` of the caller's, with ``batch_size=None`` and any number of workers: each
    iteration of those begins where this object stands when they start their workers; call
    ``set_epoch`` before each, and take the state from ``TensorBatch.state``, or from
    ``StatefulDataLoader``. Their persistent workers begin the next epoch by themselves unless told.

    Args:
        dataset: to read from.
        batch_size: samples of this rank in a batch, >= 1.
        shuffle: ``global``, ``chunk`` or None; see ``Dataset.batches``.
        seed: of the order.
        window_chunks: of ``chunk``.
        drop_last: leave out a last global batch that is not full; without it some ranks may have
            one batch more than others.
        on_error: ``raise``, ``skip`` or ``replace`` samples that cannot be read.
        plan: how to read ahead.
        rank: of this process; by default torch.distributed's, if it is initialised by now, else the
            environment's.
        world_size: likewise.
        transform: called with each sample's bytes, a read-only ``memoryview``, or, if it is an
            array, with the tensor; in threads.
        labels: maps indices to labels: ``FolderLabels(dataset)``, ``ColumnLabels(dataset, name)``.
        collate: ``list``, ``jagged``, ``stack``, a function of the list of samples, or ``auto``:
            ``list`` for bytes as they are, else ``stack``.
        dtype: of the array that every sample's bytes are, numpy's or PyTorch's, such as
            ``torch.bfloat16``; ``uint8`` otherwise.
        shape: of that array; -1 for a first dimension that differs. One dimension by default.
        arrays: each sample is the array that the dataset says it is; instead of ``dtype``.
        threads: that run the transform, in each process that reads.
        lookahead: batches whose transforms are begun before they are asked for.
        num_workers: processes that read and transform; 0: this one does.
        multiprocessing_context: how to start them, such as ``spawn``; see ``DataLoader``.
        pin_memory: give batches in page-locked memory. Without an accelerator they are not, and a
            warning says so.
        as_pairs: give ``(samples, labels)``, as loops over torchvision's datasets take them,
            instead of a ``TensorBatch``; labels are None where there are none. The state is then
            that of ``state_dict``.

    Raises:
        UsageError: an argument is out of range.

    Threads: one at a time. It may be used in forked and spawned processes.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        *,
        shuffle: Shuffle | None = "global",
        seed: int = 0,
        window_chunks: int = WINDOW_CHUNKS,
        drop_last: bool = False,
        on_error: OnError = "raise",
        plan: ReadPlan = "auto",
        rank: int | None = None,
        world_size: int | None = None,
        transform: Transform | None = None,
        labels: Labels | None = None,
        collate: Collate = "auto",
        dtype: ElementType | None = None,
        shape: tuple[int, ...] | None = None,
        arrays: bool = False,
        threads: int = THREADS,
        lookahead: int = LOOKAHEAD,
        num_workers: int = 0,
        multiprocessing_context: Any = None,
        pin_memory: bool = False,
        as_pairs: bool = False,
    ) -> None:
        if lookahead < 0 or num_workers < 0:
            raise UsageError(
                "make a loader: expected lookahead >= 0 and num_workers >= 0, got "
                f"{lookahead} and {num_workers}"
            )
        self.dataset = dataset
        self.batch_size = batch_size
        self.rank, self.world_size = find_placement(rank, world_size)
        self._recipe = Recipe(
            transform=transform,
            labels=labels,
            collate=collate,
            dtype=dtype,
            shape=shape,
            arrays=arrays,
            threads=threads,
        )
        self._drop_last = drop_last
        self._on_error = on_error
        self._plan = plan
        self._lookahead = lookahead
        self._num_workers = num_workers
        self._context = multiprocessing_context
        self._pin_memory = pin_memory and _has_accelerator()
        self._as_pairs = as_pairs
        self._workers: DataLoader[TensorBatch] | None = None
        self._state = dataset.batches(
            batch_size, shuffle=shuffle, seed=seed, window_chunks=window_chunks, on_error=on_error
        ).state()
        # What persistent workers are told, in memory that they share with this process: how often
        # it was set, epoch, position.
        self._told = torch.zeros(3, dtype=torch.int64).share_memory_()
        self._heard = 0
        self._begun = False  # in a worker: an iteration

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_workers": None}

    # ---- where it stands -------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to."""
        return int(self._state["epoch"])

    @property
    def position(self) -> int:
        """Samples of the epoch that all ranks together have been given."""
        return int(self._state["position"])

    def __len__(self) -> int:
        """Batches of this rank that are left of the epoch."""
        with self._open_epoch() as epoch:
            return len(epoch)

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch; nothing changes if it is the one that it stands in.

        Raises:
            UsageError: it is negative.
        """
        if epoch < 0:
            raise UsageError(f"set the epoch: expected 0 or more, got {epoch}")
        if epoch != self.epoch:
            self._go_to({**self._plain(), "epoch": epoch, "position": 0})

    def state_dict(self) -> State:
        """Where it stands behind the last batch that was given; plain values, for a checkpoint."""
        return dict(self._state)

    def load_state_dict(self, state: State) -> None:
        """Go on from a checkpoint, in its order, at whatever world size and number of workers.

        Args:
            state: what ``state_dict`` returned, ``TensorBatch.state``, or the state of a
                ``StatefulDataLoader`` over a loader.

        Raises:
            UsageError: it is none of these, or of another dataset.
        """
        plain = plain_state(state, len(self.dataset))
        self._open_epoch(plain).close()  # it says what is wrong with it
        if get_worker_info() is not None:
            self._state = dict(state) if "dealt" in state else plain
            self._begun = False
        else:
            self._go_to(plain)

    def _plain(self) -> State:
        return plain_state(self._state, len(self.dataset))

    def _go_to(self, state: State) -> None:
        """Stand at a plain state, and have persistent workers begin there."""
        before = self._plain()
        if any(state[key] != before[key] for key in state.keys() - {"epoch", "position"}):
            self._workers = None  # what they cannot be told
        self._state = state
        self._heard = int(self._told[0]) + 1
        self._told[1:] = torch.tensor([state["epoch"], state["position"]])
        self._told[0] = self._heard

    def _listen(self) -> None:
        """In a worker, when an iteration begins: stand where it is to begin."""
        told, epoch, position = self._told.tolist()
        if told != self._heard:
            self._heard = told
            self._state = {**self._plain(), "epoch": epoch, "position": position}
        elif self._begun:
            self._state = next_epoch(self._plain())
        self._begun = True

    # ---- batches ---------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """What is left of the epoch: a ``TensorBatch`` each, or what ``as_pairs`` says.

        Raises:
            TransformError: the transform raised.
            DlfsError: a sample cannot be read.
        """
        info = get_worker_info()
        batches = self._give() if info is None else self._deal(info.id, info.num_workers)
        return map(_pair, batches) if self._as_pairs else batches

    def _give(self) -> Iterator[TensorBatch]:
        """In the training process."""
        pin = self._pin_memory and not self._num_workers  # DataLoader does it in a thread
        try:
            source = self._start_workers() if self._num_workers else self._make(self._open_epoch())
            for batch in source:
                self._state = batch.state
                yield batch.pin_memory() if pin else batch
        except Exception:
            self._workers = None  # one of them may be gone
            raise
        self._state = next_epoch(self._state)

    def _start_workers(self) -> Iterator[TensorBatch]:
        if self._workers is None:
            source = copy(self)  # not itself: a cycle would keep the workers
            source._as_pairs = False
            self._workers = DataLoader(
                source,
                batch_size=None,
                collate_fn=_as_it_is,
                num_workers=self._num_workers,
                multiprocessing_context=self._context,
                pin_memory=self._pin_memory,
                persistent_workers=True,  # with what they have in memory
            )
        self._go_to(self._plain())
        return iter(self._workers)

    def _deal(self, worker: int, workers: int) -> Iterator[TensorBatch]:
        """In a worker process. Its state is good before the first batch, too."""
        self._listen()
        step = self.batch_size * self.world_size
        me = {"worker": worker, "workers": workers, "step": step}
        dealt = self._state.get("dealt")
        if dealt is None:
            begin = self.position + worker * step
            epoch = self._open_epoch(worker=worker, workers=workers)
        else:
            if {key: dealt.get(key) for key in me} != me:
                raise UsageError(
                    f"resume a worker: expected the state of {me}, got {dealt}; to go on with "
                    "others, give the whole state to Loader.load_state_dict before workers start"
                )
            begin = dealt["next"]
            # From its own next batch on it takes every workers-th, as the first of them would.
            own = {**self._plain(), "position": min(len(self.dataset), begin)}
            epoch = self._open_epoch(own, workers=workers)
        self._state = {**self._plain(), "dealt": {**me, "next": begin}}
        return self._deal_on(epoch, me, begin)

    def _deal_on(self, epoch: Epoch, me: dict[str, int], begin: int) -> Iterator[TensorBatch]:
        for batch in self._make(epoch):
            begin += me["workers"] * me["step"]
            self._state = {**batch.state, "dealt": {**me, "next": begin}}
            yield batch

    def _open_epoch(
        self, state: State | None = None, *, worker: int = 0, workers: int = 1
    ) -> Epoch:
        epoch = self.dataset.batches(
            self.batch_size,
            rank=self.rank,
            world_size=self.world_size,
            worker=worker,
            workers=workers,
            drop_last=self._drop_last,
            on_error=self._on_error,
            plan=self._plan,
        )
        return epoch.resume(self._plain() if state is None else state)

    def _make(self, epoch: Epoch) -> Iterator[TensorBatch]:
        with epoch:
            if not self._recipe.has_work:
                for batch in epoch:
                    yield self._tensors(batch, epoch.state(), self._recipe.gather(batch))
                return
            with TransformPool(self._recipe, self.dataset) as pool:
                for batch, state, parts in _begin_ahead(epoch, pool, self._lookahead):
                    samples = self._recipe.join(pool.finish(parts))
                    yield self._tensors(batch, state, samples)

    def _tensors(self, batch: Batch, state: State, samples: Any) -> TensorBatch:
        return TensorBatch(
            indices=torch.from_numpy(batch.indices.astype(np.int64)),
            samples=samples,
            labels=self._recipe.label(batch),
            state=state,
            failures=batch.failures,
        )

    def close(self) -> None:
        """End its worker processes; an iteration that is under way ends with them. Idempotent."""
        self._workers = None


def _pair(batch: TensorBatch) -> tuple[Any, Any]:
    return batch.samples, batch.labels


def _as_it_is(batch: TensorBatch) -> TensorBatch:
    """Replace DataLoader's conversion, which would make tensors of the arrays in a batch."""
    return batch


def _begin_ahead(epoch: Epoch, pool: TransformPool, lookahead: int) -> Iterator[_Work]:
    """An epoch's batches with their transforms begun, some batches before they are given.

    An error on the way is raised in its turn: behind the batches before it.
    """
    begun: deque[_Work] = deque()
    failure: DlfsError | None = None
    ended = False
    while True:
        while not ended and len(begun) <= lookahead:
            try:
                batch = next(epoch, None)
                if batch is not None:
                    begun.append((batch, epoch.state(), pool.start(batch)))
            except DlfsError as error:
                batch, failure = None, error
            ended = batch is None
        if not begun:
            break
        yield begun.popleft()
    if failure is not None:
        raise failure


def _has_accelerator() -> bool:
    """Whether memory can be pinned for anything here; warns where it cannot."""
    if torch.accelerator.is_available():
        return True
    warnings.warn(
        "pin_memory: there is no accelerator, batches stay in ordinary memory", stacklevel=3
    )
    return False
