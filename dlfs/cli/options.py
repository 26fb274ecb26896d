"""Arguments and options that several verbs share, and completion of dataset names."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

import dlfs
from dlfs.base.extras import install_command
from dlfs.base.units import parse_bytes
from dlfs.base.wording import quote
from dlfs.cli.output import note, stderr_console
from dlfs.errors import DlfsError, NotFoundError, UsageError

if TYPE_CHECKING:
    from dlfs import Dataset, Volume

GIVEN = "dlfs.given"
"""Key in a context's ``meta``: the values on the command line, before any is processed."""

_ARGUMENTS = {
    "force=True": "--force",
    "shrink=True": "--shrink",
    "allow_empty=True": "--allow-empty",
    "size_bytes=2**30": "--size 1GiB",
    "links='skip'": "--links skip",
    "spool=DIRECTORY": "--spool DIR",
}
"""Options of the command line, by the arguments that the library's messages name."""
_ARGUMENTS_OF = {"seal": {"links='skip'": "--skip-links"}}
"""Options of single verbs, which take precedence."""

SERVICE_TIMEOUT_S = 2.0
"""Longest wait for a service that is only asked for a better message, in seconds."""


def as_typed(message: str, verb: str | None = None) -> str:
    """Return a library's message with the options of the command line, or of one verb."""
    for argument, option in {**_ARGUMENTS, **_ARGUMENTS_OF.get(verb or "", {})}.items():
        message = message.replace(argument, option)
    return message


def options_given(ctx: typer.Context) -> Mapping[str, Any]:
    """Return the values on the command line by the names of their parameters, in any order."""
    given: Mapping[str, Any] = ctx.meta.get(GIVEN, {})
    return given


def parse_size(text: str | None) -> int | None:
    """Read the size of an option, if it was given."""
    return None if text is None else parse_bytes(text)


def open_volume(uri: str, *, memory_bytes: int | None = None) -> Volume:
    """Open a volume for reading: by its devices, or by a service's socket (``unix:PATH``).

    Args:
        uri: VOLUME on the command line.
        memory_bytes: as for ``dlfs.open``; None takes its default.

    Raises:
        UsageError: the service chooses the memory of its volume.
        DlfsError: as for ``dlfs.open`` and ``dlfs.connect``.
    """
    if not uri.startswith("unix:"):
        return dlfs.open(uri) if memory_bytes is None else dlfs.open(uri, memory_bytes=memory_bytes)
    if memory_bytes is not None:
        raise UsageError(f"open {uri}: memory is the service's to choose; leave --memory out")
    return dlfs.connect(uri)


def open_devices(uri: str, action: str, *, why: str = "a service is read-only") -> Volume:
    """Open a volume by its devices, for a verb that needs them.

    Args:
        uri: VOLUME on the command line.
        action: action of the verb, for the message.
        why: reason why a service cannot do this, for the message.

    Raises:
        UsageError: the URI is a service's; the message names the volume's devices if it answers.
        DlfsError: as for ``dlfs.open``.
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
) -> Iterator[Dataset]:
    """Open a dataset of a volume for reading; see ``open_volume``."""
    with (
        open_volume(volume_uri, memory_bytes=memory_bytes) as volume,
        volume.dataset(dataset) as found,
    ):
        yield found


def sample_indices(dataset: Dataset, paths: list[str], indices: list[int]) -> list[int]:
    """Return the indices of the samples on a command line; negative indices count from the end.

    Raises:
        NotFoundError: a sample does not exist.
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
    """Complete the name of a dataset in the shell; returns none if the volume cannot be opened."""
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


def confirm(prompt: str, *, otherwise: str, declined: str) -> None:
    """Ask the user at the terminal whether to go on; exit with 1 if the answer is no.

    Args:
        prompt: question to ask.
        otherwise: error message if there is no terminal.
        declined: note that is printed if the answer is no.

    Raises:
        UsageError: standard input is no terminal.
    """
    if sys.stdin is None or not sys.stdin.isatty():
        raise UsageError(f"{otherwise}, as there is no terminal to ask at")
    # typer.confirm() prints a blank on stdout.
    stderr_console().print(f"{prompt} [y/N] ", end="", markup=False)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        note(declined)
        raise typer.Exit(1)


def require_trio(verb: str, extra: str) -> None:
    """Raise NotFoundError if trio, which a server needs, cannot be loaded."""
    try:
        import trio  # noqa: F401
    except ImportError as error:
        raise NotFoundError(
            f"{verb}: trio cannot be loaded ({error}); {install_command(extra)}"
        ) from error


SeedOption = Annotated[int, typer.Option(help="Seed of the packing order.", min=0)]
VolumeArgument = Annotated[
    str,
    typer.Argument(
        metavar="VOLUME",
        help="The volume: its members' device URIs, joined by commas (see 'dlfs uri'), or "
        "unix:PATH of a service that has it.",
    ),
]
DevicesArgument = Annotated[
    str,
    typer.Argument(
        metavar="VOLUME",
        help="The volume: its members' device URIs, joined by commas (see 'dlfs uri').",
    ),
]
_DATASET = typer.Argument(
    metavar="DATASET", help="NAME, or NAME@VERSION.", autocompletion=complete_dataset
)
DatasetArgument = Annotated[str, _DATASET]
OptionalDatasetArgument = Annotated[str | None, _DATASET]
PathsArgument = Annotated[
    list[str] | None, typer.Argument(metavar="[PATH]...", help="Samples, by path.")
]
IndexOption = Annotated[
    list[int] | None, typer.Option("--index", "-i", help="Samples, by index; repeatable.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]
