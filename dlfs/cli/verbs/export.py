"""``dlfs export``: writes a dataset to a folder, an archive, a table or a pipe."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Literal, get_args

import typer

from dlfs.cli.exits import ExitCode
from dlfs.cli.options import DatasetArgument, JsonOption, VolumeArgument, open_dataset
from dlfs.cli.output import human_rate, human_samples, note, print_json
from dlfs.cli.progress import progress_bar
from dlfs.errors import UsageError

if TYPE_CHECKING:
    from dlfs import Dataset
    from dlfs.ingest.export.samples import ExportReport, OnBad
    from dlfs.ingest.progress import ProgressCallback

STDOUT = "-"
"""Target that means standard output."""


Kind = Literal["folder", "tar", "zip", "arrow", "parquet"]
"""Kind of target to write."""


def export(
    volume: VolumeArgument,
    dataset: DatasetArgument,
    target: Annotated[str, typer.Argument(metavar="TARGET")],
    to: Annotated[Kind | None, typer.Option(metavar="|".join(get_args(Kind)))] = None,
    force: Annotated[bool, typer.Option("--force", "-f")] = False,
    skip_bad: Annotated[bool, typer.Option("--skip-bad")] = False,
    json: JsonOption = False,
) -> None:
    """Write a dataset's samples to files, an archive or a table, byte for byte.

    Only Arrow and Parquet files store attributes.

    Args:
        target: A folder, an archive (.tar, .tar.gz, .tar.zst, ..., .zip) or a table (.arrow,
            .parquet), as its suffix says; a folder whatever its suffix with a slash at its end; '-'
            writes a tar archive to standard output.
        to: What to write; by default as TARGET's name says.
        force: Write over what is there.
        skip_bad: Leave out samples that cannot be read, name each, and exit with 4 at the end.

    Examples:
        dlfs export photos.img photos copy
        dlfs export photos.img photos photos.tar.zst
        dlfs export photos.img photos@2 photos.arrow --force
    """
    kind = _kind(target, to, json=json)
    on_bad = (lambda error: note(f"left out: {error}")) if skip_bad else None
    with (
        open_dataset(volume, dataset) as found,
        progress_bar(f"export {found.name}") as bar,
    ):
        report = _run(found, target, kind, force=force, on_bad=on_bad, progress=bar.show)
        columns = len(found.columns)
    if json:
        print_json(
            {
                "dataset": found.name,
                "version": found.version,
                "target": target,
                "sample_count": report.sample_count,
                "sample_bytes": report.sample_bytes,
                "bad_count": report.bad_count,
                "seconds": report.seconds,
            },
            result=True,
        )
    note(
        f"exported {found.name}@{found.version}: {human_samples(report.sample_count)}, "
        f"{human_rate(report.sample_bytes, report.seconds)}"
    )
    if columns and kind not in ("arrow", "parquet"):
        note(
            f"left out: {columns} attribute{'' if columns == 1 else 's'}; "
            "an Arrow or Parquet file (--to arrow) keeps them"
        )
    if report.bad_count:
        note(f"left out: {human_samples(report.bad_count)} that cannot be read")
        raise typer.Exit(ExitCode.DAMAGE)


def _kind(target: str, to: Kind | None, *, json: bool) -> Kind:
    """Choose the kind of target, and refuse impossible ones, before anything is opened."""
    from dlfs.ingest.export.targets import export_kind

    if target != STDOUT:
        return to or export_kind(target)
    if to not in (None, "tar"):
        raise UsageError(f"export to standard output: expected --to tar, got --to {to}")
    if json:
        raise UsageError(
            "export to standard output: expected no --json, which is written there too"
        )
    if sys.stdout.isatty():
        raise UsageError(
            "export to standard output: expected a pipe or a file, got a terminal; "
            "'dlfs export VOLUME DATASET - | tar t' lists what would be written"
        )
    return "tar"


def _run(
    dataset: Dataset,
    target: str,
    kind: Kind,
    *,
    force: bool,
    on_bad: OnBad | None,
    progress: ProgressCallback,
) -> ExportReport:
    from dlfs.ingest.export.targets import export_dataset, export_stream

    if target == STDOUT:
        return export_stream(dataset, sys.stdout.buffer, on_bad=on_bad, progress=progress)
    return export_dataset(dataset, target, kind=kind, force=force, on_bad=on_bad, progress=progress)
