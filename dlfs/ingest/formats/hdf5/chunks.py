"""Decodes the chunks of HDF5 datasets, for the filters whose result the library does not check.

If a chunk has fewer bytes after its filters than it should, the library gives what lies behind them
in memory. So chunks of deflate, LZF, shuffle and Fletcher32 are read as stored and decoded here, at
the speed of the library. Where it converts the elements, it still reads them, after a check of the
chunks' sizes. It also reads szip and scale-offset, after a check of the sizes in their headers.
Other filters have the sizes in their data, as far as is known.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dlfs._native.lzf import decompress_lzf

if TYPE_CHECKING:
    import h5py

_DEFLATE, _SHUFFLE, _FLETCHER32, _SZIP, _SCALEOFFSET, _LZF = 1, 2, 3, 4, 6, 32000
_KNOWN = {_DEFLATE, _SHUFFLE, _FLETCHER32, _LZF}
_SCALEOFFSET_BYTES = 21
"""Size of the header of scale-offset, in bytes."""
_CHECKSUM_BYTES = 4
_COUNTS_BYTES = 8
"""Size of the length and the index in the reference to a value of any length, in bytes."""
_SUMMED_WORDS = 1 << 20


def has_known_filters(dataset: h5py.Dataset) -> bool:
    """Return True if a dataset has filters, and all of them are decoded here."""
    import h5py

    layout = dataset.id.get_create_plist()
    is_chunked = layout.get_layout() == h5py.h5d.CHUNKED
    found = set(_filters(dataset))
    has_members = dataset.dtype.hasobject and dataset.dtype.kind != "O"
    return is_chunked and bool(found) and found <= _KNOWN and not has_members


def has_headers(dataset: h5py.Dataset) -> bool:
    """Return True if a dataset has filters that write sizes which ``check_headers`` knows."""
    return bool({_SZIP, _SCALEOFFSET} & set(_filters(dataset)))


def check_headers(dataset: h5py.Dataset, first: int, count: int, *, lacks_some: bool) -> None:
    """Check the sizes in the headers of chunks of szip and scale-offset; see ``read_chunks``.

    A stream of szip that is cut, with the right size in its header, is not found.
    """
    for offset in _offsets(dataset, first, count, lacks_some=lacks_some):
        _check_header(dataset, offset)


def _check_header(dataset: h5py.Dataset, offset: tuple[int, ...]) -> None:
    """Check the size that szip or scale-offset has in the header of a chunk."""
    filters, item_bytes = _filters(dataset), _item_bytes(dataset)
    size = math.prod(dataset.chunks) * item_bytes
    mask, data = dataset.id.read_direct_chunk(offset)
    for number in reversed(range(len(filters))):
        if mask >> number & 1:
            continue
        if filters[number] == _DEFLATE:
            data = _inflate(data, 2 * size + _SCALEOFFSET_BYTES, offset, is_exact=False)
        elif filters[number] == _FLETCHER32:
            data = _without_checksum(data, offset)
        elif filters[number] == _SZIP:
            expected, found = size, int.from_bytes(data[:4], "little")
            if found != expected:
                raise ValueError(f"chunk at {offset}: expected {expected} bytes, got {found}")
            return
        elif filters[number] == _SCALEOFFSET:
            bits = int.from_bytes(data[:4], "little")
            expected = _SCALEOFFSET_BYTES + -(-size * min(bits, 8 * item_bytes) // (8 * item_bytes))
            if len(data) < expected:
                raise ValueError(f"chunk at {offset}: expected {expected} bytes, got {len(data)}")
            return
        else:
            return


def is_stored_as_read(dataset: h5py.Dataset) -> bool:
    """Return True if h5py reads the bytes of a dataset's elements as they are stored."""
    import h5py

    wanted = h5py.h5t.py_create(dataset.dtype, logical=True)
    return not dataset.dtype.hasobject and bool(dataset.id.get_type() == wanted)


def read_chunks(
    dataset: h5py.Dataset, first: int, out: npt.NDArray[Any], *, lacks_some: bool
) -> None:
    """Read rows of a dataset chunk by chunk.

    Args:
        dataset: dataset with known filters, whose elements are stored as they are read.
        first: number of the first row.
        out: the rows; elements that are arrays are further dimensions.
        lacks_some: True if some chunks do not exist; these leave ``out`` as it is.

    Raises:
        ValueError: a chunk does not have its size, or cannot be decoded.
    """
    chunk = dataset.chunks
    inner = dataset.dtype.shape
    for offset, data in _chunks(dataset, first, len(out), lacks_some=lacks_some):
        values = np.frombuffer(data, dataset.dtype.base).reshape(*chunk, *inner)
        low, high = max(offset[0], first), min(offset[0] + chunk[0], first + len(out))
        rest = [slice(at, at + step) for at, step in zip(offset[1:], chunk[1:], strict=True)]
        target = out[(slice(low - first, high - first), *rest)]
        used = [slice(0, length) for length in target.shape[1:]]
        target[...] = values[(slice(low - offset[0], high - offset[0]), *used)]


def check_chunks(dataset: h5py.Dataset, first: int, count: int, *, lacks_some: bool) -> None:
    """Check the chunks of some rows of a dataset with known filters; see ``read_chunks``."""
    for _ in _chunks(dataset, first, count, lacks_some=lacks_some):
        pass


def _filters(dataset: h5py.Dataset) -> list[int]:
    """Return the numbers of a dataset's filters, in the order of writing."""
    layout = dataset.id.get_create_plist()
    return [layout.get_filter(number)[0] for number in range(layout.get_nfilters())]


def _chunks(
    dataset: h5py.Dataset, first: int, count: int, *, lacks_some: bool
) -> Iterator[tuple[tuple[int, ...], bytes]]:
    """Yield the offset and the bytes of each chunk that has some rows of a dataset."""
    filters, item_bytes = _filters(dataset), _item_bytes(dataset)
    size = math.prod(dataset.chunks) * item_bytes
    for offset in _offsets(dataset, first, count, lacks_some=lacks_some):
        mask, data = dataset.id.read_direct_chunk(offset)
        yield offset, _decode(data, mask, filters, size, item_bytes, offset)


def _offsets(
    dataset: h5py.Dataset, first: int, count: int, *, lacks_some: bool
) -> Iterator[tuple[int, ...]]:
    """Yield the offset of each chunk that has some rows of a dataset, and exists."""
    chunk, shape = dataset.chunks, dataset.shape
    starts = [range(first - first % chunk[0], first + count, chunk[0])]
    starts += [range(0, length, step) for length, step in zip(shape[1:], chunk[1:], strict=True)]
    for offset in product(*starts):
        if lacks_some and dataset.id.get_chunk_info_by_coord(offset).byte_offset is None:
            continue
        yield offset


def _item_bytes(dataset: h5py.Dataset) -> int:
    """Return the size of an element in the file, in bytes."""
    size: int = dataset.id.get_type().get_size()
    if not dataset.dtype.hasobject:
        return size
    address_bytes: int = dataset.file.id.get_create_plist().get_sizes()[0]
    return _COUNTS_BYTES + address_bytes  # a value of any length lies elsewhere


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
        if filters[number] in (_DEFLATE, _LZF):
            checksums = sum(
                each == _FLETCHER32 and not mask >> n & 1 for n, each in enumerate(filters[:number])
            )
            expected = size + checksums * _CHECKSUM_BYTES
            if filters[number] == _LZF:
                data = _unpack_lzf(data, expected, offset)
            else:
                data = _inflate(data, expected, offset)
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


def _inflate(data: bytes, size: int, offset: tuple[int, ...], *, is_exact: bool = True) -> bytes:
    """Return the bytes of a stream of deflate, and at most one more than expected."""
    stream = zlib.decompressobj()
    try:
        found = stream.decompress(data, size + 1)
    except zlib.error as error:
        raise ValueError(f"chunk at {offset}: expected a stream of deflate: {error}") from error
    if is_exact and not stream.eof and len(found) <= size:
        raise ValueError(f"chunk at {offset}: expected {size} bytes, got {len(found)}, cut off")
    return found


def _unpack_lzf(data: bytes, size: int, offset: tuple[int, ...]) -> bytes:
    """Return the bytes of a stream of LZF."""
    try:
        return decompress_lzf(data, size)
    except ValueError as error:
        raise ValueError(f"chunk at {offset}: {error}") from error


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
