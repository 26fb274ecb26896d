"""The steps of an unfinished import: what its journal says of the samples so far.

``load_steps`` reads what the next step needs, in time that depends on the number of steps alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlfs.attributes import AttributeTable
from dlfs.directory import FrozenDirectory
from dlfs.errors import FormatError
from dlfs.fields import FieldEncoder, find_fields
from dlfs.format.catalog import DatasetRecord
from dlfs.format.journal import Cursor
from dlfs.format.paths import display
from dlfs.store.chunk_reader import copy_orders
from dlfs.store.journal import Step, read_step, read_steps
from dlfs.store.transaction import Generation


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

    def with_record(self, record: DatasetRecord) -> UnfinishedSteps:
        """Return the same steps with the record of another generation."""
        return replace(self, record=record)

    @property
    def source_count(self) -> int:
        """Number of the source's samples that the steps have used."""
        return self.steps[-1].header.source_count

    @property
    def cursor(self) -> Cursor | None:
        """The last cursor that the source gave for these samples."""
        return self.steps[-1].header.cursor

    @property
    def window_count(self) -> int:
        """Number of windows of a shuffle that the steps have used."""
        return self.steps[-1].header.window_count

    @property
    def attributes_bytes(self) -> int:
        """Sum of the lengths of the attribute segments."""
        return sum(step.header.attributes_bytes for step in self.steps)

    @property
    def path_bytes(self) -> int:
        """Sum of the lengths of all paths."""
        return sum(step.header.path_bytes for step in self.steps)


def load_steps(base: Generation, record: DatasetRecord) -> UnfinishedSteps:
    """Read what the next step of an import needs.

    Raises:
        FormatError: the journal is malformed; the message names where.
        DeviceError: a read failed.
    """
    steps = read_steps(base, record)
    directory, table = load_step(base, record, steps[-1])
    directory.close()
    return UnfinishedSteps.of(record, steps, table)


def load_step(
    base: Generation, record: DatasetRecord, step: Step
) -> tuple[FrozenDirectory, AttributeTable]:
    """Read the directory and the attributes of a step, from the first copies that are right."""
    header = step.header
    label = f"step {header.number} of the unfinished import of {display(record.name)!r}"
    problem: FormatError | None = None
    for choice in copy_orders(base.geometry):
        entries, names, attributes = read_step(base, record, step, choice)
        try:
            directory = FrozenDirectory(entries, partial(_same, names), label=label)
            directory.load_names()
            directory.verify_memory(0, entries)
            directory.verify_memory(1, names)
            if not header.attributes_bytes:
                table = AttributeTable.empty(record.uuid, header.sample_count)
            else:
                table = AttributeTable.over(
                    attributes, header.attributes_head_bytes, where=f"the attributes of {label}"
                )
                for name in table.dtypes:
                    table.column(name)
            expected = record.uuid, header.sample_count, header.sample_count
            got = directory.dataset_uuid, len(directory), len(table)
            if got != expected:
                raise FormatError(f"read {label}: expected {expected}, got {got}")
        except FormatError as error:
            problem = problem or error
        else:
            return directory, table
    assert problem is not None
    raise problem


def _same(memory: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return memory
