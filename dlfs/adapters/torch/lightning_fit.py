"""Keeps loaders and Lightning's ``fit``, which counts the batches of an epoch itself, in step.

A checkpoint of Lightning holds the number of batches that a rank got, next to the loader's state.
At another number of devices or another batch size, this number stands for other samples, and
``fit`` would end the epoch too early or too late. ``count_batches`` sets it to the loader's
position.

Lightning gives a loader no reference to its trainer. The ``FitLoop`` that calls is therefore found
in the frames of the callers, once for each epoch and each state.
"""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass
from typing import Any

from dlfs.adapters.callers import find_caller
from dlfs.adapters.torch.placement import PlacementFinder, refuse_second_sharding

_MODULES = ("lightning.pytorch.loops.fit_loop", "pytorch_lightning.loops.fit_loop")

_COUNTS = ("ready", "started", "processed", "completed")


def find_fit_loop() -> Any:
    """Return Lightning's ``FitLoop`` that called this function's caller, or None."""
    return find_caller(*_MODULES)


def repeats_batches() -> bool:
    """Return True if ``fit`` wants the same batches in each epoch, as ``overfit_batches`` says."""
    loop = find_fit_loop()
    return loop is not None and loop.trainer.overfit_batches > 0


def is_used_up(epoch: int) -> bool:
    """Return True if ``fit`` loads a state behind all that it takes of a loader in its epoch.

    Of combined loaders, a shorter one then gives no batches until the longest one has ended.

    Args:
        epoch: epoch of the state.
    """
    loop = find_fit_loop()
    if loop is None or loop._combined_loader._mode != "max_size":
        return False
    return bool(epoch > loop.epoch_progress.current.processed)


def count_batches(batches: int, left: int, *, is_begun: bool) -> bool:
    """Set the batches of the epoch that ``fit`` counts to the position of a state it loads.

    Where several loaders are combined, the one that ends the epoch determines the count.

    Args:
        batches: batches of this rank in a whole epoch.
        left: batches of this rank behind the state.
        is_begun: True if the state is in the middle of an epoch.

    Returns:
        True if ``fit`` loads the state, and continues its epoch.
    """
    loop = find_fit_loop()
    if loop is None:
        return False
    combined = loop._combined_loader
    ends = min if combined._mode == "min_size" else max
    progress = loop.epoch_loop.batch_progress
    continues = not progress.is_last_batch
    if batches != ends(len(one) for one in combined.flattened if isinstance(one, Sized)):
        return continues
    current = progress.current
    # A state at the begin of an epoch was saved behind the last batch of the one before.
    given = batches - left if is_begun or not current.ready else batches
    change = given - current.ready
    for name in _COUNTS:
        setattr(current, name, getattr(current, name) + change)
    return continues


@dataclass(frozen=True, slots=True)
class EpochSetter:
    """Stand-in for a batch sampler and its sampler, of which frameworks call ``set_epoch``.

    Attributes:
        loader: the ``Loader`` or ``DistributedBatchSampler``.
        finder: finder of its placement.
    """

    loader: Any
    finder: PlacementFinder

    @property
    def sampler(self) -> EpochSetter:
        """This object."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch of Lightning's, unless Lightning has just loaded the loader's state.

        A loader that Lightning repeats within its epoch is in another epoch than Lightning's.
        Accelerate counts its epochs from 0 after a resume as well, so that its call has no effect.

        Raises:
            UsageError: Accelerate calls, which would share one rank's batches out between ranks.
        """
        if refuse_second_sharding(self.finder, "a sampler"):
            return
        if self.loader.is_resumed:
            self.loader.is_resumed = False
        else:
            self.loader.set_epoch(epoch)
