"""Processes that have imported PyTorch and its frameworks, and ranks of ``torch.distributed``."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.processes import PROCESSES, preload

__all__ = ["PROCESSES", "run_ranks", "set_rank"]

preload(
    "hypothesis",
    "accelerate",
    "lightning",
    "sklearn",
    "torch._dynamo",  # what a DTensor imports when it is first used
    "torch.distributed.checkpoint",
    "torch.distributed.tensor",
    "torchdata.stateful_dataloader",
    "transformers.trainer",
    "dlfs.adapters.torch.checkpoint",
    "examples.demo.trainer",
)


def run_ranks(
    world: int, function: Callable[..., Any], *arguments: Any, launched: bool = False
) -> list[Any]:
    """Run a function in ranks.

    Args:
        world: number of ranks.
        function: called with a function that joins the ranks, which returns the rank, and with the
            arguments.
        arguments: arguments of the function.
        launched: True if the environment says the rank, as launchers do.

    Returns:
        The result of each rank; of one that failed, its exit code.
    """
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            PROCESSES.Process(
                target=_run_rank, args=(rank, world, folder, launched, function, arguments)
            )
            for rank in range(world)
        ]
        for one in ranks:
            one.start()
        for one in ranks:
            one.join()
        return [
            one.exitcode or pickle.loads(Path(folder, str(rank)).read_bytes())
            for rank, one in enumerate(ranks)
        ]


def _run_rank(
    rank: int,
    world: int,
    folder: str,
    launched: bool,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if launched:
        set_rank(rank, world)
    torch.set_num_threads(1)
    found = function(partial(_join, rank, world, folder), *arguments)
    Path(folder, str(rank)).write_bytes(pickle.dumps(found))


def _join(rank: int, world: int, folder: str) -> int:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",  # a port that is free now may be another's by then
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
    )
    return rank


def set_rank(rank: int, world: int) -> None:
    """Put the rank of this process into its environment, as launchers do."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    # Accelerate wants them, and does not use them.
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
