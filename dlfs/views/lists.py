"""Reads lists of samples ahead, a list for each batch, for epochs that compute their own batches.

Threads: one at a time. Memory: the indices of two segments.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from dlfs._native.reader import StreamOptions
from dlfs.dataset.dataset import Dataset
from dlfs.epoch.options import EpochOptions
from dlfs.epoch.selection import Selection
from dlfs.errors import ClosedError
from dlfs.format.digests import Digests
from dlfs.reader import EpochReader
from dlfs.views.reading import SEGMENT_SAMPLES, Segment, Segments
from dlfs.views.view import DatasetView

Readable = Dataset | DatasetView
"""A dataset, or a view of several."""

SEGMENT_LISTS = 1 << 12
"""Most lists of a segment."""


def open_reader(dataset: Readable, fields: Sequence[str] | None = None) -> EpochReader:
    """Return the reader of a dataset or view in this process, for all fields or for some."""
    if isinstance(dataset, Dataset):
        return dataset.session.readers.reader(fields)
    return dataset.open_reader(fields)


def digest_order(dataset: Readable, options: EpochOptions, description: str) -> Digests:
    """Check the options of an epoch's order; return digests of what they choose, for states.

    Args:
        dataset: the dataset or view.
        options: options of the order.
        description: what is made of the samples in this order.

    Raises:
        UsageError: the options do not fit the dataset.
    """
    state = dataset.start_epoch(options.whole()).state()
    return Digests.combine([dataset.digests], f"{state.get('selection')} {description}")


T = TypeVar("T")


class LastOrder(Generic[T]):
    """What is made of the order of an epoch, of which the last one is kept.

    Args:
        make: makes it of the options of an epoch.
    """

    def __init__(self, make: Callable[[EpochOptions], T]) -> None:
        self._make = make
        self._last: tuple[EpochOptions, T] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return LastOrder, (self._make,)

    def __call__(self, options: EpochOptions) -> T:
        """Return it for an epoch with these options."""
        last = self._last
        if last is None or not last[0].has_order_of(options):
            self._last = last = options, self._make(options)
        return last[1]


@dataclass(eq=False)
class _ListSegment(Segment):
    """Lists of samples that one stream reads; ``counts`` has the length of each that is left."""

    counts: deque[int]


class ListStream(Segments[_ListSegment]):
    """Reads one list of samples after the other, ahead of the caller.

    Args:
        reader: reader of the samples.
        lists: indices of the samples of each batch, ``uint64[n]``.
        plan: how samples are read ahead.

    Threads: one at a time.
    """

    def __init__(
        self, reader: EpochReader, lists: Iterator[NDArray[np.uint64]], plan: str = "auto"
    ) -> None:
        def start() -> Iterator[_ListSegment]:
            while listed := _take_lists(lists):
                indices = np.ascontiguousarray(np.concatenate(listed))
                streams = {}
                if len(indices):
                    part = StreamOptions(first=0, stride=1, count=len(indices), plan=plan)
                    selection = Selection("list", indices)
                    streams[0] = reader.stream(EpochOptions(), selection, part)
                counts = deque(map(len, listed))
                yield _ListSegment(len(indices) + len(listed), streams, counts)

        super().__init__(start())

    def next_list(self) -> Any:
        """Return the samples of the next list, for ``build_batch``; None for an empty one.

        Raises:
            ClosedError: the reader was closed.
        """
        segment = self.present()
        assert segment is not None
        count = segment.counts.popleft()
        native = segment.streams[0].next(count) if count else None
        if count and native is None:
            raise ClosedError("take the next batch: the epoch's stream ended early")
        segment.left -= count + 1
        self.advance()
        return native


def _take_lists(lists: Iterator[NDArray[np.uint64]]) -> list[NDArray[np.uint64]]:
    """Return the lists of the next segment; none behind the last one."""
    taken: list[NDArray[np.uint64]] = []
    samples = 0
    for indices in lists:
        taken.append(indices)
        samples += len(indices)
        if samples >= SEGMENT_SAMPLES or len(taken) == SEGMENT_LISTS:
            break
    return taken
