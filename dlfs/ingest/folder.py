"""A folder as a source: every regular file under it is a sample.

The tree is walked first, once, before anything is written: sizes for the space check, and every
problem that can be seen beforehand (dangling links, loops, files that may not be read) is an error
then. Names are any bytes. The walk visits entries in the byte order of full paths, so the table it
builds needs no sorting: names in one byte string, and 48 bytes of numbers a file. Directories say
themselves which entries are regular files; those are looked at together afterwards, by several
threads. Every open is relative to the folder's descriptor, so a path may be as long as a sample's
path, however long the folder's own is.

Files are then read by several threads in libdlfs, a buffer at a time, checked against the walk
before and after, so that a file that changes during the import is an error. Within a buffer they
are read in path order, wherever they go, because files that were made together lie together on the
disk.
"""

from __future__ import annotations

import errno
import os
import stat
from array import array
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Annotated

import numpy as np
import numpy.typing as npt

from dlfs._native.files import FILE_DTYPE, read_files, stat_files
from dlfs._native.library import describe
from dlfs.errors import DeviceError, DlfsError, NotFoundError, UsageError
from dlfs.format.constants import PATH_BYTES_MAX
from dlfs.ingest.order import packing_order, take_block
from dlfs.ingest.source import (
    BUFFER_BYTES,
    THREADS,
    Layout,
    LinkPolicy,
    SampleBlock,
    check_path,
    read_ahead,
    show,
)

Status = os.stat_result | None
"""None for a regular file that the directory itself names as one: it is looked at later."""

_Entry = tuple[bytes, bytes, Status]
"""What it sorts by (a folder as ``path/``), its path, its status."""


class _Table:
    """The files of a walk, in path order; ``files`` once ``look`` has been called."""

    def __init__(self) -> None:
        self._text = bytearray()
        self._positions = array("Q")
        self.names = np.empty(0, np.uint8)
        self.files = np.empty(0, FILE_DTYPE)

    def __len__(self) -> int:
        return len(self._positions)

    def add(self, path: bytes) -> None:
        self._positions.append(len(self._text))
        self._text += path
        self._text.append(0)

    def path(self, index: int) -> bytes:
        first = self._positions[index]
        return bytes(self._text[first : self._text.index(0, first)])

    def look(self, directory: int, *, follow_links: bool, threads: int) -> int | None:
        """Look at every file; return the index of one that cannot be taken."""
        self.names = np.frombuffer(self._text, np.uint8)
        self.files = np.zeros(len(self), FILE_DTYPE)
        self.files["position"] = np.frombuffer(self._positions, np.uint64)
        failed = stat_files(
            directory, self.names, self.files, follow_links=follow_links, threads=threads
        )
        return int(np.flatnonzero(self.files["code"])[0]) if failed else None


@dataclass(frozen=True, slots=True)
class _Frame:
    """A directory being walked: what is left of it, and itself and those above it by identity."""

    entries: Iterator[_Entry]
    above: frozenset[tuple[int, int]]
    samples_before: int


@dataclass(frozen=True, slots=True)
class FolderOptions:
    """What can be said of a folder."""

    links: Annotated[LinkPolicy, "symbolic links: take what they lead to, skip, refuse"] = "follow"

    def open(self, paths: Sequence[str]) -> FolderSource:
        """Open one folder; see ``FolderSource``."""
        if len(paths) != 1:
            raise UsageError(f"import {paths[1]}: expected one folder, got {len(paths)}")
        return FolderSource(paths[0], links=self.links)


class FolderSource:
    """The files under a folder.

    Args:
        folder: the folder; a link to one is followed whatever the policy.
        links: ``follow`` takes what a symbolic link leads to, directories too; ``skip`` leaves
            links out and counts them; ``error`` refuses them.
        buffer_bytes: of each of the two buffers.
        threads: that read files, 1..64.

    Raises:
        NotFoundError: there is no such folder.
        UsageError: it is no folder; a link dangles, loops or is refused.
        DeviceError: something cannot be read.
        LimitError: a path is too long for a sample.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        links: LinkPolicy = "follow",
        buffer_bytes: int = BUFFER_BYTES,
        threads: int = THREADS,
    ) -> None:
        self.name = os.fspath(folder)
        self._links = links
        self._buffer_bytes = buffer_bytes
        self._threads = threads
        self._table = _Table()
        self._skipped: Counter[str] = Counter()
        self._directory = _open_root(self.name)
        try:
            self.empty_directories = self._walk()
            self._look()
        except BaseException:
            self.close()
            raise
        self._sizes = np.ascontiguousarray(self._table.files["length_bytes"])

    @property
    def sample_count(self) -> int:
        """Files found."""
        return len(self._sizes)

    @property
    def sample_bytes(self) -> int:
        """Bytes of all files found."""
        return int(self._sizes.sum())

    @property
    def gives_shuffled(self) -> bool:
        """Files can be read in any order."""
        return True

    @property
    def skipped(self) -> Mapping[str, int]:
        """Special files, and symbolic links under ``skip``."""
        return dict(self._skipped)

    def close(self) -> None:
        """Close the folder."""
        if self._directory >= 0:
            os.close(self._directory)
            self._directory = -1

    def blocks(self, *, layout: Layout, seed: int) -> Generator[SampleBlock, None, None]:
        """Read every file once; see ``Source.blocks``.

        Raises:
            DeviceError: a file cannot be read, or changed since the walk.
        """
        order = packing_order(self.sample_count, layout=layout, seed=seed)
        position = 0

        def fill(buffer: npt.NDArray[np.uint8]) -> SampleBlock | None:
            nonlocal position
            if position == len(order):
                return None
            indices, offsets = take_block(order, self._sizes, position, len(buffer))
            position += len(indices)
            return self._read(indices, offsets, buffer)

        return read_ahead(fill, buffer_bytes=self._buffer_bytes)

    def _read(
        self,
        indices: npt.NDArray[np.uint64],
        offsets: npt.NDArray[np.int64],
        buffer: npt.NDArray[np.uint8],
    ) -> SampleBlock:
        table, by_path = self._table, np.argsort(indices)
        lengths = self._sizes[indices].astype(np.int64)
        if int(lengths[-1]) > len(buffer):
            buffer = np.empty(int(lengths[-1]), np.uint8)
        chosen = indices[by_path]
        files = table.files[chosen]
        files["buffer_offset"] = offsets[by_path]
        if read_files(
            self._directory,
            table.names,
            files,
            buffer,
            follow_links=self._links == "follow",
            threads=self._threads,
        ):
            bad = int(np.flatnonzero(files["code"])[0])
            raise self._failure(int(chosen[bad]), int(files["code"][bad]))
        return SampleBlock([table.path(i) for i in indices.tolist()], buffer, offsets, lengths)

    def _look(self) -> None:
        follow = self._links == "follow"
        bad = self._table.look(self._directory, follow_links=follow, threads=self._threads)
        if bad is not None:
            where, code = self._where(self._table.path(bad)), int(self._table.files["code"][bad])
            why = "the file may not be read" if code == -errno.EACCES else describe(code)
            raise DeviceError(f"import {where}: {why}", -code)

    def _failure(self, index: int, code: int) -> DlfsError:
        path, size = self._where(self._table.path(index)), int(self._sizes[index])
        if code in (-errno.ESTALE, -errno.ENOENT, -errno.ELOOP):
            return DeviceError(
                f"import {path}: the file changed during the import (it had {size} bytes)",
                errno.ESTALE,
            )
        return DeviceError(f"import {path}: read {size} bytes: {describe(code)}", -code)

    def _walk(self) -> int:
        """Fill the table in path order; return how many directories have no sample under them."""
        root = os.fstat(self._directory)
        stack = [self._enter(b"", frozenset([(root.st_dev, root.st_ino)]))]
        empty = 0
        while stack:
            frame = stack[-1]
            entry = next(frame.entries, None)
            if entry is None:
                empty += len(stack) > 1 and len(self._table) == frame.samples_before
                stack.pop()
                continue
            _, path, status = entry
            if status is not None and stat.S_ISDIR(status.st_mode):
                stack.append(self._enter(path, self._descend(path, status, frame.above)))
            elif status is None or stat.S_ISREG(status.st_mode):
                self._add(path)
            else:
                self._skipped["special file"] += 1
        return empty

    def _enter(self, path: bytes, above: frozenset[tuple[int, int]]) -> _Frame:
        """List a directory in the order of the full paths under it: folders sort as ``name/``."""
        try:
            descriptor = os.open(
                path or b".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._directory
            )
            try:
                entries = self._list(path, descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            if isinstance(error, DlfsError):
                raise
            raise DeviceError(
                f"import {self._where(path)}: list the directory: {error.strerror}",
                error.errno or errno.EIO,
            ) from error
        entries.sort(key=itemgetter(0))
        return _Frame(iter(entries), above, len(self._table))

    def _list(self, path: bytes, descriptor: int) -> list[_Entry]:
        found: list[_Entry] = []
        prefix = path + b"/" if path else b""
        with os.scandir(descriptor) as scan:
            for item in scan:
                full = prefix + os.fsencode(item.name)
                if item.is_file(follow_symlinks=False):
                    found.append((full, full, None))
                elif not item.is_symlink() or self._keep_link(full):
                    found.append(self._entry(full, item))
        return found

    def _entry(self, path: bytes, item: os.DirEntry[str]) -> _Entry:
        try:
            status = item.stat()
        except OSError as error:
            raise self._broken(path, item.is_symlink(), error) from error
        return (path + b"/" if stat.S_ISDIR(status.st_mode) else path), path, status

    def _keep_link(self, path: bytes) -> bool:
        if self._links == "error":
            raise UsageError(
                f"import {self._where(path)}: expected no symbolic links, got one; "
                "choose to follow or to skip them"
            )
        if self._links == "skip":
            self._skipped["symbolic link"] += 1
        return self._links == "follow"

    def _broken(self, path: bytes, is_link: bool, error: OSError) -> DlfsError:
        where = self._where(path)
        if is_link and error.errno in (errno.ENOENT, errno.ENOTDIR):
            return UsageError(
                f"import {where}: the symbolic link leads to nothing; skip links, or mend it"
            )
        if is_link and error.errno == errno.ELOOP:
            return UsageError(f"import {where}: the symbolic link leads back to itself")
        return DeviceError(f"import {where}: {error.strerror}", error.errno or errno.EIO)

    def _descend(
        self, path: bytes, status: os.stat_result, above: frozenset[tuple[int, int]]
    ) -> frozenset[tuple[int, int]]:
        check_path(path, f"import {show(os.fsencode(self.name))}")
        identity = (status.st_dev, status.st_ino)
        if identity in above:
            raise UsageError(
                f"import {self._where(path)}: the link leads to a folder that it is in"
            )
        return above | {identity}

    def _add(self, path: bytes) -> None:
        if len(path) > PATH_BYTES_MAX:  # the kernel has seen to the other rules
            check_path(path, f"import {show(os.fsencode(self.name))}")
        self._table.add(path)

    def _where(self, path: bytes) -> str:
        return show(os.fsencode(self.name).rstrip(b"/") + b"/" + path)


def _open_root(folder: str) -> int:
    try:
        return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise NotFoundError(f"import {folder}: there is no such folder") from error
    except NotADirectoryError as error:
        raise UsageError(f"import {folder}: expected a folder") from error
    except OSError as error:
        raise DeviceError(f"import {folder}: {error.strerror}", error.errno or errno.EIO) from error
