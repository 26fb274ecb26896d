"""The batches of one rank and worker in one epoch, read ahead by a native thread.

An ``Epoch`` takes positions of a ``Sequence`` (``epoch.order``) from a stream of the reader. Of
``world_size`` ranks, rank r takes the positions r, r + world_size, and so on. Global batch k is
therefore the same set of samples for every world size with the same global batch size, and another
number of ranks can resume the epoch.

Without a given rank, the first batch finds it. ``epoch.placement`` says how.

Without ``drop_last`` the last batch may be shorter, and some ranks may have one batch more than
others. Training loops that synchronise their ranks need ``drop_last=True``.

Threads: one at a time for an epoch. It owns its stream, and the batches own their memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Protocol, Self

from dlfs._native.reader import StreamOptions
from dlfs.base.arguments import OnError
from dlfs.base.closing import Closing
from dlfs.base.forks import OwnerProcess
from dlfs.base.units import format_count
from dlfs.base.wording import quote
from dlfs.epoch.options import EpochOptions, EpochState
from dlfs.epoch.order import shard_count
from dlfs.epoch.placement import begin_placement, check_same_placement
from dlfs.epoch.ranks import Placement, process_group
from dlfs.epoch.selection import Selection
from dlfs.errors import ClosedError, UsageError
from dlfs.format.digests import Digests
from dlfs.reader.batch import Batch
from dlfs.reader.failures import SampleFailure
from dlfs.reader.following import MOVES_MAX, MovedError
from dlfs.reader.progress import EpochProgress, Tally

FAILURES_MAX = 1000
"""Most failed samples that an epoch records by name; all of them are counted."""


class EpochStream(Protocol):
    """One consumer's part of an epoch, read ahead."""

    @property
    def plan(self) -> str:
        """Plan in use: ``direct``, ``chunks`` or ``chunk_copy``."""

    def next(self, count: int) -> Any:
        """Return the next samples, fewer at the end; None when no sample is left."""

    def close(self) -> None:
        """Stop reading ahead. Idempotent; batches given out stay valid."""


class EpochReader(Protocol):
    """The reader of one dataset, or of a view of several, in one process."""

    @property
    def closing(self) -> bool:
        """True once ``close`` has been called."""

    def stream(
        self, options: EpochOptions, selection: Selection | None, part: StreamOptions
    ) -> EpochStream:
        """Start reading some positions of an epoch's order ahead."""

    def build_batch(self, native: Any, on_error: OnError) -> Any:
        """Make a batch of what a stream returned, and apply the policy to failed samples."""


class Epoch(Closing, Iterator[Batch]):
    """An iterator over batches that reports its position and resumes from one.

    Reading starts with the first batch. If a call raises, also for Ctrl-C, the next call reads the
    same batch again. An epoch is consumed once: a second loop over it continues at the position of
    the first, and raises behind the last batch. In a forked child it continues from the parent's
    position with a reader of the child.

    Args:
        open_reader: returns the reader of this process.
        options: the order, and the part of it that this consumer reads.
        dataset: name of the dataset.
        digests: digests of the dataset.
        sample_count: samples of the dataset, or a function that returns those of an epoch.
        selection: the chosen samples; None for all samples.
        choose: returns the chosen samples of an epoch, where each has weights of its own.
        explain_other: returns the error for a state of another dataset, given the content digest.

    Attributes:
        failure_count: number of samples that were skipped or replaced so far.
        failures: the first ``FAILURES_MAX`` of them.

    Threads: one at a time.
    """

    def __init__(
        self,
        open_reader: Callable[[], EpochReader],
        options: EpochOptions,
        *,
        dataset: str,
        digests: Digests,
        sample_count: int | Callable[[EpochOptions], int],
        selection: Selection | None = None,
        choose: Callable[[EpochOptions], Selection | None] | None = None,
        explain_other: Callable[[str], UsageError] | None = None,
    ) -> None:
        self._open_reader = open_reader
        self._options = options
        self._dataset = dataset
        self._digests = digests
        self._explain_other = explain_other
        self._selection = selection
        self._choose = choose
        self._fingerprint = None if selection is None else selection.fingerprint
        self._sample_count = sample_count
        self._total = self._count_samples(options)
        self._begin = 0  # position of the first batch since the start or resume
        self._next_batch = options.worker  # of this rank, counted from _begin
        self._left_now: int | None = None  # what _left() returns, once a batch was taken
        self._stream: EpochStream | None = None
        self._reader: EpochReader | None = None
        self._owner = OwnerProcess()
        self._said = options.placement
        self._began: Placement | None = None  # placement that the first batch found
        self._watches_rank = options.rank is None  # until torch.distributed has said the rank
        self._closed = False
        self._ended = False  # a loop over it has taken the last batch
        self._tally = Tally()
        self.failure_count = 0
        self.failures: list[SampleFailure] = []

    def __repr__(self) -> str:
        options = self._options
        words = self._describe_share()
        words += [f"worker {options.worker} of {options.workers}"] if options.workers > 1 else []
        words += [f"shuffle {options.shuffle!r}", f"seed {options.seed}"]
        words += (
            [f"{format_count(self.failure_count, 'sample')} failed"] if self.failure_count else []
        )
        words += ["closed"] if self._closed else []
        return f"<Epoch {options.epoch} of dataset {self._dataset!r}: {', '.join(words)}>"

    def _describe_share(self) -> list[str]:
        """Return the batches that are left, the position, and the rank of this process."""
        position = f"position {self._position()} of {self._total}"
        try:
            options = self._options.placed()
        except UsageError:
            return [position, "rank unknown"]
        return [
            f"{format_count(len(self), 'batch', 'batches')} of {options.batch_size} to come",
            position,
            f"rank {options.rank} of {options.world_size}",
        ]

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows: progress, rate, and where the time went."""
        from dlfs.notebook import show_epoch

        return show_epoch(self)

    def __len__(self) -> int:
        """Return the number of batches that are left."""
        return -(-self._left() // self._options.batch_size)

    def __iter__(self) -> Self:
        """Return this epoch.

        Raises:
            UsageError: a loop over it has come to its end already.
        """
        if self._ended:
            raise UsageError(
                f"take batches: all batches of epoch {self._options.epoch} of dataset "
                f"{quote(self._dataset)} were taken; call batches(..., "
                f"epoch={self._options.epoch + 1}) for the next epoch"
            )
        return self

    def __next__(self) -> Batch:
        if self._closed:
            raise ClosedError("take the next batch: the epoch is closed")
        if self._watches_rank and (self._began is None or process_group() is not None):
            self._find_rank()
        left = self._left_now
        if left is None:
            left = self._left()
        if left == 0:
            self._end_stream()
            self._ended = True
            raise StopIteration
        asked = time.monotonic()
        try:
            batch = self._take_batch(left)
            if self._options.fields is not None:
                batch = batch.with_fields(self._options.fields)
            failed = len(batch.failures)
            remembered = batch.failures[: FAILURES_MAX - len(self.failures)]
            taken = min(self._options.batch_size, left)
            tally = self._tally.add(len(batch), asked, time.monotonic())
        except BaseException:
            self._end_stream()  # the state has not moved: the next call reads this batch again
            raise
        # No calls from here on: a signal handler that raises would run between them.
        self._tally = tally
        self.failure_count += failed
        self.failures += remembered
        self._next_batch += self._options.workers
        self._left_now = left - taken
        return batch

    def _find_rank(self) -> None:
        """Find the rank of this process for the first batch; later, check that it is still this.

        Raises:
            UsageError: it cannot be found, or is another one now.
        """
        if self._began is not None:
            what = f"epoch {self._options.epoch}"
            check_same_placement(self._said, self._began, what, "call resume(state())")
        elif self._options.rank is None:
            began = begin_placement(self._said)
            # No call between the two: a signal handler that raises would run there.
            self._options, self._began = self._options.placed(began), began
        self._watches_rank = self._began is not None and process_group() is None

    def _take_batch(self, left: int) -> Batch:
        """Return the next batch; if its samples were moved, from a reader that finds them."""
        for attempt in range(MOVES_MAX + 1):
            try:
                stream, reader = self._open_stream()
                native = stream.next(min(self._options.batch_size, left))
                if native is None:
                    raise ClosedError("take the next batch: the epoch's stream ended early")
                batch: Batch = reader.build_batch(native, self._options.on_error)
            except MovedError:
                if attempt == MOVES_MAX:
                    raise
                self._end_stream()
            else:
                return batch
        raise AssertionError

    def state(self) -> dict[str, Any]:
        """Return the position behind the batches taken so far; it is the same on every rank.

        The state of one of several workers assumes that all workers have taken the batches before
        this worker's last one.

        Returns:
            Plain values for a checkpoint. ``resume`` takes them at any world size, number of
            workers and batch size.
        """
        state = self._options.state(self._digests, self._position(), self._fingerprint)
        return state.to_dict()

    def resume(self, state: dict[str, Any]) -> Self:
        """Continue at the position of another epoch of the same samples, in that epoch's order.

        The dataset may be a copy, on another volume and under another name: its content digest
        counts, and in storage order (``shuffle=None``) and with ``shuffle="chunk"`` the packing
        digest, too.

        Args:
            state: the value that ``state`` returned.

        Returns:
            This epoch.

        Raises:
            UsageError: it is no such state, or of another dataset or selection, or of a copy that
                is packed otherwise.
        """
        resumed = EpochState.from_dict(state)
        if resumed.dataset != self._digests.content:
            raise (self._explain_other or self._describe_other)(resumed.dataset)
        if resumed.follows_packing and resumed.packing != self._digests.packing:
            raise self._describe_packing(resumed)
        if resumed.selection != self._fingerprint:
            raise UsageError(
                "resume an epoch: this checkpoint is of an epoch over other samples: expected "
                f"{_describe(self._fingerprint)}, got {_describe(resumed.selection)}; choose them "
                "by where, weights, draws and order as they were when it was saved"
            )
        options, selection = self._options.at(resumed), self._selection
        total = self._count_samples(options)
        if resumed.position > total:
            raise UsageError(
                f"resume an epoch: expected a position 0..{total}, got {resumed.position}"
            )
        if self._choose is not None and selection is not None and selection.by_epoch:
            selection = self._choose(options)
        if self._began is not None:
            options = replace(options, rank=None, world_size=None, placement=self._said)
        tally = Tally()
        self._end_stream()
        # No calls from here on: a signal handler that raises would leave half of a position.
        if self._began is not None:
            self._began, self._watches_rank = None, True
        self._options = options
        self._selection = selection
        self._ended = False
        self._total = total
        self._begin = resumed.position
        self._next_batch = options.worker
        self._left_now = None
        self._tally = tally
        return self

    def _count_samples(self, options: EpochOptions) -> int:
        """Return the number of the epoch's samples."""
        if self._selection is not None:
            return len(self._selection)
        count = self._sample_count
        return count if isinstance(count, int) else count(options)

    def _describe_other(self, content: str) -> UsageError:
        """Return the error for a state of a dataset of which only the content digest is known."""
        return UsageError(
            "resume an epoch: this checkpoint is of another version or dataset: expected dataset "
            f"{quote(self._dataset)} (content digest {self._digests.content}), got {content}"
        )

    def _describe_packing(self, resumed: EpochState) -> UsageError:
        """Return the error for a state of the same samples that are packed otherwise."""
        return UsageError(
            f"resume an epoch: this checkpoint is of a copy of dataset {quote(self._dataset)} with "
            f"the same samples in another storage order or in other chunks, and shuffle "
            f"{resumed.shuffle!r} follows these: expected packing digest {self._digests.packing}, "
            f"got {resumed.packing}"
        )

    @property
    def progress(self) -> EpochProgress:
        """Batches taken and left, and the time that was spent on them."""
        tally = self._tally
        return EpochProgress(
            position=self._position(),
            total=self._total,
            batches_left=len(self),
            batches=tally.batches,
            samples=tally.samples,
            seconds=tally.ended - tally.began,
            waited_seconds=tally.waited_seconds,
        )

    @property
    def plan(self) -> str:
        """Plan by which samples are read ahead: ``direct``, ``chunks`` or ``chunk_copy``.

        The first use starts the reading.
        """
        if self._began is None:
            self._find_rank()
        return self._open_stream()[0].plan

    def close(self) -> None:
        """Stop reading ahead. Idempotent; batches given out stay valid."""
        self._closed = True
        self._end_stream()

    @property
    def _step(self) -> int:
        """Samples of a global batch."""
        options = self._options.placed()
        assert options.world_size is not None
        return options.batch_size * options.world_size

    def _position(self) -> int:
        """Return the number of the epoch's samples up to the end of the last batch taken."""
        options = self._options
        if self._next_batch == options.worker:
            return self._begin
        end = (self._next_batch - options.workers + 1) * self._step
        return min(self._total, self._begin + end)

    def _left(self) -> int:
        """Return the number of samples that this worker has still to take."""
        options = self._options
        if options.rank is None:
            options = options.placed()
        assert options.rank is not None
        assert options.world_size is not None
        left = self._total - self._begin
        if options.drop_last:
            share = left // self._step * options.batch_size
        else:
            share = shard_count(left, options.rank, options.world_size)
        full, remainder = divmod(share, options.batch_size)
        mine = shard_count(full, self._next_batch, options.workers) * options.batch_size
        last = full >= self._next_batch and (full - options.worker) % options.workers == 0
        return mine + (remainder if last else 0)

    def _open_stream(self) -> tuple[EpochStream, EpochReader]:
        if not self._owner.is_current():
            self._stream = self._reader = None  # the parent's; its own handles stay untouched
            self._find_rank()
            self._owner = OwnerProcess()
        if self._reader is not None and self._reader.closing:
            self._end_stream()
            self._reader = None  # open_reader says why there is no other one
        if self._stream is None or self._reader is None:
            options = self._options
            assert options.rank is not None
            assert options.world_size is not None
            self._reader = self._open_reader()
            part = StreamOptions(
                first=self._begin + options.rank + self._next_batch * self._step,
                stride=options.world_size,
                count=self._left(),
                group=options.batch_size if options.workers > 1 else 0,
                group_stride=self._step * options.workers,
                plan=options.plan,
            )
            self._stream = self._reader.stream(options, self._selection, part)
        return self._stream, self._reader

    def _end_stream(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()


def _describe(fingerprint: str | None) -> str:
    return "all samples" if fingerprint is None else f"the selection {fingerprint}"
