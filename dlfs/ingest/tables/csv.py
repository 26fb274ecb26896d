"""CSV and TSV tables with the columns' names in their first line, read whole.

A column of whole numbers of 64 bits becomes int64, one of numbers or empty fields float64 with NaN,
any other text; ``007`` is text, so that nothing of an identifier is lost. Fields are UTF-8; other
bytes stand as surrogate escapes in what is read as text on purpose, such as paths, and are an error
elsewhere.

Memory: every field as text.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dlfs.errors import FormatError
from dlfs.ingest.source import file_errors

DELIMITERS = {".csv": ",", ".tsv": "\t"}
"""By the suffix of the file's name."""

_WHOLE = re.compile(r"-?(0|[1-9][0-9]{0,18})")
_NUMBER = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?|[-+]?(inf|nan)|", re.I)
_LEADING_ZERO = re.compile(r"[-+]?0[0-9]")


@dataclass(frozen=True, slots=True)
class CsvTable:
    """The fields of a table: columns by name, and the number of the line that each row ends in."""

    columns: dict[str, list[str]]
    lines: list[int]


def read_csv(path: str, delimiter: str, *, where: str) -> CsvTable:
    """Read a table; empty lines are passed over.

    Args:
        path: of the file.
        delimiter: between fields.
        where: names it, for errors.

    Raises:
        NotFoundError: there is no such file.
        FormatError: a row has more or fewer fields than the first line, two columns have one name,
            or quotes make no sense.
        DeviceError: it cannot be read.
    """
    lines: list[int] = []
    try:
        with (
            file_errors(where),
            open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file,
        ):
            rows = csv.reader(file, delimiter=delimiter, strict=True)
            header = next(rows, [])
            columns: list[list[str]] = [[] for _ in header]
            for row in rows:
                if not row:
                    continue
                if len(row) != len(header):
                    raise FormatError(
                        f"{where}: line {rows.line_num}: expected {len(header)} values, "
                        f"got {len(row)}"
                    )
                lines.append(rows.line_num)
                for column, value in zip(columns, row, strict=True):
                    column.append(value)
    except csv.Error as error:
        raise FormatError(f"{where}: line {rows.line_num}: {error}") from error
    if len(set(header)) != len(header):
        raise FormatError(f"{where}: expected columns of different names, got {header}")
    return CsvTable(dict(zip(header, columns, strict=True)), lines)


def typed_column(values: Sequence[str], *, where: str) -> npt.NDArray[Any]:
    """Fields as the narrowest of int64, float64 and text that fits all of them.

    Args:
        values: of one column.
        where: names it, for errors.

    Raises:
        FormatError: text is not UTF-8.
    """
    if values and all(map(_WHOLE.fullmatch, values)):
        try:
            return np.array([int(value) for value in values], np.int64)
        except OverflowError:  # such as identifiers of 64 bits without a sign
            return text_column(values)
    numbers = all(map(_NUMBER.fullmatch, values)) and not any(map(_LEADING_ZERO.match, values))
    if numbers and any(values):
        return np.array([float(value) if value else np.nan for value in values])
    for value in values:
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise FormatError(f"{where}: expected text in UTF-8, got {value!r}") from error
    return text_column(values)


def text_column(values: Sequence[str]) -> npt.NDArray[Any]:
    """Fields as they are, ``object[n_values]``."""
    found = np.empty(len(values), object)
    found[:] = values
    return found
