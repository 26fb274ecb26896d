"""DESIGN.md, section 10, against the peers: ratios of runs of the same round, and what they say.

Cold, there are two comparisons. In one, everybody may have all of the data in memory in the end,
as peers have by the page cache. In the other DLFS has a sixteenth of it, as when data is larger
than memory; left out of it are ways of peers that were seen to have most of the data in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from bench.peers.outcome import GLOBAL_GIVEN, Outcome, Run

OURS_LITTLE = ("dlfs", "dlfs-epoch")
OURS = (*OURS_LITTLE, "dlfs-epoch-all")
"""The ways of DLFS that are compared: the sample API in global order."""

COLD, LITTLE, WARM = STATES = ("cold", "cold, little memory", "warm")

MOST = 0.5
"""Of the data, in the memory of a peer's processes: it reads no longer what is cold."""

FLOOR = 2.0
FLOOR_PEERS = (
    "lmdb",
    "huggingface",
    "hdf5",
    "array_record",
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
        state: one of `STATES`.
        ours: our way.
        peer: the peer's way, and its order where that is not global.
        at_least: the floor; 0: there is none.
        ratios: round by round.
    """

    dataset: str
    state: str
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


def verdicts(outcome: Outcome) -> list[Verdict]:
    """All comparisons of one process with one process."""
    single = [run for run in outcome.runs if run.processes == 1 and not run.limit]
    found: list[Verdict] = []
    for dataset, facts in outcome.datasets.items():
        here = [run for run in single if run.dataset == dataset]
        cold, warm = ([run for run in here if run.warm == state] for state in (False, True))
        found += _verdicts_of(cold, COLD, OURS)
        most_bytes = MOST * facts["sample_bytes"]
        found += _verdicts_of(_without_most(cold, most_bytes), LITTLE, OURS_LITTLE)
        found += _verdicts_of(warm, WARM, OURS)
    return found


def _without_most(runs: Sequence[Run], most_bytes: float) -> list[Run]:
    """Without the ways that had most of the data in the memory of their processes."""
    ways: dict[tuple[str, str], list[int]] = {}
    for run in runs:
        way = ways.setdefault((run.peer, run.order), [])
        way.append(run.peak_pss_bytes - run.start_pss_bytes)
    return [run for run in runs if median(ways[run.peer, run.order]) <= most_bytes]


def _verdicts_of(runs: Sequence[Run], state: str, our_ways: Sequence[str]) -> list[Verdict]:
    """Of one data set, cold or warm."""
    ours = _fastest([run for run in runs if run.peer in our_ways and run.is_global])
    found: list[Verdict] = []
    names = dict.fromkeys(family(run.peer) for run in runs)
    for name in names:
        if name == "dlfs":
            continue
        theirs = _fastest([run for run in runs if family(run.peer) == name])
        at_least = FLOOR if name in FLOOR_PEERS else 0.0
        found += _compare(ours, theirs, at_least, state)
    cached = [run for run in runs if run.peer == "dlfs" and run.order == GLOBAL_GIVEN and run.warm]
    peer = [run for run in runs if family(run.peer) == CACHED_PEER and run.warm]
    return found + _compare(cached, _fastest(peer), CACHED_FLOOR, state)


def _fastest(runs: Sequence[Run]) -> list[Run]:
    """The runs of the way with the highest median, of those in global order if there are any."""
    ways: dict[tuple[str, str], list[Run]] = {}
    for run in [run for run in runs if run.is_global] or runs:
        ways.setdefault((run.peer, run.order), []).append(run)
    return max(ways.values(), key=lambda way: median(run.rate for run in way), default=[])


def _compare(
    ours: Sequence[Run], theirs: Sequence[Run], at_least: float, state: str
) -> list[Verdict]:
    by_round = {(run.group, run.round): run for run in ours}
    pairs = [(by_round.get((run.group, run.round)), run) for run in theirs]
    ratios = tuple(mine.rate / run.rate for mine, run in pairs if mine is not None)
    if not ratios:
        return []
    one = theirs[0]
    peer = one.peer if one.is_global else f"{one.peer} ({one.order})"
    return [Verdict(one.dataset, state, ours[0].peer, peer, at_least, ratios)]
