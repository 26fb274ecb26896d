"""Finds the rank of this process and the number of ranks in its environment.

``epoch.placement`` works out which ranks take different samples: all of them, if the caller says
nothing. The rank is found when an epoch begins, not when an object is made, because a loader is
often made before the ranks exist: processes are forked or spawned later, or ``torch.distributed``
is initialised later. The first of these that is there decides:

1. ``torch.distributed``, if this process has initialised it. A launcher may have counted machines
   where the group counts processes.
2. ``RANK`` and ``WORLD_SIZE``, which torchrun and most launchers set. Lightning sets ``WORLD_SIZE``
   and ``LOCAL_RANK`` only; on the first node the local rank is the rank.
3. The variables of Slurm's ``srun``, and of MPI.

Without any of these, the process is the only one. Where the variables contradict each other or are
incomplete, nothing is assumed: the error says which arguments to give.

Threads: any at once.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from typing import Any

from dlfs.errors import UsageError

_REMEDY = "give rank= and world_size=, such as rank=0, world_size=1 to read all samples"

_MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
)
"""Variables of Open MPI, MPICH and Intel MPI, MVAPICH, and IBM's jsrun."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The share of an epoch that one process takes.

    Attributes:
        rank: rank of the process among those that take different samples, 0..world_size-1.
        world_size: number of ranks that share the epoch, >= 1.
        is_launched: True if ``torch.distributed`` or a launcher started several processes, which
            usually wait for each other in every step.
    """

    rank: int
    world_size: int
    is_launched: bool = field(default=False, compare=False)

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size}"


def placement_of_environment() -> Placement:
    """Find the placement of this process if all ranks take different samples.

    Raises:
        UsageError: the environment says that there are several ranks, but not which is this one.
    """
    group = process_group()
    if group is not None:
        rank, size = group.get_rank(), group.get_world_size()
        return Placement(rank, size, is_launched=size > 1)
    found = _find_torchrun() or _find_slurm() or _find_mpi()
    if found is None and os.environ.get("LOCAL_RANK", "0") not in ("", "0"):
        raise _incomplete(f"LOCAL_RANK={os.environ['LOCAL_RANK']}")
    return found or Placement(0, 1)


def is_launched() -> bool:
    """Return True if this process is one of several that a launcher started."""
    try:
        return placement_of_environment().is_launched
    except UsageError:
        return True


def process_group() -> Any:
    """Return ``torch.distributed`` if this process has initialised it, else None."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed


def check_placement(rank: object, world_size: object, source: str) -> Placement:
    """Return the placement that two values give.

    Args:
        rank: rank of this process, a number or its text.
        world_size: number of ranks, a number or its text.
        source: where the values come from, for error messages.

    Raises:
        UsageError: they are no numbers, or out of range.
    """
    try:
        number, size = int(str(rank)), int(str(world_size))
    except ValueError as error:
        raise UsageError(
            f"find this process's rank: expected a rank and a world size from {source}, got "
            f"{(rank, world_size)}; {_REMEDY}"
        ) from error
    if not 0 <= number < size:
        raise UsageError(
            f"find this process's rank: expected 0 <= rank < world_size from {source}, got "
            f"{number} and {size}"
        )
    return Placement(number, size, is_launched=size > 1)


_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


def _find_torchrun() -> Placement | None:
    """Find the placement that torchrun, Lightning or a launcher like them set."""
    # Empty ones are those of a container without ranks.
    rank, size, local = (os.environ.get(name) or None for name in _TORCHRUN)
    if rank is not None and size is not None:
        return check_placement(rank, size, "the environment's RANK and WORLD_SIZE")
    if rank is None and size is None:
        return None
    if rank is None and size == "1":
        return Placement(0, 1)
    if rank is None and local is not None:
        names = "the environment's LOCAL_RANK and WORLD_SIZE"
        return check_placement(_rank_of_node(local), size, names)
    raise _incomplete(f"RANK={rank}" if size is None else f"WORLD_SIZE={size}")


def _incomplete(got: str) -> UsageError:
    """Return the error for an environment that does not say which rank this process is."""
    return UsageError(
        f"find this process's rank: expected the environment's RANK and WORLD_SIZE, got only "
        f"{got}; set both, initialise torch.distributed before the epoch begins, or {_REMEDY}"
    )


def _rank_of_node(local: str) -> str:
    """Return the rank of a process of which the rank on its node is known.

    Raises:
        UsageError: it is on another node than the first, and the ranks of a node are not known.
    """
    node = os.environ.get("NODE_RANK", os.environ.get("GROUP_RANK", "0"))
    if node == "0":
        return local
    of_node = os.environ.get("LOCAL_WORLD_SIZE")
    try:
        return str(int(node) * int(str(of_node)) + int(local))
    except ValueError as error:
        raise UsageError(
            f"find this process's rank: expected RANK in the environment, got LOCAL_RANK={local} "
            f"on node {node} with {of_node} ranks on each node; set RANK, initialise "
            f"torch.distributed before the epoch begins, or {_REMEDY}"
        ) from error


def _find_slurm() -> Placement | None:
    """Find the placement of a task of Slurm's ``srun``."""
    rank, size = os.environ.get("SLURM_PROCID"), os.environ.get("SLURM_STEP_NUM_TASKS")
    if rank is None:
        return None  # the shell of salloc
    if size is not None:
        names = "Slurm's SLURM_PROCID and SLURM_STEP_NUM_TASKS"
        return check_placement(rank, size, names)
    tasks = os.environ.get("SLURM_NTASKS", "1")
    in_step = rank != "0" or "SLURM_STEP_ID" in os.environ
    if in_step or tasks == "1":
        return check_placement(rank, tasks, "Slurm's SLURM_PROCID and SLURM_NTASKS")
    raise UsageError(
        f"find this process's rank: expected that srun started this process, got a batch script "
        f"of {tasks} tasks without the variables of a step; start it by srun, or {_REMEDY}"
    )


def _find_mpi() -> Placement | None:
    """Find the placement of a process of MPI."""
    for rank, size in _MPI:
        if rank in os.environ:
            names = f"the environment's {rank} and {size}"
            return check_placement(os.environ[rank], os.environ.get(size), names)
    return None
