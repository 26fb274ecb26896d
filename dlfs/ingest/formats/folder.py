"""Imports folders: every regular file under them is a sample; and folders of class folders.

The paths of one folder's samples begin below it. If several folders or files are imported together,
each path begins with the base name of its folder or file, as ``tar c`` and ``cp -r`` name them. Two
samples with one path are an error that names both.

Before anything is written, the source walks the tree once. That gives the sizes for the space check
and finds dangling links, loops and files that cannot be read. Names may have any bytes. The walk
visits entries in the byte order of full paths, so the table of files needs no sorting. A directory
entry says if it is a regular file; ``files`` stats and reads these together. The walk itself takes
a thread of Python, so it passes on the files of a directory in runs rather than one by one.

The format ``imagefolder`` is the layout of torchvision's ``ImageFolder``: the first folder of a
file is its class. The names of the top folders, sorted as text, are the classes. The attribute
``label`` is the number of a sample's class among them, ``class`` its name. Paths begin with the
class. Hidden files and folders, whose names begin with a dot, are left out and counted with their
names; all others are imported, and a file outside all class folders is an error.
"""

from __future__ import annotations

import errno
import os
import stat
from bisect import bisect
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt

from dlfs._native.handle import Descriptor
from dlfs.errors import DeviceError, DlfsError, FormatError, LimitError, UsageError
from dlfs.format.constants import PATH_BYTES_MAX
from dlfs.ingest.files import FilesSource, join_shown
from dlfs.ingest.source import (
    LinkPolicy,
    check_path,
    file_errors,
    keep_link,
    show,
    single_path,
    source_name,
)

_NAMES_SHOWN = 10
"""Most names of hidden files that a report has."""

_Entry = tuple[bytes, bytes, os.stat_result]
"""An entry that was looked up: its name as it sorts (a folder as ``name/``), path and status."""

_Run = list[bytes]
"""Names of regular files, which are not looked up during the walk, that follow each other."""


@dataclass(frozen=True, slots=True)
class _Frame:
    """A directory during the walk: path, entries left; identities of itself and its parents."""

    path: bytes
    entries: Iterator[_Entry | _Run]
    above: frozenset[tuple[int, int]]
    samples_before: int


@dataclass(frozen=True, slots=True)
class FolderOptions:
    """Options of a folder."""

    links: Annotated[LinkPolicy, "symbolic links: follow, skip, or refuse"] = "follow"

    def open(self, paths: Sequence[str]) -> FolderSource:
        """Open one folder, or a file, or several of both; see ``FolderSource``."""
        if len(paths) == 1 and not os.path.isfile(paths[0]):
            return FolderSource(paths[0], links=self.links)
        return FoldersSource(paths, links=self.links)


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
        self.empty_directories = self._walk(b"")
        return {}

    def _sample_path(self, path: bytes) -> bytes:
        """Return the path of the sample of a file that the walk finds."""
        return path

    def _walk(self, start: bytes) -> list[bytes]:
        """Add the files under a folder to the table, in path order.

        Returns:
            The paths of the directories below it without a sample.
        """
        root = os.stat(start or b".", dir_fd=self._opened.value)
        stack = [self._enter(start, frozenset([(root.st_dev, root.st_ino)]))]
        empty: list[bytes] = []
        while stack:
            frame = stack[-1]
            entry = next(frame.entries, None)
            if entry is None:
                if len(stack) > 1 and len(self._table) == frame.samples_before:
                    empty.append(self._sample_path(frame.path))
                stack.pop()
                continue
            if isinstance(entry, list):
                self._add_run(frame.path, entry)
                continue
            _, path, status = entry
            if stat.S_ISDIR(status.st_mode):
                with self._leaving_out(path):
                    stack.append(self._enter(path, self._descend(path, status, frame.above)))
            elif stat.S_ISREG(status.st_mode):
                self._add(path)
            else:
                self.skipped["special file"] += 1
        return empty

    def _leaving_out(self, path: bytes) -> AbstractContextManager[None]:
        """Note a file, or a folder with all in it, if an error occurs; see ``BadRecords``."""
        errors = (DeviceError, FormatError, LimitError, UsageError)
        return self.bad.leave_out(self._folder, os.fsdecode(path), errors)

    def _enter(self, path: bytes, above: frozenset[tuple[int, int]]) -> _Frame:
        """List a directory in the order of the full paths under it: folders sort as ``name/``."""
        with (
            file_errors(f"import {self._where(path)}: list the directory", "directory"),
            Descriptor() as folder,
        ):
            folder.fill(self._open_directory, path)
            files, others = self._list(path, folder.value)
        return _Frame(path, _in_order(files, others), above, len(self._table))

    def _open_directory(self, path: bytes) -> int:
        """Open a directory below the folder, or the folder itself, to list it."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        return os.open(path or b".", flags, dir_fd=self._opened.value)

    def _list(self, path: bytes, descriptor: int) -> tuple[_Run, list[_Entry]]:
        """Return the regular files of a directory, and its other entries."""
        files: list[str] = []
        others: list[_Entry] = []
        prefix = path + b"/" if path else b""
        with os.scandir(descriptor) as scan:
            for item in scan:
                if not self._is_wanted(item.name):
                    continue
                if item.is_file(follow_symlinks=False):
                    files.append(item.name)
                    continue
                full = prefix + os.fsencode(item.name)
                if not item.is_symlink() or keep_link(
                    self._links, f"import {self._where(full)}", self.skipped
                ):
                    with self._leaving_out(full):
                        others.append(self._entry(full, item))
        return os.fsencode("\0".join(files)).split(b"\0") if files else [], others

    def _is_wanted(self, _name: str) -> bool:
        """Return True if an entry of a directory is imported."""
        return True

    def _entry(self, path: bytes, item: os.DirEntry[str]) -> _Entry:
        try:
            status = item.stat()
        except OSError as error:
            raise self._broken(path, item.is_symlink(), error) from error
        name = path.rpartition(b"/")[2]
        return (name + b"/" if stat.S_ISDIR(status.st_mode) else name), path, status

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
        check_path(self._sample_path(path), f"import {show(os.fsencode(self.name))}")
        identity = (status.st_dev, status.st_ino)
        if identity in above:
            raise UsageError(f"import {self._where(path)}: the link leads to a folder above it")
        return above | {identity}

    def _add_run(self, folder: bytes, names: _Run) -> None:
        """Add files of a directory to the table."""
        prefix = folder + b"/" if folder else b""
        if len(prefix) + max(map(len, names)) <= PATH_BYTES_MAX:
            self._table.add_all(names, prefix)
            return
        for name in names:
            self._add(prefix + name)

    def _add(self, path: bytes) -> None:
        if len(path) <= PATH_BYTES_MAX:  # the kernel enforces the other rules
            self._table.add(path)
            return
        with self._leaving_out(path):
            check_path(self._sample_path(path), f"import {show(os.fsencode(self.name))}")
            self._table.add(path)

    def _where(self, path: bytes) -> str:
        return join_shown(self._folder, path)


def _in_order(files: _Run, others: list[_Entry]) -> Iterator[_Entry | _Run]:
    """Yield the entries of a directory in the order of the full paths, files in runs."""
    files.sort()
    others.sort(key=itemgetter(0))
    first = 0
    for entry in others:
        end = bisect(files, entry[0], first)
        if end > first:
            yield files[first:end]
        yield entry
        first = end
    if first < len(files):
        yield files[first:]


@dataclass(slots=True)
class _Root:
    """A folder or file of several.

    Attributes:
        given: its path, as the caller gave it.
        place: its path below the folder that has all of them.
        name: its base name, with which the paths of its samples begin.
        is_folder: True if it is a folder.
        first: index of its first file in the table.
    """

    given: str
    place: bytes
    name: bytes
    is_folder: bool
    first: int = 0


class FoldersSource(FolderSource):
    """The files under several folders, and single files.

    All are opened relative to the deepest folder that has them all, so that their number is not
    bounded by that of open files. They are read in the order of their base names.

    Args:
        paths: paths of the folders and files; each may itself be a symbolic link.
        links: as for ``FolderSource``.

    Raises:
        FormatError: two samples have one path; the message names both files.
        NotFoundError: a folder or file does not exist.
        UsageError, DeviceError, LimitError: as for ``FolderSource``.
    """

    def __init__(self, paths: Sequence[str], *, links: LinkPolicy = "follow") -> None:
        self._links = links
        self.skipped = Counter()
        self._roots: list[_Root] = []
        places: list[str] = []
        for path in paths:
            with file_errors(f"import {path}", "file or folder"):
                places.append(os.path.realpath(path, strict=True))
        common = os.path.commonpath([os.path.dirname(place) for place in places])
        for path, place in zip(paths, places, strict=True):
            is_folder = os.path.isdir(place)
            if not is_folder and not os.path.isfile(place):
                raise UsageError(f"import {path}: expected a file or a folder")
            name = os.fsencode(Path(path).name)
            if name in (b"", b".."):
                name = os.fsencode(os.path.basename(place))
            check_path(name, f"import {path}")
            below = os.fsencode(os.path.relpath(place, common))
            self._roots.append(_Root(path, below, name, is_folder))
        self._roots.sort(key=attrgetter("name", "is_folder"))
        FilesSource.__init__(self, source_name(paths), common, follow_links=links == "follow")

    def _find_files(self) -> Mapping[str, npt.NDArray[Any]]:
        empty: list[bytes] = []
        for root in self._roots:
            root.first = len(self._table)
            self._root = root
            if not root.is_folder:
                self._add(root.place)
                continue
            empty += self._walk(root.place)
            if len(self._table) == root.first:
                empty.append(root.name)
        self.empty_directories = empty
        self._check_clashes()
        return {}

    def _sample_path(self, path: bytes) -> bytes:
        return self._root.name + path[len(self._root.place) :]

    def _sample_paths(self, indices: npt.NDArray[Any]) -> list[bytes]:
        firsts = np.array([root.first for root in self._roots], np.int64)
        numbers = np.searchsorted(firsts, indices.astype(np.int64), "right") - 1
        names, cuts = zip(*((root.name, len(root.place)) for root in self._roots), strict=True)
        return [
            names[number] + path[cuts[number] :]
            for number, path in zip(numbers.tolist(), self._table.paths(indices), strict=True)
        ]

    def _path(self, root: _Root, index: int) -> bytes:
        """Return the path of the sample of a file of the table, which lies below a root."""
        return root.name + self._table.path(index)[len(root.place) :]

    def _check_clashes(self) -> None:
        """Check that roots of one name have no sample of one path, and no file is also a folder."""
        ends = [root.first for root in self._roots[1:]] + [len(self._table)]
        counts = Counter(root.name for root in self._roots)
        known: dict[bytes, _Root] = {}
        for root, end in zip(self._roots, ends, strict=True):
            if counts[root.name] == 1:
                continue
            paths = {self._path(root, index): index for index in range(root.first, end)}
            taken = [root.name, *paths] if root.is_folder and paths else [*paths]
            for path in taken:
                other = known.get(path)
                if other is None:
                    continue
                error = FormatError(
                    f"import: expected each path once, got {show(path)} in {other.given} and "
                    f"in {root.given}"
                )
                for index in [paths[path]] if path in paths else paths.values():
                    self._leave_out(index, error)
            new = [path for path, index in paths.items() if index not in self._left_out]
            known.update(dict.fromkeys(new, root))


# ---- class folders -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ImageFolderOptions(FolderOptions):
    """Options of a folder of classes."""

    def open(self, paths: Sequence[str]) -> ImageFolderSource:
        """Open one folder; see ``ImageFolderSource``."""
        return ImageFolderSource(single_path(paths, "folder"), links=self.links)


class ImageFolderSource(FolderSource):
    """The files under the class folders of a folder; see ``FolderSource``.

    Raises:
        UsageError: a file is in no class folder.
        DlfsError: as for ``FolderSource``.
    """

    def _find_files(self) -> Mapping[str, npt.NDArray[Any]]:
        """Return the columns of ``class_columns``."""
        self._hidden: Counter[str] = Counter()
        super()._find_files()
        self.skipped += count_hidden(self._hidden)
        columns, outside = class_columns(self.file_paths())
        for index in outside:
            self._leave_out(index, outside_classes(self.name, self._table.path(index)))
        return columns

    def _is_wanted(self, name: str) -> bool:
        if name.startswith("."):
            self._hidden[name] += 1
            return False
        return True


def class_columns(paths: Iterable[bytes]) -> tuple[Mapping[str, npt.NDArray[Any]], list[int]]:
    """Return the classes of files in class folders.

    Args:
        paths: paths of the files, relative to the folder of all.

    Returns:
        ``label``, ``int64[n_files]``, and ``class``, ``object[n_files]``; and the indices of the
        files that are in no class folder.
    """
    names: list[str] = []
    outside: list[int] = []
    for index, path in enumerate(paths):
        folder, slash, _ = path.partition(b"/")
        if not slash:
            outside.append(index)
        names.append(os.fsdecode(folder) if slash else "")
    numbers = {name: number for number, name in enumerate(sorted(set(names) - {""}))} | {"": 0}
    texts = {name: os.fsencode(name).decode("utf-8", "backslashreplace") for name in numbers}
    classes = np.array([texts[name] for name in names], object)
    labels = np.array([numbers[name] for name in names], np.int64)
    return {"label": labels, "class": classes}, outside


def outside_classes(folder: str, path: bytes) -> UsageError:
    """Return the error for a file that is in no class folder."""
    return UsageError(f"import {join_shown(folder, path)}: expected files in class folders only")


def count_hidden(hidden: Counter[str]) -> Counter[str]:
    """Return the number of hidden files and folders by the reason that names them."""
    if not hidden:
        return Counter()
    shown = ", ".join(show(os.fsencode(name)) for name in list(hidden)[:_NAMES_SHOWN])
    more = ", ..." if len(hidden) > _NAMES_SHOWN else ""
    return Counter({f"hidden file or folder: {shown}{more}": hidden.total()})
