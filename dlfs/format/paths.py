"""The rules for samples' paths (FORMAT.md, section 6); datasets' names are in ``names``.

A path is bytes: components of 1..255 bytes joined by ``/``, at most 4095 bytes in all, no component
``.`` or ``..``, no NUL. Text is taken in UTF-8, with surrogate escapes for file names that are not
UTF-8 (as ``os.fsencode`` does it on Linux).
"""

from __future__ import annotations

import os
import re

from dlfs.base.wording import quote
from dlfs.errors import LimitError, UsageError
from dlfs.format.constants import COMPONENT_BYTES_MAX, PATH_BYTES_MAX

PathLike = str | bytes | os.PathLike[str] | os.PathLike[bytes]


def path_bytes(path: PathLike) -> bytes:
    """Convert a sample's path to bytes and check it.

    Raises:
        UsageError: it breaks a rule; nothing is repaired silently.
        LimitError: it or one of its components is too long.
    """
    raw = to_bytes(path, "sample path")
    if len(raw) > PATH_BYTES_MAX:
        raise LimitError(
            f"check the sample path {quote(raw)}: expected at most {PATH_BYTES_MAX} bytes, "
            f"got {len(raw)}"
        )
    problem = path_problem(raw)
    if problem:
        kind = LimitError if max(map(len, raw.split(b"/"))) > COMPONENT_BYTES_MAX else UsageError
        raise kind(f"check the sample path {quote(raw)}: {problem}")
    return raw


_COMPONENT = rb"(?!\.{1,2}(?:/|\Z))[^/\0]{1,%d}" % COMPONENT_BYTES_MAX
_GOOD_PATH = re.compile(rb"%s(?:/%s)*" % (_COMPONENT, _COMPONENT))


def path_problem(raw: bytes) -> str | None:
    """Return the reason why bytes are no path of a sample, or None."""
    if len(raw) <= PATH_BYTES_MAX and _GOOD_PATH.fullmatch(raw):
        return None
    if not raw or len(raw) > PATH_BYTES_MAX:
        return f"expected 1..{PATH_BYTES_MAX} bytes, got {len(raw)}"
    if b"\0" in raw:
        return f"expected no NUL byte, got one at byte {raw.index(0)}"
    offset = 0
    for component in raw.split(b"/"):
        if component in (b"", b".", b".."):
            what = "an empty component" if not component else repr(component.decode())
            return f"expected names between single slashes, got {what} at byte {offset}"
        if len(component) > COMPONENT_BYTES_MAX:
            return (
                f"expected components of at most {COMPONENT_BYTES_MAX} bytes, "
                f"got {len(component)} at byte {offset}"
            )
        offset += len(component) + 1
    return None


def display(raw: bytes) -> str:
    """Convert a path or a name to text; bytes that are not UTF-8 become surrogate escapes."""
    return raw.decode("utf-8", "surrogateescape")


def to_bytes(value: PathLike, what: str) -> bytes:
    """Convert a str, bytes or os.PathLike to bytes.

    Args:
        value: the path or name.
        what: what the error calls it.

    Raises:
        UsageError: it is text that UTF-8 cannot hold.
    """
    plain = os.fspath(value)
    if isinstance(plain, bytes):
        return plain
    try:
        return plain.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise UsageError(
            f"check the {what} {plain!r}: expected text that UTF-8 can hold, "
            f"got {plain[error.start]!r} at character {error.start}"
        ) from error
