"""Indices of samples as users give them: arrays, lists and tensors of any type and size.

libdlfs takes ``uint64[n]`` and refuses numbers out of range. So ``as_indices`` maps numbers that
are no index (negative ones, and those beyond 64 bits) to very large ones; ``find_outside`` then
finds the number that was given.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dlfs.base.arguments import as_integer
from dlfs.base.wording import show_value
from dlfs.errors import UsageError

_UINT64_MAX = (1 << 64) - 1


def as_array(values: ArrayLike, *, option: str, action: str) -> NDArray[Any]:
    """Return values as an array of any type and shape.

    Args:
        values: the values, as given by a user.
        option: their name in the call, for the message.
        action: what the call does, for the message.

    Raises:
        UsageError: numpy can make no array of them, such as of lists of different lengths.
    """
    try:
        return np.asarray(values)
    except ValueError as error:
        raise UsageError(
            f"{action}: expected {option} as an array, got {show_value(values)}"
        ) from error


def as_indices(values: ArrayLike, *, option: str, action: str) -> NDArray[np.uint64]:
    """Make a new array of indices, without checking that they are in range.

    Args:
        values: integers, one dimension.
        option: their name in the call, for the message.
        action: what the call does, for the message.

    Returns:
        ``uint64[n]``, contiguous; far beyond any sample for a number that is no 64-bit index.

    Raises:
        UsageError: they are not integers of one dimension.
    """
    if isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.kind in "iu":
        return values.astype(np.uint64, "C")
    array = as_array(values, option=option, action=action)
    if array.ndim == 1 and (array.dtype.kind in "iu" or not array.size):
        return array.astype(np.uint64, "C")
    numbers = _integers(values) if array.ndim == 1 else None
    if numbers is None:
        shown = "" if isinstance(values, np.ndarray) else f": {show_value(values)}"
        raise UsageError(
            f"{action}: expected {option} as integers of one dimension, got {array.dtype} of "
            f"shape {array.shape}{shown}"
        )
    return np.array([n if 0 <= n < _UINT64_MAX else _UINT64_MAX for n in numbers], np.uint64)


def check_indices(values: ArrayLike, count: int, *, option: str, action: str) -> NDArray[np.uint64]:
    """Make a new array of indices that are all in range.

    Args:
        values: integers 0..count-1, one dimension.
        count: samples of the dataset.
        option: their name in the call, for the message.
        action: what the call does, for the message.

    Returns:
        ``uint64[n]``, contiguous.

    Raises:
        UsageError: they are not integers of one dimension, or one is out of range.
    """
    array = as_indices(values, option=option, action=action)
    if array.size and array.max() >= count:
        raise UsageError(f"{action}: {find_outside(values, 0, count, option=option)}")
    return array


def check_position(index: object, count: int, *, where: str, hint: str = "") -> int:
    """Return the index 0..count-1 of a sample for an index that may count from the end.

    Args:
        index: an integer, negative from the end.
        count: number of samples.
        where: name of the dataset or view, for the message.
        hint: end of the message for an index of another type.

    Raises:
        IndexError: there is no such sample.
        UsageError: the index is no integer.
    """
    number = as_integer(index)
    if number is None:
        raise UsageError(
            f"look up a sample of {where}: expected an integer, got {show_value(index)}{hint}"
        )
    if not -count <= number < count:
        raise IndexError(
            f"look up a sample of {where}: expected an index {-count}..{count - 1}, got {number}"
        )
    return number % count


def find_outside(values: ArrayLike, low: int, end: int, *, option: str) -> str | None:
    """Describe the first index out of range, as it was given.

    Args:
        values: integers, one dimension.
        low: the least allowed.
        end: one more than the greatest allowed.
        option: their name in the call.

    Returns:
        What was expected and what was given; None when all are in range.
    """
    for position, number in enumerate(_integers(values) or ()):
        if not low <= number < end:
            span = f"{option} {low}..{end - 1}" if end > 0 else f"no {option}: there are no samples"
            return f"expected {span}, got {number} at position {position}"
    return None


def _integers(values: ArrayLike) -> list[int] | None:
    """Return the values as integers of any size; None if they are something else."""
    plain: Any = values.tolist() if isinstance(values, np.ndarray) else values
    try:
        numbers = [as_integer(value) for value in plain]
    except TypeError:  # not a sequence
        return None
    return None if None in numbers else [number for number in numbers if number is not None]
