"""Runs a source into a dataset writer.

The source's next block is read while the writer packs and writes the present one. Whatever goes
wrong, Ctrl-C included, the writer aborts and the volume stays as it was.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from dlfs.errors import NotFoundError, UsageError
from dlfs.ingest.archive import compression_of
from dlfs.ingest.folder import FolderSource
from dlfs.ingest.patterns import expand
from dlfs.ingest.source import Layout, LinkPolicy, Source
from dlfs.ingest.tar import TarSource
from dlfs.volume import DatasetInfo, Volume


@dataclass(frozen=True, slots=True)
class Progress:
    """How far an import or an export has come. Totals are None when they cannot be known yet."""

    samples_done: int
    samples_total: int | None
    bytes_done: int
    bytes_total: int | None
    seconds: float

    @property
    def bytes_per_second(self) -> float:
        """The mean rate so far."""
        return self.bytes_done / self.seconds if self.seconds > 0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        """At the mean rate; None when the end is not known."""
        if self.bytes_total is None or self.bytes_done == 0:
            return None
        return max(0, self.bytes_total - self.bytes_done) / self.bytes_per_second


ProgressCallback = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class ImportReport:
    """What an import did."""

    dataset: DatasetInfo
    sample_count: int
    sample_bytes: int
    seconds: float
    skipped: Mapping[str, int]
    empty_directories: int


def open_source(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    links: LinkPolicy = "follow",
    prefix_shards: bool = False,
) -> Source:
    """Open what a path names: a folder, an archive, or archives by a pattern.

    Args:
        paths: a folder, or archives; ``train-{000000..000099}.tar`` and globs name several. A path
            that exists is taken as it is.
        links: what to do with symbolic links: ``follow``, ``skip`` or ``error``.
        prefix_shards: put each archive's name before its members' paths.

    Raises:
        NotFoundError: there is nothing of that name.
        UsageError: it is neither a folder nor an archive, or both are mixed.
        DlfsError: the source cannot be read; see FolderSource and TarSource.
    """
    given = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    found = [match for path in given for match in expand(os.fspath(path))]
    if len(found) == 1 and Path(found[0]).is_dir():
        return FolderSource(found[0], links=links)
    for path in found:
        if not Path(path).exists():
            raise NotFoundError(f"import {path}: there is no such file or folder")
        if Path(path).is_dir():
            raise UsageError(f"import {path}: expected one folder, or archives only")
        if compression_of(path) is None:
            raise UsageError(
                f"import {path}: expected a folder or an archive "
                "(.tar, .tar.gz, .tar.zst, .tar.bz2, .tar.xz)"
            )
    return TarSource(found, links=links, prefix_shards=prefix_shards)


def import_dataset(
    volume: Volume,
    source: Source,
    name: str,
    *,
    layout: Layout = "shuffled",
    seed: int = 0,
    progress: ProgressCallback | None = None,
) -> ImportReport:
    """Import every sample of a source as a new dataset, or a new version of one.

    Args:
        volume: to write to; its lock is taken.
        source: to read; the caller closes it.
        name: of the dataset.
        layout: ``shuffled`` packs samples in an order drawn from the seed, ``path`` in path order.
        seed: of the order of packing, 0..2^64-1.
        progress: called after each block, and once at the end.

    Raises:
        SpaceError: the volume has too little free space.
        LockedError: another writer holds it.
        DlfsError: the source or the volume failed. The volume is as it was.
    """
    begin, samples, size = time.monotonic(), 0, 0

    def report() -> None:
        if progress is not None:
            seconds = time.monotonic() - begin
            progress(Progress(samples, source.sample_count, size, source.sample_bytes, seconds))

    writer = volume.writer(name, layout=layout, seed=seed, expected_bytes=source.sample_bytes)
    with writer, closing(source.blocks(layout=layout, seed=seed)) as blocks:
        report()
        for block in blocks:
            writer.add_batch(block.paths, block.data, block.offsets, block.lengths)
            samples += len(block.paths)
            size += int(block.lengths.sum())
            report()
        info = writer.seal()
    seconds = time.monotonic() - begin
    skipped = dict(source.skipped)
    return ImportReport(info, samples, size, seconds, skipped, source.empty_directories)
