"""Chooses the columns of Arrow tables, and makes blocks of their record batches.

``choose_columns`` finds the columns of the samples, their paths and their attributes. Bytes are not
copied: the data of a block is the values buffer of its record batch. The caller has validated the
batch, so that its offsets lie in the buffer.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dlfs.errors import FormatError, UsageError
from dlfs.ingest.records import number_path, text_path
from dlfs.ingest.source import SampleBlock

EXPORT_MARK = b"dlfs:dataset"
"""Key of the schema metadata with the dataset's name, which ``dlfs export`` writes."""
EXPORT_PATH, EXPORT_BYTES = "path", "bytes"
"""Names of the columns of paths and bytes that ``dlfs export`` writes; others are attributes."""

_TEXT = ("is_string", "is_large_string", "is_string_view")
_BYTES = ("is_binary", "is_large_binary", "is_fixed_size_binary", "is_binary_view", *_TEXT)
_SCALARS = ("is_boolean", "is_integer", "is_floating", "is_temporal", "is_decimal", *_TEXT)
"""Checks of ``pyarrow.types`` for the types of text, of samples and of attributes."""


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


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of some files by their use."""

    sample: Column
    path: Column | None
    attributes: tuple[Column, ...]
    left_out: tuple[str, ...]

    @property
    def used(self) -> list[Column]:
        """The columns that are read."""
        return [self.sample, *self.attributes, *([self.path] if self.path else [])]

    @property
    def names(self) -> list[str]:
        """Names of the columns that are read."""
        return [".".join(column.steps) for column in self.used]

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

    def block(self, batch: Any, row: int, prefix: bytes, where: str) -> SampleBlock:
        """Make a block of a record batch.

        Args:
            batch: batch of a file that was checked.
            row: number of the batch's first row in the file.
            prefix: first component of paths that are row numbers.
            where: name of the file, for errors.

        Raises:
            FormatError: a value is null, or a path is invalid.
            LimitError: a path is too long.
        """
        data, offsets, lengths = _spans(_present(self.sample, batch, row, where))
        if self.path is None:
            paths = [number_path(prefix, row + i) for i in range(batch.num_rows)]
        else:
            texts = _present(self.path, batch, row, where).to_pylist()
            paths = [
                text_path(
                    text if isinstance(text, bytes) else str(text).encode(),
                    f"{where}: row {row + i}",
                )
                for i, text in enumerate(texts)
            ]
        values = {
            column.name: column_values(column, batch, row, where) for column in self.attributes
        }
        return SampleBlock(paths, data, offsets, lengths, values)


def _present(column: Column, batch: Any, row: int, where: str) -> Any:
    """Return a column's array; nulls in it are a FormatError."""
    array = column.take(batch)
    if array.null_count:
        first = int(array.is_null().to_numpy(zero_copy_only=False).argmax())
        raise FormatError(
            f"{where}: row {row + first}: column {column.name}: expected a value, got null"
        )
    return array


def column_values(column: Column, batch: Any, row: int, where: str) -> npt.NDArray[Any]:
    """Return a column of a record batch as values of an attribute.

    Args:
        column: a column for which ``is_scalar`` returns True.
        batch: batch of the file.
        row: number of the batch's first row in the file.
        where: name of the file, for errors.

    Returns:
        Numbers and bools unchanged; text, and anything else, as an ``object`` array of ``str``.

    Raises:
        FormatError: a value is null in a column that is not of floats.
    """
    types = importlib.import_module("pyarrow.types")
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
    attributes: Sequence[str] | None,
    path: str | None,
) -> Columns:
    """Choose the columns of samples, paths and attributes in a file.

    Args:
        schema: schema of the file.
        where: name of the file, for errors.
        column: column of the samples' bytes; None if only one is possible.
        attributes: columns to store as attributes; None for all that are possible.
        path: column of the samples' paths; None for row numbers.

    Raises:
        UsageError: a column does not exist, does not fit, or has to be named.
    """
    if EXPORT_MARK in (schema.metadata or {}):
        column, path = column or EXPORT_BYTES, path or EXPORT_PATH
    sample = _sample_column(schema, where, column)
    found_path = None if path is None else _find(schema, where, path)
    if (
        found_path is not None
        and not _is_one_of(found_path.type, _BYTES)
        and not is_scalar(found_path)
    ):
        raise UsageError(f"{where}: expected text in column {path}, got {found_path.type}")
    taken = {used.steps[0] for used in (sample, found_path) if used is not None}
    others = [Column(name, (name,), schema.field(name).type) for name in _names(schema)]
    others = [other for other in others if other.name not in taken]
    if attributes is None:
        chosen_by_type = [other for other in others if is_scalar(other)]
        left_out = tuple(other.name for other in others if other not in chosen_by_type)
        return Columns(sample, found_path, tuple(chosen_by_type), left_out)
    chosen = [_find(schema, where, name) for name in attributes]
    for other in chosen:
        if not is_scalar(other):
            raise UsageError(
                f"{where}: expected numbers, bools or text in column {other.name}, got {other.type}"
            )
    return Columns(sample, found_path, tuple(chosen), ())


def _sample_column(schema: Any, where: str, name: str | None) -> Column:
    if name is not None:
        found = _find(schema, where, name)
        inner = _bytes_child(found)
        if inner is None:
            raise UsageError(f"{where}: expected bytes or text in column {name}, got {found.type}")
        return inner
    columns = [Column(name, (name,), schema.field(name).type) for name in _names(schema)]
    able = [child for column in columns if (child := _bytes_child(column)) is not None]
    texts = [column for column in able if _is_one_of(column.type, _TEXT)]
    binary = [column for column in able if column not in texts]
    candidates = binary or texts
    if len(candidates) != 1:
        names = ", ".join(found.name for found in candidates or columns)
        raise UsageError(f"{where}: expected option column to name one of {names or 'no columns'}")
    return candidates[0]


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
    if _is_one_of(column.type, _BYTES):
        return column
    if types.is_struct(column.type) and (at := column.type.get_field_index("bytes")) >= 0:
        child = column.type.field(at).type
        if _is_one_of(child, _BYTES):
            return Column(f"{column.name}.bytes", (*column.steps, "bytes"), child)
    return None


def _is_one_of(kind: Any, checks: Sequence[str]) -> bool:
    types = importlib.import_module("pyarrow.types")
    return any(getattr(types, check)(kind) for check in checks)


def is_scalar(column: Column) -> bool:
    """Return True if a column can be an attribute."""
    types = importlib.import_module("pyarrow.types")
    kind = column.type.value_type if types.is_dictionary(column.type) else column.type
    return _is_one_of(kind, _SCALARS)


def _spans(
    array: Any,
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the values buffer of an array of bytes or text, and each value's offset and length."""
    types = importlib.import_module("pyarrow.types")
    if types.is_binary_view(array.type) or types.is_string_view(array.type):
        array = array.cast("large_binary")
    buffers = array.buffers()
    if types.is_fixed_size_binary(array.type):
        width = array.type.byte_width
        starts = (np.arange(len(array), dtype=np.int64) + array.offset) * width
        return _bytes(buffers[1]), starts, np.full(len(array), width, np.int64)
    large = types.is_large_binary(array.type) or types.is_large_string(array.type)
    if not len(array):
        return np.empty(0, np.uint8), np.empty(0, np.int64), np.empty(0, np.int64)
    kind = np.dtype(np.int64 if large else np.int32)
    first = array.offset * kind.itemsize
    offsets = np.frombuffer(buffers[1], kind, len(array) + 1, first).astype(np.int64)
    return _bytes(buffers[2]), offsets[:-1], np.diff(offsets)


def _bytes(buffer: Any) -> npt.NDArray[np.uint8]:
    return (
        np.frombuffer(buffer, np.uint8)
        if buffer is not None and buffer.size
        else np.empty(0, np.uint8)
    )
