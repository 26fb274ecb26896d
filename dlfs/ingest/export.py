"""Exports a dataset byte for byte: to a folder, an archive, a stream or (``export_arrow``) a table.

Samples are read in storage order, in batches, the next ones ahead in native threads, and written as
they come: the order in which files and members are made is that of the volume, not that of the
paths.

A folder is written through descriptors, one component at a time and never through a symbolic link,
so that nothing lands outside it, whatever stands in it already. A file takes its name when it is
complete. What an archive or a table is called says of what kind it is (``export_kind``).

The first sample that cannot be read ends an export, unless the caller takes the errors of bad
samples (``on_bad``): then these are left out, and counted.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import os
import re
import tarfile
import time
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO, Literal, cast

import zstandard

from dlfs.arguments import OnError
from dlfs.dataset import Dataset
from dlfs.errors import (
    DlfsError,
    ExistsError,
    FormatError,
    UsageError,
    write_error,
)
from dlfs.format.paths import path_problem
from dlfs.ingest.archives.archive import Compression, compression_of
from dlfs.ingest.progress import Meter, ProgressCallback
from dlfs.ingest.source import show
from dlfs.reader.batch import Batch
from dlfs.units import GIB, MIB

Kind = Literal["folder", "tar", "zip", "arrow", "parquet"]

OnBad = Callable[[DlfsError], None]
"""Takes the error of a sample that is left out; it names dataset, sample, member and offset."""

ARROW_SUFFIXES = (".arrow", ".ipc", ".feather")
PARQUET_SUFFIXES = (".parquet", ".parq", ".pq")
_KINDS: tuple[tuple[tuple[str, ...], Kind], ...] = (
    ((".zip",), "zip"),
    (ARROW_SUFFIXES, "arrow"),
    (PARQUET_SUFFIXES, "parquet"),
)
_SUFFIXES_SHOWN = ".tar, .tar.gz, .tar.bz2, .tar.xz, .tar.zst, .zip, .arrow, .parquet"
_SUFFIX = re.compile(r"[^/](\.[A-Za-z][A-Za-z0-9]{0,9})\Z")
"""Suffix that may name a format: that of ``x.rar``, none in ``run-1.0`` or ``.hidden``."""

BATCH_BYTES = 64 * MIB
"""What a batch of samples of mean length adds up to."""
BATCH_BYTES_MAX = 1 * GIB
"""What no batch exceeds, unless one sample does."""
BATCH_SAMPLES_MAX = 4096
DIRECTORIES_OPEN_MAX = 256

_ZIP_BEGIN = 315_532_800
"""1980-01-01T00:00:00Z in seconds since 1970: ZIP knows no earlier time."""
_ZSTD_LEVEL = 3
_GZIP_LEVEL = 6
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class ExportReport:
    """Counts of what an export wrote.

    Attributes:
        sample_count: samples written.
        sample_bytes: their bytes.
        seconds: that it took.
        bad_count: samples left out because they could not be read.
    """

    sample_count: int
    sample_bytes: int
    seconds: float
    bad_count: int = 0


def export_dataset(
    dataset: Dataset,
    target: str | os.PathLike[str],
    *,
    kind: Kind | None = None,
    force: bool = False,
    on_bad: OnBad | None = None,
    progress: ProgressCallback | None = None,
) -> ExportReport:
    """Export to what is asked for, or to what the target's name says.

    Args:
        dataset: to read.
        target: where to.
        kind: ``folder``, ``tar``, ``zip``, ``arrow`` or ``parquet``; by default as ``export_kind``
            has it.
        force: as for the exports themselves.
        on_bad: called with the error of each sample that cannot be read, which is then left out;
            by default the first such error is raised.
        progress: called after each batch, and once at the start.

    Raises:
        UsageError: the target's name has the suffix of a format that is not written.
        DlfsError: as for ``export_folder``, ``export_tar``, ``export_zip`` and ``export_arrow``.
    """
    kind = kind or export_kind(target)
    if kind in ("arrow", "parquet"):
        from dlfs.ingest.export_arrow import export_arrow, export_parquet

        table = export_arrow if kind == "arrow" else export_parquet
        return table(dataset, target, force=force, on_bad=on_bad, progress=progress)
    export = {"folder": export_folder, "tar": export_tar, "zip": export_zip}[kind]
    return export(dataset, target, force=force, on_bad=on_bad, progress=progress)


def export_kind(target: str | os.PathLike[str]) -> Kind:
    """Tell from a target's name what it is to be.

    A name that ends in a slash, has no suffix or is a directory's is a folder.

    Raises:
        UsageError: its suffix is no format's that is written here.
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
        f"{suffix[1]}; a folder of this name is written with a slash behind it: {path}/"
    )


class ExportedSamples:
    """The samples of a dataset in storage order; bad ones left out where that is allowed.

    Args:
        dataset: to read.
        progress: called after each batch, and once at the start.
        on_bad: takes the errors of samples that cannot be read; None: they are raised.

    Threads: one, once.
    """

    def __init__(
        self, dataset: Dataset, progress: ProgressCallback | None, on_bad: OnBad | None
    ) -> None:
        self._dataset = dataset
        self._on_bad = on_bad
        self._bad_count = 0
        self._meter = Meter(progress, len(dataset), dataset.sample_bytes)

    def batches(self) -> Iterator[tuple[Batch, list[bytes | None]]]:
        """Give all samples that can be read, in batches that are valid until the next one.

        Yields:
            A batch, and the path of each of its samples; None for one whose path is bad.
        """
        on_error: OnError = "raise" if self._on_bad is None else "skip"
        size = batch_size(self._dataset)
        with self._dataset.batches(size, shuffle=None, on_error=on_error) as epoch:
            for batch in epoch:
                with batch:
                    for failure in batch.failures:
                        self._leave_out(failure.error())
                    paths = [self._path(index) for index in batch.indices.tolist()]
                    yield batch, paths
                    good = [path is not None for path in paths]
                    self._meter.add(sum(good), int(batch.lengths[good].sum()))

    def __iter__(self) -> Iterator[tuple[bytes, memoryview]]:
        """Every sample that can be read; its bytes are valid until the next one is asked for."""
        for batch, paths in self.batches():
            for path, data in zip(paths, batch, strict=True):
                if path is not None:
                    yield path, data

    def report(self) -> ExportReport:
        """Counts of what was given so far, and the time that it took."""
        meter = self._meter
        return ExportReport(meter.samples, meter.bytes, meter.seconds, self._bad_count)

    def _path(self, index: int) -> bytes | None:
        try:
            return checked_path(self._dataset.path(index))
        except FormatError as error:
            name = self._dataset.name
            self._leave_out(
                FormatError(f"export sample {index} of dataset {name!r}: {error}"), error
            )
            return None

    def _leave_out(self, error: DlfsError, cause: DlfsError | None = None) -> None:
        if self._on_bad is None:
            raise error from cause
        self._bad_count += 1
        self._on_bad(error)


def export_folder(
    dataset: Dataset,
    target: str | os.PathLike[str],
    *,
    force: bool = False,
    on_bad: OnBad | None = None,
    progress: ProgressCallback | None = None,
) -> ExportReport:
    """Write every sample as a file under a folder, which is made when it is not there.

    Args:
        dataset: to read.
        target: the folder.
        force: write into a folder that has something in it, replacing files of the same paths.
        on_bad: as for ``export_dataset``.
        progress: called after each batch, and once at the start.

    Raises:
        ExistsError: the folder is not empty and ``force`` is not set, or a directory is in a file's
            way.
        SpaceError: the file system is full. No file is left that is not whole.
        DeviceError: something cannot be written, or the dataset cannot be read.
        FormatError: a sample is damaged.
    """
    path = os.fspath(target)
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        root = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise _failure(path, error) from error
    samples = ExportedSamples(dataset, progress, on_bad)
    with contextlib.closing(_Folder(path, root, force=force)) as folder:
        if not force and folder.has_entries():
            raise ExistsError(
                f"export to {path}: expected an empty folder, got one with entries; "
                "force=True writes into it"
            )
        for sample, data in samples:
            folder.write(sample, data)
    return samples.report()


def export_tar(
    dataset: Dataset,
    target: str | os.PathLike[str],
    *,
    force: bool = False,
    on_bad: OnBad | None = None,
    progress: ProgressCallback | None = None,
) -> ExportReport:
    """Write every sample into a tar archive (GNU format, which holds names of any bytes).

    Args:
        dataset: to read.
        target: its name says how it is compressed: .tar, .tar.gz, .tar.zst, .tar.bz2, .tar.xz.
        force: replace a file that is there.
        on_bad: as for ``export_dataset``.
        progress: called after each batch, and once at the start.

    Raises:
        UsageError: the name is not an archive's.
        ExistsError: there is something of that name.
        SpaceError: the file system is full.
        DeviceError: the archive cannot be written, or the dataset cannot be read.
        FormatError: a sample is damaged.
    """
    path = os.fspath(target)
    compression = compression_of(path)
    if compression is None:
        raise UsageError(f"export to {path}: expected the name of an archive, such as x.tar.zst")
    samples = ExportedSamples(dataset, progress, on_bad)
    with whole_file(path, force=force) as file:
        _write_archive(samples, file, compression, dataset.info.created.timestamp())
    return samples.report()


def export_stream(
    dataset: Dataset,
    stream: IO[bytes],
    *,
    on_bad: OnBad | None = None,
    progress: ProgressCallback | None = None,
) -> ExportReport:
    """Write every sample to a stream, such as a pipe, as a tar archive that is not compressed.

    Args:
        dataset: to read.
        stream: to write to; it is flushed, and stays open.
        on_bad: as for ``export_dataset``.
        progress: called after each batch, and once at the start.

    Raises:
        BrokenPipeError: the reader of the pipe is gone.
        SpaceError: there is no room for what is written.
        DeviceError: the stream cannot be written, or the dataset cannot be read.
        FormatError: a sample is damaged.
    """
    samples = ExportedSamples(dataset, progress, on_bad)
    try:
        _write_archive(samples, stream, "none", dataset.info.created.timestamp())
        stream.flush()
    except OSError as error:
        if isinstance(error, (DlfsError, BrokenPipeError)):
            raise
        raise _failure("a stream", error) from error
    return samples.report()


def export_zip(
    dataset: Dataset,
    target: str | os.PathLike[str],
    *,
    force: bool = False,
    on_bad: OnBad | None = None,
    progress: ProgressCallback | None = None,
) -> ExportReport:
    """Write every sample into a ZIP archive, stored without compression.

    The archive's table of contents is in memory until its end: about 500 bytes a sample.

    Args:
        dataset: to read.
        target: the archive.
        force: replace a file that is there.
        on_bad: as for ``export_dataset``.
        progress: called after each batch, and once at the start.

    Raises:
        UsageError: a path is not UTF-8, which ZIP cannot hold.
        ExistsError: there is something of that name.
        SpaceError: the file system is full.
        DeviceError: the archive cannot be written, or the dataset cannot be read.
        FormatError: a sample is damaged.
    """
    path = os.fspath(target)
    created = time.gmtime(max(dataset.info.created.timestamp(), _ZIP_BEGIN))[:6]
    samples = ExportedSamples(dataset, progress, on_bad)
    with (
        whole_file(path, force=force) as file,
        zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive,
    ):
        for sample, data in samples:
            entry = zipfile.ZipInfo(_zip_name(sample, path), created)
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, data)
    return samples.report()


def _zip_name(sample: bytes, target: str) -> str:
    try:
        return sample.decode()
    except UnicodeDecodeError as error:
        raise UsageError(
            f"export to {target}: expected paths of UTF-8, which ZIP holds, got {show(sample)}; a "
            "tar archive holds names of any bytes"
        ) from error


@contextlib.contextmanager
def whole_file(path: str, *, force: bool) -> Iterator[BinaryIO]:
    """A file that takes its name when it has been written whole, and else leaves nothing.

    Args:
        path: its name.
        force: replace a file that is there.

    Raises:
        ExistsError: there is something of that name.
        SpaceError: the file system is full.
        DeviceError: it cannot be written.
    """
    if os.path.lexists(path) and not force:
        raise ExistsError(f"export to {path}: it is there already; force=True replaces it")
    partial = Path(path + ".partial")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        if isinstance(error, DlfsError):
            raise
        raise _failure(path, error) from error
    finally:
        partial.unlink(missing_ok=True)


def batch_size(dataset: Dataset) -> int:
    """Samples to read at once, so that batches stay in bounds."""
    if len(dataset) == 0:
        return 1
    mean = max(1, dataset.sample_bytes // len(dataset))
    longest = max(1, int(dataset.lengths().max()))
    return max(1, min(BATCH_SAMPLES_MAX, BATCH_BYTES // mean, BATCH_BYTES_MAX // longest))


def checked_path(path: bytes) -> bytes:
    """A path from media, which is not trusted to stay inside.

    Raises:
        FormatError: it is no path of a sample.
    """
    problem = path_problem(path)
    if problem is not None:
        raise FormatError(f"export the sample {show(path)}: {problem}")
    return path


def _failure(path: str, error: OSError) -> DlfsError:
    return write_error(f"export to {path}: {error.strerror or error}", error.errno or 0)


class _Folder:
    """A folder that files are written into, relative to its descriptor.

    The descriptors of the directories used last are kept open: in storage order, one file after
    another may lie anywhere in the tree.
    """

    def __init__(self, path: str, root: int, *, force: bool) -> None:
        self._path = path
        self._root = root
        self._force = force
        self._open: OrderedDict[bytes, int] = OrderedDict()

    def close(self) -> None:
        for descriptor in [*self._open.values(), self._root]:
            os.close(descriptor)

    def has_entries(self) -> bool:
        with os.scandir(self._root) as entries:
            return next(entries, None) is not None

    def write(self, path: bytes, data: memoryview) -> None:
        folder, _, name = path.rpartition(b"/")
        try:
            directory = self._directory(folder)
            descriptor = self._create(name, directory)
            try:
                while data:
                    data = data[os.write(descriptor, data) :]
            except BaseException:
                os.unlink(name, dir_fd=directory)  # no file is left that is not whole
                raise
            finally:
                os.close(descriptor)
        except (FileExistsError, IsADirectoryError, NotADirectoryError) as error:
            raise ExistsError(
                f"export to {self._path}: {show(path)}: something else is in its way"
            ) from error
        except OSError as error:
            raise _failure(f"{self._path}: {show(path)}", error) from error

    def _create(self, name: bytes, directory: int) -> int:
        try:
            return os.open(name, _NEW_FILE, 0o666, dir_fd=directory)
        except FileExistsError:
            if not self._force:
                raise
        os.unlink(name, dir_fd=directory)  # not through it: it may be a link
        return os.open(name, _NEW_FILE, 0o666, dir_fd=directory)

    def _directory(self, path: bytes) -> int:
        """The descriptor of a directory under the root, made with those above it when missing."""
        known = path
        while known and known not in self._open:
            known = known.rpartition(b"/")[0]
        descriptor = self._root
        if known:
            descriptor = self._open[known]
            self._open.move_to_end(known)
        rest = path[len(known) :].split(b"/") if path != known else []
        for name in filter(None, rest):
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, dir_fd=descriptor)
            descriptor = os.open(name, _DIRECTORY, dir_fd=descriptor)
            known = known + b"/" + name if known else name
            self._open[known] = descriptor
            if len(self._open) > DIRECTORIES_OPEN_MAX:
                os.close(self._open.popitem(last=False)[1])
        return descriptor


def _write_archive(
    samples: ExportedSamples, file: IO[bytes], compression: Compression, created: float
) -> None:
    with ExitStack() as stack:
        stream = _compress(file, compression)
        if stream is not file:
            stack.callback(stream.close)
        archive = stack.enter_context(
            tarfile.open(
                fileobj=stream,
                mode="w|",
                bufsize=MIB,
                format=tarfile.GNU_FORMAT,
                encoding="utf-8",
                errors="surrogateescape",
            )
        )
        for path, data in samples:
            header = tarfile.TarInfo(path.decode("utf-8", "surrogateescape"))
            header.size, header.mtime = len(data), int(created)
            archive.addfile(header, io.BytesIO(data))
            archive.members.clear()  # type: ignore[attr-defined]  # else it keeps every header


def _compress(file: IO[bytes], compression: Compression) -> IO[bytes]:
    if compression == "gzip":
        # No name and no time: the same dataset gives the same archive.
        return cast(IO[bytes], gzip.GzipFile("", "wb", _GZIP_LEVEL, fileobj=file, mtime=0))
    if compression == "bzip2":
        return cast(IO[bytes], bz2.BZ2File(file, "wb"))
    if compression == "xz":
        return cast(IO[bytes], lzma.LZMAFile(file, "wb"))
    if compression == "zstd":
        compressor = zstandard.ZstdCompressor(level=_ZSTD_LEVEL, write_checksum=True, threads=-1)
        return cast(IO[bytes], compressor.stream_writer(file, closefd=False))
    return file
