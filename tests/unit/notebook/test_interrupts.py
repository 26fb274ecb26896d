"""Ctrl-C in a cell that loops over an epoch: the next cell goes on, and no batch is lost."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dlfs
from dlfs.base.units import KIB, MIB

SAMPLES = 400
BATCH = 4

LOOP = """
for batch in epoch:
    seen.append(batch)
    time.sleep(0.001)
"""
NEXT = """
while (batch := next(epoch, None)) is not None:
    seen.append(batch)
"""
RESUMED = """
state = epoch.state()
epoch = dataset.batches(BATCH, seed=5).resume(state)
for batch in epoch:
    seen.append(batch)
    time.sleep(0.001)
"""


@pytest.fixture
def dataset(tmp_path: Path) -> Iterator[dlfs.Dataset]:
    path = str(tmp_path / "v.img")
    dlfs.format_volume(path, size_bytes=16 * MIB, chunk_bytes=16 * KIB)
    with dlfs.open(path, memory_bytes=MIB) as volume:
        with volume.writer("digits") as writer:
            for number in range(SAMPLES):
                writer.add(f"{number:04}", b"%d " % number * 100)
        with volume["digits"] as opened:
            yield opened


def run_cell(cell: str, names: dict[str, Any], delay_s: float) -> bool:
    """Run a cell, and interrupt it as Ctrl-C does; return True if it had not ended before."""
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, delay_s)
            exec(compile(cell, "<cell>", "exec"), names)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        return True
    finally:
        signal.signal(signal.SIGALRM, before)
    return False


def indices_of(batches: Iterable[dlfs.Batch]) -> list[int]:
    return [*chain.from_iterable(batch.indices.tolist() for batch in batches)]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("cell", [LOOP, RESUMED], ids=["loop", "state"])
@pytest.mark.parametrize("make", [lambda d: d, lambda d: dlfs.concat([d])], ids=["dataset", "view"])
def test_an_interrupted_cell_loses_nothing(
    dataset: dlfs.Dataset, make: Callable[[dlfs.Dataset], Any], cell: str
) -> None:
    random = np.random.default_rng(0)
    readable = make(dataset)
    order = indices_of(readable.batches(BATCH, seed=5))
    interrupted = 0
    while not interrupted:  # Python ignores an interrupt that it finds in a destructor
        names: dict[str, Any] = {"dataset": readable, "seen": [], "BATCH": BATCH}
        exec("import time\nepoch = dataset.batches(BATCH, seed=5)", names)
        cells = 0
        while len(names["seen"]) < SAMPLES // BATCH:
            cells += 1  # later cells have more time, so that a busy machine comes to the end, too
            if run_cell(cell, names, cells * random.uniform(0.0005, 0.02)):
                interrupted += 1
                assert not names["seen"] or names["batch"] is names["seen"][-1]
        assert indices_of(names["seen"]) == order


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_loop_that_is_continued_by_next(dataset: dlfs.Dataset) -> None:
    names: dict[str, Any] = {"dataset": dataset, "seen": [], "BATCH": BATCH}
    exec("import time\nepoch = dataset.batches(BATCH, seed=5)", names)
    run_cell(LOOP, names, 0.005)
    run_cell(NEXT, names, 60)
    assert sorted(indices_of(names["seen"])) == [*range(SAMPLES)]
