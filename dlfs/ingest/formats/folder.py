"""Imports a folder: every regular file under it is a sample.

Before anything is written, the source walks the tree once. That gives the sizes for the space check
and finds dangling links, loops and files that cannot be read. Names may have any bytes. The walk
visits entries in the byte order of full paths, so the table of files needs no sorting. A directory
entry says if it is a regular file; ``files`` stats and reads these together.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Annotated, Any

import numpy.typing as npt

from dlfs.errors import DeviceError, DlfsError, UsageError
from dlfs.format.constants import PATH_BYTES_MAX
from dlfs.ingest.files import FilesSource, join_shown
from dlfs.ingest.source import LinkPolicy, check_path, keep_link, show, single_path

Status = os.stat_result | None
"""Status of an entry; None for a regular file, which is not looked up during the walk."""

_Entry = tuple[bytes, bytes, Status]
"""An entry: its sort key (a folder sorts as ``path/``), its path and its status."""


@dataclass(frozen=True, slots=True)
class _Frame:
    """A directory during the walk: remaining entries; identities of itself and its parents."""

    entries: Iterator[_Entry]
    above: frozenset[tuple[int, int]]
    samples_before: int


@dataclass(frozen=True, slots=True)
class FolderOptions:
    """Options of a folder."""

    links: Annotated[LinkPolicy, "symbolic links: follow, skip, or refuse"] = "follow"

    def open(self, paths: Sequence[str]) -> FolderSource:
        """Open one folder; see ``FolderSource``."""
        return FolderSource(single_path(paths, "folder"), links=self.links)


class FolderSource(FilesSource):
    """The files under a folder.

    Args:
        folder: path of the folder; it may itself be a symbolic link, whatever ``links`` says.
        links: ``follow`` imports what a symbolic link leads to, directories too; ``skip`` leaves
            links out and counts them; ``error`` refuses them.

    Raises:
        NotFoundError: the folder does not exist.
        UsageError: the path is no folder; a link dangles, loops or is refused.
        DeviceError: a file or directory cannot be read.
        LimitError: a path is too long for a sample.
    """

    def __init__(self, folder: str | os.PathLike[str], *, links: LinkPolicy = "follow") -> None:
        self._links = links
        self.skipped: Counter[str] = Counter()
        super().__init__(os.fspath(folder), os.fspath(folder), follow_links=links == "follow")

    def _find_files(self) -> Mapping[str, npt.NDArray[Any]]:
        self.empty_directories = self._walk()
        return {}

    def _walk(self) -> int:
        """Fill the table in path order; return the number of directories without a sample."""
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
                self.skipped["special file"] += 1
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
                elif not item.is_symlink() or keep_link(
                    self._links, f"import {self._where(full)}", self.skipped
                ):
                    found.append(self._entry(full, item))
        return found

    def _entry(self, path: bytes, item: os.DirEntry[str]) -> _Entry:
        try:
            status = item.stat()
        except OSError as error:
            raise self._broken(path, item.is_symlink(), error) from error
        return (path + b"/" if stat.S_ISDIR(status.st_mode) else path), path, status

    def _broken(self, path: bytes, is_link: bool, error: OSError) -> DlfsError:
        where = self._where(path)
        if is_link and error.errno in (errno.ENOENT, errno.ENOTDIR):
            return UsageError(
                f"import {where}: the symbolic link leads to nothing; skip links, or repair it"
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
            raise UsageError(f"import {self._where(path)}: the link leads to a folder above it")
        return above | {identity}

    def _add(self, path: bytes) -> None:
        if len(path) > PATH_BYTES_MAX:  # the kernel enforces the other rules
            check_path(path, f"import {show(os.fsencode(self.name))}")
        self._table.add(path)

    def _where(self, path: bytes) -> str:
        return join_shown(self.name, path)
