"""Makes blocks of samples of the record batches of Arrow tables.

``tables.choosing`` finds the ``Columns`` of the samples or of their fields, their paths and their
attributes in the joined schema of all files (``tables.schemas``). Of each batch, ``tables.plain``
makes arrays of few types, finds nulls, and makes the values of fields. Bytes of samples without
fields are not copied: the data of a block is the values buffer of its record batch. The caller has
validated the batch, so that its offsets lie in the buffer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dlfs.errors import FormatError
from dlfs.fields import FieldType
from dlfs.ingest.fields import Choices, FieldRecords
from dlfs.ingest.records import Records, gather, number_path, text_path
from dlfs.ingest.source import BLOCK_SAMPLES_MAX, Array, Int64Array, SampleBlock
from dlfs.ingest.tables.arrow import compute, pyarrow, types
from dlfs.ingest.tables.plain import (
    NUMBERS,
    ROW_WITH_NULL,
    Locate,
    Nulls,
    field_type,
    field_values,
    is_one_of,
    is_vector,
    json_texts,
    plain_array,
    plain_type,
    rows_with_null,
    spans,
    texts,
    without_nulls,
)
from dlfs.ingest.tables.schemas import JoinedSchema
from dlfs.ingest.tables.times import ValueProblem


@dataclass(frozen=True, slots=True)
class Column:
    """A column, or a child of a struct: its name and the steps to it."""

    name: str
    steps: tuple[str, ...]
    type: Any
    is_json: bool = False
    """True for a field whose values are taken as JSON."""

    def take(self, batch: Any, locate: Locate) -> Any:
        """Return the column's array in a record batch, in its plain type; nulls if it lacks it.

        Raises:
            FormatError: a value has no plain form, or Arrow cannot convert it.
        """
        wanted = plain_type(self.type)
        if look_up(batch.schema, self.steps) is None:
            return pyarrow.nulls(batch.num_rows, wanted)
        array = batch.column(batch.schema.get_field_index(self.steps[0]))
        try:
            for step in self.steps[1:]:
                array = compute.struct_field(array, [array.type.get_field_index(step)])
            plain = plain_array(array)
            return plain if plain.type.equals(wanted) else plain.cast(wanted)
        except ValueProblem as error:
            raise FormatError(f"{locate(error.index)}: {error}") from error
        except FormatError as error:
            raise FormatError(f"{locate(0)}: {error}") from error
        except pyarrow.ArrowException as error:
            text = " ".join(str(error).split())
            raise FormatError(f"{locate(0)}: expected {self.type}: {text}") from error


@dataclass(frozen=True, slots=True)
class _Part:
    """The arrays of some rows of a file, by the name of the column.

    Attributes:
        where: name of the file, for errors.
        rows: ``int64[n]``, number of each row in the file.
    """

    where: str
    rows: Int64Array
    arrays: Mapping[Column, Any]

    def locate(self, column: Column) -> Locate:
        """Return the function that names a value of a column."""
        return lambda index: f"{self.where}: row {self.rows[index]}: column {column.name}"

    def take(self, chosen: Int64Array) -> _Part:
        """Return some of the rows."""
        indices = pyarrow.array(chosen)
        arrays = {column: array.take(indices) for column, array in self.arrays.items()}
        return replace(self, rows=self.rows[chosen], arrays=arrays)

    def slice(self, first: int, count: int) -> _Part:
        """Return consecutive rows, without a copy."""
        arrays = {column: array.slice(first, count) for column, array in self.arrays.items()}
        return replace(self, rows=self.rows[first : first + count], arrays=arrays)


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The columns of some files by their use."""

    sample: Column | None
    """Column of the samples' bytes; None if they have fields."""
    fields: tuple[Column, ...] = ()
    declared: Choices = dataclasses.field(default_factory=dict)
    """Type of each field that the caller declares, by name."""
    path: Column | None
    attributes: tuple[Column, ...]
    nulls: Nulls = "error"
    left_out: dict[str, int]
    """Number of columns and rows that are left out, by reason; rows as they are read."""

    @property
    def used(self) -> list[Column]:
        """The columns that are read."""
        used = [self.sample, *self.fields, *self.attributes, self.path]
        return [column for column in used if column is not None]

    @property
    def names(self) -> list[str]:
        """Names of the columns that are read."""
        return list(dict.fromkeys(".".join(column.steps) for column in self.used))

    @property
    def known_types(self) -> dict[str, FieldType]:
        """Type of each field that has one by its column's type."""
        types = {column.name: field_type(column.type) for column in self.fields}
        return {name: kind for name, kind in types.items() if kind is not None}

    def check(self, joined: JoinedSchema) -> None:
        """Check that files go together in the columns that are used.

        Raises:
            FormatError: two files have a column in types that do not go together, or a file lacks a
                column and nulls are errors.
        """
        for column in self.used:
            if column.steps[0] in joined.conflicts:
                raise FormatError(joined.conflicts[column.steps[0]])
            has = {file.file: look_up(file.schema, column.steps) for file in joined.files}
            lacking = [file for file, kind in has.items() if kind is None]
            if lacking and (self.nulls == "error" or column is self.path):
                other = next(file for file, kind in has.items() if kind is not None)
                raise FormatError(
                    f"import {lacking[0]}: expected column {column.name} of {has[other]} as in "
                    f"{other}, got none; the options attributes, fields and column choose columns, "
                    "nulls=default or nulls=skip say what a missing value is"
                )

    def blocks(
        self, batch: Any, row: int, prefix: bytes, where: str, maker: FieldRecords
    ) -> Iterator[SampleBlock]:
        """Make blocks of a record batch.

        Args:
            batch: batch of a file that was checked.
            row: number of the batch's first row in the file.
            prefix: first component of paths that are row numbers.
            where: name of the file, for errors.
            maker: makes the records of samples with fields.

        Raises:
            FormatError: a value is null or not of the type of its field, or a path is invalid.
            LimitError: a path is too long.
        """
        part = self._part(batch, row, where)
        if self.sample is None:
            yield from gather(self._records(part, prefix, maker), where=where)
            return
        for first in range(0, len(part.rows), BLOCK_SAMPLES_MAX):
            some = part.slice(first, BLOCK_SAMPLES_MAX)
            yield SampleBlock(
                self._paths(some, prefix),
                *spans(some.arrays[self.sample]),
                self._attribute_values(some),
            )

    def _part(self, batch: Any, row: int, where: str) -> _Part:
        """Return the arrays of a batch, without the nulls that are none."""
        rows = np.arange(row, row + batch.num_rows)
        named = _Part(where, rows, {})
        arrays = {column: column.take(batch, named.locate(column)) for column in self.used}
        return self._without_nulls(_Part(where, rows, arrays))

    def _without_nulls(self, part: _Part) -> _Part:
        arrays = dict(part.arrays)
        keep = np.ones(len(part.rows), np.bool_)
        for column, array in part.arrays.items():
            nulls = rows_with_null(array)
            if column.is_json or not nulls.any():
                continue
            if self.nulls == "skip":
                keep &= ~nulls
            elif self.nulls == "default" and column is not self.path:
                arrays[column] = without_nulls(array)
            else:
                raise FormatError(
                    f"{part.locate(column)(int(nulls.argmax()))}: expected a value of "
                    f"{column.type}, got null; nulls=default takes "
                    "0, False or empty ones for nulls, nulls=skip leaves their rows out"
                )
        part = replace(part, arrays=arrays)
        if keep.all():
            return part
        self.left_out[ROW_WITH_NULL] = self.left_out.get(ROW_WITH_NULL, 0) + int((~keep).sum())
        return part.take(np.flatnonzero(keep))

    def _records(self, part: _Part, prefix: bytes, maker: FieldRecords) -> Records:
        paths = self._paths(part, prefix)
        attributes = self._attribute_values(part)
        fields = {column.name: self._field_values(column, part) for column in self.fields}
        for i, path in enumerate(paths):
            yield maker.make(
                path,
                {name: values[i] for name, values in fields.items()},
                f"{part.where}: row {part.rows[i]}",
                {name: values[i] for name, values in attributes.items()},
            )

    def _paths(self, part: _Part, prefix: bytes) -> list[bytes]:
        rows = part.rows.tolist()
        if self.path is None:
            return [number_path(prefix, row) for row in rows]
        values = part.arrays[self.path].to_pylist()
        return [
            text_path(
                text if isinstance(text, bytes) else str(text).encode(), f"{part.where}: row {row}"
            )
            for row, text in zip(rows, values, strict=True)
        ]

    def _attribute_values(self, part: _Part) -> dict[str, Array]:
        return {
            column.name: attribute_values(part.arrays[column], part.locate(column))
            for column in self.attributes
        }

    def _field_values(self, column: Column, part: _Part) -> Sequence[Any]:
        array, kind = part.arrays[column], field_type(column.type)

        def locate(index: int) -> str:
            return f"{part.where}: row {part.rows[index]}: field {column.name!r}"

        if not column.is_json:
            assert kind is not None  # choose_columns checks it
            return field_values(array, kind, locate)
        if kind == FieldType("text"):  # times and decimals
            return ["null" if text is None else text for text in texts(array, locate)]
        return json_texts(array, locate)


def attribute_values(array: Any, locate: Locate) -> Array:
    """Return a plain array without nulls as values of an attribute.

    Args:
        array: array of a type for which ``is_scalar`` or ``is_vector`` returns True.
        locate: returns the place of a value, for errors.

    Returns:
        Numbers and bools unchanged, ``[n, k]`` for vectors; text as an ``object`` array of ``str``.

    Raises:
        FormatError: text is not UTF-8.
    """
    if is_vector(array.type):
        numbers: Array = array.flatten().to_numpy(zero_copy_only=False)
        return numbers.reshape(-1, array.type.list_size)
    if not is_one_of(array.type, NUMBERS):
        return np.array(texts(array, locate), object)
    found: Array = array.to_numpy(zero_copy_only=False)
    return found


def column_values(column: Column, batch: Any, row: int, where: str) -> Array:
    """Return a column of a record batch as values of an attribute; see ``attribute_values``.

    Args:
        column: a column for which ``is_scalar`` or ``is_vector`` returns True.
        batch: batch of the file.
        row: number of the batch's first row in the file.
        where: name of the file, for errors.

    Raises:
        FormatError: a value is null in a column that is not of floats, or text is not UTF-8.
    """
    columns = Columns(sample=None, path=None, attributes=(column,), left_out={})
    return columns._attribute_values(columns._part(batch, row, where))[column.name]


def look_up(schema: Any, steps: Sequence[str]) -> Any:
    """Return the type of a column, or of a struct's child; None if there is not just one."""
    found = schema
    for step in steps:
        has_fields = found is schema or types.is_struct(found)
        at = found.get_field_index(step) if has_fields else -1
        if at < 0:
            return None
        found = found.field(at).type
    return found
