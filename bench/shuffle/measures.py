"""Measures of the quality of a shuffle: of an epoch, of its batches, and of two epochs.

An epoch is ``int64[n_samples]``: the position in storage of each sample, in the order of the epoch.
Measures that are compared with a uniform order are divided by their mean for such an order, so that
1.0 is as good.

Rank correlation shows whether the epoch as a whole follows storage. It is near 0 as soon as chunks
are permuted, and does not show the composition of a batch. The measures of neighbours, pairs and
classes do. A batch of samples that were stored together and are alike harms a training.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy  # loads scipy.stats at its first use
from numpy.typing import NDArray

Epoch = NDArray[np.int64]


@dataclass(frozen=True)
class Quality:
    """All measures of an order.

    Attributes:
        spearman: Spearman's rank correlation of position in storage and in the epoch; 0: none.
        kendall: Kendall's rank correlation of the same: share of pairs in storage order minus share
            of pairs in the opposite order.
        neighbour_distance: median distance in storage of consecutive samples, over that of a
            uniform order.
        neighbour_spread: largest difference between the distribution of that distance and that of a
            uniform order, 0..1 (the statistic of Kolmogorov and Smirnov).
        pairs_of_chunk: pairs in a batch that are of one chunk, over those of a uniform order.
        class_bits: mean entropy of the classes of a batch, in bits.
        class_bits_uniform: mean entropy of the classes of a batch in a uniform order, in bits.
        class_variance: variance of the number of a class's samples in a batch, over that of a
            uniform order. Where gradients depend on the class, their noise grows by this factor.
        class_variance_shuffled: `class_variance` if samples are stored in a random order, as import
            does by default, instead of class by class.
        epochs_spearman: rank correlation of the positions of samples in two epochs.
        pairs_again: pairs in a batch that are in one batch of the next epoch as well, over those of
            two uniform orders.
    """

    spearman: float
    kendall: float
    neighbour_distance: float
    neighbour_spread: float
    pairs_of_chunk: float
    class_bits: float
    class_bits_uniform: float
    class_variance: float
    class_variance_shuffled: float
    epochs_spearman: float
    pairs_again: float


def measure(epoch: Epoch, other: Epoch, *, per_chunk: int, batch: int, classes: int) -> Quality:
    """Measure an epoch and its similarity to the next one.

    Args:
        epoch: ``int64[n_samples]``.
        other: the next epoch, ``int64[n_samples]``.
        per_chunk: samples in a chunk.
        batch: samples in a batch, at most n_samples; a last short batch is left out.
        classes: number of classes, stored one after the other, of equal size.
    """
    count = len(epoch)
    batches = batches_of(epoch, batch)
    labels = sorted_labels(count, classes)
    mixed = np.random.default_rng(count).permutation(labels)
    sizes = np.bincount(labels, minlength=classes)
    return Quality(
        spearman=float(scipy.stats.spearmanr(np.arange(count), epoch).statistic),
        kendall=float(scipy.stats.kendalltau(np.arange(count), epoch).statistic),
        neighbour_distance=neighbour_distance(epoch),
        neighbour_spread=neighbour_spread(epoch),
        pairs_of_chunk=pairs_together(batches // per_chunk) / chance_of_chunk(count, per_chunk),
        class_bits=class_bits(labels[batches], classes),
        class_bits_uniform=class_bits_uniform(sizes, batch),
        class_variance=class_variance(labels[batches], sizes),
        class_variance_shuffled=class_variance(mixed[batches], sizes),
        epochs_spearman=float(
            scipy.stats.spearmanr(positions_of(epoch), positions_of(other)).statistic
        ),
        pairs_again=pairs_again(epoch, other, batch),
    )


def sorted_labels(count: int, classes: int) -> NDArray[np.int64]:
    """Return the class at each position of storage; classes are stored one after the other."""
    return np.arange(count) * classes // count


def batches_of(epoch: Epoch, batch: int) -> NDArray[np.int64]:
    """Return the full batches of an epoch, ``int64[n_batches, batch]``."""
    full = len(epoch) // batch
    return epoch[: full * batch].reshape(full, batch)


def positions_of(epoch: Epoch) -> NDArray[np.int64]:
    """Return the position in the epoch of each sample, by its position in storage."""
    positions = np.empty_like(epoch)
    positions[epoch] = np.arange(len(epoch))
    return positions


# ---- neighbours ----------------------------------------------------------------------------------


def distances(epoch: Epoch) -> NDArray[np.int64]:
    """Return the distances in storage of consecutive samples, ``int64[n_samples - 1]``."""
    return np.abs(np.diff(epoch))


def distances_uniform(count: int) -> NDArray[np.float64]:
    """Return the probability of a distance of at most 1, 2, ... count - 1 in a uniform order.

    Two positions have the distance d in count - d of count * (count - 1) / 2 cases.
    """
    probabilities = 2 * (count - np.arange(1.0, count)) / (count * (count - 1.0))
    return np.cumsum(probabilities)


def neighbour_distance(epoch: Epoch) -> float:
    """Return the median distance of consecutive samples, over that of a uniform order."""
    expected = 1 + int(np.searchsorted(distances_uniform(len(epoch)), 0.5))
    return float(np.median(distances(epoch))) / expected


def neighbour_spread(epoch: Epoch) -> float:
    """Return the largest difference of the distribution of distances from a uniform order's."""
    count = len(epoch)
    seen = np.cumsum(np.bincount(distances(epoch), minlength=count)[1:]) / (count - 1)
    return float(np.abs(seen - distances_uniform(count)).max())


# ---- pairs ---------------------------------------------------------------------------------------


def pairs_together(groups: NDArray[np.int64]) -> float:
    """Return the share of pairs of one group among all pairs of rows, ``int64[n_rows, n]``."""
    rows, batch = groups.shape
    ordered = np.sort(groups, axis=1)
    new = np.ones((rows, batch), bool)
    new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    sizes = np.diff(np.append(np.flatnonzero(new), rows * batch))
    return float((sizes * (sizes - 1)).sum()) / (rows * batch * (batch - 1))


def chance_of_chunk(count: int, per_chunk: int) -> float:
    """Return the probability that two random samples are of one chunk."""
    full, left = divmod(count, per_chunk)
    return (full * per_chunk * (per_chunk - 1) + left * (left - 1)) / (count * (count - 1))


def pairs_again(epoch: Epoch, other: Epoch, batch: int) -> float:
    """Return the pairs that share a batch in both epochs, over those of two uniform orders."""
    count, full = len(epoch), len(epoch) // batch
    later = positions_of(other)[batches_of(epoch, batch)] // batch
    sizes = [batch] * full + [count - full * batch]
    chance = sum(size * (size - 1) for size in sizes) / (count * (count - 1))
    return pairs_together(later) / chance


# ---- classes -------------------------------------------------------------------------------------


def class_counts(labels: NDArray[np.int64], classes: int) -> NDArray[np.int64]:
    """Count the samples of each class in each batch, ``int64[n_batches, classes]``."""
    rows = len(labels)
    keys = labels + np.arange(rows)[:, np.newaxis] * classes
    return np.bincount(keys.ravel(), minlength=rows * classes).reshape(rows, classes)


def class_bits(labels: NDArray[np.int64], classes: int) -> float:
    """Return the mean entropy of the classes in batches ``int64[n_batches, batch]``, in bits."""
    return float(scipy.stats.entropy(class_counts(labels, classes), base=2, axis=1).mean())


def class_bits_uniform(sizes: NDArray[np.int64], batch: int) -> float:
    """Return the mean entropy, in bits, of batches drawn at random without replacement.

    The number of a class's samples in such a batch is hypergeometric; means add up.
    """
    shares = np.arange(1, batch + 1) / batch
    bits = -shares * np.log2(shares)
    counts = np.arange(1, batch + 1)
    total = int(sizes.sum())
    distinct, times = np.unique(sizes, return_counts=True)
    means = [
        (scipy.stats.hypergeom.pmf(counts, total, size, batch) * bits).sum() for size in distinct
    ]
    return float((np.array(means) * times).sum())


def class_variance(labels: NDArray[np.int64], sizes: NDArray[np.int64]) -> float:
    """Return the variance of class counts in batches, over that of batches drawn at random."""
    batch, total = labels.shape[1], sizes.sum()
    shares = sizes / total
    seen = ((class_counts(labels, len(sizes)) - batch * shares) ** 2).mean(axis=0).sum()
    uniform = (batch * shares * (1 - shares)).sum() * (total - batch) / (total - 1)
    return float(seen / uniform)
