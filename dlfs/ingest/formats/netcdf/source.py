"""Imports NetCDF files, classic and 4, by the package netCDF4 (extra ``netcdf``).

An array is a variable; its name is that of its groups and its own. Values are imported as stored,
neither scaled nor masked. The library reads zeros behind the end of a truncated classic file, so
``classic`` checks the file's length first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dlfs.ingest.arrays.file import ArrayFile, ArrayInfo, ArrayOptions
from dlfs.ingest.arrays.rows import ArraySource
from dlfs.ingest.formats.netcdf.classic import check_length
from dlfs.ingest.registry import load_package

if TYPE_CHECKING:
    import netCDF4


@dataclass(frozen=True, slots=True, kw_only=True)
class NetcdfOptions(ArrayOptions):
    """Options of NetCDF files."""

    def open(self, paths: Sequence[str]) -> ArraySource:
        """Open NetCDF files."""
        load_package("netCDF4", extra="netcdf", what=f"import {paths[0]}")
        return ArraySource(paths, NetcdfFile, self)


class NetcdfFile(ArrayFile):
    """One open NetCDF file; see ``ArrayFile``."""

    def __init__(self, path: str) -> None:
        import netCDF4

        check_length(path)
        self._file = netCDF4.Dataset(path, "r")
        self.skipped: Mapping[str, int] = {}
        try:
            self._variables = dict(_walk(self._file, ""))
            self.arrays = {
                name: _describe(name, variable) for name, variable in self._variables.items()
            }
        except BaseException:
            self.close()
            raise

    def read(self, array: ArrayInfo, first: int, out: npt.NDArray[Any]) -> None:
        """Read rows; see ``ArrayFile``."""
        variable = self._variables[array.name]
        out[...] = variable[first : first + len(out)] if array.shape else variable[...]

    def read_values(self, array: ArrayInfo, first: int, count: int) -> Sequence[object]:
        """Read values; see ``ArrayFile``."""
        variable = self._variables[array.name]
        return list(variable[first : first + count]) if array.shape else [variable[...]]

    def close(self) -> None:
        """Close the file; see ``ArrayFile``."""
        if self._file.isopen():
            self._file.close()


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
        return ArrayInfo(name, np.dtype(np.uint8), shape, kind="text")
    if isinstance(kind, netCDF4.VLType):
        fits = isinstance(kind.dtype, np.dtype) and len(shape) == 1
        return ArrayInfo(name, np.dtype(kind.dtype), shape, kind="ragged" if fits else "other")
    chunks = variable.chunking()
    chunk_rows = chunks[0] if isinstance(chunks, list) and chunks else 1
    return ArrayInfo(name, np.dtype(variable.dtype), shape, chunk_rows)
