"""A dataset as Grain's data source, with the real Grain and, where it is installed, JAX."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

import dlfs
from dlfs.adapters.grain import Source
from tests.unit.adapters.conftest import COUNT


@pytest.fixture
def dataset(volume_path):
    with dlfs.open(str(volume_path)) as volume, volume["numbers"] as opened:
        yield opened


@pytest.fixture
def ordered(samples) -> list[bytes]:
    return [samples[path] for path in sorted(samples)]


def checksum(index: int, sample: memoryview) -> tuple[int, int]:
    return index, int(np.frombuffer(sample, np.uint8).sum())


def test_elements_are_samples(dataset, ordered):
    source = Source(dataset)
    assert len(source) == COUNT
    assert [source[index] for index in range(COUNT)] == ordered
    assert source[-1] == source[np.int64(COUNT - 1)] == ordered[-1]
    for wrong in (COUNT, -COUNT - 1):
        with pytest.raises(IndexError, match=f"sample {wrong} of {COUNT}"):
            source[wrong]


def test_several_elements_are_one_read(dataset, ordered, monkeypatch):
    sizes: list[int] = []
    read = dlfs.Dataset.read
    monkeypatch.setattr(
        dlfs.Dataset,
        "read",
        lambda self, wanted: (sizes.append(len(wanted)), read(self, wanted))[1],
    )
    wanted = [5, np.int64(299), 5, -1]
    assert Source(dataset).__getitems__(wanted) == [ordered[index] for index in wanted]
    got = Source(dataset, checksum).__getitems__(wanted)
    assert got == [(index % COUNT, sum(ordered[index])) for index in wanted]
    assert sizes == [4, 4]
    assert Source(dataset).__getitems__([]) == []
    with pytest.raises(dlfs.UsageError):
        Source(dataset).__getitems__([COUNT])


def test_a_source_is_named_by_its_dataset_and_survives_a_pickle(dataset):
    source = Source(dataset, checksum)
    loaded = pickle.loads(pickle.dumps(source))
    assert repr(loaded) == repr(source)
    assert str(dataset.uuid) in repr(source)
    assert loaded[3] == source[3]
    loaded.dataset.close()


# ---- with Grain ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def grain():
    grain = pytest.importorskip("grain", reason="no grain (pip install grain)")
    from absl import flags

    flags.FLAGS(["tests"])  # as absl's main does for Grain's worker processes
    return grain


def test_grain_takes_it_for_its_own(grain, dataset):
    assert isinstance(Source(dataset), grain.sources.RandomAccessDataSource)


def test_a_shuffled_and_batched_epoch(grain, dataset, ordered, monkeypatch):
    data = grain.MapDataset.source(Source(dataset, checksum)).seed(7).shuffle().batch(16)
    indices = np.concatenate([batch[0] for batch in data])
    sums = np.concatenate([batch[1] for batch in data])
    assert sorted(indices.tolist()) == list(range(COUNT))
    assert indices.tolist() != list(range(COUNT))
    assert sums.tolist() == [sum(ordered[index]) for index in indices]


def test_batches_are_one_read_each(grain, dataset, ordered, monkeypatch):
    sizes: list[int] = []
    read = dlfs.Dataset.read
    monkeypatch.setattr(
        dlfs.Dataset,
        "read",
        lambda self, wanted: (sizes.append(len(wanted)), read(self, wanted))[1],
    )
    source = Source(dataset)
    data = grain.MapDataset.source(source).slice(slice(0, 40))
    assert data._getitems([3, 1, 39]) == [ordered[3], ordered[1], ordered[39]]
    indices = grain.MapDataset.range(COUNT).seed(7).shuffle().batch(16)
    whole = [sample for batch in indices.map(source.__getitems__) for sample in batch]
    assert sorted(whole) == sorted(ordered)
    assert sizes == [3, *[16] * (COUNT // 16), COUNT % 16]


def test_worker_processes_and_checkpoints(grain, dataset):
    def iterate():
        loader = grain.DataLoader(
            data_source=Source(dataset, checksum),
            sampler=grain.samplers.IndexSampler(
                COUNT, shuffle=True, seed=3, num_epochs=1, shard_options=grain.sharding.NoSharding()
            ),
            operations=[grain.transforms.Batch(20)],
            worker_count=2,
        )
        return iter(loader)

    first = iterate()
    begun = [next(first)[0].tolist() for _ in range(4)]
    state = first.get_state()
    rest = [batch[0].tolist() for batch in first]
    assert sorted(index for batch in begun + rest for index in batch) == list(range(COUNT))
    second = iterate()
    second.set_state(state)
    assert [batch[0].tolist() for batch in second] == rest


def test_jax_takes_stacked_batches(make_volume):
    jax = pytest.importorskip("jax", reason="no jax (pip install jax)")
    arrays = {f"{n:03}": np.full((4, 8), n, np.float32) for n in range(64)}
    path = make_volume(arrays={name: array.tobytes() for name, array in arrays.items()})
    with dlfs.open(str(path)) as volume, volume["arrays"] as opened:
        with opened.read([3, 60, 7]) as batch:
            on_device = jax.device_put(batch.stack(np.float32, (4, 8)))
        opened.read(range(64))
        assert on_device.shape == (3, 4, 8)
        assert on_device.sum(axis=(1, 2)).tolist() == [3 * 32, 60 * 32, 7 * 32]
