"""Rounds: contenders run in turn, round after round.

The speed of a shared machine drifts. Contenders that are compared therefore run within the same
minute, and every second round has the opposite order. A ratio is taken between two runs of one
round; see `bench.comparison`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from bench.errors import Unavailable
from bench.progress import Stretch


class Labelled(Protocol):
    """Anything that runs in rounds."""

    @property
    def label(self) -> str:
        """Name shown in the progress line."""
        ...


C = TypeVar("C", bound=Labelled)
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class RoundResults(Generic[C, R]):
    """The results of all rounds.

    Attributes:
        runs: the results of each contender, by round.
        missing: why a contender could not run, for those that could not.
    """

    runs: dict[C, list[R]]
    missing: dict[C, str]


def run_rounds(
    contenders: Sequence[C],
    rounds: int,
    run: Callable[[C, int], R],
    stretch: Stretch,
    *,
    is_once: Callable[[C], bool] = lambda _: False,
) -> RoundResults[C, R]:
    """Run contenders in turn; make fewer rounds, but at least one, when the stretch is late.

    Args:
        contenders: contenders in the order of the first round; hashable.
        rounds: most rounds to make, 1 and up.
        run: runs a contender in a round. A contender for which it raises Unavailable is left out
            from then on. Other exceptions propagate.
        stretch: shows the progress and holds the time limit.
        is_once: returns True for contenders that run in the first round only.
    """
    results: RoundResults[C, R] = RoundResults({one: [] for one in contenders}, {})
    round_seconds = 0.0
    for number in range(rounds):
        if number and not stretch.has_time_for(round_seconds):
            break
        begun = time.monotonic()
        order = contenders if number % 2 == 0 else list(reversed(contenders))
        for position, contender in enumerate(order):
            if contender in results.missing or (number and is_once(contender)):
                continue
            share = (number + position / len(order)) / rounds
            stretch.show(f"round {number + 1}: {contender.label}", share)
            try:
                results.runs[contender].append(run(contender, number))
            except Unavailable as reason:
                results.missing[contender] = str(reason)
        round_seconds = time.monotonic() - begun
    return results
