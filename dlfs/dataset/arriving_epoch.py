"""The batches of one rank and worker in the epoch that takes the samples of an import.

The shares of ranks and workers are those of every epoch (``reader.epoch``): rank r takes the
positions r, r + world_size, and so on. A batch is given when all positions of its global batch have
arrived, so it does not depend on the number of samples, which is not known. When the import has
ended, the last batch may be shorter.

Threads: one at a time. Memory: the places of the samples of two windows, and a copy of the batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from dlfs._native.batch import NativeBatch
from dlfs._native.reader import NativeSequence, StreamOptions
from dlfs.base.arguments import OnError
from dlfs.base.closing import Closing
from dlfs.base.distinct import find_distinct
from dlfs.base.forks import OwnerProcess
from dlfs.base.wording import quote
from dlfs.connection.connection import DatasetSession
from dlfs.dataset.arrived_windows import ArrivedColumns, Window
from dlfs.epoch.options import EpochOptions, EpochState
from dlfs.epoch.placement import begin_placement
from dlfs.errors import ClosedError, UsageError
from dlfs.fields.batch_fields import PartMemory
from dlfs.reader import Batch, EpochStream
from dlfs.reader.following import MOVES_MAX, MovedError

if TYPE_CHECKING:
    from dlfs.dataset.arriving import ArrivingDataset, ArrivingOrder

AHEAD_SAMPLES = 1 << 12
"""The next window is started when at most so many samples of a window are left."""
ALIGNMENT_BYTES = 64
"""Alignment of each sample in the memory of a batch."""
STATE_PREFIX = "import:"
"""Begin of the name of the dataset in states of the first epoch; its UUID follows."""

Pieces = Sequence[tuple[NDArray[np.int64], Batch]]
"""The samples of a batch by session: their places in the batch, and the samples."""


def merge_pieces(
    pieces: Pieces, numbers: NDArray[np.int64], columns: ArrivedColumns, name: str
) -> Batch:
    """Copy the samples of several sessions to one batch.

    Args:
        pieces: the samples; some may have been skipped.
        numbers: number of each sample of the batch.
        columns: columns of the samples.
        name: name of the dataset.
    """
    places = np.concatenate([_readable(at, batch) for at, batch in pieces] or [numbers[:0]])
    lengths = np.concatenate([batch.lengths for _, batch in pieces] or [numbers[:0]])
    order = np.argsort(places, kind="stable")
    room = -(-np.maximum(lengths[order], 0) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    offsets = np.empty(len(places), np.int64)
    offsets[order] = np.cumsum(room) - room
    memory = np.empty(int(room.sum()), np.uint8)
    first = 0
    for _, batch in pieces:
        batch.gather(memory, offsets[first : first + len(batch)])
        first += len(batch)
    failures = [
        replace(
            failure, position=int(at[failure.position]), index=int(numbers[at[failure.position]])
        )
        for at, batch in pieces
        for failure in batch.failures
    ]
    failures.sort(key=lambda failure: failure.position)
    indices = numbers[places[order]].astype(np.uint64)
    merged = PartMemory(memory.data, offsets[order], lengths[order], indices)
    return Batch(merged, None, tuple(failures), lambda: columns, dataset=name)


def _readable(places: NDArray[np.int64], batch: Batch) -> NDArray[np.int64]:
    """Return the places of the samples that a batch still has."""
    if len(batch) == len(places):
        return places
    return np.delete(places, [failure.position for failure in batch.failures])


@dataclass(eq=False)
class _Segment:
    """The samples that one consumer takes of a window, which are read ahead.

    Attributes:
        window: the window, which is pinned.
        numbers: number of each sample, ``int64[n]``.
        owners: position of each sample's session in the window, ``uint32[n]``.
        streams: stream of each session.
        taken: number of samples that were taken.
    """

    window: Window
    numbers: NDArray[np.int64]
    owners: NDArray[np.uint32]
    streams: dict[int, EpochStream]
    taken: int = 0

    @classmethod
    def start(cls, window: Window, places: NDArray[np.int64], plan: str) -> Self:
        owners, streams = window.owners[places], {}
        for owner in find_distinct(owners).tolist():
            reader = window.sessions[owner].reader
            indices = np.ascontiguousarray(window.indices[places[owners == owner]])
            order = NativeSequence.choose(reader.directory, kind="list", indices=indices)
            share = StreamOptions(first=0, stride=1, count=len(indices), plan=plan)
            streams[owner] = reader.native.stream(order, share)
        return cls(window, window.first + places, owners, streams)

    @property
    def left(self) -> int:
        """Number of samples that are left."""
        return len(self.owners) - self.taken

    def next(self, count: int) -> list[tuple[NDArray[np.int64], DatasetSession, NativeBatch]]:
        """Return the next samples by session, with their places among them."""
        owners = self.owners[self.taken : self.taken + count]
        found = []
        for owner in find_distinct(owners).tolist():
            places = np.flatnonzero(owners == owner)
            native: Any = self.streams[owner].next(len(places))
            if native is None or len(native.indices) != len(places):
                raise ClosedError("take the next batch: the stream of a step ended early")
            found.append((places, self.window.sessions[owner], native))
        self.taken += count
        return found

    def close(self) -> None:
        """Stop reading ahead."""
        for stream in self.streams.values():
            stream.close()


class _Stream:
    """Reads the positions of one consumer ahead, window by window.

    Args:
        dataset: the dataset.
        order: order of the epoch.
        part: positions that the consumer takes; their number has no limit.
        on_error: policy for samples that cannot be read.
    """

    def __init__(
        self,
        dataset: ArrivingDataset,
        order: ArrivingOrder,
        part: StreamOptions,
        on_error: OnError,
    ) -> None:
        self._dataset, self._order, self._part = dataset, order, part
        self._opened = dataset.opened()
        self._on_error: OnError = on_error
        self._started = 0  # samples of the consumer that segments were started for
        self._segments: deque[_Segment] = deque()

    def next(self, count: int) -> Batch:
        """Return the next samples, which have arrived."""
        pieces: list[tuple[NDArray[np.int64], Batch]] = []
        numbers = np.empty(count, np.int64)
        taken = 0
        while taken < count:
            if not self._segments:
                self._start()
            segment = self._segments[0]
            some = min(count - taken, segment.left)
            numbers[taken : taken + some] = segment.numbers[segment.taken : segment.taken + some]
            for places, session, native in segment.next(some):
                batch = session.reader.build_batch(native, self._on_error)
                pieces.append((places + taken, batch))
            taken += some
            self._advance()
        columns = self._dataset.columns(self._order.window_bytes)
        return merge_pieces(pieces, numbers, columns, self._dataset.name)

    def _start(self) -> None:
        """Start the window of the consumer's next sample."""
        first = int(self._part.positions(self._started, 1)[0])
        window = self._order.window(first, pinned=True)
        try:
            positions = self._part.positions(self._started, self._count_in(window))
            places = self._order.at(window, positions)
            segment = _Segment.start(window, places, self._part.plan)
        except BaseException:
            self._opened.unpin(window)
            raise
        self._started += len(positions)
        self._segments.append(segment)

    def _count_in(self, window: Window) -> int:
        """Return how many of the consumer's samples from ``_started`` on lie in a window."""
        low, high = 1, window.end - window.first
        while low < high:
            middle = (low + high + 1) // 2
            last = int(self._part.positions(self._started + middle - 1, 1)[0])
            low, high = (middle, high) if last < window.end else (low, middle - 1)
        return low

    def _advance(self) -> None:
        """Start the next window near the end of the present one; close one that is taken."""
        segment = self._segments[0]
        if segment.left <= AHEAD_SAMPLES and len(self._segments) == 1:
            after = int(self._part.positions(self._started, 1)[0])
            total = self._dataset.total
            has_more = total is None or after < total
            if has_more and self._opened.has(after + 1, self._order.window_bytes):
                self._start()
        if not segment.left:
            self._segments.popleft().close()
            self._opened.unpin(segment.window)

    def close(self) -> None:
        """Stop reading ahead. Idempotent."""
        while self._segments:
            segment = self._segments.popleft()
            segment.close()
            self._opened.unpin(segment.window)


class ArrivingEpoch(Closing, Iterator[Batch]):
    """An iterator over batches of an import, which waits for samples that have not arrived.

    If a call raises, also for Ctrl-C, the next call reads the same batch again.

    Args:
        dataset: the dataset.
        options: the order, and the part of it that this consumer reads.
        check: called while it waits; what it raises, the epoch raises.
        timeout_s: longest wait for new samples, in seconds; None if ``check`` limits it.

    Threads: one at a time.
    """

    def __init__(
        self,
        dataset: ArrivingDataset,
        options: EpochOptions,
        *,
        check: Callable[[], None],
        timeout_s: float | None,
    ) -> None:
        self._dataset, self._options = dataset, options
        self._check, self._timeout_s = check, timeout_s
        self._begin = 0
        self._next_batch = options.worker
        self._stream: _Stream | None = None
        self._owner = OwnerProcess()
        self._closed = False

    def __repr__(self) -> str:
        return (
            f"<ArrivingEpoch {self._options.epoch} of {self._dataset.name!r}: position "
            f"{self._position()}>"
        )

    def __next__(self) -> Batch:
        if self._closed:
            raise ClosedError("take the next batch: the epoch is closed")
        if self._options.rank is None:
            self._options = self._options.placed(begin_placement(self._options.placement))
        count = self._wait()
        if count == 0:
            self._end_stream()
            raise StopIteration
        try:
            batch = self._take(count).with_fields(self._options.fields)
        except BaseException:
            self._end_stream()  # the state has not moved: the next call reads this batch again
            raise
        self._next_batch += self._options.workers
        return batch

    def _wait(self) -> int:
        """Wait for the next global batch; return the number of samples of this rank in it."""
        options, size = self._options, self._options.batch_size
        assert options.rank is not None
        assert options.world_size is not None
        first = self._begin + self._next_batch * self._step
        window_bytes = options.window_chunks * self._dataset.chunk_bytes
        self._dataset.wait(
            first + self._step, window_bytes, check=self._check, timeout_s=self._timeout_s
        )
        total = self._dataset.total
        if total is None or first + self._step <= total:
            return size
        if options.drop_last:
            return 0
        return min(size, len(range(first + options.rank, total, options.world_size)))

    def _take(self, count: int) -> Batch:
        """Return the next batch; if its samples were moved, from sessions that find them."""
        for attempt in range(MOVES_MAX + 1):
            try:
                return self._open_stream().next(count)
            except MovedError:
                self._end_stream()
                if attempt == MOVES_MAX:
                    raise
                self._dataset.look()
        raise AssertionError

    def _open_stream(self) -> _Stream:
        if not self._owner.is_current():
            self._stream, self._owner = None, OwnerProcess()  # the parent's stays untouched
        if self._stream is None:
            options = self._options
            assert options.rank is not None
            assert options.world_size is not None
            part = StreamOptions(
                first=self._begin + options.rank + self._next_batch * self._step,
                stride=options.world_size,
                count=1 << 62,
                group=options.batch_size,
                group_stride=self._step * options.workers,
                plan=options.plan,
            )
            order = self._dataset.order_epoch(options)
            self._stream = _Stream(self._dataset, order, part, options.on_error)
        return self._stream

    def _end_stream(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None and self._owner.is_current():
            stream.close()

    @property
    def _step(self) -> int:
        """Samples of a global batch."""
        options = self._options.placed()
        assert options.world_size is not None
        return options.batch_size * options.world_size

    def _position(self) -> int:
        if self._next_batch == self._options.worker:
            return self._begin
        end = self._begin + (self._next_batch - self._options.workers + 1) * self._step
        total = self._dataset.total
        return end if total is None else min(end, total)

    def state(self) -> dict[str, Any]:
        """Return the position behind the batches taken so far; it is the same on every rank.

        Returns:
            Plain values for a checkpoint. ``resume`` takes them at any world size and batch size,
            also when the import has ended.
        """
        return self._options.state(self._dataset.digests, self._position(), None).to_dict()

    def resume(self, state: dict[str, Any]) -> Self:
        """Continue at the position of another epoch of the same import, in that epoch's order.

        Raises:
            UsageError: it is no such state, or of another import.
        """
        resumed = EpochState.from_dict(state)
        uuid = uuid_of_state(resumed.dataset)
        if uuid is not None and self._dataset.uuid not in (None, uuid):
            raise UsageError(
                f"resume an epoch: this checkpoint is of another import of "
                f"{quote(self._dataset.name)}: expected {self._dataset.uuid}, got {uuid}"
            )
        total = self._dataset.total
        if total is not None and resumed.position > total:
            raise UsageError(
                f"resume an epoch: expected a position 0..{total}, got {resumed.position}"
            )
        self._end_stream()
        self._options = self._options.at(resumed)
        self._begin, self._next_batch = resumed.position, self._options.worker
        return self

    def close(self) -> None:
        """Stop reading ahead. Batches given out stay valid. Idempotent."""
        self._closed = True
        self._end_stream()


def uuid_of_state(dataset: str) -> UUID | None:
    """Return the UUID in a state of an import's epoch; None if it was not known yet.

    Raises:
        UsageError: it is the state of another dataset.
    """
    try:
        if not dataset.startswith(STATE_PREFIX):
            raise ValueError
        text = dataset.removeprefix(STATE_PREFIX)
        return UUID(text) if text else None
    except ValueError:
        raise UsageError(
            "resume an epoch: expected the state of an epoch that takes the samples of an import, "
            f"got one of another dataset (content digest {quote(dataset)})"
        ) from None
