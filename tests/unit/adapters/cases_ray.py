"""A dataset as Ray Data's data source, with Ray itself; ``test_isolated`` runs them."""

from __future__ import annotations

import os
import pickle
import signal

import numpy as np
import pytest
import ray
from ray.data import DataContext

from dlfs.adapters.ray import Source
from dlfs.errors import UsageError
from tests.support.documents import run_framework
from tests.unit.adapters.conftest import COUNT
from tests.unit.adapters.test_arrow import scenes, scenes_path  # noqa: F401  fixtures

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray warns of its own settings


@pytest.fixture(scope="session", autouse=True)
def cluster():
    """A cluster of this machine, for all tests."""
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    DataContext.get_current().enable_progress_bars = False
    yield
    ray.shutdown()


@pytest.mark.parametrize("parallelism", [1, 2, 7, 64, 1000])
def test_tasks_read_every_sample_once(numbers, ordered, parallelism):
    tasks = Source(numbers).get_read_tasks(parallelism)
    assert len(tasks) == min(parallelism, COUNT)
    tables = [table for task in pickle.loads(pickle.dumps(tasks)) for table in task()]
    assert sum(task.metadata.num_rows for task in tasks) == COUNT
    assert sum(task.metadata.size_bytes for task in tasks) == sum(map(len, ordered))
    rows = [row for table in tables for row in table.to_pylist()]
    assert sorted(row["index"] for row in rows) == list(range(COUNT))
    assert all(row["sample"] == ordered[row["index"]] for row in rows)


@pytest.mark.parametrize("blocks", [1, 5])
def test_epochs_in_a_cluster(numbers, ordered, blocks):
    for epoch in range(3):
        source = Source(numbers, shuffle="global", seed=3, epoch=epoch)
        rows = ray.data.read_datasource(source, override_num_blocks=blocks).take_all()
        assert sorted(row["index"] for row in rows) == list(range(COUNT))
        assert all(row["sample"] == ordered[row["index"]] for row in rows)


def test_a_worker_that_is_killed_loses_no_sample(numbers, tmp_path):
    mark = tmp_path / "killed"

    def double(batch):
        if 7 in batch["index"] and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return {"double": batch["index"] * 2}

    rows = ray.data.read_datasource(Source(numbers, columns=["index"]), override_num_blocks=4)
    found = rows.map_batches(double).take_all()
    assert mark.exists()
    assert sorted(row["double"] for row in found) == list(range(0, 2 * COUNT, 2))


def test_fields_are_tensors(scenes):  # noqa: F811
    source = Source(scenes, columns=["label", "box", "mask", "caption"], where=np.arange(60) > 19)
    rows = ray.data.read_datasource(source, override_num_blocks=3)
    found = {row["label"]: row for row in rows.take_all()}
    assert sorted(found) == list(range(20, 60))
    for number, row in found.items():
        assert row["box"].tolist() == [[number, number + 1], [number + 2, number + 3]]
        assert row["mask"].shape == (number % 4, 1 + number % 2)
        assert (row["mask"] == number).all()
        assert row["caption"] == f"scene {number}"
    batch = next(iter(rows.iter_batches(batch_size=10)))
    assert batch["box"].shape == (10, 2, 2)


def test_what_is_wrong(numbers):
    with pytest.raises(UsageError, match="expected columns"):
        Source(numbers, columns=["label"])


def test_the_documented_example(tmp_path):
    run_framework("Ray Data", tmp_path)
