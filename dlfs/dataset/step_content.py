"""``StepContent``: a step of an import whose data is on the volume, and that no commit has yet.

A ``StepBuilder`` makes it, in the process that imports or in a worker. ``write_steps`` writes the
journals of steps as the owner of the volume's lock, and returns the import with them, for a commit.

Threads: any.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from dlfs.attributes import AttributeTable
from dlfs.connection.unfinished import PartProgress, UnfinishedSteps
from dlfs.format.bad_records import BadReport, bad_records_tags
from dlfs.format.catalog import DatasetRecord
from dlfs.format.constants import TAG_BAD_RECORDS, TAG_SOURCE
from dlfs.format.geometry import ChunkRun
from dlfs.format.journal import Cursor, StepHeader, encode_step_header
from dlfs.store.journal import Step
from dlfs.store.space import count_chunks, joined_runs
from dlfs.store.transaction import Transaction, now_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnd:
    """Where a step ends in its part of the source.

    Attributes:
        source_count: samples of the part that this step and those of the part before it have used.
        cursor: the last cursor that the source gave for them; its count is of samples of the part.
        ends_part: True if no more samples of the part follow.
    """

    source_count: int
    cursor: Cursor | None = None
    ends_part: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepContent:
    """A step of an import, as the process has made it that wrote its data.

    Attributes:
        part: number of the part of the source that its samples are of.
        number: number of the step among those of the part.
        end: where it ends in the part.
        runs: chunks that hold its samples, in data order; their data is durable.
        sample_count: number of its samples.
        sample_bytes: sum of their lengths, in bytes.
        path_bytes: sum of the lengths of their paths.
        window_count: windows of a shuffle that this step and those of the part before it have used.
        entries: entries part of the directory segment of its samples, ``uint8[n_bytes]``.
        names: names part of this segment.
        attributes: consecutive parts of the attribute segment of its samples; none without columns.
        attributes_head_bytes: length of the head of the attribute segment; 0 without one.
        bad: bad records that the step has left out of its part of the source.
    """

    part: int
    number: int = 0
    end: StepEnd
    runs: tuple[ChunkRun, ...]
    sample_count: int
    sample_bytes: int
    path_bytes: int
    window_count: int
    entries: NDArray[np.uint8]
    names: NDArray[np.uint8]
    attributes: Sequence[NDArray[np.uint8]]
    attributes_head_bytes: int
    bad: BadReport = field(default_factory=BadReport)

    @property
    def chunk_count(self) -> int:
        """Number of chunks that hold its samples."""
        return count_chunks(self.runs)

    @property
    def attributes_bytes(self) -> int:
        """Length of the attribute segment; 0 without columns."""
        return sum(part.nbytes for part in self.attributes)

    def progress(self, before: PartProgress) -> PartProgress:
        """Return what the steps of its part have with this one, given those before it."""
        return PartProgress(
            before.step_count + 1,
            self.end.source_count,
            self.window_count,
            self.end.cursor or before.cursor,
            self.end.ends_part,
        )

    def header(self, number: int, first_chunk: int) -> StepHeader:
        """Return the header of the step in a journal.

        Args:
            number: number of the step in the journal.
            first_chunk: chunks of the steps before it.
        """
        cursor = self.end.cursor
        return StepHeader(
            number=number,
            first_chunk=first_chunk,
            chunk_count=self.chunk_count,
            sample_count=self.sample_count,
            sample_bytes=self.sample_bytes,
            path_bytes=self.path_bytes,
            source_count=self.end.source_count,
            window_count=self.window_count,
            entries_bytes=self.entries.nbytes,
            names_bytes=self.names.nbytes,
            attributes_bytes=self.attributes_bytes,
            attributes_head_bytes=self.attributes_head_bytes,
            part=self.part,
            ends_part=self.end.ends_part,
            cursor_count=cursor.count if cursor else 0,
            cursor_json=cursor.json if cursor else b"",
        )

    def table(self, uuid: UUID) -> AttributeTable:
        """Return the attributes of its samples.

        Raises:
            FormatError: they are malformed.
        """
        if not self.attributes:
            return AttributeTable.empty(uuid, self.sample_count)
        segment = np.concatenate(self.attributes)
        return AttributeTable.over(segment, self.attributes_head_bytes)


def new_import(name: bytes, uuid: UUID, layout: str, seed: int) -> UnfinishedSteps:
    """Return an import without steps.

    Args:
        name: name of the dataset.
        uuid: UUID of the dataset.
        layout: order in which samples are packed.
        seed: seed of the shuffled order.
    """
    record = DatasetRecord(
        name=name,
        version=0,
        uuid=uuid,
        created_ns=now_ns(),
        sample_count=0,
        sample_bytes=0,
        layout=layout,
        seed=seed,
        data_runs=(),
        data_bytes=0,
        directory_runs=(),
        entries_bytes=0,
        names_bytes=0,
        state="unfinished",
    )
    return UnfinishedSteps.of(record, [], AttributeTable.empty(uuid, 0))


def write_steps(
    transaction: Transaction,
    before: UnfinishedSteps,
    contents: Sequence[StepContent],
    *,
    source: bytes,
    bad: BadReport,
    tags: Sequence[tuple[int, bytes]] = (),
) -> UnfinishedSteps:
    """Write the journals of some steps; return the import with these steps, for a commit.

    Args:
        transaction: transaction of the writer.
        before: the import before them.
        contents: the steps.
        source: describes the source and the options of the import.
        bad: records that the steps so far, these included, have left out.
        tags: further tagged values of the record, which those of later steps keep.

    Raises:
        SpaceError: the volume has too little free space.
        DeviceError: a write failed.
    """
    chunk_bytes = transaction.geometry.chunk_bytes
    record, steps = before.record, list(before.steps)
    journal: list[NDArray[np.uint8]] = []
    chunks, address = record.data_bytes // chunk_bytes, record.journal_bytes
    runs, made = record.data_runs, before
    for content in contents:
        header = content.header(len(steps), chunks)
        steps.append(Step(header, address))
        raw = np.frombuffer(encode_step_header(header, record.uuid), np.uint8)
        filling = np.zeros(-header.step_bytes % chunk_bytes, np.uint8)
        journal += [raw, content.entries, content.names, *content.attributes, filling]
        chunks += content.chunk_count
        address += header.step_bytes + filling.nbytes
        runs = joined_runs(runs, content.runs)
        made = made.with_table(content.table(record.uuid))
    own = {TAG_SOURCE, TAG_BAD_RECORDS, *(tag for tag, _ in tags)}
    others = [tag for tag in record.tags if tag[0] not in own]
    bad_tags = bad_records_tags(bad, transaction.base.superblock.catalog_bytes)
    written = transaction.write_segment(journal) if journal else ()
    record = replace(
        record,
        sample_count=record.sample_count + sum(one.sample_count for one in contents),
        sample_bytes=record.sample_bytes + sum(one.sample_bytes for one in contents),
        data_runs=runs,
        data_bytes=chunks * chunk_bytes,
        tags=((TAG_SOURCE, source), *bad_tags, *tags, *others),
        journal_runs=joined_runs(record.journal_runs, written),
        journal_bytes=address,
    )
    return replace(made, record=record, steps=steps)
