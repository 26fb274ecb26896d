"""In which order samples are packed, and how they are cut into blocks.

``shuffled`` is a keyed permutation of the whole source: neighbours on the volume come from
anywhere in it. ``path`` keeps the order in which the source lists its samples.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dlfs.arguments import Layout
from dlfs.sequence import packing_permutation

BLOCK_SAMPLES_MAX = 1 << 17
"""Samples of one block, however small. A block of a shuffled order has samples from all over the
source, and reads through its directories and inodes once: where these are more than the memory for
them, small blocks of a large source wait for the disk most of the time."""


def packing_order(count: int, *, layout: Layout, seed: int) -> npt.NDArray[np.uint64]:
    """The order of a source's samples on the volume, ``uint64[count]``."""
    if layout == "path" or count == 0:
        return np.arange(count, dtype=np.uint64)
    return packing_permutation(count, seed).map()


def take_block(
    order: npt.NDArray[np.uint64],
    sizes: npt.NDArray[np.uint64],
    position: int,
    buffer_bytes: int,
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
    """The samples of the next block, and where in its buffer each goes.

    Args:
        order: ``uint64[n]``, all samples in the order of packing.
        sizes: ``uint64[n]``, in bytes, by index.
        position: of the next sample in ``order``, below n.
        buffer_bytes: what a block holds; a sample over it comes alone.

    Returns:
        Indices ``uint64[k]`` and offsets ``int64[k]``, k >= 1.
    """
    chosen = order[position : position + BLOCK_SAMPLES_MAX]
    ends = np.cumsum(sizes[chosen])
    count = max(1, int(np.searchsorted(ends, buffer_bytes, side="right")))
    offsets = np.concatenate([[0], ends[: count - 1]]).astype(np.int64)
    return chosen[:count], offsets
