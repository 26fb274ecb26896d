"""Joins the schemas of several files into one that has every column of each.

Types of one column are joined if a type holds the values of both: a column of nulls joins any,
dictionaries and run-end encoded columns join their values, text joins text, bytes join bytes,
integers and floats become the wider ones, and lists and structs join their children. Other types of
one column do not go together: that is an error, if the column is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from dlfs.ingest.tables.arrow import pyarrow
from dlfs.ingest.tables.plain import LISTS, is_one_of

_TEXT = ("is_string", "is_large_string", "is_string_view")
_BINARY = ("is_binary", "is_large_binary", "is_fixed_size_binary", "is_binary_view")
_NUMBERS = ("is_integer", "is_floating")
_ENCODED = ("is_dictionary", "is_run_end_encoded")


@dataclass(frozen=True, slots=True)
class FileSchema:
    """A schema, and the first file that has it."""

    file: str
    schema: Any


@dataclass(frozen=True, slots=True)
class JoinedSchema:
    """The joined schema of some files, and what of it they disagree about."""

    schema: Any
    files: tuple[FileSchema, ...]
    conflicts: dict[str, str]
    """Error for each column whose types do not go together, by name."""


def join_schemas(files: Sequence[FileSchema], *, joins_numbers: bool = False) -> JoinedSchema:
    """Join the schemas of some files, at least one; a name that a schema has twice stays so.

    Args:
        files: the files.
        joins_numbers: integers and floats of one column become floats.
    """
    first = files[0].schema
    fields = {field.name: field for field in first}
    first_file = dict.fromkeys(fields, files[0].file)
    conflicts: dict[str, str] = {}
    doubled = [field for field in first if first.get_field_index(field.name) < 0]
    for other in files[1:]:
        for field in other.schema:
            name = field.name
            if other.schema.get_field_index(name) < 0:
                doubled += [field, field]
                continue
            known = fields.setdefault(name, field)
            joined = join_types(known.type, field.type, joins_numbers=joins_numbers)
            if joined is None:
                conflicts.setdefault(
                    name,
                    f"import {other.file}: column {name}: expected {known.type} as in "
                    f"{first_file[name]}, got {field.type}",
                )
            elif not joined.equals(known.type):
                fields[name], first_file[name] = known.with_type(joined), other.file
            else:
                first_file.setdefault(name, other.file)
    names = {field.name for field in doubled}
    single = [field for name, field in fields.items() if name not in names]
    return JoinedSchema(
        pyarrow.schema([*single, *doubled], metadata=first.metadata), tuple(files), conflicts
    )


def join_types(one: Any, other: Any, *, joins_numbers: bool = False) -> Any:
    """Return a type that holds the values of two types; None if there is none.

    Args:
        one: a type.
        other: another one.
        joins_numbers: take ``float64`` for integers and floats, which not every integer equals.
    """
    join = partial(join_types, joins_numbers=joins_numbers)
    if one.equals(other) or is_one_of(other, ("is_null",)):
        return one
    if is_one_of(one, ("is_null",)):
        return other
    if is_one_of(one, _ENCODED) or is_one_of(other, _ENCODED):
        return join(
            *(kind.value_type if is_one_of(kind, _ENCODED) else kind for kind in (one, other))
        )
    for family, wide in ((_TEXT, pyarrow.large_string()), (_BINARY, pyarrow.large_binary())):
        if is_one_of(one, family) and is_one_of(other, family):
            return wide
    if is_one_of(one, ("is_integer",)) and is_one_of(other, ("is_integer",)):
        return _join_integers(one, other)
    if is_one_of(one, ("is_floating",)) and is_one_of(other, ("is_floating",)):
        return max(one, other, key=lambda kind: kind.bit_width)
    if joins_numbers and all(is_one_of(kind, _NUMBERS) for kind in (one, other)):
        return pyarrow.float64()
    if is_one_of(one, LISTS) and is_one_of(other, LISTS):
        return _join_lists(one, other, join)
    if is_one_of(one, ("is_struct",)) and is_one_of(other, ("is_struct",)):
        return _join_structs(one, other, join)
    return None


def _join_integers(one: Any, other: Any) -> Any:
    signed = [kind for kind in (one, other) if is_one_of(kind, ("is_signed_integer",))]
    wider = max(one, other, key=lambda kind: kind.bit_width)
    if len(signed) != 1:
        return wider
    unsigned = one if signed[0] is other else other
    bits = max(signed[0].bit_width, 2 * unsigned.bit_width)
    return getattr(pyarrow, f"int{bits}")() if bits <= 64 else None


def _join_lists(one: Any, other: Any, join: Callable[[Any, Any], Any]) -> Any:
    values = join(one.value_type, other.value_type)
    if values is None:
        return None
    fixed = is_one_of(one, ("is_fixed_size_list",)) and is_one_of(other, ("is_fixed_size_list",))
    if fixed and one.list_size == other.list_size:
        return pyarrow.list_(values, one.list_size)
    return pyarrow.large_list(values)


def _join_structs(one: Any, other: Any, join: Callable[[Any, Any], Any]) -> Any:
    children = {field.name: field for field in one}
    for field in other:
        known = children.setdefault(field.name, field)
        joined = join(known.type, field.type)
        if joined is None:
            return None
        children[field.name] = known.with_type(joined)
    if len(children) < max(one.num_fields, other.num_fields):
        return None  # children of equal names
    return pyarrow.struct(list(children.values()))
