"""Ranks that save and load checkpoints together; each function runs in a process of its own."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from dlfs.adapters.torch.checkpoint import StorageReader, StorageWriter
from tests.support.torch_processes import run_ranks

ROWS, COLUMNS = 24, 5000


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


def run(world: int, function: Callable[..., None], *arguments: Any) -> list[int | None]:
    """Run a function in ranks with a device mesh; return the exit codes of those that failed."""
    return run_ranks(world, _run_with_mesh, world, function, arguments)


def _run_with_mesh(
    join: Callable[[], int], world: int, function: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    join()
    function(init_device_mesh("cpu", (world,)), *arguments)
