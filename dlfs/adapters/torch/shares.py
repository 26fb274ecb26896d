"""``Share``: one rank's part of the rest of an epoch: its batches, and the positions of each.

Global batch k of world size W and batch size B has the positions from ``first + k * B * W`` on, of
which rank r takes every W-th. If W does not divide the samples, only some ranks have a position in
the last round, and ``uneven`` determines what the others do. ``pad`` fills the round with the first
positions of the epoch, as PyTorch's ``DistributedSampler`` does. ``drop`` leaves the round out.
``leave`` gives some ranks one sample, and so perhaps one batch, more than others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from dlfs.base.arguments import check_choice
from dlfs.epoch.ranks import Placement

Uneven = Literal["pad", "drop", "leave"]


def check_uneven(uneven: Uneven | None) -> Uneven | None:
    """Return the checked policy of ranks for a last round that is not full.

    Raises:
        UsageError: the policy is unknown.
    """
    if uneven is not None:
        action = "share an epoch between ranks"
        check_choice(uneven, get_args(Uneven), option="uneven", action=action)
    return uneven


def choose_uneven(uneven: Uneven | None, placement: Placement) -> Uneven:
    """Return the policy of ranks for a last round that is not full.

    Args:
        uneven: policy of the caller; None for ``pad`` if this process is one of several ranks of
            ``torch.distributed`` or of a launcher, else ``leave``.
        placement: share of this process.
    """
    if uneven is not None:
        return uneven
    return "pad" if placement.world_size > 1 and placement.is_launched else "leave"


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The batches of one rank from a position of an epoch to its end.

    Attributes:
        total: samples of the epoch.
        first: position of the epoch at which the share begins, 0..total.
        batch_size: samples of this rank in a batch, >= 1.
        rank: rank of the share, 0..world_size-1.
        world_size: ranks that share the epoch, >= 1.
        uneven: policy of ranks for a last round that is not full.
        drop_last: True to leave out a last global batch that is not full.
    """

    total: int
    first: int
    batch_size: int
    rank: int
    world_size: int
    uneven: Uneven
    drop_last: bool

    @property
    def step(self) -> int:
        """Samples of a global batch."""
        return self.batch_size * self.world_size

    @property
    def samples(self) -> int:
        """Samples of this rank, including those that ``pad`` repeats."""
        left = self.total - self.first
        if self.drop_last:
            return left // self.step * self.batch_size
        if self.uneven == "leave":
            return self._own_samples()
        rounds, remainder = divmod(left, self.world_size)
        return rounds + (1 if remainder and self.uneven == "pad" else 0)

    @property
    def batches(self) -> int:
        """Number of batches of this rank."""
        return -(-self.samples // self.batch_size)

    def size(self, number: int) -> int:
        """Return the number of samples of batch ``number``, 0..batches-1."""
        return min(self.batch_size, self.samples - number * self.batch_size)

    def is_plain(self, number: int) -> bool:
        """Return True if a batch has exactly the positions that the order gives this rank."""
        left = self._own_samples() - number * self.batch_size
        return self.drop_last or self.size(number) == min(self.batch_size, left)

    def runs(self, number: int) -> list[tuple[int, int]]:
        """Return the positions of a batch in the epoch: first positions and counts.

        The positions of a run are ``world_size`` apart. A position behind the end of the epoch, one
        at most, continues at 0.
        """
        first = self.first + self.rank + number * self.step
        size = self.size(number)
        inside = min(size, len(range(first, self.total, self.world_size)))
        runs = [(first, inside)] if inside else []
        if inside < size:
            runs.append(((first + inside * self.world_size) % self.total, 1))
        return runs

    def positions(self, number: int) -> npt.NDArray[np.int64]:
        """Return the position of each sample of a batch in the epoch, ``int64[size]``."""
        return np.concatenate(
            [first + self.world_size * np.arange(count) for first, count in self.runs(number)]
        )

    def end(self, number: int) -> int:
        """Return the position behind a global batch, as the state of an epoch counts it."""
        return min(self.total, self.first + (number + 1) * self.step)

    def _own_samples(self) -> int:
        return len(range(self.first + self.rank, self.total, self.world_size))
