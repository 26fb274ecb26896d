"""The progress of an epoch, and the time that its consumer waited for batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class EpochProgress:
    """The progress of an epoch's consumer.

    Attributes:
        position: samples of the epoch, of all ranks, up to the end of the last batch taken.
        total: samples of the epoch, of all ranks.
        batches_left: batches that this consumer has still to take.
        batches: batches that it took since the start, or since ``resume``.
        samples: samples of these batches.
        seconds: time from the first request for a batch to the last batch.
        waited_seconds: part of this time that the consumer waited for batches. It spent the rest
            in its own loop.
    """

    position: int
    total: int
    batches_left: int
    batches: int
    samples: int
    seconds: float
    waited_seconds: float


class Tally(NamedTuple):
    """Batches that a consumer took, and when. A tuple, which is made fastest: one for each batch.

    Attributes:
        batches: number of batches.
        samples: samples of these batches.
        began: time of the first request, in seconds; 0 without batches.
        ended: time of the last batch, in seconds.
        waited_seconds: sum of the times from the request for a batch to the batch.
    """

    batches: int = 0
    samples: int = 0
    began: float = 0.0
    ended: float = 0.0
    waited_seconds: float = 0.0

    def add(self, samples: int, asked: float, got: float) -> Tally:
        """Return a tally with one more batch.

        Args:
            samples: samples of the batch.
            asked: time of the request for it, in seconds.
            got: time at which it was there, in seconds.
        """
        batches, samples_before, began, _, waited_seconds = self
        return tuple.__new__(  # Tally() would call a function of Python
            Tally,
            (
                batches + 1,
                samples_before + samples,
                began if batches else asked,
                got,
                waited_seconds + got - asked,
            ),
        )
