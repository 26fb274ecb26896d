"""A dataset as Grain's data source, as far as it goes without Grain; see ``cases_grain``."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

import dlfs
from dlfs.adapters.grain import Source
from tests.unit.adapters.conftest import COUNT


def checksum(index: int, sample: memoryview) -> tuple[int, int]:
    return index, int(np.frombuffer(sample, np.uint8).sum())


def test_elements_are_samples(numbers, ordered):
    source = Source(numbers)
    assert len(source) == COUNT
    assert [source[index] for index in range(COUNT)] == ordered
    assert source[-1] == source[np.int64(COUNT - 1)] == ordered[-1]
    for wrong in (COUNT, -COUNT - 1):
        with pytest.raises(IndexError, match=f"sample {wrong} of {COUNT}"):
            source[wrong]


def test_several_elements_are_one_read(numbers, ordered, reads):
    wanted = [5, np.int64(299), 5, -1]
    assert Source(numbers).__getitems__(wanted) == [ordered[index] for index in wanted]
    got = Source(numbers, checksum).__getitems__(wanted)
    assert got == [(index % COUNT, sum(ordered[index])) for index in wanted]
    assert reads == [4, 4]
    assert Source(numbers).__getitems__([]) == []
    with pytest.raises(IndexError, match=f"sample {COUNT} of {COUNT}"):
        Source(numbers).__getitems__([COUNT])


@pytest.mark.parametrize("as_mask", [False, True])
def test_a_source_of_some_samples(numbers, ordered, as_mask):
    chosen = [9, 250, 3]
    mask = np.isin(np.arange(COUNT), chosen)
    source = Source(numbers, checksum, where=mask if as_mask else chosen)
    expected = [(index, sum(ordered[index])) for index in sorted(chosen)]
    assert (len(source), list(source)) == (3, expected)
    assert source.__getitems__([2, -3, 2]) == [expected[2], expected[0], expected[2]]
    with pytest.raises(IndexError, match="sample 3 of 3 in Source"):
        source[3]
    assert pickle.loads(pickle.dumps(source))[1] == expected[1]
    assert len(Source(numbers, where=[])) == 0


def test_a_source_in_an_order(numbers, ordered):
    draws = numbers.sequence(weights=np.arange(COUNT), draws=1000, seed=7).indices()
    source = Source(numbers, order=draws)
    assert list(source) == [ordered[index] for index in draws.tolist()]
    with pytest.raises(dlfs.UsageError, match="expected order alone"):
        Source(numbers, where=[1], order=[1])
    with pytest.raises(dlfs.UsageError, match=f"expected order 0..{COUNT - 1}, got {COUNT}"):
        Source(numbers, order=[COUNT])


@pytest.mark.parametrize("where", [None, [4, 8, 15, 16, 23, 42]])
def test_a_weighted_source_has_the_draws_of_its_epoch(numbers, ordered, where):
    choice = {"weights": np.arange(COUNT), "draws": 100, "where": where}
    sources = [Source(numbers, seed=7, epoch=epoch, **choice) for epoch in range(3)]
    for epoch, source in enumerate(sources):
        with numbers.batches(100, seed=7, epoch=epoch, **choice) as batches:
            drawn = next(batches).indices.tolist()
        assert (len(source), list(source)) == (100, [ordered[index] for index in drawn])
        assert repr(pickle.loads(pickle.dumps(source))) == repr(source)
    assert len({repr(source) for source in sources}) == 3
    with pytest.raises(dlfs.UsageError, match="expected weights with draws"):
        Source(numbers, draws=3)


def test_a_checkpoint_of_other_samples_is_told_apart(numbers):
    names = [{}, {"where": [1, 2]}, {"where": [1, 3]}, {"order": [2, 1]}, {"order": range(COUNT)}]
    assert len({repr(Source(numbers, **chosen)) for chosen in names}) == len(names)
    assert repr(Source(numbers, where=[2, 1])) == repr(Source(numbers, order=[1, 2]))


def test_a_source_is_named_by_its_dataset_and_survives_a_pickle(numbers):
    source = Source(numbers, checksum)
    loaded = pickle.loads(pickle.dumps(source))
    assert repr(loaded) == repr(source)
    assert numbers.digests.content in repr(source)
    assert loaded[3] == source[3]
    loaded.dataset.close()
