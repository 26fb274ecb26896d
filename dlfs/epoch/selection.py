"""Chooses the samples of an epoch: all of them, a selection, draws by weight, or a given list.

A ``Selection`` is a list of indices, with weights if there are any, and the kind of order:

- ``list``: the list itself is the order;
- ``selected``: a permutation of the list, which depends on (seed, epoch); each sample occurs once;
- ``weighted``: draws with replacement, each sample in proportion to its weight. Draw number p of an
  epoch is a function of (seed, epoch, p), so that only the weights are stored. A function may give
  the weights of each epoch; an epoch is as long as every other one.

Ranks share the positions of a selection, and resume at them, as in the order of all samples. A
state has the fingerprint of its selection, because positions have no meaning in another selection.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dlfs.base.arguments import check_integer
from dlfs.base.distinct import find_distinct
from dlfs.directory import as_array, check_indices
from dlfs.epoch.options import EpochOptions
from dlfs.errors import UsageError

DRAWS_MAX = (1 << 62) - 1
"""Most samples of a weighted epoch."""

_FINGERPRINT_BYTES = 16


@dataclass(frozen=True, eq=False)
class Selection:
    """The samples of an epoch.

    Attributes:
        kind: ``list``, ``selected`` or ``weighted``.
        indices: indices of the samples, ``uint64[n]``; must not be changed.
        weights: weights of the samples, ``float64[n]``, if ``kind`` is ``weighted``.
        draws: samples of an epoch, if ``kind`` is ``weighted``.
        by_epoch: True if another epoch has other weights, which a function gives.
        fingerprint: hash of all these values; without the weights if another epoch has others.
    """

    kind: str
    indices: NDArray[np.uint64]
    weights: NDArray[np.float64] | None = None
    draws: int = 0
    by_epoch: bool = False
    fingerprint: str = field(init=False)

    def __post_init__(self) -> None:
        digest = hashlib.blake2b(digest_size=_FINGERPRINT_BYTES)
        digest.update(f"{self.kind} {len(self.indices)} {self.draws} ".encode())
        digest.update(self.indices.data)
        if self.weights is not None:
            digest.update(b"by epoch" if self.by_epoch else self.weights.data)
        object.__setattr__(self, "fingerprint", digest.hexdigest())

    def __len__(self) -> int:
        """Return the number of samples of an epoch."""
        return self.draws if self.kind == "weighted" else len(self.indices)


class SampleSet(Protocol):
    """The samples from which an epoch is chosen: those of a dataset, or of a view."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def order(self) -> NDArray[np.uint64]:
        """Return the indices of all samples in storage order."""


def select(
    samples: SampleSet,
    column: Callable[[str], NDArray[Any]],
    options: EpochOptions,
) -> Selection | None:
    """Make the selection that the options of an epoch describe.

    Args:
        samples: sample directory of the dataset, or a view.
        column: returns a column of attributes by its name.
        options: ``where``, ``weights``, ``draws``, ``order`` and ``shuffle`` are used.

    Returns:
        The selection; None for all samples.

    Raises:
        UsageError: the options exclude each other, or are out of range.
        NotFoundError: there is no such column.
        DlfsError: the column cannot be read.
    """
    if not options.has_choice:
        return None
    where, weights, draws, order = options.where, options.weights, options.draws, options.order
    shuffle = options.shuffle
    count = len(samples)
    if order is not None:
        if where is not None or weights is not None or draws is not None:
            raise UsageError(
                "order an epoch: expected order alone, got where, weights or draws too"
            )
        listed = check_indices(order, count, option="order", action="order an epoch")  # a copy
        return Selection("list", listed)
    if draws is not None and weights is None:
        raise UsageError("order an epoch: expected weights with draws, got none")
    if shuffle == "chunk" or (shuffle is None and weights is not None):
        raise UsageError(
            f"order an epoch: expected shuffle 'global' for chosen samples"
            f"{', or None' if weights is None else ''}, got {shuffle!r}"
        )
    chosen = np.arange(count, dtype=np.uint64) if where is None else choose_samples(where, count)
    if weights is not None:
        by_epoch = callable(weights)
        values = weights(options.epoch) if callable(weights) else weights
        return _weighted(chosen, _weights(values, column, count), draws, by_epoch=by_epoch)
    if shuffle is None:
        mask = np.zeros(count, np.bool_)
        mask[chosen] = True
        stored = samples.order()
        return Selection("list", np.ascontiguousarray(stored[mask[stored]]))
    return Selection("selected", chosen)


def choose_samples(
    where: ArrayLike, count: int, *, action: str = "order an epoch"
) -> NDArray[np.uint64]:
    """Return the indices of a mask or a list, in rising order.

    Args:
        where: ``bool[count]``, or indices, each once.
        count: number of samples.
        action: what the call does, for messages.

    Raises:
        UsageError: the mask has another length, or an index is out of range or occurs twice.
    """
    array = as_array(where, option="where", action=action)
    if array.dtype != np.bool_ or not array.ndim:
        listed = check_indices(where, count, option="where", action=action)
        chosen = find_distinct(listed)
        if len(chosen) < len(listed):
            ordered = np.sort(listed)
            twice = int(ordered[np.flatnonzero(ordered[1:] == ordered[:-1])[0]])
            times = np.count_nonzero(listed == twice)
            hint = "; a mask is of bools" if len(listed) == count and chosen[-1] <= 1 else ""
            raise UsageError(
                f"{action}: expected where as indices, each once, got {twice} {times} times{hint}"
            )
        return chosen
    if array.shape != (count,):
        raise UsageError(
            f"{action}: expected where as a mask of {count} samples, got one of shape {array.shape}"
        )
    return np.flatnonzero(array).astype(np.uint64)


def _weights(
    weights: str | ArrayLike, column: Callable[[str], NDArray[Any]], count: int
) -> NDArray[np.float64]:
    array = (
        column(weights)
        if isinstance(weights, str)
        else as_array(weights, option="weights", action="order an epoch")
    )
    if array.shape != (count,) or array.dtype.kind not in "biuf":
        raise UsageError(
            f"order an epoch: expected {count} numbers as weights, got {array.dtype} of "
            f"shape {array.shape}"
        )
    return array.astype(np.float64)


def _weighted(
    chosen: NDArray[np.uint64],
    weights: NDArray[np.float64],
    draws: int | None,
    *,
    by_epoch: bool,
) -> Selection:
    picked = weights[chosen]
    wrong = np.flatnonzero(~(np.isfinite(picked) & (picked >= 0)))
    if len(wrong):
        at = int(wrong[0])
        raise UsageError(
            f"order an epoch: expected weights of 0 or more, got {picked[at]} of sample "
            f"{chosen[at]}"
        )
    if not picked.any():
        raise UsageError("order an epoch: expected a sample with a weight above 0, got none")
    count = len(chosen) if draws is None else draws
    count = check_integer(count, 0, DRAWS_MAX, option="draws", action="order an epoch")
    return Selection("weighted", chosen, np.ascontiguousarray(picked), count, by_epoch)
