"""Runs a source into a dataset writer.

The source's next block is read while the writer packs and writes the present one. Whatever goes
wrong, Ctrl-C included, the writer aborts and the volume stays as it was.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from dlfs.errors import NotFoundError, UsageError
from dlfs.ingest.archive import compression_of
from dlfs.ingest.folder import FolderSource
from dlfs.ingest.patterns import expand
from dlfs.ingest.progress import Meter, ProgressCallback
from dlfs.ingest.source import Layout, LinkPolicy, Source
from dlfs.ingest.tar import TarSource
from dlfs.store.info import DatasetInfo
from dlfs.volume import Volume


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
        progress: called after each block, and once at the start.

    Raises:
        SpaceError: the volume has too little free space.
        LockedError: another writer holds it.
        DlfsError: the source or the volume failed. The volume is as it was.
    """
    meter = Meter(progress, source.sample_count, source.sample_bytes)
    writer = volume.writer(
        name,
        layout=layout,
        seed=seed,
        expected_bytes=source.sample_bytes or 0,
        expected_samples=source.sample_count or 0,
        source_shuffled=source.gives_shuffled,
    )
    with writer, closing(source.blocks(layout=layout, seed=seed)) as blocks:
        for block in blocks:
            writer.add_batch(block.paths, block.data, block.offsets, block.lengths)
            meter.add(len(block.paths), int(block.lengths.sum()))
        info = writer.seal()
    return ImportReport(
        info, meter.samples, meter.bytes, meter.seconds, source.skipped, source.empty_directories
    )
