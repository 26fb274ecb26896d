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
import functools
import math
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from dlfs._native.abi import Szip
from dlfs._native.filter_probe import FILTER, FilterProbe, filter_probe
from dlfs._native.lzf import decompress_lzf
from dlfs._native.szip import count_samples
from dlfs.base.closing import closed_on_error
from dlfs.ingest.source import Array

if TYPE_CHECKING:
    import h5py

_DEFLATE, _SHUFFLE, _FLETCHER32, _LZF = 1, 2, 3, 32000
_SZIP, _NBIT, _SCALEOFFSET = 4, 5, 6
_BZIP2, _BLOSC, _LZ4, _BITSHUFFLE, _ZSTANDARD, _BLOSC2 = 307, 32001, 32004, 32008, 32015, 32026
_PLUGINS = {_BLOSC, _LZ4, _BITSHUFFLE, _ZSTANDARD, _BLOSC2}
_DECODED = {_DEFLATE, _SHUFFLE, _FLETCHER32, _LZF, _BZIP2, *_PLUGINS}
_CHECKSUM_BYTES = 4
_COUNTS_BYTES = 8
"""Size of the length and the index in the reference to a value of any length, in bytes."""
_SUMMED_WORDS = 1 << 20
_SCALEOFFSET_BYTES = 21
"""Size of the header of scale-offset, in bytes."""

_SZIP_BYTES = 4
_SZIP_PREDICTS = 32
_NBIT_ATOMIC, _NBIT_ARRAY, _NBIT_COMPOUND = 1, 2, 3
_DEPTH_MAX = 64
_BLOSC_BYTES = 16
_BLOCKS_BYTES = 12
"""Size of the header of LZ4 and bitshuffle: the size of the data and of its blocks."""

_SHUFFLED_TOGETHER = 8
"""Elements that bitshuffle takes together; those of a smaller rest follow as they are."""

_BITSHUFFLE_OWN = 3
"""Values that bitshuffle puts before those of the caller when a dataset is made."""

_MORE_BYTES = 1 << 16
"""Bytes by which other filters may lengthen a chunk, beside its size."""


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
        self._plugins: dict[int, _Plugin] = {}

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
            _check_stream(code, _Stream(values, data, size, self._item_bytes))
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
                self._plugins[number] = _Plugin(self._dataset, number, self._item_bytes)
                self._stack.callback(self._plugins[number].close)
            return self._plugins[number].undo(data)
        before = [each for n, (each, _) in enumerate(self._filters[:number]) if not mask >> n & 1]
        bound = self._size + before.count(_FLETCHER32) * _CHECKSUM_BYTES
        if not set(before) <= {_SHUFFLE, _FLETCHER32}:
            bound = 2 * bound + _MORE_BYTES
        if code == _LZF:
            return decompress_lzf(data, bound)
        if code == _BZIP2:
            return _unpack(bz2.BZ2Decompressor(), data, bound, "bzip2")
        return _unpack(zlib.decompressobj(), data, bound, "deflate")


class _Plugin:
    """One filter of one dataset, such as Zstandard, that a plug-in undoes.

    The library gives what a filter made of a chunk to the next filter, but does not compare its
    size with the chunk's. So a dataset in a file in memory has the filter, and one before it that
    copies its input.

    Args:
        dataset: the dataset.
        number: number of the filter in the order of writing.
        item_bytes: size of an element in the file, in bytes.
    """

    def __init__(self, dataset: h5py.Dataset, number: int, item_bytes: int) -> None:
        import h5py

        self._probe = _registered_probe()
        code, flags, values, name = dataset.id.get_create_plist().get_filter(number)
        self._name = f"{code} ({name.decode(errors='replace')})"
        self._origin = (0,) * len(dataset.chunks)
        self._room = np.empty(math.prod(dataset.chunks) * item_bytes, np.uint8)
        self._kind = dataset.id.get_type()
        if dataset.dtype.hasobject:  # the elements are references, which would be followed
            self._kind = h5py.h5t.create(h5py.h5t.OPAQUE, item_bytes)
        self._file = h5py.File("chunk", "w", driver="core", backing_store=False)
        with closed_on_error(self._file):
            plan = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            plan.set_chunk(dataset.chunks)
            plan.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
            plan.set_filter(FILTER, 0)
            plan.set_filter(code, flags, values[_BITSHUFFLE_OWN if code == _BITSHUFFLE else 0 :])
            space = h5py.h5s.create_simple(dataset.chunks)
            self._chunk = h5py.h5d.create(self._file.id, b"x", self._kind, space, plan)

    def close(self) -> None:
        """Close the dataset in memory."""
        del self._chunk
        self._file.close()

    def undo(self, data: bytes) -> bytes:
        """Return what the filter makes of the stored bytes of a chunk.

        Raises:
            ValueError: the filter fails, or gives a size that is none.
        """
        import h5py

        self._probe.reset()
        self._probe.size_max = 2 * len(self._room) + _MORE_BYTES
        reason = ""
        self._chunk.write_direct_chunk(self._origin, data)
        try:
            self._chunk.read(h5py.h5s.ALL, h5py.h5s.ALL, self._room, self._kind)
        except OSError as error:  # always: the probe fails
            reason = " ".join(str(error).split())
        probe = self._probe
        if len(probe.data) == probe.size_bytes:
            return probe.data
        if probe.size_bytes >= 0:
            reason = f"it says that the chunk has {probe.size_bytes} bytes"
        raise ValueError(f"the HDF5 filter {self._name} failed: {reason}")


@functools.cache
def _registered_probe() -> FilterProbe:
    import h5py

    probe = filter_probe()
    h5py.h5z.register_filter(probe.address)
    return probe


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


# ---- whole streams -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Stream:
    """The stored bytes of a chunk behind one filter.

    Attributes:
        values: the filter's values in the file.
        data: the stored bytes.
        size: size of the chunk, in bytes.
        item_bytes: size of an element, in bytes.
    """

    values: Sequence[int]
    data: bytes
    size: int
    item_bytes: int


def _check_stream(code: int, stream: _Stream) -> None:
    """Raise ValueError if a stream has fewer bytes than its filter takes.

    The library and some plug-ins decode a stream that is cut without an error, and take what lies
    behind it in memory, or leave memory as it was. Source of each form: the filters of HDF5 2.0
    (H5Znbit.c, H5Zscaleoffset.c, H5Zszip.c), and of hdf5plugin 7.1 (H5Zlz4.c, bshuf_h5filter.c,
    blosc.h).

    Args:
        code: number of the filter; of others than those above, nothing is checked.
        stream: the stream.
    """
    data = stream.data
    if code == _SZIP:
        _check_szip(stream)
    elif code == _NBIT:
        _check_nbit(stream)
    elif code == _SCALEOFFSET:
        bits, wide = int.from_bytes(data[:4], "little"), 8 * stream.item_bytes
        _expect(_SCALEOFFSET_BYTES + -(-stream.size * min(bits, wide) // wide), data)
    elif code == _BLOSC:
        _expect(_BLOSC_BYTES, data)
        _expect(int.from_bytes(data[12:_BLOSC_BYTES], "little"), data)
    elif code == _LZ4:
        total, block = _blocks_header(data)
        _check_blocks(data, -(-total // block))
    elif code == _BITSHUFFLE:
        _check_bitshuffle(stream)


def _expect(expected: int, data: bytes) -> None:
    if len(data) < expected:
        raise ValueError(f"expected {expected} bytes, got {len(data)}")


def _check_szip(stream: _Stream) -> None:
    data, size, values = stream.data, stream.size, stream.values
    found = int.from_bytes(data[:_SZIP_BYTES], "little")
    if len(data) < _SZIP_BYTES or found != size:
        raise ValueError(f"expected {size} bytes, got {found}")
    if len(values) < 4 or not all(values[1:4]):
        raise ValueError(f"expected the values of szip, got {tuple(values)}")
    options, block, bits, line = values[:4]
    bits = 8 if bits in (32, 64) else bits  # their bytes are separate samples
    intervals = -(-line // block)
    form = Szip(bits, block, intervals, options & _SZIP_PREDICTS != 0)
    count = size // (4 if bits > 16 else 2 if bits > 8 else 1)
    padded = count // line * intervals * block + count % line
    samples = count_samples(data[_SZIP_BYTES:], form, padded)
    if samples < padded:
        raise ValueError(
            f"expected {size} bytes, of szip with {padded} samples, got {samples}, cut off"
        )


def _check_nbit(stream: _Stream) -> None:
    numbers = iter(stream.values[2:])
    try:
        is_stored_as_it_is, count = bool(stream.values[1]), next(numbers)
        bits, found = (0, stream.item_bytes) if is_stored_as_it_is else _nbit_element(numbers)
    except (StopIteration, IndexError, ZeroDivisionError) as error:
        raise ValueError(f"expected the values of N-bit, got {tuple(stream.values)}") from error
    if count * found != stream.size:
        raise ValueError(f"expected {stream.size} bytes, got {count * found}")
    _expect(stream.size if is_stored_as_it_is else -(-bits * count // 8), stream.data)


def _nbit_element(numbers: Iterator[int], depth: int = 0) -> tuple[int, int]:
    """Return the bits of an element that N-bit stores, and the element's size in bytes."""
    kind, size = next(numbers), next(numbers)
    if depth > _DEPTH_MAX:
        raise ValueError(f"expected at most {_DEPTH_MAX} types within each other, got more")
    if kind == _NBIT_ATOMIC:
        _, precision, _ = next(numbers), next(numbers), next(numbers)
        return precision, size
    if kind == _NBIT_ARRAY:
        bits, base_bytes = _nbit_element(numbers, depth + 1)
        return bits * (size // base_bytes), size
    if kind == _NBIT_COMPOUND:
        total = 0
        for _ in range(next(numbers)):
            next(numbers)  # where the member lies
            total += _nbit_element(numbers, depth + 1)[0]
        return total, size
    return 8 * size, size


def _check_bitshuffle(stream: _Stream) -> None:
    is_compressed = len(stream.values) > 4 and stream.values[4]
    if not is_compressed:
        _expect(stream.size, stream.data)
        return
    total, block = _blocks_header(stream.data)
    remainder = total % block
    packed = remainder - remainder % (_SHUFFLED_TOGETHER * stream.item_bytes)
    _check_blocks(stream.data, total // block + (packed > 0), remainder - packed)


def _blocks_header(data: bytes) -> tuple[int, int]:
    """Return the size of the data, and of its blocks."""
    _expect(_BLOCKS_BYTES, data)
    total, block = int.from_bytes(data[:8], "big"), int.from_bytes(data[8:_BLOCKS_BYTES], "big")
    if not block:
        raise ValueError("expected blocks of some bytes, got a block size of 0")
    return total, block


def _check_blocks(data: bytes, count: int, remainder: int = 0) -> None:
    """Check that a stream has some blocks, each behind its size, and bytes after them."""
    at = _BLOCKS_BYTES
    for _ in range(count):
        _expect(at + 4, data)
        at += 4 + int.from_bytes(data[at : at + 4], "big")
    _expect(at + remainder, data)
