"""Meshes of ranks: those of tensor, pipeline and context parallelism read the same samples.

Four processes start once. They go through all meshes, log the indices of what each rank read, and
train one step of a model that is sharded and tensor-parallel. The tests look at what they logged.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import dlfs
from dlfs.base.units import MIB
from dlfs.errors import UsageError
from tests.support.volumes import new_volume
from tests.unit.adapters.torch.conftest import COUNT
from tests.unit.adapters.torch.orders import order, reference

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.distributed.tensor.parallel import (  # noqa: E402
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader  # noqa: E402

from dlfs.adapters.torch import (  # noqa: E402
    DistributedBatchSampler,
    DistributedSampler,
    Loader,
    SampleDataset,
)
from dlfs.adapters.torch.checkpoint import StorageReader, StorageWriter  # noqa: E402
from tests.support.torch_processes import run_ranks  # noqa: E402

pytestmark = pytest.mark.torch

WORLD = 4
GLOBAL = 24
"""Samples of a global batch, in every mesh."""
SEED = 7
FORM: dict[str, Any] = {"dtype": "float32", "shape": (2, 3)}

MESHES: dict[str, tuple[tuple[int, ...], tuple[str, ...], Any]] = {
    "2x2": ((2, 2), ("dp", "tp"), "dp"),
    "4x1": ((4, 1), ("dp", "tp"), "dp"),
    "1x4": ((1, 4), ("dp", "tp"), ["dp"]),
    "2x1x2": ((2, 1, 2), ("dp", "pp", "tp"), "dp"),
    "pp": ((2, 2), ("pp", "dp"), "dp"),
    "hsdp": ((2, 2, 1), ("dp_replicate", "dp_shard", "tp"), ("dp_replicate", "dp_shard")),
}
SHARES = {
    "2x2": [0, 0, 1, 1],
    "4x1": [0, 1, 2, 3],
    "1x4": [0, 0, 0, 0],
    "2x1x2": [0, 0, 1, 1],
    "pp": [0, 1, 0, 1],
    "hsdp": [0, 1, 2, 3],
}
"""Share of each rank in each mesh."""


# ---- in the ranks --------------------------------------------------------------------------------


def go_through_meshes(join: Any, volume: str, checkpoints: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with dlfs.open(volume) as opened, opened["arrays"] as dataset:
        late: list[Any] = []
        early = Loader(dataset, GLOBAL // 2, seed=SEED, placement=lambda: late[0])
        rank = join()
        meshes = {name: make_mesh(name) for name in MESHES}
        for name, mesh in meshes.items():
            found[name] = read_all(dataset, (mesh, MESHES[name][2]))
        late.append((meshes["2x2"], "dp"))
        found["early"] = order(early)
        found["ways"] = read_in_other_ways(dataset, meshes["2x2"])
        found["checkpoints"] = save_and_resume(dataset, meshes, checkpoints)
        found["refused"] = refuse(dataset, meshes)
        found["steps"] = {
            name: train(dataset, meshes[name], MESHES[name][2])
            for name in ("2x2", "4x1", "1x4", "2x1x2", "hsdp")
        }
    return {**found, "rank": rank}


def make_mesh(name: str) -> DeviceMesh:
    shape, names, _ = MESHES[name]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def batch_size(placement: Any) -> int:
    return GLOBAL // dlfs.find_placement(placement).world_size


def load(dataset: dlfs.Dataset, placement: Any, **options: Any) -> Loader:
    return Loader(dataset, batch_size(placement), seed=SEED, placement=placement, **options)


def read_all(dataset: dlfs.Dataset, placement: Any) -> dict[str, list[int]]:
    """Return the indices of this rank in an epoch of everything that takes a placement."""
    size = batch_size(placement)
    share = {"seed": SEED, "placement": placement}
    loader = load(dataset, placement)
    steps = len(loader)
    found = {
        "loader": order(loader),
        "epoch": order_of(dataset.batches(size, **share)),
        "view": order_of(dlfs.concat([dataset]).batches(size, **share)),
        "tokens": order_of(dlfs.token_batches(dataset, 12, batch_size=size, **share)),
        "lengths": order_of(dlfs.length_batches(dataset, 24, **share)),
        "sampler": list(DistributedSampler(dataset, **share)),
        "batches": [i for batch in DistributedBatchSampler(dataset, size, **share) for i in batch],
    }
    counts: list[Any] = [None] * WORLD
    dist.all_gather_object(counts, (steps, len(found["loader"]), len(found["sampler"])))
    assert len({*counts}) == 1, counts  # ranks wait for each other in each step
    return found


def order_of(batches: Any) -> list[int]:
    return [int(index) for batch in batches for index in batch.indices]


def read_in_other_ways(dataset: dlfs.Dataset, mesh: DeviceMesh) -> dict[str, list[int]]:
    """Return the indices of this rank at 2x2, said and read in other ways."""
    data = mesh["dp"]
    ways = {
        "dimension": order(load(dataset, data)),
        "group": order(load(dataset, data.get_group())),
        "consecutive": order(load(dataset, dlfs.Replicated(2))),
        "numbers": order(load(dataset, dlfs.find_placement(data))),
    }
    # Spawned workers take seconds to import PyTorch: those of one rank are enough.
    for method in ("fork", "spawn") if dist.get_rank() == WORLD - 1 else ("fork",):
        options = {"num_workers": 1, "multiprocessing_context": method}
        loader = load(dataset, (mesh, "dp"), **options)
        ways[method] = order(loader)
        loader.close()
        wrapped = DataLoader(load(dataset, lambda: (mesh, "dp")), batch_size=None, **options)
        ways[f"DataLoader by {method}"] = order(wrapped)
    samples = SampleDataset(dataset, labels=lambda indices: indices.astype("int64"), **FORM)
    sampler = DistributedSampler(dataset, seed=SEED, placement=data)
    taken = DataLoader(samples, 4, sampler=sampler, num_workers=1)
    ways["sampler"] = [int(label) for _, labels in taken for label in labels]
    return ways


def save_and_resume(
    dataset: dlfs.Dataset, meshes: dict[str, DeviceMesh], checkpoints: str
) -> dict[str, Any]:
    """Save behind three batches at 2x2, by all ranks at once; return what other meshes go on with.

    The state is one of torch.distributed.checkpoint, in a volume.
    """
    loader = load(dataset, (meshes["2x2"], "dp"))
    batches = iter(loader)
    taken = [i for _ in range(3) for i in next(batches).indices.tolist()]
    states: list[Any] = [None] * WORLD
    dist.all_gather_object(states, loader.state_dict())
    writer = StorageWriter(checkpoints, "run")
    dcp.save({"loader": loader}, checkpoint_id=1, storage_writer=writer)
    reader = StorageReader(checkpoints, "run")
    stored = sorted(index.fqn for index in reader.read_metadata().storage_data)
    found = {"taken": taken, "states": states, "stored": stored}
    for name in ("4x1", "1x4", "hsdp", "pp", "2x2"):
        again = load(dataset, (meshes[name], MESHES[name][2]))
        dcp.load({"loader": again}, storage_reader=StorageReader(checkpoints, "run"))
        found[name] = [again.position, order(again)]
    return found


def refuse(dataset: dlfs.Dataset, meshes: dict[str, DeviceMesh]) -> dict[str, str]:
    """Return the error of each placement that is ambiguous, or none of this rank."""
    part = DeviceMesh("cpu", [0, 1])
    group = dist.new_group([0, 1])
    said = {
        "nothing": None,
        "several": meshes["2x2"],
        "nameless": init_device_mesh("cpu", (2, 2)),
        "mesh": part,
        "group": group,
    }
    found = {}
    for name, placement in said.items():
        begun = {
            "loader": lambda p: next(iter(Loader(dataset, 8, placement=p))),
            "epoch": lambda p: next(dataset.batches(8, placement=p)),
            "sampler": lambda p: next(iter(DistributedSampler(dataset, placement=p))),
        }
        errors = {error_of(lambda p=placement, act=act: act(p)) for act in begun.values()}
        assert len(errors) == 1, errors
        found[name] = errors.pop()
    found["nothing, in a worker"] = error_of(lambda: pickle.dumps(Loader(dataset, 8)))
    whole = dist.group.WORLD
    found["world"] = error_of(lambda: next(iter(Loader(dataset, 8, placement=whole))))
    loader = load(dataset, (meshes["2x2"], "dp"))
    for again in (pickle.loads(pickle.dumps(loader)), pickle.loads(pickle.dumps([loader]))[0]):
        found["pickled"] = error_of(lambda loader=again: next(iter(loader)))
    now = [meshes["4x1"]]
    loader = Loader(dataset, 4, placement=lambda: (now[0], "dp"))
    next(iter(loader))
    now[0] = meshes["1x4"]
    found["changed"] = error_of(lambda: next(iter(loader)))
    return found


def error_of(act: Callable[[], Any]) -> str:
    try:
        act()
    except UsageError as error:
        return str(error)
    return ""


def make_model() -> torch.nn.Sequential:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))


def step(model: torch.nn.Module, samples: torch.Tensor) -> list[Any]:
    """Take one step of an optimizer, and return all parameters."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(samples.flatten(1) / COUNT).square().mean().backward()
    optimizer.step()
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return [one.detach().numpy() for one in whole]


def train(dataset: dlfs.Dataset, mesh: DeviceMesh, data: Any) -> list[Any]:
    """Take one step of a model that is tensor-parallel along tp and sharded along the rest."""
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model = parallelize_module(make_model(), mesh["tp"], plan)
    names = (data,) if isinstance(data, str) else tuple(data)
    fully_shard(model, mesh=mesh[names])
    loader = load(dataset, (mesh, data), **FORM)
    return step(model, next(iter(loader)).samples)


# ---- what they logged ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def logged(torch_volume, tmp_path_factory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("meshes")
    checkpoints = new_volume(folder / "checkpoints.img", size_bytes=16 * MIB)
    found = run_ranks(WORLD, go_through_meshes, str(torch_volume), str(checkpoints))
    assert [one if isinstance(one, int) else one["rank"] for one in found] == [*range(WORLD)]
    return found


def shares_of(name: str, taken: list[list[int]]) -> list[list[int]]:
    """Return what each share of a mesh was, after a comparison of the ranks that have the same."""
    shares: dict[int, list[int]] = {}
    for share, indices in zip(SHARES[name], taken, strict=True):
        assert shares.setdefault(share, indices) == indices
    return [shares[share] for share in range(len(shares))]


def interleave(shares: list[list[int]], count: int) -> list[int]:
    """Return the order of which the shares are, without what they repeat at its end."""
    whole = [index for round_ in zip(*shares, strict=True) for index in round_]
    assert whole[count:] == whole[: len(whole) - count]
    return whole[:count]


@pytest.mark.parametrize("name", MESHES)
def test_peers_of_a_mesh_read_the_same_and_others_the_rest(name, logged, arrays):
    expected = reference(arrays, seed=SEED)
    for kind in ("loader", "sampler", "batches"):
        shares = shares_of(name, [one[name][kind] for one in logged])
        assert interleave(shares, COUNT) == expected, kind
    share = {"seed": SEED, "placement": dlfs.Placement(0, 1)}
    whole = {
        "epoch": expected,
        "view": order_of(dlfs.concat([arrays]).batches(GLOBAL, **share)),
        "tokens": order_of(dlfs.token_batches(arrays, 12, batch_size=GLOBAL, **share)),
        "lengths": order_of(dlfs.length_batches(arrays, 24, **share)),
    }
    for kind, all_of_it in whole.items():
        shares = shares_of(name, [one[name][kind] for one in logged])
        if kind == "lengths":  # ranks take batches in turn
            assert sorted(i for one in shares for i in one) == sorted(all_of_it)
            continue
        for share_of, indices in enumerate(shares):
            assert indices == all_of_it[share_of :: len(shares)], kind


def test_a_placement_may_be_said_in_other_ways_and_goes_to_workers(logged):
    for one in logged:
        expected = one["2x2"]["loader"]
        assert one["early"] == expected  # made before torch.distributed was initialised
        assert {name for name, taken in one["ways"].items() if taken != expected} == set()


@pytest.mark.parametrize("name", ["4x1", "1x4", "hsdp", "pp", "2x2"])
def test_a_checkpoint_of_2x2_goes_on_exactly_in_another_mesh(name, logged, arrays):
    saved = [one["checkpoints"] for one in logged]
    taken = interleave(shares_of("2x2", [one["taken"] for one in saved]), 3 * GLOBAL)
    states = saved[0]["states"]
    assert all(state == states[0] for one in saved for state in one["states"])
    assert not {"rank", "world_size", "placement", "dataloader"} & {*states[0]}
    # One value of each, though every rank saved it.
    assert saved[0]["stored"] == sorted(f"loader.{key}" for key in states[0])
    assert all(one[name][0] == 3 * GLOBAL for one in saved)
    expected = reference(arrays, seed=SEED)
    shares = shares_of(name, [one[name][1] for one in saved])
    rest = [index for round_ in zip(*shares, strict=True) for index in round_]
    padding = len(rest) - (COUNT - 3 * GLOBAL)
    assert taken + rest == expected + expected[:padding]
    assert 0 <= padding < len(shares)


def test_what_is_ambiguous_is_refused(logged):
    for rank, one in enumerate(logged):
        found = one["refused"]
        assert "a DeviceMesh has the dimensions pp" in found["nothing"]
        assert 'placement=mesh["dp"]' in found["nothing"] == found["nothing, in a worker"]
        assert "2 dimensions, dp and tp" in found["several"]
        assert "2 dimensions, without names" in found["nameless"]
        assert found["world"] == ""
        for name, text in (("mesh", "of which this rank is a member"), ("group", "no member of")):
            assert (text in found[name]) == (rank > 1)
        assert "a DeviceMesh belongs to the process that made it" in found["pickled"]
        assert f"expected rank {rank} of 4, with which epoch 0 of this Loader" in found["changed"]
        assert "got rank 0 of 1" in found["changed"]


@pytest.mark.parametrize("name", ["2x2", "4x1", "1x4", "2x1x2", "hsdp"])
def test_a_step_of_fsdp_and_tensor_parallelism_is_that_of_one_process(name, logged, arrays):
    whole = Loader(arrays, GLOBAL, seed=SEED, rank=0, world_size=1, **FORM)
    expected = step(make_model(), next(iter(whole)).samples)
    for one in logged:
        for got, wanted in zip(one["steps"][name], expected, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)
