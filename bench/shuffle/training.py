"""A small model trained by an order, on digits that are stored class by class.

The model and the data are those of ``dlfs demo``: one hidden layer, 1,797 images of scikit-learn.
All orders of one seed begin with the same weights and are tested on the same held-out images.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench.shuffle.orders import Order, Stored
from dlfs.cli.digits import PIXELS, Classifier, initial_weights, is_held_out

PER_CHUNK = 16
"""Digits in a chunk: about nine chunks of each class."""
BATCH = 32


@dataclass(frozen=True, eq=False)
class Digits:
    """Images and classes: those to learn in the order in which they are stored.

    Attributes:
        images: float32[n, 64], 0..1.
        labels: int64[n].
        test_images: likewise, held out.
        test_labels: likewise.
        stored: where the images to learn lie.
    """

    images: NDArray[np.float32]
    labels: NDArray[np.int64]
    test_images: NDArray[np.float32]
    test_labels: NDArray[np.int64]
    stored: Stored

    @classmethod
    def load(cls, *, by_class: bool = True) -> Digits:
        """Take them from scikit-learn, which ships them.

        Args:
            by_class: store them class by class; else in a random order.
        """
        from sklearn.datasets import load_digits

        digits = load_digits()
        images = (digits.images.reshape(-1, PIXELS) / 16).astype(np.float32)
        labels = digits.target.astype(np.int64)
        held_out = is_held_out(np.arange(len(labels), dtype=np.uint64))
        order = np.random.default_rng(0).permutation(np.count_nonzero(~held_out))
        if by_class:
            order = order[np.argsort(labels[~held_out][order], kind="stable")]
        return cls(
            images[~held_out][order],
            labels[~held_out][order],
            images[held_out],
            labels[held_out],
            Stored.lay(len(order), PER_CHUNK),
        )


def accuracies(digits: Digits, order: Order, *, epochs: int, seed: int) -> NDArray[np.float64]:
    """Train, and test after every epoch: the share of held-out digits that is right."""
    model = Classifier(weights=initial_weights(seed))
    found = []
    for epoch in range(epochs):
        places = order.places(digits.stored, seed=seed, epoch=epoch)
        for first in range(0, len(places), BATCH):
            chosen = places[first : first + BATCH]
            model.learn(digits.images[chosen], digits.labels[chosen])
        found.append((model.classify(digits.test_images) == digits.test_labels).mean())
    return np.array(found)


def curves(digits: Digits, order: Order, *, epochs: int, seeds: int) -> NDArray[np.float64]:
    """``float64[seeds, epochs]`` of ``accuracies``."""
    runs = [accuracies(digits, order, epochs=epochs, seed=seed) for seed in range(1, seeds + 1)]
    return np.stack(runs)
