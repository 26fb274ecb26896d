"""Reads the values of plain Arrow arrays, and gives the type of field that they fit.

- Bytes and text are ``bytes`` and ``text``. Times and decimals are text, as in attributes.
- Bools, integers and floats are scalars, ``<f4[]``.
- Lists of them, also of lists, are arrays: a list of any length is a dimension that varies, a list
  of a fixed size one of this length, ``<f4[?,4]``. So are Arrow's tensors of a fixed shape. The
  lists within one value must have one length, because an array is rectangular.
- Types that ``datasets`` defines, such as ``Array2D``, are stored as lists, and taken as these.

``tables.plain`` makes arrays plain. The caller has dealt with nulls; a null float is NaN.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dlfs.errors import FormatError, UsageError
from dlfs.fields import FieldType
from dlfs.ingest.source import Array, Bytes, Int64Array
from dlfs.ingest.tables.arrow import types
from dlfs.ingest.tables.plain import LISTS, is_one_of, is_tensor, list_starts, plain_type

_TEXT = ("is_large_string",)
_BYTES = ("is_large_binary", "is_fixed_size_binary", *_TEXT)
NUMBERS = ("is_boolean", "is_integer", "is_floating")

Locate = Callable[[int], str]
"""Function that returns the place of a value of an array, for errors."""


def is_text(kind: Any) -> bool:
    """Return True if values of a type are stored as text; times and decimals are none."""
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return is_text(kind.value_type)
    return is_one_of(kind, ("is_string", "is_large_string", "is_string_view")) or (
        hasattr(kind, "storage_type") and is_text(kind.storage_type)
    )


def is_bytes(kind: Any) -> bool:
    """Return True if values of a type are bytes or text."""
    return is_text(kind) or is_one_of(plain_type(kind), _BYTES[:2])


def is_scalar(kind: Any) -> bool:
    """Return True if values of a type can be attributes."""
    return is_one_of(plain_type(kind), (*NUMBERS, *_TEXT))


def is_vector(kind: Any) -> bool:
    """Return True if values of a type can be vectors of an attribute: lists of k numbers."""
    size = getattr(kind, "list_size", 0)  # only fixed-size lists have one
    return size > 0 and is_one_of(kind.value_type, NUMBERS)


def field_type(kind: Any) -> FieldType | None:
    """Return the type of field that values of an Arrow type fit; None if there is none."""
    kind = plain_type(kind)
    if is_one_of(kind, _BYTES):
        return FieldType("text" if is_one_of(kind, _TEXT) else "bytes")
    shape: list[int | None] = []
    if is_tensor(kind):
        if kind.permutation not in (None, list(range(len(kind.shape)))):
            return None
        shape, kind = list(kind.shape), kind.value_type
    while is_one_of(kind, LISTS):
        shape.append(kind.list_size if is_one_of(kind, ("is_fixed_size_list",)) else None)
        kind = kind.value_type
    if is_one_of(kind, NUMBERS):
        try:
            return FieldType.array(np.dtype(kind.to_pandas_dtype()).str, shape)
        except UsageError:  # too many dimensions, or too long for a sample
            return None
    return None


def field_values(array: Any, kind: FieldType, locate: Locate) -> Sequence[Any]:
    """Return the values of a plain Arrow array as those of a field.

    Args:
        array: array of a type for which ``field_type`` returns a type; no null but of floats.
        kind: that type.
        locate: returns the place of a value, for errors.

    Raises:
        FormatError: text is not UTF-8, or lists in a value differ in length.
    """
    if kind.kind == "bytes":
        data, offsets, lengths = spans(array)
        ends = zip(offsets.tolist(), lengths.tolist(), strict=True)
        return [data.data[start : start + length] for start, length in ends]
    if kind.kind == "text":
        return texts(array, locate)
    array = getattr(array, "storage", array)
    if not kind.shape:
        numbers = array.to_numpy(zero_copy_only=False)
        return [numbers[i : i + 1].reshape(()) for i in range(len(numbers))]
    return _arrays(array, kind, locate)


def json_texts(array: Any, locate: Locate) -> list[str]:
    """Return the values of a plain array of any type as JSON; a null is ``null``.

    Raises:
        FormatError: a value is not one that JSON has, such as bytes.
    """
    found = []
    for i in range(len(array)):
        try:
            found.append(json.dumps(array[i].as_py(), ensure_ascii=False))
        except (TypeError, ValueError) as error:
            raise FormatError(f"{locate(i)}: expected a value that JSON has: {error}") from error
    return found


def texts(array: Any, locate: Locate) -> list[str]:
    """Return the strings of an array; Parquet files may have some that are not UTF-8.

    Raises:
        FormatError: a string is not UTF-8.
    """
    try:
        found: list[str] = array.to_pylist()
    except UnicodeDecodeError:
        data, offsets, lengths = spans(array)
        for i, (start, length) in enumerate(zip(offsets.tolist(), lengths.tolist(), strict=True)):
            try:
                str(data.data[start : start + length], "utf-8")
            except UnicodeDecodeError as error:
                raise FormatError(
                    f"{locate(i)}: expected text in UTF-8, got other bytes: {error}"
                ) from error
        raise
    return found


def _arrays(array: Any, kind: FieldType, locate: Locate) -> list[Array]:
    """Return nested lists of numbers as arrays."""
    if not len(array):
        return []
    levels: list[Int64Array] = []
    while is_one_of(array.type, LISTS):
        levels.append(list_starts(array))
        array = array.flatten()
    numbers = array.to_numpy(zero_copy_only=False)
    flat_tensor = len(levels) == 1 < len(kind.shape)
    fixed = kind.shape if flat_tensor else kind.shape[1:]
    return [
        _rectangle(numbers, levels, row, fixed, locate, is_tensor=flat_tensor)
        for row in range(len(levels[0]) - 1)
    ]


def _rectangle(
    numbers: Array,
    levels: Sequence[Int64Array],
    row: int,
    fixed: Sequence[int | None],
    locate: Locate,
    *,
    is_tensor: bool,
) -> Array:
    """Return one value as an array, whose lists of each level must have one length."""
    start, end = levels[0][row : row + 2].tolist()
    if is_tensor:
        return numbers[start:end].reshape(fixed)  # type: ignore[arg-type]
    shape = [end - start]
    for starts, length in zip(levels[1:], fixed, strict=True):
        lengths = np.diff(starts[start : end + 1])
        if len(lengths) and lengths.min() != lengths.max():
            raise FormatError(
                f"{locate(row)}: expected lists of one length, got {lengths.min()} and "
                f"{lengths.max()}"
            )
        shape.append(int(lengths[0]) if len(lengths) else length or 0)
        start, end = int(starts[start]), int(starts[end])
    return numbers[start : start + math.prod(shape)].reshape(shape)


def spans(array: Any) -> tuple[Bytes, Int64Array, Int64Array]:
    """Return the buffer of a plain array of bytes or text, and each value's offset and length."""
    buffers = array.buffers()
    if types.is_fixed_size_binary(array.type):
        width = array.type.byte_width
        starts = (np.arange(len(array), dtype=np.int64) + array.offset) * width
        return _bytes(buffers[1]), starts, np.full(len(array), width, np.int64)
    if not len(array):
        return np.empty(0, np.uint8), np.empty(0, np.int64), np.empty(0, np.int64)
    offsets = np.frombuffer(buffers[1], np.int64, len(array) + 1, 8 * array.offset)
    return _bytes(buffers[2]), offsets[:-1], np.diff(offsets)


def _bytes(buffer: Any) -> Bytes:
    return (
        np.frombuffer(buffer, np.uint8)
        if buffer is not None and buffer.size
        else np.empty(0, np.uint8)
    )
