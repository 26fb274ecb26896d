"""Blocks of an order: as many samples as the buffer holds, within a limit."""

from __future__ import annotations

import numpy as np

from dlfs.base.units import MIB
from dlfs.ingest.order import BLOCK_SAMPLES_MAX, packing_order, take_block


def blocks(sizes: list[int], buffer_bytes: int) -> list[list[int]]:
    order = packing_order(len(sizes), layout="path", seed=0)
    taken: list[list[int]] = []
    while sum(map(len, taken)) < len(order):
        position = sum(map(len, taken))
        indices, offsets = take_block(order, np.array(sizes, np.uint64), position, buffer_bytes)
        lengths = [sizes[index] for index in indices.tolist()]
        assert offsets.tolist() == np.concatenate([[0], np.cumsum(lengths)])[:-1].tolist()
        taken.append(indices.tolist())
    return taken


def test_a_block_holds_what_fits() -> None:
    assert blocks([3, 3, 4, 11, 1, 0, 9, 1], 10) == [[0, 1, 2], [3], [4, 5, 6], [7]]


def test_many_small_samples_take_few_blocks() -> None:
    """Each block of a shuffled order goes through all directories of the source."""
    count = 2 * BLOCK_SAMPLES_MAX + 1
    order = packing_order(count, layout="shuffled", seed=1)
    sizes = np.full(count, 100, np.uint64)
    indices, _ = take_block(order, sizes, 0, 32 * MIB)
    assert len(indices) == BLOCK_SAMPLES_MAX > 100_000
    indices, _ = take_block(order, sizes, 2 * BLOCK_SAMPLES_MAX, 32 * MIB)
    assert indices.tolist() == order[-1:].tolist()
