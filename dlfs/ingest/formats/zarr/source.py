"""Imports Zarr stores, formats 2 and 3, by the package zarr (extra ``zarr``).

A store is a folder, or a zip archive of one. The name of an array is its path from the root. Rows
are read in windows of whole chunks, so that each chunk is decompressed once. A missing chunk is an
error, or has the array's fill value; see ``chunks``. ``listing`` says which codecs are allowed.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dlfs.base.closing import closed_on_error
from dlfs.errors import DlfsError
from dlfs.ingest.arrays.file import ArrayFile, ArrayInfo, packing_of
from dlfs.ingest.arrays.rows import FileOptions
from dlfs.ingest.formats.zarr.chunks import find_damaged, find_missing
from dlfs.ingest.formats.zarr.listing import list_store

if TYPE_CHECKING:
    import zarr
    from zarr.abc.store import Store


_BLOSC_BYTES = 16
"""Size of the header of a chunk of Blosc."""


class ZarrFile(ArrayFile):
    """One open Zarr store; see ``ArrayFile``."""

    def __init__(self, path: str) -> None:
        import zarr
        from zarr.storage import LocalStore, ZipStore

        _check_blosc_sizes()
        self._listing = list_store(path)
        store = LocalStore(path, read_only=True) if Path(path).is_dir() else ZipStore(path)
        self._store = _checked(store, self._listing.keys)
        self.skipped: Mapping[str, int] = {}
        with closed_on_error(self):
            self._arrays: dict[str, zarr.Array[Any]] = {}
            if "" not in self._listing.arrays:
                zarr.open_group(self._store, mode="r", use_consolidated=False)
            for name in sorted(self._listing.arrays):
                self._arrays[name] = zarr.open_array(self._store, mode="r", path=name)
            self._add_consolidated()
            self.arrays = {name: self._describe(name, item) for name, item in self._arrays.items()}

    def read(self, array: ArrayInfo, first: int, out: npt.NDArray[Any]) -> None:
        """Read rows; see ``ArrayFile``."""
        item = self._item(array)
        try:
            out[...] = item[first : first + len(out)] if array.shape else item[...]
        except (MemoryError, DlfsError):
            raise
        except Exception as error:
            raise find_damaged(item, first, len(out)) or error from error

    def read_values(self, array: ArrayInfo, first: int, count: int) -> Sequence[object]:
        """Read values; see ``ArrayFile``."""
        item = self._item(array)
        values = np.asarray(item[first : first + count] if array.shape else item[...])
        found: list[object] = values.reshape(count).tolist()
        return found

    def close(self) -> None:
        """Close the store; see ``ArrayFile``."""
        self._store.close()

    def _add_consolidated(self) -> None:
        """Add the arrays that consolidated metadata names and the store lacks."""
        import zarr

        absent = sorted(self._listing.consolidated.keys() - self._listing.arrays.keys())
        if absent:
            root = zarr.open_group(self._store, mode="r", use_consolidated=True)
            for name in absent:
                item = root[name]
                if isinstance(item, zarr.Array):
                    self._arrays[name] = item

    def _item(self, array: ArrayInfo) -> zarr.Array[Any]:
        item = self._arrays[array.name]
        if array.missing is not None and item.metadata.fill_value is None:
            raise ValueError("missing chunks of an array that has no fill value")
        return item

    def _describe(self, name: str, item: zarr.Array[Any]) -> ArrayInfo:
        problem = self._listing.contradiction(name) if name in self._listing.arrays else ""
        missing = None
        try:
            missing = None if problem else find_missing(item, self._listing.keys, self._store)
        except ValueError as error:
            problem = str(error)
        described = replace(_describe(name, item), packing=packing_of(item.attrs))
        return replace(described, missing=missing, problem=problem)


class ZarrOptions(FileOptions):
    """Options of Zarr stores."""

    file_class = ZarrFile
    packages = ("zarr",)
    extra = "zarr"


def _checked(store: Store, keys: Container[str]) -> Store:
    """Return a store that refuses files which are lost since it was listed."""
    from zarr.storage import WrapperStore

    class Checked(WrapperStore[Any]):
        async def get(self, key: str, *arguments: Any, **options: Any) -> Any:
            data = await super().get(key, *arguments, **options)
            if data is None and key in keys:
                raise EOFError(f"no file {key}, which was there")
            return data

    return Checked(store)


@functools.cache
def _check_blosc_sizes() -> None:
    """Let ``numcodecs.Blosc`` compare the size of each chunk with the chunk's header.

    The package decompresses a shorter chunk, also one in a shard, into what lies behind it in
    memory. Blosc of every version of Zarr's codecs, and of shards, ends in this class. Source: the
    header of a chunk in the Blosc format; bytes 12..15 are the chunk's size.
    """
    blosc: Any = importlib.import_module("numcodecs.blosc")
    decode = blosc.Blosc.decode

    def checked(codec: Any, buf: Any, out: Any = None) -> Any:
        data = np.frombuffer(buf, np.uint8)
        size = int.from_bytes(data[12:_BLOSC_BYTES].tobytes(), "little")
        if len(data) < _BLOSC_BYTES or len(data) < size:
            raise EOFError(f"{len(data)} bytes of a chunk that is {size} bytes of Blosc's")
        return decode(codec, buf, out)

    blosc.Blosc.decode = checked


def _describe(name: str, array: zarr.Array[Any]) -> ArrayInfo:
    dtype = np.dtype(array.dtype)
    chunk_rows = array.chunks[0] if array.shape else 1
    if dtype.kind == "T" or dtype.hasobject:
        text = len(array.shape) == 1 or (dtype.kind == "T" and not array.shape)
        return ArrayInfo(
            name, np.dtype(np.uint8), array.shape, chunk_rows, "text" if text else "other"
        )
    return ArrayInfo(name, dtype, array.shape, chunk_rows)
