"""Writes arrays with each format's own library, and takes sources apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlfs.ingest.arrays.rows import ArraySource

Arrays = Mapping[str, Any]


def write_hdf5(path: Path, arrays: Arrays, **options: Any) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(path, "w") as file:
        for name, values in arrays.items():
            file.create_dataset(name, data=values, **options)


def write_netcdf(path: Path, arrays: Arrays, *, layout: str = "NETCDF4", **options: Any) -> None:
    netcdf = pytest.importorskip("netCDF4")
    with netcdf.Dataset(path, "w", format=layout) as file:
        for name, values in arrays.items():
            names = [f"{name.replace('/', '_')}_{axis}" for axis in range(values.ndim)]
            for axis, length in zip(names, values.shape, strict=True):
                file.createDimension(axis, length)
            kind = str if values.dtype == object else values.dtype
            variable = file.createVariable(name, kind, names, **options)
            variable.set_auto_maskandscale(False)
            variable[...] = values


def write_zarr(path: Path, arrays: Arrays, *, layout: int = 3, **options: Any) -> None:
    zarr = pytest.importorskip("zarr")
    root = zarr.open_group(path, mode="w", zarr_format=layout)
    config = {"write_empty_chunks": True}  # a missing chunk is an error
    for name, values in arrays.items():
        chunks = options.get("chunks", tuple(max(1, length) for length in values.shape))
        kind = str if values.dtype == object else values.dtype
        settings = {**options, "chunks": chunks[: values.ndim]}
        root.create_array(name, shape=values.shape, dtype=kind, config=config, **settings)[...] = (
            values
        )


def write_zarr_2(path: Path, arrays: Arrays, **options: Any) -> None:
    write_zarr(path, arrays, layout=2, **options)


def write_adios(path: Path, arrays: Arrays, *, steps: int = 1) -> None:
    adios = pytest.importorskip("adios2", exc_type=ImportError)
    with adios.Stream(str(path), "w") as stream:
        for step in range(steps):
            stream.begin_step()
            for name, values in arrays.items():
                part = values[step] if steps > 1 else values
                if isinstance(part, str) or part.ndim == 0:
                    stream.write(name, part if isinstance(part, str) else np.array(part))
                else:
                    part = np.ascontiguousarray(part)
                    stream.write(name, part, part.shape, [0] * part.ndim, part.shape)
            stream.end_step()


def write_npz(path: Path, arrays: Arrays, *, compressed: bool = False) -> None:
    (np.savez_compressed if compressed else np.savez)(path, **arrays)


WRITERS: dict[str, tuple[str, Callable[..., None]]] = {
    "hdf5": (".h5", write_hdf5),
    "netcdf": (".nc", write_netcdf),
    "zarr": (".zarr", write_zarr),
    "zarr-2": (".zarr", write_zarr_2),
    "npz": (".npz", write_npz),
    "adios2": (".bp", write_adios),
}
"""Suffix of the files and writer of each format."""


def take(source: ArraySource, layout: Any = "path", seed: int = 0) -> dict[str, bytes]:
    """The samples of a source by path, in the order in which they come."""
    return {path: data for path, data, _ in take_all(source, layout, seed)}


def take_all(
    source: ArraySource, layout: Any = "path", seed: int = 0
) -> list[tuple[str, bytes, dict[str, Any]]]:
    """Path, bytes and attributes of every sample."""
    got = []
    for block in source.blocks(layout=layout, seed=seed):
        spans = zip(block.paths, block.offsets.tolist(), block.lengths.tolist(), strict=True)
        for place, (path, at, size) in enumerate(spans):
            attributes = {name: column[place] for name, column in block.attributes.items()}
            got.append((path.decode(), block.data[at : at + size].tobytes(), attributes))
    return got


def rows_of(name: str, values: Any) -> dict[str, bytes]:
    """Return the rows of an array as samples."""
    return {f"{name}/{row:08d}": values[row : row + 1].tobytes() for row in range(len(values))}
