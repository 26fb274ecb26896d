"""Plans an import of arrays before anything is written: what to read from which file.

``Plan`` looks at each file once and makes units of the selected arrays. A unit is an array whose
rows are samples, or an array or a group that is one sample, with the arrays of its attributes. If
samples have fields, a unit is a group with the array of each field. If all selected arrays are
members of compound types, these members are the fields. Arrays that do not fit together are an
error here, before the first sample is read.

The option ``fields`` lists arrays, or patterns of their names in a group. An array is found from
its group, as those of attributes are: ``NAME=ARRAY`` names the field, and ``/ARRAY`` starts at the
top of the file. Each group that has such arrays gives samples with these fields. With ``samples``
of ``rows``, a sample is a row of each array; with ``groups`` it is the whole arrays of a group.

A row or an array of numbers is an array of its type, and a vector of any length ``<f4[?]``. A
string is text, or bytes if it has no encoding (numpy's ``S``). A dimension that differs between
files or groups varies.
"""

from __future__ import annotations

import math
import os
import posixpath
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

from dlfs.errors import FormatError, UsageError
from dlfs.fields import FieldType
from dlfs.fields.arrays import is_element
from dlfs.fields.types import KINDS
from dlfs.ingest.arrays.file import (
    ArrayFile,
    ArrayInfo,
    ArrayOptions,
    Missing,
    describe,
    describe_missing,
    parse_references,
)
from dlfs.ingest.bad_records import BadRecords
from dlfs.ingest.fields import is_pattern
from dlfs.ingest.source import clean_path, file_state, show

ROW_DIGITS_MIN = 8

_NO_ROWS = "array without rows"
_NO_BYTES = "array of values without bytes"
_NO_FIELD = "array that is no field"
_NO_TYPE = "type and shape of {}, which samples do not record"
_PACKED = "packing of {}, whose samples have the numbers as stored"
_FILLED = "missing {}, taken as the fill value"
_SHOWN_MAX = 10


@dataclass(frozen=True, slots=True)
class Unit:
    """One or more samples of one file: the rows of an array, a whole array, or a group."""

    file: int
    path: bytes
    """Path of the sample, or of the folder that has the rows."""
    members: tuple[ArrayInfo, ...]
    rows: bool
    """True if each row is a sample."""
    attributes: Mapping[str, ArrayInfo]
    fields: tuple[str, ...] = ()
    """Names of the fields that the members are; empty if samples have no fields."""

    @property
    def count(self) -> int:
        """Number of samples in the unit."""
        return self.members[0].count if self.rows else 1


class Plan:
    """The units to read from all files; the caller adds file by file.

    Args:
        paths: paths of the files.
        options: options of the format.
        bad: bad records, to which arrays that cannot be read are added; by default they are errors.

    Raises:
        UsageError: two files have the same name, or an attribute is malformed.
    """

    def __init__(
        self, paths: Sequence[str], options: ArrayOptions, bad: BadRecords | None = None
    ) -> None:
        self._paths = paths
        self._bad = bad or BadRecords()
        self._select = [pattern.strip("/") for pattern in options.select]
        self._samples = options.samples
        self._fills = options.missing == "fill"
        self._filled: dict[int, Missing] = {}
        self._references = parse_references(options.attributes, "attribute")
        self._fields = FieldArrays.parse(options.fields, rows=options.samples == "rows")
        self.field_types: dict[str, FieldType] = {}
        self._units: list[Unit] = []
        self._seen: list[ArrayInfo] = []
        names = [Path(path).name for path in paths]  # without suffix: run7 for data/run7.h5
        self._stems = [os.fsencode(name.rpartition(".")[0] or name) for name in names]
        for stem, count in Counter(self._stems).items():
            if count > 1:
                raise UsageError(
                    "import: expected names of files that differ, as paths begin with them; "
                    f"got {os.fsdecode(stem)!r} {count} times"
                )
        self.states: list[tuple[int, int]] = []
        self.skipped: Counter[str] = Counter()
        self._packings = 0

    def add(self, index: int, file: ArrayFile) -> None:
        """Add the selected arrays of a file.

        Raises:
            UsageError: the array of an attribute or a field does not exist, or does not fit.
            FormatError: a name cannot be part of a path, or a field has another type than in the
                files before.
        """
        self.states.append(file_state(self._paths[index]))
        self.skipped.update(file.skipped)
        self._seen.extend(list(file.arrays.values())[: _SHOWN_MAX - len(self._seen)])
        if not self._fields and self._has_only_members(file, self._paths[index]):
            self._fields = FieldArrays({}, ("*",), rows=True)
        if self._fields:
            self._add_fields(index, file)
            return
        units: dict[str, list[ArrayInfo]] = {}
        for array in self._wanted(file, self._paths[index]):
            name = posixpath.dirname(array.name) if self._samples == "groups" else array.name
            units.setdefault(name, []).append(array)
        for name, members in units.items():
            group = posixpath.dirname(members[0].name)
            self._units.append(self._unit(index, file, name, group, members))

    def add_lost(self) -> None:
        """Count a file that cannot be opened, so that the next one has its own number."""
        self.states.append((0, 0))

    def _has_only_members(self, file: ArrayFile, path: str) -> bool:
        """Return True if samples are the rows of compound types, whose members are fields."""
        if self._samples != "rows" or self._units or not file.members:
            return False
        able = [array for array in self._selected(file, path) if array.shape]
        return bool(able) and all(file.members_of(array.name) for array in able)

    def _add_fields(self, index: int, file: ArrayFile) -> None:
        """Add the groups of a file that have the arrays of the fields."""
        path = self._paths[index]
        groups: dict[str, list[ArrayInfo]] = {} if self._select else {"": []}
        for array in self._selected(file, path):
            members = file.members_of(array.name) if self._samples == "rows" else []
            group = array.name if members else posixpath.dirname(array.name)
            groups.setdefault(group, []).extend(members or [array])
        used: set[str] = set()
        where = f"import {path}"
        stem = self._stems[index].decode("utf-8", "backslashreplace")
        for group, able in groups.items():
            found: Members = self._fields.find(file, group, able, where, stem)
            if not found:
                continue
            types = {name: self._fields.type_of(array) for name, array in found.items()}
            self.field_types = merge_types(self.field_types, types, f"{where}: {group or '/'}")
            unit = self._unit(index, file, group, group, [*found.values()])
            self._units.append(replace(unit, fields=tuple(self.field_types)))
            used.update(array.name for array in found.values())
        left_out = {array.name for able in groups.values() for array in able} - used
        self.skipped.update({_NO_FIELD: len(left_out)} if left_out else {})

    def finish(self) -> tuple[list[Unit], dict[str, np.dtype[Any]]]:
        """Return the units in the order of their samples' paths, and the type of each attribute.

        Raises:
            UsageError: no array was selected, an attribute is text in one file and a number in
                another, or two samples have one path.
        """
        if not self._units:
            raise UsageError(self._nothing())
        self._check_paths()
        self._units.sort(key=lambda unit: unit.path + b"/" if unit.rows else unit.path)
        types: dict[str, np.dtype[Any]] = {}
        for name in self._references:
            types[name] = _common_type(name, [unit.attributes[name] for unit in self._units])
        return self._units, types

    def _check_paths(self) -> None:
        """Check that no path is that of two samples, or of a sample and a folder."""
        known: dict[bytes, Unit] = {}
        for unit in self._units:
            if unit.path in known:
                raise self._clash(unit, known[unit.path], "has this path too")
            known[unit.path] = unit
        for unit in self._units:
            parts = unit.path.split(b"/")
            for end in range(1, len(parts)):
                other = known.get(b"/".join(parts[:end]))
                if other is None:
                    continue
                if not other.rows:
                    raise self._clash(unit, other, "is a sample and cannot have samples below it")
                is_row = len(parts[end]) == row_digits(other.count) and parts[end].isdigit()
                if is_row and int(parts[end]) < other.count:
                    raise self._clash(unit, other, "has a row of this path")

    def _clash(self, unit: Unit, other: Unit, reason: str) -> UsageError:
        """Return the error for two units whose samples cannot be in one dataset."""
        name, second = unit.members[0].name, other.members[0].name
        of_other = f"{second or 'the array'} of {self._paths[other.file]}"
        return UsageError(
            f"import {self._paths[unit.file]}: {name or 'the array'}: expected samples of "
            f"different paths, got {show(unit.path)}; {show(other.path)}, of {of_other}, {reason}; "
            "option select chooses the arrays"
        )

    def _selected(self, file: ArrayFile, path: str) -> Iterator[ArrayInfo]:
        """Yield the arrays that match the option ``select``, else all but those of attributes."""
        for array in file.arrays.values():
            if self._select:
                chosen = any(fnmatchcase(array.name, pattern) for pattern in self._select)
            else:
                chosen = not self._is_attribute(file, array)
            if chosen and array.problem:
                error = FormatError(f"import {path}: {array.name}: {array.problem}")
                self._bad.note(path, array.name, error)
            elif chosen:
                yield array

    def _wanted(self, file: ArrayFile, path: str) -> Iterator[ArrayInfo]:
        for array in self._selected(file, path):
            if array.kind == "other" or (self._samples != "rows" and array.kind != "fixed"):
                self.skipped[_NO_BYTES] += 1
            elif self._samples == "rows" and not array.shape:
                self.skipped[_NO_ROWS] += 1
            else:
                yield array

    def _is_attribute(self, file: ArrayFile, array: ArrayInfo) -> bool:
        group = posixpath.dirname(array.name)
        for reference in self._references.values():
            try:
                if file.find(reference, group).name == array.name:
                    return True
            except KeyError:
                pass
        return False

    def _unit(
        self, index: int, file: ArrayFile, name: str, group: str, members: Sequence[ArrayInfo]
    ) -> Unit:
        where = f"import {self._paths[index]}"
        parts = [os.fsencode(name)] if name else []
        if len(self._paths) > 1 or not name:
            parts.insert(0, self._stems[index])
        path = clean_path(b"/".join(parts), where)
        rows = self._samples == "rows"
        if rows:
            clean_path(path + b"/" + b"0" * ROW_DIGITS_MIN, where)
        unit = Unit(index, path, tuple(members), rows, {})
        for array in members:
            has_form = array.kind != "fixed" or is_element(array.dtype)
            if array.packing:
                self._note_packing(array)
            if not has_form and self._samples != "groups":
                self.skipped[_NO_TYPE.format(describe(array))] += 1
        self._check_whole(where, members)
        attributes = {
            key: self._attribute(file, unit, key, reference, group)
            for key, reference in self._references.items()
        }
        self._check_whole(where, attributes.values())
        return replace(unit, attributes=attributes)

    def _note_packing(self, array: ArrayInfo) -> None:
        reason = _PACKED.format(f"{describe(array)} by {array.packing}")
        if reason not in self.skipped and self._packings >= _SHOWN_MAX:
            reason = _PACKED.format("other arrays")
        self._packings += reason not in self.skipped
        self.skipped[reason] += 1

    def _check_whole(self, where: str, arrays: Iterable[ArrayInfo]) -> None:
        """Check that arrays can be read, and lack no part unless it is to be filled."""
        for array in arrays:
            if array.missing is not None and not self._fills:
                text = describe_missing(array.missing)
                raise FormatError(f"{where}: {describe(array)}: {text}")
            if array.missing is not None and id(array.missing) not in self._filled:
                self._filled[id(array.missing)] = array.missing  # members of one array share it
                self.skipped[_FILLED.format(array.missing.noun)] += array.missing.count

    def _attribute(
        self, file: ArrayFile, unit: Unit, name: str, reference: str, group: str
    ) -> ArrayInfo:
        where = f"import {self._paths[unit.file]}: the attribute {name!r} of {show(unit.path)}"
        try:
            found = file.find(reference, group)
        except KeyError as error:
            raise UsageError(f"{where}: expected an array {reference!r}, got none") from error
        if found.problem:
            raise FormatError(f"{where}: {reference!r}: {found.problem}")
        if not is_text(found) and (found.kind != "fixed" or found.dtype.kind not in "biuf"):
            raise UsageError(
                f"{where}: expected {reference!r} to be of numbers or text, got {describe(found)}"
            )
        size = math.prod(found.shape)
        if size != 1 and (size != found.count or found.count != unit.count):
            raise UsageError(
                f"{where}: expected {reference!r} to have one value, or one for each of "
                f"{unit.count} samples, got {describe(found)}"
            )
        return found

    def _nothing(self) -> str:
        wanted = " or ".join(self._select) or "arrays"
        if self._fields:
            names = [*self._fields.references, *self._fields.patterns]
            wanted = f"arrays for the fields {', '.join(names)}"
        elif self._samples == "rows":
            wanted += " with rows"
        seen = ", ".join(describe(array) for array in self._seen) or "none"
        more = f"; left out: {dict(self.skipped)}" if self.skipped else ""
        return f"import {self._paths[0]}: expected {wanted}, got {seen}{more}"


def row_digits(count: int) -> int:
    """Return the number of digits in the paths of an array's rows."""
    return max(ROW_DIGITS_MIN, len(str(count - 1)))


def is_text(array: ArrayInfo) -> bool:
    """Return True if the rows are strings, of any length or of a fixed one."""
    return array.kind == "text" or (array.kind == "fixed" and array.dtype.kind in "SU")


def _common_type(name: str, arrays: Sequence[ArrayInfo]) -> np.dtype[Any]:
    """Return the type of an attribute: object for text, else a type that holds all the numbers."""
    texts = {is_text(array) for array in arrays}
    if len(texts) > 1:
        raise UsageError(f"import: expected the attribute {name!r} to be text or numbers, got both")
    kind = np.dtype(object) if texts == {True} else np.result_type(*{a.dtype for a in arrays})
    return kind if kind.isnative else kind.newbyteorder("=")


# ---- fields --------------------------------------------------------------------------------------


Members = dict[str, ArrayInfo]
"""Array of each field by name."""


@dataclass(frozen=True, slots=True)
class FieldArrays:
    """The fields that an import chooses.

    Attributes:
        references: name of each array, by the name of its field.
        patterns: patterns of the names of arrays in a group.
        rows: True if rows of arrays are fields, False if whole arrays are.
    """

    references: Mapping[str, str]
    patterns: Sequence[str]
    rows: bool

    @classmethod
    def parse(cls, entries: Sequence[str], *, rows: bool) -> FieldArrays:
        """Parse the entries of the option ``fields``.

        Raises:
            UsageError: a name is missing, or given twice.
        """
        patterns = [entry for entry in entries if "=" not in entry and is_pattern(entry)]
        others = [entry for entry in entries if entry not in patterns]
        return cls(parse_references(others, "a field"), patterns, rows)

    def __bool__(self) -> bool:
        """Return True if samples have fields."""
        return bool(self.references or self.patterns)

    def find(
        self, file: ArrayFile, group: str, able: Sequence[ArrayInfo], where: str, unnamed: str
    ) -> Members:
        """Return the arrays of a group's fields; empty if the group has none of them.

        Args:
            file: the open file.
            group: name of the group.
            able: arrays of the group that patterns may take.
            where: name of the file, for errors.
            unnamed: name of the field of an array without a name.

        Raises:
            UsageError: an array is missing or cannot be a field, or has another number of rows than
                the first.
        """
        found: dict[str, ArrayInfo | None] = {}
        for name, reference in self.references.items():
            try:
                found[name] = file.find(reference, group)
            except KeyError:
                found[name] = None
        taken = [array.name for array in found.values() if array is not None]
        for array in able:
            name = posixpath.basename(array.name) or unnamed
            matches = any(fnmatchcase(name, pattern) for pattern in self.patterns)
            if matches and name not in found and array.name not in taken and self.fits(array):
                found[name] = array
        if not any(
            array is not None and not self.references.get(name, "").startswith("/")
            for name, array in found.items()
        ):
            return {}
        members: Members = {}
        for name, maybe in found.items():
            here = f"{where}: {group or '/'}: field {name!r}"
            if maybe is None:
                raise UsageError(f"{here}: expected an array {self.references[name]!r}, got none")
            if not self.fits(maybe):
                raise UsageError(
                    f"{here}: expected {'rows' if self.rows else 'an array'} of numbers, times or "
                    f"text, got {describe(maybe)}"
                )
            members[name] = maybe
            first = next(iter(members.values()))
            if self.rows and maybe.count != first.count:
                raise UsageError(
                    f"{here}: expected {first.count} rows as in {first.name}, got {maybe.count}"
                )
        return members

    def fits(self, array: ArrayInfo) -> bool:
        """Return True if the rows of an array, or the whole of it, can be a field."""
        if self.rows and not array.shape:
            return False
        if array.kind == "text":
            return len(array.shape) == int(self.rows)
        if array.kind == "ragged" and not self.rows:
            return False
        return array.kind != "other" and array.dtype.kind in KINDS and array.dtype.itemsize > 0

    def type_of(self, array: ArrayInfo) -> FieldType:
        """Return the type of the field that an array is."""
        if array.kind == "text":
            return FieldType("text")
        shape = array.row_shape if self.rows else array.shape
        if array.kind == "fixed" and not shape and array.dtype.kind in "SU":
            return FieldType("bytes" if array.dtype.kind == "S" else "text")
        return FieldType.array(array.dtype.str, (None,) if array.kind == "ragged" else shape)


def merge_types(
    types: Mapping[str, FieldType], others: Mapping[str, FieldType], where: str
) -> dict[str, FieldType]:
    """Return the types that the values of two groups have; dimensions that differ vary.

    Args:
        types: types so far; empty for the first group.
        others: types of the fields in another group.
        where: name of that group, for errors.

    Raises:
        FormatError: a field is missing or new, or of another type or number of dimensions.
    """
    if types and types.keys() != others.keys():
        raise FormatError(
            f"{where}: expected the fields {', '.join(types)} as in the first file or group, got "
            f"{', '.join(others)}"
        )
    merged = {}
    for name, kind in others.items():
        first = types.get(name, kind)
        alike = first.dtype.newbyteorder("=") == kind.dtype.newbyteorder("=")
        if first.kind != kind.kind or len(first.shape) != len(kind.shape) or not alike:
            raise FormatError(f"{where}: field {name!r}: expected {first}, got {kind}")
        lengths = zip(first.shape, kind.shape, strict=True)
        shape = [one if one == other else None for one, other in lengths]
        merged[name] = first if first.kind != "array" else FieldType.array(first.element, shape)
    return merged
