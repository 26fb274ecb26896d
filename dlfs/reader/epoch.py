"""One rank's batches of one epoch, read ahead by a native thread.

Positions of the epoch's order are dealt out in turn: of ``world_size`` ranks, rank r takes r, r +
world_size, and so on. So batch k of all ranks together is the same set of samples for every world
size with the same global batch, and an epoch can be resumed by another number of ranks.

Without ``drop_last`` the last batch may be shorter, and some ranks may have one batch more than
others; loops that synchronise their ranks want ``drop_last=True``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, SupportsIndex

from dlfs._native.channel import ClientStream
from dlfs._native.reader import NativeStream
from dlfs.arguments import READ_PLANS, OnError, ReadPlan, check_choice, check_integer
from dlfs.errors import ClosedError, UsageError
from dlfs.forks import OwnerProcess
from dlfs.reader.batch import Batch
from dlfs.reader.failures import SampleFailure, check_on_error
from dlfs.selection import Selection
from dlfs.sequence import EpochState, Sequence, shard_count
from dlfs.units import format_count
from dlfs.wording import quote

if TYPE_CHECKING:
    from dlfs.reader.reader import SampleReader

FAILURES_KEPT = 1000
"""Bad samples that an epoch remembers by name; all are counted."""


class Epoch(Iterator[Batch]):
    """An iterator over batches that can tell where it stands and go on from there.

    Nothing is read before the first batch is asked for. A batch whose call raised, Ctrl-C
    included, is read again by the next call. An epoch is gone through once: a second loop over it
    goes on where the first one stopped, and raises behind the last batch. In a forked child it
    goes on by itself from where it stood, with the child's own reader.

    Args:
        open_reader: gives the reader, of this process.
        state: the order, and where to start.
        dataset: name of the dataset.
        explain_other: gives the error of a state of the dataset that a UUID names, which is not
            this one.
        sample_count: of the dataset.
        batch_size: samples of this rank in a batch, >= 1.
        rank: 0..world_size-1.
        world_size: >= 1.
        worker: 0..workers-1.
        workers: >= 1.
        drop_last: leave out a last global batch that is not full.
        on_error: ``raise``, ``skip`` or ``replace``.
        plan: how to read ahead: ``auto``, ``direct``, ``chunks`` or ``harvest``.
        selection: the samples that were chosen; None: all.

    Attributes:
        failure_count: bad samples that were skipped or replaced so far.
        failures: the first of them.

    Raises:
        UsageError: an argument is out of range.

    Threads: one at a time.
    """

    def __init__(
        self,
        open_reader: Callable[[], SampleReader],
        state: EpochState,
        *,
        dataset: str,
        sample_count: int,
        explain_other: Callable[[str], UsageError] | None = None,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        worker: int = 0,
        workers: int = 1,
        drop_last: bool = False,
        on_error: OnError = "raise",
        plan: ReadPlan = "auto",
        selection: Selection | None = None,
    ) -> None:
        check_on_error(on_error)
        check_choice(plan, READ_PLANS, option="plan", action="take batches")
        self._open_reader = open_reader
        fingerprint = None if selection is None else selection.fingerprint
        self._state = replace(state, selection=fingerprint)  # where it began
        self._dataset = dataset
        self._explain_other = explain_other
        self._selection = selection
        self._total = sample_count if selection is None else len(selection)
        self._batch_size = _integer("batch_size", batch_size, 1)
        self._world_size = _integer("world_size", world_size, 1)
        self._rank = _integer("rank", rank, 0, self._world_size - 1)
        self._workers = _integer("workers", workers, 1)
        self._worker = _integer("worker", worker, 0, self._workers - 1)
        self._next_batch = self._worker  # of this rank, counted from the state's position
        self._drop_last = drop_last
        self._on_error = on_error
        self._plan = plan
        self._stream: NativeStream | ClientStream | None = None
        self._reader: SampleReader | None = None
        self._owner = OwnerProcess()
        self._closed = False
        self._ended = False  # a loop over it has come to its end
        self.failure_count = 0
        self.failures: list[SampleFailure] = []

    def __repr__(self) -> str:
        state = self._state
        words = [
            f"{format_count(len(self), 'batch', 'batches')} of {self._batch_size} to come",
            f"position {self._position()} of {self._total}",
            f"rank {self._rank} of {self._world_size}",
        ]
        words += [f"worker {self._worker} of {self._workers}"] if self._workers > 1 else []
        words += [f"shuffle {state.shuffle!r}", f"seed {state.seed}"]
        words += (
            [f"{format_count(self.failure_count, 'sample')} failed"] if self.failure_count else []
        )
        words += ["closed"] if self._closed else []
        return f"<Epoch {state.epoch} of dataset {self._dataset!r}: {', '.join(words)}>"

    def __len__(self) -> int:
        """Batches still to come."""
        return -(-self._left() // self._batch_size)

    def __iter__(self) -> Self:
        """Return this epoch.

        Raises:
            UsageError: a loop over it has come to its end already.
        """
        if self._ended:
            raise UsageError(
                f"take batches: all batches of epoch {self._state.epoch} of dataset "
                f"{quote(self._dataset)} were taken; call batches(..., "
                f"epoch={self._state.epoch + 1}) for the next epoch"
            )
        return self

    def __next__(self) -> Batch:
        if self._closed:
            raise ClosedError("take the next batch: the epoch is closed")
        left = self._left()
        if left == 0:
            self._end_stream()
            self._ended = True
            raise StopIteration
        stream, reader = self._open_stream()
        try:
            native = stream.next(min(self._batch_size, left))
            if native is None:
                raise ClosedError("take the next batch: the epoch's stream ended early")
            batch = reader.settle(native, self._on_error)
            failed = len(batch.failures)
            remembered = batch.failures[: FAILURES_KEPT - len(self.failures)]
        except BaseException:
            self._end_stream()  # the state has not moved: the next call reads this batch again
            raise
        # No calls from here on: a signal handler that raises would run between them.
        self.failure_count += failed
        self.failures += remembered
        self._next_batch += self._workers
        return batch

    def state(self) -> dict[str, Any]:
        """Where the epoch stands after the batches taken so far; the same on every rank.

        Of a worker: where it stands when all workers have taken the batches up to this one's last.

        Returns:
            Plain values for a checkpoint. ``resume`` takes them at any world size, number of
            workers and batch size.
        """
        return replace(self._state, position=self._position()).to_dict()

    def resume(self, state: dict[str, Any]) -> Self:
        """Go on from where another epoch of the same dataset stood, in its order.

        Args:
            state: what ``state`` returned.

        Returns:
            This epoch.

        Raises:
            UsageError: it is no such state, or of another dataset or selection.
        """
        resumed = EpochState.from_dict(state)
        if resumed.dataset != self._state.dataset:
            raise (self._explain_other or self._of_other)(resumed.dataset)
        if resumed.selection != self._state.selection:
            raise UsageError(
                "resume an epoch: this checkpoint is of an epoch over other samples: expected "
                f"{_told(self._state.selection)}, got {_told(resumed.selection)}; choose them by "
                "where, weights, draws and order as they were when it was saved"
            )
        total = self._total
        if resumed.position > total:
            raise UsageError(
                f"resume an epoch: expected a position 0..{total}, got {resumed.position}"
            )
        self._end_stream()
        self._ended = False
        self._state = resumed
        self._next_batch = self._worker
        return self

    def _of_other(self, uuid: str) -> UsageError:
        """The error of a state of another dataset, of which only the UUID is known."""
        return UsageError(
            "resume an epoch: this checkpoint is of another version or dataset: expected dataset "
            f"{quote(self._dataset)} ({self._state.dataset}), got {uuid}"
        )

    @property
    def plan(self) -> str:
        """How it is read ahead: ``direct``, ``chunks`` or ``harvest``; starts the reading."""
        return self._open_stream()[0].plan

    def close(self) -> None:
        """Stop reading ahead. Idempotent; batches given out stay valid."""
        self._closed = True
        self._end_stream()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def _step(self) -> int:
        """Samples of a global batch."""
        return self._batch_size * self._world_size

    def _position(self) -> int:
        """Samples of the epoch up to the end of the last batch taken."""
        if self._next_batch == self._worker:
            return self._state.position
        end = (self._next_batch - self._workers + 1) * self._step
        return min(self._total, self._state.position + end)

    def _left(self) -> int:
        """Samples of this worker still to come."""
        left = self._total - self._state.position
        if self._drop_last:
            share = left // self._step * self._batch_size
        else:
            share = shard_count(left, self._rank, self._world_size)
        full, rest = divmod(share, self._batch_size)
        mine = shard_count(full, self._next_batch, self._workers) * self._batch_size
        last = full >= self._next_batch and (full - self._worker) % self._workers == 0
        return mine + (rest if last else 0)

    def _open_stream(self) -> tuple[NativeStream | ClientStream, SampleReader]:
        if not self._owner.is_current():
            self._stream = self._reader = None  # the parent's; its own handles stay untouched
            self._owner = OwnerProcess()
        if self._reader is not None and self._reader.closing:
            self._end_stream()
            self._reader = None  # the next one's dataset says why there is none
        if self._stream is None or self._reader is None:
            self._reader = self._open_reader()
            sequence = Sequence(
                self._reader.directory,
                chunk_bytes=self._reader.chunk_bytes,
                shuffle=self._state.shuffle,
                seed=self._state.seed,
                epoch=self._state.epoch,
                window_chunks=self._state.window_chunks,
                selection=self._selection,
            )
            self._stream = self._reader.stream(
                sequence,
                first=self._state.position + self._rank + self._next_batch * self._step,
                stride=self._world_size,
                count=self._left(),
                group=self._batch_size if self._workers > 1 else 0,
                group_stride=self._step * self._workers,
                plan=self._plan,
            )
        return self._stream, self._reader

    def _end_stream(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()


def _integer(option: str, value: SupportsIndex, low: int, high: int | None = None) -> int:
    """An argument of an epoch that is an integer.

    Raises:
        UsageError: it is none, or out of range.
    """
    return check_integer(value, low, high, option=option, action="take batches")


def _told(fingerprint: str | None) -> str:
    return "all samples" if fingerprint is None else f"the selection {fingerprint}"
