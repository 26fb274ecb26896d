"""Imports NetCDF files, classic and 4, by the package netCDF4 (extra ``netcdf``).

An array is a variable; its name is that of its groups and its own. Values are imported as stored,
neither scaled nor masked. The library reads zeros behind the end of a truncated classic file, so
the file's length is checked first. A file of version 4 is an HDF5 file: h5py tells what was
never written in it, and reads the variables whose chunks are incomplete.
"""

from __future__ import annotations

import math
import os
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import numpy.typing as npt

from dlfs.base.closing import closed_on_error
from dlfs.errors import FormatError, TruncatedError
from dlfs.ingest.arrays.file import ArrayFile, ArrayInfo, Missing, packing_of
from dlfs.ingest.arrays.rows import FileOptions
from dlfs.ingest.formats.hdf5.chunks import check_chunks, is_checked
from dlfs.ingest.formats.hdf5.parts import find_missing
from dlfs.ingest.formats.hdf5.source import read_rows

if TYPE_CHECKING:
    import h5py
    import netCDF4

_TYPE_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 4, 6: 8, 7: 1, 8: 2, 9: 4, 10: 8, 11: 8}
_STREAMING = {4: 0xFFFFFFFF, 8: 0xFFFFFFFFFFFFFFFF}
_COUNT_MAX = 1 << 24
"""Most entries accepted in one list of a header."""

_NO_COORDINATE = "_nc4_non_coord_"
"""Beginning of the dataset's name, if a variable has the name of another dimension."""


class NetcdfFile(ArrayFile):
    """One open NetCDF file; see ``ArrayFile``."""

    def __init__(self, path: str) -> None:
        import h5py
        import netCDF4

        _check_length(path)
        self._path = path
        self._file = netCDF4.Dataset(os.path.abspath(path), "r")
        self._storage = h5py.File(path, "r") if h5py.is_hdf5(path) else None
        self.skipped: Mapping[str, int] = {}
        with closed_on_error(self):
            self._variables = dict(_walk(self._file, ""))
            self.arrays = {
                name: self._describe(name, variable) for name, variable in self._variables.items()
            }

    def read(self, array: ArrayInfo, first: int, out: npt.NDArray[Any]) -> None:
        """Read rows; see ``ArrayFile``."""
        variable, dataset = self._variables[array.name], self._dataset(array.name)
        if dataset is not None and (array.missing is not None or is_checked(dataset)):
            self._read_stored(array, first, out)
        else:
            out[...] = variable[first : first + len(out)] if array.shape else variable[...]

    def _read_stored(self, array: ArrayInfo, first: int, out: npt.NDArray[Any]) -> None:
        """Read rows as they are stored; what is missing is the variable's fill value.

        The library leaves memory as it is where a variable without a fill value has no chunk.
        """
        variable, dataset = self._variables[array.name], self._dataset(array.name)
        assert dataset is not None
        if array.missing is not None:
            if variable.get_fill_value() is None:
                raise ValueError("missing parts of a variable that has no fill value")
            out[...] = variable.get_fill_value()
        if not dataset.shape:
            return
        whole = (first + len(out), *array.row_shape)
        shape = tuple(map(min, dataset.shape, whole))
        if shape[0] <= first or not all(shape):
            return
        stored = np.zeros((shape[0] - first, *dataset.shape[1:]), out.dtype)
        read_rows(dataset, replace(array, shape=dataset.shape), first, stored, self._path)
        inner = tuple(slice(0, length) for length in shape[1:])
        out[(slice(0, len(stored)), *inner)] = stored[(slice(None), *inner)]

    def read_values(self, array: ArrayInfo, first: int, count: int) -> Sequence[object]:
        """Read values; see ``ArrayFile``."""
        variable, dataset = self._variables[array.name], self._dataset(array.name)
        if not array.shape:
            return [variable[...]]
        if dataset is not None and is_checked(dataset):
            rows = min(count, dataset.shape[0] - first)
            check_chunks(dataset, first, rows, lacks_some=array.missing is not None)
        return list(variable[first : first + count])

    def close(self) -> None:
        """Close the file; see ``ArrayFile``."""
        if self._storage is not None:
            self._storage.close()
        if self._file.isopen():
            self._file.close()

    def _dataset(self, name: str) -> h5py.Dataset | None:
        """Return the HDF5 dataset of a variable; None in a classic file."""
        if self._storage is None:
            return None
        group, base = posixpath.split(name)
        other = posixpath.join(group, _NO_COORDINATE + base)
        return self._storage[other if other in self._storage else name]

    def _describe(self, name: str, variable: netCDF4.Variable[Any]) -> ArrayInfo:
        packing = packing_of(variable.__dict__)
        described = replace(_describe(name, variable), packing=packing)
        dataset = self._dataset(name)
        if dataset is None:
            return described
        try:
            missing = find_missing(dataset, self._path)
        except (ValueError, OSError, KeyError, RuntimeError) as error:
            return replace(described, problem=" ".join(str(error).split()))
        rows = described.count - (dataset.shape[0] if dataset.shape else 1)
        if dataset.shape != described.shape and rows > 0:
            missing = Missing(rows, described.count, "row", f"row {dataset.shape[0]}")
        return replace(described, missing=missing)


class NetcdfOptions(FileOptions):
    """Options of NetCDF files."""

    file_class = NetcdfFile
    packages = ("netCDF4", "h5py")
    extra = "netcdf"


def _walk(group: netCDF4.Dataset, prefix: str) -> Iterator[tuple[str, netCDF4.Variable[Any]]]:
    for name, variable in group.variables.items():
        variable.set_auto_maskandscale(False)
        variable.set_auto_chartostring(False)
        yield prefix + name, variable
    for name, inner in group.groups.items():
        yield from _walk(inner, f"{prefix}{name}/")


def _describe(name: str, variable: netCDF4.Variable[Any]) -> ArrayInfo:
    import netCDF4

    kind, shape = variable.datatype, variable.shape
    if variable.dtype is str:
        return ArrayInfo(
            name, np.dtype(np.uint8), shape, kind="text" if len(shape) <= 1 else "other"
        )
    if isinstance(kind, netCDF4.VLType):
        fits = isinstance(kind.dtype, np.dtype) and len(shape) == 1
        return ArrayInfo(name, np.dtype(kind.dtype), shape, kind="ragged" if fits else "other")
    chunks = variable.chunking()
    chunk_rows = chunks[0] if isinstance(chunks, list) and chunks else 1
    return ArrayInfo(name, np.dtype(variable.dtype), shape, chunk_rows)


# ---- classic files -------------------------------------------------------------------------------


def _check_length(path: str) -> None:
    """Check that a classic file is as long as its header requires; accept any other file.

    Beyond the end of a classic file (CDF-1, CDF-2 and CDF-5) the netCDF library returns zeros or
    the content of its buffer, so that a truncated file looks complete. The header gives the offset
    and the size of each variable. Neither netCDF4 nor another package reports this length.

    Source: the NetCDF Classic Format Specification, and that of CDF-5.

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
