"""Brings Arrow arrays into a few plain types, and reads samples, fields and attributes of these.

Plain are bool, integers, floats, ``large_string``, ``large_binary``, binary of a fixed size, lists
of these, tensors of a fixed shape, structs and maps. Dictionaries and run-end encoded arrays become
their values, list views lists, and an extension type what it stores, but ``arrow.bool8`` bool.
Times, durations and decimals become text (see ``tables.times``). A null stays one, also where the
values of a dictionary have it. Any other type, such as a union, stays as it is. The caller has
validated the arrays, so that their offsets lie in their buffers.

The option ``nulls`` says what a null is, also one in a list: an error, the default of its type (0,
False, empty text or bytes, an empty list), or the reason to leave its row out. A null float is NaN
under each of them.

These are the types of fields that plain values fit:

- Bytes and text are ``bytes`` and ``text``. Times and decimals are text, as in attributes.
- Bools, integers and floats are scalars, ``<f4[]``.
- Lists of them, also of lists, are arrays: a list of any length is a dimension that varies, a list
  of a fixed size one of this length, ``<f4[?,4]``. So are Arrow's tensors of a fixed shape. The
  lists within one value must have one length, because an array is rectangular.
- Types that ``datasets`` defines, such as ``Array2D``, are stored as lists, and taken as these.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt

from dlfs.errors import FormatError, UsageError
from dlfs.fields import FieldType
from dlfs.ingest.source import Array, Bytes, Int64Array
from dlfs.ingest.tables.arrow import compute, pyarrow, types
from dlfs.ingest.tables.times import ValueProblem, time_texts

_TIMES = ("is_timestamp", "is_date", "is_time", "is_duration", "is_decimal")
_SHORT_TEXT = ("is_string", "is_string_view")
_SHORT_BINARY = ("is_binary", "is_binary_view")
_LONG_LISTS = ("is_large_list", "is_list_view", "is_large_list_view")
LISTS = ("is_list", *_LONG_LISTS, "is_fixed_size_list")
_TEXT = ("is_large_string",)
_BYTES = ("is_large_binary", "is_fixed_size_binary", *_TEXT)
NUMBERS = ("is_boolean", "is_integer", "is_floating")

Locate = Callable[[int], str]
"""Function that returns the place of a value of an array, for errors."""

Nulls = Literal["error", "default", "skip"]
NullsOption = Annotated[
    Nulls, "nulls: an error, the default of their type, or skip their rows; a null float is NaN"
]

ROW_WITH_NULL = "row with a null"
"""Reason for which ``skip`` leaves rows out."""


def is_one_of(kind: Any, checks: tuple[str, ...]) -> bool:
    """Return True if one of the checks of ``pyarrow.types`` holds for a type."""
    return any(getattr(types, check)(kind) for check in checks)


def is_tensor(kind: Any) -> bool:
    """Return True if a type is Arrow's tensor of a fixed shape."""
    return hasattr(kind, "permutation")


def plain_type(kind: Any) -> Any:
    """Return the plain type that values of an Arrow type have."""
    if is_one_of(kind, ("is_dictionary", "is_run_end_encoded")):
        return plain_type(kind.value_type)
    if isinstance(kind, pyarrow.BaseExtensionType):
        if is_tensor(kind):
            return kind
        is_bool = kind.extension_name == "arrow.bool8"
        return pyarrow.bool_() if is_bool else plain_type(kind.storage_type)
    if is_one_of(kind, (*_TIMES, *_SHORT_TEXT)):
        return pyarrow.large_string()
    if is_one_of(kind, _SHORT_BINARY):
        return pyarrow.large_binary()
    if is_one_of(kind, ("is_fixed_size_list",)):
        return pyarrow.list_(_child_field(kind), kind.list_size)
    if is_one_of(kind, ("is_list",)):
        return pyarrow.list_(_child_field(kind))
    if is_one_of(kind, _LONG_LISTS):
        return pyarrow.large_list(_child_field(kind))
    if is_one_of(kind, ("is_struct",)):
        fields = [kind.field(i) for i in range(kind.num_fields)]
        return pyarrow.struct([field.with_type(plain_type(field.type)) for field in fields])
    if is_one_of(kind, ("is_map",)):
        return pyarrow.map_(plain_type(kind.key_type), plain_type(kind.item_type))
    return kind


def _child_field(kind: Any) -> Any:
    return kind.value_field.with_type(plain_type(kind.value_type))


def plain_array(array: Any) -> Any:
    """Return the values of an Arrow array in their plain type.

    Raises:
        ValueProblem: a value has no plain form; it names the index in ``array``.
        FormatError: a time zone is unknown.
        ArrowException: as Arrow says.
    """
    kind = array.type
    if plain_type(kind).equals(kind):
        return array
    if is_one_of(kind, ("is_dictionary",)):
        return plain_array(array.dictionary_decode())
    if is_one_of(kind, ("is_run_end_encoded",)):
        decode = compute.run_end_decode
        return plain_array(decode(array))
    if isinstance(kind, pyarrow.BaseExtensionType):
        stored = array.storage
        return stored.cast("bool") if kind.extension_name == "arrow.bool8" else plain_array(stored)
    if is_one_of(kind, _TIMES):
        return time_texts(array)
    if is_one_of(kind, LISTS):
        with _in_list(array):
            values = plain_array(array.flatten())
        return relisted(array, values, plain_type(kind))
    if is_one_of(kind, ("is_struct",)):
        children = [plain_array(child) for child in array.flatten()]
        fields = list(plain_type(kind))
        return pyarrow.StructArray.from_arrays(children, fields=fields, mask=array.is_null())
    if is_one_of(kind, ("is_map",)):
        return _plain_map(array)
    return array.cast(plain_type(kind))


def relisted(array: Any, values: Any, wanted: Any) -> Any:
    """Return lists of a type that are as long, and as null, as those of an array.

    Args:
        array: the lists.
        values: items of all lists that are not null, one after the other.
        wanted: type of the lists.
    """
    mask = array.is_null()
    if is_one_of(wanted, ("is_fixed_size_list",)):
        if array.null_count:  # null lists have items, too
            chosen = np.full((len(array), wanted.list_size), len(values), np.int64)
            chosen[~null_mask(array)] = np.arange(len(values)).reshape(-1, wanted.list_size)
            more = pyarrow.concat_arrays([values, pyarrow.nulls(1, values.type)])
            values = more.take(pyarrow.array(chosen.reshape(-1)))
        return pyarrow.FixedSizeListArray.from_arrays(values, type=wanted, mask=mask)
    is_long = is_one_of(wanted, ("is_large_list",))
    make = (pyarrow.LargeListArray if is_long else pyarrow.ListArray).from_arrays
    offsets = pyarrow.array(list_starts(array), pyarrow.int64() if is_long else pyarrow.int32())
    return make(offsets, values, type=wanted, mask=mask)


def _plain_map(array: Any) -> Any:
    first, last = array.offsets[0].as_py(), array.offsets[-1].as_py()
    keys, items = (plain_array(values[first:last]) for values in (array.keys, array.items))
    offsets = pyarrow.array(array.offsets.to_numpy() - first, pyarrow.int32())
    return pyarrow.MapArray.from_arrays(
        offsets, keys, items, type=plain_type(array.type), mask=array.is_null()
    )


def null_mask(array: Any) -> npt.NDArray[np.bool_]:
    """Return which values of an array are null, ``bool[n]``."""
    found: npt.NDArray[np.bool_] = array.is_null().to_numpy(zero_copy_only=False)
    return found


def list_starts(array: Any) -> npt.NDArray[np.int64]:
    """Return the start of each list in the flattened array, and the end of the last."""
    lengths = compute.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False)
    starts = np.zeros(len(array) + 1, np.int64)
    np.cumsum(lengths, out=starts[1:])
    return starts


@contextmanager
def _in_list(array: Any) -> Iterator[None]:
    """Turn the index of a problem in flattened lists into that of its list."""
    try:
        yield
    except ValueProblem as error:
        at = int(np.searchsorted(list_starts(array), error.index, side="right")) - 1
        raise ValueProblem(at, str(error)) from error


# ---- nulls ---------------------------------------------------------------------------------------


def rows_with_null(array: Any) -> npt.NDArray[np.bool_]:
    """Return which values of a plain array are null or have a null in a list, ``bool[n]``."""
    array = getattr(array, "storage", array)
    if is_one_of(array.type, ("is_floating",)):
        return np.zeros(len(array), np.bool_)
    found = null_mask(array) if array.null_count else np.zeros(len(array), np.bool_)
    if is_one_of(array.type, LISTS):
        inside = np.flatnonzero(rows_with_null(array.flatten()))
        rows = np.searchsorted(list_starts(array), inside, side="right") - 1
        found = found.copy()
        found[rows] = True
    return found


def without_nulls(array: Any) -> Any:
    """Return a plain array with the default of its type for each null."""
    if not rows_with_null(array).any():
        return array
    if is_tensor(array.type):
        return pyarrow.ExtensionArray.from_storage(array.type, without_nulls(array.storage))
    if is_one_of(array.type, LISTS):
        array = relisted(array, without_nulls(array.flatten()), array.type)
    return compute.coalesce(array, pyarrow.scalar(_default(array.type), array.type))


def _default(kind: Any) -> Any:
    """Return the default of a plain type as a Python value."""
    if is_one_of(kind, ("is_boolean",)):
        return False
    if is_one_of(kind, ("is_integer",)):
        return 0
    if is_one_of(kind, ("is_floating",)):
        return float("nan")
    if is_one_of(kind, ("is_fixed_size_binary",)):
        return bytes(kind.byte_width)
    if is_one_of(kind, ("is_large_string",)):
        return ""
    if is_one_of(kind, ("is_fixed_size_list",)):
        return [_default(kind.value_type)] * kind.list_size
    return [] if is_one_of(kind, LISTS) else b""


# ---- values --------------------------------------------------------------------------------------


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
    rows = range(len(levels[0]) - 1)
    if len(levels) == 1 < len(kind.shape):  # a tensor, stored flat
        return list(numbers.reshape(len(rows), *kind.shape))
    return [_rectangle(numbers, levels, row, kind, locate) for row in rows]


def _rectangle(
    numbers: Array, levels: Sequence[Int64Array], row: int, kind: FieldType, locate: Locate
) -> Array:
    """Return one value as an array, whose lists of each level must have one length."""
    start, end = levels[0][row : row + 2].tolist()
    shape = [end - start]
    for starts, length in zip(levels[1:], kind.shape[1:], strict=True):
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
