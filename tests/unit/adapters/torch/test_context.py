"""Tests the context of a transform: the index, the epoch, and reproducible random numbers."""

from __future__ import annotations

import pickle
from functools import partial

import numpy as np
import pytest

import dlfs
from dlfs.base.units import MIB
from dlfs.errors import TransformError, UsageError
from tests.unit.adapters.torch.orders import reference

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader  # noqa: E402

from dlfs.adapters.torch import (  # noqa: E402
    DistributedBatchSampler,
    DistributedSampler,
    Loader,
    SampleContext,
    SampleDataset,
    collate_list,
)
from tests.support.files import write_at  # noqa: E402
from tests.support.torch_processes import PROCESSES  # noqa: E402
from tests.support.volumes import new_volume, write_dataset  # noqa: E402

pytestmark = pytest.mark.torch

BAD = 33
"""Index of the damaged sample."""


@pytest.fixture
def damaged(tmp_path):
    path = new_volume(tmp_path / "volume.img", size_bytes=16 * MIB)
    with dlfs.open(str(path)) as volume:
        write_dataset(volume, "ds", {b"%02d" % number: bytes([number]) * 8 for number in range(60)})
        with volume.dataset("ds") as dataset:
            offset = dataset.stat(BAD).offset_bytes
    write_at(path, offset, b"\xff")
    with dlfs.open(str(path)) as volume, volume.dataset("ds") as dataset:
        yield dataset


def note(sample, context):
    """Return the context that a transform received, as numbers that can be collated."""
    seed = np.uint64(context.seed).astype(np.int64).item()
    return torch.tensor([context.index, context.epoch, len(sample), seed])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("over", ["samples", "dataset"])
@pytest.mark.parametrize("kind", [DistributedSampler, DistributedBatchSampler])
def test_samplers_pass_their_epoch_on(damaged, kind, over, workers):
    samples = SampleDataset(damaged, transform=note, with_context=True, seed=7)
    options = {"where": np.arange(30), "num_replicas": 1, "rank": 0}
    batch = {"batch_size": 8} if kind is DistributedBatchSampler else {}
    sampler = kind(samples if over == "samples" else damaged, seed=1, **batch, **options)
    how = {"batch_sampler": sampler} if batch else {"sampler": sampler, "batch_size": 8}
    seeds = []
    loader = DataLoader(samples, num_workers=workers, persistent_workers=workers > 0, **how)
    for epoch in range(3):
        if not batch:
            sampler.set_epoch(epoch)
        notes = torch.cat(list(loader))
        assert notes[:, 1].tolist() == [epoch] * 30
        seeds.append(dict(zip(notes[:, 0].tolist(), notes[:, 3].tolist(), strict=True)))
    assert all(len({one[index] for one in seeds}) == 3 for index in range(30))
    if not batch:
        sampler.set_epoch(1)
        again = samples[next(iter(sampler))]
        assert again[1] == 1
        assert again[3] == seeds[1][int(again[0])]


# ---- the context ---------------------------------------------------------------------------------


def test_a_seed_is_a_function_of_what_it_is_made_of():
    base = {"seed": 7, "epoch": 1, "index": 5, "position": 9}
    seed = SampleContext(**base).seed
    assert seed == 15476321733041361874
    assert 0 <= seed < 1 << 64
    for name in base:
        assert SampleContext(**{**base, name: base[name] + 1}).seed != seed
    assert SampleContext(**{**base, "seed": -1}).seed != seed
    assert SampleContext(**{**base, "position": None}).seed != seed
    assert len({SampleContext(**{**base, "index": i}).seed for i in range(10_000)}) == 10_000


def test_generators_begin_at_the_seed():
    one, other = (SampleContext(seed=0, epoch=0, index=3, position=3) for _ in range(2))
    assert one.numpy is one.numpy
    assert one.torch is one.torch
    assert one.numpy.random(4).tolist() == np.random.default_rng(other.seed).random(4).tolist()
    expected = torch.rand(4, generator=torch.Generator().manual_seed(other.seed))
    assert torch.equal(torch.rand(4, generator=one.torch), expected)
    assert not torch.equal(torch.rand(4, generator=one.torch), expected)
    assert repr(one) == "SampleContext(index=3, epoch=0, position=3)"


def test_a_transform_is_given_a_context_only_where_it_is_asked_for(arrays):
    for make in (SampleDataset, partial(Loader, batch_size=4)):
        with pytest.raises(UsageError, match="expected a transform with with_context=True, got no"):
            make(arrays, with_context=True)

    def scale(sample, factor=2, *others):
        return factor * len(sample) + len(others)

    assert SampleDataset(arrays, transform=scale)[0] == 48
    assert next(iter(Loader(arrays, 4, transform=scale))).samples.tolist() == [48] * 4
    with pytest.raises(TransformError, match="positional argument"):
        SampleDataset(arrays, transform=lambda sample: 0, with_context=True)[3]


# ---- a map-style dataset -------------------------------------------------------------------------


@pytest.mark.parametrize("context", [None, "fork", PROCESSES])
def test_epochs_of_a_map_style_dataset(arrays, context):
    dataset = SampleDataset(arrays, transform=note, with_context=True, seed=4)
    workers = {} if context is None else {"num_workers": 1, "persistent_workers": True}
    loader = DataLoader(dataset, 50, multiprocessing_context=context, **workers)
    seeds = []
    for epoch in (0, 1, 5):
        dataset.set_epoch(epoch)
        given = torch.cat(list(loader)).tolist()
        assert [one[:3] for one in given] == [[i, epoch, 24] for i in range(len(arrays))]
        made = [SampleContext(seed=4, epoch=epoch, index=i, position=None) for i in range(3)]
        assert [one[3] & (1 << 64) - 1 for one in given[:3]] == [one.seed for one in made]
        seeds += [one[3] for one in given]
    assert len(set(seeds)) == 3 * len(arrays)
    assert dataset[-1].tolist()[:2] == [len(arrays) - 1, 5]
    assert pickle.loads(pickle.dumps(dataset))[0].tolist() == given[0]
    with pytest.raises(UsageError, match="set the epoch: expected 0 or more, got -1"):
        dataset.set_epoch(-1)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_that_was_never_set_is_warned_of(arrays, workers, recwarn):
    dataset = SampleDataset(arrays, transform=note, with_context=True)
    loader = DataLoader(dataset, 50, shuffle=True, num_workers=workers)
    list(loader)
    assert not recwarn
    assert int(dataset._epoch.words[1]) == len(arrays)
    if workers:  # the warning is a worker's
        list(loader)
        assert int(dataset._epoch.words[1]) == -1
    else:
        with pytest.warns(UserWarning, match=r"no epoch was set: call its set_epoch\(epoch\)"):
            next(iter(loader))
        list(loader)  # once
    for told in (lambda one: one.set_epoch(0), lambda one: None):
        other = SampleDataset(arrays, transform=note, with_context=True)
        told(other)
        sampler = DistributedBatchSampler(other, 50, 1, 0)
        for epoch in range(3):
            given = torch.cat(list(DataLoader(other, batch_sampler=sampler)))
            assert set(given[:, 1].tolist()) == {epoch}
    assert not recwarn


def test_collated_lists_of_a_map_style_dataset(samples):
    dataset = SampleDataset(samples, transform=note, with_context=True, threads=3)
    given = next(iter(DataLoader(dataset, 20, collate_fn=collate_list)))
    assert [one.tolist()[0] for one in given] == list(range(20))


# ---- a loader ------------------------------------------------------------------------------------


def place(sample, context):
    """A transform that gives the context, with the seed as int64 has it, and its generators."""
    seed = int(np.uint64(context.seed).astype(np.int64))
    drawn = [
        int(context.numpy.integers(1 << 40)),
        int(torch.randint(1 << 40, (), generator=context.torch)),
    ]
    return torch.tensor([context.position, context.index, context.epoch, seed, *drawn])


def expect_rows(order, epoch, seed):
    """Return the results of ``place`` for the samples of an epoch, by position."""
    return [
        place(b"", SampleContext(seed=seed, epoch=epoch, index=index, position=position)).tolist()
        for position, index in enumerate(order)
    ]


def rows_of(*loaders):
    """Return the results of ``place`` in some loaders, by position."""
    return sorted(row for loader in loaders for batch in loader for row in batch.samples.tolist())


HOW = [
    {"threads": 1, "lookahead": 0},
    {"threads": 3, "batch_size": 7},
    {"num_workers": 1},
    {"num_workers": 2, "multiprocessing_context": "fork", "batch_size": 50},
]
PICKLED = {"num_workers": 1, "multiprocessing_context": PROCESSES}


@pytest.mark.parametrize(
    ("how", "world_size"), [*((how, size) for how in HOW for size in (1, 2)), (PICKLED, 1)]
)
def test_a_loaders_contexts_are_of_the_order_however_it_is_read(arrays, how, world_size):
    options = {"batch_size": 16, "seed": 3, "transform": place, "with_context": True, **how}
    loaders = [
        Loader(arrays, rank=rank, world_size=world_size, **options) for rank in range(world_size)
    ]
    for epoch in range(2):
        assert rows_of(*loaders) == expect_rows(reference(arrays, seed=3, epoch=epoch), epoch, 3)
    for loader in loaders:
        loader.close()


def test_contexts_in_a_dataloaders_workers(arrays):
    loader = Loader(arrays, 16, seed=3, transform=place, with_context=True)
    over = DataLoader(loader, batch_size=None, num_workers=2)
    assert rows_of(over) == expect_rows(reference(arrays, seed=3), 0, 3)


@pytest.mark.parametrize("workers", [0, 2])
def test_contexts_go_on_behind_a_resume(arrays, workers):
    options = {"seed": 3, "transform": place, "with_context": True, "num_workers": workers}
    loader = Loader(arrays, 16, **options)
    given = iter(loader)
    begun = [next(given) for _ in range(5)]
    state = begun[-1].state
    loader.close()
    rest = [
        Loader(arrays, 9, rank=rank, world_size=2, uneven="leave", **options) for rank in range(2)
    ]
    for one in rest:
        one.load_state_dict(state)
    rows = sorted(rows_of(begun) + rows_of(*rest))
    assert rows == expect_rows(reference(arrays, seed=3), 0, 3)
    for one in rest:
        one.close()


@pytest.mark.parametrize("world_size", [1, 3])
def test_draws_of_one_sample_have_seeds_of_their_own(arrays, world_size):
    chosen = {"weights": np.arange(len(arrays)) < 4, "draws": 90}
    loaders = [
        Loader(
            arrays,
            8,
            rank=rank,
            world_size=world_size,
            transform=place,
            with_context=True,
            **chosen,
        )
        for rank in range(world_size)
    ]
    rows = rows_of(*loaders)
    assert rows == expect_rows(reference(arrays, **chosen), 0, 0)
    assert len({row[3] for row in rows}) == 90
    assert len({row[1] for row in rows}) == 4


def test_repeated_samples_of_padded_ranks_have_the_seed_of_the_first_time(arrays):
    loaders = [
        Loader(arrays, 8, rank=rank, world_size=4, uneven="pad", transform=place, with_context=True)
        for rank in range(4)
    ]
    rows = rows_of(*loaders)
    expected = expect_rows(reference(arrays), 0, 0)
    assert rows == sorted(expected + expected[:2])


@pytest.mark.parametrize("on_error", ["skip", "replace"])
def test_samples_that_fail_move_no_others_position(damaged, on_error):
    order = list(range(len(damaged)))
    loader = Loader(damaged, 8, order=order, transform=place, with_context=True, on_error=on_error)
    rows = rows_of(loader)
    if on_error == "skip":
        expected = expect_rows(order, 0, 0)
        assert rows == expected[:BAD] + expected[BAD + 1 :]
    else:
        order[BAD] += 1
        assert rows == expect_rows(order, 0, 0)
