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
    members: Annotated[str, typer.Argument(metavar="VOLUME")],
    size: Annotated[str | None, typer.Option("--size", "-s")] = None,
    chunk: Annotated[str, typer.Option(metavar="SIZE")] = "256KiB",
    block: Annotated[str, typer.Option(metavar="SIZE")] = "4KiB",
    label: str = "",
    replicas: Annotated[int, typer.Option(metavar="N")] = 1,
    force: Annotated[bool, typer.Option("--force", "-f")] = False,
    json: JsonOption = False,
) -> None:
    """Make a volume of one or more devices. All data on them is lost.

    Args:
        members: The members, joined by commas. With --size, missing files are made.
        size: Size of each file to make, such as 64MiB.
        chunk: The unit of layout: 4KiB to 64MiB.
        block: The unit of I/O: 512 to 64KiB.
        label: Human-readable name, at most 64 bytes.
        replicas: Replicas of each chunk, on different members: with 2, one may be lost.
        force: Overwrite a volume or other data.

    Examples:
        dlfs format photos.img --size 64GiB
        dlfs format /dev/nvme0n1,/dev/nvme1n1 --label photos
        dlfs format a.img,b.img --size 8GiB --replicas 2
    """
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
