"""The types of options that take one of several words, and the checks of arguments.

The literal types are for annotations, here and in users' code: ``shuffle: dlfs.Shuffle | None``.
Every check raises a ``UsageError`` that names the option, the values allowed and the value given,
whatever its type. Nothing here has state; any thread may use it.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Literal, SupportsIndex, get_args

from dlfs.errors import UsageError
from dlfs.wording import close_matches, join_words, show_value

Shuffle = Literal["global", "chunk"]
"""How an epoch is permuted; None in its place is storage order."""

OnError = Literal["raise", "skip", "replace"]
"""What a read does about a sample that cannot be read."""

ReadPlan = Literal["auto", "direct", "chunks", "harvest"]
"""How an epoch is read ahead."""

Engine = Literal["auto", "uring", "threads"]
"""How file devices are read: by io_uring, or by threads."""

Layout = Literal["shuffled", "path"]
"""The order in which a writer packs samples."""

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
    """Refuse a value that is not one of those allowed.

    Args:
        value: as given, of any type.
        allowed: what it may be.
        option: its name.
        action: what the call does, for the message.
        otherwise: what else is allowed and was checked by the caller, such as ``a function``.

    Raises:
        UsageError: it is none of them.
    """
    for one in allowed:
        if value is one:  # the usual case, on the way of every read
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
    """Refuse what is not an integer in a range; numpy's integers are integers, bools are not.

    Args:
        value: as given, of any type.
        low: the least allowed.
        high: the greatest allowed; None: there is none.
        option: its name.
        action: what the call does, for the message.

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


def as_integer(value: object) -> int | None:
    """Return the integer that a value of any type is; None for bools and for everything else."""
    # numpy's bool is no integer by itself: operator.index refuses it. Arrays are no scalars here.
    if isinstance(value, bool) or getattr(value, "ndim", None):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None
