"""torch.distributed: two ranks on this machine share an epoch, and one goes on with it."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

import dlfs
from dlfs.errors import UsageError
from tests.unit.adapters.torch.conftest import COUNT
from tests.unit.adapters.torch.orders import order, reference

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from dlfs.adapters.torch import (  # noqa: E402
    ColumnLabels,
    DistributedBatchSampler,
    DistributedSampler,
    Loader,
    SampleDataset,
)
from dlfs.adapters.torch.tensors import RankBatch, TensorBatch  # noqa: E402
from tests.support.torch_processes import run_ranks  # noqa: E402

pytestmark = pytest.mark.torch


def number(indices):
    return indices.astype("int64")


def split_with_accelerate(join, volume) -> dict[str, Any]:
    join()
    accelerator = import_module("accelerate").Accelerator(cpu=True)
    with dlfs.open(volume) as opened, opened["arrays"] as dataset:
        loader = Loader(dataset, 10, collate="stack", labels=ColumnLabels(dataset, "number"))
        taken = order(accelerator.prepare(loader))
        whole = Loader(dataset, 10, collate="stack", labels=number, rank=0, world_size=1)
        split = accelerator.prepare(DataLoader(whole, batch_size=None))
        numbers = [int(label) for batch in split for label in batch.labels]
        alike = Loader(dataset, 10, placement=dlfs.Replicated(2))
        kinds = [type(next(iter(one))) for one in (whole, alike)]
        try:
            next(iter(accelerator.prepare(DataLoader(loader, batch_size=None))))
            error = None
        except Exception as caught:  # noqa: BLE001 - of rank 1: that rank 0 is gone
            error = f"{type(caught).__name__}: {caught}"
    world = accelerator.num_processes
    return {"world": world, "taken": taken, "split": numbers, "error": error, "kinds": kinds}


@pytest.mark.frameworks
def test_accelerate_does_not_split_one_ranks_share_between_all(torch_volume, arrays):
    found = run_ranks(2, split_with_accelerate, torch_volume, launched=True)
    assert [one["world"] for one in found] == [2, 2]
    taken = [one["taken"] for one in found]
    assert [taken[at % 2][at // 2] for at in range(COUNT)] == reference(arrays)
    assert set(found[0]["split"] + found[1]["split"]) == set(range(COUNT))
    assert found[0]["error"].startswith(
        "UsageError: split batches with Accelerate: expected a loader"
    )
    assert found[1]["error"] is not None
    # Ranks that read the same need whole batches: theirs are refused in the same way.
    assert all(one["kinds"] == [TensorBatch, RankBatch] for one in found)


def begin_an_epoch(join, volume) -> dict[str, Any]:
    rank = join()
    with dlfs.open(volume) as opened, opened["arrays"] as dataset:
        loader = Loader(dataset, 10, seed=7, num_workers=rank + 1)  # not the same on each
        taken = order(batch for _, batch in zip(range(4), loader, strict=False))
        states = [None, None]
        dist.all_gather_object(states, loader.state_dict())
        assert states[0] == states[1], states
        loader.close()
        place = loader.rank, loader.world_size, len(DistributedSampler(dataset))
    return {"taken": taken, "state": states[0], "place": place}


def test_ranks_of_torch_distributed(torch_volume, arrays):
    found = run_ranks(2, begin_an_epoch, torch_volume, launched=True)
    assert [one["place"] for one in found] == [(0, 2, COUNT // 2), (1, 2, COUNT // 2)]
    taken = [-1] * 80
    for rank, one in enumerate(found):
        taken[rank::2] = one["taken"]
    loader = Loader(arrays, 16)
    loader.load_state_dict(found[0]["state"])
    assert taken + order(loader) == reference(arrays, seed=7)


def train_unevenly(join, volume) -> dict[str, Any]:
    rank = join()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(6, 1))

    def train(batches) -> list[list[int]]:
        taken = []
        for samples, indices in batches:
            taken.append(indices.tolist())
            model(samples.flatten(1)).sum().backward()  # waits for the other ranks
        return taken

    with dlfs.open(volume) as opened, opened["arrays"] as dataset:
        form = {"dtype": "float32", "shape": (2, 3)}
        loader = Loader(dataset, 57, seed=7, where=range(229), num_workers=rank % 2, **form)
        epochs = [train((b.samples, b.indices) for b in loader) for _ in range(2)]
        begun = train((b.samples, b.indices) for b in [next(iter(loader))])
        resumed = Loader(dataset, 10, where=range(229), **form)
        resumed.load_state_dict(loader.state_dict())
        loader.close()
        rest = train((b.samples, b.indices) for b in resumed)
        sampler = DistributedBatchSampler(dataset, 57, seed=7, where=range(229))
        numbers = SampleDataset(dataset, labels=number, **form)
        sampled = train(DataLoader(numbers, batch_sampler=sampler))
    return {"epochs": epochs, "begun": begun, "rest": rest, "sampled": sampled}


def test_ranks_with_unequal_data_end_together(torch_volume, arrays):
    world = 4
    found = run_ranks(world, train_unevenly, torch_volume)
    rounds = -(-229 // world)

    def all_ranks(taken: list[list[list[int]]]) -> list[int]:
        """The samples in the order of the epoch; every rank has as many batches of as many."""
        assert len({tuple(map(len, batches)) for batches in taken}) == 1
        flat = [[index for batch in batches for index in batch] for batches in taken]
        return [index for round_ in zip(*flat, strict=True) for index in round_]

    for epoch in range(3):
        expected = reference(arrays, seed=7, epoch=epoch, where=range(229))
        padded = expected + expected[: rounds * world - 229]
        if epoch < 2:
            assert all_ranks([one["epochs"][epoch] for one in found]) == padded
        else:
            begun = all_ranks([one["begun"] for one in found])
            assert begun + all_ranks([one["rest"] for one in found]) == padded
        if epoch == 0:
            assert all_ranks([one["sampled"] for one in found]) == padded


def begin_before_there_are_ranks(join, volume) -> dict[str, Any]:
    with dlfs.open(volume) as opened, opened["arrays"] as dataset:
        loaders = [Loader(dataset, 10, seed=1) for _ in range(3)]
        looked = [next(iter(loader)).indices.tolist() for loader in loaders[:2]]
        reading = iter(loaders[2])
        next(reading)
        lengths = [len(loaders[0])]
        join()
        errors = []
        for again in (lambda: next(iter(loaders[0])), lambda: next(reading)):
            with pytest.raises(UsageError) as caught:
                again()
            errors.append(str(caught.value))
        loaders[0].load_state_dict(loaders[0].state_dict())
        lengths.append(len(loaders[0]))
        rest = order(loaders[0])
        loaders[1].set_epoch(1)
        other = order(loaders[1])
    found = {"looked": looked, "errors": errors, "lengths": lengths}
    return {**found, "rest": rest, "other": other}


def test_an_epoch_whose_ranks_changed_is_refused(torch_volume, arrays):
    found = run_ranks(2, begin_before_there_are_ranks, torch_volume)
    expected = reference(arrays, seed=1)
    for rank, one in enumerate(found):
        assert one["looked"] == [expected[:10]] * 2
        assert one["lengths"] == [23, 12]
        assert len(one["errors"]) == 2
        for error in one["errors"]:
            assert "expected rank 0 of 1, with which epoch 0 of this Loader began" in error
            assert f"got rank {rank} of 2" in error
            assert "load_state_dict(state_dict())" in error
        assert one["rest"] == expected[10 + rank :: 2]
        assert one["other"] == reference(arrays, seed=1, epoch=1)[rank::2]
