"""Progress of a benchmark: its current step, the share that is done, and the remaining time.

On a terminal, the progress is one line that changes. Elsewhere, as in a log, a line is printed now
and then. The remaining time is extrapolated from the elapsed time. It is rough, as steps differ.

`Progress` is the whole benchmark. A `Stretch` is a part of it, from one share to another; stretches
nest. A benchmark with a time limit makes fewer rounds when a stretch is late.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Self

from rich.console import Console

LINE_SECONDS = 15.0
"""Least time between two lines where lines do not replace each other."""
EARLY_SHARE = 0.2
"""Share of the time limit that may be used ahead of schedule, as data is written first."""
SHARE_MIN = 0.03
"""Share of the benchmark that must be done before the remaining time is shown."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of a benchmark.

    Attributes:
        progress: the whole.
        begin: share of the whole that is done when this part begins, 0..1.
        end: share of the whole that is done when this part ends.
        name: printed in front of each step; may be empty.
    """

    progress: Progress
    begin: float = 0.0
    end: float = 1.0
    name: str = ""

    def show(self, step: str, share: float = 0.0) -> None:
        """Show the step that begins now, and the share of this part that is done, 0..1."""
        text = f"{self.name}: {step}" if self.name else step
        self.progress.show(text, self._at(share))

    def part(self, begin: float, end: float, name: str = "") -> Stretch:
        """Return a part of this part, given by the shares where it begins and ends."""
        return Stretch(self.progress, self._at(begin), self._at(end), name or self.name)

    def has_time_for(self, seconds: float) -> bool:
        """Return True if work of that duration ends before this part is late."""
        return self.progress.has_time_for(seconds, self.end)

    def _at(self, share: float) -> float:
        return self.begin + share * (self.end - self.begin)


class Progress:
    """Shows the progress of a benchmark while its block runs.

    Args:
        console: console to print on; None: print nothing.
        name: name of the benchmark.
        minutes: time limit of the benchmark; None: unlimited.
    """

    def __init__(
        self, console: Console | None = None, name: str = "", minutes: float | None = None
    ) -> None:
        self._console, self._name = console, name
        is_terminal = console is not None and console.is_terminal
        self._status = console.status(name) if console and is_terminal else None
        self._limit_seconds = float("inf") if minutes is None else 60 * minutes
        self._begun = time.monotonic()
        self._printed = self._begun - LINE_SECONDS

    def __enter__(self) -> Self:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._status is not None:
            self._status.stop()

    def whole(self) -> Stretch:
        """Return the stretch from the beginning to the end."""
        return Stretch(self)

    def has_time_for(self, seconds: float, share: float) -> bool:
        """Return True if work of that duration ends before this share of the whole is due."""
        due = (EARLY_SHARE + (1 - EARLY_SHARE) * share) * self._limit_seconds
        return time.monotonic() - self._begun + seconds <= due

    def show(self, step: str, share: float) -> None:
        """Show the step that begins now, and the share of the whole that is done, 0..1."""
        now = time.monotonic()
        line = f"{self._name}: {step} ({share:.0%}{self._remaining(now, share)})"
        if self._status is not None:
            self._status.update(line)
        elif self._console is not None and now - self._printed >= LINE_SECONDS:
            self._printed = now
            clock = time.strftime("%H:%M:%S")
            self._console.print(f"{clock} {line}", markup=False, highlight=False, soft_wrap=True)

    def _remaining(self, now: float, share: float) -> str:
        if share < SHARE_MIN:
            return ""
        minutes = (now - self._begun) * (1 - share) / share / 60
        return f" done, about {max(1, round(minutes))} min left"
