"""The extended attributes of ``incoming/NAME``, by which programs seal and discard datasets.

``user.dlfs.seal``      set: seal the dataset with options; get: the state as JSON (``SealStatus``)
``user.dlfs.discard``   set to any value: delete the dataset
``user.dlfs.incoming``  get: the contents as JSON (``StagedContents``); walks over all files

The attributes are not listed, so a program that copies extended attributes with files seals
nothing. Options are a JSON object or text such as ``layout=path seed=7``; ``1`` or nothing means
defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

from dlfs.arguments import Layout
from dlfs.errors import FormatError, UsageError
from dlfs.format.catalog import LAYOUTS
from dlfs.ingest.source import LinkPolicy
from dlfs.json_records import from_json, parse_json, to_json
from dlfs.writer import SEED_MAX

XATTR_SEAL = "user.dlfs.seal"
XATTR_DISCARD = "user.dlfs.discard"
XATTR_INCOMING = "user.dlfs.incoming"

OPTIONS_BYTES_MAX = 1024

LINK_POLICIES = ("error", "skip")
"""Ways to treat symbolic links. They are never followed: the server would resolve them with its own
rights, so that a link could make any file that the server may read a sample."""


@dataclass(frozen=True)
class SealOptions:
    """Options of a seal.

    Attributes:
        layout: order of samples on the volume, ``shuffled`` or ``path``.
        seed: seed of the shuffled order, 64 bits.
        links: symbolic links: ``error`` refuses them, ``skip`` leaves them out.
        allow_empty: allow a dataset without samples if there is no regular file.

    Raises:
        UsageError: an option has a value that is not allowed.
    """

    layout: Layout = "shuffled"
    seed: int = 0
    links: LinkPolicy = "error"
    allow_empty: bool = False

    def __post_init__(self) -> None:
        _expect("a layout", self.layout, LAYOUTS)
        _expect("a choice for links", self.links, LINK_POLICIES)
        if type(self.allow_empty) is not bool:
            raise UsageError(f"seal: expected allow_empty of yes, no, got {self.allow_empty!r}")
        if type(self.seed) is not int or not 0 <= self.seed <= SEED_MAX:
            raise UsageError(f"seal: expected a seed of 64 bits, got {self.seed!r}")

    def encode(self) -> bytes:
        """Return the value of the attribute."""
        return to_json(self)

    @classmethod
    def decode(cls, value: bytes) -> Self:
        """Return the options of an attribute's value.

        Raises:
            UsageError: the value is malformed.
        """
        if len(value) > OPTIONS_BYTES_MAX:
            raise UsageError(
                f"seal: expected options of at most {OPTIONS_BYTES_MAX} bytes, got {len(value)}"
            )
        text = value.decode("utf-8", "replace").strip()
        if text in ("", "1"):
            return cls()
        found = _parse_json(text) if text.startswith("{") else _parse_text(text)
        known = {entry.name for entry in fields(cls)}
        if not found.keys() <= known:
            raise UsageError(f"seal: expected options of {sorted(known)}, got {sorted(found)}")
        return cls(**found)


@dataclass(frozen=True)
class SealStatus:
    """State of a dataset's sealing.

    Attributes:
        state: ``open``: programs can write; ``waiting``: another dataset is being sealed;
            ``sealing``; ``sealed``; ``undecided``: a device failed at the commit, and only the next
            opening of the volume shows the result (seal again, or mount again).
        error: error message of the last attempt; None if there was no error.
        kind: name of the error's class in ``dlfs.errors``; None for other errors.
        samples_done: samples written to the volume so far.
        samples_total: all samples; None until they are counted.
        bytes_done: bytes of samples written so far.
        bytes_total: bytes of all samples; None until they are counted.
        seconds: time since the seal began, in seconds.
        version: version of the sealed dataset; None before.
        skipped: number of entries that were left out, by reason.
        empty_directories: number of directories without files, which the dataset has, too.
    """

    state: str
    error: str | None = None
    kind: str | None = None
    samples_done: int = 0
    samples_total: int | None = None
    bytes_done: int = 0
    bytes_total: int | None = None
    seconds: float = 0.0
    version: int | None = None
    skipped: Mapping[str, int] = field(default_factory=dict)
    empty_directories: int = 0

    def encode(self) -> bytes:
        """Return the value of the attribute."""
        return to_json(self)

    @classmethod
    def decode(cls, value: bytes) -> Self:
        """Return the status of an attribute's value; server and client have the same release."""
        return from_json(value, cls)


@dataclass(frozen=True)
class StagedContents:
    """Contents of a dataset that is not sealed.

    Attributes:
        files: number of regular files.
        file_bytes: total length of the regular files, in bytes.
        since: time at which the dataset was begun, in seconds since 1970.
    """

    files: int
    file_bytes: int
    since: float

    def encode(self) -> bytes:
        """Return the value of the attribute."""
        return to_json(self)

    @classmethod
    def decode(cls, value: bytes) -> Self:
        """Return the contents of an attribute's value."""
        return from_json(value, cls)


def _expect(what: str, got: object, allowed: tuple[str, ...]) -> None:
    if got not in allowed:
        raise UsageError(f"seal: expected {what} of {', '.join(allowed)}, got {got!r}")


def _parse_json(text: str) -> dict[str, Any]:
    try:
        found = parse_json(text)
    except FormatError as error:
        raise UsageError(f"seal: {error}") from error
    assert isinstance(found, dict)  # it starts with a brace
    return found


_VALUES: dict[tuple[str, str], object] = {
    ("allow_empty", "yes"): True,
    ("allow_empty", "no"): False,
}
"""Option values that are not text."""


def _parse_text(text: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for word in text.replace(",", " ").split():
        name, equals, value = word.partition("=")
        if not equals:
            raise UsageError(f"seal: expected options such as layout=path, got {word!r}")
        found[name] = _VALUES.get((name, value), value)
        if name == "seed" and value.isdecimal():
            found[name] = int(value)
    return found
