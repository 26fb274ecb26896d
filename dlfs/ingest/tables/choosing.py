"""Chooses the columns of Arrow tables that are samples, fields, paths and attributes.

``choose_columns`` works on the joined schema of all files. Columns of equal names cannot be told
apart, so that they are an error unless the caller chooses others. Columns that are left out are
counted with their names.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from dlfs.errors import FormatError, UsageError
from dlfs.fields import FieldType
from dlfs.ingest.fields import Choices, ColumnOptions, choose_fields, is_pattern, only_sample
from dlfs.ingest.source import check_attribute_names, left_out_names
from dlfs.ingest.tables.arrow import types
from dlfs.ingest.tables.columns import Column, Columns, look_up
from dlfs.ingest.tables.plain import (
    NullsOption,
    field_type,
    is_bytes,
    is_scalar,
    is_text,
    is_vector,
)

EXPORT_MARK = b"dlfs:dataset"
"""Key of the schema metadata with the dataset's name, which ``dlfs export`` writes."""
EXPORT_PATH, EXPORT_BYTES = "path", "bytes"
"""Names of the columns of paths and bytes that ``dlfs export`` writes; others are attributes."""


@dataclass(frozen=True, slots=True)
class TableOptions(ColumnOptions):
    """Options of Arrow tables."""

    nulls: NullsOption = "error"


def choose_columns(schema: Any, options: TableOptions, fields: Choices, where: str) -> Columns:
    """Choose the columns of samples, fields, paths and attributes in a file.

    Without ``column`` and ``fields``, the only column of bytes is the sample, else the only one of
    text. If there are several, they are the fields, along with all columns of lists.

    Args:
        schema: schema of the file.
        options: the columns that the caller names; for others, see ``ColumnOptions``.
        fields: columns of the fields, and patterns of them: ``options.fields``, parsed.
        where: name of the file, for errors.

    Raises:
        UsageError: a column does not exist, does not fit, or has to be named.
        FormatError: columns that could be chosen have equal names.
    """
    column, path, attributes = options.column, options.path, options.attributes
    exported = EXPORT_MARK in (schema.metadata or {})
    if exported:
        column, path = column or (None if fields else EXPORT_BYTES), path or EXPORT_PATH
    if column is not None and fields:
        raise UsageError(f"{where}: expected a column or fields, got both")
    if attributes is None or not (column or fields) or any(map(is_pattern, fields)):
        _check_names(schema, where)
    others = {path, *(attributes or ())}
    known = {} if column is not None or fields else _default_fields(schema, others)
    sample = None if known or fields else _sample_column(schema, where, column)
    found_path = None if path is None else _find(schema, where, path)
    if found_path is not None and not (is_bytes(found_path.type) or is_scalar(found_path.type)):
        raise UsageError(f"{where}: expected text in column {path}, got {found_path.type}")
    chosen = known or _chosen_fields(schema, where, fields, others)
    taken = {used.steps[0] for used in (sample, found_path, *chosen.values()) if used is not None}
    free = [column for column in _columns(schema) if column.name not in taken]
    if attributes is None:
        wanted = [
            other for other in free if is_scalar(other.type) or (exported and is_vector(other.type))
        ]
    else:
        wanted = [_find(schema, where, name) for name in attributes]
    if not exported:  # an exported table has the columns that describe its samples
        check_attribute_names([other.name for other in wanted], where)
    for other in wanted:
        if not is_scalar(other.type) and not is_vector(other.type):
            raise UsageError(
                f"{where}: expected numbers, bools or text in column {other.name}, got {other.type}"
            )
    used = [*filter(None, (sample, found_path)), *chosen.values(), *wanted]
    return Columns(
        sample=sample,
        fields=tuple(chosen.values()),
        declared=choose_fields(fields, list(chosen)),
        path=found_path,
        attributes=tuple(wanted),
        nulls=options.nulls,
        left_out=left_out_names("column", _unused(schema, used)),
    )


def _check_names(schema: Any, where: str) -> None:
    """Raise FormatError if columns have equal names."""
    for name in dict.fromkeys(schema.names):
        found = [str(schema.field(at).type) for at in schema.get_all_field_indices(name)]
        if len(found) > 1:
            raise _doubled(name, found, where)


def _doubled(name: str, types: Sequence[str], where: str) -> FormatError:
    return FormatError(
        f"{where}: column {name}: expected one column of this name, got {len(types)}, of "
        f"{' and of '.join(types)}; to leave them out, choose columns by column or fields, and by "
        "attributes"
    )


def _unused(schema: Any, used: Sequence[Column]) -> list[str]:
    """Return the names of the columns that are not used; those of structs are named ``a.b``."""
    leaves = [
        *(leaf.steps for column in _columns(schema) for leaf in _leaves(column, are_fields=False)),
        *((name,) for name in schema.names if schema.get_field_index(name) < 0),
    ]
    steps = {column.steps for column in used}
    return [
        ".".join(leaf)
        for leaf in leaves
        if not any(leaf[:length] in steps for length in range(1, len(leaf) + 1))
    ]


def _leaves(column: Column, *, are_fields: bool) -> Iterator[Column]:
    """Yield a column that is no struct, or the children of one that is.

    Args:
        column: the column.
        are_fields: take a struct with bytes as a column of these.
    """
    inner = _bytes_child(column) if are_fields else None
    names = [field.name for field in column.type] if types.is_struct(column.type) else []
    if inner is not None:
        yield replace(inner, name=column.name)
    elif not names or len(set(names)) < len(names):
        yield column
    else:
        for field in column.type:
            child = Column(f"{column.name}.{field.name}", (*column.steps, field.name), field.type)
            yield from _leaves(child, are_fields=are_fields)


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
        is_text_field = declared == FieldType("text")
        if field_type(column.type) is None and not is_text_field:
            raise UsageError(
                f"{where}: expected bytes, text, numbers or lists of numbers in field {name}, got "
                f"{column.type}; {name}:text stores its values as JSON"
            )
        found[name] = replace(column, is_json=is_text_field and not is_bytes(column.type))
    return found


def _field_columns(schema: Any) -> dict[str, Column]:
    """Return the columns that can be fields by name; those of structs are named ``a.b``."""
    leaves = (_leaves(column, are_fields=True) for column in _columns(schema))
    return {leaf.name: leaf for leaf in chain.from_iterable(leaves)}


def _sample_column(schema: Any, where: str, name: str | None) -> Column:
    if name is not None:
        found = _find(schema, where, name)
        inner = _bytes_child(found)
        if inner is None:
            raise UsageError(f"{where}: expected bytes or text in column {name}, got {found.type}")
        return inner
    candidates = _candidates(schema)
    names = [column.name for column in _columns(schema)]
    return candidates[only_sample(list(candidates), names, where)]


def _candidates(schema: Any) -> dict[str, Column]:
    """Return the columns of bytes, else those of text, by the names of the whole columns."""
    able = {
        column.name: child
        for column in _columns(schema)
        if (child := _bytes_child(column)) is not None
    }
    texts = {name: column for name, column in able.items() if is_text(column.type)}
    binary = {name: column for name, column in able.items() if name not in texts}
    return binary or texts


def _columns(schema: Any) -> list[Column]:
    """Return the columns whose names stand for one only."""
    names = [name for name in schema.names if schema.get_field_index(name) >= 0]
    return [Column(name, (name,), schema.field(name).type) for name in names]


def _find(schema: Any, where: str, name: str) -> Column:
    """Find a column by its name, or a child of a struct by names joined by dots."""
    for steps in ((name,), tuple(name.split("."))):
        found = look_up(schema, steps)
        if found is not None:
            return Column(name, steps, found)
    doubled = [str(schema.field(at).type) for at in schema.get_all_field_indices(name)]
    if doubled:
        raise _doubled(name, doubled, where)
    raise UsageError(f"{where}: expected column {name}, got {', '.join(schema.names)}")


def _bytes_child(column: Column) -> Column | None:
    """Return the column itself if it holds bytes or text, else its child ``bytes``, else None."""
    if is_bytes(column.type):
        return column
    if types.is_struct(column.type) and (at := column.type.get_field_index("bytes")) >= 0:
        child = column.type.field(at).type
        if is_bytes(child):
            return Column(f"{column.name}.bytes", (*column.steps, "bytes"), child)
    return None
