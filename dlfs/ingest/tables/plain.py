"""Brings Arrow arrays into the few plain types that samples, fields and attributes are made of.

Plain are bool, integers, floats, ``large_string``, ``large_binary``, binary of a fixed size, lists
of these, tensors of a fixed shape, structs and maps. Dictionaries and run-end encoded arrays become
their values, list views lists, and an extension type what it stores, but ``arrow.bool8`` bool.
Times, durations and decimals become text (see ``tables.times``). A null stays one, also where the
values of a dictionary have it. Any other type, such as a union, stays as it is.

The caller has validated the arrays, so that their offsets lie in their buffers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from dlfs.ingest.tables.arrow import compute, pyarrow, types
from dlfs.ingest.tables.times import ValueProblem, time_texts

_TIMES = ("is_timestamp", "is_date", "is_time", "is_duration", "is_decimal")
_TEXT = ("is_string", "is_string_view")
_BINARY = ("is_binary", "is_binary_view")
_SHORT_LISTS = ("is_list",)
_LONG_LISTS = ("is_large_list", "is_list_view", "is_large_list_view")
LISTS = (*_SHORT_LISTS, *_LONG_LISTS, "is_fixed_size_list")


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
    if is_one_of(kind, (*_TIMES, *_TEXT)):
        return pyarrow.large_string()
    if is_one_of(kind, _BINARY):
        return pyarrow.large_binary()
    if is_one_of(kind, ("is_fixed_size_list",)):
        return pyarrow.list_(_child_field(kind), kind.list_size)
    if is_one_of(kind, _SHORT_LISTS):
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
