"""Finds the chunks that a Zarr store lacks.

The format gives an absent chunk the array's fill value, and writers leave out chunks of only this
value (``write_empty_chunks=False``). No reader can tell these from lost ones.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dlfs.ingest.arrays.file import Missing
from dlfs.ingest.isolation.confines import note_location

if TYPE_CHECKING:
    import zarr
    from zarr.abc.store import Store

_CHUNKS_MAX = 1 << 22
"""Most chunks that are looked for, unless the store has more than half of them."""

_NO_CHUNK = (1 << 64) - 1
_SHARDS = "sharding_indexed"
_ENTRY_BYTES = 16
_CRC_BYTES = 4


_NOTED_CHUNKS = 1000
"""Chunks that are counted between two notes that the work goes on."""


def find_missing(array: zarr.Array[Any], keys: Collection[str], store: Store) -> Missing | None:
    """Return the chunks of an array that a store lacks, or None.

    Args:
        array: the array.
        keys: names of all files in the store.
        store: the store.

    Raises:
        ValueError: the index of a shard cannot be read, or shards are encoded further.
    """
    _check_shards(array)
    prefix = f"{array.path}/" if array.path else ""
    steps = array.shards or array.chunks
    if math.prod(_grid_shape(array.shape, steps)) > max(_CHUNKS_MAX, 2 * len(keys)):
        raise ValueError(f"{array.path}: expected a grid of at most {_CHUNKS_MAX} chunks, got more")
    count = total = 0
    first = ""
    inner_total = math.prod(_grid_shape(steps, array.chunks)) if array.shards else 1
    for place in itertools.product(*map(range, _grid_shape(array.shape, steps))):
        if not total % _NOTED_CHUNKS:
            note_location(f"import {prefix}: its chunks are counted")
        key = prefix + array.metadata.encode_chunk_key(place)
        absent = 0
        if key not in keys:
            absent, name = inner_total, key
        elif array.shards:
            absent, inner = _absent_in_shard(array, key, place, store)
            name = f"{inner} of {key}"
        if absent and not count:
            first = f"the chunk {name}"
        count, total = count + absent, total + inner_total
    return Missing(count, total, "chunk", first) if count else None


def _check_shards(array: zarr.Array[Any]) -> None:
    """Raise ValueError if an array has shards whose chunks cannot be counted."""
    found = [codec.to_dict() for codec in getattr(array.metadata, "codecs", ())]
    names = [codec["name"] for codec in found]
    inner = [
        codec["name"]
        for outer in found
        if outer["name"] == _SHARDS
        for codec in outer["configuration"]["codecs"]
    ]
    if _SHARDS in inner or (_SHARDS in names and len(names) > 1):
        raise ValueError(
            f"expected shards that have chunks and no further codec, got the codecs {names} with "
            f"{inner} in them: chunks that such shards lack are not found"
        )


def _grid_shape(shape: Sequence[int], steps: Sequence[int]) -> tuple[int, ...]:
    return tuple(-(-length // step) for length, step in zip(shape, steps, strict=True))


def find_damaged(array: zarr.Array[Any], first: int, count: int) -> Exception | None:
    """Return the error of the first chunk of some rows that cannot be read, with its name."""
    chunk, shape = array.chunks, array.shape
    rows = range(first, first + count)
    starts = [range(0, length, step) for length, step in zip(shape, chunk, strict=True)]
    if starts:
        starts[0] = range(rows[0] - rows[0] % chunk[0], rows[-1] + 1, chunk[0])
    steps = array.shards or chunk
    for offset in itertools.product(*starts):
        try:
            array[tuple(slice(at, at + step) for at, step in zip(offset, chunk, strict=True))]
        except Exception as error:  # noqa: BLE001 - of any codec
            place = tuple(at // step for at, step in zip(offset, steps, strict=True))
            key = array.metadata.encode_chunk_key(place)
            kind = EOFError if isinstance(error, EOFError) else ValueError
            name = f"{array.path}/{key}" if array.path else key
            return kind(f"the chunk at {offset}, in {name}: {error}")
    return None


def _absent_in_shard(
    array: zarr.Array[Any], key: str, place: tuple[int, ...], store: Store
) -> tuple[int, str]:
    """Return the number of chunks that a shard lacks, and the place of the first."""
    grid = _grid_shape(array.shards or (), array.chunks)
    index = _shard_index(array, key, math.prod(grid), store)
    missing = (index == _NO_CHUNK).all(axis=1).reshape(grid)
    for axis, (length, shard, chunk) in enumerate(
        zip(array.shape, array.shards or (), array.chunks, strict=True)
    ):  # chunks beyond the end of the array are not needed
        used = -(-min(shard, length - place[axis] * shard) // chunk)
        missing = missing.take(range(used), axis=axis)
    absent = np.argwhere(missing)
    return len(absent), str(tuple(absent[0].tolist())) if len(absent) else ""


def _shard_index(array: zarr.Array[Any], key: str, count: int, store: Store) -> Any:
    """Return the offsets and sizes of a shard's chunks, ``uint64[count, 2]``."""
    from zarr.abc.store import RangeByteRequest, SuffixByteRequest
    from zarr.core.buffer import default_buffer_prototype
    from zarr.core.sync import sync

    codec: Any = array.metadata.codecs[-1]  # type: ignore[union-attr]
    names = [type(inner).__name__ for inner in codec.index_codecs]
    if names not in (["BytesCodec"], ["BytesCodec", "Crc32cCodec"]):
        raise ValueError(f"{key}: expected a shard's index by bytes and crc32c, got {names}")
    order = "<" if codec.index_codecs[0].endian.value == "little" else ">"
    size = count * _ENTRY_BYTES + (_CRC_BYTES if len(names) > 1 else 0)
    at_end = codec.index_location.value == "end"
    wanted = SuffixByteRequest(size) if at_end else RangeByteRequest(0, size)
    data = sync(store.get(key, default_buffer_prototype(), wanted))
    found = b"" if data is None else data.to_bytes()
    if len(found) != size:
        raise ValueError(f"{key}: expected an index of {size} bytes, got {len(found)}")
    return np.frombuffer(found, f"{order}u8", count * 2).reshape(count, 2)
