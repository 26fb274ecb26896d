"""Reads the values of Arrow arrays, and gives the type of field that they fit.

- Bytes and text are ``bytes`` and ``text``. Times and decimals are text, as in attributes.
- Bools, integers and floats are scalars, ``<f4[]``.
- Lists of them, also of lists, are arrays: a list of any length is a dimension that varies, a list
  of a fixed size one of this length, ``<f4[?,4]``. So are Arrow's tensors of a fixed shape. The
  lists within one value must have one length, because an array is rectangular.
- Types that ``datasets`` defines, such as ``Array2D``, are stored as lists, and taken as these.

A null is an error, except that a null float is NaN.

The caller has validated the arrays, so that their offsets lie in their buffers.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dlfs.errors import FormatError, UsageError
from dlfs.fields import FieldType

TEXT = ("is_string", "is_large_string", "is_string_view")
BYTES = ("is_binary", "is_large_binary", "is_fixed_size_binary", "is_binary_view", *TEXT)
NUMBERS = ("is_boolean", "is_integer", "is_floating")
SCALARS = (*NUMBERS, "is_temporal", "is_decimal", *TEXT)
"""Checks of ``pyarrow.types`` for the types of text, of bytes and of attributes."""

_LISTS = ("is_list", "is_large_list", "is_fixed_size_list")

Locate = Callable[[int], str]
"""Function that returns the place of a value of an array, for errors."""


def is_one_of(kind: Any, checks: Sequence[str]) -> bool:
    """Return True if one of the checks of ``pyarrow.types`` holds for a type."""
    types = importlib.import_module("pyarrow.types")
    return any(getattr(types, check)(kind) for check in checks)


def is_scalar(kind: Any) -> bool:
    """Return True if values of a type can be attributes."""
    return is_one_of(_plain(kind), SCALARS)


def is_vector(kind: Any) -> bool:
    """Return True if values of a type can be vectors of an attribute: lists of k numbers."""
    size = getattr(kind, "list_size", 0)  # only fixed-size lists have one
    return size > 0 and is_one_of(kind.value_type, NUMBERS)


def field_type(kind: Any) -> FieldType | None:
    """Return the type of field that values of an Arrow type fit; None if there is none."""
    kind = _plain(kind)
    if is_one_of(kind, BYTES):
        return FieldType("text" if is_one_of(kind, TEXT) else "bytes")
    shape: list[int | None] = []
    if hasattr(kind, "permutation"):  # a tensor of a fixed shape
        if kind.permutation not in (None, list(range(len(kind.shape)))):
            return None
        shape, kind = list(kind.shape), kind.value_type
    while is_one_of(kind, _LISTS):
        shape.append(kind.list_size if is_one_of(kind, ("is_fixed_size_list",)) else None)
        kind = _plain(kind.value_type)
    if is_one_of(kind, NUMBERS):
        try:
            return FieldType.array(np.dtype(kind.to_pandas_dtype()).str, shape)
        except UsageError:  # too many dimensions, or too long for a sample
            return None
    return FieldType("text") if is_one_of(kind, SCALARS) and not shape else None


def field_values(array: Any, kind: FieldType, locate: Locate) -> Sequence[Any]:
    """Return the values of an Arrow array as those of a field.

    Args:
        array: array of a type for which ``field_type`` returns a type.
        kind: that type.
        locate: returns the place of a value, for errors.

    Raises:
        FormatError: a value is null, or lists in it differ in length.
    """
    array = getattr(array, "storage", array)
    floats = kind.kind == "array" and not kind.shape and kind.dtype.kind == "f"
    if array.null_count and not floats:
        raise FormatError(f"{locate(first_null(array))}: expected a value, got null")
    if kind.kind == "bytes":
        data, offsets, lengths = spans(array)
        ends = zip(offsets.tolist(), lengths.tolist(), strict=True)
        return [data.data[start : start + length] for start, length in ends]
    if kind.kind == "text":
        return _texts(array.cast("large_string"), locate)
    if not kind.shape:
        if hasattr(array, "dictionary"):
            array = array.dictionary_decode()
        numbers = array.to_numpy(zero_copy_only=False)
        return [numbers[i : i + 1].reshape(()) for i in range(len(numbers))]
    return _arrays(array, kind, locate)


def _texts(array: Any, locate: Locate) -> list[str]:
    """Return the strings of an array; Parquet files may have some that are not UTF-8."""
    data, offsets, lengths = spans(array)
    texts = []
    for start, length in zip(offsets.tolist(), lengths.tolist(), strict=True):
        try:
            texts.append(str(data.data[start : start + length], "utf-8"))
        except UnicodeDecodeError as error:
            raise FormatError(
                f"{locate(len(texts))}: expected text in UTF-8, got other bytes: {error}"
            ) from error
    return texts


def _arrays(array: Any, kind: FieldType, locate: Locate) -> list[npt.NDArray[Any]]:
    """Return nested lists of numbers as arrays."""
    if not len(array):
        return []
    levels: list[npt.NDArray[np.int64]] = []

    def find(index: int) -> str:
        """Locate the value that has an item of the lists above the present level."""
        for starts in reversed(levels):
            index = int(np.searchsorted(starts, index, side="right")) - 1
        return locate(index)

    while is_one_of(array.type, _LISTS):
        if array.null_count:
            raise FormatError(f"{find(first_null(array))}: expected no null in a list, got one")
        levels.append(_starts(array))
        array = array.flatten()
        array = getattr(array, "storage", array)
    if array.null_count and kind.dtype.kind != "f":
        raise FormatError(f"{find(first_null(array))}: expected no null in a list, got one")
    numbers = array.to_numpy(zero_copy_only=False)
    is_tensor = len(levels) == 1 < len(kind.shape)
    fixed = kind.shape if is_tensor else kind.shape[1:]
    return [
        _rectangle(numbers, levels, row, fixed, locate, is_tensor=is_tensor)
        for row in range(len(levels[0]) - 1)
    ]


def _rectangle(
    numbers: npt.NDArray[Any],
    levels: Sequence[npt.NDArray[np.int64]],
    row: int,
    fixed: Sequence[int | None],
    locate: Locate,
    *,
    is_tensor: bool,
) -> npt.NDArray[Any]:
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


def _starts(array: Any) -> npt.NDArray[np.int64]:
    """Return the start of each list in the flattened array, and the end of the last."""
    if is_one_of(array.type, ("is_fixed_size_list",)):
        return np.arange(len(array) + 1, dtype=np.int64) * int(array.type.list_size)
    if not len(array):
        return np.zeros(1, np.int64)
    offsets: npt.NDArray[np.int64] = array.offsets.to_numpy().astype(np.int64)
    offsets -= offsets[0]
    return offsets


def first_null(array: Any) -> int:
    """Return the index of the first null of an array that has one."""
    return int(array.is_null().to_numpy(zero_copy_only=False).argmax())


def spans(
    array: Any,
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the values buffer of an array of bytes or text, and each value's offset and length."""
    types = importlib.import_module("pyarrow.types")
    if types.is_dictionary(array.type):
        array = array.dictionary_decode()
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


def _plain(kind: Any) -> Any:
    """Return the type of the values of a dictionary, or of what an extension type stores."""
    pyarrow = importlib.import_module("pyarrow")
    if pyarrow.types.is_dictionary(kind):
        return kind.value_type
    if isinstance(kind, pyarrow.BaseExtensionType) and not hasattr(kind, "permutation"):
        return kind.storage_type
    return kind
