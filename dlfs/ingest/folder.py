"""A folder as a source: every regular file under it is a sample.

The tree is walked first, once, before anything is written: sizes for the space check, and every
problem that can be seen beforehand (dangling links, loops, files that may not be read) is an error
then. Names are any bytes. The walk visits entries in the byte order of full paths, so the table it
builds needs no sorting: names in one byte string, and 24 bytes of numbers a file. Every open is
relative to the folder's descriptor, so a path may be as long as a sample's path, however long the
folder's own is.

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
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dlfs._native.files import FILE_DTYPE, read_files
from dlfs._native.library import describe
from dlfs.errors import DeviceError, DlfsError, NotFoundError, UsageError
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


@dataclass(slots=True)
class _Table:
    """The files of a walk, in path order."""

    names: bytearray = field(default_factory=bytearray)
    positions: array[int] = field(default_factory=lambda: array("Q"))
    sizes: array[int] = field(default_factory=lambda: array("Q"))
    modified: array[int] = field(default_factory=lambda: array("q"))

    def add(self, path: bytes, status: os.stat_result) -> None:
        self.positions.append(len(self.names))
        self.sizes.append(status.st_size)
        self.modified.append(status.st_mtime_ns)
        self.names += path
        self.names.append(0)

    def path(self, index: int) -> bytes:
        first = self.positions[index]
        return bytes(self.names[first : self.names.index(0, first)])


@dataclass(frozen=True, slots=True)
class _Entry:
    path: bytes
    is_link: bool
    status: os.stat_result


@dataclass(frozen=True, slots=True)
class _Frame:
    """A directory being walked: what is left of it, and itself and those above it by identity."""

    entries: Iterator[_Entry]
    above: frozenset[tuple[int, int]]
    samples_before: int


def _sort_key(entry: _Entry) -> bytes:
    return entry.path + b"/" if stat.S_ISDIR(entry.status.st_mode) else entry.path


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
        except BaseException:
            self.close()
            raise
        self._sizes = np.frombuffer(self._table.sizes, np.uint64)

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
        files = np.zeros(len(indices), FILE_DTYPE)
        chosen = indices[by_path]
        files["position"] = np.frombuffer(table.positions, np.uint64)[chosen]
        files["buffer_offset"] = offsets[by_path]
        files["length_bytes"] = lengths[by_path]
        files["modified_ns"] = np.frombuffer(table.modified, np.int64)[chosen]
        names = np.frombuffer(table.names, np.uint8)
        follow = self._links == "follow"
        if read_files(
            self._directory, names, files, buffer, follow_links=follow, threads=self._threads
        ):
            bad = int(np.flatnonzero(files["code"])[0])
            raise self._failure(int(chosen[bad]), int(files["code"][bad]))
        return SampleBlock([table.path(i) for i in indices.tolist()], buffer, offsets, lengths)

    def _failure(self, index: int, code: int) -> DlfsError:
        path, size = self._where(self._table.path(index)), self._table.sizes[index]
        if code in (-errno.ESTALE, -errno.ENOENT, -errno.ELOOP):
            return DeviceError(
                f"import {path}: the file changed during the import (it had {size} bytes)",
                errno.ESTALE,
            )
        return DeviceError(f"import {path}: read {size} bytes: {describe(code)}", -code)

    def _walk(self) -> int:
        """Fill the table in path order; return how many directories have no sample under them."""
        status = os.fstat(self._directory)
        stack = [self._enter(b"", frozenset([(status.st_dev, status.st_ino)]))]
        empty = 0
        while stack:
            frame = stack[-1]
            entry = next(frame.entries, None)
            if entry is None:
                empty += len(stack) > 1 and len(self._table.sizes) == frame.samples_before
                stack.pop()
            elif stat.S_ISDIR(entry.status.st_mode):
                stack.append(self._enter(entry.path, self._descend(entry, frame.above)))
            else:
                self._add(entry)
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
        entries.sort(key=_sort_key)
        return _Frame(iter(entries), above, len(self._table.sizes))

    def _list(self, path: bytes, descriptor: int) -> list[_Entry]:
        found = []
        with os.scandir(descriptor) as scan:
            for item in scan:
                name = os.fsencode(item.name)
                full = path + b"/" + name if path else name
                is_link = item.is_symlink()
                if is_link and not self._keep_link(full):
                    continue
                try:
                    found.append(_Entry(full, is_link, item.stat()))
                except OSError as error:
                    raise self._broken(full, is_link, error) from error
        return found

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
        self, entry: _Entry, above: frozenset[tuple[int, int]]
    ) -> frozenset[tuple[int, int]]:
        check_path(entry.path, f"import {show(os.fsencode(self.name))}")
        identity = (entry.status.st_dev, entry.status.st_ino)
        if identity in above:
            raise UsageError(
                f"import {self._where(entry.path)}: the link leads to a folder that it is in"
            )
        return above | {identity}

    def _add(self, entry: _Entry) -> None:
        if not stat.S_ISREG(entry.status.st_mode):
            self._skipped["special file"] += 1
            return
        check_path(entry.path, f"import {show(os.fsencode(self.name))}")
        # Most files are readable by all; asking the kernel costs as much as the walk itself.
        if not entry.status.st_mode & stat.S_IROTH and not os.access(
            entry.path, os.R_OK, dir_fd=self._directory, effective_ids=True
        ):
            raise DeviceError(
                f"import {self._where(entry.path)}: the file may not be read", errno.EACCES
            )
        self._table.add(entry.path, entry.status)

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
