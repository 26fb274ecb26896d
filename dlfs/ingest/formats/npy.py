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

from dlfs.base.closing import closed_on_error
from dlfs.errors import FormatError, TruncatedError
from dlfs.ingest.arrays.file import ArrayFile, ArrayInfo, Kind, reading
from dlfs.ingest.arrays.rows import FileOptions
from dlfs.ingest.bad_records import BadRecords, current
from dlfs.ingest.fields import read_npy_header

_READ_BYTES = 1 << 20
"""Bytes read at once."""


class NpyFile(ArrayFile):
    """One NPY file, and the files of its attributes; see ``ArrayFile``."""

    def __init__(self, path: str) -> None:
        self._folder = Path(path).parent
        self._open = {"": _open_npy(path)}
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
        for npy in self._open.values():
            npy.file.close()

    def _at(self, name: str) -> _Npy:
        if name not in self._open:
            path = self._folder / name
            if not path.is_file():
                raise KeyError(name)
            self._open[name] = _open_npy(str(path))
        return self._open[name]


class NpyOptions(FileOptions):
    """Options of NPY files."""

    file_class = NpyFile


class NpzFile(ArrayFile):
    """One open NPZ archive; see ``ArrayFile``."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._archive = zipfile.ZipFile(path)
        self._members: dict[str, zipfile.ZipInfo] = {}
        self._streams: dict[str, _Member] = {}
        self.arrays: dict[str, ArrayInfo] = {}
        skipped = 0
        bad = current()
        with closed_on_error(self):
            for member in self._archive.infolist():
                if not member.filename.endswith(".npy"):
                    skipped += 1
                    continue
                name = member.filename.removesuffix(".npy")
                with bad.leave_out(path, name), reading(path):
                    self._add(member, name)
        self.skipped: Mapping[str, int] = {"member that is no array": skipped} if skipped else {}

    def leave_out_damaged(self, bad: BadRecords) -> None:
        """Remove members whose CRC is wrong: only the end of a member shows it."""
        for name in list(self.arrays):
            with bad.leave_out(self._path, name), reading(f"{self._path}: {name}"):
                try:
                    with self._archive.open(self._members[name]) as file:
                        while file.read(_READ_BYTES):
                            pass
                except Exception:
                    del self.arrays[name]
                    raise

    def read(self, array: ArrayInfo, first: int, out: npt.NDArray[Any]) -> None:
        """Read rows; see ``ArrayFile``."""
        stream = self._streams.get(array.name)
        if stream is None or stream.row > first:
            if stream is not None:
                stream.file.close()
            stream = _Member(self._archive.open(self._members[array.name]))
            self._streams[array.name] = stream
        stream.read(first, out)
        if stream.row == array.count:
            self._streams.pop(array.name).file.close()

    def close(self) -> None:
        """Close the archive; see ``ArrayFile``."""
        for stream in self._streams.values():
            stream.file.close()
        self._streams.clear()
        self._archive.close()

    def _add(self, member: zipfile.ZipInfo, name: str) -> None:
        if name in self._members:
            raise FormatError(f"import {self._path}: expected each member once, got {name!r} twice")
        self._members[name] = member
        with self._archive.open(member) as file:
            npy = _Member(file)
            array = npy.describe(name)
            data_bytes = member.file_size - npy.start
        if npy.has_bytes and data_bytes != array.size_bytes:
            raise FormatError(
                f"import {self._path}: {name}: expected {array.size_bytes} bytes, got {data_bytes}"
            )
        self.arrays[name] = array


class NpzOptions(FileOptions):
    """Options of NPZ archives."""

    file_class = NpzFile


def _open_npy(path: str) -> _Npy:
    """Open a file, and check that it has the whole array, or take the rows that it has."""
    file = io.FileIO(path)
    with closed_on_error(file):
        npy = _Npy(file)
        array = npy.describe("")
        expected = npy.start + array.size_bytes
        actual = os.fstat(file.fileno()).st_size
        if npy.has_bytes and actual < expected:
            error = TruncatedError(f"import {path}: expected {expected} bytes, got {actual}")
            if array.in_order or not array.shape:
                raise error
            count = (actual - npy.start) // array.row_bytes
            current().note(path, f"rows {count}..{array.count - 1}", error, array.count - count)
            npy.shape = count, *array.row_shape
    return npy


class _Npy:
    """An array of NPY format 1, 2 or 3, in a file that is open at its header."""

    in_order = False

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.shape, fortran, self._dtype = read_npy_header(file)
        self._fortran = fortran and len(self.shape) > 1
        self.has_bytes = not self._dtype.hasobject
        self.start = file.tell()

    def describe(self, name: str) -> ArrayInfo:
        kind: Kind = "fixed" if self.has_bytes else "other"
        in_order = self._fortran or self.in_order
        return ArrayInfo(name, self._dtype, self.shape, kind=kind, in_order=in_order)

    def read(self, first: int, out: npt.NDArray[Any]) -> None:
        array = self.describe("")
        if self._fortran:
            out[...] = self._columns(first, len(out)).transpose()
        else:
            self._read_at(first * array.row_bytes, out)

    def _columns(self, first: int, count: int) -> npt.NDArray[Any]:
        """Return rows of an array in Fortran order as they lie in the file."""
        array = self.describe("")
        columns = np.empty((count, *array.row_shape)[::-1], array.dtype)
        size, stride = array.dtype.itemsize, array.count * array.dtype.itemsize
        if count == array.count:
            self._read_at(0, columns)
        else:
            for number, column in enumerate(columns.reshape(-1, count)):
                self._read_at(number * stride + first * size, column)
        return columns

    def _read_at(self, position: int, out: npt.NDArray[Any]) -> None:
        """Read what lies at a position behind the header."""
        view = out.reshape(-1).view(np.uint8).data
        position += self.start
        self.file.seek(position)
        while len(view):
            got = self.file.readinto(view[:_READ_BYTES])  # type: ignore[attr-defined]
            if not got:
                raise EOFError(f"expected {len(view)} more bytes at byte {position}, got none")
            view, position = view[got:], position + got


class _Member(_Npy):
    """A member of an archive, read from its first row to its last."""

    in_order = True

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self._whole: npt.NDArray[Any] | None = None
        self.row = 0

    def read(self, first: int, out: npt.NDArray[Any]) -> None:
        super().read(first, out)
        self.row = first + len(out)
        if self.row == self.describe("").count and self.file.read(1):  # the end checks the CRC
            raise ValueError("more bytes than the array has")

    def _columns(self, first: int, count: int) -> npt.NDArray[Any]:
        if self._whole is None:
            self._whole = super()._columns(0, self.describe("").count)
        return self._whole[..., first : first + count]
