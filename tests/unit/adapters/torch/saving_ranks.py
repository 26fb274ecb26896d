"""Ranks that save and load checkpoints together; each function runs in a process of its own.

The processes are forks of a server that has imported PyTorch, so that a rank starts at once.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from dlfs.adapters.torch.checkpoint import StorageReader, StorageWriter

ROWS, COLUMNS = 24, 5000

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(
    [
        "dlfs.adapters.torch.checkpoint",
        "dlfs.volume.volume",
        "torch._dynamo",  # what a DTensor imports when it is first used
        "torch.distributed.checkpoint",
        "torch.distributed.device_mesh",
        "torch.distributed.tensor",
    ]
)


def whole(step: int) -> torch.Tensor:
    """Return the tensor that all ranks together save at a step."""
    return torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS) + step


def state(step: int, mesh: Any) -> dict[str, Any]:
    """Return the state of one rank at a step: a sharded tensor, a common one, and objects."""
    return {
        "sharded": distribute_tensor(whole(step), mesh, [Shard(0)]),
        "common": torch.full((7,), step, dtype=torch.bfloat16),
        "frozen": torch.arange(3000),
        "step": step,
    }


def save(mesh: Any, volume: str, step: int, **options: Any) -> None:
    dcp.save(
        state(step, mesh), checkpoint_id=str(step), storage_writer=StorageWriter(volume, **options)
    )


def save_and_die(mesh: Any, volume: str, step: int, rank: int, when: str) -> None:
    """Save, but one rank is killed: as soon as it may write, or when it has written."""

    class Killed(StorageWriter):
        def write_data(self, plan: Any, planner: Any) -> Any:
            if dist.get_rank() == rank and when == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            written = super().write_data(plan, planner)
            if dist.get_rank() == rank and when == "after":
                os.kill(os.getpid(), signal.SIGKILL)
            return written

    try:
        dcp.save(state(step, mesh), checkpoint_id=str(step), storage_writer=Killed(volume))
    except BaseException:  # noqa: BLE001  the connection to the killed rank is lost
        return
    raise AssertionError("a save without one of its ranks was complete")


def load(mesh: Any, volume: str, step: int) -> None:
    """Load the newest checkpoint and compare it with the state of a step."""
    found = state(-1, mesh)
    dcp.load(found, storage_reader=StorageReader(volume))
    expected = state(step, mesh)
    assert isinstance(found["sharded"], DTensor)
    assert torch.equal(found["sharded"].to_local(), expected["sharded"].to_local())
    assert torch.equal(found["common"], expected["common"])
    assert torch.equal(found["frozen"], expected["frozen"])
    assert found["step"] == step


def run(world: int, function: Callable[..., None], *arguments: Any) -> list[int]:
    """Run a function in ranks with a device mesh, and return their exit codes."""
    with tempfile.TemporaryDirectory() as folder:
        init = f"file://{Path(folder) / 'init'}"
        ranks = [
            processes.Process(target=_rank, args=(rank, world, init, function, arguments))
            for rank in range(world)
        ]
        for one in ranks:
            one.start()
        for one in ranks:
            one.join()
        return [one.exitcode for one in ranks]


def _rank(
    rank: int, world: int, init: str, function: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=init, rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    function(init_device_mesh("cpu", (world,)), *arguments)
    os._exit(0)  # groups whose peers were killed cannot be destroyed
