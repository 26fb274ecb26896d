"""Epochs as tf.data datasets, with TensorFlow itself; ``test_isolated`` runs them."""

from __future__ import annotations

import json

import numpy as np
import pytest

import dlfs
from dlfs.adapters.tf import batches, example_parser
from tests.support.documents import run_framework
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


def indices_of(data):
    return [index for indices, _ in data.as_numpy_iterator() for index in indices.tolist()]


def test_chosen_samples(tensorflow, numbers, ordered):
    mask = np.arange(COUNT) % 7 == 0
    data = batches(numbers, 16, where=mask, seed=2)
    mask[:] = True  # the caller's own, by now
    expected = [
        [int(index) for batch in epoch for index in batch.indices]
        for epoch in (
            numbers.batches(16, where=range(0, COUNT, 7), seed=2, epoch=number) for number in (0, 1)
        )
    ]
    assert data.cardinality().numpy() == 3
    assert [indices_of(data), indices_of(data)] == expected
    for indices, taken in data.as_numpy_iterator():
        assert taken.tolist() == [ordered[index] for index in indices.tolist()]


def test_weighted_draws(tensorflow, numbers):
    weights = np.where(np.arange(COUNT) < 3, 1.0, 0)
    data = batches(numbers, 16, weights=weights, draws=100, drop_last=True)
    given = indices_of(data)
    assert (len(given), set(given)) == (96, {0, 1, 2})
    assert indices_of(data) != given


CHOICES = {
    "all": {},
    "where": {"where": np.arange(COUNT) % 3 == 0},
    "weights": {"weights": np.arange(COUNT), "draws": 200},
    "order": {"order": np.arange(COUNT)[::-1]},
}


def in_turn(ranks):
    longest = max(map(len, ranks))
    return [rank[at] for at in range(longest) for rank in ranks if at < len(rank)]


@pytest.mark.parametrize("name", CHOICES)
def test_resumed_at_another_world_size(tensorflow, numbers, name):
    choice = CHOICES[name]
    data = batches(numbers, 8, world_size=2, seed=4, epoch=1, with_state=True, **choice)
    states = [json.loads(state) for _, _, state in data.as_numpy_iterator()]
    expected = [
        [
            int(i)
            for batch in numbers.batches(COUNT, seed=4, epoch=epoch, **choice)
            for i in batch.indices
        ]
        for epoch in (1, 2)
    ]
    assert [state["position"] for state in states[:3]] == [16, 32, 48]
    ranks = [
        batches(numbers, 7, rank=rank, world_size=3, state=states[2], **choice) for rank in range(3)
    ]
    assert in_turn([indices_of(rank) for rank in ranks]) == expected[0][48:]
    assert in_turn([indices_of(rank) for rank in ranks]) == expected[1]
    assert indices_of(batches(numbers, 7, state=states[-1], **choice)) == expected[1]
    other = {"where": [1]}
    with pytest.raises(dlfs.UsageError, match="epoch over other samples"):
        batches(numbers, 7, state=states[2], **other)


def test_evaluation_in_index_order_by_ranks(tensorflow, numbers):
    data = [batches(numbers, 16, order=range(COUNT), rank=rank, world_size=2) for rank in (0, 1)]
    for _ in range(2):
        assert [indices_of(one) for one in data] == [list(range(rank, COUNT, 2)) for rank in (0, 1)]


def test_no_samples_at_all(tensorflow, numbers):
    for chosen in ({"order": []}, {"where": []}, {"where": np.zeros(COUNT, bool)}):
        assert indices_of(batches(numbers, 16, **chosen)) == []


def test_choices_that_do_not_go_together(tensorflow, numbers):
    with pytest.raises(dlfs.UsageError, match="expected order alone"):
        batches(numbers, 16, order=[1], where=[1])
    with pytest.raises(dlfs.NotFoundError, match="colour"):
        batches(numbers, 16, weights="colour")


def test_what_is_wrong(tensorflow, numbers):
    with pytest.raises(dlfs.UsageError, match="batch_size"):
        batches(numbers, 0)
    data = batches(numbers, 16, dtype=np.uint8, shape=(1,))
    with pytest.raises(tensorflow.errors.OpError, match="stack a batch: expected samples of 1"):
        list(data)


@pytest.fixture
def records(tensorflow, make_volume):
    def record(number):
        feature = {
            "image": tensorflow.train.Feature(
                bytes_list=tensorflow.train.BytesList(value=[bytes([number]) * number])
            ),
            "size": tensorflow.train.Feature(int64_list=tensorflow.train.Int64List(value=[number])),
        }
        features = tensorflow.train.Features(feature=feature)
        return tensorflow.train.Example(features=features).SerializeToString()

    path = make_volume(records={f"{n:03}": record(n) for n in range(40)})
    with dlfs.open(str(path)) as volume, volume["records"] as opened:
        yield opened


@pytest.fixture
def parse(tensorflow):
    return example_parser(
        {
            "image": tensorflow.io.FixedLenFeature([], tensorflow.string),
            "size": tensorflow.io.FixedLenFeature([], tensorflow.int64),
        }
    )


def test_records_are_parsed_batch_by_batch(records, parse):
    sizes = []
    for batch in records.batches(16):
        with batch:
            parsed = parse(batch)
        assert parsed["image"].numpy().tolist() == [bytes([n]) * n for n in parsed["size"].numpy()]
        sizes += parsed["size"].numpy().tolist()
    assert sorted(sizes) == list(range(40))
    assert parse([])["image"].shape == (0,)


def test_a_sample_that_is_no_record_cannot_be_parsed(tensorflow, records, parse):
    with records.read([0, 1]) as batch:
        samples = [*batch, memoryview(b"no Example")]
        with pytest.raises(
            tensorflow.errors.InvalidArgumentError, match="Could not parse example input"
        ):
            parse(samples)


def test_the_documented_example(tmp_path):
    run_framework("TensorFlow", tmp_path)
