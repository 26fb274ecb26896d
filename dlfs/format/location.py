"""Locations: the address, length and CRC32C of each sample, in 16 bytes (FORMAT.md, section 6).

Packing and unpacking work on whole arrays; the packed form is what the directory holds and what
libdlfs reads.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dlfs.errors import LimitError, UsageError
from dlfs.format.constants import ADDRESS_MAX, LOCATION_BYTES, SAMPLE_BYTES_MAX

LOCATION = np.dtype([("crc32c", "<u4"), ("length_low", "<u4"), ("address", "<u8")])
assert LOCATION.itemsize == LOCATION_BYTES

_ADDRESS_BITS = np.uint64(56)
_LENGTH_LOW_BITS = np.uint64(32)


def pack_locations(addresses: ArrayLike, lengths: ArrayLike, crcs: ArrayLike) -> NDArray[np.void]:
    """Pack locations.

    Args:
        addresses: uint64[n], in the dataset's data space, below 2**56.
        lengths: uint64[n], bytes, below 2**40.
        crcs: uint32[n].

    Returns:
        LOCATION[n].

    Raises:
        LimitError: an address or a length has too many bits.
        UsageError: the arrays are not of one length.
    """
    address = np.asarray(addresses, dtype=np.uint64)
    length = np.asarray(lengths, dtype=np.uint64)
    crc = np.asarray(crcs, dtype=np.uint32)
    if address.ndim != 1 or not address.shape == length.shape == crc.shape:
        raise UsageError(
            f"pack locations: expected three arrays of one length, "
            f"got {address.shape}, {length.shape} and {crc.shape}"
        )
    if len(address) and (address.max() > ADDRESS_MAX or length.max() > SAMPLE_BYTES_MAX):
        raise LimitError(
            f"pack locations: expected addresses up to {ADDRESS_MAX} and lengths up to "
            f"{SAMPLE_BYTES_MAX} bytes, got {address.max()} and {length.max()}"
        )
    packed = np.empty(len(address), dtype=LOCATION)
    packed["crc32c"] = crc
    packed["length_low"] = (length & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    packed["address"] = address | (length >> _LENGTH_LOW_BITS << _ADDRESS_BITS)
    return packed


def unpack_locations(
    packed: NDArray[np.void],
) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint32]]:
    """Unpack LOCATION[n], whatever its bytes.

    Returns:
        Addresses uint64[n], lengths uint64[n] and CRC32Cs uint32[n].
    """
    field = packed["address"].astype(np.uint64)
    length = packed["length_low"].astype(np.uint64)
    length |= field >> _ADDRESS_BITS << _LENGTH_LOW_BITS
    return field & np.uint64(ADDRESS_MAX), length, packed["crc32c"].astype(np.uint32)


def unpack_location(packed: np.void) -> tuple[int, int, int]:
    """Unpack one element of LOCATION[n], ten times faster than an array of one.

    Returns:
        Its address, length and CRC32C.
    """
    crc, length, field = packed.item()
    return field & ADDRESS_MAX, length | field >> 56 << 32, crc
