"""A dataset back into a folder, a tar archive or (``export_arrow``) an Arrow file, byte for byte.

Samples are read in storage order, in batches, the next ones ahead in native threads, and written as
they come: the order in which files and members are made is that of the volume, not that of the
paths.

A folder is written through descriptors, one component at a time and never through a symbolic link,
so that nothing lands outside it, whatever stands in it already. An archive is written under a name
of its own beside the target and takes the target's name when it is complete.
"""

from __future__ import annotations

import bz2
import contextlib
import errno
import gzip
import io
import lzma
import os
import tarfile
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO, Literal, cast

import zstandard

from dlfs.dataset import Dataset
from dlfs.errors import DeviceError, DlfsError, ExistsError, FormatError, UsageError
from dlfs.format.paths import path_problem
from dlfs.ingest.archive import Compression, compression_of
from dlfs.ingest.progress import Meter, ProgressCallback
from dlfs.ingest.source import show
from dlfs.units import GIB, MIB

Kind = Literal["folder", "tar", "arrow"]

ARROW_SUFFIXES = (".arrow", ".ipc", ".feather")

BATCH_BYTES = 64 * MIB
"""What a batch of samples of mean length adds up to."""
BATCH_BYTES_MAX = 1 * GIB
"""What no batch exceeds, unless one sample does."""
BATCH_SAMPLES_MAX = 4096
DIRECTORIES_OPEN_MAX = 256

_ZSTD_LEVEL = 3
_GZIP_LEVEL = 6
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What an export wrote."""

    sample_count: int
    sample_bytes: int
    seconds: float


def export_dataset(
    dataset: Dataset,
    target: str | os.PathLike[str],
    *,
    kind: Kind | None = None,
    force: bool = False,
    progress: ProgressCallback | None = None,
) -> ExportReport:
    """Export to what is asked for, or to what the target's name says; else to a folder.

    Args:
        dataset: to read.
        target: where to.
        kind: ``folder``, ``tar`` or ``arrow``; by default as ``export_kind`` has it.
        force: as for the exports themselves.
        progress: likewise.

    Raises:
        DlfsError: as for ``export_folder``, ``export_tar`` and ``export_arrow``.
    """
    kind = kind or export_kind(target)
    if kind == "arrow":
        from dlfs.ingest.export_arrow import export_arrow

        return export_arrow(dataset, target, force=force, progress=progress)
    export = export_folder if kind == "folder" else export_tar
    return export(dataset, target, force=force, progress=progress)


def export_kind(target: str | os.PathLike[str]) -> Kind:
    """What a target's name says that it is to be."""
    name = os.fspath(target).lower()
    if compression_of(name) is not None:
        return "tar"
    return "arrow" if name.endswith(ARROW_SUFFIXES) else "folder"


def export_folder(
    dataset: Dataset,
    target: str | os.PathLike[str],
    *,
    force: bool = False,
    progress: ProgressCallback | None = None,
) -> ExportReport:
    """Write every sample as a file under a folder, which is made when it is not there.

    Args:
        dataset: to read.
        target: the folder.
        force: write into a folder that has something in it, replacing files of the same paths.
        progress: called after each batch, and once at the start.

    Raises:
        ExistsError: the folder is not empty and ``force`` is not set, or a directory is in a file's
            way.
        DeviceError: something cannot be written, or the dataset cannot be read.
        FormatError: a sample is damaged.
    """
    path = os.fspath(target)
    meter = Meter(progress, len(dataset), dataset.sample_bytes)
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        root = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise _failure(path, error) from error
    with contextlib.closing(_Folder(path, root, force=force)) as folder:
        if not force and folder.has_entries():
            raise ExistsError(
                f"export to {path}: expected an empty folder, got one with entries; --force, or "
                "force=True, writes into it"
            )
        for sample, data in _samples(dataset, meter):
            folder.write(sample, data)
    return ExportReport(meter.samples, meter.bytes, meter.seconds)


def export_tar(
    dataset: Dataset,
    target: str | os.PathLike[str],
    *,
    force: bool = False,
    progress: ProgressCallback | None = None,
) -> ExportReport:
    """Write every sample into a tar archive (GNU format, which holds names of any bytes).

    Args:
        dataset: to read.
        target: its name says how it is compressed: .tar, .tar.gz, .tar.zst, .tar.bz2, .tar.xz.
        force: replace a file that is there.
        progress: called after each batch, and once at the start.

    Raises:
        UsageError: the name is not an archive's.
        ExistsError: there is something of that name.
        DeviceError: the archive cannot be written, or the dataset cannot be read.
        FormatError: a sample is damaged.
    """
    path = os.fspath(target)
    compression = compression_of(path)
    if compression is None:
        raise UsageError(f"export to {path}: expected the name of an archive, such as x.tar.zst")
    meter = Meter(progress, len(dataset), dataset.sample_bytes)
    with whole_file(path, force=force) as file:
        _write_archive(dataset, file, compression, meter)
    return ExportReport(meter.samples, meter.bytes, meter.seconds)


@contextlib.contextmanager
def whole_file(path: str, *, force: bool) -> Iterator[BinaryIO]:
    """A file that takes its name when it has been written whole, and else leaves nothing.

    Args:
        path: its name.
        force: replace a file that is there.

    Raises:
        ExistsError: there is something of that name.
        DeviceError: it cannot be written.
    """
    if os.path.lexists(path) and not force:
        raise ExistsError(
            f"export to {path}: it is there already; --force, or force=True, replaces it"
        )
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


def _samples(dataset: Dataset, meter: Meter) -> Iterator[tuple[bytes, memoryview]]:
    """Every sample in storage order; its bytes are valid until the next one is asked for."""
    with dataset.batches(batch_size(dataset), shuffle=None) as epoch:
        for batch in epoch:
            with batch:
                for index, data in zip(batch.indices.tolist(), batch, strict=True):
                    yield checked_path(dataset.path(index)), data
                meter.add(len(batch), int(batch.lengths.sum()))


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


def _failure(path: str, error: OSError) -> DeviceError:
    return DeviceError(f"export to {path}: {error.strerror or error}", error.errno or errno.EIO)


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
            descriptor = self._create(name, self._directory(folder))
            try:
                while data:
                    data = data[os.write(descriptor, data) :]
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
    dataset: Dataset, file: IO[bytes], compression: Compression, meter: Meter
) -> None:
    created = int(dataset.info.created.timestamp())
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
        for path, data in _samples(dataset, meter):
            header = tarfile.TarInfo(path.decode("utf-8", "surrogateescape"))
            header.size, header.mtime = len(data), created
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
