"""Imports the samples of a source as a dataset.

A thread reads the source's next block while the dataset writer packs and writes the present one.
After any failure, Ctrl-C included, the writer aborts and the volume stays as it was.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, cast
from uuid import UUID

import numpy as np

from dlfs.base.arguments import Layout, check_integer
from dlfs.base.closing import closed_on_error
from dlfs.base.units import GIB, format_bytes
from dlfs.base.wording import join_words
from dlfs.dataset.parts_writer import PartsWriter
from dlfs.dataset.step_cutter import STEP_BYTES
from dlfs.dataset.step_writer import StepWriter
from dlfs.dataset.writer import DatasetWriter
from dlfs.errors import NotFoundError, UsageError
from dlfs.format.bad_records import BadReport
from dlfs.format.constants import ADDRESS_MAX
from dlfs.ingest.adding import BlockAdder, check_labels
from dlfs.ingest.bad_records import BadRecords, SkipBad, opening
from dlfs.ingest.containers import warn_of_containers
from dlfs.ingest.file_parts import FileOpener, open_files
from dlfs.ingest.files import FilesSource
from dlfs.ingest.patterns import expand
from dlfs.ingest.progress import Meter, ProgressCallback, second_pass_meter
from dlfs.ingest.records import find_shards
from dlfs.ingest.registry import AUTO, FORMATS, STDIN, find_format, make_options, recognise
from dlfs.ingest.remote.objects import ObjectsSource
from dlfs.ingest.remote.source import ArrivingShards, SpooledSource
from dlfs.ingest.remote.spool import Spool
from dlfs.ingest.remote.urls import is_url
from dlfs.ingest.source import (
    STDIN_SHOWN,
    Source,
    add_skipped,
    check_regular,
    fingerprint_of,
    without_first,
    without_known,
)
from dlfs.ingest.workers.by_workers import (
    PartsImport,
    WorkersOptions,
    coordinating,
    divide,
    skipped_in_parts,
)
from dlfs.store.info import DatasetInfo
from dlfs.volume.volume import Volume

LIST = "list"
"""Format whose files are named by what is in the source, so that they cannot be copied before."""

LISTING = ("folder", "imagefolder", "zarr")
"""Formats that check each file in a folder themselves."""

FILES = ("folder", "imagefolder")
"""Formats whose samples are whole files."""

SPOOL_BYTES = 4 * GIB
"""Most bytes of local copies of remote objects, unless the caller says otherwise."""

SKIPPED, EMPTY = "skipped", "empty_directories"
"""Keys of the origin, for the second pass: entries left out by reason, and empty directories."""
DIVISION = "division"
"""Key of the origin: a digest of the parts that the source was divided into for workers."""
ALREADY_THERE = "sample that the dataset has already"
"""Reason for which samples are skipped with ``skip_existing``."""


@dataclass(frozen=True, slots=True)
class ImportReport:
    """Result of an import."""

    dataset: DatasetInfo
    sample_count: int
    sample_bytes: int
    seconds: float
    skipped: Mapping[str, int]
    empty_directories: int
    """Number of directories without samples that the source has, and so the dataset."""
    kept_count: int = 0
    """Number of samples that an earlier import had committed before it ended."""
    bad: BadReport = field(default_factory=BadReport)
    """Bad records that were left out, as ``skip_bad`` allows."""
    warnings: Sequence[str] = ()
    """Messages about the dataset, such as why it is shuffled within windows only."""


def open_source(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    format_name: str = AUTO,
    options: Mapping[str, object] | None = None,
    spool: str | os.PathLike[str] | None = None,
    spool_bytes: int | None = None,
    fetch_progress: ProgressCallback | None = None,
    skip_bad: int | str | None = None,
) -> Source:
    """Open the source that paths name: a folder, archives, or files of a format.

    The objects that URLs name (``s3://bucket/train``) are fetched while they are imported, if they
    are files of a folder or more than ``spool_bytes``, else before; see ``ingest.remote``.

    Args:
        paths: one path or URL, or several of one format. ``train-{000000..000099}.tar`` and globs
            stand for several; a path that exists is taken literally. ``-`` is standard input, by
            default a tar archive.
        format_name: name of the format in ``registry.FORMATS``; ``auto`` recognises it.
        options: options of the format, by name.
        spool: directory for local copies of what URLs name; by default ``dlfs/spool`` in the
            user's cache directory. ``import_dataset`` deletes the copies.
        spool_bytes: most bytes of these copies, > 0; a larger object is the only one. Objects of
            files that a format reads together are all copied; that they are more is then an error.
            By default ``SPOOL_BYTES``, and such objects are copied anyway.
        fetch_progress: called when an object has been fetched before the import.
        skip_bad: bad records that the import may leave out: a number, or a share of all records
            such as ``0.1%``; by default the first one is an error. See ``ingest.bad_records``.

    Raises:
        NotFoundError: a path does not exist.
        UsageError: the format is unknown, does not take these paths or options, or needs a package
            that is not installed.
        SpaceError: the spool directory has too little free space.
        DlfsError: the source cannot be read; see the format's source.
    """
    limit = None if skip_bad is None else SkipBad.parse(skip_bad)
    with opening(BadRecords(limit)):
        given = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
        texts = [os.fspath(path) for path in given]
        urls = [text for text in texts if is_url(text)]
        if not urls:
            return _open_local(texts, format_name, options or {})
        if spool_bytes is not None:
            check_integer(spool_bytes, 1, ADDRESS_MAX, option="spool_bytes", action="import")
        copies = Spool(urls, None if spool is None else os.fspath(spool))
        with closed_on_error(copies):
            with copies.note_on_error(), copies.named():
                copies.find()
                source = _open_arriving(copies, texts, format_name, options or {}, spool_bytes)
            if source is None:
                source = _open_copied(copies, texts, format_name, options or {}, fetch_progress)
            return source


def _open_arriving(
    copies: Spool,
    texts: Sequence[str],
    format_name: str,
    options: Mapping[str, object],
    spool_bytes: int | None,
) -> Source | None:
    """Open a source whose objects are fetched while they are imported; None to fetch them before.

    Raises:
        UsageError: all objects have to be fetched before, and are more than the caller allows.
    """
    limit_bytes = SPOOL_BYTES if spool_bytes is None else spool_bytes
    paths = [*chain.from_iterable(copies.copies[text] for text in texts if is_url(text))]
    row = None
    if all(map(is_url, texts)):
        with suppress(UsageError):  # what has no known name is known when it was fetched
            is_auto = format_name == AUTO
            row = recognise(paths, copies.entries()) if is_auto else find_format(format_name)
    if row is not None and row.name in FILES:
        make_options(row, options)
        samples = ObjectsSource(copies, limit_bytes, has_classes=row.name == "imagefolder")
        if format_name == AUTO:
            warn_of_containers(copies.show(samples.name), samples.file_paths())
        return _spooled(samples, copies, format_name, options)
    copies.make_folders()
    if copies.size_bytes <= limit_bytes:
        return None
    copies.prepare(limit_bytes)
    source: Source | None = None
    if row is not None and row.by_file:
        shards = copies.objects_of(find_shards(row, paths))
        if shards is None or len(shards) == 1:
            return None
        make_options(row, options)
        opener = FileOpener(row.name, options)
        fingerprint = fingerprint_of(format_name, dict(options), copies.fingerprint)
        source = ArrivingShards(copies, limit_bytes, shards, opener, fingerprint)
    elif spool_bytes is not None:
        what = "these objects" if row is None else f"objects of format {row.name}"
        raise UsageError(
            f"import {copies.show(paths[0])}: expected at least {format_bytes(copies.size_bytes)} "
            f"for local copies, as {what} are fetched before they are read, got spool_bytes = "
            f"{format_bytes(spool_bytes)}"
        )
    return None if source is None else _spooled(source, copies, format_name, options)


def _spooled(
    source: Source, copies: Spool, format_name: str, options: Mapping[str, object]
) -> SpooledSource:
    """Return a source of objects that are fetched while they are imported."""
    spooled = SpooledSource(source, copies)
    spooled.fingerprint = fingerprint_of(format_name, dict(options), copies.fingerprint)
    return spooled


def _open_copied(
    copies: Spool,
    texts: Sequence[str],
    format_name: str,
    options: Mapping[str, object],
    fetch_progress: ProgressCallback | None,
) -> Source:
    """Fetch all objects, and open the source of their copies and of local files beside them."""
    with copies.note_on_error(), copies.named():
        copies.fetch(fetch_progress)
    with copies.named():
        local = [copies.copies[text] if is_url(text) else [text] for text in texts]
        source = _open_local([*chain.from_iterable(local)], format_name, options, are_copies=True)
    spooled = SpooledSource(source, copies, is_copied=True)
    if source.fingerprint is not None:  # that of copies changes when they are fetched again
        beside = [path for text in texts if not is_url(text) for path in expand(text)]
        spooled.fingerprint = fingerprint_of(
            format_name, dict(options), copies.fingerprint, paths=beside
        )
    return spooled


def _open_local(
    texts: Sequence[str],
    format_name: str,
    options: Mapping[str, object],
    *,
    are_copies: bool = False,
) -> Source:
    """Open a source of local files, some of which may be copies of remote objects."""
    found = [match for text in texts for match in expand(text)]
    if not found:
        raise UsageError("import: expected a source, got none")
    local = [path for path in found if path != STDIN and Path(path).exists()]
    for path in local:
        if not Path(path).is_dir():
            check_regular(path)
    row = recognise(found) if format_name == AUTO else find_format(format_name)
    for path in local:
        if row.name not in LISTING:
            check_regular(path)
    if STDIN in found and not row.streams:
        streaming = join_words([each.name for each in FORMATS if each.streams], "or")
        raise UsageError(
            f"import {STDIN_SHOWN}: expected format {streaming}, which needs one pass only, got "
            f"{row.name}; save it to a file"
        )
    for path in found:
        if path != STDIN and not Path(path).exists():
            raise NotFoundError(f"import {path}: there is no such file or folder")
    if are_copies and row.name == LIST:
        raise UsageError(
            f"import {found[0]}: expected a local list of local files; a folder of objects may "
            "take attributes from a table"
        )
    source = open_files(FileOpener(row.name, options), found)
    if STDIN not in found and not isinstance(source, FilesSource):
        source.fingerprint = fingerprint_of(row.name, dict(options), paths=found)
    if format_name == AUTO and isinstance(source, FilesSource):
        warn_of_containers(source.name, source.file_paths())
    return source


def import_dataset(
    volume: Volume,
    source: Source,
    name: str,
    *,
    layout: Layout | None = None,
    seed: int = 0,
    uuid: UUID | None = None,
    allow_empty: bool = False,
    append: bool = False,
    skip_existing: bool = False,
    defaults: Mapping[str, Any] | None = None,
    step_bytes: int | None = STEP_BYTES,
    one_pass: bool = False,
    workers: int | WorkersOptions = 0,
    command: Mapping[str, Any] | None = None,
    progress: ProgressCallback | None = None,
) -> ImportReport:
    """Import every sample of a source as a new dataset, or as a new version of one.

    Args:
        volume: volume to write to; the import takes its write lock.
        source: source to read; the caller closes it.
        name: name of the dataset.
        layout: ``shuffled`` packs samples in an order drawn from the seed, ``path`` in path order.
            By default ``shuffled``; with ``append`` the layout of the newest version.
        seed: seed of the order of packing, 0..2^64-1.
        uuid: UUID of the new version; random by default.
        allow_empty: make a dataset without samples if the source has none.
        append: the new version has all samples of the newest version as well; see
            ``Volume.append``.
        skip_existing: with ``append``, leave out samples whose path the newest version has; files
            of a folder are not even read. If no sample is new, no version is made, and the report
            describes the newest one.
        defaults: value of each attribute for samples without one; see ``Volume.writer``.
        step_bytes: bytes of samples after which the import commits its progress, so that the next
            import of the same source goes on with it; None: it is whole or not at all. Appending,
            and sources that cannot be read again, have no steps.
        one_pass: shuffle a source that cannot be read in any order within windows of 256 MiB only.
            By default all samples of a larger one are packed a second time, read from the volume,
            so that the neighbours of a sample come from everywhere; until the seal this takes the
            space of the samples once more. Imports without steps have one pass.
        workers: number of processes that read parts of the source and write their data, while this
            one commits; 0: none. The dataset is the same with any number. The source must be one
            that can be divided, and the import one in steps.
        command: what began the import, kept with its progress for who goes on; values of JSON.
        progress: called after each block, and once at the start.

    Raises:
        NotFoundError: the source has no sample, and ``allow_empty`` is not set; or there is no
            dataset to append to.
        ExistsError: two samples have one path.
        SpaceError: the volume has too little free space.
        LockedError: another writer holds the volume's lock.
        UsageError: an unfinished import of this name has another source.
        DlfsError: the source or the volume failed. The volume is as it was, but for the steps that
            were committed, which a note of the error names.
    """
    if source.sample_count == 0 and not allow_empty:
        raise _no_samples(source)
    if skip_existing and not append:
        raise UsageError("import: expected skip_existing only with append")
    options: dict[str, Any] = {
        "layout": layout if append else layout or "shuffled",
        "seed": seed,
        "defaults": defaults,
    }
    steps = {
        # Samples that are left out have no place in the count by which an import goes on.
        "step_bytes": None if skip_existing else step_bytes,
        "one_pass": one_pass or source.gives_runs,
        "on_second_pass": second_pass_meter(progress),
    }
    given = _Import(
        volume,
        source,
        name,
        options,
        append,
        skip_existing,
        steps,
        command,
        uuid,
        allow_empty,
        progress,
    )
    if not workers or source.sample_count == 0:
        return _import_here(given)
    if skip_existing or step_bytes is None:
        existing = "that leaves out samples which are there, and so are not in the count of a part"
        raise UsageError(
            "import with workers: expected an import in steps, which parts go on from; got one "
            f"{existing if skip_existing else 'without steps'}"
        )
    return _import_by_workers(
        given, WorkersOptions(workers) if isinstance(workers, int) else workers
    )


@dataclass(frozen=True, slots=True)
class _Import:
    """The arguments of an import; see ``import_dataset``."""

    volume: Volume
    source: Source
    name: str
    options: dict[str, Any]
    append: bool
    skip_existing: bool
    steps: dict[str, Any]
    command: Mapping[str, Any] | None
    uuid: UUID | None
    allow_empty: bool
    progress: ProgressCallback | None

    @property
    def origin(self) -> dict[str, Any]:
        """What the record of an unfinished import says of its source and options."""
        defaults = self.options["defaults"] or {}
        kept = self.options, str(self.uuid), self.append, self.steps["one_pass"]
        return {
            "source": self.source.name,
            "fingerprint": fingerprint_of(self.source.fingerprint, *kept),
            "append": self.append,
            "defaults": {name: np.asarray(value).tolist() for name, value in defaults.items()},
            "command": self.command,
            "directory": os.getcwd(),
        }


def _import_here(given: _Import) -> ImportReport:
    """Import a source in this process; see ``import_dataset``."""
    volume, source, skip_existing = given.volume, given.source, given.skip_existing
    with _open_writer(given) as writer:
        if isinstance(writer, StepWriter) and writer.is_read:
            source.finish()
            return _finish(writer)
        previous = writer.previous
        kept, left = (0, 0), 0
        adder = BlockAdder(writer, source)
        if isinstance(writer, StepWriter):
            kept = writer.kept_count, writer.kept_bytes
            left = writer.source_count - _go_on(source, writer)
        is_known = previous.__contains__ if previous is not None and skip_existing else None
        labels = {} if previous is None else previous.labels()
        known = source.leave_out(is_known) if is_known else 0
        meter = Meter(given.progress, *map(_less, (source.sample_count, source.sample_bytes), kept))
        with closing(source.blocks(layout=writer.layout, seed=given.options["seed"])) as blocks:
            for block in without_first(blocks, left, partial(_take_bad, source, writer)):
                check_labels(block, labels, source.name)
                new = without_known(block, is_known) if is_known else block
                known += len(block.paths) - len(new.paths)
                if (added := adder.add(new)) is not None:
                    meter.add(*added)
        bad = adder.finish()
        for path in source.empty_directories:
            writer.add_directory(path)
        known += source.left_out
        if known and not meter.samples:
            writer.abort()
            volume.refresh()
            info = volume.versions(given.name)[-1]
        elif writer.sample_count or given.allow_empty:
            info = _seal(writer, source, meter)
        else:
            raise _no_samples(source)
    source.finish()
    skipped = {**source.skipped, **({ALREADY_THERE: known} if known else {})}
    counts = meter.samples, meter.bytes, meter.seconds
    empty, warnings = len(source.empty_directories), getattr(writer, "warnings", ())
    return ImportReport(info, *counts, skipped, empty, kept[0], bad, warnings)


def _import_by_workers(given: _Import, workers: WorkersOptions) -> ImportReport:
    """Import the parts of a source by workers; see ``import_dataset``."""
    volume, source, name, options = given.volume, given.source, given.name, given.options
    append, steps = given.append, dict(given.steps)
    volume.refresh()
    for unfinished in volume.unfinished():
        if unfinished.name == name:
            steps["step_bytes"] = unfinished.origin.get("step_bytes", steps["step_bytes"])
    layout = cast(Layout, options["layout"] or volume.versions(name)[-1].layout)
    division = divide(
        source,
        layout=layout,
        seed=options["seed"],
        part_bytes=steps["step_bytes"],
        action=f"import {name} with workers",
    )
    division_digest = fingerprint_of(steps["step_bytes"], list(division.part_bytes))
    with (
        coordinating(volume, name) as devices,
        volume.parts_writer(
            name,
            {**given.origin, DIVISION: division_digest},
            append=append,
            part_count=len(division),
            workers=workers.count,
            source_shuffled=source.gives_shuffled,
            uuid=given.uuid,
            expected_bytes=0 if append else source.sample_bytes or 0,
            expected_samples=0 if append else source.sample_count or 0,
            **steps,
            **options,
        ) as writer,
    ):
        kept, is_read = writer.imported, writer.is_read
        _check_division(writer, steps["step_bytes"], division_digest)
        meter = Meter(given.progress, *map(_less, (source.sample_count, source.sample_bytes), kept))
        parts = PartsImport(
            volume,
            devices,
            source,
            division,
            writer,
            workers,
            labels=writer.labels,
            show=meter.show,
        )
        parts.run()
        if not writer.imported[0] and not append and not given.allow_empty:
            raise _no_samples(source)
        skipped = Counter(source.skipped)
        add_skipped(skipped, skipped_in_parts(writer, len(division)))
        has_empty = bool(skipped.pop(EMPTY, 0))
        if not is_read:
            writer.origin[SKIPPED] = dict(skipped)
            writer.origin[EMPTY] = len(source.empty_directories)
        found = source.bad.report()
        info = writer.seal(meter.seal, directories=source.empty_directories, bad=found)
        bad = writer.bad.merged(found)
    source.finish()
    counts = *parts.done, meter.seconds
    empty = len(source.empty_directories)
    if has_empty and not append:  # another part may have samples in what is empty in one
        with volume.dataset(name, info.version) as made:
            empty = len(made.empty_directories())
    return ImportReport(info, *counts, skipped, empty, kept[0], bad, writer.warnings)


def _check_division(writer: PartsWriter, step_bytes: int, digest: str) -> None:
    """Check that the parts of an unfinished import are those of the division.

    Raises:
        UsageError: they are others: the numbers of its parts mean other samples.
    """
    found = writer.origin["step_bytes"], writer.origin.get(DIVISION, digest)
    if found != (step_bytes, digest):
        raise UsageError(
            "import with workers: expected the parts of the source as the unfinished import has "
            f"them, with steps of {format_bytes(writer.origin['step_bytes'])}, got others: another "
            "process has begun it meanwhile, or another release; import again, or free it with "
            "'dlfs import --abandon'"
        )


def _seal(writer: DatasetWriter | StepWriter, source: Source, meter: Meter) -> DatasetInfo:
    """Seal a dataset; a second pass keeps what the report says of the source."""
    if isinstance(writer, StepWriter):
        writer.origin[SKIPPED] = dict(source.skipped)
        writer.origin[EMPTY] = len(source.empty_directories)
    return writer.seal(meter.seal)


def finish_import(
    volume: Volume, name: str, progress: ProgressCallback | None = None
) -> ImportReport:
    """Finish an import whose source has been read: ``packed_again`` of its info is a number.

    Args:
        volume: volume that has the import.
        name: name of the dataset.
        progress: called after each block.

    Raises:
        NotFoundError: there is no such import.
        DlfsError: as ``import_dataset``.
    """
    for info in volume.unfinished():
        if info.name == name and info.packed_again is not None:
            meter = second_pass_meter(progress)
            origin: dict[str, Any] = {"append": False, "defaults": None, **info.origin}
            options = {key: origin[key] for key in ("append", "defaults")}
            with volume.step_writer(name, origin, on_second_pass=meter, **options) as writer:
                return _finish(writer)
    raise NotFoundError(
        f"finish the import of {name} on {volume.uri}: expected an unfinished import whose source "
        "has been read, got none of this name"
    )


def _finish(writer: StepWriter) -> ImportReport:
    """Seal an import whose source has been read."""
    begin, kept, origin = time.monotonic(), writer.kept_count, writer.origin
    info, skipped = writer.seal(), origin.get(SKIPPED, {})
    seconds, empty = time.monotonic() - begin, origin.get(EMPTY, 0)
    bad, warnings = writer.bad, writer.warnings
    return ImportReport(info, 0, 0, seconds, skipped, empty, kept, bad, warnings)


def _open_writer(given: _Import) -> DatasetWriter | StepWriter:
    """Return a writer for the samples of a source: in steps, if that can go on after a kill."""
    volume, source, append = given.volume, given.source, given.append
    options = {**given.options, "source_shuffled": source.gives_shuffled, "uuid": given.uuid}
    if not append:
        options["expected_bytes"] = source.sample_bytes or 0
        options["expected_samples"] = source.sample_count or 0
    if given.steps["step_bytes"] is None or source.fingerprint is None:
        name = given.name
        return volume.append(name, **options) if append else volume.writer(name, **options)
    return volume.step_writer(given.name, given.origin, append=append, **given.steps, **options)


def _go_on(source: Source, writer: StepWriter) -> int:
    """Have a source go on where the last step ended; return the samples that it will not yield.

    The parts of the source are steps of the import.

    If bad records are allowed, samples cannot be counted without reading them: so a source goes on
    at its last cursor, or reads all again and finds the same bad records again.

    Raises:
        TooManyBadError: the unfinished import has left out more than is allowed now.
    """
    source.part_bytes = writer.origin["step_bytes"]
    if not source.bad.are_allowed:
        source.bad.check_none(writer.bad_so_far)
        return source.seek(writer.source_count, writer.cursor)
    cursor, good = writer.cursor, writer.kept_count
    if writer.bad_so_far.count and cursor is not None and cursor.count < writer.source_count:
        cursor = None  # of an import that did not allow them
    sought = 0 if cursor is None else source.seek(cursor.count, cursor)
    source.bad.restore(writer.bad_so_far if sought else BadReport(), good)
    return sought


def _take_bad(source: Source, writer: DatasetWriter | StepWriter) -> None:
    """Take the bad records up to the last step, behind which the source is now."""
    if isinstance(writer, StepWriter) and source.bad.are_allowed:
        source.bad.replace(writer.bad_so_far)


def _less(total: int | None, kept: int) -> int | None:
    return None if total is None else max(0, total - kept)


def _no_samples(source: Source) -> NotFoundError:
    found = [f"{count:,} x {reason}" for reason, count in source.skipped.items()]
    if source.bad.count:
        found.append(f"{source.bad.count:,} x bad record")
    if source.empty_directories:
        found.append(f"{len(source.empty_directories):,} x directory without samples")
    return NotFoundError(
        f"import {source.name}: expected at least one sample, got none: it holds "
        f"{', '.join(found) or 'nothing'}; allow_empty=True makes an empty dataset"
    )
