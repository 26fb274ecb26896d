"""Samples in a column of Arrow: written in batches of bounded size, read without a copy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from bench.datasets import WRITE_BYTES, Source
from bench.peers.packages import DATA, needed
from bench.peers.peer import Joined, touch


def joined(array: Any) -> Joined:
    """Return the samples of an Arrow array, ``large_binary[n]`` without nulls."""
    _, offsets, data = array.buffers()
    ends = np.frombuffer(offsets, np.int64, len(array) + 1, array.offset * 8)
    return Joined(ends, memoryview(b"" if data is None else data))


def gathered(column: Any) -> Joined:
    """Read the samples of a column, ``large_binary``, of a mapped file into memory."""
    if column.num_chunks > 1:
        return joined(column.combine_chunks())
    samples = joined(column.chunk(0))
    for position in range(len(samples)):
        touch(samples[position])
    return samples


def record_batches(source: Source) -> Iterator[Any]:
    """Yield the samples as record batches of one column, about `WRITE_BYTES` each."""
    pyarrow = needed("pyarrow")
    for first, last in source.ranges(WRITE_BYTES):
        samples = pyarrow.array(map(source.data, range(first, last)), pyarrow.large_binary())
        yield pyarrow.record_batch([samples], [DATA])
