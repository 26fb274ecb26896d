"""Data of the demo: scikit-learn's digits.

The digits are 1,797 images of 8 x 8 pixels, which scikit-learn ships. Samples are PNG files.

Source: E. Alpaydin, C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning
Repository, 1998.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

SIDE = 8
PIXELS = SIDE * SIDE
CLASSES = 10
HIDDEN = 64
TEST_STEP = 5
"""Step between the digits that are excluded from training, for the test."""

_SHADES = " ░▒▓█"


def write_digits(folder: Path) -> int:
    """Write every digit as ``folder/CLASS/NUMBER.png``, 8-bit gray.

    Returns:
        The number of digits.
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels = np.rint(digits.images * (255 / 16)).astype(np.uint8)
    for name in range(CLASSES):
        (folder / str(name)).mkdir(parents=True)
    for number, (image, label) in enumerate(zip(pixels, digits.target, strict=True)):
        Image.fromarray(image).save(folder / str(label) / f"{number:04}.png")
    return len(pixels)


def label_of(path: bytes) -> int:
    """Return the class in a sample's path."""
    return int(path.split(b"/", 1)[0])


def is_test_sample(indices: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Return True for each sample that belongs to the test, ``bool[n]``."""
    is_test: NDArray[np.bool_] = indices % TEST_STEP == 0
    return is_test


def decode(samples: Iterable[bytes]) -> NDArray[np.float32]:
    """Decode PNG files to float32[n_samples, 64], 0..1."""
    images = [np.asarray(Image.open(io.BytesIO(sample))).reshape(PIXELS) for sample in samples]
    return np.stack(images).astype(np.float32) / np.float32(255)


def draw(image: NDArray[np.float32]) -> list[str]:
    """Return a digit as eight lines of text, 16 columns wide."""
    levels = np.rint(image.reshape(SIDE, SIDE) * (len(_SHADES) - 1)).astype(int)
    return ["".join(_SHADES[level] * 2 for level in row) for row in levels]
