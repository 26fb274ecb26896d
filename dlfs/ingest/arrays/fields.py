"""Chooses the arrays that are the fields of samples, and finds the types of these fields.

The option ``fields`` lists arrays, or patterns of their names in a group. An array is found from
its group, as those of attributes are: ``NAME=ARRAY`` names the field, and ``/ARRAY`` starts at the
top of the file. Each group that has such arrays gives samples with these fields. With ``samples``
of ``rows``, a sample is a row of each array; with ``groups`` it is the whole arrays of a group.

A row or an array of numbers is an array of its type, and a vector of any length ``<f4[?]``. A
string is text, or bytes if it has no encoding (numpy's ``S``). A dimension that differs between
files or groups varies.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from dlfs.errors import FormatError, UsageError
from dlfs.fields import FieldType
from dlfs.fields.types import KINDS
from dlfs.ingest.arrays.file import ArrayFile, ArrayInfo, describe, parse_references
from dlfs.ingest.fields import is_pattern

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
