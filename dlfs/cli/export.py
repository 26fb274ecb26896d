"""``dlfs export``: a dataset back into a folder, an archive or an Arrow file."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from dlfs.cli.options import DatasetArgument, JsonOption, VolumeArgument, open_dataset
from dlfs.cli.output import human_rate, human_samples, note, print_json
from dlfs.cli.progress import progress_bar


class Kind(StrEnum):
    """What to write."""

    folder = "folder"
    tar = "tar"
    arrow = "arrow"


def export(
    volume: VolumeArgument,
    dataset: DatasetArgument,
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="A folder, an archive (.tar, .tar.gz, .tar.zst, ...) or an Arrow file (.arrow).",
        ),
    ],
    to: Annotated[
        Kind | None,
        typer.Option(
            "--to",
            metavar="folder|tar|arrow",
            help="What to write; by default as TARGET's name says.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", "-f", help="Write over what is there.")] = False,
    json: JsonOption = False,
) -> None:
    """Write a dataset's samples out as files, a tar archive or an Arrow file, byte for byte.

    Attributes are kept by an Arrow file only.
    """
    from dlfs.ingest.export import export_dataset, export_kind

    kind = to.value if to is not None else export_kind(target)

    with (
        open_dataset(volume, dataset) as (_, found),
        progress_bar(f"export {found.name}") as bar,
    ):
        report = export_dataset(found, target, kind=kind, force=force, progress=bar.show)
        columns = len(found.columns)
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
    if columns and kind != "arrow":
        note(
            f"left out: {columns} attribute{'' if columns == 1 else 's'}; "
            "an Arrow file (--to arrow) keeps them"
        )
