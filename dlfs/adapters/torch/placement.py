"""Determines the rank of this process and the number of ranks."""

from __future__ import annotations

import os

import torch.distributed

from dlfs.errors import UsageError

_VARIABLES = ("RANK", "WORLD_SIZE")
"""Environment variables that torchrun and other launchers set."""


def find_placement(rank: int | None = None, world_size: int | None = None) -> tuple[int, int]:
    """Return rank and world size: the arguments, else torch.distributed's, else the environment's.

    Args:
        rank: rank of this process, 0..world_size-1; requires ``world_size``.
        world_size: number of ranks, >= 1.

    Returns:
        Rank and world size; 0 and 1 if they are not set anywhere.

    Raises:
        UsageError: only one of the two is known, or they are no numbers, or out of range.
    """
    source, found = _find(rank, world_size)
    try:
        number, size = (int(str(value)) for value in found)
    except ValueError as error:
        raise UsageError(
            f"find this process's rank: expected a rank and a world size from {source}, got {found}"
        ) from error
    if not 0 <= number < size:
        raise UsageError(
            f"find this process's rank: expected 0 <= rank < world_size from {source}, "
            f"got {number} and {size}"
        )
    return number, size


def is_launched() -> bool:
    """Return True if this process is one of several ranks of torch.distributed or a launcher.

    Such ranks usually wait for each other in every step, as under DistributedDataParallel.
    """
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return bool(distributed.get_world_size() > 1)
    return os.environ.get("WORLD_SIZE", "1") != "1"


def _find(
    rank: int | None, world_size: int | None
) -> tuple[str, tuple[int | str | None, int | str | None]]:
    if rank is not None or world_size is not None:
        return "the arguments", (rank, world_size)
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return "torch.distributed", (distributed.get_rank(), distributed.get_world_size())
    if any(name in os.environ for name in _VARIABLES):
        return "the environment's RANK and WORLD_SIZE", (
            os.environ.get("RANK"),
            os.environ.get("WORLD_SIZE"),
        )
    return "nowhere", (0, 1)
