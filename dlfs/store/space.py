"""The free chunks of a volume as sorted runs, from which a writer allocates.

The free map of generation G is all chunks that the catalog of G does not use. Chunks that
generation G + 1 frees are not in it until G + 1 is durable, when the writer makes a new map from
the new catalog. A chunk that a sealed generation refers to is therefore never allocated.

Samples are allocated from the lowest numbers; attributes, directories and catalogs from the
highest. So samples that are appended to a dataset mostly follow its others in one run of chunks.

Plain values without I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter

from sortedcontainers import SortedKeyList

from dlfs.errors import SpaceError
from dlfs.format.geometry import ChunkRun, Geometry


def merge_runs(runs: Iterable[ChunkRun]) -> list[ChunkRun]:
    """Sort runs and join those that touch.

    Raises:
        ValueError: two runs overlap.
    """
    merged: list[ChunkRun] = []
    for run in sorted(runs, key=lambda run: run.first_chunk):
        end = merged[-1].end_chunk if merged else 0
        if merged and run.first_chunk < end:
            raise ValueError(f"chunk {run.first_chunk} is in two runs")
        if merged and run.first_chunk == end:
            last = merged[-1]
            merged[-1] = ChunkRun(last.first_chunk, last.chunk_count + run.chunk_count)
        elif run.chunk_count:
            merged.append(run)
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


def _by_first_chunk(runs: Iterable[ChunkRun]) -> SortedKeyList[ChunkRun]:
    return SortedKeyList(runs, key=attrgetter("first_chunk"))


class FreeSpace:
    """The free chunks that one commit may use.

    Args:
        runs: free runs of the current generation.
        reserve: chunks that only ``take_all`` may use, for this commit and the next one.
    """

    def __init__(self, runs: Sequence[ChunkRun], *, reserve: int = 0) -> None:
        self._runs = _by_first_chunk(merge_runs(runs))
        self._free = count_chunks(self._runs)
        self.reserve = reserve

    @property
    def chunk_count(self) -> int:
        """Number of free chunks, including the reserve."""
        return self._free

    def runs(self) -> list[ChunkRun]:
        """Return the free runs, sorted."""
        return list(self._runs)

    def take(self, count: int) -> ChunkRun:
        """Allocate 1 to ``count`` chunks in one run: the free run with the lowest numbers.

        Raises:
            SpaceError: only the reserve is free.
        """
        available = min(count, self._free - self.reserve)
        if available <= 0:
            raise SpaceError(
                f"allocate {count} chunks: expected them free, got {self._free}, "
                f"of which {self.reserve} are kept for the commit"
            )
        return self._cut(0, min(available, self._runs[0].chunk_count))

    def take_all(self, count: int, *, runs_max: int | None = None) -> list[ChunkRun]:
        """Allocate ``count`` chunks with the highest numbers that are one run.

        If no run is long enough, the longest runs are allocated.

        Args:
            count: number of chunks, >= 0.
            runs_max: largest number of runs; None for any number.

        Raises:
            SpaceError: too few chunks are free, or in too many runs; nothing is allocated.
        """
        if not count:
            return []
        places = range(len(self._runs) - 1, -1, -1)
        fitting = next((i for i in places if self._runs[i].chunk_count >= count), None)
        if fitting is not None:
            return [self._cut_end(fitting, count)]
        longest = sorted(self._runs, key=lambda run: -run.chunk_count)[:runs_max]
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
