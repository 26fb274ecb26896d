"""A small model that is trained by an order, on digits that are stored class by class.

The data is that of ``make demo``, 1,797 images of scikit-learn; the model has one hidden layer.
All orders of one seed begin with the same weights and are tested on the same test images.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from bench.shuffle.orders import Order, Stored
from examples.demo.digits import CLASSES, HIDDEN, PIXELS, is_test_sample

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


def initial_weights(seed: int) -> list[NDArray[np.float32]]:
    """Return the initial weights: of the hidden layer, then of the last layer, each with biases."""
    random = np.random.default_rng(seed)
    first = random.normal(0, np.sqrt(2 / PIXELS), (PIXELS, HIDDEN))
    last = random.normal(0, np.sqrt(1 / HIDDEN), (HIDDEN, CLASSES))
    return [
        values.astype(np.float32) for values in (first, np.zeros(HIDDEN), last, np.zeros(CLASSES))
    ]


@dataclass
class Classifier:
    """A network with one hidden layer and a softmax, trained by gradient descent with momentum."""

    rate: float = 0.05
    momentum: float = 0.9
    weights: list[NDArray[np.float32]] = field(default_factory=lambda: initial_weights(seed=1))
    steps: list[NDArray[np.float32]] = field(init=False)

    def __post_init__(self) -> None:
        self.steps = [np.zeros_like(values) for values in self.weights]

    def forward(
        self, images: NDArray[np.float32]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return the hidden activations and the class probabilities."""
        first, first_bias, last, last_bias = self.weights
        hidden = np.maximum(images @ first + first_bias, 0)
        scores = hidden @ last + last_bias
        powers = np.exp(scores - scores.max(axis=1, keepdims=True))
        return hidden, powers / powers.sum(axis=1, keepdims=True)

    def learn(self, images: NDArray[np.float32], labels: NDArray[np.int64]) -> None:
        """Train on one batch."""
        hidden, error = self.forward(images)
        error[np.arange(len(labels)), labels] -= 1
        error /= len(labels)
        back = (error @ self.weights[2].T) * (hidden > 0)
        slopes = (images.T @ back, back.sum(axis=0), hidden.T @ error, error.sum(axis=0))
        for values, step, slope in zip(self.weights, self.steps, slopes, strict=True):
            step *= self.momentum
            step -= self.rate * slope
            values += step

    def classify(self, images: NDArray[np.float32]) -> NDArray[np.int64]:
        """Return the most probable class of each image."""
        _, probabilities = self.forward(images)
        classes: NDArray[np.int64] = probabilities.argmax(axis=1)
        return classes


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
