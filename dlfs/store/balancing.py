"""Spreads the data of existing datasets over all groups of members (FORMAT.md, section 8.8).

Of each dataset, each active group gets the share that it has of the volume's chunks, to a whole
chunk; the chunks beyond that are moved (``moving``). These shares follow from the datasets and the
groups alone, so after a crash at any point rebalancing again continues, and nothing is moved on a
volume that is balanced. Chunks that several datasets share count for one of them. Directories stay:
they are read once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from dlfs.base.units import format_bytes
from dlfs.errors import SpaceError
from dlfs.format.catalog import DatasetRecord
from dlfs.format.geometry import ChunkRun, MemberGroup, split_runs
from dlfs.store.moving import Progress, Rehearsal, Transfer, move_all
from dlfs.store.space import count_chunks
from dlfs.store.transaction import Transaction


@dataclass(frozen=True, slots=True, kw_only=True)
class RebalanceReport:
    """Result of rebalancing.

    Attributes:
        moved_bytes: bytes of data that were moved to other members, further copies not counted.
    """

    moved_bytes: int


def rebalance_volume(transaction: Transaction, progress: Progress) -> RebalanceReport:
    """Move data so that each dataset lies on all active groups.

    Args:
        transaction: lock of the volume.
        progress: called with the bytes moved and the total bytes.

    Raises:
        SpaceError: the groups that should get data are full, or free chunks are in too many runs
            for a catalog; nothing was changed.
        DeviceError: a device failed; rebalancing again continues.
    """
    base = transaction.base
    groups = [group for group in base.geometry.groups if not group.evacuating]
    transfers = _plan(base.catalog.datasets, groups)
    _check_space(transaction, groups, transfers)

    def ordered() -> list[Transfer]:
        return [Transfer(tuple(runs), groups[target]) for (_, target), runs in transfers.items()]

    move_all(base, ordered(), lambda _done, _total: None, Rehearsal)
    return RebalanceReport(moved_bytes=move_all(base, ordered(), progress)[1])


_Plan = dict[tuple[int, int], list[ChunkRun]]
"""Chunks to move, by the positions of the groups that they leave and that get them."""


def _plan(datasets: Sequence[DatasetRecord], groups: Sequence[MemberGroup]) -> _Plan:
    parts = [
        [[run for run in runs if group.has(run)] for group in groups]
        for runs in _own_runs(datasets)
    ]
    counts = [[count_chunks(part) for part in of_dataset] for of_dataset in parts]
    goals = share_out(counts, [group.chunk_count for group in groups])
    plan: _Plan = defaultdict(list)
    for of_dataset, have, wanted in zip(parts, counts, goals, strict=True):
        missing = [max(0, goal - count) for goal, count in zip(wanted, have, strict=True)]
        for source, part in enumerate(of_dataset):
            excess = split_runs(part, wanted[source])[1]
            for target, count in enumerate(missing):
                moved, excess = split_runs(excess, count)
                missing[target] -= count_chunks(moved)
                if moved:
                    plan[source, target] += moved
    return plan


def _own_runs(datasets: Sequence[DatasetRecord]) -> list[list[ChunkRun]]:
    """Return the data chunks of each dataset; each shared chunk is given to one of them."""
    own: list[list[ChunkRun]] = [[] for _ in datasets]
    numbered = [(run, number) for number, record in enumerate(datasets) for run in record.data_runs]
    end = 0
    for run, number in sorted(numbered, key=lambda pair: (pair[0].first_chunk, pair[1])):
        first = max(run.first_chunk, end)
        if run.end_chunk > first:
            own[number].append(ChunkRun(first, run.end_chunk - first))
            end = run.end_chunk
    return own


def share_out(counts: Sequence[Sequence[int]], capacities: Sequence[int]) -> list[list[int]]:
    """Compute how many chunks of each dataset each group should have.

    A group gets its share of a dataset, rounded up or down such that few chunks move. Then datasets
    of few chunks, for which rounding decides, are distributed so that the groups fill evenly.

    Args:
        counts: number of chunks that each dataset has in each group.
        capacities: number of chunks of each group.

    Returns:
        Numbers of chunks like ``counts``, with the same sum for each dataset.
    """
    capacity = sum(capacities)
    goals = [_round_shares(have, capacities) for have in counts]
    used = [sum(goal[number] for goal in goals) for number in range(len(capacities))]
    total = sum(used)
    # Chunks of each group beyond its share of all data, as multiples of 1 / capacity.
    surplus = [u * capacity - total * c for u, c in zip(used, capacities, strict=True)]
    for goal in goals:
        count = sum(goal)
        givers = [g for g, c in enumerate(capacities) if goal[g] > count * c // capacity]
        takers = [g for g, c in enumerate(capacities) if goal[g] < -(-count * c // capacity)]
        for giver in givers:
            taker = min(takers, key=lambda g: surplus[g], default=giver)
            if surplus[giver] >= capacity and surplus[taker] <= -capacity:
                goal[giver] -= 1
                goal[taker] += 1
                surplus[giver] -= capacity
                surplus[taker] += capacity
                takers.remove(taker)
    return goals


def _round_shares(have: Sequence[int], capacities: Sequence[int]) -> list[int]:
    """Return the shares of one dataset, rounded towards the chunks that each group has."""
    count, capacity = sum(have), sum(capacities)
    low = [count * c // capacity for c in capacities]
    high = [-(-count * c // capacity) for c in capacities]
    goal = [min(max(h, a), b) for h, a, b in zip(have, low, high, strict=True)]
    for group in range(len(goal)):
        change = count - sum(goal)
        goal[group] = min(max(goal[group] + change, low[group]), high[group])
    return goal


def _check_space(transaction: Transaction, groups: Sequence[MemberGroup], plan: _Plan) -> None:
    """Check that the chunks can be moved, in some order.

    Raises:
        SpaceError: they cannot; the message has the numbers.
    """
    free = [transaction.space.free_in(group) for group in groups]
    left = {pair: count_chunks(runs) for pair, runs in plan.items()}
    room = max(0, transaction.space.chunk_count - 2 * transaction.space.reserve)
    progress = room > 0
    while progress:
        progress = False
        for (source, target), count in left.items():
            moved = min(count, free[target])
            left[source, target] -= moved
            free[target] -= moved
            free[source] += moved
            progress |= moved > 0
    stuck = sum(left.values())
    if stuck:
        base = transaction.base
        chunk_bytes = base.geometry.chunk_bytes
        needed, available = stuck * chunk_bytes, room * chunk_bytes
        raise SpaceError(
            f"rebalance volume {base.superblock.volume_uuid}: {needed} bytes "
            f"({format_bytes(needed)}) of data cannot be moved, since the members that should get "
            f"them are full: the volume has room for {available} bytes "
            f"({format_bytes(available)}); remove datasets, or 'dlfs grow' the volume first"
        )
