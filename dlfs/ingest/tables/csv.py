"""Reads CSV and TSV tables whose first line names the columns.

A column of whole numbers of 64 bits becomes int64; one of numbers and empty fields becomes float64
with NaN; any other becomes text. So does a column with a number that these cannot represent: a
whole number that a float changes, as of 20 digits, or one beyond the range of floats. ``007`` is
text, because it may be an identifier. Fields are UTF-8. Other bytes become surrogate escapes in
text that the caller asked for, such as paths, and are an error elsewhere.

The csv module of Python parses the file. pyarrow and pandas would add a dependency, and turn
``007`` into 7.

Memory: every field as text.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dlfs.errors import FormatError
from dlfs.ingest.bad_records import BadRecords
from dlfs.ingest.source import file_errors

DELIMITERS = {".csv": ",", ".tsv": "\t"}
"""Delimiter by the suffix of the file's name."""

_WHOLE = re.compile(r"0|-?[1-9][0-9]{0,18}")
_DIGITS = re.compile(r"[-+]?[0-9]+")
_NONZERO = re.compile(r"[1-9]")
_NUMBER = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?|[-+]?(inf|nan)|", re.I)
_EXACT_DIGITS = 16
"""Least characters of a whole number that a float of 64 bits may change."""
_LEADING_ZERO = re.compile(r"[-+]?0[0-9]")


def read_csv(
    path: str, delimiter: str, *, where: str, bad: BadRecords | None = None
) -> tuple[dict[str, list[str]], list[int]]:
    """Read a table; empty lines are ignored.

    Args:
        path: path of the table.
        delimiter: character between fields.
        where: the action and the file, for errors.
        bad: bad records, to which malformed rows are added; by default they are errors.

    Returns:
        The columns by name, and the number of the last line of each row.

    Raises:
        NotFoundError: the file does not exist.
        FormatError: a row has more or fewer fields than the first line, two columns have one name,
            or quotes are malformed.
        DeviceError: the file cannot be read.
    """
    bad = bad or BadRecords()
    lines: list[int] = []
    with (
        file_errors(where),
        open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file,
    ):
        rows = csv.reader(file, delimiter=delimiter, strict=True)
        header = _next_row(rows, where) or []
        columns: list[list[str]] = [[] for _ in header]
        is_end = False
        while not is_end:
            try:
                row = _next_row(rows, where)
                is_end = row is None
                if row and len(row) != len(header):
                    raise FormatError(
                        f"{where}: line {rows.line_num}: expected {len(header)} values, "
                        f"got {len(row)}"
                    )
            except FormatError as error:
                bad.note(path, f"line {rows.line_num}", error)
                continue
            if row:
                lines.append(rows.line_num)
                for column, value in zip(columns, row, strict=True):
                    column.append(value)
    if len(set(header)) != len(header):
        raise FormatError(f"{where}: expected columns of different names, got {header}")
    return dict(zip(header, columns, strict=True)), lines


def _next_row(rows: Any, where: str) -> list[str] | None:
    """Return the next row of a reader; None at its end."""
    try:
        row: list[str] | None = next(rows, None)
    except csv.Error as error:
        raise FormatError(f"{where}: line {rows.line_num}: {error}") from error
    return row


def typed_column(values: Sequence[str], *, where: str) -> npt.NDArray[Any]:
    """Convert fields to int64, float64 or text, the first that fits all of them.

    Raises:
        FormatError: text is not UTF-8.
    """
    if values and all(map(_WHOLE.fullmatch, values)):
        try:
            return np.array([int(value) for value in values], np.int64)
        except OverflowError:  # such as unsigned identifiers of 64 bits
            return text_column(values)
    numbers = all(map(_NUMBER.fullmatch, values)) and not any(map(_LEADING_ZERO.match, values))
    if numbers and any(values) and all(map(_is_float, filter(None, values))):
        return np.array([float(value) if value else np.nan for value in values])
    for value in values:
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise FormatError(f"{where}: expected text in UTF-8, got {value!r}") from error
    return text_column(values)


def _is_float(text: str) -> bool:
    """Return True if a float represents a number: a whole one exactly, others without overflow."""
    number = float(text)
    if _DIGITS.fullmatch(text):
        return len(text) < _EXACT_DIGITS or number == int(text)
    if math.isinf(number):
        return "inf" in text.lower()
    mantissa = text.lower().partition("e")[0]
    return number != 0 or not _NONZERO.search(mantissa)


def text_column(values: Sequence[str]) -> npt.NDArray[Any]:
    """Return fields as text, ``object[n_values]``."""
    return np.array(values, object)
