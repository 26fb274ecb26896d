"""Reports the progress of an import or an export to a callback."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerProgress:
    """Progress of one worker of an import.

    Attributes:
        name: its host and process.
        part: number of its part of the source; None between two.
        part_bytes: bytes of samples of the part that it has read.
        part_total: size of the part in bytes; None between two.
        bytes_done: bytes of all samples that it has read.
        bytes_per_second: its rate in this part.
        is_straggler: True if it is much slower than the others.
    """

    name: str
    part: int | None
    part_bytes: int
    part_total: int | None
    bytes_done: int
    bytes_per_second: float
    is_straggler: bool


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of an import or an export. A total is None while it is unknown.

    An import whose ``second_pass`` is True has read its source, and packs all samples once more. At
    the end of an import in steps, ``samples_sealed`` counts the samples that are in the directory
    of the new version so far. ``workers`` has the workers of an import that has some.
    """

    samples_done: int
    samples_total: int | None
    bytes_done: int
    bytes_total: int | None
    seconds: float
    second_pass: bool = False
    samples_sealed: int = 0
    workers: Sequence[WorkerProgress] = ()

    @property
    def bytes_per_second(self) -> float:
        """Mean rate since the start, in bytes a second."""
        return self.bytes_done / self.seconds if self.seconds > 0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Time left at the mean rate, in seconds; None if the total or the rate is unknown."""
        if self.bytes_total is None or self.bytes_per_second == 0:
            return None
        return max(0, self.bytes_total - self.bytes_done) / self.bytes_per_second


ProgressCallback = Callable[[Progress], None]


class Meter:
    """Counts samples as they are done, and calls a callback.

    Args:
        callback: called at the start and by each ``add``; None if no caller wants it.
        samples_total: number of samples, if it is known.
        bytes_total: size of all samples in bytes, if it is known.
    """

    def __init__(
        self, callback: ProgressCallback | None, samples_total: int | None, bytes_total: int | None
    ) -> None:
        self._callback = callback
        self._totals = samples_total, bytes_total
        self._begin = time.monotonic()
        self.samples = 0
        self.bytes = 0
        self._sealed = 0
        self._workers: Sequence[WorkerProgress] = ()
        self._report()

    @property
    def seconds(self) -> float:
        """Time since the start, in seconds."""
        return time.monotonic() - self._begin

    def add(self, samples: int, size_bytes: int) -> None:
        """Count samples as done."""
        self.samples += samples
        self.bytes += size_bytes
        self._report()

    def show(self, samples: int, size_bytes: int, workers: Sequence[WorkerProgress]) -> None:
        """Set what is done so far, by workers."""
        self.samples, self.bytes, self._workers = samples, size_bytes, workers
        self._report()

    def seal(self, samples: int) -> None:
        """Count samples as in the directory of the new version."""
        self._sealed += samples
        self._report()

    def _report(self) -> None:
        if self._callback is not None:
            samples_total, bytes_total = self._totals
            self._callback(
                Progress(
                    self.samples,
                    samples_total,
                    self.bytes,
                    bytes_total,
                    self.seconds,
                    samples_sealed=self._sealed,
                    workers=self._workers,
                )
            )


def second_pass_meter(
    callback: ProgressCallback | None,
) -> Callable[[tuple[int, int], tuple[int, int]], None]:
    """Return a function that a ``StepWriter`` calls in the second pass of an import.

    Args:
        callback: called with the progress; None if no caller wants it.
    """
    begin: float | None = None

    def show(done: tuple[int, int], total: tuple[int, int]) -> None:
        nonlocal begin
        now = time.monotonic()
        begin = now if begin is None else begin
        if callback is not None:
            found = Progress(done[0], total[0], done[1], total[1], now - begin, second_pass=True)
            callback(found)

    return show
