"""Reads lists of samples ahead, a list for each batch, for epochs that compute their own batches.

Threads: one at a time. Memory: the indices of two segments.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlfs._native.reader import StreamOptions
from dlfs.dataset.dataset import Dataset
from dlfs.epoch.options import EpochOptions
from dlfs.epoch.selection import Selection
from dlfs.errors import ClosedError
from dlfs.reader import EpochReader, EpochStream
from dlfs.views.reading import AHEAD_SAMPLES, SEGMENT_SAMPLES
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


def describe_order(dataset: Readable, options: EpochOptions) -> str:
    """Check the options of an epoch's order and describe what they choose, for a state's UUID.

    Raises:
        UsageError: the options do not fit the dataset.
    """
    state = dataset.start_epoch(options.whole()).state()
    return f"{dataset.uuid} {state.get('selection')}"


@dataclass
class _Segment:
    """Lists of samples that one stream reads.

    Attributes:
        stream: the stream; None if all lists are empty.
        counts: number of samples of each list that is left.
    """

    stream: EpochStream | None
    counts: deque[int] = field(default_factory=deque)


class ListStream:
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
        self._reader = reader
        self._lists = lists
        self._plan = plan
        self._segments: deque[_Segment] = deque()
        self._start_segment()

    @property
    def plan(self) -> str:
        """Plan by which samples are read ahead."""
        stream = self._segments[0].stream if self._segments else None
        return "direct" if stream is None else stream.plan

    def _start_segment(self) -> None:
        lists: list[NDArray[np.uint64]] = []
        samples = 0
        for indices in self._lists:
            lists.append(indices)
            samples += len(indices)
            if samples >= SEGMENT_SAMPLES or len(lists) == SEGMENT_LISTS:
                break
        if not lists:
            return
        segment = _Segment(None, deque(map(len, lists)))
        if samples:
            selection = Selection("list", np.ascontiguousarray(np.concatenate(lists)))
            part = StreamOptions(first=0, stride=1, count=samples, plan=self._plan)
            segment.stream = self._reader.stream(EpochOptions(), selection, part)
        self._segments.append(segment)

    def next_list(self) -> Any:
        """Return the samples of the next list, for ``build_batch``; None for an empty one.

        Raises:
            ClosedError: the reader was closed.
        """
        segment = self._segments[0]
        count = segment.counts.popleft()
        native = None
        if count:
            assert segment.stream is not None
            native = segment.stream.next(count)
            if native is None:
                raise ClosedError("take the next batch: the epoch's stream ended early")
        if len(self._segments) == 1 and sum(segment.counts) <= AHEAD_SAMPLES:
            self._start_segment()
        if not segment.counts:
            self._segments.popleft()
            if segment.stream is not None:
                segment.stream.close()
        return native

    def close(self) -> None:
        """Stop reading ahead. Idempotent."""
        while self._segments:
            stream = self._segments.popleft().stream
            if stream is not None:
                stream.close()
