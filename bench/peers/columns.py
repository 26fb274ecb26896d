"""Samples in a column of Arrow: written a bounded batch at a time, read without a copy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.peers.packages import WRITE_BYTES, needed
from bench.peers.peer import Source, touch

INDEX, DATA = "index", "data"


class ColumnSamples:
    """A batch whose samples lie one behind the other in the memory of one Arrow array.

    Args:
        array: ``large_binary[n]``, without nulls.
        indices: of the samples, ``int64[n]``; may be left out.
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
    """The samples of a column of many small chunks of a mapped file, read into memory.

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
    """The samples as record batches of about `WRITE_BYTES`, one column."""
    pyarrow = needed("pyarrow")
    held: list[bytes] = []
    held_bytes = 0
    for _, _, data in source:
        held.append(data)
        held_bytes += len(data)
        if held_bytes >= WRITE_BYTES:
            yield pyarrow.record_batch([pyarrow.array(held, pyarrow.large_binary())], [DATA])
            held, held_bytes = [], 0
    if held:
        yield pyarrow.record_batch([pyarrow.array(held, pyarrow.large_binary())], [DATA])
