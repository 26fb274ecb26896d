"""CRC32C of bytes.

``bytes`` are passed to libdlfs directly; other contiguous memory through numpy, without a copy.

Threads: any at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dlfs._native.device import as_bytes_array
from dlfs._native.library import library
from dlfs.errors import UsageError

if TYPE_CHECKING:
    from typing_extensions import Buffer


def crc32c(data: Buffer, crc: int = 0) -> int:
    """Compute the CRC32C (Castagnoli) of bytes.

    Args:
        data: contiguous bytes.
        crc: CRC32C of the bytes before, 0..2^32-1; 0 to start.

    Raises:
        UsageError: the memory is not contiguous, or ``crc`` is out of range.

    Source: RFC 3720, appendix B.4.
    """
    if not 0 <= crc < 1 << 32:
        raise UsageError(f"continue a CRC32C: expected 32 bits, got {crc}")
    if isinstance(data, bytes):
        return int(library().dlfs_crc32c(crc, data, len(data)))
    array = as_bytes_array(data)
    return int(library().dlfs_crc32c(crc, array.ctypes.data, array.size))


def crc32c_blocks(data: Buffer, block_bytes: int) -> NDArray[np.uint32]:
    """Compute the CRC32C of each block.

    Args:
        data: contiguous bytes; the last block may be shorter.
        block_bytes: 1 or more.

    Returns:
        ``uint32[ceil(n_bytes / block_bytes)]``.

    Raises:
        UsageError: the memory is not contiguous, or ``block_bytes`` is not positive.
    """
    if not 0 < block_bytes < 1 << 63:
        raise UsageError(f"sum blocks: expected 1 byte or more in a block, got {block_bytes}")
    array = as_bytes_array(data)
    crcs = np.empty(-(-array.size // block_bytes), np.uint32)
    library().dlfs_crc32c_blocks(array.ctypes.data, array.size, block_bytes, crcs.ctypes.data)
    return crcs


def combine_crc32c(
    crcs: NDArray[np.uint32], following: NDArray[np.uint32], following_bytes: NDArray[np.int64]
) -> NDArray[np.uint32]:
    """Compute the CRC32C of pairs of ranges, one after the other, from those of each range.

    Args:
        crcs: CRC32C of each first range, ``uint32[n]``.
        following: CRC32C of each second range, ``uint32[n]``.
        following_bytes: length of each second range in bytes, 0 or more, ``int64[n]``.

    Raises:
        UsageError: the arrays are not of one length.
    """
    if not crcs.shape == following.shape == following_bytes.shape or crcs.ndim != 1:
        raise UsageError(
            f"combine CRC32Cs: expected three arrays of one length, got {crcs.shape}, "
            f"{following.shape} and {following_bytes.shape}"
        )
    combined = np.array(crcs, np.uint32)
    following = np.ascontiguousarray(following, np.uint32)
    lengths = np.ascontiguousarray(following_bytes, np.uint64)
    library().dlfs_crc32c_combine(
        combined.ctypes.data, following.ctypes.data, lengths.ctypes.data, len(combined)
    )
    return combined
