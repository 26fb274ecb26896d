"""Columns as an Arrow table (pyarrow; extra ``arrow``).

Numbers and text are the columns' own memory, which the table keeps; bools are packed into bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dlfs.errors import FormatError, UsageError
from dlfs.extras import install_command
from dlfs.format.attributes import ColumnValues, Strings

if TYPE_CHECKING:
    import pyarrow


def import_arrow(what: str) -> Any:
    """Import the module ``pyarrow``.

    Args:
        what: the purpose, for the error.

    Raises:
        UsageError: it is not installed.
    """
    try:
        import pyarrow
    except ImportError as error:
        raise UsageError(
            f"{what}: expected pyarrow to be installed: {install_command('arrow')}"
        ) from error
    return pyarrow


def to_arrow(columns: Mapping[str, ColumnValues], where: str) -> pyarrow.Table:
    """Make an Arrow table of columns; only bools are copied.

    Args:
        columns: values by name, of one length.
        where: name of the columns in errors.

    Raises:
        UsageError: pyarrow is not installed.
        FormatError: text is not UTF-8.
    """
    arrow = import_arrow("read attributes as an Arrow table")
    arrays = [_array(arrow, values) for values in columns.values()]
    table: pyarrow.Table = arrow.table(arrays, names=list(columns))
    try:
        table.validate(full=True)
    except arrow.ArrowInvalid as error:
        raise FormatError(f"{where}: read attributes: {error}") from error
    return table


def _array(arrow: Any, values: ColumnValues) -> Any:
    if values.fixed is not None:
        return arrow.array(values.fixed)
    assert values.strings is not None
    strings = _strings(arrow, values.strings)
    if values.codes is None:
        return strings
    return arrow.DictionaryArray.from_arrays(arrow.array(values.codes), strings, safe=False)


def _strings(arrow: Any, strings: Strings) -> Any:
    buffers = [arrow.py_buffer(strings.offsets), arrow.py_buffer(strings.text)]
    return arrow.LargeStringArray.from_buffers(len(strings), *buffers)
