"""``dlfs mv``: gives a dataset another name."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from dlfs.cli.options import DatasetArgument, DevicesArgument, JsonOption, open_devices
from dlfs.cli.output import note, print_json


def mv(
    volume: DevicesArgument,
    dataset: DatasetArgument,
    new_name: Annotated[str, typer.Argument(metavar="NEW")],
    json: JsonOption = False,
) -> None:
    """Rename a dataset with all its versions, or one version as a dataset of its own.

    Programs that are reading it read on. Versions keep their numbers, unless the new name had such
    a number before.

    Args:
        new_name: The new name, which no dataset has.

    Examples:
        dlfs mv photos.img photos pets
        dlfs mv photos.img photos@1 photos-2025
    """
    with open_devices(volume, "rename in") as opened:
        before = opened.versions(dataset)
        renamed = opened.rename(dataset, new_name)
    if json:
        print_json({"renamed": [asdict(info) for info in renamed]}, result=True)
    for old, new in zip(before, renamed, strict=False):
        note(f"renamed {old.name}@{old.version} to {new.name}@{new.version}")
