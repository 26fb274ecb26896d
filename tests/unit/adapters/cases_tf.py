"""Epochs as tf.data datasets, with TensorFlow itself; ``test_isolated`` runs them."""

from __future__ import annotations

import numpy as np
import pytest

import dlfs
from dlfs.adapters.tf import batches
from tests.unit.adapters.conftest import COUNT

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def tensorflow():
    import tensorflow

    return tensorflow


@pytest.fixture(scope="module")
def arrays_path(make_volume):
    made = {f"{n:03}": np.full((4, 8), n, np.float32).tobytes() for n in range(50)}
    return make_volume(arrays=made)


@pytest.fixture
def arrays(arrays_path):
    with dlfs.open(str(arrays_path)) as volume, volume["arrays"] as opened:
        yield opened


def test_byte_strings_epoch_by_epoch(tensorflow, numbers, ordered):
    data = batches(numbers, 16, seed=3, epoch=5)
    assert data.element_spec[1].dtype == tensorflow.string
    assert data.cardinality().numpy() == len(numbers.batches(16))
    for epoch in (5, 6):
        got = list(data.as_numpy_iterator())
        expected = list(numbers.batches(16, seed=3, epoch=epoch))
        assert len(got) == len(expected)
        for (indices, taken), batch in zip(got, expected, strict=True):
            assert indices.tolist() == batch.indices.tolist()
            assert taken.tolist() == [ordered[index] for index in indices]


def test_arrays_of_known_shape(tensorflow, arrays):
    data = batches(arrays, 16, dtype=np.float32, shape=(4, 8), drop_last=True)
    spec = data.element_spec[1]
    assert (spec.shape.as_list(), spec.dtype) == ([16, 4, 8], tensorflow.float32)
    seen = []
    for indices, taken in data.map(lambda indices, taken: (indices, taken * 2)):
        assert taken.shape == (16, 4, 8)
        assert (taken.numpy()[:, 3, 7] == 2 * indices.numpy()).all()
        seen += indices.numpy().tolist()
    assert len(seen) == len(set(seen)) == 48


def test_ranks_share_an_epoch(tensorflow, numbers):
    whole: list[int] = []
    for rank in range(2):
        data = batches(numbers, 16, rank=rank, world_size=2)
        whole += [index for indices, _ in data.as_numpy_iterator() for index in indices.tolist()]
    assert sorted(whole) == list(range(COUNT))


def test_what_is_wrong(tensorflow, numbers):
    with pytest.raises(dlfs.UsageError, match="batch_size"):
        batches(numbers, 0)
    data = batches(numbers, 16, dtype=np.uint8, shape=(1,))
    with pytest.raises(tensorflow.errors.OpError, match="stack a batch: expected samples of 1"):
        list(data)
