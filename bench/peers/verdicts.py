"""DESIGN.md, section 10, against the peers: ratios of runs of the same round, and what they say."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from bench.peers.outcome import GLOBAL_GIVEN, Run

OURS = ("dlfs", "dlfs-epoch", "dlfs-epoch-all")
"""The ways of DLFS that are compared: the sample API in global order."""

FLOOR = 2.0
FLOOR_PEERS = (
    "lmdb",
    "huggingface",
    "hdf5",
    "arrayrecord",
    "lance",
    "mds",
    "webdataset",
    "litdata",
    "ffcv",
    "squashfs",
    "erofs",
)
"""Whom DLFS in global order must beat by that, cold and warm, each by its fastest way."""

CACHED_FLOOR = 3.0
CACHED_PEER = "lmdb"


@dataclass(frozen=True, slots=True)
class Verdict:
    """One comparison.

    Attributes:
        dataset: key of the data set.
        warm: with everything in memory; else cold.
        ours: our way.
        peer: the peer's way, and its order where that is not global.
        at_least: the floor; 0: there is none.
        ratios: round by round.
    """

    dataset: str
    warm: bool
    ours: str
    peer: str
    at_least: float
    ratios: tuple[float, ...]

    @property
    def measured(self) -> float:
        """The median."""
        return median(self.ratios)

    @property
    def text(self) -> str:
        """As people say it."""
        if not self.at_least:
            return ""
        return "met" if self.measured >= self.at_least else "MISSED"


def family(name: str) -> str:
    """The peer that a way belongs to."""
    return name.partition("-")[0]


def verdicts(runs: Iterable[Run]) -> list[Verdict]:
    """All comparisons of one process with one process."""
    single = [run for run in runs if run.processes == 1 and not run.limit]
    found: list[Verdict] = []
    for dataset in dict.fromkeys(run.dataset for run in single):
        for warm in (False, True):
            found += _verdicts_of([r for r in single if (r.dataset, r.warm) == (dataset, warm)])
    return found


def _verdicts_of(runs: Sequence[Run]) -> list[Verdict]:
    """Of one data set, cold or warm."""
    ours = _fastest([run for run in runs if run.peer in OURS and run.is_global])
    found: list[Verdict] = []
    names = dict.fromkeys(family(run.peer) for run in runs)
    for name in names:
        if name == "dlfs":
            continue
        theirs = _fastest([run for run in runs if family(run.peer) == name])
        at_least = FLOOR if name in FLOOR_PEERS else 0.0
        found += _compare(ours, theirs, at_least)
    cached = [run for run in runs if run.peer == "dlfs" and run.order == GLOBAL_GIVEN and run.warm]
    peer = [run for run in runs if family(run.peer) == CACHED_PEER and run.warm]
    return found + _compare(cached, _fastest(peer), CACHED_FLOOR)


def _fastest(runs: Sequence[Run]) -> list[Run]:
    """The runs of the way with the highest median, of those in global order if there are any."""
    ways: dict[tuple[str, str], list[Run]] = {}
    for run in [run for run in runs if run.is_global] or runs:
        ways.setdefault((run.peer, run.order), []).append(run)
    return max(ways.values(), key=lambda way: median(run.rate for run in way), default=[])


def _compare(ours: Sequence[Run], theirs: Sequence[Run], at_least: float) -> list[Verdict]:
    by_round = {(run.group, run.round): run for run in ours}
    pairs = [(by_round.get((run.group, run.round)), run) for run in theirs]
    ratios = tuple(mine.rate / run.rate for mine, run in pairs if mine is not None)
    if not ratios:
        return []
    one = theirs[0]
    peer = one.peer if one.is_global else f"{one.peer} ({one.order})"
    return [Verdict(one.dataset, one.warm, ours[0].peer, peer, at_least, ratios)]
