"""Makes samples with fields of what a source has: several members, columns, features or arrays.

A format parses its option ``fields`` by ``parse_choices``, and finds the chosen names among those
of its source by ``choose_fields``. An entry is ``NAME``, ``NAME:TYPE``, or a pattern: ``*`` takes
all names. A type is written as for ``DatasetWriter.add``.

A ``FieldRecords`` belongs to one source. It knows the type of each field from the entry, or from
the format, whose schema has it; else the first sample determines it, and all dimensions of its
arrays vary. A record has the bytes of the sample, and the reserved attributes that describe its
fields.

For a field whose entry has a type, bytes and vectors become arrays of that type and shape: a source
such as TFRecord has no others. One of the dimensions may vary. Numbers are converted if the type
can represent them.

The option ``nulls`` of the record formats says what happens where a feature, or a member of a key,
is absent or empty: an error that names the record, the default of the type (0, False, empty text,
bytes or vectors; NaN for floats), or the reason to leave the record out.

Threads: one at a time.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import IO, Annotated, Any

import numpy as np
from numpy.typing import NDArray

from dlfs.errors import FormatError, UsageError
from dlfs.fields import FieldEncoder, FieldType
from dlfs.ingest.records import Record, Value
from dlfs.ingest.tables.plain import Nulls

Choices = dict[str, FieldType | None]
"""Chosen fields in their order: name or pattern, and the type of its entry if it has one."""


AbsentOption = Annotated[
    Nulls,
    "features or members that a record lacks: an error, the default of their type, or skip the "
    "record; a float is NaN",
]

HINT = "--option nulls=default takes the default of its type, nulls=skip leaves the record out"


class AbsentError(FormatError):
    """A record lacks a value that is used."""

    bad_record_kind = "value is missing"


@dataclass(frozen=True, slots=True)
class ColumnOptions:
    """Options of the formats that have columns with types."""

    column: Annotated[str | None, "column of the sample; by default the only possible one"] = None
    fields: Annotated[
        tuple[str, ...],
        "columns to make the fields of a sample, NAME[:TYPE] or patterns; by default all possible "
        "samples, if they are several",
    ] = ()
    attributes: Annotated[
        tuple[str, ...] | None,
        "columns to store as attributes; by default all with one value a row",
    ] = None
    path: Annotated[str | None, "column of the sample's path"] = None


_TYPED = re.compile(
    r"(?P<name>.+):(?P<type>bytes|text|[<>=|]?[A-Za-z]\w*(?:\[\w+\])?\[[0-9?,]*\])", re.DOTALL
)
_WILDCARDS = re.compile(r"[*?\[]")


def parse_choices(entries: Sequence[str], what: str) -> Choices:
    """Parse the entries of the option ``fields``.

    Args:
        entries: ``NAME``, ``NAME:TYPE`` or patterns of names.
        what: the action, for errors, such as ``import x.parquet``.

    Raises:
        UsageError: a type is malformed, or a name is empty or occurs twice.
    """
    choices: Choices = {}
    for entry in entries:
        typed = _TYPED.fullmatch(entry)
        name, kind = (typed["name"], typed["type"]) if typed else (entry, None)
        if not name or name in choices:
            raise UsageError(
                f"{what}: expected fields of different names, got {', '.join(entries)}"
            )
        try:
            choices[name] = None if kind is None else FieldType.parse(kind)
        except UsageError as error:
            raise UsageError(f"{what}: field {name!r}: {error}") from error
    return choices


def is_pattern(name: str) -> bool:
    """Return True if a name stands for several."""
    return _WILDCARDS.search(name) is not None


def choose_fields(choices: Choices, known: Sequence[str]) -> Choices:
    """Replace patterns by the names that match and that no other entry has.

    Args:
        choices: names and patterns.
        known: names in the source, in its order.

    Returns:
        The chosen names. A name that is not known, and a pattern that matches none, stay for the
        format to report.
    """
    found: Choices = {}
    for name, kind in choices.items():
        if name in known or not is_pattern(name):
            found[name] = kind
            continue
        matches = [other for other in known if fnmatchcase(other, name)]
        free = [match for match in matches if match not in choices and match not in found]
        found.update(dict.fromkeys(free if matches else [name], kind))
    return found


def only_sample(candidates: Sequence[str], names: Sequence[str], where: str) -> str:
    """Return the only column that can be the sample.

    Raises:
        UsageError: there is none, or several.
    """
    if len(candidates) == 1:
        return candidates[0]
    shown = ", ".join(names) or "no columns"
    if not candidates and names:
        raise UsageError(
            f"{where}: expected a column of bytes or text as the samples, got the columns {shown}; "
            "option fields=* makes all columns the fields of samples"
        )
    raise UsageError(f"{where}: expected option column to name one of {shown}")


class FieldRecords:
    """Makes the records of one source, which all have the same fields.

    Args:
        declared: type of each field whose entry has one; values are made to fit it.
        known: type of each field that the format knows.
    """

    def __init__(
        self,
        declared: Mapping[str, FieldType | None] | None = None,
        known: Mapping[str, FieldType] | None = None,
    ) -> None:
        self._declared = {name: kind for name, kind in (declared or {}).items() if kind is not None}
        self._known = {**(known or {}), **self._declared}
        self._encoder: FieldEncoder | None = None

    def make(
        self,
        path: bytes,
        values: Mapping[str, Any],
        where: str,
        attributes: Mapping[str, Value] | None = None,
    ) -> Record:
        """Make the record of one sample.

        Args:
            path: path of the sample.
            values: value of each field: bytes, text, or an array or a number.
            where: name of the source and the sample, for errors.
            attributes: further attributes of the sample.

        Raises:
            FormatError: a value cannot be stored, or its type is not that of the field; the message
                names the field.
        """
        values = dict(values)
        for name in self._declared.keys() & values.keys():
            try:
                values[name] = fit_value(self._declared[name], values[name])
            except (UsageError, ValueError) as error:
                raise FormatError(f"{where}: field {name!r}: {error}") from error
        try:
            encoder = self._encoder
            if encoder is None:
                others = {name: found for name, found in values.items() if name not in self._known}
                guessed = FieldEncoder.of_sample(others, where).fields if others else {}
                types = {**guessed, **self._known}
                encoder = FieldEncoder({name: types[name] for name in values})
            data, columns = encoder.encode(values, where)
            self._encoder = encoder
        except UsageError as error:
            raise FormatError(str(error)) from error
        return Record(path, data.data, {**(attributes or {}), **columns})


class NamedRecords(FieldRecords):
    """Makes the records of a source whose records name their values.

    Patterns take names of the first record.

    Args:
        choices: the entries of the option ``fields``.

    Attributes:
        fields: the chosen fields, with names for patterns once the first record is known.
    """

    def __init__(self, choices: Choices) -> None:
        self.fields = choices
        self._patterns: Choices = {name: None for name in choices if is_pattern(name)}
        self._is_chosen = False

    def choose(self, names: Sequence[str]) -> None:
        """Choose the fields among the names of a record, if it is the first."""
        if not self._is_chosen:
            self.fields = choose_fields(self.fields, names)
            super().__init__(self.fields)
            self._is_chosen = True

    def find_unused(self, names: Sequence[str], where: str, what: str) -> list[str]:
        """Return the names of a record that are no fields.

        Args:
            names: names that could be fields.
            where: name of the source and the record, for the error.
            what: the names that were expected, such as ``members of the first key``.

        Raises:
            FormatError: a pattern would take one that the first record does not have.
        """
        self.choose(names)
        others = [name for name in names if name not in self.fields]
        if not self._patterns:
            return others
        missed = sorted(choose_fields(self._patterns, others).keys() & others)
        if missed:
            raise FormatError(
                f"{where}: expected the {what}, {', '.join(self.fields)}, got {', '.join(missed)} "
                "too; the option fields names those to take"
            )
        return others


def fit_value(kind: FieldType, value: Any) -> Any:
    """Return a value as one of a declared type, as far as nothing is lost.

    Bytes become text, or an array of the elements that they are. A vector takes the declared shape.
    Other values are returned unchanged, and the encoder checks them.

    Raises:
        UsageError: the bytes or the vector have another number of elements.
        UnicodeDecodeError: the bytes are not UTF-8.
    """
    is_bytes = isinstance(value, bytes | bytearray | memoryview)
    if kind.kind == "text":
        return str(value, "utf-8") if is_bytes else value
    if kind.kind == "bytes":
        return value.encode() if isinstance(value, str) else value
    if is_bytes:
        if len(value) % kind.dtype.itemsize:
            raise UsageError(
                f"expected {kind}, of {kind.dtype.itemsize} bytes each element, got {len(value)} "
                "bytes"
            )
        array: NDArray[Any] = np.frombuffer(value, kind.dtype)
    elif isinstance(value, np.ndarray | np.generic):
        array = _convert(kind, np.asarray(value))
    else:
        return value
    has_shape = array.ndim != 1 and any(array.shape)
    if kind.fits(array.shape) or has_shape or not array.ndim:
        return array
    return array.reshape(_shape_of(kind, array.size))


def _shape_of(kind: FieldType, size: int) -> tuple[int, ...]:
    """Return the shape of an array with a number of elements; one dimension may vary."""
    lengths = [length for length in kind.shape if length is not None]
    fixed = int(np.prod(lengths, dtype=np.int64))
    varying = len(kind.shape) - len(lengths)
    if size == 0 and varying:
        return tuple(length or 0 for length in kind.shape)
    if varying > 1 or (fixed != size if not varying else not fixed or size % fixed):
        raise UsageError(f"expected {kind}, got {size} elements without a shape")
    return tuple(size // fixed if length is None else length for length in kind.shape)


def _convert(kind: FieldType, array: NDArray[Any]) -> NDArray[Any]:
    """Return an array of numbers with the type's elements, if these can represent it."""
    wanted = kind.dtype
    kinds = array.dtype.kind + wanted.kind
    if array.dtype == wanted or kinds not in ("ii", "iu", "ui", "uu", "ff", "cc"):
        return array
    with np.errstate(all="ignore"):
        converted = array.astype(wanted)
    if wanted.kind in "fc":
        is_possible = np.array_equal(np.isfinite(converted), np.isfinite(array))
    else:
        is_possible = np.array_equal(converted.astype(array.dtype), array) and np.array_equal(
            converted < 0, array < 0
        )
    return converted if is_possible else array


# ---- absent values -------------------------------------------------------------------------------


def default_of_type(kind: FieldType) -> Any:
    """Return the default of a declared type; dimensions that vary are 0."""
    if kind.kind != "array":
        return "" if kind.kind == "text" else b""
    shape = tuple(length or 0 for length in kind.shape)
    return _filled(shape, kind.dtype)


def default_like(value: Any) -> Any:
    """Return the default of the type of a value; a vector or array has no elements."""
    if isinstance(value, np.ndarray | np.generic):
        return _filled((0,) * value.ndim, value.dtype)
    if isinstance(value, float):
        return float("nan")
    return type(value)() if isinstance(value, bool | int | str) else b""


def _filled(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    return np.full(shape, np.nan if dtype.kind in "fc" else np.zeros((), dtype), dtype)


# ---- arrays as files -----------------------------------------------------------------------------


def read_npy(data: bytes | memoryview) -> NDArray[Any]:
    """Return the array in the bytes of a NPY file.

    Raises:
        ValueError: they are no NPY file, or of Python objects, or too short or too long.
    """
    file = io.BytesIO(data)
    shape, fortran, dtype = read_npy_header(file)
    if dtype.hasobject:
        raise ValueError("an array of Python objects")
    flat = np.frombuffer(data, dtype, offset=file.tell()) if dtype.itemsize else np.empty(0, dtype)
    return flat.reshape(shape, order="F" if fortran else "C")


def read_npy_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read the header of an array: shape, True for Fortran order, and type of its elements.

    Raises:
        ValueError: it is none of NPY format 1, 2 or 3.
    """
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(file)
    if version not in ((2, 0), (3, 0)):
        raise ValueError(f"version {version} of the NPY format")
    # 3 differs from 2 in the characters that names of fields may have
    return np.lib.format.read_array_header_2_0(file)
