"""Szip, a compression of HDF5 files: how many samples a stream has.

Threads: any at once.
"""

from __future__ import annotations

import ctypes

from dlfs._native.abi import Szip
from dlfs._native.library import library


def count_samples(data: bytes, form: Szip, count_max: int) -> int:
    """Return the number of samples that a stream of szip has before it ends.

    Args:
        data: the stream.
        form: how it is divided.
        count_max: most samples to count.

    Raises:
        ValueError: the stream or the form is malformed.
    """
    count = int(library().dlfs_szip_count(data, len(data), ctypes.byref(form), count_max))
    if count < 0:
        raise ValueError(f"expected a stream of szip: {library().dlfs_strerror(count).decode()}")
    return count
