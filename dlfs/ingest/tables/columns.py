"""Chooses the columns of Arrow tables, and makes blocks of their record batches.

``choose_columns`` finds the columns of the samples or of their fields, their paths and their
attributes. Bytes of samples without fields are not copied: the data of a block is the values buffer
of its record batch. The caller has validated the batch, so that its offsets lie in the buffer.
``tables.fields`` makes the values of fields.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from dlfs.errors import FormatError, UsageError
from dlfs.fields import FieldType
from dlfs.ingest.fields import Choices, FieldRecords, choose_fields, is_pattern
from dlfs.ingest.records import Record, gather, number_path, text_path
from dlfs.ingest.source import BLOCK_SAMPLES_MAX, SampleBlock
from dlfs.ingest.tables.values import (
    BYTES,
    SCALARS,
    TEXT,
    field_type,
    field_values,
    first_null,
    is_one_of,
    is_scalar,
    is_vector,
    spans,
)

EXPORT_MARK = b"dlfs:dataset"
"""Key of the schema metadata with the dataset's name, which ``dlfs export`` writes."""
EXPORT_PATH, EXPORT_BYTES = "path", "bytes"
"""Names of the columns of paths and bytes that ``dlfs export`` writes; others are attributes."""

NO_VALUE = "column that has not one value in a row"
"""Reason why a column is left out that is neither field nor attribute."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column, or a child of a struct: its name and the steps to it."""

    name: str
    steps: tuple[str, ...]
    type: Any

    def take(self, batch: Any) -> Any:
        """Return the column's array in a record batch."""
        compute = importlib.import_module("pyarrow.compute")
        array = batch.column(batch.schema.get_field_index(self.steps[0]))
        for step in self.steps[1:]:
            array = compute.struct_field(array, [array.type.get_field_index(step)])
        return array


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
    left_out: Mapping[str, int]
    """Number of columns that are left out, by reason."""

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

    def check(self, schema: Any, where: str) -> None:
        """Check that another file has these columns too.

        Raises:
            FormatError: the file lacks a column, or has it in another type.
        """
        for column in self.used:
            found = _look_up(schema, column.steps)
            if found is None or not found.equals(column.type):
                raise FormatError(
                    f"{where}: expected column {column.name} of {column.type} as in the first "
                    f"file, got {found or 'none'}"
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
        if self.sample is None:
            yield from gather(self._records(batch, row, prefix, where, maker), where=where)
            return
        for first in range(0, batch.num_rows, BLOCK_SAMPLES_MAX):
            part, here = batch.slice(first, BLOCK_SAMPLES_MAX), row + first
            yield SampleBlock(
                self._paths(part, here, prefix, where),
                *spans(_present(self.sample, part, here, where)),
                self._attribute_values(part, here, where),
            )

    def _records(
        self, batch: Any, row: int, prefix: bytes, where: str, maker: FieldRecords
    ) -> Iterator[Record]:
        paths = self._paths(batch, row, prefix, where)
        attributes = self._attribute_values(batch, row, where)
        fields = {
            column.name: self._field_values(column, batch, row, where) for column in self.fields
        }
        for i, path in enumerate(paths):
            yield maker.make(
                path,
                {name: values[i] for name, values in fields.items()},
                f"{where}: row {row + i}",
                {name: values[i] for name, values in attributes.items()},
            )

    def _paths(self, batch: Any, row: int, prefix: bytes, where: str) -> list[bytes]:
        if self.path is None:
            return [number_path(prefix, row + i) for i in range(batch.num_rows)]
        texts = _present(self.path, batch, row, where).to_pylist()
        return [
            text_path(
                text if isinstance(text, bytes) else str(text).encode(), f"{where}: row {row + i}"
            )
            for i, text in enumerate(texts)
        ]

    def _attribute_values(self, batch: Any, row: int, where: str) -> dict[str, npt.NDArray[Any]]:
        return {column.name: column_values(column, batch, row, where) for column in self.attributes}

    def _field_values(self, column: Column, batch: Any, row: int, where: str) -> Sequence[Any]:
        array, kind = column.take(batch), field_type(column.type)

        def locate(index: int) -> str:
            return f"{where}: row {row + index}: field {column.name!r}"

        if kind is not None:
            return field_values(array, kind, locate)
        try:  # values of any type, which are declared as text
            return [json.dumps(value, ensure_ascii=False) for value in array.to_pylist()]
        except (TypeError, ValueError) as error:
            raise FormatError(f"{locate(0)}: expected values that JSON has: {error}") from error


def _present(column: Column, batch: Any, row: int, where: str) -> Any:
    """Return a column's array; nulls in it are a FormatError."""
    array = column.take(batch)
    if array.null_count:
        raise FormatError(
            f"{where}: row {row + first_null(array)}: column {column.name}: expected a value, got "
            "null"
        )
    return array


def column_values(column: Column, batch: Any, row: int, where: str) -> npt.NDArray[Any]:
    """Return a column of a record batch as values of an attribute.

    Args:
        column: a column for which ``is_scalar`` or ``is_vector`` returns True.
        batch: batch of the file.
        row: number of the batch's first row in the file.
        where: name of the file, for errors.

    Returns:
        Numbers and bools unchanged, ``[n, k]`` for vectors; text, and anything else, as an
        ``object`` array of ``str``.

    Raises:
        FormatError: a value is null in a column that is not of floats.
    """
    types = importlib.import_module("pyarrow.types")
    if is_vector(column.type):
        flat = _present(column, batch, row, where).flatten()
        numbers: npt.NDArray[Any] = flat.to_numpy(zero_copy_only=False)
        return numbers.reshape(-1, column.type.list_size)
    floats = types.is_floating(column.type)
    array = column.take(batch) if floats else _present(column, batch, row, where)
    found: npt.NDArray[Any]
    if floats or types.is_integer(column.type) or types.is_boolean(column.type):
        found = array.to_numpy(zero_copy_only=False)
    else:
        found = np.empty(len(array), object)
        found[:] = array.cast("large_string").to_pylist()
    return found


def choose_columns(
    schema: Any,
    *,
    where: str,
    column: str | None,
    fields: Choices,
    attributes: Sequence[str] | None,
    path: str | None,
) -> Columns:
    """Choose the columns of samples, fields, paths and attributes in a file.

    Without ``column`` and ``fields``, the only column of bytes is the sample, else the only one of
    text. If there are several, they are the fields, along with all columns of lists.

    Args:
        schema: schema of the file.
        where: name of the file, for errors.
        column: column of the samples' bytes.
        fields: columns of the fields, and patterns of them.
        attributes: columns to store as attributes; None for all that are possible.
        path: column of the samples' paths; None for row numbers.

    Raises:
        UsageError: a column does not exist, does not fit, or has to be named.
    """
    if EXPORT_MARK in (schema.metadata or {}):
        column, path = column or (None if fields else EXPORT_BYTES), path or EXPORT_PATH
    if column is not None and fields:
        raise UsageError(f"{where}: expected a column or fields, got both")
    others = {path, *(attributes or ())}
    known = {} if column is not None or fields else _default_fields(schema, others)
    sample = None if known or fields else _sample_column(schema, where, column)
    found_path = None if path is None else _find(schema, where, path)
    if found_path is not None and not is_one_of(found_path.type, (*BYTES, *SCALARS)):
        raise UsageError(f"{where}: expected text in column {path}, got {found_path.type}")
    chosen = known or _chosen_fields(schema, where, fields, others)
    taken = {used.steps[0] for used in (sample, found_path, *chosen.values()) if used is not None}
    free = [
        Column(name, (name,), schema.field(name).type)
        for name in _names(schema)
        if name not in taken
    ]
    if attributes is None:
        exported = EXPORT_MARK in (schema.metadata or {})
        wanted = [
            other for other in free if is_scalar(other.type) or (exported and is_vector(other.type))
        ]
        left_out = {NO_VALUE: len(free) - len(wanted)} if len(free) > len(wanted) else {}
    else:
        wanted, left_out = [_find(schema, where, name) for name in attributes], {}
    for other in wanted:
        if not is_scalar(other.type) and not is_vector(other.type):
            raise UsageError(
                f"{where}: expected numbers, bools or text in column {other.name}, got {other.type}"
            )
    return Columns(
        sample=sample,
        fields=tuple(chosen.values()),
        declared=choose_fields(fields, list(chosen)),
        path=found_path,
        attributes=tuple(wanted),
        left_out=left_out,
    )


def _default_fields(schema: Any, others: Container[str | None]) -> dict[str, Column]:
    """Return the fields of a table without a choice; none if one column is the sample.

    Args:
        schema: schema of the file.
        others: names of columns that are chosen as paths or attributes.
    """
    candidates = _candidates(schema)
    found: dict[str, Column] = {}
    has_lists = False
    for name, column in _field_columns(schema).items():
        is_list = name not in candidates and not is_scalar(column.type)
        if name in others or not (is_list or name in candidates) or not field_type(column.type):
            continue
        has_lists |= is_list
        found[name] = column
    is_single = len(candidates) == 1 or (len(found) == 1 and not has_lists)
    return {} if is_single else found


def _chosen_fields(
    schema: Any, where: str, fields: Choices, others: Container[str | None]
) -> dict[str, Column]:
    """Return the columns that the caller chooses as fields; patterns take no other columns."""
    columns = _field_columns(schema)
    able = [
        name
        for name, column in columns.items()
        if name not in others and field_type(column.type) is not None
    ]
    found: dict[str, Column] = {}
    for name, declared in choose_fields(fields, able).items():
        if is_pattern(name) and name not in schema.names:
            raise UsageError(
                f"{where}: expected columns for fields {name}, got {', '.join(able) or 'none'}"
            )
        column = columns.get(name) or _find(schema, where, name)
        column = replace(_bytes_child(column) or column, name=name)
        if field_type(column.type) is None and declared != FieldType("text"):
            raise UsageError(
                f"{where}: expected bytes, text, numbers or lists of numbers in field {name}, got "
                f"{column.type}; {name}:text stores its values as JSON"
            )
        found[name] = column
    return found


def _field_columns(schema: Any) -> dict[str, Column]:
    """Return the columns that can be fields by name; those of structs are named ``a.b``."""
    types = importlib.import_module("pyarrow.types")
    found: dict[str, Column] = {}
    pending = [Column(name, (name,), schema.field(name).type) for name in _names(schema)]
    while pending:
        column = pending.pop(0)
        if (child := _bytes_child(column)) is not None:
            found[column.name] = replace(child, name=column.name)
        elif types.is_struct(column.type):
            children = [column.type.field(i) for i in range(column.type.num_fields)]
            pending = [
                Column(f"{column.name}.{child.name}", (*column.steps, child.name), child.type)
                for child in children
            ] + pending
        else:
            found[column.name] = column
    return found


def _sample_column(schema: Any, where: str, name: str | None) -> Column:
    if name is not None:
        found = _find(schema, where, name)
        inner = _bytes_child(found)
        if inner is None:
            raise UsageError(f"{where}: expected bytes or text in column {name}, got {found.type}")
        return inner
    candidates = list(_candidates(schema).values())
    if len(candidates) != 1:
        names = ", ".join(_names(schema)) or "no columns"
        raise UsageError(f"{where}: expected option column to name one of {names}")
    return candidates[0]


def _candidates(schema: Any) -> dict[str, Column]:
    """Return the columns of bytes, else those of text, by the names of the whole columns."""
    columns = [Column(name, (name,), schema.field(name).type) for name in _names(schema)]
    able = {column.name: child for column in columns if (child := _bytes_child(column)) is not None}
    texts = {name: column for name, column in able.items() if is_one_of(column.type, TEXT)}
    binary = {name: column for name, column in able.items() if name not in texts}
    return binary or texts


def _names(schema: Any) -> list[str]:
    """Return the names that stand for one column only."""
    return [name for name in schema.names if schema.get_field_index(name) >= 0]


def _find(schema: Any, where: str, name: str) -> Column:
    """Find a column by its name, or a child of a struct by names joined by dots."""
    for steps in ((name,), tuple(name.split("."))):
        found = _look_up(schema, steps)
        if found is not None:
            return Column(name, steps, found)
    raise UsageError(f"{where}: expected column {name}, got {', '.join(schema.names)}")


def _look_up(schema: Any, steps: Sequence[str]) -> Any:
    """Return the type of a column, or of a struct's child; None if it does not exist."""
    types = importlib.import_module("pyarrow.types")
    found = schema
    for step in steps:
        has_fields = found is schema or types.is_struct(found)
        at = found.get_field_index(step) if has_fields else -1
        if at < 0:
            return None
        found = found.field(at).type
    return found


def _bytes_child(column: Column) -> Column | None:
    """Return the column itself if it holds bytes or text, else its child ``bytes``, else None."""
    types = importlib.import_module("pyarrow.types")
    if is_one_of(column.type, BYTES):
        return column
    if types.is_struct(column.type) and (at := column.type.get_field_index("bytes")) >= 0:
        child = column.type.field(at).type
        if is_one_of(child, BYTES):
            return Column(f"{column.name}.bytes", (*column.steps, "bytes"), child)
    return None
