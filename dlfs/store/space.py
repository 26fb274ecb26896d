"""The free chunks of a volume as sorted runs, from which a writer allocates.

The free map of generation G is all chunks that the catalog of G does not use. Chunks that
generation G + 1 frees are not in it until G + 1 is durable, when the writer makes a new map from
the new catalog. A chunk that a sealed generation refers to is therefore never allocated.

Samples are allocated from the lowest numbers; attributes, directories and catalogs from the
highest. So samples that are appended to a dataset mostly follow its others in one run of chunks.
If the volume has several groups of members, samples are allocated in stripes: each stripe is taken
from the group that has the most free chunks. So a volume that was grown fills evenly, and a large
dataset lies on all groups that have room.

Plain values without I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Self

from sortedcontainers import SortedKeyList

from dlfs.base.units import MIB
from dlfs.errors import SpaceError
from dlfs.format.geometry import ChunkRun, Geometry, MemberGroup

STRIPE_BYTES = 64 * MIB
"""Samples that are allocated from one group of members before another one is chosen, in bytes."""

STRIPES_MAX = 16384
"""Most stripes of a whole volume; those of a large volume are larger, so that runs stay few."""


def merge_runs(runs: Iterable[ChunkRun]) -> list[ChunkRun]:
    """Sort runs and join those that touch.

    Raises:
        ValueError: two runs overlap.
    """
    merged: list[ChunkRun] = []
    for run in sorted(runs, key=lambda run: run.first_chunk):
        if merged and run.first_chunk < merged[-1].end_chunk:
            raise ValueError(f"chunk {run.first_chunk} is in two runs")
        if run.chunk_count:
            append_run(merged, run)
    return merged


def append_run(runs: list[ChunkRun], run: ChunkRun) -> None:
    """Append a run in data order; extend the last run if the new one follows it directly."""
    if runs and runs[-1].end_chunk == run.first_chunk:
        runs[-1] = ChunkRun(runs[-1].first_chunk, runs[-1].chunk_count + run.chunk_count)
    else:
        runs.append(run)


def count_chunks(runs: Iterable[ChunkRun]) -> int:
    """Return the total number of chunks in some runs."""
    return sum(run.chunk_count for run in runs)


def allocatable_runs(geometry: Geometry, free: Iterable[ChunkRun]) -> list[ChunkRun]:
    """Return the free runs of the groups of members that are not being evacuated."""
    evacuating = [group for group in geometry.groups if group.evacuating]
    return [run for run in free if not any(group.has(run) for group in evacuating)]


def stripe_chunks(geometry: Geometry) -> int:
    """Return the number of chunks of a stripe of a volume."""
    return max(STRIPE_BYTES // geometry.chunk_bytes, geometry.chunk_total // STRIPES_MAX)


def _by_first_chunk(runs: Iterable[ChunkRun]) -> SortedKeyList[ChunkRun]:
    return SortedKeyList(runs, key=attrgetter("first_chunk"))


class FreeSpace:
    """The free chunks that one commit may use.

    Args:
        runs: free runs of the current generation.
        reserve: chunks that only ``take_all`` may use, for this commit and the next one.
        groups: groups of members that have the runs.
        stripe: chunks that ``take`` allocates from one group before it chooses another one.
    """

    def __init__(
        self,
        runs: Sequence[ChunkRun],
        *,
        reserve: int = 0,
        groups: Sequence[MemberGroup] = (),
        stripe: int = 1,
    ) -> None:
        self._runs = _by_first_chunk(merge_runs(runs))
        self._free = count_chunks(self._runs)
        self.reserve = reserve
        self._groups = groups
        self._stripe = stripe
        self._group: MemberGroup | None = None  # of the present stripe
        self._stripe_left = 0

    @classmethod
    def of(cls, geometry: Geometry, free: Iterable[ChunkRun], *, reserve: int) -> Self:
        """Return the free chunks of the groups of members that are not being evacuated."""
        return cls(
            allocatable_runs(geometry, free),
            reserve=reserve,
            groups=[group for group in geometry.groups if not group.evacuating],
            stripe=stripe_chunks(geometry),
        )

    @property
    def chunk_count(self) -> int:
        """Number of free chunks, including the reserve."""
        return self._free

    def runs(self) -> list[ChunkRun]:
        """Return the free runs, sorted."""
        return list(self._runs)

    def free_in(self, group: MemberGroup) -> int:
        """Return the number of free chunks of a group that are not needed as reserve."""
        return max(0, min(self._count_in(group), self._free - self.reserve))

    def emptiest_group(self) -> MemberGroup:
        """Return the group that has the most free chunks; of several, the first."""
        return max(self._groups, key=self._count_in)

    def _count_in(self, group: MemberGroup) -> int:
        return count_chunks(run for run in self._runs if group.has(run))

    def take(self, count: int) -> ChunkRun:
        """Allocate 1 to ``count`` chunks in one run: the first free run of the stripe's group.

        Raises:
            SpaceError: only the reserve is free.
        """
        available = min(count, self._free - self.reserve)
        if available <= 0:
            raise SpaceError(
                f"allocate {count} chunks: expected them free, got {self._free}, "
                f"of which {self.reserve} are kept for the commit"
            )
        position = self._next_position()
        taken = self._cut(position, min(available, self._runs[position].chunk_count))
        self._stripe_left -= taken.chunk_count
        return taken

    def _next_position(self) -> int:
        """Return the position of the run to allocate from, and begin a stripe if need be."""
        if len(self._groups) < 2:
            return 0
        position = self._first_of(self._group) if self._stripe_left > 0 else None
        if position is None:
            self._group = self.emptiest_group()
            self._stripe_left = self._stripe
            position = self._first_of(self._group)
        assert position is not None  # a chunk beyond the reserve is free
        return position

    def _first_of(self, group: MemberGroup | None) -> int | None:
        """Return the position of a group's first free run; None if it has none."""
        if group is None:
            return None
        position: int = self._runs.bisect_key_left(group.first_chunk)
        found = position < len(self._runs) and group.has(self._runs[position])
        return position if found else None

    def take_all(
        self, count: int, *, runs_max: int | None = None, group: MemberGroup | None = None
    ) -> list[ChunkRun]:
        """Allocate ``count`` chunks with the highest numbers that are one run.

        If no run is long enough, the longest runs are allocated.

        Args:
            count: number of chunks, >= 0.
            runs_max: largest number of runs; None for any number.
            group: group of members that has the chunks; None for any groups.

        Raises:
            SpaceError: too few chunks are free, or in too many runs; nothing is allocated.
        """
        if not count:
            return []
        runs = [run for run in self._runs if group is None or group.has(run)]
        fitting = next((run for run in reversed(runs) if run.chunk_count >= count), None)
        if fitting is not None:
            return [self._cut_end(self._runs.index(fitting), count)]
        longest = sorted(runs, key=lambda run: -run.chunk_count)[:runs_max]
        if count_chunks(longest) < count:
            raise SpaceError(
                f"allocate {count} chunks: expected them free"
                + (f" in at most {runs_max} runs" if runs_max is not None else "")
                + f", got {count_chunks(longest)} of {self._free}"
            )
        taken: list[ChunkRun] = []
        for run in longest:
            length = min(run.chunk_count, count - count_chunks(taken))
            if length:
                taken.append(self._cut(self._runs.index(run), length))
        return sorted(taken, key=lambda run: run.first_chunk)

    def give_back(self, runs: Sequence[ChunkRun]) -> None:
        """Free runs that were allocated and will not be used."""
        self._runs = _by_first_chunk(merge_runs([*self._runs, *runs]))
        self._free += count_chunks(runs)

    def _cut(self, position: int, count: int) -> ChunkRun:
        run = self._runs.pop(position)
        self._free -= count
        if run.chunk_count > count:
            self._runs.add(ChunkRun(run.first_chunk + count, run.chunk_count - count))
        return ChunkRun(run.first_chunk, count)

    def _cut_end(self, position: int, count: int) -> ChunkRun:
        run = self._runs.pop(position)
        self._free -= count
        if run.chunk_count > count:
            self._runs.add(ChunkRun(run.first_chunk, run.chunk_count - count))
        return ChunkRun(run.end_chunk - count, count)


class TakenRuns:
    """Allocates runs of chunks out of runs that were allocated before."""

    def __init__(self, runs: Sequence[ChunkRun]) -> None:
        self._space = list(reversed(runs))

    def take(self, count: int) -> ChunkRun:
        """Return the next run, or the first ``count`` chunks of it."""
        run = self._space.pop()
        if run.chunk_count > count:
            self._space.append(ChunkRun(run.first_chunk + count, run.chunk_count - count))
            return ChunkRun(run.first_chunk, count)
        return run

    def take_all(self, count: int) -> list[ChunkRun]:
        """Return the next ``count`` chunks."""
        taken: list[ChunkRun] = []
        while count:
            taken.append(self.take(count))
            count -= taken[-1].chunk_count
        return taken


def joined_runs(runs: Sequence[ChunkRun], more: Sequence[ChunkRun]) -> tuple[ChunkRun, ...]:
    """Return runs and those that follow them in data order."""
    joined = list(runs)
    for run in more:
        append_run(joined, run)
    return tuple(joined)
