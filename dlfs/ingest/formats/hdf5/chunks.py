"""Decodes the chunks of HDF5 datasets, for the filters whose result the library does not check.

If a chunk has fewer bytes after deflate than it should, the library gives what lies behind them in
memory. So chunks of deflate, shuffle and Fletcher32 are read as stored and decoded here, by zlib
and numpy, at the speed of the library. Other filters have the sizes in their data.
"""

from __future__ import annotations

import math
import zlib
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import h5py

_DEFLATE, _SHUFFLE, _FLETCHER32 = 1, 2, 3
_CHECKSUM_BYTES = 4
_SUMMED_WORDS = 1 << 20


def decodes(dataset: h5py.Dataset) -> bool:
    """Return True if ``read_chunks`` reads a dataset: it has deflate or Fletcher32, and shuffle."""
    import h5py

    layout = dataset.id.get_create_plist()
    filters = {layout.get_filter(number)[0] for number in range(layout.get_nfilters())}
    if layout.get_layout() != h5py.h5d.CHUNKED or not filters & {_DEFLATE, _FLETCHER32}:
        return False
    stored, wanted = dataset.id.get_type(), h5py.h5t.py_create(dataset.dtype, logical=True)
    return filters <= {_DEFLATE, _SHUFFLE, _FLETCHER32} and bool(stored == wanted)


def read_chunks(
    dataset: h5py.Dataset, first: int, out: npt.NDArray[Any], *, lacks_some: bool
) -> None:
    """Read rows of a dataset chunk by chunk.

    Args:
        dataset: dataset for which ``decodes`` returns True.
        first: number of the first row.
        out: the rows.
        lacks_some: True if some chunks do not exist; these leave ``out`` as it is.

    Raises:
        ValueError: a chunk does not have its size, or is no stream of deflate.
    """
    layout, shape = dataset.id.get_create_plist(), dataset.shape
    filters = [layout.get_filter(number)[0] for number in range(layout.get_nfilters())]
    chunk, last, read = layout.get_chunk(), first + len(out), dataset.id.read_direct_chunk
    starts = [range(first - first % chunk[0], last, chunk[0])]
    starts += [range(0, length, step) for length, step in zip(shape[1:], chunk[1:], strict=True)]
    size = math.prod(chunk) * out.dtype.itemsize
    for offset in product(*starts):
        if lacks_some and dataset.id.get_chunk_info_by_coord(offset).byte_offset is None:
            continue
        mask, data = read(offset)
        data = _decode(data, mask, filters, size, out.dtype.itemsize, offset)
        values = np.frombuffer(data, out.dtype).reshape(chunk)
        low, high = max(offset[0], first), min(offset[0] + chunk[0], last)
        rest = [slice(at, at + step) for at, step in zip(offset[1:], chunk[1:], strict=True)]
        target = out[(slice(low - first, high - first), *rest)]
        inner = [slice(0, length) for length in target.shape[1:]]
        target[...] = values[(slice(low - offset[0], high - offset[0]), *inner)]


def _decode(
    data: bytes,
    mask: int,
    filters: list[int],
    size: int,
    item_bytes: int,
    offset: tuple[int, ...],
) -> bytes:
    """Undo the filters of a chunk, the last one first."""
    for number in reversed(range(len(filters))):
        if mask >> number & 1:
            continue
        if filters[number] == _DEFLATE:
            checksums = sum(
                each == _FLETCHER32 and not mask >> n & 1 for n, each in enumerate(filters[:number])
            )
            data = _inflate(data, size + checksums * _CHECKSUM_BYTES, offset)
        elif filters[number] == _FLETCHER32:
            data = _without_checksum(data, offset)
        else:
            data = _unshuffle(data, item_bytes)
    if len(data) != size:
        raise ValueError(f"chunk at {offset}: expected {size} bytes, got {len(data)}")
    return data


def _unshuffle(data: bytes, item_bytes: int) -> bytes:
    """Return bytes in the order of their elements; what is left of the last one stays behind."""
    whole = len(data) // item_bytes * item_bytes
    ordered = np.frombuffer(data[:whole], np.uint8).reshape(item_bytes, -1).T.tobytes()
    return ordered + data[whole:]


def _inflate(data: bytes, size: int, offset: tuple[int, ...]) -> bytes:
    """Return the bytes of a stream of deflate, and at most one more than expected."""
    stream = zlib.decompressobj()
    try:
        found = stream.decompress(data, size + 1)
    except zlib.error as error:
        raise ValueError(f"chunk at {offset}: expected a stream of deflate: {error}") from error
    if not stream.eof and len(found) <= size:
        raise ValueError(f"chunk at {offset}: expected {size} bytes, got {len(found)}, cut off")
    return found


def _without_checksum(data: bytes, offset: tuple[int, ...]) -> bytes:
    """Return the bytes before a Fletcher32 checksum, after a comparison."""
    found, stored = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
    expected = fletcher32(found)
    if len(data) < _CHECKSUM_BYTES or int.from_bytes(stored, "little") != expected:
        raise ValueError(f"chunk at {offset}: its Fletcher32 checksum does not match")
    return found


def fletcher32(data: bytes) -> int:
    """Return the checksum of some bytes, as the library's H5_checksum_fletcher32 has it."""
    words = np.frombuffer(data + b"\0" * (len(data) % 2), ">u2").astype(np.uint64)
    plain = weighted = 0
    for at in range(0, len(words), _SUMMED_WORDS):
        part = words[at : at + _SUMMED_WORDS]
        weighted += plain * len(part) + int(
            (part * np.arange(len(part), 0, -1, dtype=np.uint64)).sum()
        )
        plain += int(part.sum())
    return _fold(weighted) << 16 | _fold(plain)


def _fold(total: int) -> int:
    """Return a sum in ones' complement of 16 bits: 65535, not 0, for other sums than 0."""
    return (total - 1) % 0xFFFF + 1 if total else 0
