"""The rules for datasets' names (FORMAT.md, section 7), and parsing of a name with a version.

A reader takes every name that the format allows. A writer gives new datasets only names that can be
typed, printed and mounted: ``new_dataset_name`` is the one place that checks this, for the writer,
the import, a mount's ``incoming`` and the sealing of what is there.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Container
from dataclasses import dataclass

from dlfs.base.wording import quote
from dlfs.errors import LimitError, UsageError
from dlfs.format.constants import DATASET_NAME_BYTES_MAX, NEW_DATASET_NAME_BYTES_MAX
from dlfs.format.paths import display, to_bytes

INCOMING = "incoming"
"""Name of the link in a mount's root to the staging area, which holds what is not yet sealed."""

NEW_NAME_RULE = (
    f"a dataset's name is 1 to {NEW_DATASET_NAME_BYTES_MAX} bytes of UTF-8 without '/', '@' or "
    f"control characters, has no space at either end, does not begin with '-', and is not '.', "
    f"'..' or '{INCOMING}'"
)
"""Rule for the names of new datasets, as the errors about names that break it say it."""

_VERSIONED = re.compile(rb"(.+)@([1-9][0-9]{0,9})", re.DOTALL)
_CONTROLS = frozenset(("Cc", "Zl", "Zp"))
"""Unicode categories of control characters and of line and paragraph separators."""


@dataclass(frozen=True, slots=True)
class DatasetName:
    """A dataset's name, and the version if one was given."""

    name: bytes
    version: int | None = None

    def __str__(self) -> str:
        text = display(self.name)
        return text if self.version is None else f"{text}@{self.version}"


def parse_dataset(text: str | bytes, known: Container[bytes]) -> DatasetName:
    """Read ``NAME`` or ``NAME@VERSION``.

    Args:
        text: as a user wrote it.
        known: the names of the volume's datasets. Old volumes may hold names that end in ``@`` and
            digits; one that is known means that dataset.

    Raises:
        UsageError: the text has no bytes. Whether they can be a dataset's name is not checked.
    """
    raw = to_bytes(text, "dataset name")
    versioned = _VERSIONED.fullmatch(raw)
    if raw in known or versioned is None:
        return DatasetName(raw)
    return DatasetName(versioned[1], int(versioned[2]))


def new_dataset_name(name: str | bytes) -> bytes:
    """Check the name of a new dataset and convert it to bytes.

    Raises:
        UsageError: it breaks ``NEW_NAME_RULE``; the message says with which character.
        LimitError: it is too long.
    """
    raw = to_bytes(name, "dataset name")
    problem = _new_name_problem(raw)
    if problem:
        kind = LimitError if len(raw) > NEW_DATASET_NAME_BYTES_MAX else UsageError
        raise kind(f"name a new dataset {quote(raw)}: {problem}; {NEW_NAME_RULE}")
    return raw


def _new_name_problem(raw: bytes) -> str | None:
    """Describe the first violation of the rule for new names, or return None."""
    if not 1 <= len(raw) <= NEW_DATASET_NAME_BYTES_MAX:
        return f"got {len(raw)} bytes"
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        return f"got byte {raw[error.start]:#04x} at byte {error.start}, which is not UTF-8"
    for at, character in enumerate(text):
        if character in "/@" or unicodedata.category(character) in _CONTROLS:
            return f"got {character!r} at character {at}"
    if text[0] == "-":
        return "got '-' at character 0"
    if text != text.strip():
        return f"got {text[0] if text[0].isspace() else text[-1]!r} at its " + (
            "beginning" if text[0].isspace() else "end"
        )
    if text in (".", "..", INCOMING):
        return "that name is reserved"
    return None


def dataset_name_bytes(name: str | bytes) -> bytes:
    """Check the name of a dataset that may exist and convert it to bytes.

    Raises:
        UsageError: it is empty, ``.`` or ``..``, or has a slash or a NUL byte in it.
        LimitError: it is over 255 bytes long.
    """
    raw = to_bytes(name, "dataset name")
    if len(raw) > DATASET_NAME_BYTES_MAX:
        raise LimitError(
            f"check the dataset name {quote(raw)}: expected at most {DATASET_NAME_BYTES_MAX} "
            f"bytes, got {len(raw)}"
        )
    problem = dataset_name_problem(raw)
    if problem:
        raise UsageError(f"check the dataset name {quote(raw)}: {problem}")
    return raw


def dataset_name_problem(raw: bytes) -> str | None:
    """Describe why bytes cannot be a dataset's name in a catalog, or return None."""
    if not 1 <= len(raw) <= DATASET_NAME_BYTES_MAX:
        return f"expected 1..{DATASET_NAME_BYTES_MAX} bytes, got {len(raw)}"
    for byte, what in ((b"/", "slash"), (b"\0", "NUL byte")):
        if byte in raw:
            return f"expected no {what}, got one at byte {raw.index(byte)}"
    if raw in (b".", b".."):
        return f"expected another name, got {raw.decode()!r}"
    return None
