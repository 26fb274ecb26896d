"""Opens JSON Lines as a table: each line is an object, each key a column.

Python's ``json`` reads the lines, and Arrow finds the types: bool, 64-bit integers, floats, text,
lists and structs. Text stays text, also where it looks like a time. A key that a line lacks is a
null there. A file is read twice, first for the types: each column has the one type that holds all
its values. Integers and floats of one column are floats, since JSON has one kind of numbers; an
integer that no float equals is an error. Other types of one column, such as numbers and text, are
an error if the column is used.

A key that an object has twice is an error, and so is a line that is no object. Blank lines are
skipped. NaN and infinities, which Python's ``json`` writes, are floats. Names end with ``.gz`` or
``.zst`` if the lines are compressed.

Memory: the objects of 4 MiB of lines, or of one line, of at most ``LINE_BYTES_MAX``.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from dlfs.base.extras import load_package
from dlfs.base.units import KIB, MIB
from dlfs.errors import DeviceError, FormatError, LimitError, TruncatedError
from dlfs.ingest.bad_records import BadRecords, current
from dlfs.ingest.isolation.confines import note_location
from dlfs.ingest.source import check_unchanged, file_errors, file_state
from dlfs.ingest.tables.arrow import pyarrow
from dlfs.ingest.tables.files import Table
from dlfs.ingest.tables.schemas import join_types

LINE_BYTES_MAX = 256 * MIB
"""Most bytes of a line."""

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
"""Names of compressions for Arrow, by the endings of file names."""

COLUMNS_MAX = 4096
"""Most keys of all rows together."""
NESTING_MAX = 64
"""Most lists and objects in each other."""

_CHUNK_BYTES = 4 * MIB
_SMALL_CHUNK_BYTES = 4 * KIB
"""Bytes read at once of a compressed file that is damaged or cut, up to where it is."""
_SOUND_BEFORE = (TruncatedError, LimitError, DeviceError)
"""Errors of a file behind which no line can be found, and before which lines are sound; where a
compressed file is damaged otherwise, its checksum is that of the lines before, too."""
_BATCH_VALUES_MAX = 1 << 20
"""Most values of a batch, nulls included, which no bytes of the file stand for."""
_SHOWN_MAX = 60
_BOM = b"\xef\xbb\xbf"

Row = Mapping[str, Any]


@contextmanager
def open_json_lines(path: str) -> Iterator[Table]:
    """Open JSON Lines, and find the types of their columns.

    Raises:
        UsageError: pyarrow is not installed.
        FormatError: a line is no JSON object, or has a key twice.
        TruncatedError: the file ends in the middle of a line, or of its compression.
        LimitError: a line is too long.
        DlfsError: the file does not exist, cannot be read, or changed; batches raise this, too.
    """
    yield _find_types(path)


def json_lines_opener(
    known: Mapping[str, tuple[Any, int | None]] | None = None,
) -> Callable[[str], AbstractContextManager[Table]]:
    """Return a function that opens JSON Lines, and finds the types of each file only once.

    Args:
        known: schema and number of rows of files whose types were found before, by path.
    """
    tables: dict[str, Table] = {}
    bad = current()

    @contextmanager
    def open_file(path: str) -> Iterator[Table]:
        if path not in tables and known and path in known:
            with file_errors(f"import {path}"):
                state = file_state(path)
            tables[path] = _table(path, state, *known[path], {}, bad)
        elif path not in tables:
            tables[path] = _find_types(path)
        yield tables[path]

    return open_file


def _find_types(path: str) -> Table:
    what = f"import {path}"
    load_package("pyarrow", extra="arrow", what=what)
    with file_errors(what):
        state = file_state(path)
    found = _Types(what)
    count = bad_count = 0
    bad = current()
    for rows in bad.salvage(_chunks(path, bad), path, _SOUND_BEFORE):
        found.add(rows, count)
        count += len(rows)
        bad_count += rows.count(None)
    return _table(path, state, found.schema(), count - bad_count, found.conflicts, bad)


def _table(
    path: str,
    state: tuple[int, int],
    schema: Any,
    row_count: int | None,
    conflicts: Mapping[str, str],
    bad: BadRecords,
) -> Table:
    """Return the table of a file whose types are known.

    Args:
        path: path of the file.
        state: state of the file when its types were found.
        schema: the types of its columns.
        row_count: number of its rows.
        conflicts: see ``Table``.
        bad: bad records, which have those of the file already.
    """
    what, again = f"import {path}", bad.unreported()

    def batches(columns: Sequence[str], first: int) -> Iterator[tuple[int, Any]]:
        chosen = [field for field in schema if _is_used(field.name, columns)]
        chosen_schema = pyarrow.schema(chosen)
        row = 0
        step = max(1, _BATCH_VALUES_MAX // max(1, len(chosen)))
        for chunk in again.salvage(_chunks(path, again, first), path, _SOUND_BEFORE):
            for rows in _sound_parts(chunk, step):
                if rows and row + len(rows) > first:
                    arrays = [_array(rows, field, f"{what}: row", row) for field in chosen]
                    yield row, pyarrow.RecordBatch.from_arrays(arrays, schema=chosen_schema)
                row += len(rows) or 1
        check_unchanged(what, path, state)

    return Table(schema, row_count, batches, conflicts, joins_numbers=True)


class _Types:
    """The types of the columns of a file, which are joined as its lines are read."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._types: dict[str, Any] = {}
        self.conflicts: dict[str, str] = {}
        """Error for each column of values that have no type in common, by name."""

    def schema(self) -> Any:
        return pyarrow.schema(list(self._types.items()))

    def add(self, rows: Sequence[Row | None], first: int) -> None:
        """Join the types of some rows, of which one is the first; a bad row is None."""
        present: dict[str, list[Any]] = {}
        for row in filter(None, rows):
            for name, value in row.items():
                present.setdefault(name, []).append(value)
        for name, values in present.items():
            if name not in self.conflicts:
                self._types[name] = self._join(name, values, rows, first)
        if len(self._types) > COLUMNS_MAX:
            raise LimitError(
                f"{self._what}: row {first + len(rows)}: expected at most {COLUMNS_MAX} keys in "
                f"all rows, got {len(self._types)}"
            )

    def _join(
        self, name: str, values: Sequence[Any], rows: Sequence[Row | None], first: int
    ) -> Any:
        """Return the type of a column with further values; note if there is none."""
        known = self._types.get(name, pyarrow.null())
        joined = _joined(known, values)
        if joined is not None:
            return joined
        count = bisect_left(
            range(len(values)), True, key=lambda i: _joined(known, values[: i + 1]) is None
        )
        joined = _joined(known, values[:count])
        expected = f"{joined} as in the rows before"
        if _joined(pyarrow.null(), values[count : count + 1]) is None:
            expected = f"integers of 64 bits, UTF-8, lists and objects {NESTING_MAX} deep at most"
        number = [number for number, row in enumerate(rows) if row and name in row][count]
        self.conflicts[name] = (
            f"{self._what}: row {first + number}: column {name}: expected {expected}, got "
            f"{_shown(values[count])}; the options attributes, fields and column choose columns"
        )
        # A column of nulls would be left out without an error.
        return pyarrow.int64() if joined.equals(pyarrow.null()) else joined


def _joined(known: Any, values: Sequence[Any]) -> Any:
    """Return the type that holds the values of a known one and some others; None: none does."""
    try:
        found = pyarrow.array(values).type
    except _NOT_OF_ONE_TYPE:
        return None
    return None if _depth(found) > NESTING_MAX else join_types(known, found, joins_numbers=True)


def _depth(kind: Any) -> int:
    """Return how many lists and structs of a type are in each other."""
    level, depth = [kind], -1
    while level:
        level = [one.field(i).type for one in level for i in range(one.num_fields)]
        depth += 1
    return depth


_NOT_OF_ONE_TYPE = (ValueError, TypeError, OverflowError, NotImplementedError)
"""Errors of Arrow, which are ValueErrors or TypeErrors, for values that no type holds."""


def _array(rows: Sequence[Row], field: Any, where: str, first: int) -> Any:
    """Return a column of some rows."""
    values = [row.get(field.name) for row in rows]
    try:
        return pyarrow.array(values, field.type)
    except _NOT_OF_ONE_TYPE:
        for number, value in enumerate(values):
            try:
                pyarrow.array([value], field.type)
            except _NOT_OF_ONE_TYPE as error:
                raise FormatError(
                    f"{where} {first + number}: column {field.name}: expected {field.type}, got "
                    f"{_shown(value)}"
                ) from error
        raise


def _is_used(name: str, columns: Sequence[str]) -> bool:
    """Return True if a column, or a child of its structs, is one of some columns."""
    return any(column == name or column.startswith(f"{name}.") for column in columns)


def _shown(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]}..."


# ---- lines ---------------------------------------------------------------------------------------


def _sound_parts(rows: Sequence[Row | None], step: int) -> Iterator[list[Row]]:
    """Yield the rows in parts of at most ``step``, and for each bad one an empty part."""
    part: list[Row] = []
    for row in rows:
        if row is not None:
            part.append(row)
        if part and (row is None or len(part) == step):
            yield part
            part = []
        if row is None:
            yield []
    if part:
        yield part


def _chunks(path: str, bad: BadRecords, first: int = 0) -> Iterator[list[Row | None]]:
    """Yield the rows of a file, some at a time.

    Args:
        path: path of the file.
        bad: bad records, to which lines that are no objects are added; these rows are None.
        first: number of a row; of rows that all come before it, nothing is read.
    """
    count = 0
    for lines, is_last in _lines(path):
        before = sum(map(bool, map(bytes.strip, lines))) if count < first else 0
        if before and count + before <= first:
            yield [{}] * before
            count += before
            continue
        rows: list[Row | None] = []
        for number, line in enumerate(lines):
            if line.strip():
                is_end = is_last and number == len(lines) - 1
                name = f"row {count + len(rows)}"
                found: Row | None = None
                with bad.leave_out(path, name):
                    found = _row(line, f"import {path}: {name}", is_end=is_end)
                rows.append(found)
        note_location(f"import {path}: row {count}")
        yield rows
        count += len(rows)


def _row(line: bytes, where: str, *, is_end: bool) -> Row:
    """Return the object in a line; one that is the end of a file may be cut."""
    try:
        found = _decoder.decode(line.decode())
    except (ValueError, RecursionError) as error:
        kind = TruncatedError if is_end else FormatError
        raise kind(f"{where}: expected a JSON object in a line: {error}") from error
    if not isinstance(found, dict):
        raise FormatError(
            f"{where}: expected a JSON object in each line, got {_shown(found)}; of a file with "
            "one array, jq -c '.[]' makes such lines"
        )
    return found


def _unique(pairs: list[tuple[str, Any]]) -> Row:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} is there twice")
    return found


_decoder = json.JSONDecoder(object_pairs_hook=_unique)


def _lines(path: str) -> Iterator[tuple[list[bytes], bool]]:
    """Yield the lines of a file, some at a time; True with the last, which has no newline."""
    parts: list[bytes] = []
    size = position = 0
    for data in _pieces(path):
        head, newline, tail = data.rpartition(b"\n")
        if newline:
            lines = b"".join([*parts, head])
            yield (lines.removeprefix(_BOM) if position == 0 else lines).split(b"\n"), False
            position += 1
            parts, size = [], 0
        parts.append(tail)
        size += len(tail)
        if size > LINE_BYTES_MAX:
            raise LimitError(
                f"import {path}: expected lines of at most {LINE_BYTES_MAX} bytes, got more"
            )
    last = b"".join(parts)
    yield [last.removeprefix(_BOM) if position == 0 else last], True


def _pieces(path: str) -> Iterator[bytes]:
    """Yield the decompressed bytes of a file."""
    compression = next(
        (kind for ending, kind in COMPRESSIONS.items() if path.lower().endswith(ending)), None
    )
    done = 0
    with file_errors(f"import {path}"):
        for size in (_CHUNK_BYTES, _SMALL_CHUNK_BYTES):
            try:
                with pyarrow.input_stream(path, compression=compression) as stream:
                    left = done
                    while left:
                        left -= len(stream.read(min(left, size)))
                    while data := stream.read(size):
                        yield data
                        done += len(data)
                return
            except OSError as error:
                if error.errno is not None or compression is None:
                    raise
                if size > _SMALL_CHUNK_BYTES:
                    continue
                text = " ".join(str(error).split())
                kind = TruncatedError if text.startswith("Truncated") else FormatError
                raise kind(f"import {path}: the {compression} stream is damaged: {text}") from error
