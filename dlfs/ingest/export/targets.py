"""Exports a dataset to the target that the caller names.

``export_kind`` tells from a target's name what to write; ``export_dataset`` runs the writer.
``export_stream`` writes to an open stream, such as a pipe.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import IO, Literal

from dlfs.dataset.dataset import Dataset
from dlfs.errors import DlfsError, UsageError
from dlfs.ingest.archives.archive import compression_of
from dlfs.ingest.export.archives import write_archive, write_tar, write_zip
from dlfs.ingest.export.folder import write_folder
from dlfs.ingest.export.samples import ExportedSamples, ExportReport, OnBad, export_failure
from dlfs.ingest.export.tables import ARROW_SUFFIXES, PARQUET_SUFFIXES, write_arrow, write_parquet
from dlfs.ingest.progress import ProgressCallback

Kind = Literal["folder", "tar", "zip", "arrow", "parquet"]

_WRITERS: dict[Kind, Callable[..., None]] = {
    "folder": write_folder,
    "tar": write_tar,
    "zip": write_zip,
    "arrow": write_arrow,
    "parquet": write_parquet,
}
_KINDS: tuple[tuple[tuple[str, ...], Kind], ...] = (
    ((".zip",), "zip"),
    (ARROW_SUFFIXES, "arrow"),
    (PARQUET_SUFFIXES, "parquet"),
)
_SUFFIXES_SHOWN = ".tar, .tar.gz, .tar.bz2, .tar.xz, .tar.zst, .zip, .arrow, .parquet"
_SUFFIX = re.compile(r"[^/](\.[A-Za-z][A-Za-z0-9]{0,9})\Z")
"""Suffix that may name a format: that of ``x.rar``, none in ``run-1.0`` or ``.hidden``."""


def export_dataset(
    dataset: Dataset,
    target: str | os.PathLike[str],
    *,
    kind: Kind | None = None,
    force: bool = False,
    on_bad: OnBad | None = None,
    progress: ProgressCallback | None = None,
) -> ExportReport:
    """Write every sample of a dataset to a folder, an archive or a table.

    Args:
        dataset: the dataset to read.
        target: path to write to. It names a folder, which is made when it is missing, or a file.
        kind: what to write; by default as ``export_kind`` says.
        force: replace a file of this name, or write into a folder that has entries and replace
            files of the same paths.
        on_bad: called with the error of each sample that cannot be read, which is then left out;
            by default the first such error is raised.
        progress: called after each batch, and once at the start.

    Raises:
        UsageError: the target's name has the suffix of a format that cannot be written; ZIP or a
            table cannot hold a path or an attribute; pyarrow is not installed.
        ExistsError: the file exists, or the folder has entries, and ``force`` is not set.
        LimitError: a sample is larger than Parquet's values may be.
        SpaceError: the file system is full. No incomplete file is left.
        DeviceError: the target cannot be written, or the dataset cannot be read.
        FormatError: a sample is damaged.
    """
    write = _WRITERS[kind or export_kind(target)]
    samples = ExportedSamples(dataset, progress, on_bad)
    write(samples, os.fspath(target), force=force)
    return samples.report()


def export_stream(
    dataset: Dataset,
    stream: IO[bytes],
    *,
    on_bad: OnBad | None = None,
    progress: ProgressCallback | None = None,
) -> ExportReport:
    """Write every sample to a stream, such as a pipe, as an uncompressed tar archive.

    Args:
        dataset: the dataset to read.
        stream: the stream to write to; it is flushed, and stays open.
        on_bad: as for ``export_dataset``.
        progress: called after each batch, and once at the start.

    Raises:
        BrokenPipeError: the reader of the pipe has closed it.
        SpaceError: the file system under the stream is full.
        DeviceError: the stream cannot be written, or the dataset cannot be read.
        FormatError: a sample is damaged.
    """
    samples = ExportedSamples(dataset, progress, on_bad)
    try:
        write_archive(samples, stream, "none")
        stream.flush()
    except OSError as error:
        if isinstance(error, (DlfsError, BrokenPipeError)):
            raise
        raise export_failure("a stream", error) from error
    return samples.report()


def export_kind(target: str | os.PathLike[str]) -> Kind:
    """Tell from a target's name what to write.

    A name that ends in a slash, has no suffix or is a directory's is a folder.

    Raises:
        UsageError: the suffix is that of a format that cannot be written.
    """
    path = os.fspath(target)
    name = path.lower()
    if name.endswith("/") or Path(path).is_dir():
        return "folder"
    if compression_of(name) is not None:
        return "tar"
    for suffixes, kind in _KINDS:
        if name.endswith(suffixes):
            return kind
    suffix = _SUFFIX.search(path)
    if suffix is None:
        return "folder"
    raise UsageError(
        f"export to {path}: expected a folder or a name that ends in one of {_SUFFIXES_SHOWN}, got "
        f"{suffix[1]}; to write a folder of this name, end it with a slash: {path}/"
    )
