"""Says what is under way, how much is done, and how long the rest will take.

On a terminal one line that changes; elsewhere, as in a log, a line now and then. The time left is
reckoned from how long what is done took, so that it is rough: steps differ.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, TypeAlias

from rich.console import Console

LINE_SECONDS = 15.0
"""Between two lines where they do not replace each other."""
AHEAD = 0.2
"""Of an allowance: may be used before its turn, since data is laid out at the beginning."""
SHARE_MIN = 0.03
"""Of the whole: before so much is done, the time left is anybody's guess."""


Tell: TypeAlias = Callable[[str, float], None]
"""Told what begins now, in a few words, and which share of the whole is done, 0..1."""


class Allowance:
    """Time that rounds may take: who is late makes fewer.

    Args:
        minutes: for all that is to be done; None: as long as it takes.
    """

    def __init__(self, minutes: float | None = None) -> None:
        self._seconds = float("inf") if minutes is None else 60 * minutes
        self._begun = time.monotonic()

    def has_time_for(self, seconds: float, share: float) -> bool:
        """Whether something that takes so long ends before this share of the work is due."""
        due = (AHEAD + (1 - AHEAD) * share) * self._seconds
        return time.monotonic() - self._begun + seconds <= due


class Progress:
    """What a part of the report tells while it runs.

    Args:
        console: where to.
        name: of the part.
    """

    def __init__(self, console: Console, name: str) -> None:
        self._console, self._name = console, name
        self._status = console.status(name) if console.is_terminal else None
        self._begun = time.monotonic()
        self._told = self._begun - LINE_SECONDS

    def __enter__(self) -> Self:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._status is not None:
            self._status.stop()

    def between(self, begin: float, end: float) -> Tell:
        """A teller for a stretch of the whole, whose own shares go from 0 to 1."""
        return lambda what, share: self.tell(what, begin + share * (end - begin))

    def tell(self, what: str, share: float) -> None:
        """As `Tell` says."""
        now = time.monotonic()
        line = f"{self._name}: {what} ({share:.0%}{self._left(now, share)})"
        if self._status is not None:
            self._status.update(line)
        elif now - self._told >= LINE_SECONDS:
            self._told = now
            clock = time.strftime("%H:%M:%S")
            self._console.print(f"{clock} {line}", markup=False, highlight=False, soft_wrap=True)

    def _left(self, now: float, share: float) -> str:
        if share < SHARE_MIN:
            return ""
        minutes = (now - self._begun) * (1 - share) / share / 60
        return f" done, about {max(1, round(minutes))} min left"
