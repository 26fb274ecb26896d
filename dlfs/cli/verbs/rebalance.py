"""``dlfs rebalance``: spreads datasets over all devices of a volume."""

from __future__ import annotations

from dataclasses import asdict

from dlfs.cli.options import JsonOption, VolumeArgument, open_devices
from dlfs.cli.output import human_size, note, print_json
from dlfs.cli.progress import progress_bar


def rebalance(volume: VolumeArgument, json: JsonOption = False) -> None:
    """Spread existing datasets over all devices of a volume that was grown.

    Readers go on. If this is interrupted, the volume stays readable and writable, and the same
    command continues.
    """
    with open_devices(volume, "rebalance") as opened, progress_bar("move") as bar:
        report = opened.rebalance(progress=bar.update)
    if json:
        print_json(asdict(report), result=True)
    note(f"{human_size(report.moved_bytes)} moved")
