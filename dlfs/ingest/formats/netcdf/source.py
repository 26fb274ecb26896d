"""Imports NetCDF files, classic and 4, by the package netCDF4 (extra ``netcdf``).

An array is a variable; its name is that of its groups and its own. Values are imported as stored,
neither scaled nor masked. The library reads zeros behind the end of a truncated classic file, so
``classic`` checks the file's length first. A file of version 4 is an HDF5 file: h5py tells what was
never written in it, and reads the variables whose chunks are incomplete.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dlfs.ingest.arrays.file import ArrayFile, ArrayInfo, Missing, packing_of
from dlfs.ingest.arrays.rows import FileOptions
from dlfs.ingest.formats.hdf5.chunks import check_chunks, is_checked
from dlfs.ingest.formats.hdf5.parts import find_missing
from dlfs.ingest.formats.hdf5.source import read_rows
from dlfs.ingest.formats.netcdf.classic import check_length

if TYPE_CHECKING:
    import h5py
    import netCDF4

_NO_COORDINATE = "_nc4_non_coord_"
"""Beginning of the dataset's name, if a variable has the name of another dimension."""


class NetcdfFile(ArrayFile):
    """One open NetCDF file; see ``ArrayFile``."""

    def __init__(self, path: str) -> None:
        import h5py
        import netCDF4

        check_length(path)
        self._path = path
        self._file = netCDF4.Dataset(os.path.abspath(path), "r")
        self._storage = h5py.File(path, "r") if h5py.is_hdf5(path) else None
        self.skipped: Mapping[str, int] = {}
        try:
            self._variables = dict(_walk(self._file, ""))
            self.arrays = {
                name: self._describe(name, variable) for name, variable in self._variables.items()
            }
        except BaseException:
            self.close()
            raise

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
