"""Reads the epochs and batches of a view: each source by its own reader, merged in order.

A ``ViewStream`` computes the positions of one consumer in ``Segments``. Each source of a segment is
read ahead as a list of indices, and the next segment starts before the present one ends.
``merge_batches`` copies the sources' batches to one piece of memory, so that a batch of a view has
all methods of a dataset's.

Threads: one at a time for a stream; any for a reader. Memory: each dataset's own sample memory,
16 bytes for each sample of two segments, and a copy of the batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Generic, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from dlfs._native.batch import NativeBatch
from dlfs._native.reader import NativeSequence, StreamOptions
from dlfs.base.arguments import OnError
from dlfs.base.distinct import find_distinct
from dlfs.epoch.options import EpochOptions
from dlfs.epoch.selection import Selection
from dlfs.errors import ClosedError
from dlfs.fields import FieldSpan
from dlfs.fields.batch_fields import PartMemory
from dlfs.reader import Batch, EpochStream, SampleReader
from dlfs.views.order import ViewOrder
from dlfs.views.sources import Part, Sources, ViewColumns

SEGMENT_SAMPLES = 1 << 16
"""Most samples of a segment: one consumer's samples whose reading is started at a time."""

AHEAD_SAMPLES = 1 << 12
"""The next segment is started when at most so many samples of a segment are left."""

ALIGNMENT_BYTES = 16
"""Alignment of each sample in a merged batch: enough for every type of elements."""


def merge_batches(
    sources: Sources,
    parts: Sequence[tuple[Part, Batch]],
    *,
    columns: ViewColumns,
    name: str,
    span: FieldSpan = (),
) -> Batch:
    """Merge batches of the sources to one batch of the view.

    Args:
        sources: sources of the view.
        parts: where the samples of each batch belong, and the batch. A batch may lack samples that
            were skipped.
        columns: columns of the view, for arrays.
        name: name of the view.
        span: names of the consecutive fields that the batches have; empty for whole samples.
    """
    places = np.concatenate([_readable_places(part, batch) for part, batch in parts])
    lengths = np.concatenate([batch.lengths for _, batch in parts])
    indices = np.concatenate([sources.number(part.source, batch.indices) for part, batch in parts])
    order = np.argsort(places, kind="stable")
    room = -(-np.maximum(lengths[order], 0) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    offsets = np.empty(len(places), np.int64)
    offsets[order] = np.cumsum(room) - room
    memory = np.empty(int(room.sum()), np.uint8)
    first = 0
    for _, batch in parts:
        batch.gather(memory, offsets[first : first + len(batch)])
        first += len(batch)
    failures = [
        replace(failure, position=int(part.places[failure.position]))
        for part, batch in parts
        for failure in batch.failures
    ]
    merged = PartMemory(memory.data, offsets[order], lengths[order], indices[order])
    failures.sort(key=lambda failure: failure.position)
    return Batch(merged, None, tuple(failures), lambda: columns, dataset=name, span=span)


def _readable_places(part: Part, batch: Batch) -> NDArray[np.int64]:
    """Return the places of the samples that a batch still has."""
    if len(batch) == len(part.places):
        return part.places
    skipped = {failure.position for failure in batch.failures}
    return np.array([p for at, p in enumerate(part.places.tolist()) if at not in skipped], np.int64)


# ---- epochs --------------------------------------------------------------------------------------

Pieces = list[tuple[Part, NativeBatch]]
"""The samples of one batch by source: their places in the batch, and the samples."""


@dataclass(eq=False)
class Segment:
    """Some samples of an epoch, which are read ahead.

    Attributes:
        left: number of samples and lists of samples that were not taken yet.
        streams: streams that read them, by number of the source.
    """

    left: int
    streams: Mapping[int, EpochStream]

    @property
    def plan(self) -> str:
        """Plan by which samples are read ahead, of a view those of its first dataset."""
        return next((stream.plan for stream in self.streams.values()), "direct")

    def close(self) -> None:
        """Stop reading ahead."""
        for stream in self.streams.values():
            stream.close()


S = TypeVar("S", bound=Segment)


class Segments(Generic[S]):
    """The segments of an epoch one after the other; the next one is started before its turn.

    Args:
        starting: starts the segments.

    Threads: one at a time.
    """

    def __init__(self, starting: Iterator[S]) -> None:
        self._starting = starting
        self._started = deque(islice(starting, 1))

    def present(self) -> S | None:
        """Return the segment of the next samples; None behind the last one."""
        return self._started[0] if self._started else None

    def advance(self) -> None:
        """Start the next segment near the end of the present one, and close one that is taken."""
        if self._started[0].left <= AHEAD_SAMPLES and len(self._started) == 1:
            self._started.extend(islice(self._starting, 1))
        if not self._started[0].left:
            self._started.popleft().close()

    @property
    def plan(self) -> str:
        """Plan by which samples are read ahead."""
        return self._started[0].plan if self._started else "direct"

    def close(self) -> None:
        """Stop reading ahead. Idempotent."""
        while self._started:
            self._started.popleft().close()


@dataclass(eq=False)
class _ViewSegment(Segment):
    """A segment of a view; ``owners`` has the number of each sample's source, ``int64[n]``."""

    owners: NDArray[np.int64]

    @classmethod
    def start(
        cls,
        readers: Sequence[SampleReader],
        sources: Sources,
        indices: NDArray[np.uint64],
        plan: str,
    ) -> Self:
        owners = np.empty(len(indices), np.int64)
        streams = {}
        for part in sources.split(indices):
            owners[part.places] = part.source
            reader = readers[part.source]
            order = NativeSequence.choose(
                reader.directory, kind="list", indices=np.ascontiguousarray(part.indices)
            )
            share = StreamOptions(first=0, stride=1, count=len(part.indices), plan=plan)
            streams[part.source] = reader.native.stream(order, share)
        return cls(len(indices), streams, owners)

    def next(self, count: int, at: int) -> Pieces:
        """Return the next samples, at most ``left``; the first one has position ``at``."""
        first = len(self.owners) - self.left
        owners = self.owners[first : first + count]
        pieces: Pieces = []
        for source in find_distinct(owners).tolist():
            places = np.flatnonzero(owners == source) + at
            native = self.streams[source].next(len(places))
            if native is None or len(native.indices) != len(places):
                raise ClosedError("take the next batch: the stream of a dataset ended early")
            pieces.append((Part(source, places, native.indices), native))
        self.left -= count
        return pieces


class ViewStream(Segments[_ViewSegment]):
    """One consumer's part of an epoch of a view, read ahead.

    Args:
        readers: reader of each source.
        sources: sources of the view.
        order: order of the epoch.
        part: positions that this consumer takes.

    Threads: one at a time.
    """

    def __init__(
        self,
        readers: Sequence[SampleReader],
        sources: Sources,
        order: ViewOrder,
        part: StreamOptions,
    ) -> None:
        def start() -> Iterator[_ViewSegment]:
            for first in range(0, part.count, SEGMENT_SAMPLES):
                count = min(SEGMENT_SAMPLES, part.count - first)
                indices = order.at(part.positions(first, count))
                yield _ViewSegment.start(readers, sources, indices, part.plan)

        super().__init__(start())

    def next(self, count: int) -> Pieces | None:
        """Return the next samples, fewer at the end; None if no sample is left."""
        pieces: Pieces = []
        taken = 0
        while taken < count and (segment := self.present()) is not None:
            some = min(count - taken, segment.left)
            pieces += segment.next(some, taken)
            taken += some
            self.advance()
        return pieces or None


class ViewReader:
    """Reads the samples of a view in one process.

    Args:
        sources: sources of the view.
        make_order: returns the order of an epoch with these options and chosen samples.
        columns: columns of the view.
        name: name of the view.
        fields: names of the fields to read, which all datasets have; None for whole samples.

    Threads: any at once.
    """

    def __init__(
        self,
        sources: Sources,
        make_order: Callable[[EpochOptions, Selection | None], ViewOrder],
        columns: ViewColumns,
        name: str,
        fields: Sequence[str] | None = None,
    ) -> None:
        self._sources = sources
        self._make_order = make_order
        self._columns = columns
        self._name = name
        sessions = [source.dataset.session for source in sources.sources]
        self._readers = [session.readers.reader(fields) for session in sessions]
        self._span = self._readers[0].span
        if any(reader.span != self._span for reader in self._readers):
            self._span = ()  # a dataset is read whole, and all batches must have the same parts
            self._readers = [session.reader for session in sessions]

    @property
    def closing(self) -> bool:
        """True once the reader of a dataset was closed."""
        return any(reader.closing for reader in self._readers)

    def read(self, indices: NDArray[np.uint64], on_error: OnError) -> Batch:
        """Read samples by the view's indices as one batch."""
        parts = [
            (part, self._readers[part.source].read(part.indices, on_error=on_error))
            for part in self._sources.split(indices)
        ]
        return self._merge(parts)

    def stream(
        self, options: EpochOptions, selection: Selection | None, part: StreamOptions
    ) -> ViewStream:
        """Start reading some positions of an epoch's order ahead."""
        order = self._make_order(options, selection)
        return ViewStream(self._readers, self._sources, order, part)

    def build_batch(self, pieces: Pieces, on_error: OnError) -> Batch:
        """Make a batch of what the sources' streams read, by the policy for failed samples."""
        return self._merge(
            [
                (part, self._readers[part.source].build_batch(native, on_error))
                for part, native in pieces
            ]
        )

    def _merge(self, parts: Sequence[tuple[Part, Batch]]) -> Batch:
        return merge_batches(
            self._sources, parts, columns=self._columns, name=self._name, span=self._span
        )
