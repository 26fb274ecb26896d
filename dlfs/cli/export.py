"""``dlfs export``: a dataset back into a folder or an archive."""

from __future__ import annotations

from typing import Annotated

import typer

from dlfs.cli.options import DatasetArgument, JsonOption, VolumeArgument, open_dataset
from dlfs.cli.output import human_rate, human_samples, note, print_json
from dlfs.cli.progress import progress_bar


def export(
    volume: VolumeArgument,
    dataset: DatasetArgument,
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET", help="A folder, or an archive: .tar, .tar.gz, .tar.zst, ..."
        ),
    ],
    force: Annotated[bool, typer.Option("--force", "-f", help="Write over what is there.")] = False,
    json: JsonOption = False,
) -> None:
    """Write a dataset's samples out as files, or as a tar archive, byte for byte."""
    from dlfs.ingest.export import export_dataset

    with (
        open_dataset(volume, dataset) as (_, found),
        progress_bar(f"export {found.name}") as bar,
    ):
        report = export_dataset(found, target, force=force, progress=bar.show)
    if json:
        print_json(
            {
                "dataset": found.name,
                "version": found.version,
                "target": target,
                "sample_count": report.sample_count,
                "sample_bytes": report.sample_bytes,
                "seconds": report.seconds,
            }
        )
    note(
        f"exported {found.name}@{found.version}: {human_samples(report.sample_count)}, "
        f"{human_rate(report.sample_bytes, report.seconds)}"
    )
