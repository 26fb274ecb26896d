"""Imports the files in a list: text with a path in each line, or CSV or TSV with attributes.

Paths are relative to the folder of the list, or to ``root``. Normalised (``./a//b`` is ``a/b``),
they are the samples' paths; they must not lead out of the folder. A path that is listed twice is an
error that names both lines.

A text file has one path a line, with any characters but line ends; empty lines are ignored. If it
ends with a NUL, as that of ``find -print0``, NULs end the paths instead. Standard input, ``-``, is
a text, whose paths are relative to the current folder.

CSV and TSV files have the names of columns in their first line. The option ``path`` names the
column of paths; by default it is ``path``, ``file_name`` or ``filename``, or else the first. The
others become attributes, unless ``attributes`` names some; ``tables.csv`` says of which types.

The list is read before anything is written, so memory is that of its columns. Files are then read
as those of a folder, in any order; layout ``path`` keeps the order of the list.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from dlfs.errors import FormatError, UsageError
from dlfs.ingest.bad_records import BadRecords, RecordError, current
from dlfs.ingest.files import FilesSource
from dlfs.ingest.registry import STDIN
from dlfs.ingest.source import (
    PATH_COLUMNS,
    Array,
    check_attribute_names,
    clean_path,
    file_errors,
    show,
    single_path,
    source_name,
)
from dlfs.ingest.standard_input import StandardInput
from dlfs.ingest.tables.csv import DELIMITERS, read_csv, typed_column


@dataclass(frozen=True, slots=True)
class ListOptions:
    """Options of a list of files."""

    root: Annotated[str | None, "folder that paths are relative to; by default the list's"] = None
    path: Annotated[
        str | None, "column of paths; by default path, file_name, filename or the first"
    ] = None
    attributes: Annotated[
        tuple[str, ...] | None, "columns to store as attributes; by default all others"
    ] = None
    links: Annotated[Literal["follow", "error"], "symbolic links: follow or refuse"] = "follow"

    def open(self, paths: Sequence[str]) -> ListSource:
        """Open one list; see ``ListSource``."""
        return ListSource(single_path(paths, "list"), self)


class ListSource(FilesSource):
    """The files of a list.

    Args:
        path: path of the list.
        options: options of the format.

    Raises:
        NotFoundError: the list or its root folder does not exist.
        UsageError: a column does not exist.
        FormatError: a line is malformed, or a path leads out of the folder or is listed twice.
        LimitError: a path is too long.
        DeviceError: the list or one of its files cannot be read.
    """

    def __init__(self, path: str, options: ListOptions) -> None:
        self._paths, self._columns = _read_list(path, options, current())
        root = options.root if options.root is not None else str(Path(path).parent)
        super().__init__(source_name([path]), root, follow_links=options.links == "follow")

    def _find_files(self) -> Mapping[str, Array]:
        self._table.add_all(self._paths)
        return self._columns


def _read_list(
    path: str, options: ListOptions, bad: BadRecords
) -> tuple[list[bytes], dict[str, Array]]:
    """Read the paths of a list, and its attributes by name."""
    delimiter = DELIMITERS.get(Path(path).suffix.lower())
    if delimiter is not None:
        return _read_columns(path, delimiter, options, bad)
    if options.path or options.attributes:
        raise UsageError(f"import {path}: expected columns in a .csv or .tsv file")
    with (
        file_errors(f"import {source_name([path])}"),
        closing(StandardInput()) if path == STDIN else open(path, "rb") as file,
    ):
        raw = file.read()
    return [*_paths(_lines(raw), source_name([path]), bad)], {}


def _lines(raw: bytes) -> Iterator[tuple[int, str]]:
    """Yield the paths in a text, with the numbers of their lines; a NUL at its end ends paths."""
    text = raw.decode("utf-8-sig", "surrogateescape")
    end = "\0" if text.endswith("\0") else "\n"
    for number, line in enumerate(text.split(end), 1):
        path = line if end == "\0" else line.removesuffix("\r")
        if path:
            yield number, path


def _read_columns(
    path: str, delimiter: str, options: ListOptions, bad: BadRecords
) -> tuple[list[bytes], dict[str, Array]]:
    where = f"import {path}"
    columns, lines = read_csv(path, delimiter, where=where, bad=bad)
    names = list(columns)
    if not names:
        raise FormatError(f"{where}: line 1: expected names of columns, got none")
    column = options.path or next((name for name in PATH_COLUMNS if name in names), names[0])
    wanted = [name for name in names if name != column]
    if options.attributes is not None:
        wanted = list(options.attributes)
    for name in (column, *wanted):
        if name not in names:
            raise UsageError(f"{where}: expected column {name}, got {', '.join(names)}")
    check_attribute_names(wanted, where)
    if bad.are_allowed:
        chosen = [columns[name] for name in wanted]
        lines, columns = _text_rows(lines, columns, chosen, path, bad)
    found = _paths(zip(lines, columns[column], strict=True), path, bad)
    paths, rows = [*found], [*found.values()]
    if options.path is None and column not in PATH_COLUMNS:
        _check_first_column(paths, column, options.root or str(Path(path).parent), where)
    return paths, {
        name: typed_column([columns[name][row] for row in rows], where=f"{where}: column {name}")
        for name in wanted
    }


def _text_rows(
    lines: list[int],
    columns: dict[str, list[str]],
    chosen: Sequence[list[str]],
    path: str,
    bad: BadRecords,
) -> tuple[list[int], dict[str, list[str]]]:
    """Return the lines and columns without the rows whose attributes are not UTF-8."""
    rows = []
    for row, line in enumerate(lines):
        try:
            "".join(values[row] for values in chosen).encode()
            rows.append(row)
        except UnicodeEncodeError as error:
            bad.note(path, f"line {line}", FormatError(f"expected text in UTF-8: {error}"))
    return [lines[row] for row in rows], {
        name: [values[row] for row in rows] for name, values in columns.items()
    }


def _check_first_column(paths: list[bytes], column: str, root: str, where: str) -> None:
    """Check that the first column has paths, if none is named so: that the first file exists."""
    first = os.path.join(os.fsencode(root), paths[0]) if paths else b""
    if first and not os.path.lexists(first):
        raise UsageError(
            f"{where}: expected the paths of files in the column {' or '.join(PATH_COLUMNS)}, got "
            f"none, and no file {show(paths[0])} as the first column, {column}, has it; the option "
            "path names the column, root their folder; a table that has the samples themselves is "
            "imported as Parquet or Arrow"
        )


def _paths(lines: Iterable[tuple[int, str]], where: str, bad: BadRecords) -> dict[bytes, int]:
    """Return the paths in some lines, with their positions among the lines."""
    known: dict[bytes, int] = {}
    found: dict[bytes, int] = {}
    for row, (number, text) in enumerate(lines):
        here = f"import {where}: line {number}"
        try:
            path = clean_path(os.fsencode(text), here)
            if not path:
                raise FormatError(f"{here}: expected a path, got {text!r}")
            if path in known:
                raise FormatError(
                    f"{here}: expected each path once, got {show(path)} in line {known[path]} too"
                )
        except RecordError as error:
            bad.note(where, f"line {number}", error)
            continue
        known[path] = number
        found[path] = row
    return found
