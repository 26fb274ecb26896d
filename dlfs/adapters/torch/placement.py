"""Finds the rank of a loader or sampler when it is used, and refuses what would share it out twice.

``epoch.ranks`` says where a rank is found. What is added here: a worker process of a ``DataLoader``
takes the rank of the training process that started it, where ``torch.distributed`` is initialised;
and ranks that differ in more than their data are warned of.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import warnings
from dataclasses import replace
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import get_worker_info

from dlfs.base.forks import OwnerProcess
from dlfs.epoch.ranks import (
    Placement,
    check_placement,
    check_same_placement,
    find_placement,
    is_launched,
    process_group,
)
from dlfs.errors import UsageError

_DATA_DIMENSIONS = ("dp", "ddp", "fsdp", "hsdp", "data", "replicate", "shard")
"""Beginnings of the names that dimensions of a mesh have whose ranks take different samples."""


class PlacementFinder:
    """Finds the placement of the process in which it is called, and keeps that of an epoch.

    Args:
        rank: rank that the caller gives, 0..world_size-1; requires ``world_size``.
        world_size: number of ranks that the caller gives, >= 1.

    Raises:
        UsageError: only one of the two is given, or they are no numbers, or out of range.

    Threads: one at a time.
    """

    def __init__(self, rank: int | None = None, world_size: int | None = None) -> None:
        self._given: Placement | None = None
        if rank is not None or world_size is not None:
            self._given = check_placement(rank, world_size, "the arguments")
        self._handed: tuple[int, Placement] | None = None
        """Process that pickled this object for its workers, and its placement."""
        self._began: Placement | None = None
        self._began_in = OwnerProcess()
        self._had_group = False
        self._warned = False

    def __getstate__(self) -> dict[str, Any]:
        """Hand the placement to a worker process, which may start without torch.distributed."""
        try:
            handed = (os.getpid(), self.current())
        except UsageError:
            handed = None  # raised again in the worker
        # The unpickling process is not the one in which the epoch began.
        return {**self.__dict__, "_handed": handed, "_began_in": None}

    def find(self) -> Placement:
        """Return the placement of this process.

        Raises:
            UsageError: the environment says that there are several ranks, but not which is this.
        """
        parent = multiprocessing.parent_process()
        if self._handed is not None and get_worker_info() is not None and parent is not None:
            trainer, placement = self._handed
            if trainer == parent.pid:
                return placement
        if self._given is not None:
            return replace(self._given, is_launched=is_launched())
        found = find_placement()
        if found.world_size > 1 and not self._warned:
            self._warned = True
            _warn_of_meshes(found)
        return found

    def current(self) -> Placement:
        """Return the placement of the epoch in progress, else that of one that would begin now.

        Raises:
            UsageError: as ``find``.
        """
        if self._began is not None and self._began_in is not None and self._began_in.is_current():
            return self._began
        return self.find()

    def begin(self, loader: Any, *, is_begun: bool) -> bool:
        """Find the placement for an iteration.

        Args:
            loader: loader that iterates, for error messages.
            is_begun: True if the iteration continues an epoch.

        Returns:
            True if an earlier iteration had another placement.

        Raises:
            UsageError: it cannot be found, or the epoch began with another one.
        """
        before = self._began
        if before is not None and is_begun:
            self._check_same(loader, before)
        self._began, self._began_in = self.find(), OwnerProcess()
        self._had_group = process_group() is not None
        return before is not None and before != self._began

    def check(self, loader: Any) -> None:
        """Check the placement if ``torch.distributed`` was initialised during the iteration.

        Raises:
            UsageError: it is another one now.
        """
        if not self._had_group and self._began is not None and process_group() is not None:
            self._check_same(loader, self._began)
            self._had_group = True

    def _check_same(self, loader: Any, began: Placement) -> None:
        if self._given is None:
            what = f"epoch {loader.epoch} of this {type(loader).__name__}"
            check_same_placement(began, what, "call load_state_dict(state_dict())")

    def forget(self) -> None:
        """Let the next iteration begin with the placement of then, as after another state."""
        self._began = None


def _warn_of_meshes(found: Placement) -> None:
    """Warn if ranks of a ``DeviceMesh`` that need the same samples are given different ones."""
    others = [] if process_group() is None else sorted(set(_mesh_dimensions()))
    if others:
        warnings.warn(
            f"{found} takes other samples than every other rank, but a DeviceMesh has the "
            f"dimensions {', '.join(others)}: ranks of tensor, pipeline or context parallelism "
            "need the same samples. Give rank= and world_size= of the data dimension, such as "
            'rank=mesh["dp"].get_local_rank(), world_size=mesh["dp"].size()',
            stacklevel=4,
        )


def _mesh_dimensions() -> list[str]:
    """Return the dimensions of this process's meshes whose ranks may need the same samples.

    PyTorch keeps no list of meshes; the garbage collector knows them.
    """
    meshes = [one for one in gc.get_objects() if type(one) is DeviceMesh]
    found = []
    for mesh in meshes:
        names = mesh.mesh_dim_names or ["dp", *["without a name"] * (mesh.ndim - 1)]
        sizes = zip(names, mesh.shape, strict=True)
        found += [n for n, size in sizes if size > 1 and not n.startswith(_DATA_DIMENSIONS)]
    return found


def refuse_second_sharding(finder: PlacementFinder, what: str) -> bool:
    """Refuse to be one rank's share inside a ``DataLoader`` that Accelerate has prepared.

    Accelerate divides the batches of such a ``DataLoader`` between the ranks, whatever it reads
    from, so that most samples would never be read. It knows no type that it leaves alone. It calls
    ``set_epoch`` before each iteration, in all ranks; that call is recognised by its module.

    Args:
        finder: finder of the object whose ``set_epoch`` was called.
        what: the object, for error messages.

    Returns:
        True if Accelerate calls.

    Raises:
        UsageError: Accelerate calls, and the object has one of several shares.
    """
    caller = sys._getframe(2).f_globals.get("__name__")
    if caller != "accelerate.data_loader":
        return False
    if finder.current().world_size > 1:
        raise UsageError(
            f"split batches with Accelerate: expected {what} of all samples in the DataLoader that "
            f"prepare shares out, got {finder.current()}, so that the samples of the other ranks "
            "would never be read; leave this DataLoader out of prepare, give prepare a Loader "
            f"itself, or make {what} of rank 0 of 1"
        )
    return True
