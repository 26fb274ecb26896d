"""An order of packing that fills chunks: the same samples, each little moved, little unused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlfs._native.packing import Packer
from dlfs.base.units import KIB, MIB
from dlfs.errors import UsageError
from dlfs.format.location import LOCATION

CHUNK_BYTES = 256 * KIB
CANDIDATES = 64


def packed_bytes(lengths: np.ndarray, order: np.ndarray) -> int:
    packer = Packer(chunk_bytes=CHUNK_BYTES, block_bytes=4096)
    window = np.empty(int(2 * lengths.sum() + MIB) // CHUNK_BYTES * CHUNK_BYTES, np.uint8)
    packer.pack(
        np.zeros(int(lengths.max()), np.uint8),
        np.zeros(len(lengths), np.int64),
        lengths,
        order=order,
        window=window,
        window_address=0,
        locations=np.zeros(len(lengths), LOCATION),
    )
    return packer.address


def test_images_fill_their_chunks():
    lengths = np.random.default_rng(1).lognormal(11.5, 0.5, 600).astype(np.int64)
    order = np.random.default_rng(2).permutation(600).astype(np.uint64)
    before = packed_bytes(lengths, order)
    Packer(chunk_bytes=CHUNK_BYTES, block_bytes=4096).fill_chunks(lengths, order)
    after = packed_bytes(lengths, order)
    assert sorted(order.tolist()) == list(range(600))
    assert before > 1.25 * lengths.sum()
    assert after < 1.15 * lengths.sum()


@settings(max_examples=50)
@given(st.lists(st.integers(0, 3 * CHUNK_BYTES), max_size=200))
def test_nobody_steps_ahead_far(sizes):
    lengths = np.array(sizes, np.int64)
    order = np.arange(len(sizes), dtype=np.uint64)
    Packer(chunk_bytes=CHUNK_BYTES, block_bytes=4096).fill_chunks(lengths, order)
    assert sorted(order.tolist()) == list(range(len(sizes)))
    assert all(sample - place < CANDIDATES for place, sample in enumerate(order.tolist()))


def test_small_samples_keep_their_order():
    lengths = np.full(1000, 4096, np.int64)
    order = np.random.default_rng(3).permutation(1000).astype(np.uint64)
    expected = order.copy()
    Packer(chunk_bytes=CHUNK_BYTES, block_bytes=4096).fill_chunks(lengths, order)
    assert order.tolist() == expected.tolist()


@pytest.mark.parametrize(("lengths", "order"), [([5], [1]), ([-1], [0])])
def test_wrong_orders_are_refused(lengths, order):
    packer = Packer(chunk_bytes=CHUNK_BYTES, block_bytes=4096)
    with pytest.raises(UsageError):
        packer.fill_chunks(np.array(lengths, np.int64), np.array(order, np.uint64))
