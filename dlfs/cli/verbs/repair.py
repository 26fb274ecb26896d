"""``dlfs repair``: restores all replicas of a volume."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated

import typer

import dlfs
from dlfs.cli.exits import ExitCode
from dlfs.cli.options import DevicesArgument, JsonOption, confirm
from dlfs.cli.output import human_size, note, print_json
from dlfs.cli.progress import progress_bar
from dlfs.errors import UsageError


def repair(
    volume: DevicesArgument,
    member: Annotated[int | None, typer.Option(metavar="N")] = None,
    replacement: Annotated[str | None, typer.Option("--with", metavar="URI")] = None,
    force: Annotated[bool, typer.Option("--force", "-f")] = False,
    assume_newest: Annotated[bool, typer.Option("--assume-newest")] = False,
    json: JsonOption = False,
) -> None:
    """Rewrite damaged, stale and lost replicas from the good ones.

    A lost member may be left out of VOLUME. In a volume without replicas only superblocks are
    repaired; a member without any gets them if its data proves which member it is.

    Args:
        member: The lost member's number; 'dlfs info' shows it.
        replacement: Device that replaces it. A missing file is made.
        force: Overwrite data on that device.
        assume_newest: Do not ask if the given members may be an older state.

    Examples:
        dlfs repair a.img,b.img
        dlfs repair a.img --member 1 --with new.img
    """
    if (member is None) != (replacement is None):
        raise UsageError("repair: expected both --member and --with, or neither")
    replacements = {} if member is None or replacement is None else {member: replacement}
    try:
        report = _run(volume, replacements, force, note if assume_newest else _stop)
    except _UnprovenError as error:  # ask here, where no progress bar is on the screen
        confirm(
            f"{error}. Make this the volume's state for good?",
            otherwise=f"repair: {error}; give the missing member as well, or --assume-newest to "
            "make this the volume's state for good",
            declined="nothing was repaired",
        )
        report = _run(volume, replacements, force, lambda _reason: None)
    if json:
        print_json(asdict(report), result=True)
    for damage in report.damaged:
        note(f"cannot be repaired: {damage}")
    note(f"repaired {report.uri}: {human_size(report.written_bytes)} written")
    if report.damaged:
        raise typer.Exit(ExitCode.DAMAGE)


class _UnprovenError(Exception):
    """The given members may be an older state of the volume."""


def _stop(reason: str) -> None:
    raise _UnprovenError(reason)


def _run(
    volume: str, replacements: dict[int, str], force: bool, unproven: Callable[[str], None]
) -> dlfs.RepairReport:
    with progress_bar("repair") as bar:
        return dlfs.repair(
            volume,
            replacements=replacements,
            force=force,
            progress=bar.update,
            unproven=unproven,
        )
