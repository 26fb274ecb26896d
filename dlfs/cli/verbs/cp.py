"""``dlfs cp``: copies a dataset to another volume, or to another name."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from dlfs.cli.options import DatasetArgument, JsonOption, VolumeArgument, open_dataset, open_devices
from dlfs.cli.output import human_rate, human_samples, note, print_json
from dlfs.cli.progress import progress_bar

if TYPE_CHECKING:
    from dlfs.ingest.progress import Progress


def cp(
    volume: VolumeArgument,
    dataset: DatasetArgument,
    target: Annotated[str, typer.Argument(metavar="TARGET")],
    name: Annotated[str | None, typer.Argument(metavar="[NAME]")] = None,
    json: JsonOption = False,
) -> None:
    """Copy a dataset with its attributes and fields, completely or not at all.

    Every sample is verified while it is read. VOLUME may be a service's socket; TARGET may be
    VOLUME. An existing name gets a new version. The same command goes on with a copy that was ended
    before its time, which dlfs info lists as an unfinished import.

    Args:
        target: The volume to copy to.
        name: Name of the copy, by default that of the dataset.

    Examples:
        dlfs cp photos.img photos copy.img
        dlfs cp unix:dlfs.sock photos@2 a.img,b.img pets
    """
    from dlfs.ingest.copying import copy_dataset

    begin = time.monotonic()
    with (
        open_dataset(volume, dataset) as found,
        open_devices(target, "copy to") as opened,
        progress_bar(f"copy {found.name}") as bar,
    ):
        copied_bytes = 0

        def show(progress: Progress) -> None:
            nonlocal copied_bytes
            copied_bytes = progress.bytes_done
            bar.show(progress)

        info = copy_dataset(found, opened, name, progress=show)
        source = {"dataset": found.name, "version": found.version, "uuid": found.uuid}
    seconds = time.monotonic() - begin
    if json:
        print_json({"source": source, "dataset": asdict(info), "seconds": seconds}, result=True)
    note(
        f"copied {source['dataset']}@{source['version']} to {info.name}@{info.version}: "
        f"{human_samples(info.sample_count)}, {human_rate(copied_bytes, seconds)}"
    )
