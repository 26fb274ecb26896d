"""A dataset as Grain's data source, with Grain itself; ``test_isolated`` runs them."""

from __future__ import annotations

import multiprocessing

import grain
import numpy as np
import pytest
from absl import flags

from dlfs.adapters.grain import Source
from tests.support.documents import run_framework
from tests.unit.adapters.conftest import COUNT
from tests.unit.adapters.test_grain import checksum

flags.FLAGS(["tests"])  # as absl's main does for Grain's worker processes


def test_grain_takes_it_for_its_own(numbers):
    assert isinstance(Source(numbers), grain.sources.RandomAccessDataSource)


def test_a_shuffled_and_batched_epoch(numbers, ordered):
    data = grain.MapDataset.source(Source(numbers, checksum)).seed(7).shuffle().batch(16)
    indices = np.concatenate([batch[0] for batch in data])
    sums = np.concatenate([batch[1] for batch in data])
    assert sorted(indices.tolist()) == list(range(COUNT))
    assert indices.tolist() != list(range(COUNT))
    assert sums.tolist() == [sum(ordered[index]) for index in indices]


def test_batches_are_one_read_each(numbers, ordered, reads):
    source = Source(numbers)
    data = grain.MapDataset.source(source).slice(slice(0, 40))
    assert data._getitems([3, 1, 39]) == [ordered[3], ordered[1], ordered[39]]
    indices = grain.MapDataset.range(COUNT).seed(7).shuffle().batch(16)
    whole = [sample for batch in indices.map(source.__getitems__) for sample in batch]
    assert sorted(whole) == sorted(ordered)
    assert reads[0] == 3
    assert sorted(reads[1:]) == [COUNT % 16, *[16] * (COUNT // 16)]  # in threads, in any order


def iterate(source, workers, epochs=1):
    loader = grain.DataLoader(
        data_source=source,
        sampler=grain.samplers.IndexSampler(
            len(source),
            shuffle=True,
            seed=3,
            num_epochs=epochs,
            shard_options=grain.sharding.NoSharding(),
        ),
        operations=[grain.transforms.Batch(20)],
        worker_count=workers,
    )
    return iter(loader)


CHOICES = {
    "where": {"where": np.arange(COUNT) % 3 == 0},
    "weights": {"weights": np.arange(COUNT), "draws": 200, "seed": 5},
    "order": {"order": np.arange(COUNT)[::-1]},
}


@pytest.mark.parametrize("name", CHOICES)
def test_chosen_samples_are_resumed(numbers, name):
    source = Source(numbers, checksum, **CHOICES[name])
    expected = sorted(source[at][0] for at in range(len(source)))
    first = iterate(source, 0)
    begun = [next(first)[0].tolist() for _ in range(3)]
    state = first.get_state()
    rest = [batch[0].tolist() for batch in first]
    assert sorted(index for batch in begun + rest for index in batch) == expected
    second = iterate(source, 0)
    second.set_state(state)
    assert [batch[0].tolist() for batch in second] == rest
    with pytest.raises(ValueError, match="in checkpoint does not match"):
        iterate(Source(numbers, checksum), 0).set_state(state)


def test_worker_processes_and_checkpoints(numbers):
    """Three epochs; resumed in the first one, in the place of a worker that was killed, too."""

    def begin(state=None):
        batches = iterate(Source(numbers, checksum), 2, epochs=3)
        if state is not None:
            batches.set_state(state)
        return batches

    first = begin()
    begun = [next(first)[0].tolist() for _ in range(4)]
    state = first.get_state()
    rest = [batch[0].tolist() for batch in first]
    given = [index for batch in begun + rest for index in batch]
    assert np.unique(given, return_counts=True)[1].tolist() == [3] * COUNT
    others = multiprocessing.active_children()
    second = begin(state)
    assert [next(second)[0].tolist() for _ in range(3)] == rest[:3]
    next(child for child in multiprocessing.active_children() if child not in others).kill()
    with pytest.raises(RuntimeError, match="terminated unexpectedly"):
        list(second)
    assert [batch[0].tolist() for batch in begin(state)] == rest


def test_the_documented_example(tmp_path):
    run_framework("Grain", tmp_path)
