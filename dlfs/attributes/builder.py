"""Columns of a dataset that is being written, in the order in which its samples are added.

A column exists from its first value on; samples without a value get the default of its type: NaN,
0, False or "". ``AttributeNames`` sees that only reserved columns have such samples. The first
values of a column decide its type. Later values must have this type too, or be
numbers that it can represent exactly.

Memory is that of the columns: fixed width as it is, strings as indices into a dictionary, or, once
more than 65,536 of them differ, as their text.

Threads: one at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any
from uuid import UUID

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dlfs._native.checksums import crc32c_blocks
from dlfs.attributes.vectors import component_column
from dlfs.errors import LimitError, UsageError
from dlfs.format.attributes import (
    FIXED,
    AttributeHead,
    ColumnForm,
    Strings,
    column_name_problem,
    encode_dictionary,
    encode_fixed,
    encode_head,
    encode_text,
)
from dlfs.format.constants import (
    ATTRIBUTE_BLOCK_BYTES,
    ATTRIBUTE_COLUMNS_MAX,
    DICTIONARY_VALUES_MAX,
    RESERVED_PREFIX,
)

Attributes = Mapping[str, ArrayLike]
"""Values by column: for n samples n values, or n vectors of one length, ``[n, k]``."""

Rows = NDArray[np.int64]

RESERVED_COLUMNS = ("dlfs:dtype", "dlfs:shape", "dlfs:fields")
"""Names with the reserved prefix that are defined; these columns hold strings."""

FIELD_PREFIX = "dlfs:field:"
FIELD_DTYPES = {"bytes": np.dtype(np.int64), "shape": None, "crc32c": np.dtype(np.uint32)}
"""Dtype of each column of a field by the end of its name; None for strings."""

_ROWS_AT_ONCE = 1 << 16


class _Growing:
    """An array that grows at its end."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._memory = bytearray()
        self.dtype = dtype

    def __len__(self) -> int:
        return len(self._memory) // self.dtype.itemsize

    def append(self, values: NDArray[Any]) -> None:
        self._memory += np.ascontiguousarray(values, self.dtype).view(np.uint8).data

    @property
    def values(self) -> NDArray[Any]:
        """The elements; they must be released before the next ``append``."""
        return np.frombuffer(self._memory, self.dtype)


class _FixedColumn:
    """A column of fixed width."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._rows = _Growing(dtype)
        self.dtype = dtype

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def size_bytes(self) -> int:
        return len(self._rows) * self.dtype.itemsize

    def append(self, values: NDArray[Any]) -> None:
        self._rows.append(values)

    def append_default(self, count: int) -> None:
        default = np.nan if self.dtype.kind == "f" else 0
        self._rows.append(np.full(count, default, self.dtype))

    def encode(self, name: str, rows: Rows) -> tuple[ColumnForm, NDArray[np.uint8]]:
        return encode_fixed(name, self._rows.values[rows])


class StringColumn:
    """A column of strings: indices of distinct strings while these are few, then text."""

    def __init__(self) -> None:
        self._codes = _Growing(np.dtype(np.uint16))
        self._values: dict[str, int] = {}
        self._value_bytes = 0
        self._text: bytearray | None = None
        """Concatenated strings; None while the column has a dictionary."""
        self._lengths = _Growing(np.dtype(np.uint64))

    def __len__(self) -> int:
        return len(self._codes) if self._text is None else len(self._lengths)

    @property
    def size_bytes(self) -> int:
        """Upper bound of the column's length, in bytes."""
        if self._text is None:
            return 2 * len(self._codes) + 8 * len(self._values) + self._value_bytes
        return 8 * len(self._lengths) + len(self._text)

    def append(self, values: Sequence[str]) -> None:
        """Append values."""
        codes = self.register(values)
        if self._text is None:
            self._codes.append(codes)
        else:
            self._append_text([value.encode() for value in values])

    def append_default(self, count: int) -> None:
        """Append empty strings."""
        for first in range(0, count, _ROWS_AT_ONCE):
            self.append([""] * min(_ROWS_AT_ONCE, count - first))

    @property
    def has_dictionary(self) -> bool:
        """True while the column has a dictionary."""
        return self._text is None

    def register(self, values: Sequence[str]) -> NDArray[np.uint16]:
        """Add values to the dictionary, if there is room; return the code of each.

        Without room the column has no dictionary afterwards, and the codes mean nothing.
        """
        if self._text is None:
            for value in values:
                if value not in self._values:
                    self._values[value] = len(self._values)
                    self._value_bytes += len(value.encode())
            if len(self._values) > DICTIONARY_VALUES_MAX:
                self._spell_out()
        if self._text is not None:
            return np.zeros(len(values), np.uint16)
        return np.fromiter(map(self._values.__getitem__, values), np.uint16, len(values))

    def append_codes(self, codes: NDArray[np.uint16]) -> None:
        """Append values by their codes, while the column has a dictionary."""
        self._codes.append(codes)

    def append_text(self, text: NDArray[np.uint8], lengths: NDArray[np.uint64]) -> None:
        """Append values by their text, when the column has no dictionary."""
        assert self._text is not None
        self._text += text.data
        self._lengths.append(lengths)

    def _append_text(self, values: Sequence[bytes]) -> None:
        assert self._text is not None
        self._text += b"".join(values)
        self._lengths.append(np.fromiter(map(len, values), np.uint64, len(values)))

    def _spell_out(self) -> None:
        """Replace the dictionary by the text of all strings."""
        known = [value.encode() for value in self._values]
        self._text = bytearray()
        for codes in _in_turn(self._codes.values):
            self._append_text([known[code] for code in codes.tolist()])
        self._codes, self._values = _Growing(self._codes.dtype), {}

    def encode(self, name: str, rows: Rows | None) -> tuple[ColumnForm, NDArray[np.uint8]]:
        """Encode the values of some rows in turn; None: of all."""
        if self._text is None and not self._pays():
            self._spell_out()
        if self._text is not None:
            return encode_text(name, self._text_in_order(rows))
        strings = [value.encode() for value in self._values]
        order = sorted(range(len(strings)), key=strings.__getitem__)
        places = np.empty(len(order), np.uint16)
        places[order] = np.arange(len(order), dtype=np.uint16)
        chosen = self._codes.values if rows is None else self._codes.values[rows]
        codes = places[chosen] if len(chosen) else chosen
        return encode_dictionary(name, codes, pack_strings([strings[place] for place in order]))

    def _pays(self) -> bool:
        """Return True if a dictionary takes less memory than the text."""
        lengths = np.array([len(value.encode()) for value in self._values], np.int64)
        text_bytes = sum(int(lengths[codes].sum()) for codes in _in_turn(self._codes.values))
        index_bytes = 1 if len(lengths) <= 256 else 2
        with_dictionary = index_bytes * len(self) + 8 * (len(lengths) + 1) + self._value_bytes
        return with_dictionary < 8 * (len(self) + 1) + text_bytes

    def _text_in_order(self, rows: Rows | None) -> Strings:
        """Return the strings of some rows, a range of rows at a time; None: of all."""
        text = np.frombuffer(self._text or b"", np.uint8)
        if rows is None:
            ends = np.zeros(len(self) + 1, np.uint64)
            np.cumsum(self._lengths.values, out=ends[1:])
            return Strings(ends, text)
        lengths = self._lengths.values.astype(np.int64)
        starts = np.cumsum(lengths) - lengths
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(lengths[rows], out=offsets[1:])
        ordered = np.empty(int(offsets[-1]), np.uint8)
        done = 0
        for part in _in_turn(rows):
            sizes = lengths[part]
            ends = np.cumsum(sizes)
            total = int(ends[-1])
            places = np.arange(total) + np.repeat(starts[part] - (ends - sizes), sizes)
            ordered[done : done + total] = text[places]
            done += total
        return Strings(offsets.view(np.uint64), ordered)


_Column = _FixedColumn | StringColumn
Prepared = dict[str, NDArray[Any] | list[str]]


class AttributesBuilder:
    """The columns of the samples added so far."""

    def __init__(self) -> None:
        self._columns: dict[str, _Column] = {}

    def __len__(self) -> int:
        """Return the number of columns."""
        return len(self._columns)

    @property
    def size_bytes(self) -> int:
        """Upper bound of the segment's length, in bytes."""
        if not self._columns:
            return 0
        values = sum(column.size_bytes for column in self._columns.values())
        fixed = 3 * ATTRIBUTE_BLOCK_BYTES + 512 * len(self._columns)
        return fixed + ATTRIBUTE_BLOCK_BYTES * len(self._columns) + values + values // 512

    @property
    def dtypes(self) -> dict[str, np.dtype[Any]]:
        """Dtype of each column as it is stored, by name; ``object`` for strings."""
        return {
            name: np.dtype(object) if isinstance(column, StringColumn) else column.dtype
            for name, column in self._columns.items()
        }

    def expect(self, columns: Mapping[str, np.dtype[Any]]) -> None:
        """Begin columns without values, whose types further values must have.

        Args:
            columns: dtype of each column as it is stored, by name; ``object`` for strings.
        """
        for name, dtype in columns.items():
            self._columns[name] = StringColumn() if dtype.kind == "O" else _FixedColumn(dtype)

    def prepare(self, attributes: Attributes, count: int) -> Prepared:
        """Check values before they are appended; the columns do not change yet.

        Args:
            attributes: an array of ``count`` values for each column.
            count: number of samples.

        Raises:
            UsageError: a column has no such name, values of no allowed type, another number of
                them, or a type that does not go with those it has already.
            LimitError: there would be too many columns.
        """
        prepared: Prepared = {}
        for name, values in attributes.items():
            _check_name(name)
            array = as_array(name, values)
            self._check_length(name, array)
            if array.ndim == 2:
                prepared.update(self._prepare_vectors(name, array, count))
            else:
                prepared[name] = self._prepare_column(name, array, count)
        total = len(self._columns.keys() | prepared.keys())
        if total > ATTRIBUTE_COLUMNS_MAX:
            raise LimitError(
                f"add attributes: expected at most {ATTRIBUTE_COLUMNS_MAX} columns, got {total}"
            )
        return prepared

    def _check_length(self, name: str, array: NDArray[Any]) -> None:
        """Check that values are vectors of one length in all calls, or none in all of them.

        Raises:
            UsageError: they are not.
        """
        length = 0  # of the vectors before; 0 without
        while component_column(name, length) in self._columns:
            length += 1
        got = array.shape[1] if array.ndim == 2 else 0
        if (length or name in self._columns) and got != length:
            expected, given = (f"vectors of {n}" if n else "single values" for n in (length, got))
            raise UsageError(f"add attribute {name!r}: expected {expected}, got {given}")

    def _prepare_vectors(self, name: str, array: NDArray[Any], count: int) -> Prepared:
        """Return the components of vectors, ``[n, k]``, by the names of their columns."""
        is_number = array.dtype.name in FIXED and not name.startswith(RESERVED_PREFIX)
        if len(array) != count or not array.shape[1] or not is_number:
            raise UsageError(
                f"add attribute {name!r}: expected {count} values, or vectors of bools or numbers "
                f"of at most 64 bits, got {array.dtype} of shape {array.shape}"
            )
        names = [component_column(name, number) for number in range(array.shape[1])]
        if problem := column_name_problem(names[-1]):
            raise UsageError(f"add attribute {name!r}: as {names[-1]!r}: {problem}")
        before = self._columns.get(names[0])
        dtype = before.dtype if isinstance(before, _FixedColumn) else array.dtype
        return {
            part: _converted(name, array[:, number], dtype) for number, part in enumerate(names)
        }

    def _prepare_column(
        self, name: str, array: NDArray[Any], count: int
    ) -> NDArray[Any] | list[str]:
        if array.shape != (count,):
            raise UsageError(
                f"add attribute {name!r}: expected {count} values or vectors, "
                f"got an array of shape {array.shape}"
            )
        column = self._columns.get(name)
        strings = _strings(name, array)
        if strings is not None:
            if isinstance(column, _FixedColumn):
                raise UsageError(f"add attribute {name!r}: expected {column.dtype}, got strings")
            if name.startswith(RESERVED_PREFIX) and (dtype := _reserved_dtype(name)):
                raise UsageError(f"add attribute {name!r}: expected {dtype}, got strings")
            return strings
        reserved = _reserved_dtype(name) if name.startswith(RESERVED_PREFIX) else array.dtype
        if isinstance(column, StringColumn) or reserved is None:
            raise UsageError(f"add attribute {name!r}: expected strings, got {array.dtype}")
        return _converted(name, array, reserved if column is None else column.dtype)

    def append(self, prepared: Prepared, rows_before: int) -> None:
        """Append prepared values.

        Args:
            prepared: values of new samples.
            rows_before: samples added before them.
        """
        for name, values in prepared.items():
            column = self._columns.get(name)
            if column is None:
                column = StringColumn() if isinstance(values, list) else _FixedColumn(values.dtype)
                self._columns[name] = column
            if len(column) < rows_before:
                column.append_default(rows_before - len(column))
            column.append(values)  # type: ignore[arg-type]  # prepared for this column

    def freeze(self, dataset_uuid: UUID, rows: Rows) -> list[NDArray[np.uint8]]:
        """Encode the segment as consecutive parts: the head, then each column. Empties the builder.

        The builder is empty then.

        Args:
            dataset_uuid: UUID of the dataset.
            rows: int64[n_samples], which row each index has.
        """
        made = []
        for name in list(self._columns):
            column = self._columns.pop(name)
            if len(column) < len(rows):
                column.append_default(len(rows) - len(column))
            made.append(column.encode(name, rows))
        return encode_parts(dataset_uuid, len(rows), made)


def encode_parts(
    dataset_uuid: UUID, count: int, made: Sequence[tuple[ColumnForm, NDArray[np.uint8]]]
) -> list[NDArray[np.uint8]]:
    """Return the consecutive parts of a segment: its head, then each column.

    Args:
        dataset_uuid: UUID of the dataset.
        count: number of samples.
        made: form and encoded bytes of each column.
    """
    sums = [crc32c_blocks(part.data, ATTRIBUTE_BLOCK_BYTES) for _, part in made]
    checksums = np.concatenate([np.empty(0, np.uint32), *sums])
    head = AttributeHead(dataset_uuid, count, tuple(form for form, _ in made), checksums)
    return [encode_head(head), *(part for _, part in made)]


def _check_name(name: str) -> None:
    problem = column_name_problem(name)
    if problem is None and name.startswith(RESERVED_PREFIX) and not _is_defined(name):
        problem = f"expected one of {', '.join(RESERVED_COLUMNS)}, or a name of another beginning"
    if problem:
        raise UsageError(f"add attribute {name!r}: {problem}")


def _is_defined(name: str) -> bool:
    """Return True if a name with the reserved prefix is that of a defined column."""
    field, _, ending = name.removeprefix(FIELD_PREFIX).rpartition(":")
    is_field = name.startswith(FIELD_PREFIX) and bool(field) and ending in FIELD_DTYPES
    return is_field or name in RESERVED_COLUMNS


def _reserved_dtype(name: str) -> np.dtype[Any] | None:
    """Return the dtype of a reserved column; None for strings."""
    if name in RESERVED_COLUMNS:
        return None
    return FIELD_DTYPES[name.rpartition(":")[2]]


def as_array(name: str, values: ArrayLike) -> NDArray[Any]:
    """Convert values to an array that preserves them.

    From a list with strings numpy would make text of one width, which loses NULs at the ends of
    values and converts numbers to text.

    Raises:
        UsageError: the values are lists of different lengths.
    """
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise UsageError(f"add attribute {name!r}: expected values of one form: {error}") from error
    if array.dtype.kind in "SU" and not isinstance(values, np.ndarray):
        array = np.array(values, object)
    return array


def _strings(name: str, array: NDArray[Any]) -> list[str] | None:
    """Return the values of an array of strings; None for values of a fixed width.

    Raises:
        UsageError: it is of neither.
    """
    if array.dtype.name in FIXED:
        return None
    values: list[str] = array.tolist()
    if array.dtype.kind not in "UOT" or not all(isinstance(value, str) for value in values):
        kinds = {type(value).__name__ for value in values if not isinstance(value, str)}
        kind = ", ".join(sorted(kinds)) if array.dtype.kind == "O" else str(array.dtype)
        raise UsageError(
            f"add attribute {name!r}: expected bool, integers or floats of at most 64 bits, "
            f"or strings, got {kind}"
        )
    try:
        "".join(values).encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"add attribute {name!r}: expected strings for UTF-8: {error}") from error
    return values


def _converted(name: str, array: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Convert numbers to the type of a column.

    Raises:
        UsageError: a value cannot be one of the column's.
    """
    if array.dtype == dtype:
        return array
    if "b" in (array.dtype.kind, dtype.kind):
        raise UsageError(f"add attribute {name!r}: expected {dtype}, got {array.dtype}")
    with np.errstate(all="ignore"):
        converted = array.astype(dtype)
        back = converted.astype(array.dtype)
    # A value whose sign changes converts back to itself: negative integers as unsigned, and large
    # ones.
    lost = (back != array) | ((converted < 0) != (array < 0))
    lost &= ~((array != array) & (converted != converted))
    if lost.any():
        value = array[int(np.argmax(lost))]
        raise UsageError(f"add attribute {name!r}: expected {dtype}, got {array.dtype} {value}")
    return converted


def _in_turn(array: NDArray[Any]) -> Iterator[NDArray[Any]]:
    for first in range(0, len(array), _ROWS_AT_ONCE):
        yield array[first : first + _ROWS_AT_ONCE]


def pack_strings(values: Sequence[bytes]) -> Strings:
    """Pack strings in UTF-8."""
    offsets = np.fromiter(accumulate(map(len, values), initial=0), np.uint64, len(values) + 1)
    return Strings(offsets, np.frombuffer(b"".join(values), np.uint8))
