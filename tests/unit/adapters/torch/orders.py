"""The indices that batches hold, in their order.

It needs no PyTorch, so that the tests that import it are skipped rather than fail without it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import dlfs


def order(batches: Iterable[Any]) -> list[int]:
    """Return the indices of a loader's batches, one after the other."""
    return [index for batch in batches for index in batch.indices.tolist()]


def take_all(batches: Iterable[Any], given: list[Any]) -> None:
    """Append each batch to ``given``, so that those before an error are there too."""
    for batch in batches:
        given.append(batch)


def reference(dataset: dlfs.Dataset, **arguments: Any) -> list[int]:
    """Return the indices of an epoch as ``Dataset.batches`` gives them."""
    with dataset.batches(len(dataset), **arguments) as epoch:
        return [int(index) for batch in epoch for index in batch.indices]
