"""The samples of an import that goes on, as far as they are on its volume.

An ``Arrival`` lists them as ``ArrivedStep`` objects: each committed step of the import, or, once it
is sealed, all samples as one. Both have the same order: that of the addresses of the samples in the
data space of the finished dataset. The seal of an import of one pass keeps every sample where it
is, so an address means the same sample before and after it.

Threads: any; all objects are immutable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from uuid import UUID

from dlfs.base.wording import quote
from dlfs.errors import UsageError
from dlfs.format.catalog import Catalog, DatasetRecord
from dlfs.format.geometry import ChunkRun, split_runs
from dlfs.format.journal import find_first_pass
from dlfs.store.info import read_origin
from dlfs.store.journal import Step

ReadSteps = Callable[[DatasetRecord, Sequence[Step]], Sequence[Step]]
"""Returns all steps of an unfinished import, given its record and the steps known before."""


@dataclass(frozen=True, slots=True)
class ArrivedStep:
    """Samples that were committed together.

    Attributes:
        start: address of the step's first chunk in the data space of the finished dataset.
        end: address behind its last chunk.
        first: number of samples of the steps before it.
        count: number of its samples.
        committed: the step in the journal; None for a sealed dataset.
    """

    start: int
    end: int
    first: int
    count: int
    committed: Step | None = None


@dataclass(frozen=True, slots=True)
class Arrival:
    """The samples of an import that have arrived.

    Attributes:
        record: record of the import, or of the dataset that it has made.
        steps: the samples, in the order of their addresses. Where workers import several parts of
            the source at a time, steps of a part follow when the parts before it are complete.
        journal: all steps in the order in which they were committed; none of a sealed dataset.
    """

    record: DatasetRecord
    steps: tuple[ArrivedStep, ...]
    journal: tuple[Step, ...] = ()

    @property
    def is_whole(self) -> bool:
        """True if the import has ended and no more samples follow."""
        return self.record.state == "sealed"

    @property
    def end(self) -> int:
        """Address behind the last chunk of the samples."""
        return self.steps[-1].end if self.steps else 0

    @property
    def count(self) -> int:
        """Number of the samples."""
        return self.steps[-1].first + self.steps[-1].count if self.steps else 0


def find_arrival(
    catalog: Catalog,
    name: bytes,
    uuid: UUID | None,
    known: Arrival | None,
    *,
    chunk_bytes: int,
    read_steps: ReadSteps,
) -> Arrival | None:
    """Find what has arrived of an import.

    Args:
        catalog: catalog to look in.
        name: name of the dataset.
        uuid: UUID of the dataset that the import makes; None for the unfinished import of this
            name, else the newest version.
        known: what was found before, whose steps are not read again.
        chunk_bytes: chunk size of the volume.
        read_steps: reads the steps from the journal of the catalog's generation.

    Returns:
        None if the import has not committed anything, or is gone.

    Raises:
        UsageError: the import will pack its samples again, or appends to another version.
        DlfsError: the journal cannot be read.
    """
    record = find_record(catalog, name, uuid)
    if record is None or (known is not None and known.record == record):
        return known if record is not None else None
    if record.state == "sealed":
        return Arrival(record, (ArrivedStep(0, record.data_bytes, 0, record.sample_count),))
    _check_order(record)
    steps = read_steps(record, () if known is None else known.journal)
    return Arrival(record, _place(_in_order(steps), chunk_bytes), tuple(steps))


def find_record(catalog: Catalog, name: bytes, uuid: UUID | None) -> DatasetRecord | None:
    """Return the record of an import, or of the dataset that it has made; None without.

    Args:
        catalog: catalog to look in.
        name: name of the dataset.
        uuid: UUID of the dataset; None for any, an unfinished one first, then the newest version.
    """
    unfinished = catalog.find_unfinished(name)
    if unfinished is not None and uuid in (None, unfinished.uuid):
        return unfinished
    if uuid is not None:
        return catalog.find_uuid(uuid)
    versions = catalog.find(name)
    return versions[-1] if versions else None


def _check_order(record: DatasetRecord) -> None:
    """Check that the samples of an unfinished import stay where they are.

    Raises:
        UsageError: they do not.
    """
    origin = read_origin(record)
    what = f"read the import of {quote(record.name)} while it goes on"
    if find_first_pass(record.tags) is not None or not origin.get("one_pass", False):
        raise UsageError(
            f"{what}: expected an import of one pass, got one that packs its samples a second time "
            "when its source has been read; wait until it has ended, or import with one_pass"
        )
    if origin.get("append"):
        raise UsageError(
            f"{what}: expected an import of a new version, got one that appends to another; wait "
            "until it has ended"
        )


def _in_order(journal: Sequence[Step]) -> list[Step]:
    """Return the steps of the parts of the source in order, up to the first that is missing."""
    found: list[Step] = []
    part = 0
    for step in sorted(journal, key=lambda step: step.header.part):
        if step.header.part != part:
            break
        found.append(step)
        part += step.header.ends_part
    return found


def _place(steps: Sequence[Step], chunk_bytes: int) -> tuple[ArrivedStep, ...]:
    chunks = [0, *accumulate(step.header.chunk_count for step in steps)]
    counts = [0, *accumulate(step.header.sample_count for step in steps)]
    return tuple(
        ArrivedStep(
            chunks[number] * chunk_bytes,
            chunks[number + 1] * chunk_bytes,
            counts[number],
            step.header.sample_count,
            step,
        )
        for number, step in enumerate(steps)
    )


def record_of_step(record: DatasetRecord, step: ArrivedStep, chunk_bytes: int) -> DatasetRecord:
    """Return a record of the samples of a step alone.

    Args:
        record: record of the import, or of the dataset that it has made.
        step: one of the import's steps.
        chunk_bytes: chunk size of the volume.
    """
    assert step.committed is not None
    header = step.committed.header
    first = header.first_chunk if record.state == "unfinished" else step.start // chunk_bytes
    return replace(
        record,
        version=0,
        state="unfinished",
        sample_count=header.sample_count,
        sample_bytes=header.sample_bytes,
        data_runs=_cut(record.data_runs, first, header.chunk_count),
        data_bytes=header.chunk_count * chunk_bytes,
        directory_runs=(),
        entries_bytes=0,
        names_bytes=0,
        attribute_extent=None,
        journal_runs=(),
        journal_bytes=0,
        tags=(),
    )


def _cut(runs: Sequence[ChunkRun], first: int, count: int) -> tuple[ChunkRun, ...]:
    """Return the chunks ``first`` to ``first + count - 1`` of some runs."""
    return split_runs(split_runs(runs, first)[1], count)[0]
