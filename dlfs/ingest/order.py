"""Chooses the order in which samples are packed, and cuts it into blocks.

Layout ``shuffled`` is a keyed permutation of the whole source, so that neighbours on the volume
come from anywhere in it. Layout ``path`` keeps the order in which the source lists its samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from dlfs._native.permutation import packing_permutation
from dlfs.base.arguments import Layout
from dlfs.format.journal import Cursor
from dlfs.ingest.source import Bytes, Int64Array, SampleBlock, Uint64Array

BLOCK_SAMPLES_MAX = 1 << 17
"""Most samples of one block, however small they are.

A block in shuffled order has samples from all over the source, and so reads directories and inodes
from all over the disk. If these exceed the kernel's cache, small blocks mostly wait for the disk.
"""


def packing_order(count: int, *, layout: Layout, seed: int) -> Uint64Array:
    """Return the order of a source's samples on the volume, ``uint64[count]``."""
    if layout == "path" or count == 0:
        return np.arange(count, dtype=np.uint64)
    return packing_permutation(count, seed).map()


def take_block(
    order: Uint64Array, sizes: Uint64Array, position: int, buffer_bytes: int
) -> tuple[Uint64Array, Int64Array]:
    """Choose the samples of the next block, and the offset of each in the block's buffer.

    Args:
        order: ``uint64[n]``, all samples in the order of packing.
        sizes: ``uint64[n]``, size of each sample in bytes, by index.
        position: position of the next sample in ``order``, below n.
        buffer_bytes: size of the buffer; a sample that exceeds it gets a block of its own.

    Returns:
        Indices ``uint64[k]`` and offsets ``int64[k]``, k >= 1.
    """
    chosen = order[position : position + BLOCK_SAMPLES_MAX]
    ends = np.cumsum(sizes[chosen])
    count = max(1, int(np.searchsorted(ends, buffer_bytes, side="right")))
    offsets = np.concatenate([[0], ends[: count - 1]]).astype(np.int64)
    return chosen[:count], offsets


def position_after(count: int, cursor: Cursor) -> int:
    """Return the position in an order of packing behind the first samples that were yielded.

    Args:
        count: number of these samples.
        cursor: cursor of ``indexed_blocks`` at or before this position. Behind it, all samples in
            the order must have been yielded.
    """
    return int(cursor.value["position"]) + count - cursor.count


ReadBlock = Callable[[Uint64Array, Int64Array, Bytes], SampleBlock]
"""Function that reads samples: their indices, an offset in the buffer for each, and the buffer."""


def indexed_blocks(
    order: Uint64Array,
    sizes: Uint64Array,
    read: ReadBlock,
    buffer_bytes: int,
    *,
    first: int | None = None,
) -> Iterator[SampleBlock]:
    """Yield the blocks of a source whose samples can be read in any order, in two buffers in turn.

    Args:
        order: ``uint64[n]``, from ``packing_order``.
        sizes: ``uint64[n]``, bytes that each sample takes in the buffer.
        read: reads the samples of one block, and may leave some out.
        buffer_bytes: size of each of the two buffers; a larger sample gets a buffer of its size.
        first: position in the order to begin at. The cursor of each block is then the position
            behind it, ``{"position": N}``. None: all samples, in blocks without cursors.
    """
    buffers = [np.empty(buffer_bytes, np.uint8) for _ in range(2)]
    position = first or 0
    while position < len(order):
        indices, offsets = take_block(order, sizes, position, buffer_bytes)
        position += len(indices)
        needed = int(offsets[-1]) + int(sizes[indices[-1]])
        large = np.empty(needed, np.uint8) if needed > buffer_bytes else None
        block = read(indices, offsets, buffers[0] if large is None else large)
        if block.paths:
            yield block if first is None else replace(block, cursor={"position": position})
            buffers.reverse()
