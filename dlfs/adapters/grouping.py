"""Divides what is read or written into groups of a bounded size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike

T = TypeVar("T")


def group_by_bytes(
    items: Sequence[T], lengths: ArrayLike, size_bytes: int
) -> Iterator[Sequence[T]]:
    """Yield consecutive items in groups of about some bytes each; none is empty.

    Args:
        items: the items.
        lengths: length of each item in bytes, ``int64[n]``.
        size_bytes: bytes of a group; an item may be longer.
    """
    ends = np.cumsum(lengths) // size_bytes
    cuts = (np.flatnonzero(np.diff(ends)) + 1).tolist()
    for first, last in pairwise([0, *cuts, len(items)]):
        if last > first:
            yield items[first:last]
