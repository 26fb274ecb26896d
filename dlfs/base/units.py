"""Named byte units, and conversion of sizes and counts to and from text."""

from __future__ import annotations

import re

from dlfs.errors import UsageError

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
TIB = 1 << 40

_FACTORS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": KIB,
    "mi": MIB,
    "gi": GIB,
    "ti": TIB,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?|)b?\s*", re.IGNORECASE)
_BYTES_MAX = 2.0**63


def parse_bytes(text: str) -> int:
    """Read a size such as ``4096``, ``64MiB``, ``1.5 GiB`` or ``2GB``.

    Args:
        text: a number and an optional unit; ``k``/``M``/``G``/``T`` are powers of 1000, with ``i``
            of 1024.

    Returns:
        The size in bytes, rounded down.

    Raises:
        UsageError: the text is not a size.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise UsageError(f"read a size: expected a number and a unit such as 64MiB, got {text!r}")
    count = float(match[1]) * _FACTORS[match[2].lower()]
    if count > _BYTES_MAX:
        raise UsageError(f"read a size: expected at most 2^63 bytes, got {text[:40]!r}")
    return int(count)


def format_bytes(count: float) -> str:
    """Format a size for a message: ``512 B``, ``1.5 MiB``."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def format_count(count: int, noun: str, plural: str = "") -> str:
    """Format a count for a message: ``1 sample``, ``1,797 samples``.

    Args:
        count: number of things.
        noun: noun for one thing.
        plural: noun for several things; by default the noun with an s.
    """
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"
