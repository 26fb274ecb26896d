"""A small model that is trained by an order, on digits that are stored class by class.

The model and the data are those of ``dlfs demo``: one hidden layer, 1,797 images of scikit-learn.
All orders of one seed begin with the same weights and are tested on the same test images.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench.shuffle.orders import Order, Stored
from dlfs.cli.digits import PIXELS, Classifier, initial_weights, is_test_sample

PER_CHUNK = 16
"""Digits in a chunk, so that each class has about nine chunks."""
BATCH = 32


@dataclass(frozen=True, eq=False)
class Digits:
    """Images of digits and their classes, split into training and test images.

    Attributes:
        images: training images in storage order, float32[n, 64], 0..1.
        labels: classes of the training images, int64[n].
        test_images: test images, float32[n_test, 64], 0..1.
        test_labels: classes of the test images, int64[n_test].
        stored: the training images in storage.
    """

    images: NDArray[np.float32]
    labels: NDArray[np.int64]
    test_images: NDArray[np.float32]
    test_labels: NDArray[np.int64]
    stored: Stored

    @classmethod
    def load(cls, *, by_class: bool = True) -> Digits:
        """Load them from scikit-learn, stored class by class or in a random order."""
        from sklearn.datasets import load_digits

        digits = load_digits()
        images = (digits.images.reshape(-1, PIXELS) / 16).astype(np.float32)
        labels = digits.target.astype(np.int64)
        is_test = is_test_sample(np.arange(len(labels), dtype=np.uint64))
        order = np.random.default_rng(0).permutation(np.count_nonzero(~is_test))
        if by_class:
            order = order[np.argsort(labels[~is_test][order], kind="stable")]
        return cls(
            images[~is_test][order],
            labels[~is_test][order],
            images[is_test],
            labels[is_test],
            Stored.lay(len(order), PER_CHUNK),
        )


def accuracies(digits: Digits, order: Order, *, epochs: int, seed: int) -> NDArray[np.float64]:
    """Train, and return the share of test images classified right after every epoch."""
    model = Classifier(weights=initial_weights(seed))
    found = []
    for epoch in range(epochs):
        positions = order.positions(digits.stored, seed=seed, epoch=epoch)
        for first in range(0, len(positions), BATCH):
            chosen = positions[first : first + BATCH]
            model.learn(digits.images[chosen], digits.labels[chosen])
        found.append((model.classify(digits.test_images) == digits.test_labels).mean())
    return np.array(found)


def curves(digits: Digits, order: Order, *, epochs: int, seeds: int) -> NDArray[np.float64]:
    """Return the ``accuracies`` of several seeds, ``float64[seeds, epochs]``."""
    return np.stack(
        [accuracies(digits, order, epochs=epochs, seed=seed) for seed in range(1, seeds + 1)]
    )
