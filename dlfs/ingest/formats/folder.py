"""A folder as a source: every regular file under it is a sample.

The tree is walked first, once, before anything is written: sizes for the space check, and every
problem that can be seen beforehand (dangling links, loops, files that may not be read) is an error
then. Names are any bytes. The walk visits entries in the byte order of full paths, so the table it
builds needs no sorting: names in one byte string, and 48 bytes of numbers a file. Directories say
themselves which entries are regular files; those are looked at together afterwards, and read, by
``files``.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Annotated, Any

import numpy.typing as npt

from dlfs.arguments import Layout
from dlfs.errors import DeviceError, DlfsError, UsageError
from dlfs.format.constants import PATH_BYTES_MAX
from dlfs.ingest.files import FileReader, FileTable, join_shown, open_folder
from dlfs.ingest.source import (
    BUFFER_BYTES,
    THREADS,
    LinkPolicy,
    SampleBlock,
    Source,
    check_path,
    show,
    single_path,
)

Status = os.stat_result | None
"""None for a regular file that the directory itself names as one: it is looked at later."""

_Entry = tuple[bytes, bytes, Status]
"""What it sorts by (a folder as ``path/``), its path, its status."""


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
        return FolderSource(single_path(paths, "folder"), links=self.links)


class FolderSource(Source):
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
        self._name = os.fspath(folder)
        self._links = links
        self._table = FileTable()
        self._skipped: Counter[str] = Counter()
        self._directory = open_folder(self.name)
        try:
            self._empty_directories = self._walk()
            self._reader = FileReader(
                self._directory,
                self.name,
                self._table,
                attributes=self._attributes(),
                follow_links=links == "follow",
                buffer_bytes=buffer_bytes,
                threads=threads,
            )
        except BaseException:
            self.close()
            raise

    def _attributes(self) -> Mapping[str, npt.NDArray[Any]]:
        """What a kind of folder says of its files: arrays with a value for each in the table."""
        return {}

    @property
    def name(self) -> str:
        """Path of the folder."""
        return self._name

    @property
    def empty_directories(self) -> int:
        """Number of directories without a file under them."""
        return self._empty_directories

    @property
    def sample_count(self) -> int:
        """Files found."""
        return len(self._table)

    @property
    def sample_bytes(self) -> int:
        """Bytes of all files found."""
        return int(self._reader.sizes.sum())

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
        return self._reader.blocks(layout=layout, seed=seed)

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
                "links='skip' leaves it out"
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
        return join_shown(self.name, path)
