"""Moves data of datasets to other chunks of the volume, while readers go on (FORMAT.md, 8.7).

A step copies some chunks to free ones, flushes, and commits the datasets with the new runs. Paths,
addresses and checksums of samples stay. A chunk that datasets share is copied once. Each copy of a
chunk is made from the same copy of the old one. So a step never replaces a correct copy by a
damaged one, and needs no checksum.

``move_all`` does all steps of a change. A crash between two steps leaves a complete volume, of
which some data has been moved. With a ``Rehearsal`` in place of the transactions it writes nothing,
and finds out whether all steps have room: free chunks may be too few, or in too many runs.

Memory: the windows of a scan and of a chunk writer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial

from dlfs.base.units import MIB, format_bytes
from dlfs.errors import SpaceError
from dlfs.format.catalog import DatasetRecord
from dlfs.format.geometry import ChunkRun, DataSpace, MemberGroup, split_runs
from dlfs.store.chunk_reader import CopyOrder, scan_space
from dlfs.store.chunk_writer import ChunkWriter
from dlfs.store.members import Member
from dlfs.store.space import TakenRuns, append_run, count_chunks
from dlfs.store.transaction import Generation, Transaction, flush_all

Progress = Callable[[int, int], None]
"""Called with the bytes moved and the total bytes."""

STEP_BYTES = 512 * MIB
"""Data that is moved between two commits. A crash loses at most this much of the work."""


class Rehearsal(Transaction):
    """A transaction whose commit writes nothing, and returns the generation that it would make."""

    def _write(self, made: Generation, _encoded: bytes, _first: Sequence[Member]) -> Generation:
        return made


@dataclass(slots=True)
class Transfer:
    """Chunks to move, each in a run of a dataset."""

    runs: tuple[ChunkRun, ...]
    target: MemberGroup | None = None
    """Group that gets the chunks; None for the groups that have the most free chunks."""

    @property
    def chunk_count(self) -> int:
        """Number of chunks to move."""
        return count_chunks(self.runs)


def move_all(
    base: Generation,
    transfers: Sequence[Transfer],
    progress: Progress,
    kind: type[Transaction] = Transaction,
) -> tuple[Generation, int]:
    """Move chunks of datasets, step by step, each step one commit.

    A transfer to a full group waits until others have freed chunks of the group.

    Args:
        base: newest generation; its members are open for writing and locked.
        transfers: the chunks, of which none occurs twice.
        progress: called with the bytes moved and the total bytes.
        kind: class of the transactions; ``Rehearsal`` moves nothing.

    Returns:
        The newest generation, and the number of bytes moved.

    Raises:
        SpaceError: free chunks are too few, or in too many runs; the message says how much has been
            moved.
        DeviceError: a device failed.
    """
    chunk_bytes = base.geometry.chunk_bytes
    total = sum(transfer.chunk_count for transfer in transfers)
    done = 0

    def advance(chunks: int) -> None:
        nonlocal done
        done += chunks
        progress(done * chunk_bytes, total * chunk_bytes)

    advance(0)
    pending = [transfer for transfer in transfers if transfer.runs]
    moved = 0
    while pending:
        step = kind.over(base)
        try:
            chosen, target, count = _next_step(step, pending)
            old, chosen.runs = split_runs(chosen.runs, count)
            allocate = partial(step.space.take_all, group=target)
            base = move_chunks(step, old, allocate, advance)
        except SpaceError as error:
            text = f"{format_bytes(moved * chunk_bytes)} of {format_bytes(total * chunk_bytes)}"
            if kind is Rehearsal:
                after = f"after {text} there would be no room to go on, and nothing was changed"
            else:
                after = f"{text} were moved before, and the volume is whole"
            raise SpaceError(f"{error}; {after}") from error
        moved += count
        pending = [transfer for transfer in pending if transfer.runs]
    return base, done * chunk_bytes


def _next_step(step: Transaction, pending: Sequence[Transfer]) -> tuple[Transfer, MemberGroup, int]:
    """Return the next transfer, the group that gets its chunks, and how many of them now.

    Raises:
        SpaceError: no transfer has a free chunk to go to.
    """
    chunks_max = max(1, STEP_BYTES // step.geometry.chunk_bytes)
    for transfer in pending:
        target = transfer.target or step.space.emptiest_group()
        count = min(transfer.chunk_count, chunks_max, step.space.free_in(target))
        if count:
            return transfer, target, count
    left = sum(transfer.chunk_count for transfer in pending)
    raise SpaceError(
        f"move {left} chunks: expected free ones on other members, got none: {step.space.reserve} "
        "chunks are kept for the commit"
    )


def move_chunks(
    transaction: Transaction,
    old: Sequence[ChunkRun],
    allocate: Callable[[int], list[ChunkRun]],
    progress: Callable[[int], None],
) -> Generation:
    """Move some chunks of datasets, and commit.

    Args:
        transaction: lock of the volume; its devices are of all members.
        old: chunks to move, each in a run of a dataset.
        allocate: allocates that many free chunks.
        progress: called with the number of chunks that have been copied since the last call.

    Raises:
        SpaceError: there are too few free chunks, or no room for another catalog.
        DeviceError: a device failed, or no copy of a chunk can be read.
    """
    new = allocate(count_chunks(old))
    if not isinstance(transaction, Rehearsal):
        _copy(transaction, old, new, progress)
    moves = _Moves(old, new)
    before = transaction.base.catalog.records
    changed = [(r, moved) for r in before if (moved := moves.apply(r)) is not r]
    return transaction.commit(
        removed=[record for record, _ in changed], added=[moved for _, moved in changed]
    )


def _copy(
    transaction: Transaction,
    old: Sequence[ChunkRun],
    new: Sequence[ChunkRun],
    progress: Callable[[int], None],
) -> None:
    """Copy chunks, and flush."""
    geometry = transaction.geometry
    space = DataSpace(geometry, tuple(old))
    for copy in range(geometry.replicas):
        taken = TakenRuns(new)
        sources = transaction.base.sources
        with ChunkWriter(transaction.devices, geometry, taken.take, copies=(copy,)) as writer:
            with closing(scan_space(sources, space, CopyOrder(copy=copy))) as windows:
                for window in windows:
                    if window.failures:
                        raise window.failures[0].error
                    writer.write_parts([window.memory])
                    if copy == 0:
                        progress(window.memory.nbytes // geometry.chunk_bytes)
            writer.drain()
    flush_all(transaction.devices)


class _Moves:
    """The new chunk of every chunk that is moved."""

    def __init__(self, old: Sequence[ChunkRun], new: Sequence[ChunkRun]) -> None:
        pieces: list[tuple[ChunkRun, int]] = []
        taken = TakenRuns(new)
        for run in old:
            first = run.first_chunk
            while first < run.end_chunk:
                target = taken.take(run.end_chunk - first)
                pieces.append((ChunkRun(first, target.chunk_count), target.first_chunk))
                first += target.chunk_count
        pieces.sort()
        self._pieces = pieces
        self._starts = [piece.first_chunk for piece, _ in pieces]

    def apply(self, record: DatasetRecord) -> DatasetRecord:
        """Return a record with the new runs; the record itself if none has changed."""
        data, directory = self._moved(record.data_runs), self._moved(record.directory_runs)
        journal = self._moved(record.journal_runs)
        # Granted runs stay: workers may be writing them (fencing.revoke_grants ends that).
        if (*data, *directory, *journal, *record.granted_runs) == record.runs:
            return record
        return replace(record, data_runs=data, directory_runs=directory, journal_runs=journal)

    def _moved(self, runs: tuple[ChunkRun, ...]) -> tuple[ChunkRun, ...]:
        moved: list[ChunkRun] = []
        for run in runs:
            first = run.first_chunk
            while first < run.end_chunk:
                piece = self._next(first, run.end_chunk)
                append_run(moved, piece[1])
                first += piece[0]
        return tuple(moved)

    def _next(self, first: int, end: int) -> tuple[int, ChunkRun]:
        """Return the number of chunks from one on that stay together, and where they are now."""
        number = bisect_right(self._starts, first) - 1
        if number >= 0:
            piece, target = self._pieces[number]
            if first < piece.end_chunk:
                count = min(end, piece.end_chunk) - first
                return count, ChunkRun(target + first - piece.first_chunk, count)
        if number + 1 < len(self._starts):
            end = min(end, self._starts[number + 1])
        return end - first, ChunkRun(first, end - first)
