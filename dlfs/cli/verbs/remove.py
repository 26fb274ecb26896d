"""``dlfs rm`` and ``dlfs prune``: remove datasets, and free their space."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from dlfs.cli.datasets import describe
from dlfs.cli.options import DatasetArgument, DevicesArgument, JsonOption, confirm, open_devices
from dlfs.cli.output import note, print_json
from dlfs.errors import UsageError

if TYPE_CHECKING:
    from dlfs import DatasetInfo, Volume


def rm(
    volume: DevicesArgument,
    dataset: DatasetArgument,
    all_versions: Annotated[bool, typer.Option("--all-versions")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y")] = False,
    json: JsonOption = False,
) -> None:
    """Remove a dataset. A program that is reading it gets an error, never wrong bytes.

    Args:
        all_versions: Remove every version.
        yes: Do not ask.

    Examples:
        dlfs rm photos.img photos@1
        dlfs rm photos.img photos --all-versions --yes
    """
    with open_devices(volume, "remove from") as opened:
        doomed = _choose(opened, dataset, all_versions=all_versions)
        if not yes:
            names = ", ".join(map(describe, doomed))
            confirm(
                f"Remove {names} from {volume}?",
                otherwise=f"remove {names}: expected --yes",
                declined="nothing was removed",
            )
        for info in doomed:
            opened.remove(info.name, info.version)
    if json:
        print_json({"removed": [asdict(info) for info in doomed]}, result=True)
    for info in doomed:
        note(f"removed {describe(info)}")


def _choose(volume: Volume, wanted: str, *, all_versions: bool) -> list[DatasetInfo]:
    """Choose the datasets to remove."""
    found = volume.versions(wanted)
    if len(found) > 1 and not all_versions:
        versions = ", ".join(f"{info.name}@{info.version}" for info in found)
        raise UsageError(f"remove {wanted}: expected one of {versions}, or --all-versions")
    return found


def prune(
    volume: DevicesArgument,
    dataset: DatasetArgument,
    keep: Annotated[int, typer.Option("--keep", "-k", metavar="N", min=1)],
    yes: Annotated[bool, typer.Option("--yes", "-y")] = False,
    json: JsonOption = False,
) -> None:
    """Remove the older versions of a dataset, all at once.

    A program that is reading one of them gets an error, never wrong bytes.

    Args:
        keep: Newest versions that stay.
        yes: Do not ask.

    Examples:
        dlfs prune photos.img photos --keep 3
        dlfs prune photos.img photos --keep 1 --yes
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
