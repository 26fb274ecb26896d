"""Checks that streams of HDF5 filters have all bytes that decoding them takes.

The library and some plug-ins decode a stream that is cut without an error, and take what lies
behind it in memory, or leave memory as it was. Source of each form: the filters of HDF5 2.0
(H5Znbit.c, H5Zscaleoffset.c, H5Zszip.c), and of hdf5plugin 7.1 (H5Zlz4.c, bshuf_h5filter.c,
blosc.h).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dlfs._native.abi import Szip
from dlfs._native.szip import count_samples

SZIP, NBIT, SCALEOFFSET, BLOSC, LZ4, BITSHUFFLE = 4, 5, 6, 32001, 32004, 32008
"""Numbers of filters."""

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


@dataclass(frozen=True, slots=True)
class Stream:
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


def check_stream(code: int, stream: Stream) -> None:
    """Raise ValueError if a stream has fewer bytes than its filter takes.

    Args:
        code: number of the filter; of others than those above, nothing is checked.
        stream: the stream.
    """
    data = stream.data
    if code == SZIP:
        _check_szip(stream)
    elif code == NBIT:
        _check_nbit(stream)
    elif code == SCALEOFFSET:
        bits, wide = int.from_bytes(data[:4], "little"), 8 * stream.item_bytes
        _expect(_SCALEOFFSET_BYTES + -(-stream.size * min(bits, wide) // wide), data)
    elif code == BLOSC:
        _expect(_BLOSC_BYTES, data)
        _expect(int.from_bytes(data[12:_BLOSC_BYTES], "little"), data)
    elif code == LZ4:
        total, block = _blocks_header(data)
        _check_blocks(data, -(-total // block))
    elif code == BITSHUFFLE:
        _check_bitshuffle(stream)


def _expect(expected: int, data: bytes) -> None:
    if len(data) < expected:
        raise ValueError(f"expected {expected} bytes, got {len(data)}")


def _check_szip(stream: Stream) -> None:
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


def _check_nbit(stream: Stream) -> None:
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


def _check_bitshuffle(stream: Stream) -> None:
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
