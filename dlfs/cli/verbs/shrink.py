"""``dlfs shrink``: removes devices from a volume."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from dlfs.cli.options import JsonOption, VolumeArgument, open_devices
from dlfs.cli.output import human_size, note, print_json
from dlfs.cli.progress import progress_bar


def shrink(
    volume: VolumeArgument,
    members: Annotated[
        list[str],
        typer.Argument(
            metavar="MEMBER...", help="Numbers or URIs of members; 'dlfs info' shows them."
        ),
    ],
    json: JsonOption = False,
) -> None:
    """Move all data off some members, and remove them from the volume.

    Members leave as they came, all devices of one 'grow' together. Readers go on. If this is
    interrupted, the volume stays readable and writable, and the same command continues.
    """
    chosen: list[int | str] = [int(text) if text.isdecimal() else text for text in members]
    with open_devices(volume, "shrink") as opened, progress_bar("move") as bar:
        report = opened.shrink(chosen, progress=bar.update)
        uri = opened.uri
    if json:
        print_json({**asdict(report), "uri": uri}, result=True)
    moved = human_size(report.moved_bytes)
    note(f"removed {', '.join(report.removed)}, {moved} moved; the volume is now {uri}")
