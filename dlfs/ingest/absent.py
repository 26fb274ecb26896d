"""Gives a record a value where a feature, or a member of its key, is absent or empty.

The option ``nulls`` of the record formats says it, as that of tables does: an error that names the
record, the default of the type (0, False, empty text, bytes or vectors; NaN for floats), or the
reason to leave the record out.
"""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np

from dlfs.errors import FormatError
from dlfs.fields import FieldType
from dlfs.ingest.tables.nulls import Nulls

AbsentOption = Annotated[
    Nulls,
    "features or members that a record lacks: an error, the default of their type, or skip the "
    "record; a float is NaN",
]

HINT = "--option nulls=default takes the default of its type, nulls=skip leaves the record out"


class AbsentError(FormatError):
    """A record lacks a value that is used."""


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
