"""Reads ZIP archives strictly, by the directory at their end.

``zipfile`` reads the directory, the headers and the data, and checks the CRC of each member. Beside
that, this module refuses what would make one archive give more, or other, data than it has:

- A member that is encrypted, or compressed in a way that Python cannot read, is an error that names
  it, before any is read.
- Two members must not overlap, as they do in archives that are made to fill disks.
- A size must be possible: as large as the data if that is stored, at most 1032 times as large
  behind deflate (its limit; source: https://zlib.net/zlib_tech.html), and below the machine's
  memory. Data that ends before this size is an error.

A name is the bytes in the archive, as in tar archives: the directory marks those of UTF-8, and of
others it does not tell the encoding. ``encoding`` names theirs; they become UTF-8 then. Backslashes
in names of readable text from DOS and Windows, where no file name has one, separate folders.

Memory: about 0.5 KB for each member. Members are decompressed in pieces.

Threads: one at a time, but any number call ``read_into``.
"""

from __future__ import annotations

import io
import lzma
import os
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EINVAL

from dlfs._native.handle import Descriptor
from dlfs.base.closing import Closing, closed_on_error
from dlfs.base.units import KIB, MIB
from dlfs.errors import (
    ChecksumError,
    DeviceError,
    DlfsError,
    FormatError,
    LimitError,
    TruncatedError,
)
from dlfs.ingest.archives.archive import ZIP_MAGIC, Absolute, Kind, Member, member_path
from dlfs.ingest.source import file_errors, file_state, show

_UNIX_HOSTS = (3, 19)
"""Systems whose file modes a member has: Unix and macOS."""
_DOS_HOSTS = (0, 10)
"""Systems whose file names have no backslash: DOS and Windows NT."""
_DOS_FOLDER = 0x10
_ENCRYPTED, _UTF8 = 0x1, 0x800
"""Flags of a member."""
_METHODS = {
    zipfile.ZIP_STORED: "stored",
    zipfile.ZIP_DEFLATED: "deflate",
    zipfile.ZIP_BZIP2: "bzip2",
    zipfile.ZIP_LZMA: "LZMA",
}
_OTHER_METHODS = {1: "shrink", 6: "implode", 9: "Deflate64", 93: "Zstandard", 95: "XZ", 98: "PPMd"}
_DEFLATE_RATIO_MAX = 1032
_HEADER_BYTES = 30
"""Size of a member's header in front of its data, without name and extra fields, in bytes."""
_LINK_BYTES_MAX = 4 * KIB
"""Most bytes of the target of a symbolic link. Source: PATH_MAX of Linux."""
_PIECE_BYTES = MIB
_SMALL_PIECE_BYTES = 4 * KIB
"""Compressed bytes read at once where ``zipfile`` does not bound what they become: at most 80 MB.
It is the least that ``zipfile`` reads."""
_SOURCE_ENCODING = "cp437"
"""Encoding by which ``zipfile`` reads unmarked names; it has a character for each byte."""

_DAMAGED = (
    zipfile.BadZipFile,
    EOFError,
    zlib.error,
    lzma.LZMAError,
    struct.error,
    NotImplementedError,
    RuntimeError,
    ValueError,
    OverflowError,
    IndexError,
    OSError,  # without a number: bz2's
)


class _File(io.RawIOBase):
    """A file that is open only between its first read and ``release``."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._descriptor = Descriptor()
        self._position = 0
        with closed_on_error(self):
            self.state = file_state(self._open())

    def _open(self) -> int:
        if self._descriptor.value < 0:
            self._descriptor.fill(os.open, self._path, os.O_RDONLY | os.O_CLOEXEC)
        return self._descriptor.value

    def release(self) -> None:
        """Close the descriptor until the next read."""
        self._descriptor.close()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.state[0]}[whence]
        if base + offset < 0:
            raise OSError(EINVAL, os.strerror(EINVAL))  # zipfile expects this of short files
        self._position = base + offset
        return self._position

    def readinto(self, target: memoryview) -> int:  # type: ignore[override]
        count = os.preadv(self._open(), [target], self._position)
        self._position += count
        return count

    def close(self) -> None:
        """Close the file; closing it again does nothing."""
        self._descriptor.close()
        super().close()


class ZipArchive(Closing):
    """One archive, of which the members are read in any order.

    Args:
        path: path of the archive.
        encoding: encoding of the names that are not marked as UTF-8; None: they stay as they are.
        absolute: ``strip`` removes the slashes that begin an absolute name; ``error`` refuses it.

    Attributes:
        state: state of the file, from ``file_state``.

    Raises:
        NotFoundError: the archive does not exist.
        TruncatedError: the file ends without a directory.
        FormatError: the file is no ZIP archive, or its directory is damaged.
        DeviceError: the file cannot be read.
    """

    def __init__(
        self, path: str, *, encoding: str | None = None, absolute: Absolute = "error"
    ) -> None:
        self.path = path
        self._encoding = encoding
        self._absolute = absolute
        with file_errors(f"import {path}", "archive"):
            self._file = _File(path)
        self.state = self._file.state
        with closed_on_error(self._file), self._errors(f"import {path}"):
            self._archive = zipfile.ZipFile(self._file, metadata_encoding=encoding)
            self._infos = self._archive.infolist()[:]
            self._archive.filelist.clear()
            self._archive.NameToInfo.clear()
            self._check_places()

    def __len__(self) -> int:
        """Return the number of members."""
        return len(self._infos)

    def members(self) -> Iterator[Member]:
        """Yield the members in the directory's order; see ``member``."""
        return map(self.member, range(len(self)))

    def member(self, number: int) -> Member:
        """Return a member by its number in the directory; called once for each.

        Raises:
            FormatError: a member cannot be read, or its name leads out of the archive.
            LimitError: a member does not fit the memory, or its name is too long.
            DeviceError: the archive cannot be read.
        """
        info = self._infos[number]
        name = self._name(info)
        where = f"import {self.path}: {show(name)}"
        kind = self._kind(info, name)
        path = member_path(name, self._absolute, f"import {self.path}: member {number}")
        if not path and kind != "folder":
            raise FormatError(f"import {self.path}: member {number}: expected a name, got {name!r}")
        self._check(info, kind, where)
        link = bytes(self.read(number)) if kind == "symbolic link" else b""
        info.extra, info.comment = b"", b""
        info.date_time = _NO_TIME
        return Member(path, kind, link, info.file_size, ())

    def read(self, number: int) -> memoryview:
        """Read the bytes of a member into memory of their own; see ``read_into``."""
        target = memoryview(bytearray(self._infos[number].file_size))
        self.read_into(number, target)
        return target

    def read_into(self, number: int, target: memoryview) -> None:
        """Read the bytes of a member, and check them.

        Args:
            number: number of the member in the directory.
            target: memory of the member's size.

        Raises:
            ChecksumError: the CRC of the data is wrong.
            FormatError: the member is damaged.
            DeviceError: the archive cannot be read.
        """
        info = self._infos[number]
        is_bounded = info.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
        piece = _PIECE_BYTES if is_bounded else _SMALL_PIECE_BYTES
        done = 0
        where = f"import {self.path}: {show(self._name(info))}"
        with self._errors(where), self._archive.open(info) as file:
            while done < len(target):
                data = file.read(min(piece, len(target) - done))
                if not data:
                    raise EOFError(f"expected {len(target)} bytes, got {done}")
                target[done : done + len(data)] = data
                done += len(data)
            file.read(1)  # an empty member's CRC is checked at the end, too

    def position(self, number: int) -> int:
        """Return the offset of a member in the file, in bytes."""
        return self._infos[number].header_offset

    def release(self) -> None:
        """Close the file's descriptor until the next read."""
        self._file.release()

    def close(self) -> None:
        """Close the file; closing it again does nothing."""
        self._archive.close()
        self._file.close()

    def _name(self, info: zipfile.ZipInfo) -> bytes:
        """Return the name of a member, with slashes between folders."""
        text = info.orig_filename
        is_text = bool(info.flag_bits & _UTF8) or self._encoding is not None or text.isascii()
        if is_text and info.create_system in _DOS_HOSTS:
            text = text.replace("\\", "/")
        return text.encode("utf-8" if is_text else _SOURCE_ENCODING, "surrogateescape")

    def _kind(self, info: zipfile.ZipInfo, name: bytes) -> Kind:
        mode = info.external_attr >> 16 if info.create_system in _UNIX_HOSTS else 0
        kind = stat.S_IFMT(mode)
        is_dos_folder = info.create_system in _DOS_HOSTS and info.external_attr & _DOS_FOLDER
        if name.endswith(b"/") or kind == stat.S_IFDIR or is_dos_folder:
            if info.file_size:
                raise FormatError(
                    f"import {self.path}: {show(name)}: expected no data in a folder, got "
                    f"{info.file_size} bytes"
                )
            return "folder"
        if kind == stat.S_IFLNK:
            return "symbolic link"
        return "file" if kind in (0, stat.S_IFREG) else "special file"

    def _check(self, info: zipfile.ZipInfo, kind: Kind, where: str) -> None:
        """Check that a member can be read, and that its size can be true."""
        if info.flag_bits & _ENCRYPTED:
            raise FormatError(
                f"{where}: expected a member that is not encrypted; unpack the archive with its "
                "password, and import the folder"
            )
        if info.compress_type not in _METHODS:
            method = _OTHER_METHODS.get(info.compress_type, f"method {info.compress_type}")
            raise FormatError(
                f"{where}: expected compression {', '.join(_METHODS.values())}, got {method}; "
                "unpack the archive, and import the folder"
            )
        size, stored = info.file_size, info.compress_size
        most = {
            zipfile.ZIP_STORED: stored,
            zipfile.ZIP_DEFLATED: stored * _DEFLATE_RATIO_MAX,
        }.get(info.compress_type, size)
        if size > most or (info.compress_type == zipfile.ZIP_STORED and size != stored):
            raise FormatError(
                f"{where}: expected at most {most} bytes of {stored} compressed ones by "
                f"{_METHODS[info.compress_type]}, got a size of {size}"
            )
        if kind == "symbolic link" and size > _LINK_BYTES_MAX:
            raise LimitError(
                f"{where}: expected a symbolic link of at most {_LINK_BYTES_MAX} bytes, got {size}"
            )
        if size > _memory_bytes():
            raise LimitError(
                f"{where}: expected a member that fits the memory, got a size of {size} bytes"
            )

    def _check_places(self) -> None:
        """Check that members lie one after the other, and in front of the directory."""
        end, name = 0, ""
        ordered = sorted(self._infos, key=lambda info: info.header_offset)
        for info in ordered:
            name = show(self._name(info))
            if info.header_offset < end:
                raise FormatError(
                    f"import {self.path}: {name}: expected members that do not overlap, got one at "
                    f"byte {info.header_offset}, where the one before ends at byte {end}"
                )
            end = info.header_offset + _HEADER_BYTES + info.compress_size
        if end > self._archive.start_dir:
            raise FormatError(
                f"import {self.path}: {name}: expected the member's {info.compress_size} bytes in "
                f"front of the directory at byte {self._archive.start_dir}"
            )

    @contextmanager
    def _errors(self, where: str) -> Iterator[None]:
        """Turn the errors of ``zipfile`` and of decompressors into typed ones."""
        try:
            yield
        except DlfsError:
            raise
        except _DAMAGED as error:
            raise self._failure(where, error) from error

    def _failure(self, where: str, error: Exception) -> DlfsError:
        text = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, OSError) and error.errno is not None:
            return DeviceError(f"{where}: {error.strerror}", error.errno)
        if text.startswith("Bad CRC-32"):
            return ChecksumError(
                f"{where}: expected data of the CRC-32 in the directory, got other"
            )
        if text == "File is not a zip file":
            return self._no_directory(where)
        return FormatError(f"{where}: the archive is damaged: {text}")

    def _no_directory(self, where: str) -> FormatError:
        self._file.seek(0)
        if self._file.read(len(ZIP_MAGIC)) == ZIP_MAGIC:
            return TruncatedError(
                f"{where}: expected a directory at the end of the ZIP archive, got none: the file "
                "is cut, or one part of several"
            )
        return FormatError(f"{where}: expected a ZIP archive, got a file without its directory")


_NO_TIME = (1980, 1, 1, 0, 0, 0)
"""Shared by the members, so that none has a time of its own, which is not used."""


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
