from __future__ import annotations

import random

import numpy as np
import pytest

from dlfs.base.units import MIB
from dlfs.format.geometry import ChunkRun, Geometry
from dlfs.format.run_arrays import complement, to_array, to_runs, unite


@pytest.mark.parametrize(
    ("runs", "united"),
    [
        ([], []),
        ([(5, 2), (0, 3)], [(0, 3), (5, 2)]),
        ([(3, 2), (0, 3)], [(0, 5)]),
        ([(0, 10), (2, 3), (9, 2), (12, 1)], [(0, 11), (12, 1)]),
        ([(4, 4), (4, 4), (4, 2)], [(4, 4)]),
    ],
)
def test_runs_that_overlap_are_united(
    runs: list[tuple[int, int]], united: list[tuple[int, int]]
) -> None:
    assert unite(np.array(runs, np.uint64).reshape(-1, 2)).tolist() == [list(run) for run in united]


def test_the_complement_has_every_other_chunk_of_every_group() -> None:
    geometry = Geometry.of_one_group(2, 4096, 512, MIB, 10)
    (group,) = geometry.groups
    groups = [
        ChunkRun(5, 20), ChunkRun(26, 20), ChunkRun(60, 20),
    ]  # fmt: skip
    geometry = geometry.with_groups([type(group)(run.first_chunk, 0, 2, 10) for run in groups])
    chunks = {chunk for run in groups for chunk in range(run.first_chunk, run.end_chunk)}
    for seed in range(50):
        chance = random.Random(seed)
        used = {chunk for chunk in chunks if chance.random() < seed / 49}
        runs = to_array(ChunkRun(chunk, 1) for chunk in chance.sample(sorted(used), len(used)))
        free = to_runs(complement(geometry, runs))
        assert {c for run in free for c in range(run.first_chunk, run.end_chunk)} == chunks - used
        assert all(any(group.has(run) for group in geometry.groups) for run in free)
        ends = [run.end_chunk for run in free]
        assert all(run.first_chunk > end for run, end in zip(free[1:], ends, strict=False))
