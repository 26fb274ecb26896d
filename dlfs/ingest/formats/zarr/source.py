"""Imports Zarr stores, formats 2 and 3, by the package zarr (extra ``zarr``).

A store is a folder, or a zip archive of one. The name of an array is its path from the root. Rows
are read in windows of whole chunks, so that each chunk is decompressed once. A missing chunk is an
error, or has the array's fill value; see ``chunks``. ``listing`` says which codecs are allowed.

Blosc decompresses a truncated chunk into the bytes behind it in memory. So the length in the
chunk's header is compared with the chunk's size first.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dlfs.ingest.arrays.file import ArrayFile, ArrayInfo, ArrayOptions
from dlfs.ingest.arrays.rows import ArraySource
from dlfs.ingest.formats.zarr.chunks import find_missing
from dlfs.ingest.formats.zarr.listing import METADATA, list_store
from dlfs.ingest.registry import load_package

if TYPE_CHECKING:
    import zarr
    from zarr.abc.store import Store

_BLOSC_HEADER_BYTES = 16
"""Size of the header of a chunk; bytes 12..15 are the chunk's size. Source: the Blosc format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ZarrOptions(ArrayOptions):
    """Options of Zarr stores."""

    def open(self, paths: Sequence[str]) -> ArraySource:
        """Open Zarr stores."""
        load_package("zarr", extra="zarr", what=f"import {paths[0]}")
        return ArraySource(paths, ZarrFile, self)


class ZarrFile(ArrayFile):
    """One open Zarr store; see ``ArrayFile``."""

    def __init__(self, path: str) -> None:
        import zarr
        from zarr.storage import LocalStore, ZipStore

        self._listing = list_store(path)
        store = LocalStore(path, read_only=True) if Path(path).is_dir() else ZipStore(path)
        self._blosc: set[str] = set()
        self._store = _checked(store, self._listing.keys, self._blosc)
        self.skipped: Mapping[str, int] = {}
        try:
            self._arrays: dict[str, zarr.Array[Any]] = {}
            if "" not in self._listing.arrays:
                zarr.open_group(self._store, mode="r", use_consolidated=False)
            for name in sorted(self._listing.arrays):
                self._arrays[name] = zarr.open_array(self._store, mode="r", path=name)
            self._add_consolidated()
            self._blosc.update(name for name, item in self._arrays.items() if _uses_blosc(item))
            self.arrays = {name: self._describe(name, item) for name, item in self._arrays.items()}
        except BaseException:
            self.close()
            raise

    def read(self, array: ArrayInfo, first: int, out: npt.NDArray[Any]) -> None:
        """Read rows; see ``ArrayFile``."""
        item = self._item(array)
        out[...] = item[first : first + len(out)] if array.shape else item[...]

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
        missing = None if problem else find_missing(item, self._listing.keys, self._store)
        return replace(_describe(name, item), missing=missing, problem=problem)


def _uses_blosc(array: zarr.Array[Any]) -> bool:
    """Return True if each file of the array in the store is a chunk that Blosc compressed."""
    names = [type(codec).__name__ for codec in array.compressors]
    return names[-1:] in (["Blosc"], ["BloscCodec"]) and array.shards is None


def _checked(store: Store, keys: Container[str], blosc: Container[str]) -> Store:
    """Return a store that refuses lost files, and short Blosc chunks of the arrays in ``blosc``."""
    from zarr.storage import WrapperStore

    class Checked(WrapperStore[Any]):
        async def get(self, key: str, *arguments: Any, **options: Any) -> Any:
            data = await super().get(key, *arguments, **options)
            if data is None and key in keys:
                raise EOFError(f"no file {key}, which was there")
            if data is not None and any(parent in blosc for parent in _parents(key)):
                header = data.as_numpy_array()[:_BLOSC_HEADER_BYTES].tobytes()
                size = int.from_bytes(header[12:16], "little")
                if len(header) < _BLOSC_HEADER_BYTES or len(data) < size:
                    raise EOFError(f"{len(data)} bytes in {key}, which is {size} bytes of Blosc's")
            return data

    return Checked(store)


def _parents(key: str) -> Iterator[str]:
    """Yield the paths of the arrays whose chunk a key may name; nothing for metadata keys."""
    parent, _, name = key.rpartition("/")
    while name not in METADATA:
        yield parent
        if not parent:
            return
        parent = parent.rpartition("/")[0]


def _describe(name: str, array: zarr.Array[Any]) -> ArrayInfo:
    dtype = np.dtype(array.dtype)
    chunk_rows = array.chunks[0] if array.shape else 1
    if dtype.kind == "T" or dtype.hasobject:
        text = len(array.shape) == 1 or (dtype.kind == "T" and not array.shape)
        return ArrayInfo(
            name, np.dtype(np.uint8), array.shape, chunk_rows, "text" if text else "other"
        )
    return ArrayInfo(name, dtype, array.shape, chunk_rows)
