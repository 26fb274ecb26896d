"""``dlfs import``: a folder or archives into a dataset."""

from __future__ import annotations

from contextlib import closing
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

import dlfs
from dlfs.cli.datasets import dataset_json
from dlfs.cli.options import JsonOption
from dlfs.cli.output import human_count, human_rate, human_samples, note, print_json
from dlfs.cli.progress import progress_bar
from dlfs.errors import UsageError

if TYPE_CHECKING:
    from dlfs.ingest.importer import ImportReport


class Layout(StrEnum):
    """In which order samples are packed."""

    shuffled = "shuffled"
    path = "path"


class Links(StrEnum):
    """What becomes of symbolic links."""

    follow = "follow"
    skip = "skip"
    error = "error"


def import_dataset(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE... VOLUME",
            help="A folder, or tar archives (.tar, .tar.gz, .tar.zst; "
            "'train-{000000..000099}.tar'); then the volume.",
        ),
    ],
    name: Annotated[str, typer.Option("--name", "-n", help="Of the dataset.")],
    layout: Annotated[
        Layout, typer.Option(help="Pack in an order drawn from the seed, or in path order.")
    ] = Layout.shuffled,
    seed: Annotated[int, typer.Option(help="Of the order of packing.", min=0)] = 0,
    links: Annotated[
        Links, typer.Option(help="Symbolic links: take what they lead to, leave out, or refuse.")
    ] = Links.follow,
    prefix_shards: Annotated[
        bool, typer.Option("--prefix-shards", help="Put each archive's name before its paths.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Import files as a dataset: whole, or not at all. A name that exists gets a new version."""
    from dlfs.ingest.importer import import_dataset as run
    from dlfs.ingest.importer import open_source

    if len(arguments) < 2:
        raise UsageError("import: expected a source and a volume, got only one of them")
    *sources, uri = arguments
    with (
        dlfs.open(uri) as volume,
        progress_bar(f"import {name}") as bar,
        closing(open_source(sources, links=links.value, prefix_shards=prefix_shards)) as source,
    ):
        report = run(volume, source, name, layout=layout.value, seed=seed, progress=bar.show)
    _report(report, json=json)


def _report(report: ImportReport, *, json: bool) -> None:
    info = report.dataset
    if json:
        print_json(
            {
                "dataset": dataset_json(info),
                "seconds": report.seconds,
                "skipped": dict(report.skipped),
                "empty_directories": report.empty_directories,
            }
        )
    note(
        f"imported {info.name}@{info.version}: {human_samples(info.sample_count)}, "
        f"{human_rate(report.sample_bytes, report.seconds)}"
    )
    for reason, count in report.skipped.items():
        note(f"left out: {human_count(count)} x {reason}")
    if report.empty_directories:
        note(f"left out: {human_count(report.empty_directories)} x directory without samples")
