"""The requests to a staging area's server, and its answers.

A request is a line of JSON (``SealRequest``) on a Unix stream socket. Answers (``SealAnswer``) are
lines, too: while a dataset waits or is sealed, one comes several times a second; the last one is
final. Server and client have the same release.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from dlfs.base.arguments import Layout
from dlfs.dataset.writer import SEED_MAX
from dlfs.errors import UsageError
from dlfs.format.catalog import LAYOUTS
from dlfs.ingest.source import LinkPolicy

REQUEST_BYTES_MAX = 8192
ANSWER_BYTES_MAX = 1 << 26
"""Longest line of a request and of an answer, in bytes; a list has a line for all datasets."""

OPEN, WAITING, SEALING, SEALED, UNDECIDED = "open", "waiting", "sealing", "sealed", "undecided"

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
        if not 0 <= self.seed <= SEED_MAX:
            raise UsageError(f"seal: expected a seed of 64 bits, got {self.seed!r}")


@dataclass(frozen=True)
class SealStatus:
    """State of a dataset's sealing.

    Attributes:
        state: ``open``: programs can write; ``waiting``: another dataset is being sealed;
            ``sealing``; ``sealed``; ``undecided``: a device failed at the commit, and only the next
            opening of the volume shows the result (seal again, or mount again).
        error: error message of the last attempt; None if there was no error.
        kind: name of the error's class in ``dlfs.errors``; None for other errors.
        code: errno of the error, or 0.
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
    code: int = 0
    samples_done: int = 0
    samples_total: int | None = None
    bytes_done: int = 0
    bytes_total: int | None = None
    seconds: float = 0.0
    version: int | None = None
    skipped: Mapping[str, int] = field(default_factory=dict)
    empty_directories: int = 0


@dataclass(frozen=True)
class StagedContents:
    """Contents of a dataset that is not sealed.

    Attributes:
        files: number of regular files.
        file_bytes: total length of the regular files, in bytes.
        since: time of the oldest change of a file or directory in it, in seconds since 1970; the
            dataset was begun at that time at the latest.
    """

    files: int
    file_bytes: int
    since: float


@dataclass(frozen=True)
class StagedDataset:
    """A dataset in the staging area.

    Attributes:
        name: name of the dataset; bytes that are not UTF-8 are surrogates (``os.fsdecode``).
        contents: its number of files and bytes, and when it was begun.
        status: state of its sealing, with the last error.
    """

    name: str
    contents: StagedContents
    status: SealStatus


@dataclass(frozen=True)
class SealRequest:
    """A request.

    Attributes:
        action: ``seal``, ``discard``, or ``list`` all datasets that the caller may seal.
        name: name of the dataset, as in ``StagedDataset``.
        options: options of a seal.
    """

    action: Literal["seal", "discard", "list"]
    name: str = ""
    options: SealOptions = field(default_factory=SealOptions)


@dataclass(frozen=True)
class SealAnswer:
    """An answer.

    Attributes:
        status: state of the dataset. A ``kind`` in the final one is the error of the request.
        final: True if no more answers follow.
        datasets: the datasets, of a list.
    """

    status: SealStatus
    final: bool
    datasets: tuple[StagedDataset, ...] = ()


def _expect(what: str, got: object, allowed: tuple[str, ...]) -> None:
    if got not in allowed:
        raise UsageError(f"seal: expected {what} of {', '.join(allowed)}, got {got!r}")
