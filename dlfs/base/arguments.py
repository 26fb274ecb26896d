"""The types of options with a fixed set of values, and the checks of arguments.

The literal types are for annotations, here and in users' code: ``shuffle: dlfs.Shuffle | None``.
A check of a value raises a ``UsageError`` that names the option, the allowed values and the given
value.

Threads: any; no state.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, SupportsIndex, get_args

from dlfs.base.wording import close_matches, join_words, show_value
from dlfs.errors import UsageError

Shuffle = Literal["global", "chunk"]
"""Permutation of an epoch; None stands for storage order."""

OnError = Literal["raise", "skip", "replace"]
"""Policy for samples that cannot be read."""

ReadPlan = Literal["auto", "direct", "chunks", "chunk_copy"]
"""Plan by which the samples of an epoch are read ahead."""

Engine = Literal["auto", "uring", "threads"]
"""Engine that reads file devices: io_uring, or threads."""

Layout = Literal["shuffled", "path"]
"""Order in which a writer packs samples."""

SHUFFLES: tuple[Shuffle, ...] = get_args(Shuffle)
ON_ERROR: tuple[OnError, ...] = get_args(OnError)
READ_PLANS: tuple[ReadPlan, ...] = get_args(ReadPlan)
ENGINES: tuple[Engine, ...] = get_args(Engine)


def check_choice(
    value: object,
    allowed: Sequence[str | bool | None],
    *,
    option: str,
    action: str,
    otherwise: str = "",
) -> None:
    """Refuse a value that is not among the allowed ones.

    Args:
        value: value as the caller gave it, of any type.
        allowed: allowed values.
        option: name of the option.
        action: action of the call, for the message.
        otherwise: other allowed values that the caller has checked, such as ``a function``.

    Raises:
        UsageError: it is not among them.
    """
    for one in allowed:
        if value is one:  # the usual case, on every read
            return
    words = [one for one in allowed if isinstance(one, str)]
    if isinstance(value, str) and value in words:
        return
    close = close_matches(value, words, 1) if isinstance(value, str) else []
    hint = f"; did you mean {close[0]!r}?" if close else ""
    expected = join_words([*map(repr, allowed), *([otherwise] if otherwise else [])], "or")
    raise UsageError(f"{action}: expected {option} {expected}, got {show_value(value)}{hint}")


def check_on_error(on_error: object) -> None:
    """Refuse an unknown policy for samples that cannot be read.

    Raises:
        UsageError: it is none of ``ON_ERROR``.
    """
    check_choice(on_error, ON_ERROR, option="on_error", action="read samples")


def check_integer(
    value: SupportsIndex, low: int, high: int | None = None, *, option: str, action: str
) -> int:
    """Refuse a value that is no integer in a range; numpy's integers are integers, bools are not.

    Args:
        value: value as the caller gave it, of any type.
        low: least allowed value.
        high: greatest allowed value; None if there is none.
        option: name of the option.
        action: action of the call, for the message.

    Returns:
        The integer.

    Raises:
        UsageError: it is no integer, or out of range.
    """
    number = as_integer(value)
    if number is None or number < low or (high is not None and number > high):
        span = f">= {low}" if high is None else f"{low}..{high}"
        raise UsageError(
            f"{action}: expected {option} as an integer {span}, got {show_value(value)}"
        )
    return number


def check_keywords(function: Callable[..., Any], taken: type, keywords: Iterable[str]) -> None:
    """Refuse a keyword that a function with ``**options: Unpack[...]`` does not take.

    Args:
        function: class or function that was called.
        taken: ``TypedDict`` of the keywords that it takes besides its parameters.
        keywords: names of the keywords of the call.

    Raises:
        TypeError: there is no such keyword; the message names the nearest one.
    """
    for name in keywords:
        if name not in taken.__annotations__:
            known = [*inspect.signature(function).parameters, *taken.__annotations__]
            close = close_matches(name, known, 1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise TypeError(
                f"{function.__qualname__}() got an unexpected keyword argument {name!r}{hint}"
            )


def as_integer(value: object) -> int | None:
    """Return the integer that a value of any type represents; None for bools and non-integers."""
    # numpy's bool is no integer by itself: operator.index refuses it. Arrays are no scalars here.
    if isinstance(value, bool) or getattr(value, "ndim", None):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None
