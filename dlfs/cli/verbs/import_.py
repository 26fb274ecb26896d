"""``dlfs import``: imports a folder, archives or files of another format as a dataset."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer

import dlfs
from dlfs.base.arguments import Layout
from dlfs.base.wording import redact
from dlfs.cli.attributes import parse_defaults, with_attributes
from dlfs.cli.datasets import describe_bad
from dlfs.cli.exits import ExitCode
from dlfs.cli.options import (
    JsonOption,
    SeedOption,
    open_devices,
    options_given,
    parse_size,
)
from dlfs.cli.output import (
    human_rate,
    human_samples,
    human_size,
    note,
    note_left_out,
    print_json,
    print_text,
)
from dlfs.cli.progress import progress_bar
from dlfs.errors import DlfsError, ExistsError, FormatError, NotFoundError, UsageError
from dlfs.format.names import new_dataset_name
from dlfs.ingest.registry import AUTO, STDIN, describe_options, parse_settings

if TYPE_CHECKING:
    from dlfs import UnfinishedInfo, Volume
    from dlfs.ingest.importer import ImportReport
    from dlfs.ingest.registry import Format
    from dlfs.ingest.source import Source
    from dlfs.ingest.workers.by_workers import StartLauncher, WorkersOptions


_NOT_KEPT = ("json", "formats", "resume", "abandon")
"""Parameters that an unfinished import does not keep for ``--resume``."""
_JOINED_COUNT = 16
"""Number of workers that an import reckons with if it is not known before."""
_BAD_SHOWN_MAX = 10
"""Most bad records that the end of an import names."""


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
    name: Annotated[str | None, typer.Option("--name", "-n")] = None,
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
    formats: Annotated[
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
    skip_bad: Annotated[str | None, typer.Option(metavar="N|P%")] = None,
    spool: Annotated[str | None, typer.Option(metavar="DIR")] = None,
    spool_bytes: Annotated[str | None, typer.Option(metavar="SIZE")] = None,
    step: Annotated[str | None, typer.Option(metavar="SIZE")] = None,
    one_pass: Annotated[bool, typer.Option("--one-pass")] = False,
    workers: Annotated[str | None, typer.Option(metavar="N|RAY")] = None,
    join_file: Annotated[str | None, typer.Option(metavar="FILE")] = None,
    listen: Annotated[str | None, typer.Option(metavar="HOST[:PORT]")] = None,
    resume: Annotated[bool, typer.Option("--resume")] = False,
    abandon: Annotated[str | None, typer.Option(metavar="NAME")] = None,
    json: JsonOption = False,
) -> None:
    """Import files as a dataset, completely or not at all. An existing name gets a new version.

    Every 2 GiB of samples, the progress is committed. The same command goes on with an import that
    was ended before its time. No reader sees an unfinished import; dlfs info lists it.

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
            sample, by its column 'path' or 'file_name', or from annotations as COCO's (.json).
            Repeatable.
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
        skip_bad: Leave out bad records, at most a number of them (100) or a share of all records
            (0.1%), and exit with 4 if there were any; 'dlfs info VOLUME NAME' lists them. By
            default the first bad record ends the import.
        spool: Directory for local copies of what URLs name, until the dataset is sealed; an
            interrupted import goes on with them. By default in the user's cache directory.
        spool_bytes: Most bytes of these copies: 4GiB. More objects are imported while they are
            fetched, and a copy is deleted when its samples are committed; files that their format
            reads together are all copied.
        step: Bytes of samples after which the progress is committed: 2GiB. 0: only at the end.
        workers: Processes of this machine that read and write parts of the source, for folders and
            for several files or objects of a format; the dataset is the same. 0: none. By default
            as many as there are cores, at most 8, for a source of more than 16 GiB with at least 4
            parts, if the volume allows it; else none. Or workers on Ray: ray, ray:ADDRESS or
            ray://HOST:PORT, with options as in 'ray://HOST:PORT?workers=8&cpus=2'.
        one_pass: Shuffle within 256 MiB only, for a source that is shuffled already. By default a
            larger source that has to be read in its own order, such as an archive, is packed a
            second time, which takes its size of free space once more until the end.
        join_file: Let workers join that dlfs import-worker FILE starts, anywhere: write what they
            need to this file, mode 0600, until the import ends.
        listen: Address of this host at which workers elsewhere reach it. By default that of its
            name, or of its way to the Ray cluster.
        resume: Go on with the unfinished import of the volume, which is the only argument; with
            --name if there are several.
        abandon: Free the space of the unfinished import of this name; the volume is the only
            argument.

    Examples:
        dlfs import photos photos.img --name photos
        dlfs import 'train-{000..099}.tar' photos.img -n train
        dlfs import cats dogs photos.img -n pets
        dlfs import new photos.img -n photos --append
        tar c photos | dlfs import - photos.img -n photos
        dlfs import shards photos.img -n train --workers 4
        dlfs import x.h5 photos.img -n x --option select=x
        dlfs import --resume photos.img
        dlfs import --abandon photos photos.img
        dlfs import --formats
    """
    command = {key: value for key, value in locals().items() if key not in _NOT_KEPT}
    if abandon is not None or resume:
        given = {key for key, value in command.items() if value not in (None, False, 0, AUTO)}
        _check_alone(arguments, given - {"arguments", "name"}, resume=resume, abandon=abandon)
    if abandon is not None:
        _abandon(abandon, arguments[0], json=json)
    elif resume:
        _resume(arguments[0], name, json=json)
    else:
        _run(command, json=json)


def _resume(uri: str, name: str | None, *, json: bool) -> None:
    """Go on with the unfinished import of a volume; its source is opened if it is still needed."""
    with open_devices(uri, "import into") as volume:
        found = _only_unfinished(volume, uri, name)
        volume_uri = volume.uri  # of all members, absolute
        if found.packed_again is not None:
            from dlfs.ingest.importer import finish_import

            note(f"going on with the second pass of {found.name}")
            with progress_bar(f"import {found.name}") as bar:
                report = finish_import(volume, found.name, bar.show)
            _delete_copies(found.origin)
            _report(report, appended=False, json=json)
            return
    _run(_kept_command(found, volume_uri), json=json)


def _run(command: dict[str, Any], *, json: bool) -> None:
    """Import as a command says that has the parameters of ``import_dataset``."""
    join_file = command.get("join_file")
    if join_file is None:
        _run_import(command, json=json)
        return
    from dlfs.ingest.workers.invitation import ended_in_file

    with ended_in_file(join_file):  # workers that are there first need not wait
        _run_import(command, json=json)


def _run_import(command: dict[str, Any], *, json: bool) -> None:
    name, format_name = command["name"], command["format_name"]
    append, skip_existing = command["append"], command["skip_existing"]
    options = parse_settings(command["settings"] or [])
    options |= {} if command["links"] is None else {"links": command["links"]}
    options |= {"prefix_shards": True} if command["prefix_shards"] else {}
    _check(command["arguments"], name, append=append, skip_existing=skip_existing)
    *sources, uri = command["arguments"]
    wanted = _wanted_workers(command)
    with (
        _reader_started(sources[0], format_name),
        _open_last(sources, uri) as volume,
        closing(_open_source(name, sources, format_name, options, command)) as source,
        _note_how_to_skip(needed=append and not skip_existing),
        progress_bar(f"import {name}") as bar,
    ):
        from dlfs.dataset.step_cutter import STEP_BYTES
        from dlfs.ingest.importer import import_dataset as run

        attributed = with_attributes(
            source,
            label_from_path=command["label_from_path"],
            patterns=command["attribute"],
            files=command["attributes"],
            path_column=command["path_column"],
            array_dtype=command["array_dtype"],
            array_shape=command["array_shape"],
        )
        step = parse_size(command["step"])
        if step == 0:
            _check_no_unfinished(volume, name)
        report = run(
            volume,
            attributed,
            name,
            layout=command["layout"],
            seed=command["seed"],
            allow_empty=command["allow_empty"],
            append=append,
            skip_existing=skip_existing,
            defaults=parse_defaults(command["default"]),
            step_bytes=STEP_BYTES if step is None else step or None,
            one_pass=command["one_pass"],
            workers=_choose_workers(volume, attributed, command, step, wanted),
            command=_without_secrets(command),
            progress=bar.show,
        )
    _report(report, appended=append, json=json)


def _wanted_workers(command: Mapping[str, Any]) -> tuple[int, StartLauncher | None] | None:
    """Return the number of workers that a command asks for, and what starts them; None without."""
    workers, join_file, listen = (command.get(key) for key in ("workers", "join_file", "listen"))
    if workers is None and join_file is None:
        if listen is not None:
            raise UsageError("import --listen: expected --workers or --join-file as well")
        return None
    if workers == "0" and join_file is None:
        return 0, None
    from dlfs.ingest.workers.addresses import parse_listen
    from dlfs.ingest.workers.engines import parse_workers
    from dlfs.ingest.workers.starting import start_workers

    wanted = None if workers in (None, "0") else parse_workers(workers)
    address = None if listen is None else parse_listen(listen)
    count = _JOINED_COUNT if wanted is None or wanted.count is None else wanted.count
    return count, start_workers(wanted, listen=address, join_file=join_file)


def _choose_workers(
    volume: Volume,
    source: Source,
    command: Mapping[str, Any],
    step: int | None,
    wanted: tuple[int, StartLauncher | None] | None,
) -> WorkersOptions | int:
    """Return the workers of an import: those of the command, or those that its size calls for."""
    from dlfs.ingest.workers.by_workers import WorkersOptions, default_workers

    if wanted is None:
        plain = command["skip_bad"], command["skip_existing"], command["one_pass"], step == 0
        if any(plain):
            return 0
        layout: Layout = command["layout"] or "shuffled"
        name, seed = command["name"], command["seed"]
        wanted = default_workers(volume, name, source, layout, seed, step), None
    count, start = wanted
    if not count:
        return 0
    spool, spool_bytes = command["spool"], parse_size(command.get("spool_bytes"))
    spool = None if spool is None else os.path.abspath(spool)
    return WorkersOptions(count, spool, spool_bytes, start)


def _without_secrets(command: dict[str, Any]) -> dict[str, Any] | None:
    """Return a command for the record of an import; None if its URLs have secrets in them."""
    values = (each if isinstance(each, list) else [each] for each in command.values())
    texts = (text for text in chain.from_iterable(values) if isinstance(text, str))
    return command if all(redact(text) == text for text in texts) else None


def _check_no_unfinished(volume: Volume, name: str) -> None:
    """Check that an import without steps does not leave an unfinished one of its name behind."""
    if any(info.name == name for info in volume.unfinished()):
        raise UsageError(
            f"import {name}: expected no unfinished import of this name for one without steps; go "
            "on with it without --step 0, or free it with --abandon"
        )


def _check_alone(
    arguments: list[str], others: set[str], *, resume: bool, abandon: str | None
) -> None:
    option = "--resume" if resume else "--abandon NAME"
    if resume and abandon is not None:
        raise UsageError("import: expected one of --resume and --abandon, got both")
    if len(arguments) != 1:
        raise UsageError(
            f"import {option}: expected one argument, the volume, got {len(arguments)}"
        )
    if others:
        raise UsageError(
            f"import {option}: expected no options of a new import, got {len(others)}; an import "
            "goes on with those that it began with"
        )


def _abandon(name: str, uri: str, *, json: bool) -> None:
    with open_devices(uri, "abandon an import into") as volume:
        info = volume.abandon(name)
    _delete_copies(info.origin)
    if json:
        print_json({"abandoned": asdict(info)}, result=True)
    size = human_size(info.stored_bytes + info.granted_bytes)
    count = human_samples(info.sample_count)
    note(f"abandoned the import of {info.name}: {count}, {size} are free now")


def _delete_copies(origin: Mapping[str, Any]) -> None:
    """Delete what an abandoned import has fetched on this machine, unless it still runs."""
    from dlfs.ingest.remote.spool import delete_copies
    from dlfs.ingest.remote.urls import is_url

    command = origin.get("command")
    if isinstance(command, dict) and (urls := [*filter(is_url, command["arguments"][:-1])]):
        spool = command["spool"]
        with suppress(DlfsError):
            delete_copies(urls, spool and os.path.join(origin["directory"], spool))


def _only_unfinished(volume: Volume, uri: str, name: str | None) -> UnfinishedInfo:
    found = [info for info in volume.unfinished() if name in (None, info.name)]
    if len(found) != 1:
        names = ", ".join(info.name for info in found) or "none"
        raise UsageError(
            f"import --resume: expected one unfinished import on {uri}, got {names}; --name "
            "chooses one"
        )
    return found[0]


def _kept_command(found: UnfinishedInfo, volume_uri: str) -> dict[str, Any]:
    """Return the parameters of the command that began an import, and enter its directory."""
    command, directory = found.origin.get("command"), found.origin.get("directory")
    known = isinstance(command, dict) and {"arguments", "name", "step"} <= command.keys()
    if not isinstance(command, dict) or not known or not isinstance(directory, str):
        raise UsageError(
            f"import --resume: the unfinished import of {found.name} does not have its command: "
            "a program began it, its URLs have secrets, or it is too long; go on with it by what "
            "began it"
        )
    if STDIN in command["arguments"]:
        raise UsageError(
            f"import --resume: the import of {found.name} reads standard input; give it the "
            f"same again: dlfs import {' '.join(command['arguments'])} --name {found.name}"
        )
    note(f"going on in {directory}: {' '.join(command['arguments'])}")
    try:
        os.chdir(directory)
    except OSError as error:
        raise NotFoundError(
            f"import --resume: enter {directory}, where the import of {found.name} began: "
            f"{error.strerror}"
        ) from error
    join_file = command.get("join_file")
    if join_file is not None and not os.path.isdir(os.path.dirname(os.path.abspath(join_file))):
        command = {**command, "join_file": None}  # that of a training, which has ended
    return {**command, "arguments": [*command["arguments"][:-1], volume_uri]}


def _check(arguments: list[str], name: str | None, *, append: bool, skip_existing: bool) -> None:
    """Check arguments before a long walk over the source."""
    if name is None:
        raise UsageError("import: expected --name, the name of the dataset; see dlfs import --help")
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
    name: str,
    sources: list[str],
    format_name: str,
    options: dict[str, object],
    command: Mapping[str, Any],
) -> Source:
    """Open the source; show a bar while it is read, or objects are fetched."""
    from dlfs.ingest.importer import open_source
    from dlfs.ingest.remote.urls import is_url

    with progress_bar(f"{'fetch' if any(map(is_url, sources)) else 'import'} {name}") as bar:
        return open_source(
            sources,
            format_name=format_name,
            options=options,
            spool=command["spool"],
            spool_bytes=parse_size(command.get("spool_bytes")),
            fetch_progress=bar.show,
            skip_bad=command.get("skip_bad"),
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
                "bad_records": asdict(report.bad),
                "warnings": list(report.warnings),
            },
            result=True,
        )
    shown, rate = f"{info.name}@{info.version}", human_rate(report.sample_bytes, report.seconds)
    if not appended:
        kept = f" ({report.kept_count:,} were there)" if report.kept_count else ""
        note(f"imported {shown}: {human_samples(info.sample_count)}{kept}, {rate}")
    elif report.sample_count:
        new, total = human_samples(report.sample_count), human_samples(info.sample_count)
        note(f"appended {new}, {rate}: {shown} has {total}")
    else:
        note(f"nothing to append: {shown} has {human_samples(info.sample_count)}")
    note_left_out(report.skipped)
    if report.bad.count:
        for one in report.bad.records[:_BAD_SHOWN_MAX]:
            note(f"bad record: {one.source}: {one.record}: {one.reason}")
        note(f"left out bad records: {describe_bad(report.bad)}; 'dlfs info' lists them")
        raise typer.Exit(ExitCode.DAMAGE)
