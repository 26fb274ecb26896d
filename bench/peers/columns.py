"""Samples in a column of Arrow: written in batches of bounded size, read without a copy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.datasets import WRITE_BYTES, Source
from bench.peers.packages import needed
from bench.peers.peer import touch

INDEX, DATA = "index", "data"


class ColumnSamples:
    """A batch whose samples follow each other in the memory of one Arrow array.

    Args:
        array: ``large_binary[n]``, without nulls.
        indices: indices of the samples, ``int64[n]``; None: 0..n-1.
    """

    def __init__(self, array: Any, indices: NDArray[np.int64] | None = None) -> None:
        _, offsets, data = array.buffers()
        self._ends = np.frombuffer(offsets, np.int64, len(array) + 1, array.offset * 8)
        self._data = memoryview(b"" if data is None else data)
        self.lengths: NDArray[np.integer] = np.diff(self._ends)
        self.indices: NDArray[np.integer] = np.arange(len(array)) if indices is None else indices

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, position: int) -> memoryview:
        return self._data[self._ends[position] : self._ends[position + 1]]


def gathered(column: Any, indices: NDArray[np.int64] | None = None) -> ColumnSamples:
    """Read the samples of a column of a mapped file into memory.

    Args:
        column: ``ChunkedArray`` of ``large_binary``, at least one chunk.
        indices: as in `ColumnSamples`.
    """
    if column.num_chunks > 1:
        return ColumnSamples(column.combine_chunks(), indices)
    samples = ColumnSamples(column.chunk(0), indices)
    for position in range(len(samples)):
        touch(samples[position])
    return samples


def record_batches(source: Source) -> Iterator[Any]:
    """Yield the samples as record batches of one column, about `WRITE_BYTES` each."""
    pyarrow = needed("pyarrow")
    pending: list[bytes] = []
    pending_bytes = 0
    for index, _, data in source:
        pending.append(data)
        pending_bytes += len(data)
        if pending_bytes >= WRITE_BYTES or index == len(source) - 1:
            yield pyarrow.record_batch([pyarrow.array(pending, pyarrow.large_binary())], [DATA])
            pending, pending_bytes = [], 0
