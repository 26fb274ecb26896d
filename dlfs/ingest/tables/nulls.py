"""Finds nulls in plain Arrow arrays, and replaces them by the default of their type.

The option ``nulls`` says what a null is, also one in a list: an error, the default of its type (0,
False, empty text or bytes, an empty list), or the reason to leave its row out. A null float is NaN
under each of them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt

from dlfs.ingest.tables.arrow import pyarrow
from dlfs.ingest.tables.plain import LISTS, is_one_of, is_tensor, list_starts, null_mask, relisted

Nulls = Literal["error", "default", "skip"]
NullsOption = Annotated[
    Nulls, "nulls: an error, the default of their type, or skip their rows; a null float is NaN"
]

ROW_WITH_NULL = "row with a null"
"""Reason for which ``skip`` leaves rows out."""


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
    default = pyarrow.array([_default(array.type)], array.type)
    chosen = np.where(null_mask(array), len(array), np.arange(len(array)))
    return pyarrow.concat_arrays([array, default]).take(pyarrow.array(chosen))


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
