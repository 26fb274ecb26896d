"""Comparisons of DLFS with its peers, and their floors.

There are two comparisons of cold runs. In one, all readers may end up with all of the data in
memory, as peers do through the page cache. In the other, DLFS has memory for a sixteenth of the
data, as if the data were larger than memory. Ways of peers that had most of the data in memory are
left out of that one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from bench.comparison import Comparison
from bench.peers.outcome import GLOBAL_GIVEN, Outcome, Run

OURS_LITTLE = ("dlfs", "dlfs-epoch")
OURS = (*OURS_LITTLE, "dlfs-epoch-all")
"""Ways of DLFS that are compared: the sample API in global order."""

COLD, LITTLE, WARM = STATES = ("cold", "cold, little memory", "warm")

MOST = 0.5
"""Share of the data in memory above which a peer's way does not count as cold."""

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
    "squashfs",
    "erofs",
)
"""Peers than which DLFS must be `FLOOR` times as fast, cold and warm, each by its fastest way."""

CACHED_FLOOR = 3.0
CACHED_PEER = "lmdb"
"""Peer than which DLFS must be `CACHED_FLOOR` times as fast for cached random reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict(Comparison):
    """One comparison of a way of DLFS with a peer.

    Attributes:
        dataset: key of the data set.
        state: one of `STATES`.
        ours: name of the way of DLFS.
        peer: name of the peer's way, with its order if that is not global.
    """

    dataset: str
    state: str
    ours: str
    peer: str


def family(name: str) -> str:
    """Return the peer that a way belongs to."""
    return name.partition("-")[0]


def verdicts(outcome: Outcome) -> list[Verdict]:
    """Return all comparisons of one process with one process."""
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


def _by_way(runs: Sequence[Run]) -> dict[tuple[str, str], list[Run]]:
    """Sort runs by peer and order."""
    ways: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        ways.setdefault((run.peer, run.order), []).append(run)
    return ways


def _without_most(runs: Sequence[Run], most_bytes: float) -> list[Run]:
    """Leave out the ways that had most of the data in the memory of their processes."""
    return [
        run
        for way in _by_way(runs).values()
        if median(run.peak_pss_bytes - run.start_pss_bytes for run in way) <= most_bytes
        for run in way
    ]


def _verdicts_of(runs: Sequence[Run], state: str, our_ways: Sequence[str]) -> list[Verdict]:
    """Compare the runs of one data set and state."""
    ours = _fastest([run for run in runs if run.peer in our_ways and run.is_global])
    found: list[Verdict] = []
    for name in dict.fromkeys(family(run.peer) for run in runs):
        if name == "dlfs":
            continue
        theirs = _fastest([run for run in runs if family(run.peer) == name])
        at_least = FLOOR if name in FLOOR_PEERS else 0.0
        found += _compare(ours, theirs, at_least, state)
    cached = [run for run in runs if run.peer == "dlfs" and run.order == GLOBAL_GIVEN and run.warm]
    peer = [run for run in runs if family(run.peer) == CACHED_PEER and run.warm]
    return found + _compare(cached, _fastest(peer), CACHED_FLOOR, state)


def _fastest(runs: Sequence[Run]) -> list[Run]:
    """Return the runs of the way with the highest median, in global order if there is one."""
    ways = _by_way([run for run in runs if run.is_global] or runs)
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
    return [
        Verdict(
            dataset=one.dataset,
            state=state,
            ours=ours[0].peer,
            peer=one.peer if one.is_global else f"{one.peer} ({one.order})",
            at_least=at_least,
            ratios=ratios,
        )
    ]
