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
