"""``dlfs prune``: removes the older versions of a dataset."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from dlfs.cli.datasets import describe
from dlfs.cli.options import DatasetArgument, JsonOption, VolumeArgument, confirm, open_devices
from dlfs.cli.output import note, print_json


def prune(
    volume: VolumeArgument,
    dataset: DatasetArgument,
    keep: Annotated[
        int, typer.Option("--keep", "-k", metavar="N", min=1, help="Newest versions that stay.")
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json: JsonOption = False,
) -> None:
    """Remove the older versions of a dataset, all at once.

    A program that is reading one of them gets an error, never wrong bytes.
    """
    with open_devices(volume, "prune in") as opened:
        doomed = opened.versions(dataset)[:-keep]
        expected = None if yes else [info.uuid for info in doomed]
        if doomed and not yes:
            names = ", ".join(map(describe, doomed))
            confirm(
                f"Remove {names} from {volume}?",
                otherwise=f"prune {dataset}: expected --yes to remove {names}",
                declined="nothing was removed",
            )
        removed = opened.prune(dataset, keep=keep, expected=expected)
        stay = len(opened.versions(dataset))
    if json:
        print_json({"removed": [asdict(info) for info in removed]}, result=True)
    for info in removed:
        note(f"removed {describe(info)}")
    if not removed:
        note(f"nothing to remove: {dataset} has {stay} version{'' if stay == 1 else 's'}")
