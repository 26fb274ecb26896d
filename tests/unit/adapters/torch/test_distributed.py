"""torch.distributed: two ranks on this machine share an epoch, and one goes on with it."""

from __future__ import annotations

import json
import subprocess
import sys
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

volume, address, rank, out = sys.argv[1:]
dist.init_process_group("gloo", init_method=address, rank=int(rank), world_size=2,
                        timeout=timedelta(seconds=60))
with dlfs.open(volume) as opened, opened["arrays"] as dataset:
    loader = Loader(dataset, 10, seed=7, num_workers=int(rank) + 1)  # not the same on each
    taken = [batch.indices.tolist() for _, batch in zip(range(4), loader)]
    states = [None, None]
    dist.all_gather_object(states, loader.state_dict())
    assert states[0] == states[1], states
    found = {"taken": taken, "state": states[0], "rank": loader.rank, "world": loader.world_size,
             "sampled": len(DistributedSampler(dataset))}
    loader.close()
with open(out, "w") as file:
    json.dump(found, file)
dist.destroy_process_group()
"""


def test_ranks_of_torch_distributed(torch_volume, tmp_path, arrays):
    address = f"file://{tmp_path}/meeting"  # a port that is free now may be another's by then
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, torch_volume, address, str(rank), tmp_path / str(rank)],
            cwd=ROOT,
            env={"GLOO_SOCKET_IFNAME": "lo", "PATH": ""},
        )
        for rank in range(2)
    ]
    assert [process.wait(120) for process in processes] == [0, 0]
    found = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)]
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
