"""``dlfs grow``: adds devices to a volume."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from dlfs.base.units import format_count
from dlfs.cli.options import JsonOption, VolumeArgument, open_devices, parse_size
from dlfs.cli.output import human_size, note, print_json


def grow(
    volume: VolumeArgument,
    devices: Annotated[
        list[str],
        typer.Argument(metavar="URI...", help="The new devices, at least one for each replica."),
    ],
    size: Annotated[
        str | None,
        typer.Option(
            "--size", "-s", metavar="SIZE", help="Size of each file to make, such as 64MiB."
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", "-f", help="Overwrite data on the new devices.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Add devices to a volume, while its readers go on. No data is moved.

    New datasets use the space of all members. Programs that name only the earlier members find the
    new ones by their URIs, which the volume records.
    """
    with open_devices(volume, "grow") as opened:
        before = opened.capacity_bytes
        info = opened.grow(",".join(devices), size_bytes=parse_size(size), force=force)
    if json:
        print_json(asdict(info), result=True)
    more = human_size(info.capacity_bytes - before)
    note(f"grown to {format_count(len(info.members), 'member')}, {more} more: {info.uri}")
