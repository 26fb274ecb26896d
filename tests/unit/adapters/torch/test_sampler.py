"""Samplers: PyTorch's rules, the order of DLFS, no list of indices."""

from __future__ import annotations

import pickle
import tracemalloc

import numpy as np
import pytest

import dlfs
from dlfs.errors import UsageError
from tests.unit.adapters.torch.conftest import COUNT
from tests.unit.adapters.torch.orders import order, reference

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader, get_worker_info  # noqa: E402
from torch.utils.data.distributed import DistributedSampler as TorchSampler  # noqa: E402

from dlfs.adapters.torch import (  # noqa: E402
    DistributedBatchSampler,
    DistributedSampler,
    Loader,
    SampleDataset,
    collate_jagged,
    collate_list,
)
from dlfs.adapters.torch import sampler as sampler_module  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 229, 230, 231, 500])
def test_pytorchs_rules(samples, ranks, drop_last, monkeypatch):
    monkeypatch.setattr(sampler_module, "BLOCK_POSITIONS", 16)
    dataset = SampleDataset(samples)
    shuffled = reference(samples, seed=3, epoch=2)
    for rank in range(0, ranks, max(1, ranks // 5)):
        arguments = {"num_replicas": ranks, "rank": rank, "drop_last": drop_last, "seed": 3}
        theirs = list(TorchSampler(dataset, shuffle=False, **arguments))
        ours = DistributedSampler(samples, shuffle=False, **arguments)
        assert (list(ours), len(ours)) == (theirs, len(theirs))
        ours = DistributedSampler(dataset, **arguments)
        ours.set_epoch(2)
        assert list(ours) == [shuffled[position] for position in theirs]
        assert list(ours) == list(ours)  # it stays in its epoch


@pytest.mark.parametrize("shuffle", [True, "global", "chunk", False])
@pytest.mark.parametrize(("ranks", "batch_size"), [(1, 16), (3, 10), (4, 300)])
def test_batches(samples, shuffle, ranks, batch_size):
    one = list(DistributedSampler(samples, 1, 0, shuffle, seed=4))
    assert sorted(one) == list(range(COUNT))
    step = ranks * batch_size
    for drop_last in (False, True):
        end = COUNT // step * step if drop_last else -(-COUNT // ranks) * ranks
        for rank in range(ranks):
            sampler = DistributedBatchSampler(
                samples, batch_size, ranks, rank, shuffle, 4, drop_last
            )
            mine = (one + one)[:end][rank::ranks]
            cut = [mine[at : at + batch_size] for at in range(0, len(mine), batch_size)]
            assert list(sampler) == cut
            assert len(sampler) == len(cut)


def test_batches_resume_at_another_number_of_ranks(samples):
    sampler = DistributedBatchSampler(samples, 10, 3, 1, seed=6)
    sampler.set_epoch(2)
    batches = iter(sampler)
    assert [len(next(batches)) for _ in range(2)] == [10, 10]
    state = pickle.loads(pickle.dumps(sampler.state_dict()))
    expected = reference(samples, seed=6, epoch=2)[60:]
    rest = [-1] * len(expected)
    for rank in range(2):
        resumed = DistributedBatchSampler(samples, 7, 2, rank)
        resumed.load_state_dict(state)
        resumed.set_epoch(2)  # as loops do: it stands in it
        assert len(resumed) == 17  # of a whole epoch, always
        rest[rank::2] = [index for batch in resumed for index in batch]
        assert len(list(resumed)) == 17
        assert resumed.state_dict()["epoch"] == 4
    assert rest == expected


def test_storage_order_and_index_order_are_not_mistaken(samples):
    """Their states say ``shuffle`` None alike."""
    sampler = DistributedBatchSampler(samples, 10, 1, 0, shuffle=False)
    batches = iter(sampler)
    given = [*next(batches), *next(batches)]
    state = pickle.loads(pickle.dumps(sampler.state_dict()))
    for loader in (Loader(samples, 10, shuffle=None), Loader(samples, 10)):
        with pytest.raises(UsageError, match=r"index order.* load it into such a sampler"):
            loader.load_state_dict(state)
    resumed = DistributedBatchSampler(samples, 10, 1, 0)
    resumed.load_state_dict(state)
    rest = [index for batch in resumed for index in batch]
    assert given + rest == list(range(COUNT))
    loader = Loader(samples, 10, shuffle=None)
    next(iter(loader))
    with pytest.raises(UsageError, match=r"storage order \(shuffle=None\); load it into a Loader"):
        resumed.load_state_dict(loader.state_dict())
    # With chosen samples, both have their order.
    chosen = {"order": list(range(100))}
    sampler = DistributedBatchSampler(samples, 10, 1, 0, shuffle=False, **chosen)
    next(iter(sampler))
    loader = Loader(samples, 10, **chosen)
    loader.load_state_dict(sampler.state_dict())
    assert order(loader) == list(range(10, 100))


@pytest.mark.parametrize(("before", "after"), [(0, 0), (2, 2), (3, 2), (0, 3)])
def test_a_state_of_torchdata(samples, before, after):
    module = pytest.importorskip("torchdata.stateful_dataloader")
    dataset = SampleDataset(samples)

    def outer(sampler, workers):
        return module.StatefulDataLoader(
            dataset, batch_sampler=sampler, num_workers=workers, collate_fn=collate_list
        )

    loader = outer(DistributedBatchSampler(samples, 16, 1, 0, seed=1), before)
    batches = iter(loader)
    given = [next(batches) for _ in range(5)]
    state = loader.state_dict()
    del batches, loader
    sampler = DistributedBatchSampler(samples, 16, 1, 0)
    if before == after:
        loader = outer(sampler, after)
        loader.load_state_dict(state)
    else:
        sampler.load_state_dict(state)
        loader = outer(sampler, after)
    got = [sample.numpy().tobytes() for batch in [*given, *loader] for sample in batch]
    assert got == [samples[index] for index in reference(samples, seed=1)]


def test_a_dataloader_reads_a_batch_by_one_call(samples, monkeypatch):
    calls = []
    read = samples.read
    monkeypatch.setattr(
        samples, "read", lambda indices: calls.append(len(indices)) or read(indices)
    )
    dataset = SampleDataset(samples, transform=bytes)
    sampler = DistributedBatchSampler(samples, 50, 1, 0)
    loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=list)
    assert [len(batch) for batch in loader] == calls == [50, 50, 50, 50, 30]
    assert dataset[-1] == samples[COUNT - 1]
    for wrong in (COUNT, -COUNT - 1):
        with pytest.raises(IndexError, match=f"of {COUNT} in dataset 'bytes'"):
            dataset[wrong]
    dataset.close()


def in_worker(sample: memoryview) -> int:
    assert get_worker_info() is not None
    return len(sample)


def test_transforms_of_a_dataset_used_here_and_in_forked_workers(samples):
    dataset = SampleDataset(samples, transform=len)
    expected = [len(samples[index]) for index in range(COUNT)]
    assert dataset[3] == expected[3]  # its threads are here now
    loader = DataLoader(dataset, batch_size=32, num_workers=2)
    assert [length for batch in loader for length in batch.tolist()] == expected
    assert dataset[4] == expected[4]
    dataset.close()
    dataset = SampleDataset(samples, transform=in_worker)
    loader = DataLoader(dataset, batch_size=32, num_workers=2)
    assert [length for batch in loader for length in batch.tolist()] == expected


def test_collating_samples_of_any_length(samples):
    dataset = SampleDataset(samples, labels=lambda indices: indices.astype("int64") * 2)
    for collate in (collate_list, collate_jagged):
        loader = DataLoader(dataset, batch_size=40, collate_fn=collate, num_workers=1)
        seen = 0
        for batch, labels in loader:
            assert labels.tolist() == list(range(2 * seen, 2 * seen + 2 * len(labels), 2))
            for sample in batch:
                assert sample.numpy().tobytes() == samples[seen]
                seen += 1
        assert seen == COUNT
    with pytest.raises(UsageError, match=r"got torch.float32 \(2,\) at position 1 behind"):
        collate_jagged([torch.zeros(2, dtype=torch.uint8), torch.zeros(2)])
    with pytest.raises(UsageError, match=r"got int at position 0"):
        collate_jagged([1])


def test_no_list_of_indices(monkeypatch):
    monkeypatch.setattr(sampler_module, "BLOCK_POSITIONS", 8)
    count = 20_000
    dlfs.format_volume("mem:many?size=16MiB", force=True)
    with dlfs.open("mem:many") as volume:
        with volume.writer("many") as writer:
            writer.add_batch(
                [b"%05d" % index for index in range(count)],
                bytes(count),
                np.arange(count),
                np.ones(count, np.int64),
            )
        with volume["many"] as many:
            indices = iter(DistributedSampler(many, 1, 0))
            next(indices)
            tracemalloc.start()
            try:
                taken = 1 + sum(1 for _ in indices)
                _, peak = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
    assert taken == count
    assert peak < count  # bytes: an eighth of a bare list


@pytest.mark.parametrize(
    "arguments",
    [{"num_replicas": 2, "rank": 2}, {"rank": 0}, {"shuffle": "yes"}, {"seed": -1}],
)
def test_wrong_arguments(samples, arguments):
    with pytest.raises(UsageError):
        DistributedSampler(samples, **arguments)
    with pytest.raises(UsageError):
        DistributedBatchSampler(samples, 4, **arguments)
    with pytest.raises(UsageError, match="batch_size as an integer >= 1"):
        DistributedBatchSampler(samples, 0)
    with pytest.raises(UsageError, match="expected 0 or more"):
        DistributedSampler(samples).set_epoch(-1)
