"""``dlfs repair``: give a volume all its copies back."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated

import typer

import dlfs
from dlfs.cli.exits import ExitCode
from dlfs.cli.options import JsonOption, VolumeArgument
from dlfs.cli.output import human_size, note, print_json, stderr_console
from dlfs.cli.progress import progress_bar
from dlfs.errors import UsageError


def repair(
    volume: VolumeArgument,
    member: Annotated[
        int | None,
        typer.Option(metavar="N", help="The lost member's number; 'dlfs info' shows it."),
    ] = None,
    replacement: Annotated[
        str | None,
        typer.Option(
            "--with", metavar="URI", help="The device to take its place. A missing file is made."
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", "-f", help="Even if that device holds something.")
    ] = False,
    assume_newest: Annotated[
        bool,
        typer.Option(
            "--assume-newest",
            help="Do not ask where the members that are there may be an older copy.",
        ),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Write damaged, stale and lost copies anew from the good ones.

    A lost member may be left out of VOLUME. Of a volume without replicas only superblocks are
    repaired, also all of one member where its data proves which member it is.
    """
    if (member is None) != (replacement is None):
        raise UsageError("repair: expected both --member and --with, or neither")
    replacements = {} if member is None or replacement is None else {member: replacement}
    try:
        report = _run(volume, replacements, force, note if assume_newest else _stop)
    except _UnprovenError as error:  # asked here, where no progress is drawn over the question
        _confirm(str(error))
        report = _run(volume, replacements, force, lambda _reason: None)
    if json:
        print_json(asdict(report))
    for damage in report.damaged:
        note(f"beyond repair: {damage}")
    note(f"repaired {report.uri}: {human_size(report.written_bytes)} written")
    if report.damaged:
        raise typer.Exit(ExitCode.DAMAGE)


class _UnprovenError(Exception):
    """The members that are there may be an older copy."""


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


def _confirm(reason: str) -> None:
    """Ask whether to go on from members that may be an older copy."""
    if not sys.stdin.isatty():
        raise UsageError(
            f"repair: {reason}; give the missing member as well, or --assume-newest to make this "
            "the volume's state for good, as there is no terminal to ask at"
        )
    stderr_console().print(
        f"{reason}. Make this the volume's state for good? [y/N] ", end="", markup=False
    )
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        note("nothing was repaired")
        raise typer.Exit(1)
