"""The sources of a ``Loader``: datasets, views, and documents packed into sequences of tokens.

A dataset's batches are ``Batch`` objects. A sequence of ``TokenSequences`` is to a loader what a
sample with the fields ``tokens`` and ``documents`` is; ``SequenceBatch`` is a batch of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dlfs import Dataset, DatasetView, TokenBatch, TokenSequences
from dlfs.adapters.torch.labels import Labels, bind_labels
from dlfs.base.wording import show_value
from dlfs.epoch.options import EpochOptions
from dlfs.errors import UsageError

Source = Dataset | DatasetView | TokenSequences
"""The object that a ``Loader`` reads from."""


class SequenceBatch:
    """A batch of sequences with the fields ``tokens``, ``int64[n, length]``, and ``documents``.

    Args:
        batch: the sequences.

    Attributes:
        indices: numbers of the sequences in the epoch, ``int64[n]``.
        failures: always empty.
        fields: type of each field by name.
    """

    def __init__(self, batch: TokenBatch) -> None:
        self.indices = batch.indices
        self.failures = batch.failures
        # The type of tokens that embeddings and losses of PyTorch take.
        self._values: dict[str, npt.NDArray[Any]] = {
            "tokens": batch.tokens.astype(np.int64),
            "documents": batch.documents,
        }
        self.fields = {
            name: f"{values.dtype.str}[{values.shape[1]}]" for name, values in self._values.items()
        }

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        return self._values[name]


def check_source(source: Source, labels: Labels | None, **forms: Any) -> Labels | None:
    """Return the labels for what a loader reads.

    Args:
        source: what the loader reads.
        labels: labels that the caller gave.
        forms: arguments for the form of samples, none of which fits sequences of tokens.

    Raises:
        UsageError: they are labels of other samples, or an argument does not fit the source.
    """
    if not isinstance(source, TokenSequences):
        return bind_labels(labels, source)
    for name, value in {"labels": labels, **forms}.items():
        if value is not None and value is not False:
            raise UsageError(
                f"make a loader of packed tokens: expected no {name}, got {show_value(value)}; a "
                "transform makes what a model needs of a sequence's tokens and documents"
            )
    return None


def as_batch(batch: Any) -> Any:
    """Return a batch of an epoch as a batch of samples, for a ``Recipe``."""
    return SequenceBatch(batch) if isinstance(batch, TokenBatch) else batch


def read_positions(
    source: Source, options: EpochOptions, runs: Sequence[tuple[int, int]], stride: int
) -> Any:
    """Read the samples at some positions of an epoch as one batch.

    Args:
        source: what the loader reads.
        options: options of the epoch.
        runs: first position and number of positions of each run.
        stride: distance of the positions of a run.
    """
    if isinstance(source, TokenSequences):
        numbers = [first + stride * np.arange(count) for first, count in runs]
        return source.read(np.concatenate(numbers), options)
    order = source.order_epoch(options)
    indices = [order.indices(first, count, stride=stride) for first, count in runs]
    wanted = np.concatenate(indices)
    return source.read(wanted, on_error=options.on_error, fields=options.fields)
