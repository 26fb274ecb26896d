"""Columns as an Arrow table (pyarrow; extra ``arrow``).

Numbers and text are the columns' own memory, which the table keeps; bools are packed into bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dlfs.base.extras import load_package
from dlfs.errors import FormatError
from dlfs.format.attributes import ColumnValues

if TYPE_CHECKING:
    import pyarrow


def to_arrow(columns: Mapping[str, ColumnValues | NDArray[Any]], where: str) -> pyarrow.Table:
    """Make an Arrow table of columns; only bools are copied.

    Args:
        columns: values by name, of one length; arrays ``[n, k]`` for vectors.
        where: name of the columns in errors.

    Raises:
        UsageError: pyarrow is not installed.
        FormatError: text is not UTF-8.
    """
    arrow = load_package("pyarrow", extra="arrow", what="read attributes as an Arrow table")
    arrays = [_array(arrow, values) for values in columns.values()]
    table: pyarrow.Table = arrow.table(arrays, names=list(columns))
    try:
        table.validate(full=True)
    except arrow.ArrowInvalid as error:
        raise FormatError(f"{where}: read attributes: {error}") from error
    return table


def arrow_type(arrow: Any, dtype: np.dtype[Any]) -> Any:
    """Return the Arrow type of a column; lists of a fixed size for vectors."""
    if dtype.kind in "OU":
        return arrow.string()
    made = arrow.from_numpy_dtype(dtype.base)
    for length in reversed(dtype.shape):
        made = arrow.list_(made, length)
    return made


def column_to_arrow(arrow: Any, values: NDArray[Any], kind: Any) -> Any:
    """Return the values of a column, or its vectors, ``[n, k]``, as an Arrow array of a type."""
    if values.ndim == 1:
        return arrow.array(values, kind)
    flat = arrow.array(values.reshape(-1), kind.value_type)
    return arrow.FixedSizeListArray.from_arrays(flat, values.shape[1])


def _array(arrow: Any, values: ColumnValues | NDArray[Any]) -> Any:
    if isinstance(values, np.ndarray):
        dtype = np.dtype((values.dtype, values.shape[1:]))
        return column_to_arrow(arrow, values, arrow_type(arrow, dtype))
    if values.fixed is not None:
        return arrow.array(values.fixed)
    assert values.strings is not None
    buffers = [arrow.py_buffer(values.strings.offsets), arrow.py_buffer(values.strings.text)]
    strings = arrow.LargeStringArray.from_buffers(len(values.strings), *buffers)
    if values.codes is None:
        return strings
    return arrow.DictionaryArray.from_arrays(arrow.array(values.codes), strings, safe=False)
