"""``dlfs format``: makes a volume."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

import dlfs
from dlfs.base.units import parse_bytes
from dlfs.cli.options import JsonOption, parse_size
from dlfs.cli.output import human_size, note, print_json


def format_volume(
    members: Annotated[
        str,
        typer.Argument(
            metavar="VOLUME",
            help="The members, joined by commas. With --size, missing files are made.",
        ),
    ],
    size: Annotated[
        str | None,
        typer.Option(
            "--size", "-s", metavar="SIZE", help="Size of each file to make, such as 64MiB."
        ),
    ] = None,
    chunk: Annotated[
        str, typer.Option(metavar="SIZE", help="The unit of layout: 4KiB to 64MiB.")
    ] = "256KiB",
    block: Annotated[
        str, typer.Option(metavar="SIZE", help="The unit of I/O: 512 to 64KiB.")
    ] = "4KiB",
    label: Annotated[str, typer.Option(help="Human-readable name, at most 64 bytes.")] = "",
    replicas: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Replicas of each chunk, on different members: with 2, one may be lost.",
        ),
    ] = 1,
    force: Annotated[
        bool, typer.Option("--force", "-f", help="Overwrite a volume or other data.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Make a volume of one or more devices. All data on them is lost."""
    info = dlfs.format_volume(
        members,
        size_bytes=parse_size(size),
        chunk_bytes=parse_bytes(chunk),
        block_bytes=parse_bytes(block),
        label=label,
        replicas=replicas,
        force=force,
    )
    if json:
        print_json(asdict(info), result=True)
    note(f"formatted volume {info.uuid}: {human_size(info.capacity_bytes)} for samples")
