"""The epoch's order: a permutation, uniform, the same however it is cut, and stable for ever."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlfs._native.permutation import packing_permutation
from dlfs.base.units import KIB, MIB
from dlfs.block.memory import MemoryDevice
from dlfs.epoch.options import WINDOW_CHUNKS_MAX, EpochOptions, EpochState
from dlfs.epoch.order import Sequence
from dlfs.errors import UsageError
from tests.support.datasets import LaidDataset, lay_dataset, random_samples

CHUNK_BYTES = 16 * KIB

GLOBAL_42_7 = [11, 3, 13, 10, 17, 2, 7, 19, 1, 14, 12, 18, 0, 6, 5, 15, 16, 4, 9, 8]
CHUNK_42_7 = [14, 6, 16, 0, 4, 9, 11, 3, 5, 13, 7, 12, 18, 2, 15, 19, 10, 8, 17, 1]
PACKING_42_0 = [1, 4, 9, 5, 3, 7, 8, 2, 0, 6]
PACKING_42_1 = [8, 1, 4, 7, 0, 9, 2, 6, 5, 3]


def lay(count: int, **sizes: int) -> LaidDataset:
    with MemoryDevice(f"sequence-{count}", 32 * MIB, writable=True) as device:
        laid = lay_dataset([device], random_samples(count, **sizes), chunk_bytes=CHUNK_BYTES)
    MemoryDevice.forget(f"sequence-{count}")
    return laid


@pytest.fixture(scope="module")
def laid() -> LaidDataset:
    return lay(1000)


def order(laid: LaidDataset, **arguments) -> list[int]:
    options = EpochOptions(**arguments)
    return Sequence(laid.directory, options, chunk_bytes=CHUNK_BYTES).indices().tolist()


def chi_square(counts: list[int], expected: float) -> float:
    return sum((count - expected) ** 2 / expected for count in counts)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**64 - 1),
    epoch=st.integers(0, 2**64 - 1),
    shuffle=st.sampled_from(["global", "chunk", None]),
    window_chunks=st.integers(1, 300),
    cut=st.integers(0, 1000),
    stride=st.integers(1, 50),
)
def test_every_index_once_however_it_is_cut(laid, seed, epoch, shuffle, window_chunks, cut, stride):
    options = EpochOptions(shuffle=shuffle, seed=seed, epoch=epoch, window_chunks=window_chunks)
    sequence = Sequence(laid.directory, options, chunk_bytes=CHUNK_BYTES)
    whole = sequence.indices()
    assert sorted(whole.tolist()) == list(range(1000))
    assert (
        np.concatenate((sequence.indices(0, cut), sequence.indices(cut))).tolist() == whole.tolist()
    )
    for first in range(min(stride, 3)):
        assert sequence.indices(first, stride=stride).tolist() == whole[first::stride].tolist()


@pytest.mark.parametrize("count", [4, 5])
def test_global_shuffle_gives_every_permutation_equally_often(count):
    """Chi-square over all count! orders of many epochs, with fixed seeds."""
    laid = lay(count)
    orders = list(itertools.permutations(range(count)))
    draws = 200 * len(orders)
    seen = Counter(tuple(order(laid, seed=draw % 7, epoch=draw // 7)) for draw in range(draws))
    statistic = chi_square([seen[one] for one in orders], draws / len(orders))
    freedom = len(orders) - 1
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5  # four standard deviations


def test_global_shuffle_puts_every_sample_everywhere_equally_often():
    laid = lay(50, high=100)
    draws = 4000
    counts = np.zeros((50, 50))
    follows = np.zeros((50, 50))
    for epoch in range(draws):
        one = order(laid, seed=1, epoch=epoch)
        counts[np.arange(50), one] += 1
        follows[one[:-1], one[1:]] += 1
    freedom = 49 * 49
    assert chi_square(counts.ravel().tolist(), draws / 50) < freedom + 4 * (2 * freedom) ** 0.5
    pairs = follows[~np.eye(50, dtype=bool)]
    assert chi_square(pairs.tolist(), draws / 50) < len(pairs) + 4 * (2 * len(pairs)) ** 0.5


def test_epochs_and_seeds_differ(laid):
    seen = {
        tuple(order(laid, shuffle=shuffle, seed=seed, epoch=epoch))
        for shuffle in ("global", "chunk")
        for seed in (0, 1, 2**63)
        for epoch in (0, 1, 2**32)
    }
    assert len(seen) == 18


def test_chunk_shuffle_stays_within_its_windows(laid):
    """Samples of one window come from window_chunks chunks, and every chunk is in one window."""
    chunks = laid.directory.addresses() // CHUNK_BYTES
    sequence = order(laid, shuffle="chunk", seed=3, window_chunks=8)
    visited: list[int] = []
    for index in sequence:
        chunk = int(chunks[index])
        if chunk not in visited[-8:]:
            visited.append(chunk)
    # Inside a window chunks come and go: cut the visits where a window of eight is complete.
    windows: list[set[int]] = [set()]
    for index in sequence:
        chunk = int(chunks[index])
        if chunk not in windows[-1] and len(windows[-1]) == 8:
            windows.append(set())
        windows[-1].add(chunk)
    assert sum(len(window) for window in windows) == len(set(chunks.tolist()))
    assert (
        order(laid, shuffle=None)
        == np.lexsort((np.arange(1000), laid.directory.addresses())).tolist()
    )


def test_the_order_never_changes():
    """Part of the API: a checkpoint of today is resumed by any later version."""
    laid = lay(20, high=100)
    assert order(laid, seed=42, epoch=7) == GLOBAL_42_7
    assert order(laid, seed=42, epoch=7, shuffle="chunk") == CHUNK_42_7


def test_positions_outside_are_refused(laid):
    sequence = Sequence(laid.directory, EpochOptions(), chunk_bytes=CHUNK_BYTES)
    assert len(sequence) == 1000
    assert sequence.indices(1000).tolist() == []
    outside = ((0, 1001, 1), (-1, 1, 1), (999, 2, 1), (0, 2, 1000), (0, 1, 0), (0, -1, 1))
    for first, count, stride in outside:
        with pytest.raises(UsageError, match="take positions"):
            sequence.indices(first, count, stride=stride)


STATE = EpochState(
    "a dataset", "its packing", "global", seed=1, epoch=2, window_chunks=3, position=4
)


def test_a_state_comes_back_from_plain_values():
    assert EpochState.from_dict(STATE.to_dict()) == STATE
    with pytest.raises(AttributeError):
        STATE.position = 5


@pytest.mark.parametrize(
    ("field", "low", "high"),
    [
        ("seed", 0, 2**64 - 1),
        ("epoch", 0, 2**64 - 1),
        ("position", 0, 2**64 - 1),
        ("window_chunks", 1, WINDOW_CHUNKS_MAX),
    ],
)
def test_numbers_of_a_state_have_ranges(field, low, high):
    for value in (low, high):
        assert getattr(EpochState.from_dict({**STATE.to_dict(), field: value}), field) == value
    for value in (low - 1, high + 1):
        with pytest.raises(UsageError, match=f"{field}.* got {value}"):
            EpochState.from_dict({**STATE.to_dict(), field: value})


@pytest.mark.parametrize(
    "values",
    [
        None,
        [],
        ["version"],
        {},
        {"version": 2},
        {**STATE.to_dict(), "more": 1},
        {**STATE.to_dict(), 7: 1},
        {name: 2 for name in STATE.to_dict() if name != "seed"},
    ],
)
def test_other_values_are_no_state(values):
    with pytest.raises(UsageError, match="expected an epoch's state"):
        EpochState.from_dict(values)


WRONG = [None, True, 1.5, -1, "4", b"x", [1], {"a": 1}, object(), np.arange(2), np.float64(2)]


@pytest.mark.parametrize("field", [*STATE.to_dict(), "selection"])
@pytest.mark.parametrize("value", WRONG, ids=[type(value).__name__ for value in WRONG])
def test_a_value_of_a_wrong_type_is_named(field, value):
    """Checkpoints are edited by hand, and come from other programs."""
    text = isinstance(value, str) and field in ("dataset", "packing", "selection")
    if text or (value is None and field in ("shuffle", "selection")):
        return
    with pytest.raises(UsageError, match=rf"resume an epoch: expected .*{field}.* got "):
        EpochState.from_dict({**STATE.to_dict(), field: value})


def test_a_state_takes_numpys_integers():
    numbers = {name: np.int64(getattr(STATE, name)) for name in ("seed", "epoch", "position")}
    found = EpochState.from_dict({**STATE.to_dict(), **numbers, "version": np.uint8(2)})
    assert found == STATE
    assert found.to_dict() == STATE.to_dict()


def test_the_order_of_packing_never_changes():
    assert packing_permutation(10, 42).map().tolist() == PACKING_42_0
    assert packing_permutation(10, 42, 1).map().tolist() == PACKING_42_1
