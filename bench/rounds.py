"""Rounds: contenders run in turn, round after round.

The speed of a shared machine drifts. Contenders that are compared therefore run within the same
minute, and every second round has the opposite order. A ratio is taken between two runs of one
round; see `bench.comparison`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from bench.errors import Unavailable
from bench.progress import Stretch

C = TypeVar("C")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class RoundResults(Generic[R]):
    """The results of all rounds, by the contenders' labels.

    Attributes:
        runs: the results of each contender that could run, by round.
        missing: why a contender could not run, for those that could not.
    """

    runs: dict[str, list[R]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


def run_rounds(
    contenders: Mapping[str, C],
    rounds: int,
    run: Callable[[C, int], R],
    stretch: Stretch,
    *,
    is_once: Callable[[C], bool] = lambda _: False,
) -> RoundResults[R]:
    """Run contenders in turn; make fewer rounds, but at least one, when the stretch is late.

    Args:
        contenders: contenders by label, in the order of the first round.
        rounds: most rounds to make, 1 and up.
        run: runs a contender in a round. A contender for which it raises Unavailable is left out
            from then on. Other exceptions propagate.
        stretch: shows the progress and holds the time limit.
        is_once: returns True for contenders that run in the first round only.
    """
    results: RoundResults[R] = RoundResults()
    round_seconds = 0.0
    for number in range(rounds):
        if number and not stretch.has_time_for(round_seconds):
            break
        begun = time.monotonic()
        order = list(contenders.items())[:: -1 if number % 2 else 1]
        for position, (label, contender) in enumerate(order):
            if label in results.missing or (number and is_once(contender)):
                continue
            stretch.show(f"round {number + 1}: {label}", (number + position / len(order)) / rounds)
            try:
                results.runs.setdefault(label, []).append(run(contender, number))
            except Unavailable as reason:
                results.missing[label] = str(reason)
                results.runs.pop(label)
        round_seconds = time.monotonic() - begun
    return results
