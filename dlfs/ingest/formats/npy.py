"""Imports NumPy's files: NPY, one array, and NPZ, an archive of arrays.

The array of an NPY file has no name; the file's name begins the samples' paths. Its rows are read
into the buffer directly; those of an array in Fortran order are gathered from all over the file.
Attributes are in separate files next to it: ``label=labels.npy``.

An array in an NPZ archive has its member's name. Members are read from their first byte to their
last, which checks their CRC; compressed members cannot be read otherwise. An array in Fortran order
has no rows in the order of its bytes, so it is read as a whole.

Arrays of Python objects are left out, because reading them would run code.
"""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from dlfs.errors import FormatError, TruncatedError
from dlfs.ingest.arrays.file import ArrayFile, ArrayInfo
from dlfs.ingest.arrays.rows import FileOptions
from dlfs.ingest.fields import read_npy_header

_SKIP_BYTES = 1 << 20
"""Bytes read at once to skip rows."""


class NpyFile(ArrayFile):
    """One NPY file, and the files of its attributes; see ``ArrayFile``."""

    def __init__(self, path: str) -> None:
        self._folder = Path(path).parent
        self._open: dict[str, _Npy] = {"": _Npy(path)}
        self.arrays = {"": self._open[""].describe("")}
        self.skipped: Mapping[str, int] = {}

    def find(self, reference: str, group: str) -> ArrayInfo:  # noqa: ARG002
        """Find the array in another file, by its path from this file's folder."""
        return self._at(reference).describe(reference)

    def read(self, array: ArrayInfo, first: int, out: npt.NDArray[Any]) -> None:
        """Read rows; see ``ArrayFile``."""
        self._at(array.name).read(first, out)

    def close(self) -> None:
        """Close the files; see ``ArrayFile``."""
        for file in self._open.values():
            file.close()

    def _at(self, name: str) -> _Npy:
        if name not in self._open:
            path = self._folder / name
            if not path.is_file():
                raise KeyError(name)
            self._open[name] = _Npy(str(path))
        return self._open[name]


class NpyOptions(FileOptions):
    """Options of NPY files."""

    file_class = NpyFile


class _Npy:
    """One array in a file."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._file = io.FileIO(path)
        try:
            self._header = _Header(self._file)
            self._start = self._file.tell()
            expected = self._start + self._header.describe("").size_bytes
            actual = os.fstat(self._file.fileno()).st_size
            if self._header.has_bytes and actual < expected:
                raise TruncatedError(f"import {path}: expected {expected} bytes, got {actual}")
        except BaseException:
            self.close()
            raise

    def describe(self, name: str) -> ArrayInfo:
        return self._header.describe(name)

    def close(self) -> None:
        self._file.close()

    def read(self, first: int, out: npt.NDArray[Any]) -> None:
        array = self.describe("")
        if not self._header.fortran:
            self._read_at(self._start + first * array.row_bytes, out)
            return
        columns = np.empty(self._header.stored(len(out)), array.dtype)
        if len(out) == array.count:
            self._read_at(self._start, columns)
        else:
            size, stride = array.dtype.itemsize, array.count * array.dtype.itemsize
            for number, column in enumerate(columns.reshape(-1, len(out))):
                self._read_at(self._start + number * stride + first * size, column)
        out[...] = columns.transpose()

    def _read_at(self, position: int, out: npt.NDArray[Any]) -> None:
        view = out.reshape(-1).view(np.uint8).data
        while len(view):
            got = os.preadv(self._file.fileno(), [view], position)
            if got == 0:
                raise EOFError(f"expected {len(view)} more bytes at byte {position}, got none")
            view, position = view[got:], position + got


class NpzFile(ArrayFile):
    """One open NPZ archive; see ``ArrayFile``."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._archive = zipfile.ZipFile(path)
        self._members: dict[str, zipfile.ZipInfo] = {}
        self._streams: dict[str, _Stream] = {}
        self.arrays: dict[str, ArrayInfo] = {}
        skipped = 0
        try:
            for member in self._archive.infolist():
                if member.filename.endswith(".npy"):
                    self._add(member, member.filename.removesuffix(".npy"))
                else:
                    skipped += 1
        except BaseException:
            self.close()
            raise
        self.skipped: Mapping[str, int] = {"member that is no array": skipped} if skipped else {}

    def read(self, array: ArrayInfo, first: int, out: npt.NDArray[Any]) -> None:
        """Read rows; see ``ArrayFile``."""
        stream = self._streams.get(array.name)
        if stream is None or stream.row > first:
            stream = self._open(array.name)
        stream.read(first, out)
        if stream.row == array.count:
            self._streams.pop(array.name).close()

    def close(self) -> None:
        """Close the archive; see ``ArrayFile``."""
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()
        self._archive.close()

    def _add(self, member: zipfile.ZipInfo, name: str) -> None:
        if name in self._members:
            raise FormatError(f"import {self._path}: expected each member once, got {name!r} twice")
        self._members[name] = member
        with self._archive.open(member) as file:
            header = _Header(file)
            self.arrays[name] = header.describe(name)
            data_bytes = member.file_size - file.tell()
        size = self.arrays[name].size_bytes
        if header.has_bytes and data_bytes != size:
            raise FormatError(
                f"import {self._path}: {name}: expected {size} bytes, got {data_bytes}"
            )

    def _open(self, name: str) -> _Stream:
        if name in self._streams:
            self._streams.pop(name).close()
        self._streams[name] = _Stream(self._archive.open(self._members[name]), self.arrays[name])
        return self._streams[name]


class NpzOptions(FileOptions):
    """Options of NPZ archives."""

    file_class = NpzFile


class _Stream:
    """A member of an archive, read from its first row to its last."""

    def __init__(self, file: IO[bytes], array: ArrayInfo) -> None:
        self._file = file
        self._array = array
        self._header = _Header(file)
        self._start = file.tell()
        self._columns: npt.NDArray[Any] | None = None
        self.row = 0

    def close(self) -> None:
        self._file.close()

    def read(self, first: int, out: npt.NDArray[Any]) -> None:
        if self._header.fortran:
            if self._columns is None:
                self._columns = np.empty(self._header.stored(self._array.count), out.dtype)
                self._read(self._columns)
            out[...] = self._columns.transpose()[first : first + len(out)]
        else:
            if first > self.row:
                self._file.seek(self._start + first * self._array.row_bytes)
            self._read(out)
        self.row = first + len(out)
        if self.row == self._array.count and self._file.read(1):  # reading the end checks the CRC
            raise ValueError("more bytes than the array has")

    def _read(self, out: npt.NDArray[Any]) -> None:
        view = out.reshape(-1).view(np.uint8).data
        for at in range(0, len(view), _SKIP_BYTES):
            part = view[at : at + _SKIP_BYTES]
            data = self._file.read(len(part))
            if len(data) < len(part):
                raise EOFError(f"expected {len(part)} more bytes, got {len(data)}")
            part[:] = data


class _Header:
    """The header of an array: NPY format 1, 2 or 3."""

    def __init__(self, file: IO[bytes]) -> None:
        self._shape, fortran, self._dtype = read_npy_header(file)
        self.fortran = fortran and len(self._shape) > 1

    @property
    def has_bytes(self) -> bool:
        return not self._dtype.hasobject

    def describe(self, name: str) -> ArrayInfo:
        return ArrayInfo(
            name, self._dtype, self._shape, kind="fixed" if self.has_bytes else "other"
        )

    def stored(self, rows: int) -> tuple[int, ...]:
        """Return the shape of some rows as they lie in the file, the last axis densest."""
        shape = (rows, *self._shape[1:])
        return shape[::-1] if self.fortran else shape
