"""``dlfs grow``, ``dlfs shrink`` and ``dlfs rebalance``: change the devices of a volume."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from dlfs.base.units import format_count
from dlfs.cli.options import DevicesArgument, JsonOption, open_devices, parse_size
from dlfs.cli.output import human_size, note, print_json
from dlfs.cli.progress import progress_bar


def grow(
    volume: DevicesArgument,
    devices: Annotated[list[str], typer.Argument(metavar="URI...")],
    size: Annotated[str | None, typer.Option("--size", "-s")] = None,
    force: Annotated[bool, typer.Option("--force", "-f")] = False,
    json: JsonOption = False,
) -> None:
    """Add devices to a volume, while its readers go on. No data is moved.

    New datasets use the space of all members. Programs that name only the earlier members find the
    new ones by their URIs, which the volume records.

    Args:
        devices: The new devices, at least one for each replica.
        size: Size of each file to make, such as 64MiB.
        force: Overwrite data on the new devices.

    Examples:
        dlfs grow photos.img more.img --size 64GiB
        dlfs grow a.img,b.img /dev/nvme2n1 /dev/nvme3n1
    """
    with open_devices(volume, "grow") as opened:
        before = opened.capacity_bytes
        info = opened.grow(",".join(devices), size_bytes=parse_size(size), force=force)
    if json:
        print_json(asdict(info), result=True)
    more = human_size(info.capacity_bytes - before)
    note(f"grown to {format_count(len(info.members), 'member')}, {more} more: {info.uri}")


def shrink(
    volume: DevicesArgument,
    members: Annotated[list[str], typer.Argument(metavar="MEMBER...")],
    json: JsonOption = False,
) -> None:
    """Move all data off some members, and remove them from the volume.

    Members leave as they came, all devices of one 'grow' together. Readers go on. If this is
    interrupted, the volume stays readable and writable, and the same command continues.

    Args:
        members: Numbers or URIs of members; 'dlfs info' shows them.

    Examples:
        dlfs shrink photos.img,more.img photos.img
        dlfs shrink a.img,b.img,c.img 2 --json
    """
    chosen: list[int | str] = [int(text) if text.isdecimal() else text for text in members]
    with open_devices(volume, "shrink") as opened, progress_bar("move") as bar:
        report = opened.shrink(chosen, progress=bar.update)
        uri = opened.uri
    if json:
        print_json({**asdict(report), "uri": uri}, result=True)
    moved = human_size(report.moved_bytes)
    note(f"removed {', '.join(report.removed)}, {moved} moved; the volume is now {uri}")


def rebalance(volume: DevicesArgument, json: JsonOption = False) -> None:
    """Spread existing datasets over all devices of a volume that was grown.

    Readers go on. If this is interrupted, the volume stays readable and writable, and the same
    command continues.

    Examples:
        dlfs rebalance photos.img
        dlfs rebalance a.img,b.img --json
    """
    with open_devices(volume, "rebalance") as opened, progress_bar("move") as bar:
        report = opened.rebalance(progress=bar.update)
    if json:
        print_json(asdict(report), result=True)
    note(f"{human_size(report.moved_bytes)} moved")
