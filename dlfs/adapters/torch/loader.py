"""``Loader``: batches of tensors, resumable to the sample at any number of ranks and workers.

The order of an epoch is a function of seed and epoch (``EpochOptions``). ``shares`` divides it
between ranks; the rank of this process is found when an epoch begins (``placement``). With worker
processes, whole batches of a rank go to the workers in turn. DataLoader reads from its workers in
turn as well, and so returns the rank's batches in their order, for any number of workers. The state
is therefore (seed, epoch, position) and nothing else.

The epoch advances when its last batch is given, because training loops that take ``len(loader)``
batches do not request another one. ``cursor`` has the state, in memory shared with worker
processes.

In each process that reads, native code reads ahead, and threads run the transforms of the next
``lookahead`` batches, whose memory is in addition to the dataset's sample memory.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, suppress
from copy import copy
from dataclasses import replace
from functools import partial
from traceback import clear_frames
from types import GeneratorType
from typing import Any, Unpack

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from dlfs import Batch, Epoch, TokenSequences
from dlfs.adapters.torch.context import make_contexts
from dlfs.adapters.torch.cursor import Cursor, start_cursor
from dlfs.adapters.torch.device import check_device, has_accelerator, open_memory
from dlfs.adapters.torch.forms import ElementType
from dlfs.adapters.torch.labels import Labels
from dlfs.adapters.torch.lightning_fit import (
    EpochSetter,
    count_batches,
    is_used_up,
    repeats_batches,
)
from dlfs.adapters.torch.lookahead import LOOKAHEAD, Read, Work, begin_work, take_ahead
from dlfs.adapters.torch.memory import HostMemory
from dlfs.adapters.torch.placement import PlacementFinder, refuse_second_sharding
from dlfs.adapters.torch.samples import HOST, THREADS, Collate, Recipe, Transform, TransformPool
from dlfs.adapters.torch.shares import Share, Uneven, check_uneven, choose_uneven
from dlfs.adapters.torch.sources import Source, as_batch, check_source, read_positions
from dlfs.adapters.torch.states import INDEX_ORDER, State, next_epoch, plain_state
from dlfs.adapters.torch.tensors import RankBatch, TensorBatch, pair_of
from dlfs.adapters.torch.worker_process import as_it_is, ignore_interrupts
from dlfs.base.arguments import check_integer
from dlfs.base.units import format_count
from dlfs.epoch.options import EpochOptions, EpochState, ReadKeywords, make_options
from dlfs.errors import ClosedError, UsageError


class Loader(IterableDataset[Any]):
    """Iterates over the batches of one epoch after the other.

    An iteration gives the rest of the epoch from the position of ``state_dict``; an epoch that was
    left early is continued. If the order is the same in every epoch, as in an evaluation
    (``order``, or ``shuffle=None`` without ``weights``), each iteration in this process gives the
    whole epoch; only the first one after ``load_state_dict`` gives the rest. With the last batch,
    the state becomes the begin of the next epoch, whether or not the loop requests more. ``len`` is
    always the number of batches of a whole epoch. One iteration reads at a time: a new one ends the
    previous one.

    docs/pytorch.md says how it goes with a ``DataLoader`` of the caller, and with frameworks.

    Args:
        dataset: dataset to read from, a view of several, or ``TokenSequences``.
        batch_size: samples of this rank in a batch, >= 1.
        uneven: policy of ranks if the samples do not divide by their number. ``pad``: the first
            samples of the epoch are repeated, fewer than there are ranks, so that all ranks have as
            many batches of as many samples, as with PyTorch's ``DistributedSampler``. ``drop``: the
            last samples are left out, fewer than there are ranks. ``leave``: each sample is given
            exactly once, and some ranks may have one batch more than others. Ranks that wait for
            each other in each step, as under DistributedDataParallel, then hang or fail. By default
            ``pad`` if torch.distributed is initialised with several ranks, or a launcher such as
            torchrun has set their number, else ``leave``.
        fields: names of the fields that batches have and that are read; all by default.
        transform: called with the bytes of each sample, a read-only ``memoryview``, with a tensor
            if it is an array, or with a dictionary of its fields; in threads.
        with_context: True to call ``transform(sample, context)``, with a ``SampleContext``: index,
            epoch, and random numbers that are the same after a resume, at any number of ranks and
            workers.
        labels: maps indices to labels: ``FolderLabels(dataset)``, ``ColumnLabels(dataset, name)``.
            Labels of a dataset follow its samples into a view; labels of other samples are refused.
        collate: ``list``, ``jagged``, ``stack``, a function of the list of samples, or ``auto``:
            ``list`` for raw bytes, else ``stack``. Without a transform, the samples of a list may
            be views of memory that is shared with other batches: do not change them in place. If
            samples have fields, a batch has a key for each field, and this says how arrays that
            vary are joined: a list by default.
        dtype: element type of every sample, of numpy or PyTorch, such as ``torch.bfloat16``;
            ``uint8`` by default.
        shape: shape of every sample; -1 for a first dimension that varies. One dimension by
            default.
        arrays: True if the dataset describes the array of each sample; instead of ``dtype``.
        threads: threads that run the transform, in each process that reads.
        lookahead: batches whose transforms start before they are requested.
        num_workers: processes that read and transform; 0 to do so in this process.
        multiprocessing_context: start method of the workers, such as ``spawn``; see ``DataLoader``.
        device: GPU to which batches are copied ahead, such as ``cuda``; each is given when the
            present stream may use it. By default they lie in ordinary memory.
        pin_memory: True to give batches in page-locked memory; without an accelerator only a
            warning. With ``device``, the dataset's sample memory is page-locked once, from which
            samples go to the GPU without a copy by the processor.
        as_pairs: True to give ``(samples, labels)``, as loops over torchvision's datasets expect,
            instead of a ``TensorBatch``; labels may be None. The state is then that of
            ``state_dict``.
        options: order and share, as ``Dataset.batches`` takes and describes them: ``seed``,
            ``shuffle``, ``window_chunks``, ``where``, ``weights``, ``draws``, ``order``,
            ``drop_last``, ``on_error``, ``plan``, ``rank``, ``world_size`` and ``placement``. Each
            epoch finds the rank when it begins, so the loader may be made before the ranks.

    Raises:
        UsageError: an argument is out of range.

    Threads: one at a time. It may be used in forked and spawned processes.
    """

    _is_used_up = False
    """True if the next iteration is without batches, because Lightning had all of its epoch."""
    is_resumed = False
    """True if Lightning has loaded a state and has not begun to train yet."""
    _workers: DataLoader[TensorBatch] | None = None
    """Worker processes of this loader, from its first iteration on."""
    _memory: HostMemory | None = None
    """Memory of the batches that this process makes, from its first iteration on."""
    _source: Iterator[TensorBatch] | None = None
    """Batches of the iteration in progress."""
    _behind: State | None = None
    """State behind the last batch of this rank, while the loop has it; the cursor is ahead."""
    _iterations = 0
    """In a worker of DataLoader: number of iterations that it has begun."""
    _loaded: State | None = None
    """In a worker of DataLoader: state that was loaded for its next iteration."""
    _worker_state: State | None = None
    """In a worker of DataLoader: state behind its last batch."""

    def __init__(
        self,
        dataset: Source,
        batch_size: int,
        *,
        uneven: Uneven | None = None,
        fields: Sequence[str] | None = None,
        transform: Transform | None = None,
        with_context: bool = False,
        labels: Labels | None = None,
        collate: Collate = "auto",
        dtype: ElementType | None = None,
        shape: tuple[int, ...] | None = None,
        arrays: bool = False,
        threads: int = THREADS,
        lookahead: int = LOOKAHEAD,
        num_workers: int = 0,
        multiprocessing_context: Any = None,
        device: str | int | torch.device | None = None,
        pin_memory: bool = False,
        as_pairs: bool = False,
        **options: Unpack[ReadKeywords],
    ) -> None:
        check = partial(check_integer, action="make a loader")
        self.dataset = dataset
        self.batch_size = check(batch_size, 1, option="batch_size")
        self._finder = PlacementFinder(
            options.get("rank"), options.get("world_size"), options.get("placement")
        )
        self._recipe = Recipe(
            transform=transform,
            with_context=with_context,
            labels=check_source(dataset, labels, dtype=dtype, shape=shape, arrays=arrays),
            collate=collate,
            dtype=dtype,
            shape=shape,
            arrays=arrays,
            fields=bool(dataset.fields),
            threads=threads,
        )
        self._options = make_options(
            Loader,
            ReadKeywords,
            options,
            batch_size=self.batch_size,
            fields=fields,
            rank=None,
            world_size=None,
            placement=None,
        ).with_copies()
        self._uneven = check_uneven(uneven)
        self._lookahead = check(lookahead, 0, option="lookahead")
        self._num_workers = check(num_workers, 0, option="num_workers")
        self._context, self._as_pairs = multiprocessing_context, as_pairs
        self._device, self._pin_memory = check_device(device), pin_memory and has_accelerator()
        self._total, self._cursor = self._start_cursor()

    def _start_cursor(self) -> tuple[int, Cursor]:
        """Return the samples of an epoch, and a cursor at its beginning."""
        return start_cursor(self.dataset, self._options)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_workers": None, "_source": None, "_memory": None}

    def __repr__(self) -> str:
        stand = self._cursor.get()
        words = [f"{format_count(self._count(stand), 'sample')} in batches of {self.batch_size}"]
        with suppress(UsageError):  # the environment lacks the rank
            words.append(f"rank {self.rank} of {self.world_size}")
        words += [f"{name} {stand[name]!r}" for name in ("shuffle", "seed", "epoch", "position")]
        return f"<Loader of dataset {self.dataset.name!r}: {', '.join(words)}>"

    # ---- state -----------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """Rank of this process among those that take different samples; before an epoch, of now.

        Raises:
            UsageError: the environment does not say which of several ranks this process is.
        """
        return self._finder.current().rank

    @property
    def world_size(self) -> int:
        """Number of ranks that take different samples; until an epoch begins, that of now.

        Raises:
            UsageError: as for ``rank``.
        """
        return self._finder.current().world_size

    @property
    def epoch(self) -> int:
        """Epoch of the next batch."""
        return int(self._stand()["epoch"])

    @property
    def position(self) -> int:
        """Samples of the epoch that all ranks together have been given."""
        return int(self._stand()["position"])

    def __len__(self) -> int:
        """Return the number of batches of this rank in a whole epoch."""
        return self._share({**self._stand(), "position": 0}).batches

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch; no effect if it is the current epoch already.

        Raises:
            UsageError: it is negative, or Accelerate calls, which would share one rank's batches
                out between all ranks.
        """
        refuse_second_sharding(self._finder, "a loader")
        if epoch < 0:
            raise UsageError(f"set the epoch: expected 0 or more, got {epoch}")
        if epoch != self.epoch:
            self._go_to({**self._cursor.get(), "epoch": epoch, "position": 0})

    @property
    def batch_sampler(self) -> EpochSetter:
        """Object on whose ``sampler`` Lightning calls ``set_epoch`` with the epoch that begins.

        Lightning does not load the state of a checkpoint at the end of an epoch.
        """
        return EpochSetter(self, self._finder)

    def state_dict(self) -> State:
        """Return the state behind the last batch that was given: plain values, for a checkpoint.

        Raises:
            UsageError: the workers of a caller's ``DataLoader`` have begun an iteration, so that
                only its batches have the state.
        """
        if get_worker_info() is None and self._cursor.was_begun:
            raise UsageError(
                "take the state of a loader: expected that it gives the batches itself, got one "
                "that the workers of a DataLoader read from, where only the batches know the "
                "state; save the last batch's batch.state, or use torchdata's StatefulDataLoader"
            )
        return dict(self._behind or self._stand())

    def load_state_dict(self, state: State) -> None:
        """Continue at a checkpoint, in its order, at any world size and number of workers.

        Args:
            state: value of ``state_dict``, ``TensorBatch.state``, or the state of a
                ``StatefulDataLoader`` over a loader.

        Raises:
            UsageError: it is none of these, or of another dataset or selection.
        """
        plain = plain_state(state, self._count)
        if plain.get(INDEX_ORDER):
            raise UsageError(
                "resume an epoch: expected a state of a Loader's order, got index order, that of a "
                "DistributedBatchSampler with shuffle=False; load it into such a sampler"
            )
        self._open_epoch(plain).close()  # raises if the state does not fit
        if get_worker_info() is not None:
            self._loaded = dict(state) if "dataloader" in state else self._begin_of(plain)
            return
        begin = self._begin_of(plain)
        self._go_to(begin)
        left = self._share(begin).batches
        self.is_resumed = count_batches(len(self), left, is_begun=begin["position"] > 0)
        self._is_used_up = self.is_resumed and is_used_up(begin["epoch"])

    def _stand(self) -> State:
        """Return the state with which the next batch begins; in a worker, the worker's own."""
        if get_worker_info() is not None and self._worker_state is not None:
            return self._worker_state
        return self._cursor.get()

    def _begin_of(self, state: State) -> State:
        """Return a plain state, or the next epoch's if no rank has any of its epoch left."""
        left = self._share(state, rank=0).batches
        return state if left or not state["position"] else next_epoch(state)

    def _go_to(self, state: State) -> None:
        self._end_iteration()
        self._finder.forget()
        self._is_used_up, self._behind = False, None
        self._cursor.set(state)

    def _count(self, state: State) -> int:
        """Return the samples of the epoch of a state; epochs of tokens may have more or fewer."""
        if not isinstance(self.dataset, TokenSequences):
            return self._total
        return len(self.dataset.start_epoch(self._options_at(state).whole()))

    def _share(self, state: State, rank: int | None = None) -> Share:
        """Return this rank's share, or another's, of an epoch from a state's position on."""
        placement = self._finder.current()
        return Share(
            total=self._count(state),
            first=state["position"],
            batch_size=self.batch_size,
            rank=placement.rank if rank is None else rank,
            world_size=placement.world_size,
            uneven=choose_uneven(self._uneven, placement),
            drop_last=self._options.drop_last,
        )

    # ---- iterations ------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the rest of the epoch, by ``TensorBatch``, or as ``as_pairs`` says.

        Raises:
            TransformError: the transform raised.
            ClosedError: ``close``, ``set_epoch``, ``load_state_dict`` or another iteration ended
                this one.
            UsageError: this process's rank cannot be found, or is not the one with which the epoch
                began.
            DlfsError: a sample cannot be read.
        """
        info = get_worker_info()
        if info is None:
            batches = self._iterate()
        else:
            batches = self._iterate_worker(info.seed - info.id, info.id, info.num_workers)
        return map(pair_of, batches) if self._as_pairs else batches

    def _iterate(self) -> Iterator[TensorBatch]:
        """Yield the rest of the epoch, in the training process."""
        self._end_iteration()  # an abandoned iteration, for example after Ctrl-C
        if self._is_used_up:
            self._is_used_up = False
            return
        begin = self._begin()
        source, batches, is_last = None, None, False
        try:
            source = self._source = self._start(begin)
            for given, batch in enumerate(source, 1):
                batches = self._count_batches(begin) if batches is None else batches
                is_last = given == batches
                # Other ranks may have one batch more: the state is theirs, too.
                self._behind = batch.state if is_last else None
                self._cursor.set(next_epoch(begin) if is_last else batch.state, given=True)
                yield batch
                self._behind = None
                if is_last:
                    break
                self._finder.check(self)
                if self._source is not source:
                    raise ClosedError(
                        "take the next batch: this iteration of the loader was ended by close, "
                        "set_epoch, load_state_dict or another iteration; begin a new one"
                    )
        except GeneratorExit:  # the loop ended early: workers stay for the next iteration
            if self._source is source:
                self._end_iteration()
            raise
        except BaseException as error:  # Ctrl-C, too: a worker's message may be read in part
            if self._source is source:
                self.close()
            if self._num_workers and isinstance(error, KeyboardInterrupt):
                # Notebooks keep the traceback, which would keep workers that were being started.
                clear_frames(error.__traceback__)
            raise
        if self._source is source:
            self._end_iteration()
        if not is_last:
            self._cursor.set(next_epoch(begin))  # this rank has no batch of the epoch

    def _count_batches(self, begin: State) -> int | None:
        """Return the number of batches of an iteration; None while it is unknown."""
        return self._share(begin).batches

    def _begin(self) -> State:
        """Return the state with which an iteration begins, and find the placement for it.

        Raises:
            UsageError: the placement is not the one with which the epoch began.
        """
        self._behind, begin = None, self._cursor.get()
        if self._cursor.was_given and self._options_at(begin).is_repeated:
            begin = {**begin, "position": 0}
        if repeats_batches():
            begin = {**begin, "epoch": 0, "position": 0}
        if self._finder.begin(self, is_begun=begin["position"] > 0):
            self.close()  # the workers have the placement of before
        return begin

    def _start(self, begin: State) -> Iterator[TensorBatch]:
        memory = self._memory = open_memory(self._memory, self._device, pin=self._pin_memory)
        if not self._num_workers:
            return self._make(begin, memory)
        if self._workers is not None:
            try:
                return memory.give(self._start_workers(begin))
            except RuntimeError:  # a worker was killed, or interrupted at its start
                self.close()
        self._workers = self._make_workers(begin)
        return memory.give(self._start_workers(begin))

    def _make_workers(self, begin: State) -> DataLoader[TensorBatch]:
        inner = copy(self)  # a copy: a reference cycle would keep the workers
        inner._as_pairs, inner._memory = False, None
        inner._finder = copy(self._finder)  # numbers: meshes and groups stay in this process
        inner._cursor = Cursor(begin)  # the begin of the workers differs from this process's
        return DataLoader(
            inner,
            batch_size=None,
            collate_fn=as_it_is,
            num_workers=self._num_workers,
            multiprocessing_context=self._context,
            pin_memory=self._pin_memory or self._device is not None,
            persistent_workers=True,  # keeps their sample memory
        )

    def _start_workers(self, begin: State) -> Iterator[TensorBatch]:
        assert self._workers is not None
        self._workers.dataset._cursor.set(begin)
        return iter(self._workers)

    def _iterate_worker(self, seed: int, worker: int, workers: int) -> Iterator[TensorBatch]:
        """Return a worker's part of an iteration; its state is valid before the first batch."""
        ignore_interrupts()
        loaded, self._loaded = self._loaded, None
        self._iterations += 1
        own = None if loaded is None else plain_state(loaded, self._count)
        begin = self._cursor.begin(seed, worker, workers, self._iterations, own)
        self._finder.begin(self, is_begun=False)
        step = self.batch_size * self.world_size
        me = {"worker": worker, "workers": workers, "step": step}
        dataloader = None if loaded is None else loaded.get("dataloader")
        if dataloader is None:
            after = begin["position"] + worker * step
        elif {key: dataloader.get(key) for key in me} == me:
            after = dataloader["next"]
        else:
            raise UsageError(
                f"resume a worker: expected the state of {me}, got {dataloader}; to go on with "
                "others, give the whole state to Loader.load_state_dict before workers start"
            )
        self._worker_state = {**begin, "dataloader": {**me, "next": after}}
        return self._read_worker_share(begin, me, after)

    def _read_worker_share(
        self, begin: State, me: dict[str, int], after: int
    ) -> Iterator[TensorBatch]:
        """Yield every workers-th batch, from the one at position ``after`` on."""
        total = self._count(begin)
        own = {**begin, "position": min(total, after)}
        for batch in self._make(own, HOST, every=me["workers"]):
            position = min(total, after + me["step"])
            after += me["workers"] * me["step"]
            # The same epoch, even behind the last batch: other workers are still in it.
            self._worker_state = {
                **begin,
                "position": position,
                "dataloader": {**me, "next": after},
            }
            yield batch

    def close(self) -> None:
        """End worker processes and iteration, and unlock the sample memory. Idempotent."""
        self._end_iteration()
        workers, self._workers = self._workers, None
        iterator = getattr(workers, "_iterator", None)
        if iterator is not None:
            # A traceback may keep the iterator and thus its processes.
            iterator._shutdown_workers()
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()

    def _end_iteration(self) -> None:
        """Stop reading ahead for the iteration in progress."""
        source, self._source = self._source, None
        if isinstance(source, GeneratorType):
            source.close()

    # ---- batches ---------------------------------------------------------------------------------

    def _open_epoch(self, state: State, *, workers: int = 1) -> Epoch:
        options = replace(self._options_at(state).placed(self._finder.current()), workers=workers)
        return self.dataset.start_epoch(options).resume(state)

    def _options_at(self, state: State) -> EpochOptions:
        """Return the options of the epoch that a plain state belongs to."""
        return self._options.at(EpochState.from_dict(state))

    def _read(self, begin: State, every: int) -> Generator[Read]:
        """Yield every ``every``-th batch of this rank, the state behind it, and its contexts."""
        share = self._share(begin)
        with self._open_epoch(begin, workers=every) as epoch:
            for number in range(0, share.batches, every):
                yield self._read_one(epoch, begin, share, number)

    def _read_one(self, epoch: Epoch, begin: State, share: Share, number: int) -> Read:
        """Read one batch of this rank; return it, the state behind it, and its contexts."""
        if share.is_plain(number):
            batch = as_batch(next(epoch))
        else:
            options, runs = self._options_at(begin), share.runs(number)
            batch = as_batch(read_positions(self.dataset, options, runs, self.world_size))
        state = {**begin, "position": share.end(number)}
        contexts = None
        if self._recipe.with_context:
            contexts = make_contexts(batch, share.positions(number), begin)
        return batch, self._begin_of(state) if number + 1 == share.batches else state, contexts

    def _make(self, begin: State, memory: HostMemory, *, every: int = 1) -> Iterator[TensorBatch]:
        # A for loop would keep each batch in memory while the next one is read; map does not.
        reading = self._read(begin, every)
        with closing(reading):
            if not self._recipe.has_work:
                yield from memory.give(map(partial(self._gather, memory), reading))
                return
            with TransformPool(self._recipe, self.dataset) as pool:
                begun = take_ahead(map(partial(begin_work, pool), reading), self._lookahead)
                yield from memory.give(map(partial(self._join, pool), begun))

    def _gather(self, memory: HostMemory, read: Read) -> TensorBatch:
        batch, state, _ = read
        return self._tensors(batch, state, self._recipe.gather(batch, memory))

    def _join(self, pool: TransformPool, work: Work) -> TensorBatch:
        batch, state, parts = work
        return self._tensors(batch, state, self._recipe.join(pool.finish(parts)))

    def _tensors(self, batch: Batch, state: State, samples: Any) -> TensorBatch:
        kind = TensorBatch if self._finder.is_whole else RankBatch
        return kind(
            indices=torch.from_numpy(batch.indices.astype(np.int64)),
            samples=samples,
            labels=self._recipe.label(batch),
            state=state,
            failures=batch.failures,
        )
