"""Finds the rank of a loader or sampler when it is used, and refuses what would share it out twice.

``epoch.placement`` says where a rank is found. What is added here: worker processes get the numbers
that the training process that started them found, and never the mesh, group or function that they
were found by, which do not work in them.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from typing import Any

from torch.utils.data import get_worker_info

from dlfs.base.forks import OwnerProcess
from dlfs.epoch.placement import (
    PlacementSource,
    begin_placement,
    check_meshes,
    check_one_source,
    check_said,
    check_same_placement,
    detach,
    find_placement,
)
from dlfs.epoch.ranks import Placement, check_placement, process_group
from dlfs.errors import UsageError


class PlacementFinder:
    """Finds the placement of the process in which it is called, and keeps that of an epoch.

    Args:
        rank: rank that the caller gives, 0..world_size-1; requires ``world_size``.
        world_size: number of ranks that the caller gives, >= 1.
        placement: what the caller says of the ranks instead, as ``epoch.placement`` takes it.

    Raises:
        UsageError: only one of the two numbers is given, or they are no numbers, or out of range;
            or they are given with a placement, or it is ambiguous.

    Threads: one at a time.
    """

    def __init__(
        self,
        rank: int | None = None,
        world_size: int | None = None,
        placement: PlacementSource | None = None,
    ) -> None:
        check_one_source(rank, world_size, placement)
        check_said(placement)
        self._said = placement
        if rank is not None or world_size is not None:
            self._said = check_placement(rank, world_size, "the arguments")
        self._handed: tuple[int, Placement] | None = None
        """Process that pickled this object for its workers, and its placement."""
        self._began: Placement | None = None
        self._began_in = OwnerProcess()
        self._had_group = False

    def __getstate__(self) -> dict[str, Any]:
        """Hand the placement to a worker process, which may start without torch.distributed.

        A shallow copy has the placement in the same way, for workers that are forked.
        """
        # The unpickling process is not the one in which the epoch began.
        state = {**self.__dict__, "_handed": self._hand(), "_began_in": None}
        return {**state, "_said": detach(self._said)}

    def _hand(self) -> tuple[int, Placement] | None:
        """Return this process and its placement; None if it is not known here either.

        Raises:
            UsageError: as ``find_begun``, for meshes, which workers do not see.
        """
        if self._handed is not None and self._handed[0] == os.getpid():
            return self._handed  # a copy for workers
        try:
            found = self.current()
        except UsageError:
            return None  # raised again in the worker
        if self._said is None:
            check_meshes(found)
        return os.getpid(), found

    def find(self) -> Placement:
        """Return the placement of this process.

        Raises:
            UsageError: the environment says that there are several ranks, but not which is this;
                or the placement that the caller gave is none of this process.
        """
        return self._find(find_placement)

    def _find(self, find: Callable[[PlacementSource | None], Placement]) -> Placement:
        """Return the placement that a worker was handed, or that a function finds."""
        parent = multiprocessing.parent_process()
        if self._handed is not None and get_worker_info() is not None and parent is not None:
            trainer, placement = self._handed
            if trainer == parent.pid:
                return placement
        return find(self._said)

    def find_begun(self) -> Placement:
        """Return the placement of this process for an iteration that begins.

        Raises:
            UsageError: as ``find``; or the caller said nothing, and PyTorch has a mesh whose ranks
                may need the same samples.
        """
        return self._find(begin_placement)

    def current(self) -> Placement:
        """Return the placement of the epoch in progress, else that of one that would begin now.

        Raises:
            UsageError: as ``find``.
        """
        if self._began is not None and self._began_in is not None and self._began_in.is_current():
            return self._began
        return self.find()

    @property
    def is_whole(self) -> bool:
        """True if this rank reads all samples, which a framework may share out between ranks.

        Ranks of a mesh that read the same samples need whole batches each.
        """
        is_said = self._said is not None and not isinstance(self._said, Placement)
        return self.current().world_size == 1 and not is_said

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
        self._began, self._began_in = self.find_begun(), OwnerProcess()
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
        what = f"epoch {loader.epoch} of this {type(loader).__name__}"
        check_same_placement(self._said, began, what, "call load_state_dict(state_dict())")

    def forget(self) -> None:
        """Let the next iteration begin with the placement of then, as after another state."""
        self._began = None


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
    if not finder.is_whole:
        raise UsageError(
            f"split batches with Accelerate: expected {what} of all samples in the DataLoader that "
            f"prepare shares out, got {finder.current()}, so that samples would be "
            "shared out twice; leave this DataLoader out of prepare, give prepare a Loader "
            f"itself, or make {what} of rank 0 of 1"
        )
    return True
