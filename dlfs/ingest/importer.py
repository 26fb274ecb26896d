"""Imports the samples of a source as a dataset.

A thread reads the source's next block while the dataset writer packs and writes the present one.
After any failure, Ctrl-C included, the writer aborts and the volume stays as it was.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

from dlfs.arguments import Layout
from dlfs.errors import NotFoundError, UsageError
from dlfs.ingest.patterns import expand
from dlfs.ingest.progress import Meter, ProgressCallback
from dlfs.ingest.registry import AUTO, find_format, make_options, recognise
from dlfs.ingest.source import Source
from dlfs.store.info import DatasetInfo
from dlfs.volume import Volume


@dataclass(frozen=True, slots=True)
class ImportReport:
    """Result of an import."""

    dataset: DatasetInfo
    sample_count: int
    sample_bytes: int
    seconds: float
    skipped: Mapping[str, int]
    empty_directories: int


def open_source(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    format_name: str = AUTO,
    options: Mapping[str, object] | None = None,
) -> Source:
    """Open the source that paths name: a folder, archives, or files of a format.

    Args:
        paths: one path, or several of one format. ``train-{000000..000099}.tar`` and globs stand
            for several; a path that exists is taken literally.
        format_name: name of the format in ``registry.FORMATS``; ``auto`` recognises it.
        options: options of the format, by name.

    Raises:
        NotFoundError: a path does not exist.
        UsageError: the format is unknown, does not take these paths or options, or needs a package
            that is not installed.
        DlfsError: the source cannot be read; see the format's source.
    """
    given = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    found = [match for path in given for match in expand(os.fspath(path))]
    if not found:
        raise UsageError("import: expected a source, got none")
    row = recognise(found) if format_name == AUTO else find_format(format_name)
    for path in found:
        if not Path(path).exists():
            raise NotFoundError(f"import {path}: there is no such file or folder")
    return make_options(row, options or {}).open(found)


def import_dataset(
    volume: Volume,
    source: Source,
    name: str,
    *,
    layout: Layout = "shuffled",
    seed: int = 0,
    uuid: UUID | None = None,
    allow_empty: bool = False,
    progress: ProgressCallback | None = None,
) -> ImportReport:
    """Import every sample of a source as a new dataset, or as a new version of one.

    Args:
        volume: volume to write to; the import takes its write lock.
        source: source to read; the caller closes it.
        name: name of the dataset.
        layout: ``shuffled`` packs samples in an order drawn from the seed, ``path`` in path order.
        seed: seed of the order of packing, 0..2^64-1.
        uuid: UUID of the new version; random by default.
        allow_empty: make a dataset without samples if the source has none.
        progress: called after each block, and once at the start.

    Raises:
        NotFoundError: the source has no sample, and ``allow_empty`` is not set.
        SpaceError: the volume has too little free space.
        LockedError: another writer holds the volume's lock.
        DlfsError: the source or the volume failed. The volume is as it was.
    """
    if source.sample_count == 0 and not allow_empty:
        raise _no_samples(source)
    meter = Meter(progress, source.sample_count, source.sample_bytes)
    writer = volume.writer(
        name,
        layout=layout,
        seed=seed,
        expected_bytes=source.sample_bytes or 0,
        expected_samples=source.sample_count or 0,
        source_shuffled=source.gives_shuffled,
        uuid=uuid,
    )
    with writer, closing(source.blocks(layout=layout, seed=seed)) as blocks:
        for block in blocks:
            writer.add_batch(
                block.paths, block.data, block.offsets, block.lengths, attributes=block.attributes
            )
            meter.add(len(block.paths), int(block.lengths.sum()))
        if not meter.samples and not allow_empty:
            raise _no_samples(source)
        info = writer.seal()
    return ImportReport(
        info, meter.samples, meter.bytes, meter.seconds, source.skipped, source.empty_directories
    )


def _no_samples(source: Source) -> NotFoundError:
    found = [f"{count:,} x {reason}" for reason, count in source.skipped.items()]
    if source.empty_directories:
        found.append(f"{source.empty_directories:,} x directory without samples")
    return NotFoundError(
        f"import {source.name}: expected at least one sample, got none: it holds "
        f"{', '.join(found) or 'nothing'}; allow_empty=True makes an empty dataset"
    )
