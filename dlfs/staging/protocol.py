"""What is said through the extended attributes of ``incoming/NAME``.

``user.dlfs.seal``      set: seal it, with options; get: how that goes, as JSON (``SealStatus``)
``user.dlfs.discard``   set, to anything: forget it
``user.dlfs.incoming``  get: its contents, as JSON (``StagedContents``); walks over all its files

They are not listed, so that programs which copy extended attributes with files seal nothing. The
options are a JSON object, or words such as ``layout=path seed=7``; ``1`` or nothing for none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

from dlfs.arguments import Layout
from dlfs.errors import UsageError
from dlfs.format.catalog import LAYOUTS
from dlfs.ingest.source import LinkPolicy
from dlfs.writer import SEED_MAX

XATTR_SEAL = "user.dlfs.seal"
XATTR_DISCARD = "user.dlfs.discard"
XATTR_INCOMING = "user.dlfs.incoming"

OPTIONS_BYTES_MAX = 1024

LINK_POLICIES = ("error", "skip")
"""What can become of symbolic links. They are not followed: on the spool they mean what they mean
to the server, and could make anything that it may read a sample."""


@dataclass(frozen=True)
class SealOptions:
    """How a dataset is to be sealed.

    Attributes:
        layout: order of packing, ``shuffled`` or ``path``.
        seed: of that order, 64 bits.
        links: what symbolic links become: ``error`` refuses them, ``skip`` leaves them out.
        allow_empty: make a dataset without samples when there is no file to be one.

    Raises:
        UsageError: one of them is not allowed.
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
        """As the attribute's value."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, value: bytes) -> Self:
        """From the attribute's value.

        Raises:
            UsageError: it is not such.
        """
        if len(value) > OPTIONS_BYTES_MAX:
            raise UsageError(
                f"seal: expected options of at most {OPTIONS_BYTES_MAX} bytes, got {len(value)}"
            )
        text = value.decode("utf-8", "replace").strip()
        if text in ("", "1"):
            return cls()
        found = _object(text) if text.startswith("{") else _words(text)
        known = {entry.name for entry in fields(cls)}
        if not found.keys() <= known:
            raise UsageError(f"seal: expected options of {sorted(known)}, got {sorted(found)}")
        return cls(**found)


@dataclass(frozen=True)
class SealStatus:
    """How the sealing of a dataset goes.

    Attributes:
        state: ``open``: it can be written; ``waiting``: for another one's seal; ``sealing``;
            ``sealed``; ``undecided``: a device failed at the very end, and only the volume's next
            opening tells (seal again, or mount again).
        error: why the last attempt failed; None if it did not.
        kind: the class of that error in ``dlfs.errors``; None if it has none.
        samples_done: packed so far; of a sealed one, all.
        samples_total: of all, once they were counted.
        bytes_done: likewise.
        bytes_total: likewise.
        seconds: since it began.
        version: of the dataset, once it is sealed.
        skipped: what was left out, by reason.
        empty_directories: which a dataset does not keep.
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
        """As the attribute's value."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, value: bytes) -> Self:
        """From the attribute's value, which a server of this release gave."""
        return cls(**json.loads(value))


@dataclass(frozen=True)
class StagedContents:
    """What a dataset that is not sealed holds.

    Attributes:
        files: regular files.
        file_bytes: the sum of their lengths.
        since: when it was begun, in seconds since 1970.
    """

    files: int
    file_bytes: int
    since: float

    def encode(self) -> bytes:
        """As the attribute's value."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, value: bytes) -> Self:
        """From the attribute's value."""
        return cls(**json.loads(value))


def _expect(what: str, got: object, allowed: tuple[str, ...]) -> None:
    if got not in allowed:
        raise UsageError(f"seal: expected {what} of {', '.join(allowed)}, got {got!r}")


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"seal: expected options as JSON: {error}") from error
    assert isinstance(found, dict)  # it starts with a brace
    return found


_VALUES: dict[tuple[str, str], object] = {
    ("allow_empty", "yes"): True,
    ("allow_empty", "no"): False,
}
"""Words of an option that stand for something else than text."""


def _words(text: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for word in text.replace(",", " ").split():
        name, equals, value = word.partition("=")
        if not equals:
            raise UsageError(f"seal: expected options such as layout=path, got {word!r}")
        found[name] = _VALUES.get((name, value), value)
        if name == "seed" and value.isdecimal():
            found[name] = int(value)
    return found
