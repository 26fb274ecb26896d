"""The distinct values of an array, without ``numpy.unique``.

That function imports ``numpy.ma`` when it is first called. A child forked by another thread in that
moment would wait for the import for ever, when it needs the module itself. The import also takes
up to a tenth of a second of the first read.

Threads: any at once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def find_distinct(values: NDArray[Any]) -> NDArray[Any]:
    """Return the distinct values of an array in rising order.

    Args:
        values: ``dtype[n]``; NaNs count as one value.
    """
    ordered = np.sort(values)
    distinct: NDArray[Any] = ordered[_is_first(ordered)]
    return distinct


def number_distinct(values: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.intp]]:
    """Return the distinct values of an array in rising order, and which of them each value is.

    Args:
        values: ``dtype[n]``; NaNs count as one value.

    Returns:
        ``dtype[n_distinct]`` and ``intp[n]``.
    """
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    first = _is_first(ordered)
    numbers = np.empty(len(values), np.intp)
    numbers[order] = np.cumsum(first) - 1
    return ordered[first], numbers


def _is_first(ordered: NDArray[Any]) -> NDArray[np.bool_]:
    """Return True for each value of a sorted array that differs from the one before."""
    first = np.ones(len(ordered), np.bool_)
    after, before = ordered[1:], ordered[:-1]
    first[1:] = after != before
    if ordered.dtype.kind in "fcmM":
        first[1:] &= (after == after) | (before == before)
    return first
