"""``dlfs import``: imports a folder, archives or files of another format as a dataset."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal, get_args

import typer

import dlfs
from dlfs.base.arguments import Layout
from dlfs.cli.attributes import parse_defaults, with_attributes
from dlfs.cli.options import (
    JsonOption,
    SeedOption,
    open_devices,
    options_given,
)
from dlfs.cli.output import (
    human_rate,
    human_samples,
    note,
    note_left_out,
    print_json,
    print_text,
)
from dlfs.cli.progress import progress_bar
from dlfs.errors import DlfsError, ExistsError, FormatError, NotFoundError, UsageError
from dlfs.format.names import new_dataset_name
from dlfs.ingest.registry import AUTO, describe_options, parse_settings

if TYPE_CHECKING:
    from dlfs import Volume
    from dlfs.ingest.importer import ImportReport
    from dlfs.ingest.registry import Format
    from dlfs.ingest.source import Source


def show_formats(ctx: typer.Context, wanted: bool) -> None:
    """Print the formats with their options, and exit."""
    if not wanted:
        return
    from dlfs.ingest.registry import FORMATS

    if options_given(ctx).get("json"):
        found = [
            {
                "name": row.name,
                "summary": row.summary,
                "extra": row.extra,
                "options": [asdict(option) for option in describe_options(row)],
            }
            for row in FORMATS
        ]
        print_json({"formats": found})
        raise typer.Exit
    for row in FORMATS:
        _print_format(row)
    raise typer.Exit


def _print_format(row: Format) -> None:
    needs = f" (needs the extra [{row.extra}])" if row.extra else ""
    print_text(row.name, style="bold cyan")
    print_text(row.summary + needs, indent=4)
    for option in describe_options(row):
        default = f"default: {_default(option.default)}"
        print_text(f"{option.name}={option.type}: {option.text} ({default})", indent=8)
    print()


def _default(value: object) -> str:
    if value is None or value == ():
        return "none"
    return "yes" if value is True else "no" if value is False else str(value)


def import_dataset(
    arguments: Annotated[list[str], typer.Argument(metavar="SOURCE... VOLUME")],
    name: Annotated[str, typer.Option("--name", "-n")],
    layout: Annotated[Layout | None, typer.Option(metavar="|".join(get_args(Layout)))] = None,
    seed: SeedOption = 0,
    format_name: Annotated[str, typer.Option("--format", "-f", metavar="FORMAT")] = AUTO,
    settings: Annotated[
        list[str] | None, typer.Option("--option", "-o", metavar="NAME=VALUE")
    ] = None,
    links: Annotated[
        Literal["follow", "skip", "error"] | None, typer.Option(metavar="follow|skip|error")
    ] = None,
    prefix_shards: Annotated[bool, typer.Option("--prefix-shards")] = False,
    formats: Annotated[  # noqa: ARG001 - show_formats sees to it
        bool, typer.Option("--formats", is_eager=True, callback=show_formats)
    ] = False,
    label_from_path: Annotated[bool, typer.Option("--label-from-path")] = False,
    attribute: Annotated[
        list[str] | None, typer.Option("--attribute", "-a", metavar="NAME[:TYPE]=PATTERN")
    ] = None,
    attributes: Annotated[list[str] | None, typer.Option(metavar="FILE")] = None,
    default: Annotated[list[str] | None, typer.Option(metavar="NAME[:TYPE]=VALUE")] = None,
    path_column: Annotated[str | None, typer.Option(metavar="NAME")] = None,
    array_dtype: Annotated[str | None, typer.Option(metavar="DTYPE")] = None,
    array_shape: Annotated[str | None, typer.Option(metavar="N,N")] = None,
    allow_empty: Annotated[bool, typer.Option("--allow-empty")] = False,
    append: Annotated[bool, typer.Option("--append")] = False,
    skip_existing: Annotated[bool, typer.Option("--skip-existing")] = False,
    spool: Annotated[str | None, typer.Option(metavar="DIR")] = None,
    json: JsonOption = False,
) -> None:
    """Import files as a dataset, completely or not at all. An existing name gets a new version.

    Args:
        arguments: A folder, archives (.tar, .tar.gz, .tar.zst, .zip; 'train-{000000..000099}.tar')
            or files of another format, or URLs of these (s3://, gs://, az://, hf://, https://); or
            several folders and files, whose names begin the paths; '-' reads a tar archive from
            standard input, with --format list the names of files; then the volume.
        name: Name of the dataset.
        layout: Pack in an order drawn from the seed (the default), or in path order. With --append
            the default is the layout of the newest version.
        format_name: Format of the source; by default it is recognised. --formats lists all.
        settings: Option of the format; repeatable. --formats lists all.
        links: Symbolic links: follow (the default), leave out, or refuse.
        prefix_shards: Begin paths with the archive's name.
        formats: List the formats with their options, and exit.
        label_from_path: Attribute 'label': the folder that each sample is in.
        attribute: Take an attribute from each path: the number of a component (0 first, -1 last),
            or a regular expression (its group NAME, first group or whole match). TYPE: str, int,
            float. Repeatable.
        attributes: Attributes from a CSV, Parquet, Arrow or JSON Lines file with a row for each
            sample, by its column 'path' or 'file_name'. Repeatable.
        default: Value of an attribute for samples without one, which are an error otherwise. With
            --append, also for those of the earlier version. TYPE: str, int, float. Repeatable.
        path_column: Column of the paths in --attributes.
        array_dtype: Samples are arrays of this numpy type: f4, uint8.
        array_shape: Shape of these arrays.
        allow_empty: Make an empty dataset of a source without samples.
        append: Append to the dataset's newest version: the new version has its samples as well,
            without a copy. A path that it has already is an error.
        skip_existing: With --append: leave out samples whose path the dataset has. Without new
            samples there is no new version.
        spool: Directory for local copies of what URLs name, until the dataset is sealed; an
            interrupted import goes on with them. By default in the user's cache directory.

    Examples:
        dlfs import photos photos.img --name photos
        dlfs import 'train-{000..099}.tar' photos.img -n train
        dlfs import cats dogs photos.img -n pets
        dlfs import new photos.img -n photos --append
        tar c photos | dlfs import - photos.img -n photos
        dlfs import x.h5 photos.img -n x --option select=x
        dlfs import --formats
    """
    options = parse_settings(settings or [])
    options |= {} if links is None else {"links": links}
    options |= {"prefix_shards": True} if prefix_shards else {}
    _check(arguments, name, append=append, skip_existing=skip_existing)
    *sources, uri = arguments
    with (
        _reader_started(sources[0], format_name),
        _open_last(sources, uri) as volume,
        closing(_open_source(name, sources, format_name, options, spool)) as source,
        _note_how_to_skip(needed=append and not skip_existing),
        progress_bar(f"import {name}") as bar,
    ):
        from dlfs.ingest.importer import import_dataset as run

        attributed = with_attributes(
            source,
            label_from_path=label_from_path,
            patterns=attribute,
            files=attributes,
            path_column=path_column,
            array_dtype=array_dtype,
            array_shape=array_shape,
        )
        report = run(
            volume,
            attributed,
            name,
            layout=layout,
            seed=seed,
            allow_empty=allow_empty,
            append=append,
            skip_existing=skip_existing,
            defaults=parse_defaults(default),
            progress=bar.show,
        )
    _report(report, appended=append, json=json)


def _check(arguments: list[str], name: str, *, append: bool, skip_existing: bool) -> None:
    """Check arguments before a long walk over the source."""
    if len(arguments) < 2:
        raise UsageError("import: expected a source and a volume, got only one of them")
    if skip_existing and not append:
        raise UsageError("import: --skip-existing is for --append; give both")
    new_dataset_name(name)


@contextmanager
def _note_how_to_skip(*, needed: bool) -> Iterator[None]:
    """Add the option that leaves known samples out to the error of a path that exists already."""
    try:
        yield
    except ExistsError as error:
        if needed:
            error.add_note("--skip-existing leaves out samples that the dataset has already")
        raise


@contextmanager
def _reader_started(source: str, format_name: str) -> Iterator[None]:
    """Start the process that reads the source, if its format has one, before all else is loaded."""
    from dlfs.ingest.isolation.process import end_early, start_early
    from dlfs.ingest.registry import find_format, recognise

    with suppress(DlfsError):
        if os.path.isfile(source) or os.path.isdir(source):
            row = recognise([source]) if format_name == AUTO else find_format(format_name)
            if row.isolated:
                start_early()
    try:
        yield
    finally:
        end_early()


def _open_source(
    name: str, sources: list[str], format_name: str, options: dict[str, object], spool: str | None
) -> Source:
    """Open the source; show a bar while it is read, or objects are fetched."""
    from dlfs.ingest.importer import open_source
    from dlfs.ingest.remote.urls import is_url

    with progress_bar(f"{'fetch' if any(map(is_url, sources)) else 'import'} {name}") as bar:
        return open_source(
            sources,
            format_name=format_name,
            options=options,
            spool=spool,
            fetch_progress=bar.show,
        )


def _open_last(sources: list[str], uri: str) -> Volume:
    """Open the volume; if that fails, say that the volume comes last."""
    try:
        return open_devices(uri, "import into")
    except (FormatError, NotFoundError, UsageError) as error:
        if _is_volume(sources[0]):
            typed = " ".join(["dlfs import", *sources[1:], uri, sources[0]])
            raise UsageError(
                f"import: the volume comes last, got the volume {sources[0]} first and {uri} last; "
                f"the order is: {typed}"
            ) from error
        error.add_note("import takes the volume last, as SOURCE... VOLUME")
        raise


def _is_volume(uri: str) -> bool:
    try:
        dlfs.open(uri).close()
    except DlfsError:
        return False
    return True


def _report(report: ImportReport, *, appended: bool, json: bool) -> None:
    info = report.dataset
    if json:
        print_json(
            {
                "dataset": asdict(info),
                "seconds": report.seconds,
                "skipped": dict(report.skipped),
                "empty_directories": report.empty_directories,
            },
            result=True,
        )
    shown, rate = f"{info.name}@{info.version}", human_rate(report.sample_bytes, report.seconds)
    if not appended:
        note(f"imported {shown}: {human_samples(info.sample_count)}, {rate}")
    elif report.sample_count:
        new, total = human_samples(report.sample_count), human_samples(info.sample_count)
        note(f"appended {new}, {rate}: {shown} has {total}")
    else:
        note(f"nothing to append: {shown} has {human_samples(info.sample_count)}")
    note_left_out(report.skipped)
