"""CRC32C and path hash from Python: vectors, kinds of buffers, blocks, wrong use."""

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from dlfs._native.checksums import combine_crc32c, crc32c, crc32c_blocks
from dlfs._native.library import library
from dlfs.errors import UsageError


def crc32c_by_bits(data: bytes, crc: int = 0) -> int:
    """The definition, one bit at a time."""
    crc ^= 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def test_published_vectors() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(b"\xff" * 32) == 0x62A8AB43
    assert crc32c(b"") == 0
    assert library().dlfs_crc32c_kind() in (
        b"avx2",
        b"sse4.2",
        b"armv8",
        b"portable",
    )


@given(st.binary(max_size=700), st.integers(0, 2**32 - 1))
def test_crc_follows_its_definition(data: bytes, crc: int) -> None:
    expected = crc32c_by_bits(data, crc)
    assert crc32c(data, crc) == expected
    assert library().dlfs_crc32c_portable(crc, data, len(data)) == expected
    half = len(data) // 2
    assert crc32c(data[half:], crc32c(data[:half], crc)) == expected


def test_any_contiguous_buffer_is_taken() -> None:
    data = bytes(range(200))
    expected = crc32c(data)
    array = np.frombuffer(data, np.uint8)
    for same in (bytearray(data), memoryview(data), array, array.view(np.uint64)):
        assert crc32c(same) == expected
    assert crc32c(memoryview(b"")) == 0
    with pytest.raises(UsageError, match="contiguous"):
        crc32c(array[::2])


@pytest.mark.parametrize("crc", [-1, 1 << 32])
def test_crc_of_more_than_32_bits_is_refused(crc: int) -> None:
    with pytest.raises(UsageError):
        crc32c(b"", crc)


@pytest.mark.parametrize("length", [0, 1, 511, 512, 513, 5000])
def test_blocks(length: int) -> None:
    data = np.random.default_rng(length).bytes(length)
    crcs = crc32c_blocks(data, 512)
    assert crcs.dtype == np.uint32
    assert crcs.tolist() == [crc32c(data[at : at + 512]) for at in range(0, length, 512)]


@pytest.mark.parametrize("block_bytes", [0, -1, 1 << 63])
def test_blocks_of_no_size_are_refused(block_bytes: int) -> None:
    with pytest.raises(UsageError):
        crc32c_blocks(b"abc", block_bytes)


def test_crcs_of_ranges_are_combined() -> None:
    data = np.random.default_rng(1).bytes(3000)
    cuts = [(0, 0), (0, 5), (7, 7), (100, 3000), (2999, 3000), (1, 129)]
    first = np.array([crc32c(data[:cut]) for cut, _ in cuts], np.uint32)
    second = np.array([crc32c(data[cut:end]) for cut, end in cuts], np.uint32)
    lengths = np.array([end - cut for cut, end in cuts])
    combined = combine_crc32c(first, second, lengths)
    assert combined.tolist() == [crc32c(data[:end]) for _, end in cuts]
    with pytest.raises(UsageError, match="three arrays of one length"):
        combine_crc32c(first, second[1:], lengths)


@given(st.binary(max_size=300), st.integers(0, 2**64 - 1))
def test_path_hash_is_xxh64(path: bytes, seed: int) -> None:
    hashed = library().dlfs_path_hash(path, len(path), seed)
    assert hashed == xxhash.xxh64_intdigest(path, seed)
