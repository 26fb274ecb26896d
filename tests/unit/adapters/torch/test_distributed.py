"""torch.distributed: two ranks on this machine share an epoch, and one goes on with it."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from tests.unit.adapters.torch.conftest import COUNT
from tests.unit.adapters.torch.orders import order, reference

torch = pytest.importorskip("torch")

from dlfs.adapters.torch import Loader  # noqa: E402

pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[4]

RANK = """
import json, sys
from datetime import timedelta
import torch.distributed as dist
import dlfs
from dlfs.adapters.torch import DistributedSampler, Loader
from tests.unit.adapters.torch.forked_ranks import fork_ranks

volume, address, folder = sys.argv[1:]
rank = fork_ranks(2)
dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2,
                        timeout=timedelta(seconds=60))
with dlfs.open(volume) as opened, opened["arrays"] as dataset:
    loader = Loader(dataset, 10, seed=7, num_workers=rank + 1)  # not the same on each
    taken = [batch.indices.tolist() for _, batch in zip(range(4), loader)]
    states = [None, None]
    dist.all_gather_object(states, loader.state_dict())
    assert states[0] == states[1], states
    found = {"taken": taken, "state": states[0], "rank": loader.rank, "world": loader.world_size,
             "sampled": len(DistributedSampler(dataset))}
    loader.close()
with open(f"{folder}/{rank}", "w") as file:
    json.dump(found, file)
dist.destroy_process_group()
"""


ACCELERATE = """
import json, sys
from datetime import timedelta
import torch.distributed as dist
from accelerate import Accelerator
from torch.utils.data import DataLoader
import dlfs
from dlfs.adapters.torch import ColumnLabels, Loader
from tests.unit.adapters.torch.forked_ranks import fork_ranks

volume, address, folder = sys.argv[1:]
rank = fork_ranks(2)
dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2,
                        timeout=timedelta(seconds=60))
accelerator = Accelerator(cpu=True)
range_of = lambda indices: indices.astype("int64")
with dlfs.open(volume) as opened, opened["arrays"] as dataset:
    loader = Loader(dataset, 10, collate="stack", labels=ColumnLabels(dataset, "number"))
    taken = [batch.indices.tolist() for batch in accelerator.prepare(loader)]
    whole = Loader(dataset, 10, collate="stack", labels=range_of, rank=0, world_size=1)
    split = accelerator.prepare(DataLoader(whole, batch_size=None))
    numbers = [int(label) for batch in split for label in batch.labels]
    try:
        next(iter(accelerator.prepare(DataLoader(loader, batch_size=None))))
        error = None
    except Exception as caught:  # of rank 1: that rank 0 is gone
        error = f"{type(caught).__name__}: {caught}"
with open(f"{folder}/{rank}", "w") as file:
    found = {"world": accelerator.num_processes, "taken": taken, "split": numbers, "error": error}
    json.dump(found, file)
dist.destroy_process_group()  # a thread of Gloo that wants the GIL of a Python that ends aborts
"""


def run_ranks(script, volume, folder, world=2):
    """Run a script, which makes the ranks; return what each wrote as JSON."""
    address = f"file://{folder}/meeting"  # a port that is free now may be another's by then
    command = [sys.executable, "-c", script, volume, address, folder]
    environment = {"GLOO_SOCKET_IFNAME": "lo", "PATH": ""}
    subprocess.run(command, cwd=ROOT, env=environment, timeout=240, check=True)
    return [json.loads((folder / str(rank)).read_text()) for rank in range(world)]


@pytest.mark.frameworks
def test_accelerate_does_not_split_one_ranks_share_between_all(torch_volume, tmp_path, arrays):
    import_module("accelerate")
    found = run_ranks(ACCELERATE, torch_volume, tmp_path)
    assert [one["world"] for one in found] == [2, 2]
    taken = [[index for batch in one["taken"] for index in batch] for one in found]
    assert [taken[at % 2][at // 2] for at in range(COUNT)] == reference(arrays)
    assert set(found[0]["split"] + found[1]["split"]) == set(range(COUNT))
    assert found[0]["error"].startswith(
        "UsageError: split batches with Accelerate: expected a loader"
    )
    assert found[1]["error"] is not None


def test_ranks_of_torch_distributed(torch_volume, tmp_path, arrays):
    found = run_ranks(RANK, torch_volume, tmp_path)
    assert [(one["rank"], one["world"], one["sampled"]) for one in found] == [
        (0, 2, COUNT // 2),
        (1, 2, COUNT // 2),
    ]
    taken = [-1] * 80
    for rank, one in enumerate(found):
        taken[rank::2] = [index for batch in one["taken"] for index in batch]
    loader = Loader(arrays, 16)
    loader.load_state_dict(found[0]["state"])
    assert taken + order(loader) == reference(arrays, seed=7)


TRAINING = """
import json, os, sys
from datetime import timedelta
import torch
import torch.distributed as dist
import dlfs
from dlfs.adapters.torch import DistributedBatchSampler, Loader, SampleDataset
from tests.unit.adapters.torch.forked_ranks import fork_ranks

volume, address, folder = sys.argv[1:]
world = 4
rank = fork_ranks(world)
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
    del os.environ[name]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world,
                        timeout=timedelta(seconds=60))
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(6, 1))


def train(batches):
    taken = []
    for samples, indices in batches:
        taken.append(indices)
        model(samples.flatten(1)).sum().backward()  # waits for the other ranks
    return taken


with dlfs.open(volume) as opened, opened["arrays"] as dataset:
    form = {"dtype": "float32", "shape": (2, 3)}
    loader = Loader(dataset, 57, seed=7, where=range(229), num_workers=rank % 2, **form)
    epochs = [train((b.samples, b.indices.tolist()) for b in loader) for _ in range(2)]
    batches = iter(loader)
    begun = train((b.samples, b.indices.tolist()) for b in [next(batches)])
    state = loader.state_dict()
    loader.close()
    resumed = Loader(dataset, 10, where=range(229), **form)
    resumed.load_state_dict(state)
    rest = train((b.samples, b.indices.tolist()) for b in resumed)
    sampler = DistributedBatchSampler(dataset, 57, seed=7, where=range(229))
    numbers = SampleDataset(dataset, labels=lambda indices: indices.astype("int64"), **form)
    sampled = train((samples, labels.tolist()) for samples, labels in
                    torch.utils.data.DataLoader(numbers, batch_sampler=sampler))
with open(f"{folder}/{rank}", "w") as file:
    json.dump({"epochs": epochs, "begun": begun, "rest": rest, "sampled": sampled}, file)
dist.destroy_process_group()
"""


def test_ranks_with_unequal_data_end_together(torch_volume, tmp_path, arrays):
    world = 4
    found = run_ranks(TRAINING, torch_volume, tmp_path, world)
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


MESH = """
import json, sys, warnings
from datetime import timedelta
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
import dlfs
from dlfs.adapters.torch import DistributedSampler, Loader
from tests.unit.adapters.torch.forked_ranks import fork_ranks

volume, address, folder = sys.argv[1:]
rank = fork_ranks(2)
dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2,
                        timeout=timedelta(seconds=60))


def warned(act):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        act()
    return [str(one.message) for one in caught if "DeviceMesh" in str(one.message)]


with dlfs.open(volume) as opened, opened["arrays"] as dataset:
    def load(**options):
        return lambda: next(iter(Loader(dataset, 10, **options)))

    data = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    found = {"data": warned(load())}
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    found["tensor"] = warned(load())
    found["sampler"] = warned(lambda: next(iter(DistributedSampler(dataset))))
    dp = mesh["dp"]
    found["given"] = warned(load(rank=dp.get_local_rank(), world_size=dp.size()))
    twice = Loader(dataset, 10)
    found["once"] = warned(lambda: [next(iter(twice)), next(iter(twice))])
with open(f"{folder}/{rank}", "w") as file:
    json.dump(found, file)
dist.destroy_process_group()
"""


def test_ranks_of_a_mesh_that_need_the_same_samples_are_warned_of(torch_volume, tmp_path):
    for found in run_ranks(MESH, torch_volume, tmp_path):
        assert found["data"] == found["given"] == []
        for name in ("tensor", "sampler", "once"):
            assert len(found[name]) == 1
            assert "a DeviceMesh has the dimensions tp: ranks of tensor" in found[name][0]
            assert 'rank=mesh["dp"].get_local_rank()' in found[name][0]


CHANGED = """
import json, os, sys
from datetime import timedelta
import torch.distributed as dist
import dlfs
from dlfs import UsageError
from dlfs.adapters.torch import Loader
from tests.unit.adapters.torch.forked_ranks import fork_ranks

volume, address, folder = sys.argv[1:]
rank = fork_ranks(2)
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
    del os.environ[name]
with dlfs.open(volume) as opened, opened["arrays"] as dataset:
    loaders = [Loader(dataset, 10, seed=1) for _ in range(3)]
    looked = [next(iter(loader)).indices.tolist() for loader in loaders[:2]]
    reading = iter(loaders[2])
    next(reading)
    lengths = [len(loaders[0])]
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2,
                            timeout=timedelta(seconds=60))
    errors = []
    for again in (lambda: next(iter(loaders[0])), lambda: next(reading)):
        try:
            again()
        except UsageError as error:
            errors.append(str(error))
    loaders[0].load_state_dict(loaders[0].state_dict())
    lengths.append(len(loaders[0]))
    rest = [index for batch in loaders[0] for index in batch.indices.tolist()]
    loaders[1].set_epoch(1)
    other = [index for batch in loaders[1] for index in batch.indices.tolist()]
with open(f"{folder}/{rank}", "w") as file:
    json.dump({"looked": looked, "errors": errors, "lengths": lengths, "rest": rest,
               "other": other}, file)
dist.destroy_process_group()
"""


def test_an_epoch_whose_ranks_changed_is_refused(torch_volume, tmp_path, arrays):
    found = run_ranks(CHANGED, torch_volume, tmp_path)
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
