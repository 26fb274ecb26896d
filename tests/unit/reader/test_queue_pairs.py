"""More threads and epochs than a target has queues: all are served."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import dlfs
from tests.support.nvme import ScriptedTarget, Settings
from tests.unit.store.nodes import SAMPLES, make_volume, nqn, serve, subsystem

QUEUES = 4
THREADS = 12
CONTENTS = list(SAMPLES.values())


@pytest.fixture
def narrow(tmp_path: Path) -> Iterator[str]:
    """The URI of a volume on a target that allows a process few queue pairs."""
    _, (path,) = make_volume(tmp_path, "v", 1)
    made = subsystem("x", [serve(path)], settings=Settings(io_queues=QUEUES))
    with ScriptedTarget([made]) as target:
        yield f"nvme-tcp://127.0.0.1:{target.port}/{nqn('x')}?nsid=1"


def read_epochs(dataset: dlfs.Dataset, go: threading.Barrier) -> int:
    """Read three epochs, and return the number of their samples."""
    go.wait()
    seen = 0
    for epoch in range(3):
        for batch in dataset.batches(7, shuffle="global", epoch=epoch):
            assert batch.to_list() == [CONTENTS[index] for index in batch.indices]
            seen += len(batch)
    return seen


def test_more_epochs_at_once_than_a_target_has_queues(narrow: str) -> None:
    go = threading.Barrier(THREADS)
    with (
        dlfs.open(narrow, memory_bytes=1) as volume,
        volume["small"] as dataset,
        ThreadPoolExecutor(THREADS) as threads,
    ):
        seen = list(threads.map(lambda _: read_epochs(dataset, go), range(THREADS)))
        assert seen == [3 * len(SAMPLES)] * THREADS
        (member,) = dataset.member_stats()
        assert not member["lost"]
        assert 0 < member["queue_pairs"] <= member["queue_pairs_max"] == QUEUES
        (described,) = volume.info().members
        assert described.queue_pairs_max == QUEUES
