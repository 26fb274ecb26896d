"""Reads tar archives strictly, member by member.

``tarfile`` takes a damaged header, or the end of a truncated file, for the end of the archive. Here
only the zero block that the format requires is the end; anything else is an error with the
archive's name and the offset. Only zeros may follow, so that neither a truncated download nor a
second archive appended to the first is lost unnoticed. Compressed streams are read to their end,
because their checksums are there.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Annotated, Any, Literal, cast

import numpy as np
import zstandard

from dlfs.base.closing import Closing
from dlfs.base.units import MIB
from dlfs.errors import (
    DeviceError,
    DlfsError,
    FormatError,
    LimitError,
    TruncatedError,
    UsageError,
)
from dlfs.ingest.bad_records import BadRecords, RecordError
from dlfs.ingest.source import (
    STDIN_SHOWN,
    check_unchanged,
    clean_path,
    file_errors,
    file_state,
    show,
)
from dlfs.ingest.standard_input import StandardInput

Compression = Literal["none", "gzip", "bzip2", "xz", "zstd"]
Absolute = Literal["error", "strip"]
AbsoluteOption = Annotated[Absolute, "absolute names: refuse, or strip the slash that begins them"]
Kind = Literal["file", "folder", "hard link", "symbolic link", "special file"]

_SUFFIXES: dict[str, Compression] = {
    ".tar": "none",
    ".tar.gz": "gzip",
    ".tgz": "gzip",
    ".tar.bz2": "bzip2",
    ".tbz2": "bzip2",
    ".tar.xz": "xz",
    ".txz": "xz",
    ".tar.zst": "zstd",
    ".tzst": "zstd",
}
_MAGIC: dict[bytes, Compression] = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
}
ZIP_MAGIC = b"PK\3\4"
_MAGIC_BYTES = max(map(len, [*_MAGIC, ZIP_MAGIC]))
_STREAM_BYTES = MIB
_HEADER_BYTES_MAX = 16 * MIB
"""Most bytes of an extended header, which is read into memory."""
_EXTENDED = (
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
)
_CUT_SHORT = ("unexpected end of data", "empty header", "truncated header", "empty file")
_DAMAGED = (
    tarfile.TarError,
    EOFError,
    gzip.BadGzipFile,
    zlib.error,
    lzma.LZMAError,
    zstandard.ZstdError,
    # tarfile raises these for numbers and chains of headers that make no sense.
    ValueError,
    OverflowError,
    RecursionError,
)


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of a member's bytes; a sparse member has zeros between its segments."""

    offset_bytes: int
    position_bytes: int
    length_bytes: int

    @property
    def end_bytes(self) -> int:
        """Offset in the decompressed archive at which the run ends."""
        return self.position_bytes + self.length_bytes


@dataclass(frozen=True, slots=True)
class Member:
    """One member of an archive; positions are offsets in the decompressed archive."""

    path: bytes
    kind: Kind
    link: bytes
    size_bytes: int
    segments: tuple[Segment, ...]


class _StrictHeader(tarfile.TarInfo):
    """A header that raises an error if it is damaged, where ``tarfile`` would end the archive."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str | None, errors: str) -> _StrictHeader:
        header = super().frombuf(buf, encoding or "utf-8", errors)
        if header.size < 0 or (header.type in _EXTENDED and header.size > _HEADER_BYTES_MAX):
            raise tarfile.ReadError(f"a header with a size of {header.size} bytes")
        return header

    @classmethod
    def fromtarfile(cls, tarfile: tarfile.TarFile) -> _StrictHeader:
        try:
            return super().fromtarfile(tarfile)
        except _END:
            raise
        except _HEADER_ERROR as error:
            raise _READ_ERROR(str(error)) from error

    def _proc_gnusparse_10(self, next: Any, pax_headers: Any, tarfile: Any) -> None:  # noqa: A002
        stored_from = tarfile.fileobj.tell()  # the map comes first
        super()._proc_gnusparse_10(next, pax_headers, tarfile)  # type: ignore[misc]
        next.stored_from = stored_from

    def _proc_pax(self, tarfile: Any) -> Any:
        """Return the member behind an extended header.

        The header of a sparse member may have the size of the file, and that of the data stored in
        the archive. ``tarfile`` takes the one that comes last for both.
        """
        found = super()._proc_pax(tarfile)  # type: ignore[misc]
        if self.type == _GLOBAL_TYPE or found.sparse is None:
            return found
        fields = found.pax_headers
        if "size" in fields:
            start = getattr(found, "stored_from", found.offset_data)
            tarfile.offset = start + found._block(int(fields["size"]))
        for name in ("GNU.sparse.size", "GNU.sparse.realsize"):
            if name in fields:
                found.size = int(fields[name])
        return found


_GLOBAL_TYPE = tarfile.XGLTYPE
_END = tarfile.EOFHeaderError  # type: ignore[attr-defined]
_HEADER_ERROR = tarfile.HeaderError
_READ_ERROR = tarfile.ReadError


def compression_of(path: str) -> Compression | None:
    """Return the compression that an archive's name says; None if it is no archive's name."""
    name = path.lower()
    for suffix, compression in _SUFFIXES.items():
        if name.endswith(suffix):
            return compression
    return None


class Archive(Closing):
    """One archive, read once from its start to its end.

    Args:
        path: path of the archive; its name says how it is compressed.
        stdin: standard input to read instead, which the caller closes; its first bytes say how it
            is compressed.
        absolute: ``strip`` removes the slashes that begin an absolute name; ``error`` refuses it.
        bad: bad records, to which members with a malformed name or size are added; by default they
            are errors.

    Raises:
        NotFoundError: the archive does not exist.
        DeviceError: the archive cannot be opened or read.

    Threads: one at a time.
    """

    def __init__(
        self,
        path: str,
        stdin: StandardInput | None = None,
        *,
        absolute: Absolute = "error",
        bad: BadRecords | None = None,
    ) -> None:
        self._absolute = absolute
        self._bad = bad or BadRecords()
        self.path = path if stdin is None else STDIN_SHOWN
        self._is_file = stdin is None
        with file_errors(f"import {self.path}", "archive"):
            raw = io.FileIO(path) if stdin is None else stdin
            self._file = io.BufferedReader(raw, _STREAM_BYTES)
            if stdin is None:
                self.state = file_state(raw.fileno())
                compression = compression_of(path) or "none"
            else:
                self.state = 0, 0
                head = self._file.peek(_MAGIC_BYTES)
                if head.startswith(ZIP_MAGIC):
                    raise UsageError(
                        f"import {STDIN_SHOWN}: expected a tar archive, got a ZIP archive, whose "
                        "directory is at its end; save it to a file"
                    )
                compression = next(
                    (kind for magic, kind in _MAGIC.items() if head.startswith(magic)), "none"
                )
        self._stream = decompressed(self._file, compression)

    def close(self) -> None:
        """Close the file; closing it again does nothing. Standard input stays open."""
        if self._is_file:
            self._stream.close()
            self._file.close()
        else:
            with suppress(ValueError):  # detached already
                self._file.detach()

    def members(self) -> Iterator[Member]:
        """Yield the members in the archive's order; ``read`` reads the latest of them.

        Raises:
            TruncatedError: the archive ends too early.
            FormatError: the archive is damaged, or a name leads out of it.
            DeviceError: the archive cannot be read, or changed meanwhile.
        """
        try:
            with tarfile.TarFile(
                fileobj=self._stream,
                tarinfo=_StrictHeader,
                encoding="utf-8",
                errors="surrogateescape",
            ) as headers:
                while (header := headers.next()) is not None:
                    headers.members.clear()  # type: ignore[attr-defined]  # or it keeps all
                    try:
                        member = self._member(header)
                    except RecordError as error:
                        self._bad.note(self.path, header.name, error)
                        continue
                    yield member
            self._check_end()
        except DlfsError:
            raise
        except (*_DAMAGED, OSError) as error:
            raise self._failure(error) from error

    def read(self, member: Member) -> memoryview:
        """Read the bytes of the last member from ``members``.

        Raises:
            LimitError: the member's size is more than memory can have.
            DlfsError: as for ``members``.
        """
        is_sparse = sum(segment.length_bytes for segment in member.segments) < member.size_bytes
        try:
            target = (np.zeros if is_sparse else np.empty)(member.size_bytes, np.uint8).data
        except (MemoryError, ValueError) as error:
            raise LimitError(
                f"import {self.path}: {show(member.path)}: expected a member that fits the memory, "
                f"got a size of {member.size_bytes} bytes"
            ) from error
        try:
            for segment in member.segments:
                self._stream.seek(segment.position_bytes)
                end = segment.offset_bytes + segment.length_bytes
                self._read_into(target[segment.offset_bytes : end])
        except (*_DAMAGED, OSError) as error:
            raise self._failure(error) from error
        return target

    def _read_into(self, target: memoryview) -> None:
        done = 0
        while done < len(target):
            count = self._stream.readinto(target[done:])  # type: ignore[attr-defined]
            if not count:
                raise tarfile.ReadError(_CUT_SHORT[0])
            done += count

    def _member(self, header: tarfile.TarInfo) -> Member:
        where = f"import {self.path}: the member at byte {header.offset}"
        name = header.name.encode("utf-8", "surrogateescape")
        link = header.linkname.encode("utf-8", "surrogateescape")
        path = member_path(name, self._absolute, where)
        kind = _kind(header)
        if kind == "hard link":
            link = member_path(link, self._absolute, where)
        if not path and kind != "folder":
            raise FormatError(f"{where}: expected a name, got {name!r}")
        if header.size < 0:
            raise FormatError(f"{where}: expected a size, got {header.size} bytes")
        segments = _segments(header, where) if kind == "file" else ()
        return Member(path, kind, link, header.size, segments)

    def _check_end(self) -> None:
        """Read the stream to its end, where its checksum is; only zeros may follow."""
        while data := self._stream.read(_STREAM_BYTES):
            if data.strip(b"\0"):
                first = self._stream.tell() - len(data.lstrip(b"\0"))
                raise FormatError(
                    f"import {self.path}: expected nothing after the archive's end, got data at "
                    f"byte {first}; import archives joined into one file one by one"
                )
        if self._is_file:
            check_unchanged(f"import {self.path}", self._file.fileno(), self.state)

    def _failure(self, error: Exception) -> DlfsError:
        offset = self._stream.tell()
        where = f"import {self.path}: at byte {offset}"
        if isinstance(error, EOFError) or str(error) in _CUT_SHORT:
            return TruncatedError(f"{where}: the archive ends too early: {error}")
        if isinstance(error, OSError) and error.errno is not None:
            return DeviceError(f"{where}: {error.strerror}", error.errno)
        return FormatError(f"{where}: the archive is damaged: {error}")


def member_path(name: bytes, absolute: Absolute, where: str) -> bytes:
    """Return a member's name as a path; empty for the root itself.

    Args:
        name: name in the archive.
        absolute: ``strip`` removes the slashes that begin an absolute name; ``error`` refuses it.
        where: name of the archive and of the member, for errors.

    Raises:
        FormatError: the name is absolute, or has a component ``..``.
        LimitError: the path or one of its components is too long.
    """
    if name.startswith(b"/"):
        if absolute == "error":
            raise FormatError(
                f"{where}: expected a relative name, got {show(name)}; the option "
                "absolute=strip removes the slash"
            )
        name = name.lstrip(b"/")
    return clean_path(name, where)


def decompressed(file: IO[bytes], compression: Compression) -> IO[bytes]:
    """Return the decompressed stream of a file; the file itself if it is not compressed.

    The stream counts its position, and seeks forward by reading.
    """
    if compression == "gzip":
        return cast(IO[bytes], gzip.GzipFile(fileobj=file, mode="rb"))
    if compression == "bzip2":
        return cast(IO[bytes], bz2.BZ2File(file))
    if compression == "xz":
        return cast(IO[bytes], lzma.LZMAFile(file))
    if compression == "zstd":
        frames = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
        return cast(IO[bytes], frames)
    return file


def _kind(header: tarfile.TarInfo) -> Kind:
    if header.isreg():
        return "file"
    if header.isdir():
        return "folder"
    if header.islnk():
        return "hard link"
    return "symbolic link" if header.issym() else "special file"


def _segments(header: tarfile.TarInfo, where: str) -> tuple[Segment, ...]:
    sparse = cast("list[tuple[int, int]] | None", header.sparse)
    if sparse is None:
        return (Segment(0, header.offset_data, header.size),)
    segments, position, end = [], header.offset_data, 0
    for offset, length in sparse:
        if length == 0:  # tables are filled up with empty segments
            continue
        if length < 0 or offset < end or offset + length > header.size:
            raise FormatError(
                f"{where}: expected rising segments in {header.size} bytes of sparse data"
            )
        segments.append(Segment(offset, position, length))
        position, end = position + length, offset + length
    return tuple(segments)
