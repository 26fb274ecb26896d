"""Runs of chunks as arrays: ``uint64[n, 2]`` of first chunk and number of chunks.

A catalog has up to 262,144 runs. These functions sort, unite and complement them without an object
for each. Plain values without I/O.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from dlfs.format.geometry import ChunkRun, Geometry

RunArray = NDArray[np.uint64]


def to_array(runs: Iterable[ChunkRun]) -> RunArray:
    """Return runs as an array."""
    pairs = [(run.first_chunk, run.chunk_count) for run in runs]
    return np.array(pairs, np.uint64).reshape(-1, 2)


def to_runs(array: RunArray) -> tuple[ChunkRun, ...]:
    """Return the runs of an array."""
    return tuple(ChunkRun(first, count) for first, count in array.tolist())


def unite(runs: RunArray) -> RunArray:
    """Return the chunks of some runs as sorted runs with gaps between them; runs may overlap."""
    runs = runs[runs[:, 1] > 0]
    if not len(runs):
        return runs
    order = np.argsort(runs[:, 0], kind="stable")
    first = runs[order, 0]
    ends = np.maximum.accumulate(first + runs[order, 1])
    begins = np.flatnonzero(np.concatenate([[True], first[1:] > ends[:-1]]))
    lasts = np.append(begins[1:], len(first)) - 1
    return np.stack([first[begins], ends[lasts] - first[begins]], axis=1)


def complement(geometry: Geometry, used: RunArray) -> RunArray:
    """Return the runs of all chunks of a volume that are not used.

    Args:
        geometry: geometry of the volume.
        used: runs that are used, each in one group of members.
    """
    united = unite(np.concatenate([used, gaps(geometry)]))
    ends = united[:, 0] + united[:, 1]
    starts = np.concatenate([np.zeros(1, np.uint64), ends])
    bounds = np.append(united[:, 0], np.uint64(geometry.groups[-1].end_chunk))
    free = starts < bounds
    return np.stack([starts[free], bounds[free] - starts[free]], axis=1)


def gaps(geometry: Geometry) -> RunArray:
    """Return the numbers of chunks below and between the groups, which are of no chunk."""
    found, end = [], 0
    for group in geometry.groups:
        if group.first_chunk > end:
            found.append(ChunkRun(end, group.first_chunk - end))
        end = group.end_chunk
    return to_array(found)
