"""Finds the record batches of Arrow IPC files and streams by their headers, and reads some of them.

pyarrow reads the data of a batch along with its header, and a stream only from its start. Here the
headers alone are read: the number of rows of each batch, and its place. ``Without`` gives pyarrow a
stream as if it did not have some of its batches; its schema and its dictionaries stay.

Source: https://arrow.apache.org/docs/format/Columnar.html, "Serialization and Interprocess
Communication"; Message.fbs and File.fbs; the layout of tables in FlatBuffers.
"""

from __future__ import annotations

import io
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

_START = struct.Struct("<iI")
"""Start of a message: -1 and the size of its header in bytes; 0 at the end of a stream."""
_BLOCK = struct.Struct("<qi4xq")
"""Place of a message in a file: its offset, and the sizes of its header and of its data."""
_FOOTER = struct.Struct("<i6s")
_RECORD_BATCH = 3
"""Number of the kind of messages that are record batches."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A record batch: where its message begins and ends in the file, and its number of rows."""

    start_bytes: int
    end_bytes: int
    row_count: int


def find_batches(file: int, *, is_file: bool) -> list[Batch] | None:
    """Return the record batches, in their order; None if a header is not as it is written today.

    Args:
        file: descriptor of a file.
        is_file: True for an IPC file, which has a footer; False for a stream.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        starts = _starts_of_file(file) if is_file else None
        if starts is not None:
            found = [_message(file, start) for start in starts]
            return None if None in found else [batch for batch in found if batch is not None]
        return list(_batches_of_stream(file))
    except (struct.error, ValueError, OverflowError):
        return None


def _starts_of_file(file: int) -> list[int]:
    """Return the offsets of the messages of an IPC file that are record batches."""
    size_bytes = os.fstat(file).st_size
    at = size_bytes - _FOOTER.size
    length, _ = _FOOTER.unpack(os.pread(file, _FOOTER.size, max(0, at)))
    if not 0 < length <= at:
        raise ValueError("a footer that is not in the file")
    footer = os.pread(file, length, at - length)
    blocks = _Table.root(footer).vector(3)
    if blocks is None:
        return []
    count, first = blocks
    places = range(first, first + count * _BLOCK.size, _BLOCK.size)
    return [_BLOCK.unpack_from(footer, place)[0] for place in places]


def _batches_of_stream(file: int) -> Iterator[Batch]:
    position = 0
    while True:
        mark, size = _START.unpack(os.pread(file, _START.size, position))
        if mark != -1:
            raise ValueError("a message of the layout before Arrow 0.15")
        if not size:
            return
        found = _parse(file, position, size)
        if isinstance(found, Batch):
            yield found
            position = found.end_bytes
        else:
            position = found


def _message(file: int, start: int) -> Batch | None:
    if start < 0:
        raise ValueError("a message before the file")
    mark, size = _START.unpack(os.pread(file, _START.size, start))
    found = _parse(file, start, size) if mark == -1 else None
    return found if isinstance(found, Batch) else None


def _parse(file: int, start: int, size: int) -> Batch | int:
    """Return the record batch of a message; the end of a message that is none, in bytes."""
    if start + _START.size + size > os.fstat(file).st_size:
        raise ValueError("a header that is not in the file")
    header = os.pread(file, size, start + _START.size)
    message = _Table.root(header)
    end = start + _START.size + size + message.number(3, "<q")
    if end < start + _START.size:
        raise ValueError("a message that ends before it begins")
    if message.number(1, "<B") != _RECORD_BATCH:
        return end
    rows = message.table(2).number(0, "<q")
    if rows < 0:
        raise ValueError("a negative number of rows")
    return Batch(start, end, rows)


@dataclass(frozen=True, slots=True)
class _Table:
    """A table in a buffer of FlatBuffers; a field has a number."""

    data: bytes
    position: int

    @classmethod
    def root(cls, data: bytes) -> _Table:
        return cls(data, *struct.unpack_from("<I", data))

    def number(self, field: int, code: str) -> int:
        at = self._find(field)
        return 0 if at is None else int(struct.unpack_from(code, self.data, at)[0])

    def table(self, field: int) -> _Table:
        at = self._find(field)
        if at is None:
            raise ValueError("a message without its header")
        return _Table(self.data, at + struct.unpack_from("<I", self.data, at)[0])

    def vector(self, field: int) -> tuple[int, int] | None:
        """Return the number of items of a vector, and the position of the first."""
        at = self._find(field)
        if at is None:
            return None
        start = at + struct.unpack_from("<I", self.data, at)[0]
        return struct.unpack_from("<I", self.data, start)[0], start + 4

    def _find(self, field: int) -> int | None:
        table = self.position - struct.unpack_from("<i", self.data, self.position)[0]
        (size,) = struct.unpack_from("<H", self.data, table)
        slot = 4 + 2 * field
        if slot + 2 > size:
            return None
        (offset,) = struct.unpack_from("<H", self.data, table + slot)
        return self.position + offset if offset else None


class Without(io.RawIOBase):
    """A file as if some of its parts were not there, read from its start to its end.

    Args:
        file: descriptor of the file, which stays the caller's.
        parts: batches that it is read without, in their order.
    """

    def __init__(self, file: int, parts: Sequence[Batch]) -> None:
        self._file = file
        self._parts = list(reversed(parts))
        self._position = 0

    def readable(self) -> bool:
        """Return True; see ``io.RawIOBase``."""
        return True

    def readinto(self, target: Any) -> int:
        """Read the next bytes; return how many, 0 at the end of the file."""
        while self._parts and self._parts[-1].start_bytes == self._position:
            self._position = self._parts.pop().end_bytes
        size = len(target)
        if self._parts:
            size = min(size, self._parts[-1].start_bytes - self._position)
        count = os.preadv(self._file, [memoryview(target)[:size]], self._position)
        self._position += count
        return count
