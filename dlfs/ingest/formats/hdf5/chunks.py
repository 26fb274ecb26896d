"""Decodes the chunks of HDF5 datasets, since the library does not check what filters make of them.

If a chunk has fewer bytes after its filters than it should, the library gives what lies behind them
in memory. So chunks are read as stored and decoded here, at the speed of the library. Where it
converts the elements, it still reads them, after a check of the chunks' sizes. It also reads szip,
N-bit and scale-offset, after a check that their streams are whole. Plug-ins that the library cannot
run apart from their dataset (ZFP, SZ, SZ3, SPERR, FCIDECOMP, and any that are not known) are not
checked.
"""

from __future__ import annotations

import bz2
import math
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from dlfs._native.lzf import decompress_lzf
from dlfs.ingest.formats.hdf5.plugins import MORE_BYTES, Plugin
from dlfs.ingest.formats.hdf5.streams import BITSHUFFLE, BLOSC, LZ4, Stream, check_stream
from dlfs.ingest.source import Array

if TYPE_CHECKING:
    import h5py

_DEFLATE, _SHUFFLE, _FLETCHER32, _LZF = 1, 2, 3, 32000
_BZIP2, _ZSTANDARD, _BLOSC2 = 307, 32015, 32026
_PLUGINS = {BLOSC, LZ4, BITSHUFFLE, _ZSTANDARD, _BLOSC2}
_DECODED = {_DEFLATE, _SHUFFLE, _FLETCHER32, _LZF, _BZIP2, *_PLUGINS}
_CHECKSUM_BYTES = 4
_COUNTS_BYTES = 8
"""Size of the length and the index in the reference to a value of any length, in bytes."""
_SUMMED_WORDS = 1 << 20


def is_decoded(dataset: h5py.Dataset) -> bool:
    """Return True if ``read_chunks`` reads a dataset: it knows all filters, and the type."""
    import h5py

    wanted = h5py.h5t.py_create(dataset.dtype, logical=True)
    is_stored_as_read = not dataset.dtype.hasobject and dataset.id.get_type() == wanted
    return is_checked(dataset) and set(_filters(dataset)) <= _DECODED and is_stored_as_read


def is_checked(dataset: h5py.Dataset) -> bool:
    """Return True if a dataset has filters, and ``check_chunks`` knows the size of its elements."""
    import h5py

    is_chunked = dataset.id.get_create_plist().get_layout() == h5py.h5d.CHUNKED
    has_members = dataset.dtype.hasobject and dataset.dtype.kind != "O"
    return is_chunked and bool(_filters(dataset)) and not has_members


def read_chunks(dataset: h5py.Dataset, first: int, out: Array, *, lacks_some: bool) -> None:
    """Read rows of a dataset chunk by chunk.

    Args:
        dataset: dataset for which ``is_decoded`` is true.
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
        others = [slice(at, at + step) for at, step in zip(offset[1:], chunk[1:], strict=True)]
        target = out[(slice(low - first, high - first), *others)]
        used = [slice(0, length) for length in target.shape[1:]]
        target[...] = values[(slice(low - offset[0], high - offset[0]), *used)]


def check_chunks(dataset: h5py.Dataset, first: int, count: int, *, lacks_some: bool) -> None:
    """Check the chunks of some rows of a dataset with filters; see ``read_chunks``."""
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
    with ExitStack() as stack:
        decoder = _Decoder(dataset, stack)
        for offset in _offsets(dataset, first, count, lacks_some=lacks_some):
            mask, data = dataset.id.read_direct_chunk(offset)
            try:
                yield offset, decoder.decode(data, mask)
            except ValueError as error:
                raise ValueError(f"chunk at {offset}: {error}") from error


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


class _Decoder:
    """Undoes the filters of one dataset, the last one first.

    Args:
        dataset: the dataset.
        stack: closes what plug-ins have open.
    """

    def __init__(self, dataset: h5py.Dataset, stack: ExitStack) -> None:
        self._dataset = dataset
        self._stack = stack
        layout = dataset.id.get_create_plist()
        found = [layout.get_filter(number) for number in range(layout.get_nfilters())]
        self._filters = [(code, values) for code, _, values, _ in found]
        self._item_bytes = _item_bytes(dataset)
        self._size = math.prod(dataset.chunks) * self._item_bytes
        self._plugins: dict[int, Plugin] = {}

    def decode(self, data: bytes, mask: int) -> bytes:
        """Return the bytes of a chunk; as far as they are decoded before a filter that is not.

        Args:
            data: the chunk as stored.
            mask: bit mask of the filters that were left out.

        Raises:
            ValueError: the chunk does not have its size, or cannot be decoded.
        """
        size = self._size
        for number in reversed(range(len(self._filters))):
            if mask >> number & 1:
                continue
            code, values = self._filters[number]
            check_stream(code, Stream(values, data, size, self._item_bytes))
            if code not in _DECODED:
                return data
            data = self._undo(number, data, mask)
        if len(data) != size:
            raise ValueError(f"expected {size} bytes, got {len(data)}")
        return data

    def _undo(self, number: int, data: bytes, mask: int) -> bytes:
        """Undo one filter."""
        code, _ = self._filters[number]
        if code == _FLETCHER32:
            return _without_checksum(data)
        if code == _SHUFFLE:
            return _unshuffle(data, self._item_bytes)
        if code in _PLUGINS:
            if number not in self._plugins:
                self._plugins[number] = Plugin(self._dataset, number, self._item_bytes)
                self._stack.callback(self._plugins[number].close)
            return self._plugins[number].undo(data)
        before = [each for n, (each, _) in enumerate(self._filters[:number]) if not mask >> n & 1]
        bound = self._size + before.count(_FLETCHER32) * _CHECKSUM_BYTES
        if not set(before) <= {_SHUFFLE, _FLETCHER32}:
            bound = 2 * bound + MORE_BYTES
        if code == _LZF:
            return decompress_lzf(data, bound)
        if code == _BZIP2:
            return _unpack(bz2.BZ2Decompressor(), data, bound, "bzip2")
        return _unpack(zlib.decompressobj(), data, bound, "deflate")


def _unshuffle(data: bytes, item_bytes: int) -> bytes:
    """Return bytes in the order of their elements; what is left of the last one stays behind."""
    whole = len(data) // item_bytes * item_bytes
    ordered = np.frombuffer(data[:whole], np.uint8).reshape(item_bytes, -1).T.tobytes()
    return ordered + data[whole:]


def _unpack(stream: Any, data: bytes, size: int, name: str) -> bytes:
    """Return the bytes of a compressed stream, and at most one more than it may have.

    The library's plug-in of bzip2 runs for ever on a stream that is cut.
    """
    try:
        found: bytes = stream.decompress(data, size + 1)
    except (zlib.error, OSError) as error:
        raise ValueError(f"expected a stream of {name}: {error}") from error
    if not stream.eof and len(found) <= size:
        raise ValueError(f"expected {size} bytes, got {len(found)}, cut off")
    return found


def _without_checksum(data: bytes) -> bytes:
    """Return the bytes before a Fletcher32 checksum, after a comparison."""
    found, stored = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
    expected = fletcher32(found)
    if len(data) < _CHECKSUM_BYTES or int.from_bytes(stored, "little") != expected:
        raise ValueError("its Fletcher32 checksum does not match")
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
