"""Which rank a process finds in its environment, and when an epoch looks for it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import dlfs
from dlfs.base.units import MIB
from dlfs.epoch.ranks import Placement, is_launched, placement_of_environment
from dlfs.errors import UsageError
from tests.support.forked import call_forked
from tests.support.volumes import new_volume

COUNT = 20


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes what a launcher of the tests may have set."""
    beginnings = ("SLURM_", "PMI_", "OMPI_", "MV2_", "JSM_")
    names = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK"}
    for name in list(os.environ):
        if name in names or name.startswith(beginnings):
            monkeypatch.delenv(name)


@pytest.fixture
def dataset(tmp_path: Path) -> Iterator[dlfs.Dataset]:
    with dlfs.open(new_volume(tmp_path / "volume.img", size_bytes=16 * MIB)) as volume:
        with volume.writer("numbers") as writer:
            for number in range(COUNT):
                writer.add(b"%02d" % number, bytes([number, 0]))
        with volume["numbers"] as opened:
            yield opened


TORCHRUN = {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "0"}

FOUND = [
    ({}, (0, 1)),
    (TORCHRUN, (1, 3)),
    ({"WORLD_SIZE": "1"}, (0, 1)),
    # Lightning's launcher, in the process that it was called in and in one that it starts.
    ({"WORLD_SIZE": "2", "LOCAL_RANK": "0", "NODE_RANK": "0"}, (0, 2)),
    ({"WORLD_SIZE": "2", "LOCAL_RANK": "1", "NODE_RANK": "0"}, (1, 2)),
    ({"WORLD_SIZE": "8", "LOCAL_RANK": "1", "NODE_RANK": "3", "LOCAL_WORLD_SIZE": "2"}, (7, 8)),
    # A task of srun; a smaller step than the job; the shell of salloc; a job of one task.
    ({"SLURM_PROCID": "2", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4"}, (2, 4)),
    ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "1"}, (0, 1)),
    ({"SLURM_PROCID": "3", "SLURM_NTASKS": "4"}, (3, 4)),
    ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "0"}, (0, 4)),
    ({"SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"}, (0, 1)),
    ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, (0, 1)),
    # torchrun, started by srun on each of two nodes.
    ({**TORCHRUN, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}, (1, 3)),
    ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, (1, 2)),
    ({"PMI_RANK": "1", "PMI_SIZE": "2"}, (1, 2)),
    ({"LOCAL_RANK": "1", "PMI_RANK": "5", "PMI_SIZE": "6"}, (5, 6)),
]


@pytest.mark.parametrize(("environment", "expected"), FOUND)
def test_the_rank_is_found(monkeypatch, environment, expected):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found = placement_of_environment()
    assert (found.rank, found.world_size) == expected
    assert is_launched() == (found.world_size > 1)


REFUSED = [
    ({"WORLD_SIZE": "2"}, "RANK and WORLD_SIZE, got only WORLD_SIZE=2"),
    ({"RANK": "1"}, "RANK and WORLD_SIZE, got only RANK=1"),
    ({"LOCAL_RANK": "1"}, "RANK and WORLD_SIZE, got only LOCAL_RANK=1"),
    ({"RANK": "one", "WORLD_SIZE": "2"}, r"expected a rank and a world size .*'one'"),
    ({"RANK": "2", "WORLD_SIZE": "2"}, "expected 0 <= rank < world_size"),
    ({"WORLD_SIZE": "8", "LOCAL_RANK": "1", "NODE_RANK": "1"}, "LOCAL_RANK=1 on node 1"),
    ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, "batch script of 4 tasks"),
    ({"PMI_RANK": "1"}, "PMI_RANK and PMI_SIZE"),
]


@pytest.mark.parametrize(("environment", "message"), REFUSED)
def test_what_is_not_known_is_not_assumed(monkeypatch, dataset, environment, message):
    epochs = made(dataset)  # before the variables are there
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert is_launched()
    for epoch in epochs:
        with pytest.raises(UsageError, match=message) as caught:
            next(epoch)
        if "<" not in message:
            assert "rank=0, world_size=1" in str(caught.value)
    whole = dataset.batches(COUNT, rank=0, world_size=1)
    assert len(next(whole)) == COUNT


def made(dataset: dlfs.Dataset, **options: int) -> list[dlfs.Epoch]:
    """Return an epoch of every kind, each position of which is one sample."""
    return [
        dataset.batches(1, **options),
        dlfs.concat([dataset]).batches(1, **options),
        dlfs.token_batches(dataset, 1, **options),
        dlfs.length_batches(dataset, 2, **options),
    ]


def test_an_epoch_finds_the_rank_with_its_first_batch(monkeypatch, dataset):
    shares = []
    for rank in range(3):
        epochs = made(dataset)
        assert [len(epoch) for epoch in epochs] == [COUNT] * 4  # of now
        with monkeypatch.context() as patched:
            patched.setenv("RANK", str(rank))
            patched.setenv("WORLD_SIZE", "3")
            assert all(f"rank {rank} of 3" in repr(epoch) for epoch in epochs)
            shares.append([[int(i) for batch in epoch for i in batch.indices] for epoch in epochs])
    for share in zip(*shares, strict=True):
        assert sorted(index for indices in share for index in indices) == list(range(COUNT))


def test_a_given_rank_is_not_looked_for(monkeypatch, dataset):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for options in ({"rank": 0, "world_size": 1}, {"world_size": 1}, {"rank": 0}):
        assert [len(list(epoch)) for epoch in made(dataset, **options)] == [COUNT] * 4


def test_ranks_that_are_forked_during_an_epoch_are_refused(monkeypatch, dataset):
    epoch = dataset.batches(3, seed=1)
    assert len(next(epoch)) == 3

    def go_on_as_rank_1() -> int:
        os.environ.update({"RANK": "1", "WORLD_SIZE": "2"})
        expected = "expected rank 0 of 1, with which epoch 0 began, got rank 1 of 2"
        with pytest.raises(UsageError, match=expected):
            next(epoch)
        return sum(len(batch) for batch in epoch.resume(epoch.state()))

    assert call_forked(go_on_as_rank_1) == (COUNT - 3) // 2
    assert sum(len(batch) for batch in epoch) == COUNT - 3  # the parent goes on


def test_ranks_that_are_made_during_an_epoch_are_refused(monkeypatch, dataset):
    epochs = made(dataset)
    firsts = [[next(epoch), next(epoch)] for epoch in epochs]
    group = SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        get_rank=lambda: 1,
        get_world_size=lambda: 2,
    )
    monkeypatch.setitem(sys.modules, "torch.distributed", group)
    for epoch in epochs:
        for _ in range(2):
            with pytest.raises(UsageError, match=r"began, got rank 1 of 2.*resume\(state\(\)\)"):
                next(epoch)
        again = epoch.resume(epoch.state())
        assert sum(len(batch) for batch in again) == (COUNT - len(firsts[0])) // 2


def test_the_rank_is_not_looked_for_at_each_batch(monkeypatch, dataset):
    looked = []

    def find() -> Placement:
        looked.append(1)
        return Placement(0, 1)

    monkeypatch.setattr("dlfs.epoch.placement.placement_of_environment", find)
    for epoch in made(dataset):
        looked.clear()
        assert sum(1 for _ in epoch) == COUNT
        assert len(looked) == 1
