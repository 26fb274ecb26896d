"""The steps of an unfinished import: what its journal says of the samples so far.

``load_steps`` reads what the next step needs: the headers of all steps, and the last step of each
part of the source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from dlfs._native.device import aligned_buffer
from dlfs.attributes import AttributeTable
from dlfs.directory import FrozenDirectory
from dlfs.directory.sharing import LOADER_WAIT_S, Part, open_part
from dlfs.errors import FormatError
from dlfs.fields import FieldEncoder, find_fields
from dlfs.format.attributes import decode_head
from dlfs.format.catalog import DatasetRecord
from dlfs.format.geometry import ChunkRun, DataSpace, split_runs
from dlfs.format.journal import (
    STEP_HEADER_BYTES,
    Cursor,
    FirstPass,
    StepHeader,
    find_first_pass,
)
from dlfs.format.paths import display
from dlfs.store.chunk_reader import CopyOrder, copy_orders, read_blocks
from dlfs.store.journal import Step, read_step, read_steps, segments_bytes
from dlfs.store.space import TakenRuns, append_run, count_chunks
from dlfs.store.transaction import Generation


@dataclass(frozen=True, slots=True)
class PartProgress:
    """What the committed steps have of one part of the source.

    Attributes:
        step_count: number of its steps.
        source_count: samples of the part that they have used.
        window_count: windows of a shuffle that they have used.
        cursor: the last cursor that the source gave for them; its count is of samples of the part.
        is_complete: True if they have all samples of the part.
    """

    step_count: int = 0
    source_count: int = 0
    window_count: int = 0
    cursor: Cursor | None = None
    is_complete: bool = False


@dataclass(frozen=True, slots=True)
class UnfinishedSteps:
    """The steps of an import that were committed.

    Attributes:
        record: record of the unfinished import.
        steps: its steps.
        columns: dtype of each column as it is stored, by name; ``object`` for strings.
        names: names of the attributes, each vector once.
        encoder: encoder of the samples' fields; None for samples of bytes.
    """

    record: DatasetRecord
    steps: Sequence[Step]
    columns: dict[str, np.dtype[Any]]
    names: frozenset[str]
    encoder: FieldEncoder | None

    @classmethod
    def of(
        cls, record: DatasetRecord, steps: Sequence[Step], table: AttributeTable
    ) -> UnfinishedSteps:
        """Return the steps of an import.

        Args:
            record: record of the import.
            steps: its steps.
            table: attributes of the last step.
        """
        columns = {column.name: column.dtype for column in table.head.columns}
        fields = find_fields(table, np.arange(len(table)), display(record.name))
        encoder = FieldEncoder(fields) if fields else None
        return cls(record, steps, columns, frozenset(table.dtypes), encoder)

    def with_table(self, table: AttributeTable) -> UnfinishedSteps:
        """Return the same steps with the columns of one more, given its attributes.

        A step of another part of the source may lack a reserved column that these have.
        """
        if not len(table) and not table.head.columns:
            return self
        new = UnfinishedSteps.of(self.record, self.steps, table)
        columns, names = self.columns | new.columns, self.names | new.names
        return replace(self, columns=columns, names=names, encoder=self.encoder or new.encoder)

    def with_record(self, record: DatasetRecord) -> UnfinishedSteps:
        """Return the same steps with the record of another generation."""
        return replace(self, record=record)

    @property
    def first_pass(self) -> FirstPass | None:
        """The end of the first pass; None before the second one has begun."""
        return find_first_pass(self.record.tags)

    @property
    def imported(self) -> tuple[int, int]:
        """Number of samples of the import so far, each counted once, and sum of their lengths."""
        counted = self.first_pass or self.record
        return counted.sample_count, counted.sample_bytes

    def of_pass(self, *, second: bool) -> UnfinishedSteps:
        """Return the steps of one pass, as if the import had no other; all without a second one."""
        first = self.first_pass
        if first is None:
            return self
        cut, record = first.step_count, self.record
        end = count_chunks(record.data_runs)
        middle = self.steps[cut].header.first_chunk if cut < len(self.steps) else end
        runs, samples, size = record.data_runs, first.sample_count, first.sample_bytes
        chunks, moved, steps = middle, 0, self.steps[:cut]
        if second:
            samples, size = record.sample_count - samples, record.sample_bytes - size
            chunks, moved, steps = end - middle, middle, self.steps[cut:]
        part = replace(
            record,
            data_runs=split_runs(runs, middle)[int(second)],
            data_bytes=record.data_bytes // max(1, end) * chunks,
            sample_count=samples,
            sample_bytes=size,
        )
        return replace(self, record=part, steps=[_moved(step, moved) for step in steps])

    def in_order(self) -> UnfinishedSteps:
        """Return the steps in the order of the parts of the source, as if committed in it.

        Steps of several parts lie in the journal in the order in which they were committed. The
        data runs are those of the steps in their new order.
        """
        order = sorted(range(len(self.steps)), key=lambda at: self.steps[at].header.part)
        if order == list(range(len(order))):
            return self
        taken = TakenRuns(self.record.data_runs)
        of_steps = [taken.take_all(step.header.chunk_count) for step in self.steps]
        runs: list[ChunkRun] = []
        steps, first_chunk = [], 0
        for at in order:
            step = self.steps[at]
            for run in of_steps[at]:
                append_run(runs, run)
            steps.append(replace(step, header=replace(step.header, first_chunk=first_chunk)))
            first_chunk += step.header.chunk_count
        return replace(self, record=replace(self.record, data_runs=tuple(runs)), steps=steps)

    def find_parts(self) -> dict[int, PartProgress]:
        """Return the progress of each part of the source that has steps, by its number."""
        first = self.first_pass
        found: dict[int, PartProgress] = {}
        for step in self.steps if first is None else self.steps[: first.step_count]:
            header = step.header
            before = found.get(header.part, PartProgress())
            found[header.part] = PartProgress(
                before.step_count + 1,
                header.source_count,
                header.window_count,
                header.cursor or before.cursor,
                header.ends_part,
            )
        return found

    @property
    def window_count(self) -> int:
        """Number of windows of a shuffle that the steps of the first pass have used."""
        return sum(progress.window_count for progress in self.find_parts().values())

    @property
    def attributes_bytes(self) -> int:
        """Sum of the lengths of the attribute segments."""
        return sum(step.header.attributes_bytes for step in self.steps)

    @property
    def path_bytes(self) -> int:
        """Sum of the lengths of all paths."""
        return sum(step.header.path_bytes for step in self.steps)


def _moved(step: Step, chunks: int) -> Step:
    """Return a step as if so many chunks before its own were not there."""
    header = replace(step.header, first_chunk=step.header.first_chunk - chunks)
    return replace(step, header=header)


def load_steps(base: Generation, record: DatasetRecord) -> UnfinishedSteps:
    """Read what the next step of an import needs.

    Raises:
        FormatError: the journal is malformed; the message names where.
        DeviceError: a read failed.
    """
    steps = read_steps(base, record)
    found = UnfinishedSteps.of(record, steps, AttributeTable.empty(record.uuid, 0))
    described = [step for step in steps if step.header.sample_count] or steps  # their columns
    last = {step.header.part: step for step in described}
    for _, step in sorted(last.items()):
        if found.columns and _has_known_columns(base, found, step):
            continue
        directory, table = load_step(base, record, step)
        directory.close()
        found = found.with_table(table)
    return found


def _has_known_columns(base: Generation, found: UnfinishedSteps, step: Step) -> bool:
    """Return True if a step has no other columns than those found, by the head of its attributes.

    Also if the head cannot be read: the step is damaged then, and its first reader says so.
    """
    header = step.header
    if not header.attributes_bytes:
        return True
    segments = header.entries_bytes + header.names_bytes
    space = DataSpace(base.geometry, found.record.journal_runs)
    address = step.address + STEP_HEADER_BYTES + segments
    for choice in copy_orders(base.geometry):
        raw = read_blocks(base.sources, space, address, header.attributes_head_bytes, choice)
        try:
            head = decode_head(raw, "the attributes of a step")
        except FormatError:
            continue
        return all(found.columns.get(column.name) == column.dtype for column in head.columns)
    return True


def column_of(
    table: AttributeTable,
    name: str,
    steps: UnfinishedSteps,
    indices: NDArray[np.uint32] | None = None,
) -> NDArray[Any]:
    """Return a column of a step; a reserved one may begin in a later step.

    Args:
        table: attributes of the step.
        name: name of the column.
        steps: all steps.
        indices: indices of samples in the step; all by default.
    """
    if name in table.dtypes:
        return table.column(name, indices)
    dtype = steps.columns[name]
    count = len(table) if indices is None else len(indices)
    return np.full(count, "" if dtype.kind == "O" else 0, dtype)


def load_step(
    base: Generation, record: DatasetRecord, step: Step, *, shared: bool = False
) -> tuple[FrozenDirectory, AttributeTable]:
    """Read the directory and the attributes of a step, from the first copies that are right.

    Args:
        base: generation that has the record.
        record: record of the import.
        step: one of its steps.
        shared: put all of its segments into one file, which is that of the directory's entries, for
            other processes to map.

    Raises:
        FormatError: no copy is right; tells of the first.
        DeviceError: no copy can be read.
    """
    header = step.header
    label = f"step {header.number} of the unfinished import of {display(record.name)!r}"
    problem: FormatError | None = None
    for choice in copy_orders(base.geometry):
        part = _read_part(base, record, step, choice, shared=shared)
        try:
            segments = split_segments(part.memory, header)
            return decode_step(segments, header, record.uuid, label, part)
        except FormatError as error:
            part.release()
            problem = problem or error
    assert problem is not None
    raise problem


def _read_part(
    base: Generation, record: DatasetRecord, step: Step, choice: CopyOrder, *, shared: bool
) -> Part:
    """Read the segments of a step, unverified."""

    def fill(memory: memoryview) -> None:
        read_step(base, record, step, np.frombuffer(memory, np.uint8), choice)

    size = segments_bytes(base, step)
    if shared:
        return open_part(None, "", size, fill, LOADER_WAIT_S)
    memory = aligned_buffer(size, max(base.geometry.block_bytes, 4096))
    fill(memory.data)
    return Part(memory)


Segments = tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.uint8]]
"""The entries part, the names part and the attribute segment of a step."""


def split_segments(memory: NDArray[np.uint8], header: StepHeader) -> Segments:
    """Return the segments of a step, which lie one behind the other in memory."""
    names_end = header.entries_bytes + header.names_bytes
    end = names_end + header.attributes_bytes
    return (
        memory[: header.entries_bytes],
        memory[header.entries_bytes : names_end],
        memory[names_end:end],
    )


def decode_step(
    segments: Segments,
    header: StepHeader,
    uuid: UUID,
    label: str,
    part: Part | None = None,
) -> tuple[FrozenDirectory, AttributeTable]:
    """Return the directory and the attributes of a step, after all checksums were compared.

    Args:
        segments: the entries part, the names part and the attribute segment of the step.
        header: header of the step.
        uuid: UUID of the dataset.
        label: name of the step, for errors.
        part: memory of the segments, which the directory owns from now on.

    Raises:
        FormatError: a segment is malformed, or is not that of the header.
    """
    entries, names, attributes = segments
    directory = FrozenDirectory(
        entries,
        partial(_same, names),
        label=label,
        release=None if part is None else part.release,
        descriptors=lambda: () if part is None else (part.descriptor,),
    )
    directory.verify_memory(0, entries)
    directory.verify_memory(1, names)
    directory.load_names()
    table = AttributeTable.empty(uuid, header.sample_count)
    if header.attributes_bytes:
        where = f"the attributes of {label}"
        table = AttributeTable.over(attributes, header.attributes_head_bytes, where=where)
        for name in table.dtypes:
            table.column(name)
    expected = uuid, header.sample_count, header.sample_count
    got = directory.dataset_uuid, len(directory), len(table)
    if got != expected:
        raise FormatError(f"read {label}: expected {expected}, got {got}")
    return directory, table


def _same(memory: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return memory
