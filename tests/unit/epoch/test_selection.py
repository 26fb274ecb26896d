"""Filtered, weighted and explicit orders: exact, dealt out, resumed, refused, read ahead."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import dlfs
from dlfs.base.units import KIB, MIB
from dlfs.errors import NotFoundError, UsageError
from dlfs.reader import Epoch

COUNT = 1000
LABELS = np.arange(COUNT) % 10
WEIGHTS = (np.arange(COUNT) % 7).astype(np.float64)
TINY = 64 * KIB


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = str(tmp_path_factory.mktemp("selection") / "volume.img")
    dlfs.format_volume(made, size_bytes=16 * MIB, chunk_bytes=16 * KIB)
    with dlfs.open(made) as volume, volume.writer("ds") as writer:
        for index in range(COUNT):
            attributes = {"label": LABELS[index], "weight": WEIGHTS[index], "name": str(index)}
            writer.add(b"%04d" % index, content(index), attributes=attributes)
    return made


@pytest.fixture(params=[64 * MIB, TINY], ids=["kept", "not kept"])
def dataset(path: str, request: pytest.FixtureRequest) -> Iterator[dlfs.Dataset]:
    """With memory for all of it, and for a little."""
    with dlfs.open(path, memory_bytes=request.param) as volume, volume["ds"] as opened:
        yield opened


def content(index: int) -> bytes:
    return b"%d " % index * (1 + index % 300)


def taken(epoch: Epoch) -> list[int]:
    """The indices of an epoch; checks the samples' bytes."""
    found: list[int] = []
    with epoch:
        for batch in epoch:
            for index, view in zip(batch.indices.tolist(), batch, strict=True):
                assert bytes(view) == content(index)
                found.append(index)
            batch.release()
    return found


CHOICES: dict[str, dict[str, Any]] = {
    "mask": {"where": LABELS == 3},
    "most": {"where": LABELS != 3},
    "stored": {"where": LABELS < 5, "shuffle": None},
    "one": {"where": [7]},
    "none": {"where": []},
    "weights": {"weights": WEIGHTS},
    "column": {"weights": "weight"},
    "many draws": {"weights": "weight", "draws": 3000},
    "weighted part": {"where": LABELS == 3, "weights": "weight"},
    "order": {"order": np.arange(COUNT)[::-3]},
    "repeated": {"order": [5, 5, 5, 999, 0, 5] * 50},
}


@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
@pytest.mark.parametrize("plan", ["auto", "direct", "chunks", "chunk_copy"])
def test_every_plan_reads_the_same_order(
    dataset: dlfs.Dataset, choice: dict[str, Any], plan: str
) -> None:
    expected = dataset.sequence(seed=3, epoch=1, **choice).indices().tolist()
    epoch = dataset.batches(64, seed=3, epoch=1, plan=plan, **choice)
    assert len(epoch) == -(-len(expected) // 64)
    assert taken(epoch) == expected


@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
def test_ranks_and_workers_share_an_order(dataset: dlfs.Dataset, choice: dict[str, Any]) -> None:
    whole = dataset.sequence(seed=5, **choice).indices().tolist()
    for world in (2, 3):
        ranks = [
            taken(dataset.batches(10, seed=5, rank=rank, world_size=world, **choice))
            for rank in range(world)
        ]
        assert [rank == whole[r::world] for r, rank in enumerate(ranks)] == [True] * world
    workers = [
        taken(dataset.batches(10, seed=5, worker=worker, workers=2, **choice))
        for worker in range(2)
    ]
    by_batch = [whole[at : at + 10] for at in range(0, len(whole), 10)]
    for worker in range(2):
        assert workers[worker] == [index for batch in by_batch[worker::2] for index in batch]


@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
def test_an_epoch_is_resumed_at_another_world_size(
    dataset: dlfs.Dataset, choice: dict[str, Any]
) -> None:
    whole = dataset.sequence(seed=5, epoch=2, **choice).indices().tolist()
    with dataset.batches(8, seed=5, epoch=2, **choice) as epoch:
        before = [index for _ in range(min(3, len(epoch))) for index in next(epoch).indices]
        state = epoch.state()
    assert before == whole[:24]
    ranks = [
        taken(dataset.batches(5, rank=rank, world_size=3, **choice).resume(state))
        for rank in range(3)
    ]
    assert ranks == [whole[24:][rank::3] for rank in range(3)]


def test_a_filtered_epoch_has_each_sample_once(dataset: dlfs.Dataset) -> None:
    expected = np.flatnonzero(LABELS == 3).tolist()
    orders = [
        dataset.sequence(where=where, seed=seed, epoch=epoch).indices().tolist()
        for where in (LABELS == 3, expected[::-1], np.array(expected, np.uint16))
        for seed in (1, 2)
        for epoch in (0, 1)
    ]
    assert all(sorted(order) == expected for order in orders)
    assert orders[:4] == orders[4:8] == orders[8:]  # however the selection is said
    assert len({tuple(order) for order in orders}) == 4


def test_storage_order_of_a_selection(dataset: dlfs.Dataset) -> None:
    order = dataset.sequence(where=LABELS < 5, shuffle=None).indices()
    assert sorted(order.tolist()) == np.flatnonzero(LABELS < 5).tolist()
    assert np.all(np.diff(dataset.directory.addresses(order).astype(np.int64)) > 0)


def test_draws_are_in_proportion_to_weights(dataset: dlfs.Dataset) -> None:
    draws = 400_000
    order = dataset.sequence(weights="weight", draws=draws, seed=9).indices()
    counts = np.bincount(order.astype(np.int64), minlength=COUNT)
    assert not counts[WEIGHTS == 0].any()
    expected = draws * WEIGHTS / WEIGHTS.sum()
    some = WEIGHTS > 0
    chi_square = float(np.sum((counts[some] - expected[some]) ** 2 / expected[some]))
    freedom = int(some.sum()) - 1
    assert abs(chi_square - freedom) < 5 * np.sqrt(2 * freedom)


def test_draws_differ_by_seed_and_epoch_and_are_the_same_again(dataset: dlfs.Dataset) -> None:
    orders = [
        tuple(dataset.sequence(weights=WEIGHTS, seed=seed, epoch=epoch).indices().tolist())
        for seed in (1, 2)
        for epoch in (0, 1)
    ]
    assert len(set(orders)) == 4
    assert tuple(dataset.sequence(weights="weight", seed=1).indices().tolist()) == orders[0]
    assert max(Counter(orders[0]).values()) > 1


def test_the_draws_of_a_seed_stay_as_they_are(dataset: dlfs.Dataset) -> None:
    """Checkpoints depend on it: what is drawn for a seed never changes."""
    order = dataset.sequence(weights=WEIGHTS, seed=42, epoch=7, draws=6).indices()
    assert order.tolist() == [985, 307, 836, 377, 993, 111]


def test_a_state_of_another_selection_is_refused(dataset: dlfs.Dataset) -> None:
    selections = [
        {},
        {"where": LABELS == 3},
        {"where": LABELS == 4},
        {"order": np.flatnonzero(LABELS == 3)},
        {"weights": WEIGHTS},
        {"weights": WEIGHTS + 1},
        {"weights": WEIGHTS, "draws": 5},
        {"weights": WEIGHTS, "where": LABELS == 3},
    ]
    states = [dataset.batches(8, **choice).state() for choice in selections]
    for number, choice in enumerate(selections):
        for other, state in enumerate(states):
            with dataset.batches(8, **choice) as epoch:
                if other == number:
                    epoch.resume(state)
                    continue
                with pytest.raises(
                    UsageError, match="this checkpoint is of an epoch over other samples"
                ):
                    epoch.resume(state)
    assert "selection" not in states[0]  # as before there were any
    with pytest.raises(UsageError, match=r"expected a position 0\.\.100, got 101"):
        dataset.batches(8, **selections[1]).resume(states[1] | {"position": 101})


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"where": np.zeros(5, bool)}, "a mask of 1000 samples"),
        ({"where": np.zeros(COUNT + 1, bool)}, "a mask of 1000 samples"),
        ({"where": [1000]}, "expected where 0..999, got 1000 at position"),
        ({"where": [-1]}, "expected where 0..999, got"),
        ({"where": [0.5]}, "expected where as integers"),
        ({"where": [[1]]}, "expected where as integers of one dimension"),
        ({"where": [4, 1, 4]}, "expected where as indices, each once, got 4 2 times$"),
        ({"where": (LABELS == 3).astype(int)}, "got 0 900 times; a mask is of bools"),
        ({"where": np.ones(COUNT, np.uint8), "shuffle": None}, "1 1000 times; a mask is of bools"),
        ({"weights": lambda epoch: WEIGHTS[:5]}, "expected 1000 numbers as weights"),
        ({"weights": lambda epoch: -WEIGHTS}, "weights of 0 or more, got -1.0 of sample 1"),
        ({"where": [1], "shuffle": "chunk"}, "expected shuffle 'global' for chosen samples, or No"),
        (
            {"weights": WEIGHTS, "shuffle": None},
            "expected shuffle 'global' for chosen samples, got",
        ),
        ({"weights": WEIGHTS[:5]}, "expected 1000 numbers as weights"),
        ({"weights": "name"}, "expected 1000 numbers as weights, got object"),
        ({"weights": -WEIGHTS}, "weights of 0 or more, got -1.0 of sample 1"),
        ({"weights": np.full(COUNT, np.nan)}, "weights of 0 or more, got nan"),
        ({"weights": np.full(COUNT, np.inf)}, "weights of 0 or more, got inf"),
        ({"weights": np.full(COUNT, 1e308)}, "weighted sequence"),
        ({"weights": np.zeros(COUNT)}, "expected a sample with a weight above 0"),
        ({"weights": WEIGHTS, "where": []}, "expected a sample with a weight above 0"),
        ({"weights": WEIGHTS, "draws": -1}, "expected draws as an integer"),
        ({"draws": 5}, "expected weights with draws"),
        ({"order": [1], "where": [1]}, "expected order alone"),
        ({"order": [1], "weights": WEIGHTS}, "expected order alone"),
        ({"order": [1], "draws": 1}, "expected order alone"),
        ({"order": [1000]}, "expected order 0..999, got"),
    ],
)
def test_choices_that_cannot_be(
    dataset: dlfs.Dataset, choice: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        dataset.sequence(**choice)


def test_weights_of_a_column_that_there_is_not(dataset: dlfs.Dataset) -> None:
    with pytest.raises(NotFoundError, match=r"'weights'.*there are: 'weight', 'label'"):
        dataset.batches(8, weights="weights")


def test_callers_may_change_their_arrays_afterwards(dataset: dlfs.Dataset) -> None:
    order = np.arange(100)
    with dataset.batches(50, order=order) as epoch:
        order[:] = 0
        assert taken(epoch) == list(range(100))


def curriculum(epoch: int) -> Any:
    """Return weights by which an epoch has samples of one label."""
    return "weight" if epoch == 9 else (epoch == LABELS).astype(float)


def test_weights_may_be_a_function_of_the_epoch(dataset: dlfs.Dataset) -> None:
    options = {"weights": curriculum, "draws": 90, "seed": 5}
    orders = [dataset.sequence(**options, epoch=epoch).indices().tolist() for epoch in range(3)]
    for epoch, order in enumerate(orders):
        assert {index % 10 for index in order} == {epoch}
        plain = {**options, "weights": curriculum(epoch)}
        assert order == dataset.sequence(**plain, epoch=epoch).indices().tolist()
        assert taken(dataset.batches(8, **options, epoch=epoch)) == order
    assert taken(dataset.batches(8, **options, epoch=9)) == taken(
        dataset.batches(8, weights="weight", draws=90, seed=5, epoch=9)
    )
    half = dataset.batches(8, **options, epoch=2)
    for _ in range(5):
        next(half)
    resumed = dataset.batches(8, **options).resume(half.state())  # of epoch 0 before
    assert taken(resumed) == taken(half) == orders[2][40:]
    with pytest.raises(UsageError, match="this checkpoint is of an epoch over other samples"):
        dataset.batches(8, **{**options, "draws": 91}).resume(half.state())
