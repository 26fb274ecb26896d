"""``GrantBook``: the chunks that workers of an import may write, and who may write which.

The coordinator of an import lists chunks as granted runs in its record on the volume, and notes
them here. They are then in the *pool*, and ``take`` grants them to workers. What a worker reports
as the data of a step leaves the book, and the record with the same commit. What a worker did not
use goes back to the pool when it ends. The chunks of a worker that was lost are granted to nobody:
it may still be writing to them until some time. Then they leave the book, and are free when the
next commit does not list them any more.

A catalog has a limited number of runs. So chunks are granted in units: as large as a stripe of the
volume (``space.STRIPE_BYTES``), or less where the free chunks would not be enough for all workers.

Plain values without I/O or clocks. Threads: any at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dlfs.base.forks import Lock
from dlfs.base.wording import quote
from dlfs.errors import UsageError
from dlfs.format.geometry import ChunkRun, Geometry, split_runs
from dlfs.store.space import count_chunks, merge_runs, stripe_chunks

UNITS_EACH = 4
"""Units of a volume's free chunks that there are for each worker at least, if they are so many."""


def grant_unit(geometry: Geometry, free_chunks: int, workers: int) -> int:
    """Return the number of chunks that are granted at once.

    Args:
        geometry: geometry of the volume.
        free_chunks: chunks that may be granted, to all workers together.
        workers: number of workers, >= 1.
    """
    return max(1, min(stripe_chunks(geometry), free_chunks // (UNITS_EACH * max(1, workers))))


@dataclass(frozen=True, slots=True)
class LostGrant:
    """Chunks that a lost worker may still be writing.

    Attributes:
        worker: name of the worker.
        runs: the chunks.
        until_s: time from which on it cannot write any more, on the clock of the caller.
    """

    worker: str
    runs: tuple[ChunkRun, ...]
    until_s: float


class GrantBook:
    """The granted runs of an import by their holders.

    Attributes:
        pool: granted runs that no worker has, sorted.
        held: runs that each worker may write, by its name, sorted.
        lost: those of lost workers.
        has_lost: True if a worker was ever lost.
    """

    def __init__(self) -> None:
        self.pool: list[ChunkRun] = []
        self.held: dict[str, list[ChunkRun]] = {}
        self.lost: list[LostGrant] = []
        self.has_lost = False
        self._mutex = Lock()

    def __repr__(self) -> str:
        held = {worker: count_chunks(runs) for worker, runs in self.held.items()}
        lost = sum(count_chunks(grant.runs) for grant in self.lost)
        return f"<GrantBook: {self.pool_chunks} chunks to grant, {held} held, {lost} lost>"

    def runs(self) -> list[ChunkRun]:
        """Return all granted runs, sorted: those that the record of the import must list."""
        with self._mutex:
            return self._runs(self.lost)

    def _runs(self, lost: Iterable[LostGrant]) -> list[ChunkRun]:
        left = [run for grant in lost for run in grant.runs]
        held = [run for runs in self.held.values() for run in runs]
        return merge_runs([*self.pool, *held, *left])

    def runs_without(self, used: Sequence[ChunkRun], now_s: float) -> list[ChunkRun]:
        """Return the granted runs that are left after ``use`` of some, and ``expire``."""
        with self._mutex:
            left = self._runs(grant for grant in self.lost if grant.until_s > now_s)
        for run in used:
            left = _without(left, run)
        return left

    @property
    def pool_chunks(self) -> int:
        """Number of chunks that can be granted now."""
        return count_chunks(self.pool)

    def add(self, runs: Iterable[ChunkRun]) -> None:
        """Add runs to the pool, which the commit lists that makes this book valid."""
        with self._mutex:
            self.pool = merge_runs([*self.pool, *runs])

    def take(self, worker: str, count: int) -> list[ChunkRun]:
        """Grant chunks of the pool to a worker.

        Args:
            worker: name of the worker.
            count: most chunks to grant, > 0.

        Returns:
            The runs; none if the pool is empty.
        """
        with self._mutex:
            taken, left = split_runs(self.pool, count)
            self.pool = list(left)
            if taken:
                self.held[worker] = merge_runs([*self.held.get(worker, ()), *taken])
        return list(taken)

    def check(self, worker: str, runs: Sequence[ChunkRun]) -> None:
        """Check that a worker may write some chunks.

        Raises:
            UsageError: a chunk was not granted to it, or is there twice.
        """
        with self._mutex:
            self._left(worker, runs)

    def use(self, worker: str, runs: Sequence[ChunkRun]) -> None:
        """Take runs out of the book that a worker has filled with a step.

        Raises:
            UsageError: as ``check``; nothing changes.
        """
        with self._mutex:
            self._set(worker, self._left(worker, runs))

    def _left(self, worker: str, runs: Sequence[ChunkRun]) -> list[ChunkRun]:
        """Return what a worker may write besides some chunks."""
        try:
            wanted = merge_runs(runs)
        except ValueError as error:
            raise UsageError(
                f"worker {quote(worker)}: expected each chunk once: {error}"
            ) from error
        held = self.held.get(worker, [])
        left = held
        for run in wanted:
            left = _without(left, run)
        if count_chunks(left) + count_chunks(wanted) != count_chunks(held):
            outside = next(run for run in wanted if not any(_has(one, run) for one in held))
            raise UsageError(
                f"worker {quote(worker)}: expected chunks that were granted to it, got "
                f"{outside.chunk_count} from {outside.first_chunk} on"
            )
        return left

    def give_back(self, worker: str, runs: Sequence[ChunkRun] | None = None) -> None:
        """Return chunks to the pool that a worker did not write, or all that it has.

        No write of the worker to them may be in flight.

        Raises:
            UsageError: as ``use``.
        """
        with self._mutex:
            returned = list(self.held.get(worker, ())) if runs is None else list(runs)
            self._set(worker, self._left(worker, returned))
            self.pool = merge_runs([*self.pool, *returned])

    def lose(self, worker: str, until_s: float) -> None:
        """Note that a worker is lost, which may write until some time; its chunks stay its own."""
        with self._mutex:
            self.has_lost = True
            runs = self.held.pop(worker, ())
            if runs:
                self.lost.append(LostGrant(worker, tuple(runs), until_s))

    def expire(self, now_s: float) -> list[ChunkRun]:
        """Take the runs out of the book that lost workers cannot write any more; return them."""
        with self._mutex:
            gone = [grant for grant in self.lost if grant.until_s <= now_s]
            self.lost = [grant for grant in self.lost if grant.until_s > now_s]
        return [run for grant in gone for run in grant.runs]

    @property
    def lost_until_s(self) -> float | None:
        """Time from which on no lost worker can write any more; None without lost workers."""
        return max((grant.until_s for grant in self.lost), default=None)

    def _set(self, worker: str, runs: list[ChunkRun]) -> None:
        if runs:
            self.held[worker] = runs
        else:
            self.held.pop(worker, None)


def _has(outer: ChunkRun, inner: ChunkRun) -> bool:
    return outer.first_chunk <= inner.first_chunk and inner.end_chunk <= outer.end_chunk


def _without(runs: Sequence[ChunkRun], cut: ChunkRun) -> list[ChunkRun]:
    """Return runs without the chunks of another one."""
    left: list[ChunkRun] = []
    for run in runs:
        before = min(run.end_chunk, cut.first_chunk) - run.first_chunk
        behind = run.end_chunk - max(run.first_chunk, cut.end_chunk)
        if before >= run.chunk_count or behind >= run.chunk_count:
            left.append(run)
            continue
        if before > 0:
            left.append(ChunkRun(run.first_chunk, before))
        if behind > 0:
            left.append(ChunkRun(run.end_chunk - behind, behind))
    return left
