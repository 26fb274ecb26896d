r"""Formats values, names and choices for messages: quoted, cut to a length, likely ones first.

Names and paths are bytes of any encoding. A message shows them as text in quotes, with bytes that
are not UTF-8 as ``\xff``. Lists are cut, because a volume may have thousands of datasets. The
secrets of URLs are hidden.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any

VALUE_CHARACTERS_MAX = 80
NAME_CHARACTERS_MAX = 100
LISTED_MAX = 8
"""Most names in a list of a message."""

HIDDEN = "***"
"""What stands for the secrets of a URL."""
_URL = re.compile(
    r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<user>[^\s/?#<>]*@)?(?P<path>[^\s'\"<>?#]*)"
    r"(?P<query>[?#](?!\*\*\*(?:\W|$))[^\s<>]*)?"  # not what is hidden already
)
_WITH_QUERIES = ("http", "https")
"""Schemes whose URLs may have a signature in the query; in others, ``?`` may be any character."""
_WITH_CONTAINERS = ("abfs", "abfss", "adl", "az", "wasb", "wasbs")
"""Schemes of Azure whose URLs have the name of a container before the ``@``, and no user."""

_SURROGATE = re.compile(r"\\udc([89a-f][0-9a-f])")


def quote(name: bytes | str) -> str:
    """Format a name or a path for a message: in quotes, on one line, cut if it is long."""
    text = name if isinstance(name, str) else name.decode("utf-8", "surrogateescape")
    cut = text if len(text) <= NAME_CHARACTERS_MAX else text[: NAME_CHARACTERS_MAX - 3] + "..."
    return _SURROGATE.sub(r"\\x\1", repr(cut))


def show_value(value: object) -> str:
    """Format a value of any type for a message: text in quotes, cut if it is long."""
    text = " ".join(repr(value).split("\n"))
    long = len(text) > VALUE_CHARACTERS_MAX
    cut = text[: VALUE_CHARACTERS_MAX - 3] + "..." if long else text
    plain = isinstance(value, str | int | float | bytes | None)
    return cut if plain else f"{cut} ({type(value).__name__})"


def join_words(words: Sequence[str], last: str) -> str:
    """Join words as in prose: ``a, b or c``."""
    return f" {last} ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def close_matches(wanted: str, names: Iterable[str], count: int = 3) -> list[str]:
    """Return the names that a user may have meant, nearest first."""
    lower: dict[str, str] = {}
    for name in names:
        lower.setdefault(name.lower(), name)
    return [lower[one] for one in difflib.get_close_matches(wanted.lower(), lower, count)]


def list_names(names: Iterable[str], *, wanted: str = "") -> str:
    """Format a list of names for a message, names close to ``wanted`` first.

    Returns:
        At most ``LISTED_MAX`` names, such as ``'photos', 'scans' and 12 more``; or ``none``.
    """
    every = sorted(set(names))
    near = close_matches(wanted, every) if wanted else []
    ordered = [*near, *(name for name in every if name not in near)]
    listed = [quote(name) for name in ordered[:LISTED_MAX]]
    more = len(ordered) - len(listed)
    return join_words([*listed, *([f"{more} more"] if more else [])], "and") or "none"


def list_numbers(numbers: Iterable[int]) -> str:
    """Format a list of numbers for a message, the last ``LISTED_MAX``: ``1, 2 and 5``."""
    every = sorted(set(numbers))
    listed = [str(number) for number in every[-LISTED_MAX:]]
    before = len(every) - len(listed)
    return (f"{before} others, " if before else "") + join_words(listed, "and")


def dtype_name(dtype: Any) -> str:
    """Return the name of a column's numpy dtype: ``int64``, ``string``, ``float32[4]``."""
    if dtype.kind == "O":
        return "string"
    return str(dtype.base.name) + "".join(f"[{length}]" for length in dtype.shape)


def redact(text: str) -> str:
    """Return a text in which each URL shows no user, no password, no query and no fragment.

    A URL may bring its own permission: a password before the host, or a signature in its query.
    """
    return _URL.sub(_redact_url, text)


def _redact_url(match: re.Match[str]) -> str:
    user = match["user"] or ""
    if user and (match["scheme"].lower() not in _WITH_CONTAINERS or ":" in user):
        user = f"{HIDDEN}@"
    query = match["query"] or ""
    if query and match["scheme"].lower() in _WITH_QUERIES:
        query = query[0] + HIDDEN
    return f"{match['scheme']}://{user}{match['path']}{query}"
