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
    with pytest.raises(dlfs.UsageError):
        Source(numbers).__getitems__([COUNT])


def test_a_source_is_named_by_its_dataset_and_survives_a_pickle(numbers):
    source = Source(numbers, checksum)
    loaded = pickle.loads(pickle.dumps(source))
    assert repr(loaded) == repr(source)
    assert str(numbers.uuid) in repr(source)
    assert loaded[3] == source[3]
    loaded.dataset.close()
