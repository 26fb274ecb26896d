"""The permutation from Python: uniformity by chi-square, pinned orders, wrong use.

Seeds are fixed, so each statistic is one number, not a chance; the bounds are the 0.001 and 0.999
quantiles.
"""

import itertools
import math

import numpy as np
import pytest
import scipy  # loads scipy.stats at its first use

from dlfs._native.permutation import SIZE_MAX, Permutation
from dlfs.errors import UsageError


def assert_uniform(counts: "np.ndarray[tuple[int, ...], np.dtype[np.int64]]") -> None:
    """The counts of equally likely events are neither too uneven nor too even."""
    expected = counts.sum() / counts.size
    statistic = float(((counts - expected) ** 2 / expected).sum())
    low, high = scipy.stats.chi2.ppf([0.001, 0.999], counts.size - 1)
    assert low < statistic < high


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6])
def test_all_permutations_of_few_are_equally_likely(size: int) -> None:
    rank = {order: i for i, order in enumerate(itertools.permutations(range(size)))}
    counts = np.zeros(math.factorial(size), np.int64)
    for seed in range(40 * max(50, counts.size)):
        counts[rank[tuple(Permutation(size, seed).map().tolist())]] += 1
    assert_uniform(counts)


def test_streams_of_one_seed_are_uniform_too() -> None:
    rank = {order: i for i, order in enumerate(itertools.permutations(range(5)))}
    counts = np.zeros(120, np.int64)
    for stream in range(4800):
        counts[rank[tuple(Permutation(5, 9, stream).map().tolist())]] += 1
    assert_uniform(counts)


@pytest.mark.parametrize("size", [9, 15, 49])
def test_odd_and_even_permutations_are_equally_likely(size: int) -> None:
    """Sizes whose square root invites two odd halves, which could make even permutations only."""
    counts = np.zeros(2, np.int64)
    for seed in range(2000):
        order = Permutation(size, seed).map().astype(np.int64)
        inversions = int((order[:, None] > order[None, :])[np.triu_indices(size, 1)].sum())
        counts[inversions % 2] += 1
    assert_uniform(counts)


@pytest.mark.parametrize("size", [100, 1000, 70000])
def test_positions_and_values_are_independent(size: int) -> None:
    """Cells of (position, value) fill alike over many seeds."""
    cells = 10
    counts = np.zeros((cells, cells), np.int64)
    for seed in range(max(20, 200_000 // size)):
        image = Permutation(size, seed).map().astype(np.int64)
        np.add.at(counts, (np.arange(size) * cells // size, image * cells // size), 1)
    expected = counts.sum() / counts.size
    # Rows and columns are full by construction: (cells - 1)^2 degrees of freedom.
    statistic = float(((counts - expected) ** 2 / expected).sum())
    low, high = scipy.stats.chi2.ppf([0.001, 0.999], (cells - 1) ** 2)
    assert low < statistic * (size - 1) / size < high


@pytest.mark.parametrize("size", [1000, 70000, 1_000_003])
def test_neighbours_are_unrelated(size: int) -> None:
    """The difference of neighbouring images is that of two random places on a circle."""
    image = Permutation(size, 4).map().astype(np.int64)
    difference = (image[1:] - image[:-1]) % size
    assert_uniform(np.bincount((difference - 1) * 16 // (size - 1), minlength=16))


def test_orders_never_change() -> None:
    """A run that resumes must meet the order it left: these values are pinned."""
    assert Permutation(10, 1, 2).map().tolist() == [7, 6, 4, 9, 8, 0, 5, 1, 3, 2]
    assert Permutation(10**12, 3, 4).map(5, 4).tolist() == [
        480489403180,
        571381741743,
        891399625002,
        176561158136,
    ]


@pytest.mark.parametrize(
    ("size", "seed", "stream"),
    [(0, 0, 0), (-1, 0, 0), (SIZE_MAX + 1, 0, 0), (1, -1, 0), (1, 1 << 64, 0), (1, 0, 1 << 64)],
)
def test_arguments_out_of_range_are_refused(size: int, seed: int, stream: int) -> None:
    with pytest.raises(UsageError, match="out of range"):
        Permutation(size, seed, stream)


@pytest.mark.parametrize(
    ("first", "count", "stride"),
    [(-1, 1, 1), (0, -1, 1), (0, 11, 1), (9, 2, 1), (0, 3, 5), (0, 1, 0)],
)
def test_positions_out_of_range_are_refused(first: int, count: int, stride: int) -> None:
    with pytest.raises(UsageError, match="out of range"):
        Permutation(10, 0).map(first, count, stride=stride)


def test_map_of_nothing() -> None:
    assert Permutation(10, 0).map(10).size == 0
    assert Permutation(10, 0).map(3, 0).size == 0
    assert Permutation(10, 0).map(9, 1, stride=1 << 70).size == 1
