"""What a shuffle is worth, in numbers: of one epoch, of its batches, and of two epochs.

An epoch is ``int64[n_samples]``: the place in storage of each sample, in the order of the epoch.
What is compared with a uniform order is divided by what that gives on average: 1.0 is as good.

Rank correlation says whether the epoch as a whole runs along storage; it is near 0 as soon as
chunks are permuted, and so sees nothing of what happens within a batch. Neighbours, pairs and
classes do: what hurts a training is a batch of samples that lay together and are alike.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Epoch = NDArray[np.int64]


@dataclass(frozen=True)
class Quality:
    """All measures of an order.

    Attributes:
        spearman: rank correlation of place in storage and position in the epoch; 0: none.
        kendall: likewise: of pairs, the share in storage order less the share in the other.
        neighbour_distance: median distance in storage of samples that follow each other, over that
            of a uniform order.
        neighbour_spread: the largest difference between the distribution of that distance and a
            uniform order's, 0..1 (Kolmogorov and Smirnov's).
        pairs_of_chunk: pairs in a batch that are of one chunk, over those of a uniform order.
        class_bits: entropy of the classes of a batch, mean over the batches.
        class_bits_uniform: the same of a uniform order.
        class_variance: variance of the number of a class's samples in a batch, over that of a
            uniform order: so many times more noise in a gradient, where gradients go by class.
        class_variance_shuffled: the same where samples were stored in a random order, as import
            does by default, and not class by class.
        epochs_spearman: rank correlation of the positions that samples have in two epochs.
        pairs_again: pairs in a batch that are in one batch again in the next epoch, over those of
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

    def to_dict(self) -> dict[str, float]:
        """As plain values."""
        return asdict(self)


def measure(epoch: Epoch, other: Epoch, *, per_chunk: int, batch: int, classes: int) -> Quality:
    """Measure an epoch, and how much another one tells of it.

    Args:
        epoch: ``int64[n_samples]``.
        other: the next epoch, likewise.
        per_chunk: samples in a chunk.
        batch: samples in a batch, at most n_samples; a last one that is not full is left out.
        classes: stored one behind the other, each with as many samples.
    """
    count = len(epoch)
    batches = batches_of(epoch, batch)
    labels = sorted_labels(count, classes)
    mixed = np.random.default_rng(count).permutation(labels)
    sizes = np.bincount(labels, minlength=classes)
    return Quality(
        spearman=float(stats.spearmanr(np.arange(count), epoch).statistic),
        kendall=float(stats.kendalltau(np.arange(count), epoch).statistic),
        neighbour_distance=neighbour_distance(epoch),
        neighbour_spread=neighbour_spread(epoch),
        pairs_of_chunk=pairs_together(batches // per_chunk) / chance_of_chunk(count, per_chunk),
        class_bits=class_bits(labels[batches], classes),
        class_bits_uniform=class_bits_uniform(sizes, batch),
        class_variance=class_variance(labels[batches], sizes),
        class_variance_shuffled=class_variance(mixed[batches], sizes),
        epochs_spearman=float(stats.spearmanr(positions_of(epoch), positions_of(other)).statistic),
        pairs_again=pairs_again(epoch, other, batch),
    )


def sorted_labels(count: int, classes: int) -> NDArray[np.int64]:
    """The class at each place of storage: classes lie one behind the other."""
    return np.arange(count) * classes // count


def batches_of(epoch: Epoch, batch: int) -> NDArray[np.int64]:
    """Full batches, ``int64[n_batches, batch]``."""
    full = len(epoch) // batch
    return epoch[: full * batch].reshape(full, batch)


def positions_of(epoch: Epoch) -> NDArray[np.int64]:
    """The position in the epoch of each sample, by its place in storage."""
    positions = np.empty_like(epoch)
    positions[epoch] = np.arange(len(epoch))
    return positions


# ---- neighbours ----------------------------------------------------------------------------------


def distances(epoch: Epoch) -> NDArray[np.int64]:
    """How far apart in storage samples lie that follow each other, ``int64[n_samples - 1]``."""
    return np.abs(np.diff(epoch))


def distances_uniform(count: int) -> NDArray[np.float64]:
    """How probable a distance of at most 1, 2, ... count - 1 is in a uniform order.

    Two places are at a distance of d in count - d of count * (count - 1) / 2 cases.
    """
    probabilities = 2 * (count - np.arange(1.0, count)) / (count * (count - 1.0))
    return np.cumsum(probabilities)


def neighbour_distance(epoch: Epoch) -> float:
    """The median distance of neighbours, over that of a uniform order."""
    expected = 1 + int(np.searchsorted(distances_uniform(len(epoch)), 0.5))
    return float(np.median(distances(epoch))) / expected


def neighbour_spread(epoch: Epoch) -> float:
    """The largest difference of the distribution of distances from a uniform order's."""
    count = len(epoch)
    seen = np.cumsum(np.bincount(distances(epoch), minlength=count)[1:]) / (count - 1)
    return float(np.abs(seen - distances_uniform(count)).max())


# ---- pairs ---------------------------------------------------------------------------------------


def pairs_together(groups: NDArray[np.int64]) -> float:
    """Of all pairs in the rows of ``int64[n_batches, batch]``, the share that is of one group."""
    rows, batch = groups.shape
    ordered = np.sort(groups, axis=1)
    new = np.ones((rows, batch), bool)
    new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    sizes = np.diff(np.append(np.flatnonzero(new), rows * batch))
    return float((sizes * (sizes - 1)).sum()) / (rows * batch * (batch - 1))


def chance_of_chunk(count: int, per_chunk: int) -> float:
    """The probability that two samples drawn at random are of one chunk."""
    full, rest = divmod(count, per_chunk)
    return (full * per_chunk * (per_chunk - 1) + rest * (rest - 1)) / (count * (count - 1))


def pairs_again(epoch: Epoch, other: Epoch, batch: int) -> float:
    """Pairs of a batch that meet again in the other epoch, over those of two uniform orders."""
    count, full = len(epoch), len(epoch) // batch
    later = positions_of(other)[batches_of(epoch, batch)] // batch
    sizes = [batch] * full + [count - full * batch]
    chance = sum(size * (size - 1) for size in sizes) / (count * (count - 1))
    return pairs_together(later) / chance


# ---- classes -------------------------------------------------------------------------------------


def class_counts(labels: NDArray[np.int64], classes: int) -> NDArray[np.int64]:
    """Samples of each class in each batch, ``int64[n_batches, classes]``."""
    rows = len(labels)
    keys = labels + np.arange(rows)[:, np.newaxis] * classes
    return np.bincount(keys.ravel(), minlength=rows * classes).reshape(rows, classes)


def class_bits(labels: NDArray[np.int64], classes: int) -> float:
    """Mean entropy of the classes in the batches ``int64[n_batches, batch]``, in bits."""
    return float(stats.entropy(class_counts(labels, classes), base=2, axis=1).mean())


def class_bits_uniform(sizes: NDArray[np.int64], batch: int) -> float:
    """The mean entropy, in bits, of batches drawn at random without putting back.

    The number of a class's samples in such a batch is hypergeometric; means add up.
    """
    shares = np.arange(1, batch + 1) / batch
    bits = -shares * np.log2(shares)
    counts = np.arange(1, batch + 1)
    total = int(sizes.sum())
    distinct, times = np.unique(sizes, return_counts=True)
    means = [(stats.hypergeom.pmf(counts, total, size, batch) * bits).sum() for size in distinct]
    return float((np.array(means) * times).sum())


def class_variance(labels: NDArray[np.int64], sizes: NDArray[np.int64]) -> float:
    """Variance of the classes' counts in batches, over that of batches drawn at random."""
    batch, total = labels.shape[1], sizes.sum()
    shares = sizes / total
    seen = ((class_counts(labels, len(sizes)) - batch * shares) ** 2).mean(axis=0).sum()
    uniform = (batch * shares * (1 - shares)).sum() * (total - batch) / (total - 1)
    return float(seen / uniform)


def class_variance_of_window(*, window_chunks: int, per_chunk: int, batch: int) -> float:
    """What ``class_variance`` of chunk shuffle is near to, when a chunk is of one class.

    A pair of the batch is of one chunk with a probability of about 1 / window; such a pair is of
    one class for certain, any other one by chance. It holds for many classes and many windows.
    """
    same = (per_chunk - 1) / (window_chunks * per_chunk - 1)
    return 1 + (batch - 1) * same
