"""Checks that a classic NetCDF file is as long as its header requires.

Beyond the end of a classic file (CDF-1, CDF-2 and CDF-5) the netCDF library returns zeros or the
content of its buffer, so that a truncated file looks complete. The header gives the offset and the
size of each variable; this module reads the header only. Neither netCDF4 nor another package
reports this length.

Source: the NetCDF Classic Format Specification, and that of CDF-5.
"""

from __future__ import annotations

import math
import os
from typing import BinaryIO

from dlfs.errors import FormatError, TruncatedError

_TYPE_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 4, 6: 8, 7: 1, 8: 2, 9: 4, 10: 8, 11: 8}
_STREAMING = {4: 0xFFFFFFFF, 8: 0xFFFFFFFFFFFFFFFF}
_COUNT_MAX = 1 << 24
"""Most entries accepted in one list of a header."""


def check_length(path: str) -> None:
    """Check that a classic file is as long as its header requires; accept any other file.

    Raises:
        TruncatedError: the file is too short.
        FormatError: the header is malformed.
        OSError: the file cannot be read.
    """
    with open(path, "rb") as file:
        magic = file.read(4)
        if magic[:3] != b"CDF" or magic[3:] not in (b"\1", b"\2", b"\5"):
            return
        actual = os.fstat(file.fileno()).st_size
        expected = _Header(path, file, magic[3]).end_bytes()
    if actual < expected:
        raise TruncatedError(f"import {path}: expected {expected} bytes, got {actual}")


class _Header:
    """Reads the fields of a header in order; they are big-endian."""

    def __init__(self, path: str, file: BinaryIO, version: int) -> None:
        self._path = path
        self._file = file
        self._count_bytes = 8 if version == 5 else 4
        self._offset_bytes = 4 if version == 1 else 8

    def end_bytes(self) -> int:
        """Return the offset behind the last variable, in bytes."""
        records = self._number(self._count_bytes)
        if records == _STREAMING[self._count_bytes]:
            records = 0  # unknown while the file was written: any length is right
        dimensions = []
        for _ in range(self._list(10)):
            self._skip_name()
            dimensions.append(self._number(self._count_bytes))
        self._skip_attributes()
        fixed_end, begins, record_bytes, sizes = 0, [], 0, []
        for _ in range(self._list(11)):
            begin, size, by_record = self._variable(dimensions)
            if by_record:
                begins.append(begin)
                sizes.append(size)
            else:
                fixed_end = max(fixed_end, begin + size)
        if not sizes or not records:
            return fixed_end
        record_bytes = sizes[0] if len(sizes) == 1 else sum(-(-size // 4) * 4 for size in sizes)
        last = max(begin + size for begin, size in zip(begins, sizes, strict=True))
        return max(fixed_end, last + (records - 1) * record_bytes)

    def _variable(self, dimensions: list[int]) -> tuple[int, int, bool]:
        """Return a variable's offset, its size (of one record) in bytes, and if it has records."""
        self._skip_name()
        numbers = [self._number(self._count_bytes) for _ in range(self._count())]
        self._skip_attributes()
        item_bytes = self._type_bytes()
        self._number(self._count_bytes)  # the field vsize overflows; the dimensions do not
        begin = self._number(self._offset_bytes)
        if any(number >= len(dimensions) for number in numbers):
            raise self._nonsense("a dimension that there is not")
        lengths = [dimensions[number] for number in numbers]
        by_record = bool(lengths) and lengths[0] == 0
        return begin, math.prod(lengths[1:] if by_record else lengths) * item_bytes, by_record

    def _skip_attributes(self) -> None:
        for _ in range(self._list(12)):
            self._skip_name()
            item_bytes = self._type_bytes()
            self._skip(self._number(self._count_bytes) * item_bytes)

    def _list(self, tag: int) -> int:
        """Return the number of entries in a list; an absent list is two zeros."""
        found, count = self._number(4), self._count()
        if found != tag and (found, count) != (0, 0):
            raise self._nonsense(f"the tag {found} for a list of {tag}")
        return count

    def _count(self) -> int:
        count = self._number(self._count_bytes)
        if count > _COUNT_MAX:
            raise self._nonsense(f"{count} entries")
        return count

    def _type_bytes(self) -> int:
        kind = self._number(4)
        if kind not in _TYPE_BYTES:
            raise self._nonsense(f"a type {kind}")
        return _TYPE_BYTES[kind]

    def _skip_name(self) -> None:
        self._skip(self._number(self._count_bytes))

    def _skip(self, size_bytes: int) -> None:
        self._file.seek(-(-size_bytes // 4) * 4, os.SEEK_CUR)

    def _number(self, size_bytes: int) -> int:
        data = self._file.read(size_bytes)
        if len(data) < size_bytes:
            raise TruncatedError(
                f"import {self._path}: expected {size_bytes} bytes of the header at byte "
                f"{self._file.tell() - len(data)}, got {len(data)}"
            )
        return int.from_bytes(data, "big")

    def _nonsense(self, got: str) -> FormatError:
        return FormatError(
            f"import {self._path}: expected a NetCDF header before byte {self._file.tell()}, "
            f"got {got}"
        )
