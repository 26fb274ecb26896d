"""Writes samples into a tar or ZIP archive.

Tar archives are of the GNU format, which holds names of any bytes; the target's name says how they
are compressed. ZIP archives are stored without compression. The table of contents of a ZIP archive
is in memory until its end: about 500 bytes a sample.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import stat
import tarfile
import time
import zipfile
from contextlib import ExitStack
from typing import IO, cast

import zstandard

from dlfs.base.units import MIB
from dlfs.errors import UsageError
from dlfs.ingest.archives.archive import Compression, compression_of
from dlfs.ingest.export.samples import ExportedSamples, whole_file
from dlfs.ingest.source import show

_ZIP_BEGIN = 315_532_800
"""Earliest time that ZIP can hold, 1980-01-01T00:00:00Z, in seconds since 1970."""
_ZSTD_LEVEL = 3
_GZIP_LEVEL = 6


def write_tar(samples: ExportedSamples, path: str, *, force: bool) -> None:
    """Write every sample into a tar archive; see ``export_dataset``.

    Raises:
        UsageError: the name is not an archive's.
    """
    compression = compression_of(path)
    if compression is None:
        raise UsageError(f"export to {path}: expected the name of an archive, such as x.tar.zst")
    with whole_file(path, force=force) as file:
        write_archive(samples, file, compression)


def write_zip(samples: ExportedSamples, path: str, *, force: bool) -> None:
    """Write every sample into a ZIP archive; see ``export_dataset``.

    Raises:
        UsageError: a path is not UTF-8, which ZIP cannot hold.
    """
    created = time.gmtime(max(samples.dataset.info.created.timestamp(), _ZIP_BEGIN))[:6]
    with (
        whole_file(path, force=force) as file,
        zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive,
    ):
        for sample, data in samples:
            entry = zipfile.ZipInfo(_zip_name(sample, path), created)
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, data)
        for directory in samples.empty_directories():
            entry = zipfile.ZipInfo(_zip_name(directory, path) + "/", created)
            entry.external_attr = (stat.S_IFDIR | 0o755) << 16 | 0x10  # also as MS-DOS says it
            archive.writestr(entry, b"")


def _zip_name(sample: bytes, target: str) -> str:
    try:
        return sample.decode()
    except UnicodeDecodeError as error:
        raise UsageError(
            f"export to {target}: expected paths of UTF-8, which ZIP holds, got {show(sample)}; a "
            "tar archive holds names of any bytes"
        ) from error


def write_archive(samples: ExportedSamples, file: IO[bytes], compression: Compression) -> None:
    """Write every sample into a tar archive on an open file, which stays open."""
    created = int(samples.dataset.info.created.timestamp())
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
            header.size, header.mtime = len(data), created
            archive.addfile(header, io.BytesIO(data))
            archive.members.clear()  # type: ignore[attr-defined]  # or it keeps every header
        for directory in samples.empty_directories():
            header = tarfile.TarInfo(directory.decode("utf-8", "surrogateescape"))
            header.type, header.mode, header.mtime = tarfile.DIRTYPE, 0o755, created
            archive.addfile(header)


def _compress(file: IO[bytes], compression: Compression) -> IO[bytes]:
    if compression == "gzip":
        # without name and time, so that the same dataset gives the same archive
        return cast(IO[bytes], gzip.GzipFile("", "wb", _GZIP_LEVEL, fileobj=file, mtime=0))
    if compression == "bzip2":
        return cast(IO[bytes], bz2.BZ2File(file, "wb"))
    if compression == "xz":
        return cast(IO[bytes], lzma.LZMAFile(file, "wb"))
    if compression == "zstd":
        compressor = zstandard.ZstdCompressor(level=_ZSTD_LEVEL, write_checksum=True, threads=-1)
        return cast(IO[bytes], compressor.stream_writer(file, closefd=False))
    return file
