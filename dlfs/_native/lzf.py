"""LZF, a compression of HDF5 files.

Threads: any at once.
"""

from __future__ import annotations

import numpy as np

from dlfs._native.library import library


def decompress_lzf(data: bytes, size_max: int) -> bytes:
    """Return the bytes of a stream of LZF.

    Args:
        data: the stream.
        size_max: most bytes that it may have.

    Raises:
        ValueError: the stream is malformed, or has more bytes.
    """
    found = np.empty(size_max, np.uint8)
    size = library().dlfs_lzf_decompress(data, len(data), found.ctypes.data, size_max)
    if size < 0:
        reason = library().dlfs_strerror(size).decode()
        raise ValueError(f"expected a stream of LZF of at most {size_max} bytes: {reason}")
    return found[:size].tobytes()
