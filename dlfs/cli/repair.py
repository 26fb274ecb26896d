"""``dlfs repair``: give a volume all its copies back."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

import dlfs
from dlfs.cli.exits import ExitCode
from dlfs.cli.options import JsonOption, VolumeArgument
from dlfs.cli.output import human_size, note, print_json
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
    json: JsonOption = False,
) -> None:
    """Write damaged, stale and lost copies anew from the good ones.

    A lost member may be left out of VOLUME. Of a volume without replicas only superblocks are
    repaired, also all of one member where its data proves which member it is.
    """
    if (member is None) != (replacement is None):
        raise UsageError("repair: expected both --member and --with, or neither")
    replacements = {} if member is None or replacement is None else {member: replacement}
    with progress_bar("repair") as bar:
        report = dlfs.repair(volume, replacements=replacements, force=force, progress=bar.update)
    if json:
        print_json(asdict(report))
    for damage in report.damaged:
        note(f"beyond repair: {damage}")
    note(f"repaired {report.uri}: {human_size(report.written_bytes)} written")
    if report.damaged:
        raise typer.Exit(ExitCode.DAMAGE)
