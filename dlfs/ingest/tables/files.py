"""Opens Parquet files and Arrow IPC files and streams strictly, and reads their record batches.

The end of a file tells a truncated one from a damaged one: Parquet and IPC files end with their
magic, IPC streams with an end-of-stream mark. The format allows streams without that mark. Here it
is required, because nothing else shows that a stream was cut between two batches.

Parquet's times of type INT96 have nanoseconds of any year. Arrow reads them as nanoseconds of 64
bits, which overflow before 1677 and after 2262, or as microseconds, which lose digits. So a column
of them is read in both ways, which together have every digit, and becomes text.

Every record batch of an IPC file is validated before use, offsets and text, because the format has
no checksums. The pages of Parquet files are checked by their checksums if they have any.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np

from dlfs.base.extras import load_package
from dlfs.base.units import MIB
from dlfs.errors import DeviceError, DlfsError, FormatError, TruncatedError, UsageError
from dlfs.ingest.isolation.confines import allow_memory, note_location
from dlfs.ingest.source import (
    BLOCK_SAMPLES_MAX,
    BUFFER_BYTES,
    file_errors,
)
from dlfs.ingest.tables.arrow import pyarrow, types
from dlfs.ingest.tables.ipc_batches import Batch, Without, find_batches
from dlfs.ingest.tables.times import ValueProblem, numbers_of, timestamp_texts

_ENCRYPTED_MAGIC = b"PARE"
_PARQUET_MAGIC = (b"PAR1", _ENCRYPTED_MAGIC)
_FILE_MAGIC = b"ARROW1"
_FEATHER_1_MAGIC = b"FEA1"
_COPIES = 4
"""Memory that the batches of a file may take, in multiples of its size."""
_STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"


@dataclass(frozen=True, slots=True)
class Table:
    """An open file: its schema, and a function that reads some of its columns batch by batch."""

    schema: Any
    row_count: int | None
    """Number of rows; None if only reading the file gives it."""
    batches: Callable[[Sequence[str], int], Iterator[tuple[int, Any]]]
    """Function that yields record batches, each with the number of its first row.

    Args:
        columns: names of the columns to read.
        first: number of a row, 0 if the number of rows is unknown; batches before it are left out.
    """
    conflicts: Mapping[str, str] = field(default_factory=dict)
    """Error for each column whose values have no type in common, by name."""
    find_row_count: Callable[[], int | None] = lambda: None
    """Function that finds the number of rows by the headers of the batches, where ``row_count`` is
    None; None if they do not tell."""
    part_end: Callable[[int], int | None] = lambda _: None
    """Function that returns the number of the row behind the row group or record batch that has a
    row; None if only reading tells it. ``batches`` can begin there, also if that part is damaged.
    """
    joins_numbers: bool = False
    """True if integers and floats of one column are floats."""


@contextmanager
def open_parquet(path: str) -> Iterator[Table]:
    """Open a Parquet file, which is read in parts of its row groups.

    Raises:
        UsageError: pyarrow is not installed.
        DlfsError: the file is damaged, ends early, or cannot be read; its batches raise this too.
    """
    what = f"import {path}"
    parquet = load_package("pyarrow.parquet", extra="arrow", what=what)
    head, tail = _ends(path)
    if head[:4] in _PARQUET_MAGIC and tail[-4:] not in _PARQUET_MAGIC:
        raise TruncatedError(f"{what}: the file ends without its footer")
    if head[:4] == _ENCRYPTED_MAGIC:
        raise _encrypted(what)

    def open_file(unit: str) -> Any:
        return parquet.ParquetFile(
            path,
            buffer_size=MIB,
            pre_buffer=False,
            page_checksum_verification=True,
            coerce_int96_timestamp_unit=unit,
        )

    with ExitStack() as files:
        with _translated(what):
            file = files.enter_context(open_file("us"))
            schema = _readable(file.schema_arrow)
            old_times = _int96_columns(file)
        if not old_times:
            read = partial(_groups, file)
        else:
            with _translated(what):
                other = files.enter_context(open_file("ns"))
                schema = _with_texts(schema, old_times)
            read = partial(_both_units, file, other, old_times)

        def batches(columns: Sequence[str], first: int) -> Iterator[tuple[int, Any]]:
            with _translated(what):
                group, row = _group_of(file.metadata, first)
            return _numbered(read(columns, group), what, row, first)

        def part_end(row: int) -> int | None:
            group, begin = _group_of(file.metadata, row)
            return int(begin + file.metadata.row_group(group).num_rows)

        yield Table(schema, file.metadata.num_rows, batches, part_end=part_end)


@contextmanager
def open_ipc(path: str) -> Iterator[Table]:
    """Open an Arrow IPC file or stream, which is read by record batches with all their columns.

    Raises:
        UsageError: pyarrow is not installed.
        DlfsError: the file is damaged, ends early, or cannot be read; its batches raise this too.
    """
    what = f"import {path}"
    pyarrow = load_package("pyarrow", extra="arrow", what=what)
    head, tail = _ends(path)
    if head.startswith(_FEATHER_1_MAGIC):
        raise FormatError(f"{what}: expected Feather of version 2, got version 1")
    is_file = head.startswith(_FILE_MAGIC)
    if not tail.endswith(_FILE_MAGIC if is_file else _STREAM_END):
        kind, end = ("file", "its footer") if is_file else ("stream", "its end-of-stream mark")
        raise TruncatedError(f"{what}: expected an Arrow {kind}, got one that ends without {end}")
    with pyarrow.OSFile(path) as file:
        with _translated(what):
            open_reader = pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream
            reader = open_reader(file)
            schema = _readable(reader.schema)
        with reader, file_errors(what), open(path, "rb") as raw:

            def find_row_count() -> int | None:
                found = find_batches(raw.fileno(), is_file=is_file)
                return None if found is None else sum(batch.row_count for batch in found)

            def batches(_: Sequence[str], first: int) -> Iterator[tuple[int, Any]]:
                passed = _batches_before(raw.fileno(), first, is_file=is_file)
                row = sum(batch.row_count for batch in passed)
                if is_file:
                    numbers = range(len(passed), reader.num_record_batches)
                    yield from _numbered(map(_validated, map(reader.get_batch, numbers)), what, row)
                    return
                chosen = reader
                if passed:
                    rest = io.BufferedReader(Without(raw.fileno(), passed), MIB)
                    with _translated(what):
                        chosen = pyarrow.ipc.open_stream(pyarrow.PythonFile(rest, mode="r"))
                yield from _numbered(map(_validated, chosen), what, row)

            def part_end(row: int) -> int | None:
                found = find_batches(raw.fileno(), is_file=is_file) or []
                ends = accumulate(batch.row_count for batch in found)
                return next((end for end in ends if end > row), None)

            yield Table(schema, None, batches, find_row_count=find_row_count, part_end=part_end)


def _batches_before(file: int, row: int, *, is_file: bool) -> list[Batch]:
    """Return the record batches of a file whose rows are all before a row."""
    found = (find_batches(file, is_file=is_file) if row else None) or []
    ends = accumulate(batch.row_count for batch in found)
    return [batch for batch, end in zip(found, ends, strict=True) if end <= row]


def _readable(schema: Any) -> Any:
    """Return a schema after checking that its names are text; damage raises a ValueError."""
    pending = list(schema)
    while pending:
        field = pending.pop()
        if not isinstance(field.name, str):
            raise TypeError(f"expected names, got {field.name!r}")
        pending += [field.type.field(i) for i in range(field.type.num_fields)]
    return schema


def _group_of(metadata: Any, row: int) -> tuple[int, int]:
    """Return the row group of a Parquet file that has a row, and the number of its first row."""
    first = 0
    for number in range(metadata.num_row_groups):
        count = metadata.row_group(number).num_rows
        if row < first + count:
            return number, first
        first += count
    return metadata.num_row_groups, first


def _groups(file: Any, columns: Sequence[str], first: int) -> Iterator[Any]:
    """Yield the batches of a Parquet file, each of as many rows as a buffer holds of its group.

    Args:
        file: the file.
        columns: the columns to read.
        first: number of the first row group to read.
    """
    for number in range(first, file.num_row_groups):
        group = file.metadata.row_group(number)
        mean = max(1, group.total_byte_size // max(1, group.num_rows))
        size = max(1, min(BLOCK_SAMPLES_MAX, BUFFER_BYTES // mean))
        yield from file.iter_batches(size, row_groups=[number], columns=columns, use_threads=False)


def _int96_columns(file: Any) -> list[str]:
    """Return the columns of a Parquet file that are times of type INT96.

    Raises:
        ValueError: there are such times in lists or structs.
    """
    leaves = [file.schema.column(number) for number in range(len(file.schema.names))]
    found = [leaf.path for leaf in leaves if leaf.physical_type == "INT96"]
    schema = file.schema_arrow
    for path in found:
        at = schema.get_field_index(path)
        if at < 0 or not types.is_timestamp(schema.field(at).type):
            raise UsageError(
                f"column {path}: expected times of type INT96 only in columns of one value a row, "
                "got some in a list or struct, or in columns of one name; write them as TIMESTAMP"
            )
    return found


def _with_texts(schema: Any, names: Sequence[str]) -> Any:
    """Return a schema whose columns of some names are text."""
    for name in names:
        at = schema.get_field_index(name)
        schema = schema.set(at, schema.field(at).with_type(pyarrow.large_string()))
    return schema


def _both_units(
    file: Any, other: Any, names: Sequence[str], columns: Sequence[str], first: int
) -> Iterator[Any]:
    """Yield the batches of a Parquet file, with its times of type INT96 as text.

    Args:
        file: the file, opened so that such times are microseconds.
        other: the same, opened so that they are nanoseconds, which may have overflowed.
        names: the columns of such times.
        columns: the columns to read.
        first: number of the first row group to read.
    """
    chosen = [name for name in names if name in columns]
    if not chosen:
        yield from _groups(file, columns, first)
        return
    pairs = zip(_groups(file, columns, first), _groups(other, chosen, first), strict=True)
    for batch, precise in pairs:
        for name in chosen:
            at = batch.schema.get_field_index(name)
            try:
                texts = _int96_texts(batch.column(at), precise.column(name))
            except ValueProblem as error:
                raise FormatError(
                    f"row {error.index} of its batch: column {name}: {error}"
                ) from error
            batch = batch.set_column(at, batch.schema.field(at).with_type(texts.type), texts)
        yield batch


def _int96_texts(micros: Any, nanos: Any) -> Any:
    """Return the texts of times that were read as microseconds and as nanoseconds.

    The nanoseconds are right modulo 2^64, so that their difference is the digits that the
    microseconds lack.
    """
    numbers = numbers_of(micros)
    digits = (numbers_of(nanos).view(np.uint64) - numbers.view(np.uint64) * np.uint64(1000)).view(
        np.int64
    )
    if (wrong := np.flatnonzero((digits < 0) | (digits > 999))).size:
        at = int(wrong[0])
        raise ValueProblem(
            at, f"expected a time of type INT96, got {digits[at]} ns of a microsecond"
        )
    return timestamp_texts(micros, numbers, "us", digits)


def _validated(batch: Any) -> Any:
    batch.validate(full=True)
    return batch


def _numbered(
    batches: Iterator[Any], what: str, row: int = 0, first: int = 0
) -> Iterator[tuple[int, Any]]:
    """Yield batches with the numbers of their first rows, and errors that name these.

    Args:
        batches: the batches.
        what: the action and the file, for errors.
        row: number of the first row of the first batch.
        first: number of a row; batches before it are left out.
    """
    while True:
        with _translated(f"{what}: row {row}"):
            batch = next(batches, None)
        if batch is None:
            return
        if row + batch.num_rows > first:
            yield row, batch
        row += batch.num_rows


def _ends(path: str) -> tuple[bytes, bytes]:
    """Return the first and the last eight bytes of a file, and allow memory for its batches."""
    with file_errors(f"import {path}"), open(path, "rb") as file:
        head = file.read(8)
        size_bytes = os.fstat(file.fileno()).st_size
        file.seek(-min(8, size_bytes), os.SEEK_END)
        allow_memory(_COPIES * size_bytes)
        return head, file.read(8)


@contextmanager
def _translated(where: str) -> Iterator[None]:
    """Turn the exceptions of pyarrow into typed errors.

    Arrow's own errors are ValueErrors, KeyErrors and others; damaged sizes raise MemoryError.
    """
    note_location(where)
    try:
        yield
    except DlfsError:
        raise
    except OSError as error:
        if error.errno is not None:
            raise DeviceError(f"{where}: {error.strerror}", error.errno) from error
        raise _damaged(where, error) from error
    except (ValueError, LookupError, NotImplementedError, MemoryError, TypeError) as error:
        raise _damaged(where, error) from error


def _damaged(where: str, error: Exception) -> FormatError:
    text = " ".join(str(error).split()) or type(error).__name__
    if "decrypt" in text.lower():
        return _encrypted(where)
    return FormatError(f"{where}: the file is damaged: {text}")


def _encrypted(where: str) -> FormatError:
    return FormatError(
        f"{where}: expected a Parquet file that is not encrypted, got an encrypted one; write it "
        "again without encryption"
    )
