"""How far an import or an export has come, for whoever shows it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """How far it has come. Totals are None when they cannot be known yet."""

    samples_done: int
    samples_total: int | None
    bytes_done: int
    bytes_total: int | None
    seconds: float

    @property
    def bytes_per_second(self) -> float:
        """The mean rate so far."""
        return self.bytes_done / self.seconds if self.seconds > 0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        """At the mean rate; None when the end, or the rate, is not known."""
        if self.bytes_total is None or self.bytes_per_second == 0:
            return None
        return max(0, self.bytes_total - self.bytes_done) / self.bytes_per_second


ProgressCallback = Callable[[Progress], None]


class Meter:
    """Counts what has been done, and tells a callback.

    Args:
        callback: called by ``add``, and once at the start; None for nobody.
        samples_total: if it is known.
        bytes_total: if it is known.
    """

    def __init__(
        self, callback: ProgressCallback | None, samples_total: int | None, bytes_total: int | None
    ) -> None:
        self._callback = callback
        self._totals = samples_total, bytes_total
        self._begin = time.monotonic()
        self.samples = 0
        self.bytes = 0
        self.add(0, 0)

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._begin

    def add(self, samples: int, size_bytes: int) -> None:
        """Count samples as done."""
        self.samples += samples
        self.bytes += size_bytes
        if self._callback is not None:
            samples_total, bytes_total = self._totals
            self._callback(
                Progress(self.samples, samples_total, self.bytes, bytes_total, self.seconds)
            )
