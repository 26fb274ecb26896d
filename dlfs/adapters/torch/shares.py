"""One rank's part of what is left of an epoch: how many batches, and which positions each holds.

Global batch k of world size W and batch size B is the positions ``first + k * B * W`` and on, of
which rank r takes every W-th. Where the samples do not divide by W, the last round has positions
for some ranks only, and ``uneven`` says what the others do: ``pad`` fills the round with the first
positions of the epoch again, as PyTorch's ``DistributedSampler`` does; ``drop`` leaves the round
out; ``leave`` lets some ranks have one sample, and so perhaps one batch, more than others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from dlfs.adapters.torch.placement import is_launched
from dlfs.arguments import check_choice

Uneven = Literal["pad", "drop", "leave"]


def choose_uneven(uneven: Uneven | None, world_size: int) -> Uneven:
    """Return what ranks do in a last round that is not full.

    Args:
        uneven: what the caller wants; None: ``pad`` where this process is one of several ranks of
            ``torch.distributed`` or of a launcher, else ``leave``.
        world_size: ranks that share the epoch.

    Raises:
        UsageError: there is no such choice.
    """
    if uneven is None:
        return "pad" if world_size > 1 and is_launched() else "leave"
    check_choice(uneven, get_args(Uneven), option="uneven", action="share an epoch between ranks")
    return uneven


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The batches of one rank from a position of an epoch to its end.

    Attributes:
        total: samples of the epoch.
        first: position of the epoch that the share begins at, 0..total.
        batch_size: samples of this rank in a batch, >= 1.
        rank: 0..world_size-1.
        world_size: ranks that share the epoch, >= 1.
        uneven: what ranks do in a last round that is not full.
        drop_last: leave out a last global batch that is not full.
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
        """Samples of this rank, those that ``pad`` repeats included."""
        left = self.total - self.first
        if self.drop_last:
            return left // self.step * self.batch_size
        if self.uneven == "leave":
            return self._own_samples()
        rounds, remainder = divmod(left, self.world_size)
        return rounds + (1 if remainder and self.uneven == "pad" else 0)

    @property
    def batches(self) -> int:
        """Batches of this rank."""
        return -(-self.samples // self.batch_size)

    def size(self, number: int) -> int:
        """Return how many samples batch ``number``, 0..batches-1, has."""
        return min(self.batch_size, self.samples - number * self.batch_size)

    def is_plain(self, number: int) -> bool:
        """Return True if a batch holds what the order deals this rank: none more, none fewer."""
        left = self._own_samples() - number * self.batch_size
        return self.drop_last or self.size(number) == min(self.batch_size, left)

    def runs(self, number: int) -> list[tuple[int, int]]:
        """Return which positions of the epoch a batch holds: first positions and counts.

        The positions of a run are ``world_size`` apart. What lies behind the end of the epoch, one
        position at most, begins again at 0.
        """
        first = self.first + self.rank + number * self.step
        size = self.size(number)
        inside = min(size, len(range(first, self.total, self.world_size)))
        runs = [(first, inside)] if inside else []
        if inside < size:
            runs.append(((first + inside * self.world_size) % self.total, 1))
        return runs

    def positions(self, number: int) -> npt.NDArray[np.int64]:
        """Return which position of the epoch each sample of a batch has, ``int64[size]``."""
        return np.concatenate(
            [first + self.world_size * np.arange(count) for first, count in self.runs(number)]
        )

    def end(self, number: int) -> int:
        """Return the position behind a global batch, as the state of an epoch counts it."""
        return min(self.total, self.first + (number + 1) * self.step)

    def _own_samples(self) -> int:
        return len(range(self.first + self.rank, self.total, self.world_size))
