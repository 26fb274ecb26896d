"""Tests the begin and the end of epochs, their samples, and how ranks end together."""

from __future__ import annotations

import json

import numpy as np
import pytest

import dlfs
from dlfs.base.units import MIB
from dlfs.errors import ClosedError, UsageError
from tests.unit.adapters.torch.conftest import COUNT
from tests.unit.adapters.torch.orders import order, reference

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader  # noqa: E402

from dlfs.adapters.torch import (  # noqa: E402
    DistributedBatchSampler,
    DistributedSampler,
    Loader,
    SampleDataset,
)
from tests.support.files import flip_bit  # noqa: E402
from tests.support.volumes import new_volume, write_dataset  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture
def write(tmp_path):
    """Writes a dataset of some samples, each its own number."""
    made: list[dlfs.Dataset] = []

    def make(count: int) -> dlfs.Dataset:
        with dlfs.open(new_volume(tmp_path / f"{count}.img", size_bytes=8 * MIB)) as volume:
            with volume.writer("ds") as writer:
                for number in range(count):
                    writer.add(b"%05d" % number, b"%d" % number)
            made.append(volume.dataset("ds"))
        return made[-1]

    yield make
    for dataset in made:
        dataset.close()


# ---- the end of an epoch -------------------------------------------------------------------------


def take_length(loader) -> list[int]:
    """The indices of as many batches as the loader says it has; none more is asked for."""
    return order([batch for _, batch in zip(range(len(loader)), loader, strict=False)])


@pytest.mark.parametrize("take", [order, take_length])
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_every_epoch_is_whole_however_it_is_taken(samples, take, wrapped, workers):
    loader = Loader(samples, 25, seed=2, num_workers=0 if wrapped else workers)
    outer = loader
    if wrapped:
        outer = DataLoader(loader, batch_size=None, num_workers=workers)
    for epoch in range(3):
        assert len(outer) == 10
        assert take(outer) == reference(samples, seed=2, epoch=epoch)
        assert (loader.epoch, loader.position) == (epoch + 1, 0)
    loader.close()


@pytest.mark.parametrize("options", [{}, {"drop_last": True}, {"transform": bytes}])
def test_the_last_batch_has_the_state_of_the_next_epoch(samples, options):
    loader = Loader(samples, 20, seed=2, collate="list", **options)
    batches = iter(loader)
    given = [next(batches) for _ in range(len(loader))]
    assert [batch.state["epoch"] for batch in given] == [0] * (len(given) - 1) + [1]
    assert given[-1].state == loader.state_dict()
    assert (loader.epoch, loader.position) == (1, 0)
    loader.set_epoch(1)  # as loops do
    assert next(batches, None) is None
    assert (loader.epoch, loader.position) == (1, 0)
    resumed = Loader(samples, 10)
    resumed.load_state_dict(json.loads(json.dumps(given[-1].state)))
    assert order(resumed) == reference(samples, seed=2, epoch=1)


def test_an_epoch_may_be_repeated_from_its_last_batch(samples):
    loader = Loader(samples, 25, seed=2)
    given = []
    for batch in loader:
        given.append(batch)
        if batch.state["epoch"] == 1:
            loader.set_epoch(0)
    assert order(given) == order(loader) == reference(samples, seed=2)


@pytest.mark.parametrize(
    ("position", "options"),
    [
        (230, {}),
        (225, {"drop_last": True}),
        (229, {"rank": 0, "world_size": 2, "uneven": "drop"}),
    ],
)
def test_a_state_with_nothing_left_is_that_of_the_next_epoch(samples, position, options):
    loader = Loader(samples, 10, **options)
    loader.load_state_dict({**loader.state_dict(), "position": position})
    assert (loader.epoch, loader.position) == (1, 0)
    assert len(list(loader)) == len(loader)


def test_epochs_without_batches_pass(write):
    empty = write(0)
    three = write(3)
    for options in (
        {"dataset": empty},
        {"dataset": empty, "uneven": "pad", "rank": 1, "world_size": 2},
        {"dataset": empty, "num_workers": 2},
        {"dataset": three, "drop_last": True},
        {"dataset": three, "rank": 3, "world_size": 4},
        {"dataset": three, "rank": 3, "world_size": 4, "uneven": "drop"},
        {"dataset": three, "where": []},
    ):
        loader = Loader(batch_size=4, **options)
        for epoch in range(3):
            assert (len(loader), loader.epoch) == (0, epoch)
            assert list(loader) == []
        loader.close()
    for options in ({"num_replicas": 1, "rank": 0}, {"num_replicas": 3, "rank": 2}):
        sampler = DistributedBatchSampler(empty, 4, **options)
        assert (list(sampler), len(sampler)) == ([], 0)
        assert sampler.state_dict()["epoch"] == 1


def test_a_last_batch_of_bad_samples_ends_the_epoch(tmp_path):
    path = new_volume(tmp_path / "volume.img", size_bytes=8 * MIB)
    with dlfs.open(str(path)) as volume:
        write_dataset(volume, "ds", {str(number): b"%d" % number * 100 for number in range(7)})
        with volume.dataset("ds") as dataset:
            expected = reference(dataset, seed=1)
            flip_bit(path, dataset.stat(expected[-1]).offset_bytes)
    with dlfs.open(str(path)) as volume, volume.dataset("ds") as dataset:
        loader = Loader(dataset, 3, seed=1, on_error="skip")
        assert take_length(loader) == expected[:-1]
        assert (loader.epoch, loader.position) == (1, 0)
        assert sorted(take_length(loader)) == sorted(expected[:-1])
        loader = Loader(dataset, 3, seed=1, on_error="skip", uneven="pad", rank=1, world_size=2)
        assert take_length(loader) == [expected[position] for position in (1, 3, 5, 0)]


def test_one_iteration_reads_at_a_time(samples):
    loader = Loader(samples, 25, seed=2)
    first = iter(loader)
    begin = next(first)
    second = iter(loader)
    given = [begin, next(second)]  # goes on where the first one was left
    with pytest.raises(ClosedError, match="another iteration; begin a new one"):
        next(first)
    assert order([*given, *second]) == reference(samples, seed=2)
    for end in (lambda: loader.set_epoch(7), loader.close):
        third = iter(loader)
        next(third)
        end()
        with pytest.raises(ClosedError, match="was ended by close, set_epoch"):
            next(third)
    assert (loader.epoch, loader.position) == (7, 25)


# ---- which samples -------------------------------------------------------------------------------

CHOICES = {
    "where": {"where": np.arange(COUNT) % 3 == 0},
    "weights": {"weights": "weight", "draws": 101},
    "order": {"order": range(COUNT)},
}


@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
@pytest.mark.parametrize("workers", [0, 2])
def test_chosen_samples(arrays, choice, workers):
    loader = Loader(arrays, 10, seed=4, num_workers=workers, **choice)
    expected = [reference(arrays, seed=4, epoch=epoch, **choice) for epoch in range(2)]
    assert len(loader) == -(-len(expected[0]) // 10)
    batches = iter(loader)
    given = [next(batches) for _ in range(3)]
    resumed = Loader(arrays, 7, num_workers=workers, **choice)
    resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert order([*given, *resumed]) == expected[0]
    assert order(resumed) == expected[1]
    with pytest.raises(UsageError, match="expected all samples, got the selection"):
        Loader(arrays, 7).load_state_dict(loader.state_dict())
    loader.close()
    resumed.close()


def in_turn(ranks: list[list[int]]) -> list[int]:
    """Return the epoch's order, of which each rank was given every len(ranks)-th index."""
    longest = max(map(len, ranks))
    return [rank[at] for at in range(longest) for rank in ranks if at < len(rank)]


@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
def test_three_epochs_of_chosen_samples_resume_at_another_world_size(arrays, choice):
    loaders = [
        Loader(arrays, 10, seed=4, rank=rank, world_size=2, num_workers=2, **choice)
        for rank in range(2)
    ]
    expected = [reference(arrays, seed=4, epoch=epoch, **choice) for epoch in range(3)]
    for epoch in range(3):
        assert in_turn([order(loader) for loader in loaders]) == expected[epoch]
    state = None
    for loader in loaders:
        loader.set_epoch(1)
        batches = iter(loader)
        for _ in range(2):
            state = next(batches).state
        batches.close()
        assert loader.state_dict() == state
        loader.close()
    state = json.loads(json.dumps(state))
    assert state["position"] == 40
    resumed = [
        Loader(arrays, 7, rank=rank, world_size=3, num_workers=2, **choice) for rank in range(3)
    ]
    for loader in resumed:
        loader.load_state_dict(state)
    assert in_turn([order(loader) for loader in resumed]) == expected[1][40:]
    assert in_turn([order(loader) for loader in resumed]) == expected[2]
    for loader in resumed:
        loader.close()
    for name, other in CHOICES.items():
        if other is not choice:
            with pytest.raises(
                UsageError, match="epoch over other samples: expected the selection"
            ):
                Loader(arrays, 10, **CHOICES[name]).load_state_dict(state)


@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
def test_batch_samplers_of_chosen_samples_resume_at_another_world_size(arrays, choice):
    samplers = [DistributedBatchSampler(arrays, 10, 2, rank, seed=4, **choice) for rank in range(2)]
    expected = [reference(arrays, seed=4, epoch=epoch, **choice) for epoch in range(3)]
    for epoch in range(3):
        given = in_turn([[i for batch in one for i in batch] for one in samplers])
        total = len(expected[epoch])
        assert given[:total] == expected[epoch]
        assert given[total:] == expected[epoch][: len(given) - total]  # pads the last round
    samplers[0].set_epoch(1)
    batches = iter(samplers[0])
    taken = [next(batches) for _ in range(2)]
    assert [index for batch in taken for index in batch] == expected[1][:40:2]
    resumed = [DistributedBatchSampler(arrays, 7, 3, rank, **choice) for rank in range(3)]
    for sampler in resumed:
        sampler.load_state_dict(samplers[0].state_dict())
    left = in_turn([[i for batch in one for i in batch] for one in resumed])
    assert left[: len(expected[1]) - 40] == expected[1][40:]
    with pytest.raises(UsageError, match="epoch over other samples: expected all samples"):
        DistributedBatchSampler(arrays, 7, 1, 0).load_state_dict(samplers[0].state_dict())


@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
def test_samplers_of_chosen_samples(arrays, choice):
    expected = [reference(arrays, seed=4, epoch=epoch, **choice) for epoch in range(2)]
    sampler = DistributedSampler(arrays, 1, 0, seed=4, **choice)
    batches = DistributedBatchSampler(arrays, 10, 1, 0, seed=4, **choice)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        assert list(sampler) == expected[epoch]
        assert len(batches) == -(-len(expected[0]) // 10)
        assert [index for batch in batches for index in batch] == expected[epoch]
    next(iter(batches))
    resumed = DistributedBatchSampler(arrays, 10, 1, 0, **choice)
    resumed.load_state_dict(batches.state_dict())
    rest = [index for batch in resumed for index in batch]
    assert rest == reference(arrays, seed=4, epoch=2, **choice)[10:]


def test_samplers_take_chosen_samples_in_index_order(arrays):
    chosen = np.array([9, 3, 200])
    mask = np.zeros(COUNT, bool)
    mask[chosen] = True
    for where in (chosen, mask):
        assert list(DistributedSampler(arrays, 1, 0, False, where=where)) == [3, 9, 200]
        sampler = DistributedBatchSampler(arrays, 2, 2, 1, False, where=where)
        assert list(sampler) == [[9, 3]]
    with pytest.raises(UsageError, match="as a mask of 230 samples"):
        DistributedSampler(arrays, 1, 0, False, where=mask[1:])
    with pytest.raises(UsageError, match="expected shuffle 'global' for chosen samples"):
        DistributedSampler(arrays, 1, 0, False, weights="weight")


def test_a_choice_is_the_loaders_own(arrays):
    mask = np.arange(COUNT) < 50
    loader = Loader(arrays, 10, where=mask)
    mask[:] = True
    assert sorted(order(loader)) == list(range(50))


# ---- ranks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "transform"), [(0, None), (60, bytes)])
@pytest.mark.parametrize(("world", "batch_size"), [(3, 10), (4, 57), (300, 2)])
@pytest.mark.parametrize("uneven", ["pad", "drop", "leave"])
def test_ranks_share_an_epoch(samples, uneven, world, batch_size, first, transform):
    expected = reference(samples, seed=6)
    rounds = -(-(COUNT - first) // world) if uneven == "pad" else (COUNT - first) // world
    end = COUNT if uneven == "leave" else first + rounds * world
    shares = [(expected[:COUNT] + expected)[first:end][rank::world] for rank in range(world)]
    state = {**Loader(samples, 1, seed=6).state_dict(), "position": first}
    for rank in sorted({0, 1, world // 2, world - 1}):
        loader = Loader(
            samples,
            batch_size,
            rank=rank,
            world_size=world,
            uneven=uneven,
            transform=transform,
            collate="list",
        )
        loader.load_state_dict(state)
        at_end = not any(shares)
        assert loader.epoch == (1 if at_end and first else 0)
        if at_end and first:
            continue
        batches = list(loader)
        mine = shares[rank]
        assert [batch.indices.tolist() for batch in batches] == [
            mine[at : at + batch_size] for at in range(0, len(mine), batch_size)
        ]
        for batch in batches:
            got = [one if transform else one.numpy().tobytes() for one in batch.samples]
            assert got == [samples[index] for index in batch.indices.tolist()]
        assert loader.epoch == 1


@pytest.mark.parametrize("uneven", ["pad", "drop"])
def test_ranks_with_workers_end_together(samples, uneven):
    expected = reference(samples, seed=6)
    end = 231 if uneven == "pad" else 228
    for rank in (0, 1, 2):
        loader = Loader(samples, 7, seed=6, rank=rank, world_size=3, uneven=uneven, num_workers=2)
        for epoch in range(2):
            expected = reference(samples, seed=6, epoch=epoch)
            batches = list(loader)
            assert order(batches) == (expected + expected)[:end][rank::3]
            assert batches[-1].state == loader.state_dict()
        loader.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_the_state_of_a_rank_does_not_pass_what_others_have_left(samples, workers):
    options = {"uneven": "leave", "world_size": 4, "seed": 6, "num_workers": workers}
    size = 57  # ranks 0 and 1 have a second batch, of one sample
    expected = reference(samples, seed=6)
    loaders = [Loader(samples, size, rank=rank, **options) for rank in range(4)]
    try:
        states = []
        for rank, loader in enumerate(loaders):
            iterator = iter(loader)
            first = next(iterator)
            states.append(loader.state_dict())
            assert first.state == states[-1]
            assert len(list(iterator)) == (1 if rank < 2 else 0)
            assert (loader.epoch, loader.position) == (1, 0)
            assert loader.state_dict()["epoch"] == 1  # the loop has ended
            assert len(list(loader)) == (2 if rank < 2 else 1)
            assert loader.epoch == 2
        assert [(state["epoch"], state["position"]) for state in states] == [(0, 228)] * 4
        for state in states:  # any of them gives the rest on all ranks
            rest = []
            for loader in loaders:
                loader.load_state_dict(state)
                rest += order(loader)
                assert loader.epoch == 1
            assert rest == expected[228:]
    finally:
        for loader in loaders:
            loader.close()


def test_a_rank_that_takes_as_many_batches_as_there_are_goes_on(samples):
    loader = Loader(samples, 57, rank=3, world_size=4, uneven="leave")
    for epoch in range(3):
        taken = [next(iter(loader)) for _ in range(len(loader))]
        assert [batch.state["epoch"] for batch in taken] == [epoch]
        assert loader.epoch == epoch + 1


def test_what_a_loader_shows(samples, monkeypatch):
    loader = Loader(samples, 32, seed=7, shuffle="chunk", rank=1, world_size=2)
    shown = "230 samples in batches of 32, rank 1 of 2, shuffle 'chunk', seed 7, epoch 0, position"
    assert repr(loader) == f"<Loader of dataset 'bytes': {shown} 0>"
    next(iter(loader))
    assert repr(loader) == f"<Loader of dataset 'bytes': {shown} 64>"
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert "batches of 9, shuffle 'global'" in repr(Loader(samples, 9))


def curriculum(epoch):
    return (np.arange(COUNT) % 5 == epoch % 5).astype(float)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_curriculum_resumes(arrays, workers):
    options = {"weights": curriculum, "draws": 60, "seed": 3, "num_workers": workers}
    loader = Loader(arrays, 8, **options)
    again = Loader(arrays, 8, **options)
    try:
        for epoch in range(3):
            batches = list(loader)
            assert {index % 5 for index in order(batches)} == {epoch}
            again.load_state_dict(batches[3].state)
            assert order(again) == order(batches[4:])
            again.load_state_dict(loader.state_dict())
            assert {index % 5 for index in order(again)} == {epoch + 1}
    finally:
        loader.close()
        again.close()
    sampler = DistributedBatchSampler(arrays, 8, 1, 0, weights=curriculum, draws=60, seed=3)
    assert {index % 5 for batch in sampler for index in batch} == {0}
    assert {index % 5 for batch in sampler for index in batch} == {1}


def test_what_ranks_do_by_default(samples, monkeypatch):
    def lengths(**options) -> set[int]:
        return {len(order(Loader(samples, 100, rank=r, world_size=4, **options))) for r in range(4)}

    assert lengths() == {57, 58}  # nothing says that they wait for each other
    assert lengths(uneven="drop") == {57}
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert lengths() == {58}
    assert lengths(uneven="leave") == {57, 58}
    monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(UsageError, match="expected uneven 'pad', 'drop' or 'leave', got 'fill'"):
        Loader(samples, 4, uneven="fill")


# ---- batch samplers ------------------------------------------------------------------------------


@pytest.mark.parametrize("set_epoch", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
def test_epochs_of_a_batch_sampler(samples, workers, set_epoch):
    sampler = DistributedBatchSampler(samples, 25, 1, 0, seed=2)
    numbers = SampleDataset(samples, labels=lambda indices: indices.astype("int64"))
    loader = DataLoader(numbers, batch_sampler=sampler, num_workers=workers, collate_fn=list)
    for epoch in range(3):
        if set_epoch:
            sampler.set_epoch(epoch)
        next(iter(loader))  # a look at the first batch, and the epoch is whole all the same
        given = [batch for _, batch in zip(range(len(loader)), loader, strict=False)]
        assert [item[1] for batch in given for item in batch] == reference(
            samples, seed=2, epoch=epoch
        )
        assert (sampler.state_dict()["epoch"], sampler.state_dict()["position"]) == (epoch + 1, 0)


def test_a_batch_samplers_state_is_that_of_the_batch(samples):
    sampler = DistributedBatchSampler(samples, 25, 1, 0, seed=2)
    states = [sampler.state_dict() for _ in sampler]
    assert [state["position"] for state in states] == [*range(25, 226, 25), 0]
    loader = Loader(samples, 25)
    loader.load_state_dict(states[3])
    assert order(loader) == reference(samples, seed=2)[100:]
    for position in (230, 0):
        sampler.load_state_dict({**states[0], "position": position})
        assert sampler.state_dict()["epoch"] == (1 if position else 0)
    sampler = DistributedBatchSampler(samples, 100, 1, 0, drop_last=True)
    sampler.load_state_dict({**sampler.state_dict(), "position": 200})
    assert sampler.state_dict()["epoch"] == 1
