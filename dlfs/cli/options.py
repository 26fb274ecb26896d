"""Arguments and options that several verbs share, and completion of dataset names."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

import dlfs
from dlfs.errors import DlfsError, NotFoundError, UsageError
from dlfs.units import parse_bytes
from dlfs.wording import quote

if TYPE_CHECKING:
    from dlfs import Dataset, Volume

GIVEN = "dlfs.given"
"""Key in a context's ``meta``: the values on the command line, before any is processed."""

_ARGUMENTS = {
    "force=True": "--force",
    "allow_empty=True": "--allow-empty",
    "size_bytes=2**30": "--size 1GiB",
    "links='skip'": "--links skip",
}
"""What the command line calls the arguments that the library's messages name."""
_ARGUMENTS_OF = {"seal": {"links='skip'": "--skip-links"}}
"""The same of single verbs, which take precedence."""

SERVICE_TIMEOUT_S = 2.0
"""How long to wait for a service that is asked only to make a message better."""


def as_typed(message: str, verb: str | None = None) -> str:
    """Returns a message of the library in the words of the command line, or of one verb."""
    for argument, option in {**_ARGUMENTS, **_ARGUMENTS_OF.get(verb or "", {})}.items():
        message = message.replace(argument, option)
    return message


def options_given(ctx: typer.Context) -> Mapping[str, Any]:
    """Returns the values on the command line by the names of their parameters, in any order."""
    given: Mapping[str, Any] = ctx.meta.get(GIVEN, {})
    return given


def parse_size(text: str | None) -> int | None:
    """Read the size of an option, if it was given."""
    return None if text is None else parse_bytes(text)


def open_volume(uri: str, *, memory_bytes: int | None = None) -> Volume:
    """Open a volume for reading: by its devices, or by a service's socket (``unix:PATH``).

    Args:
        uri: as the command line has it.
        memory_bytes: as ``dlfs.open``, which has a default.

    Raises:
        UsageError: the memory of a service's volume is not ours to choose.
        DlfsError: as ``dlfs.open`` and ``dlfs.connect``.
    """
    if not uri.startswith("unix:"):
        return dlfs.open(uri) if memory_bytes is None else dlfs.open(uri, memory_bytes=memory_bytes)
    if memory_bytes is not None:
        raise UsageError(f"open {uri}: memory is the service's to choose; leave --memory out")
    return dlfs.connect(uri)


def open_devices(uri: str, action: str, *, why: str = "a service is read-only") -> Volume:
    """Open a volume by its devices, for a verb that needs them.

    Args:
        uri: as the command line has it.
        action: what the verb does, for the message.
        why: it cannot do that through a service.

    Raises:
        UsageError: it is a service; the message names the volume's devices if the service answers.
        DlfsError: as ``dlfs.open``.
    """
    if not uri.startswith("unix:"):
        return dlfs.open(uri)
    try:
        with dlfs.connect(uri, timeout_s=SERVICE_TIMEOUT_S) as volume:
            devices = ",".join(member.uri for member in volume.members)
    except DlfsError:
        devices = ""
    volume_is = f": {devices}" if devices else ""
    raise UsageError(f"{action} {uri}: {why}; name its volume{volume_is}")


@contextmanager
def open_dataset(
    volume_uri: str, dataset: str, *, memory_bytes: int | None = None
) -> Iterator[tuple[Volume, Dataset]]:
    """Open a volume and one of its datasets for reading; as ``open_volume``."""
    with (
        open_volume(volume_uri, memory_bytes=memory_bytes) as volume,
        volume.dataset(dataset) as found,
    ):
        yield volume, found


def sample_indices(dataset: Dataset, paths: list[str], indices: list[int]) -> list[int]:
    """The indices of the samples that a command line names; negative ones count from the end.

    Raises:
        NotFoundError: one of them does not exist.
    """
    found = [dataset.index(os.fsencode(path)) for path in paths]
    count = len(dataset)
    for index in indices:
        if not -count <= index < count:
            raise NotFoundError(
                f"look up index {index} in dataset {quote(dataset.name)}: expected "
                f"{f'{-count}..{count - 1}' if count else 'none, for it has no samples'}"
            )
        found.append(index % count)
    return found


def complete_dataset(ctx: typer.Context, incomplete: str) -> list[str]:
    """The datasets of the volume on the command line, for the shell; none if it will not open."""
    uri = ctx.params.get("volume")
    if not uri:
        return []
    try:
        with open_volume(uri) as volume:
            infos = volume.datasets()
    except (DlfsError, OSError):
        return []
    names = dict.fromkeys(info.name for info in infos)
    if "@" in incomplete:
        names = dict.fromkeys(f"{info.name}@{info.version}" for info in infos)
    return [name for name in names if name.startswith(incomplete)]


VolumeArgument = Annotated[
    str,
    typer.Argument(
        metavar="VOLUME",
        help="The volume: its members' device URIs, joined by commas (see 'dlfs uri').",
    ),
]
DatasetArgument = Annotated[
    str,
    typer.Argument(
        metavar="DATASET", help="NAME, or NAME@VERSION.", autocompletion=complete_dataset
    ),
]
OptionalDatasetArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="DATASET", help="NAME, or NAME@VERSION.", autocompletion=complete_dataset
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]
