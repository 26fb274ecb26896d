"""Expands one pattern into many file names: braces as WebDataset writes them, and globs."""

from __future__ import annotations

import glob
import re
from pathlib import Path

from dlfs.errors import LimitError, NotFoundError, UsageError

EXPANSIONS_MAX = 1_000_000
"""Most names that one pattern may stand for."""

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")


def expand(pattern: str) -> list[str]:
    """Return the paths that a pattern names, in order.

    ``{000000..000099}`` counts with leading zeros, ``{train,test}`` lists names, and ``*``, ``?``
    and ``[...]`` match existing files. A path that exists stands for itself, whatever characters it
    has.

    Raises:
        UsageError: the braces are malformed.
        NotFoundError: a glob matches nothing.
        LimitError: the pattern stands for too many names.
    """
    if Path(pattern).exists():
        return [pattern]
    found: list[str] = []
    for name in expand_braces(pattern):
        if Path(name).exists() or not glob.has_magic(name):
            found.append(name)
            continue
        matches = sorted(glob.glob(name))
        if not matches:
            raise NotFoundError(f"import {name}: nothing matches")
        found.extend(matches)
    return found


def expand_braces(pattern: str) -> list[str]:
    """Return the names that a pattern's braces stand for; the last braces change fastest.

    Raises:
        UsageError: a range counts down, or is not made of numbers.
        LimitError: the pattern stands for more than ``EXPANSIONS_MAX`` names.
    """
    names = [""]
    end = 0
    for match in _BRACES.finditer(pattern):
        choices = _choices(match[1], pattern)
        if len(names) * len(choices) > EXPANSIONS_MAX:
            raise LimitError(f"import {pattern}: expected at most {EXPANSIONS_MAX} names")
        fixed = pattern[end : match.start()]
        names = [name + fixed + choice for name in names for choice in choices]
        end = match.end()
    return [name + pattern[end:] for name in names]


def _choices(text: str, pattern: str) -> list[str]:
    span = _RANGE.fullmatch(text)
    if span is None:
        if ".." in text or "," not in text:
            raise UsageError(
                f"import {pattern}: expected {{first..last}} or {{a,b}}, got {{{text}}}"
            )
        return text.split(",")
    first, last = int(span[1]), int(span[2])
    if last < first:
        raise UsageError(f"import {pattern}: expected a rising range, got {{{text}}}")
    if last - first >= EXPANSIONS_MAX:
        raise LimitError(f"import {pattern}: expected at most {EXPANSIONS_MAX} names")
    return [str(number).zfill(len(span[1])) for number in range(first, last + 1)]
