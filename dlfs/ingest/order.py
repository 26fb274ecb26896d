"""Chooses the order in which samples are packed, and cuts it into blocks and parts.

Layout ``shuffled`` is a keyed permutation of the whole source, so that neighbours on the volume
come from anywhere in it. Layout ``path`` keeps the order in which the source lists its samples.

A part is what one process of several imports: consecutive samples in this order (``part_ends``). It
ends where a step of an import ends by its bytes, so that a part is one step: behind a whole block,
because samples of a block are moved to fill chunks, or for layout ``path`` behind any sample.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from dlfs._native.permutation import packing_permutation
from dlfs.base.arguments import Layout
from dlfs.base.units import MIB
from dlfs.format.journal import STEP_SAMPLES, Cursor
from dlfs.ingest.source import Bytes, Int64Array, SampleBlock, Uint64Array

BLOCK_SAMPLES_MAX = 1 << 17
"""Most samples of one block, however small they are.

A block in shuffled order has samples from all over the source, and so reads directories and inodes
from all over the disk. If these exceed the kernel's cache, small blocks mostly wait for the disk.
"""

DISK_BLOCK_BYTES = 4096
"""Unit in which file systems give space to files, in bytes."""

DESCRIBED_BYTES = 128 * MIB
"""Most bytes of paths and attributes in the description of a part of more than one sample."""


def round_up(size_bytes: int) -> int:
    """Return the bytes that a file of some bytes takes on the disk."""
    return -(-size_bytes // DISK_BLOCK_BYTES) * DISK_BLOCK_BYTES


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


@dataclass(frozen=True, slots=True)
class PartSize:
    """The size of parts.

    Attributes:
        part_bytes: bytes of samples with which a part ends.
        block_bytes: most bytes of a block of more than one sample.
        whole_blocks: True if a part ends with a block; else behind any sample.
        disk_bytes: most bytes on the disk of the blocks of a part of more than one; None without a
            bound.
    """

    part_bytes: int
    block_bytes: int
    whole_blocks: bool
    disk_bytes: int | None = None


def part_ends(sizes: Uint64Array, described: Int64Array, limits: PartSize) -> list[int]:
    """Return where the parts of an order end, without the last one: rising positions in it.

    Args:
        sizes: ``uint64[n]``, size of each sample in bytes, in the order.
        described: ``int64[n]``, bytes of each sample in the description of its part.
        limits: size of the parts.
    """
    totals = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    names = np.concatenate([[0], np.cumsum(described, dtype=np.int64)])
    count = len(sizes)

    def reach(sums: Int64Array, start: int, size_bytes: int, side: Literal["left", "right"]) -> int:
        return int(np.searchsorted(sums, sums[start] + size_bytes, side))

    ends: list[int] = []
    begin = position = used_bytes = 0
    while position < count:
        is_full = False
        end = reach(totals, position, limits.block_bytes, "right") - 1
        end = max(position + 1, min(end, position + BLOCK_SAMPLES_MAX, count))
        if not limits.whole_blocks:
            end = min(end, reach(totals, begin, limits.part_bytes, "left"), begin + STEP_SAMPLES)
        disk_bytes = round_up(int(totals[end] - totals[position]))
        bound = limits.disk_bytes
        if bound is not None and used_bytes and used_bytes + disk_bytes > bound:
            used_bytes = 0
            if position > begin:
                ends.append(position)
                begin = position
                continue
        fitting = max(begin + 1, reach(names, begin, DESCRIBED_BYTES, "right") - 1)
        if fitting < end:
            end, is_full = fitting, True
            disk_bytes = round_up(int(totals[end] - totals[position]))
        used_bytes, position = used_bytes + disk_bytes, end
        is_full |= totals[end] - totals[begin] >= limits.part_bytes or end - begin >= STEP_SAMPLES
        if is_full:
            ends.append(end)
            begin = end
    return ends[:-1] if ends and ends[-1] == count else ends


def file_part_ends(sizes: Uint64Array, part_bytes: int, disk_bytes: int | None = None) -> list[int]:
    """Return where the parts of an order of files end, without the last one; see ``part_ends``.

    Args:
        sizes: ``uint64[n]``, size of each file in bytes.
        part_bytes: bytes of files with which a part ends.
        disk_bytes: most bytes on the disk of a part of more than one file; None without a bound.
    """
    limits = PartSize(part_bytes, block_bytes=0, whole_blocks=True, disk_bytes=disk_bytes)
    return part_ends(sizes, np.zeros(len(sizes), np.int64), limits)


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
    ends: Sequence[int] = (),
) -> Iterator[SampleBlock]:
    """Yield the blocks of a source whose samples can be read in any order, in two buffers in turn.

    Args:
        order: ``uint64[n]``, from ``packing_order``.
        sizes: ``uint64[n]``, bytes that each sample takes in the buffer.
        read: reads the samples of one block, and may leave some out.
        buffer_bytes: size of each of the two buffers; a larger sample gets a buffer of its size.
        first: position in the order to begin at. The cursor of each block is then the position
            behind it, ``{"position": N}``. None: all samples, in blocks without cursors.
        ends: positions at which parts end, but the last one; see ``part_ends``.
    """
    buffers = [np.empty(buffer_bytes, np.uint8) for _ in range(2)]
    position = first or 0
    while position < len(order):
        part = bisect_right(ends, position)
        end = ends[part] if part < len(ends) else len(order)
        indices, offsets = take_block(order[:end], sizes, position, buffer_bytes)
        position += len(indices)
        ended = part if position == end < len(order) else None
        needed = int(offsets[-1]) + int(sizes[indices[-1]])
        large = np.empty(needed, np.uint8) if needed > buffer_bytes else None
        block = read(indices, offsets, buffers[0] if large is None else large)
        if block.paths or ended is not None:
            cursor = block.cursor if first is None else {"position": position}
            yield replace(block, cursor=cursor, ends_part=ended)
            buffers.reverse()
