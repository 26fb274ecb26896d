"""A dataset as a Dask bag and a dataframe, with Dask itself; ``test_isolated`` runs them."""

from __future__ import annotations

import dask
import numpy as np
import pytest

import dlfs
from dlfs.adapters.dask import bag, dataframe
from dlfs.errors import UsageError
from tests.support.documents import run_framework
from tests.support.volumes import new_volume
from tests.unit.adapters.conftest import COUNT
from tests.unit.adapters.test_arrow import scenes, scenes_path  # noqa: F401  fixtures
from tests.unit.adapters.test_grain import checksum


@pytest.mark.parametrize(
    ("scheduler", "npartitions"), [("sync", 1), ("sync", 50), ("threads", 7), ("processes", 7)]
)
def test_every_sample_is_in_a_bag_once(numbers, ordered, scheduler, npartitions):
    made = bag(numbers, npartitions, decode=checksum)
    assert made.npartitions == min(npartitions, COUNT)
    with dask.config.set(scheduler=scheduler, num_workers=2):
        for _ in range(3 if scheduler != "processes" else 1):
            found = made.compute()
            assert sorted(found) == [(index, sum(data)) for index, data in enumerate(ordered)]


def test_a_bag_of_some_samples(numbers, ordered):
    with dask.config.set(scheduler="sync"):
        found = bag(numbers, 1000, where=[5, 250, 7]).compute()
        assert sorted(found) == sorted(ordered[index] for index in (5, 7, 250))
        assert bag(numbers, where=[]).compute() == []
    with pytest.raises(UsageError, match="parts"):
        bag(numbers, 0)


def test_a_dataframe_is_partitioned_by_ranges(scenes):  # noqa: F811
    frame = dataframe(scenes, 7)
    assert frame.npartitions == 7
    assert frame.known_divisions
    with dask.config.set(scheduler="threads", num_workers=2):
        whole = frame.compute()
        assert whole.index.tolist() == list(range(60))
        assert whole.caption.tolist() == [f"scene {number}" for number in range(60)]
        assert whole.image[33] == bytes([33]) * 13
        assert np.stack(whole.points[5]).tolist() == [[5, 5], [5, 5]]
        some = frame.loc[10:19, ["label", "light"]].compute()
    assert some.label.tolist() == list(range(10, 20))


def test_a_dataframe_of_attributes_reads_no_sample(scenes):  # noqa: F811
    before = scenes.stats()
    with dask.config.set(scheduler="sync"):
        frame = dataframe(scenes, 4, columns=["light"])
        assert frame.light.sum().compute() == sum(range(60)) / 4
    assert scenes.stats() == before


def test_a_dataset_without_samples(tmp_path):
    with dlfs.open(new_volume(tmp_path / "volume.img", size_bytes=16 << 20)) as volume:
        with volume.writer("none"):
            pass
        with volume["none"] as none, dask.config.set(scheduler="sync"):
            assert len(dataframe(none).compute()) == 0
            assert bag(none).compute() == []


def test_the_documented_example(tmp_path):
    run_framework("Dask", tmp_path)
