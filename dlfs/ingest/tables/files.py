"""Opens Parquet files and Arrow IPC files and streams strictly, and reads their record batches.

The end of a file tells a truncated one from a damaged one: Parquet and IPC files end with their
magic, IPC streams with an end-of-stream mark. The format allows streams without that mark. Here it
is required, because nothing else shows that a stream was cut between two batches.

Every record batch of an IPC file is validated before use, offsets and text, because the format has
no checksums. The pages of Parquet files are checked by their checksums if they have any.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from dlfs.errors import DeviceError, DlfsError, FormatError, TruncatedError
from dlfs.ingest.registry import load_package
from dlfs.ingest.source import (
    BLOCK_SAMPLES_MAX,
    BUFFER_BYTES,
    file_errors,
)
from dlfs.units import MIB

_PARQUET_MAGIC = (b"PAR1", b"PARE")
_FILE_MAGIC = b"ARROW1"
_FEATHER_1_MAGIC = b"FEA1"
_STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"


@dataclass(frozen=True, slots=True)
class Table:
    """An open file: its schema, and a function that reads some of its columns batch by batch."""

    schema: Any
    row_count: int | None
    """Number of rows; None if only reading the file gives it."""
    batches: Callable[[Sequence[str]], Iterator[Any]]


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
    with _translated(what):
        file = parquet.ParquetFile(
            path, buffer_size=MIB, pre_buffer=False, page_checksum_verification=True
        )
        schema = _readable(file.schema_arrow)
    with file:
        yield Table(
            schema,
            file.metadata.num_rows,
            lambda columns: _numbered(_groups(file, columns), what),
        )


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
        with reader:
            batches = _file_batches(reader) if is_file else reader
            yield Table(schema, None, lambda _: _numbered(_validated(batches), what))


def _readable(schema: Any) -> Any:
    """Return a schema after checking that its names are text; damage raises a ValueError."""
    pending = list(schema)
    while pending:
        field = pending.pop()
        if not isinstance(field.name, str):
            raise TypeError(f"expected names, got {field.name!r}")
        pending += [field.type.field(i) for i in range(field.type.num_fields)]
    return schema


def _groups(file: Any, columns: Sequence[str]) -> Iterator[Any]:
    for number in range(file.num_row_groups):
        group = file.metadata.row_group(number)
        mean = max(1, group.total_byte_size // max(1, group.num_rows))
        yield from file.iter_batches(
            max(1, min(BLOCK_SAMPLES_MAX, BUFFER_BYTES // mean)),
            row_groups=[number],
            columns=columns,
            use_threads=False,
        )


def _file_batches(reader: Any) -> Iterator[Any]:
    for number in range(reader.num_record_batches):
        yield reader.get_batch(number)


def _validated(batches: Any) -> Iterator[Any]:
    for batch in batches:
        batch.validate(full=True)
        yield batch


def _numbered(batches: Iterator[Any], what: str) -> Iterator[Any]:
    """Yield batches, with errors that name the row of the file."""
    row = 0
    while True:
        with _translated(f"{what}: row {row}"):
            batch = next(batches, None)
        if batch is None:
            return
        yield batch
        row += batch.num_rows


def _ends(path: str) -> tuple[bytes, bytes]:
    """Return the first and the last eight bytes of a file."""
    with file_errors(f"import {path}"), open(path, "rb") as file:
        head = file.read(8)
        file.seek(-min(8, os.fstat(file.fileno()).st_size), os.SEEK_END)
        return head, file.read(8)


@contextmanager
def _translated(where: str) -> Iterator[None]:
    """Turn the exceptions of pyarrow into typed errors.

    Arrow's own errors are ValueErrors, KeyErrors and others; damaged sizes raise MemoryError.
    """
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
    return FormatError(f"{where}: the file is damaged: {text}")
