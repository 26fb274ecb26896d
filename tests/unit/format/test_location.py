from __future__ import annotations

import struct

import numpy as np
import pytest

from dlfs.errors import LimitError, UsageError
from dlfs.format.location import pack_locations, unpack_location, unpack_locations


def test_the_bytes_are_those_of_the_specification() -> None:
    length, address = 0x12_3456789A, 0xAB_CDEF0123_4567
    packed = pack_locations([address], [length], [0xDEADBEEF])
    assert packed.tobytes() == struct.pack("<IIQ", 0xDEADBEEF, 0x3456789A, address | 0x12 << 56)


def test_limits_survive() -> None:
    addresses = [0, (1 << 56) - 1, 5]
    lengths = [(1 << 40) - 1, 0, 1 << 32]
    crcs = [0, 1, (1 << 32) - 1]
    packed = pack_locations(addresses, lengths, crcs)
    assert [unpack_location(each) for each in packed] == list(
        zip(addresses, lengths, crcs, strict=True)
    )
    got = unpack_locations(packed)
    assert [part.tolist() for part in got] == [addresses, lengths, crcs]
    assert [part.dtype for part in got] == [np.uint64, np.uint64, np.uint32]


def test_no_locations() -> None:
    assert len(pack_locations([], [], [])) == 0


@pytest.mark.parametrize(("address", "length"), [(1 << 56, 0), (0, 1 << 40)])
def test_too_many_bits(address: int, length: int) -> None:
    with pytest.raises(LimitError, match="pack locations"):
        pack_locations([address], [length], [0])


def test_arrays_of_different_lengths() -> None:
    with pytest.raises(UsageError, match="three arrays of one length"):
        pack_locations([1, 2], [1], [1])
