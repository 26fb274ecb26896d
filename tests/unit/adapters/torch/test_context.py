"""What a transform knows of its sample: the index, the epoch, and random numbers that come back."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from dlfs.errors import TransformError, UsageError

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader  # noqa: E402

from dlfs.adapters.torch import (  # noqa: E402
    Loader,
    SampleContext,
    SampleDataset,
    collate_list,
)

pytestmark = pytest.mark.torch


def note(sample, context):
    """A transform that gives what it was told, as numbers that can be collated."""
    seed = np.uint64(context.seed).astype(np.int64).item()
    return torch.tensor([context.index, context.epoch, len(sample), seed])


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
    with pytest.raises(UsageError, match="expected a transform with with_context=True, got none"):
        SampleDataset(arrays, with_context=True)

    def scale(sample, factor=2, *others):
        return factor * len(sample) + len(others)

    assert SampleDataset(arrays, transform=scale)[0] == 48
    assert next(iter(Loader(arrays, 4, transform=scale))).samples.tolist() == [48] * 4
    with pytest.raises(TransformError, match="positional argument"):
        SampleDataset(arrays, transform=lambda sample: 0, with_context=True)[3]


# ---- a map-style dataset -------------------------------------------------------------------------


@pytest.mark.parametrize("context", [None, "fork", "spawn"])
def test_epochs_of_a_map_style_dataset(arrays, context):
    dataset = SampleDataset(arrays, transform=note, with_context=True, seed=4)
    workers = {} if context is None else {"num_workers": 2, "persistent_workers": True}
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


def test_collated_lists_of_a_map_style_dataset(samples):
    dataset = SampleDataset(samples, transform=note, with_context=True, threads=3)
    given = next(iter(DataLoader(dataset, 20, collate_fn=collate_list)))
    assert [one.tolist()[0] for one in given] == list(range(20))
