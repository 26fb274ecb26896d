"""``dlfs://`` for fsspec: what reads files through fsspec reads samples.

pandas, pyarrow, Hugging Face ``datasets`` and Dask find this file system by its entry point. A path
names the volume, then the dataset, then the sample::

    dlfs:///data/volume.img!/photos/cat/0001.jpg
    dlfs:///data/a.img,/data/b.img!/photos/cat          several members, in any order

where files are named by absolute paths, with or without the slash that they begin with (Hugging
Face ``datasets`` loses it). Or the volume is an option, which it has to be where its URI has a
character that fsspec takes for a pattern (``?``, ``*``, ``[``)::

    fsspec.open("dlfs://photos/cat/0001.jpg", volume="nvme-tcp://host:4420/NQN?nsid=1")

A dataset is its newest version when it is first used; ``NAME@VERSION`` is another one, and
``invalidate_cache`` looks for what is newer. Files and directories are those of a mount
(``dlfs/mount/SEMANTICS.md``). Every sample's CRC32C covers the whole of it, so a file is read
whole when it is opened, and a range of it costs as much; many files at a time (``cat``,
``cat_ranges``, ``get`` of a tree) are one batch. Whatever would change something fails with EROFS.

Errors are those of files where there is such: ``FileNotFoundError``, ``IsADirectoryError``,
``NotADirectoryError``. All else that goes wrong is a ``DlfsError``, as everywhere.

Threads and processes: any thread may use a file system; fsspec gives each thread its own, and all
of a process share the volumes that they opened. It may be pickled, and used on both sides of a
fork.
"""

from __future__ import annotations

import errno
import io
import os
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NoReturn

import numpy as np

import dlfs
from dlfs.adapters.files import (
    Node,
    OpenVolume,
    find_inside,
    missing,
    raw_path,
    shared_volume,
)
from dlfs.arguments import check_choice
from dlfs.extras import install_command

try:
    from fsspec.spec import AbstractFileSystem
except ImportError as error:
    raise dlfs.UsageError(
        f"read through fsspec: it cannot be loaded ({error}); {install_command('fsspec')}"
    ) from error

MARK = "!"
"""Ends the volume in a path."""

BATCH_BYTES = 64 << 20
"""What is read at a time when many files are asked for: the sum of their lengths."""

_SCHEME = re.compile("[a-z][a-z0-9+-]*:")


class DlfsFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """The datasets of volumes as a read-only file system.

    Args:
        volume: what ``dlfs.open`` takes, or ``dlfs.connect`` (``unix:PATH``); paths then begin with
            the dataset.
        memory_bytes: sample memory of each dataset that is used, in each process, in bytes; by
            default as ``dlfs.open``.
        depth: operations in flight per member and thread, 1..4096.
        engine: of file devices: ``auto``, ``uring`` or ``threads``.
        storage_options: fsspec's own.

    Opens a volume when it is first used.
    """

    protocol = "dlfs"
    root_marker = ""

    def __init__(
        self,
        volume: str | Sequence[str] | None = None,
        memory_bytes: int | None = None,
        depth: int = 128,
        engine: dlfs.Engine = "auto",
        **storage_options: Any,
    ) -> None:
        super().__init__(**storage_options)
        self.volume = volume if volume is None or isinstance(volume, str) else ",".join(volume)
        self._options = (memory_bytes, depth, engine)
        self._opened: dict[str, OpenVolume] = {}

    # ---- paths -----------------------------------------------------------------------------------

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        """A path as this file system names it: no protocol, no slash at its end.

        One at its beginning stays where a volume's own path begins with it.
        """
        if isinstance(path, list):
            return [cls._strip_protocol(one) for one in path]
        plain = str(super()._strip_protocol(path))
        return plain if MARK in plain else plain.lstrip("/")

    def _split(self, path: str) -> tuple[OpenVolume, str, str]:
        """The volume of a path, the text before the dataset in it, and the rest."""
        plain = self._strip_protocol(path)
        if self.volume is not None:
            return self._open_volume(self.volume, path), "", plain.lstrip("/")
        before, mark, rest = (plain + "/").partition(MARK + "/")
        if not mark:
            told = f"no volume is named: expected VOLUME{MARK}/DATASET/PATH or the option volume"
            raise FileNotFoundError(errno.ENOENT, told, path)
        members = (
            one if _SCHEME.match(one) else "/" + one.lstrip("/") for one in before.split(",")
        )
        return self._open_volume(",".join(members), path), before + mark, rest.rstrip("/")

    def _open_volume(self, uri: str, path: str) -> OpenVolume:
        volume = self._opened.get(uri)
        if volume is None:
            try:
                volume = shared_volume(uri, self._options)
            except dlfs.NotFoundError as error:
                raise FileNotFoundError(errno.ENOENT, str(error), path) from error
            self._opened[uri] = volume
        return volume

    def _find(self, path: str) -> Node:
        """What a path names: a file, or a directory.

        Raises:
            FileNotFoundError: neither.
        """
        volume, prefix, rest = self._split(path)
        if not rest:
            return Node(prefix.rstrip("/"), volume)
        name, _, inner = rest.partition("/")
        dataset = volume.dataset(name)
        if dataset is None:
            raise missing(path)
        return find_inside(Node(prefix + rest, volume, dataset, prefix + name, raw_path(inner)))

    def invalidate_cache(self, path: str | None = None) -> None:
        """Look for newer versions of volumes and datasets from here on, in every thread.

        Files that are open keep what they have.
        """
        for volume in self._opened.values():
            volume.refresh()
        super().invalidate_cache(path)

    # ---- what is there ---------------------------------------------------------------------------

    def info(self, path: str, **_options: Any) -> dict[str, Any]:
        """What is known of a file or directory without reading it.

        Returns:
            ``name``, ``size`` in bytes (0 for a directory), ``type`` and ``mtime``, when the
            dataset was made; of files also ``index`` and ``ETag``, which no other bytes ever have.

        Raises:
            FileNotFoundError: there is no such path.
        """
        node = self._find(path)
        if node.is_directory:
            return node.describe_directory(node.path)
        assert node.dataset is not None
        return node.describe_files([node.path], np.array([node.index]))[0]

    def ls(self, path: str, detail: bool = True, **_options: Any) -> list[Any]:
        """List a directory, or a file as the only one.

        Raises:
            FileNotFoundError: there is no such path.
        """
        node = self._find(path)
        if not node.is_directory:
            found = [self.info(path)]
        elif node.dataset is None:
            base = node.path + "/" if node.path else ""
            found = [node.describe_directory(base + name) for name in node.volume.names()]
        else:
            found = node.describe_children()
        return found if detail else [one["name"] for one in found]

    def find(
        self,
        path: str,
        maxdepth: int | None = None,
        withdirs: bool = False,
        detail: bool = False,
        **options: Any,
    ) -> Any:
        """All files below a directory, in order of their names; a file finds itself.

        A whole tree inside of one dataset is one range of its samples, and listed as such.

        Args:
            path: where to begin; nothing is found where there is nothing.
            maxdepth: levels to go down, 1 and up; None for all.
            withdirs: find directories, too.
            detail: give the ``info`` of each by its name.
            options: fsspec's, without meaning here.
        """
        try:
            node = self._find(path)
        except FileNotFoundError:
            return {} if detail else []
        if node.dataset is None or maxdepth is not None:
            return super().find(path, maxdepth, withdirs, detail, **options)
        below = node.describe_tree(withdirs) if node.is_directory else [self.info(path)]
        found = {one["name"]: one for one in sorted(below, key=lambda one: str(one["name"]))}
        return found if detail else list(found)

    def exists(self, path: str, **_options: Any) -> bool:
        """Whether there is such a file or directory. What cannot be told is an error, not a no."""
        return self._kind(path) is not None

    def isdir(self, path: str) -> bool:
        """Whether there is such a directory."""
        return self._kind(path) == "directory"

    def isfile(self, path: str) -> bool:
        """Whether there is such a file."""
        return self._kind(path) == "file"

    def _kind(self, path: str) -> str | None:
        try:
            return "directory" if self._find(path).is_directory else "file"
        except FileNotFoundError:
            return None

    def created(self, path: str) -> Any:
        """When the dataset was made, UTC."""
        return self._find(path).created

    modified = created

    # ---- reading ---------------------------------------------------------------------------------

    def _open(self, path: str, mode: str = "rb", **_options: Any) -> SampleFile:
        if mode != "rb":
            _refuse(path)
        return SampleFile(self.cat_file(path), self, self._strip_protocol(path))

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **_options: Any
    ) -> bytes:
        """The bytes of a file, or a range of them, negative positions from its end.

        Raises:
            FileNotFoundError: there is no such file.
            IsADirectoryError: it is a directory.
            DlfsError: as ``Dataset.read``.
        """
        node = self._find(path)
        if node.is_directory:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        assert node.dataset is not None
        data = node.dataset[node.index]
        return data if start is None and end is None else data[start:end]

    def cat(
        self, path: Any, recursive: bool = False, on_error: str = "raise", **options: Any
    ) -> Any:
        """The bytes of a file; of several, found by patterns or in a tree, by their names.

        Args:
            path: a path, a pattern, or a list of them.
            recursive: all files below directories.
            on_error: ``raise``; ``omit`` leaves a file out; ``return`` gives its error instead.
            options: of ``cat_file``, for a single file.

        Raises:
            UsageError: there is no such policy.
            OSError, DlfsError: as ``cat_file``.
        """
        check_choice(on_error, ("raise", "omit", "return"), option="on_error", action="read files")
        paths = self.expand_path(path, recursive=recursive)
        if not isinstance(path, list) and paths == [self._strip_protocol(path)]:
            return self.cat_file(paths[0], **options)
        if recursive:
            paths = [one for one in paths if not self.isdir(one)]
        return {
            name: data
            for name, data in zip(paths, self._read_many(paths, on_error), strict=True)
            if on_error != "omit" or isinstance(data, bytes)
        }

    def cat_ranges(
        self,
        paths: list[str],
        starts: Any,
        ends: Any,
        on_error: str = "return",
        **_options: Any,
    ) -> list[Any]:
        """Ranges of files, each file read once.

        Args:
            paths: of the files; one may stand in it more than once.
            starts: of each range in bytes, or one for all.
            ends: likewise; None for the end of the file.
            on_error: ``raise``, or ``return`` the error in place of the bytes.
        """
        check_choice(on_error, ("raise", "return"), option="on_error", action="read ranges")
        begins = starts if isinstance(starts, list) else [starts] * len(paths)
        stops = ends if isinstance(ends, list) else [ends] * len(paths)
        if not len(paths) == len(begins) == len(stops):
            raise ValueError(
                f"read ranges: expected as many starts and ends as paths, "
                f"got {len(paths)}, {len(begins)}, {len(stops)}"
            )
        unique = list(dict.fromkeys(paths))
        found = dict(zip(unique, self._read_many(unique, on_error), strict=True))
        return [
            data[start:stop] if isinstance(data := found[path], bytes) else data
            for path, start, stop in zip(paths, begins, stops, strict=True)
        ]

    def _read_many(self, paths: Sequence[str], on_error: str) -> list[bytes | Exception]:
        """The bytes of each path or, unless errors are to be raised, what went wrong."""
        out: list[Any] = [None] * len(paths)
        wanted: dict[int, tuple[dlfs.Dataset, list[tuple[int, int]]]] = {}
        for position, path in enumerate(paths):
            try:
                node = self._find(path)
                if node.is_directory:
                    raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
            except (OSError, dlfs.DlfsError) as error:
                if on_error == "raise":
                    raise
                out[position] = error
                continue
            assert node.dataset is not None
            _, places = wanted.setdefault(id(node.dataset), (node.dataset, []))
            places.append((position, node.index))
        for dataset, places in wanted.values():
            for part in _batches(dataset, places):
                _read_part(dataset, part, out, on_error)
        return out


def _refuse(*arguments: Any, **_options: Any) -> NoReturn:
    """Whatever would change something.

    Raises:
        OSError: EROFS, always.
    """
    path = next((one for one in arguments if isinstance(one, str)), None)
    raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)


_CHANGES = (
    *("cp", "cp_file", "copy", "delete", "makedir", "makedirs", "mkdir", "mkdirs", "move", "mv"),
    *("pipe", "pipe_file", "put", "put_file", "rename", "rm", "rm_file", "_rm", "rmdir", "touch"),
    *("upload", "write_bytes", "write_text"),
)
for _name in _CHANGES:
    setattr(DlfsFileSystem, _name, _refuse)


class SampleFile(io.BytesIO):
    """An open file: the bytes of a sample, which are in memory.

    Attributes:
        fs: the file system.
        path: of the file.
        size: in bytes.
    """

    mode = "rb"

    def __init__(self, data: bytes, fs: DlfsFileSystem, path: str) -> None:
        super().__init__(data)
        self.fs = fs
        self.path = path
        self.size = len(data)

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.fs, self.path, self.tell())

    def writable(self) -> bool:
        """Never."""
        return False

    def write(self, _data: object) -> NoReturn:
        """Refuse, as every change.

        Raises:
            OSError: EROFS, always.
        """
        _refuse(self.path)

    def info(self) -> dict[str, Any]:
        """As of the file system."""
        return self.fs.info(self.path)


def _reopen(fs: DlfsFileSystem, path: str, position: int) -> SampleFile:
    """Open a file again where its pickle is loaded."""
    opened = fs._open(path)
    opened.seek(position)
    return opened


def _batches(
    dataset: dlfs.Dataset, places: Sequence[tuple[int, int]]
) -> Iterator[Sequence[tuple[int, int]]]:
    """Parts of what is wanted, (position, index), of about ``BATCH_BYTES`` each."""
    ends = np.cumsum(dataset.lengths([index for _, index in places])) // BATCH_BYTES
    cuts = [0, *(np.flatnonzero(np.diff(ends)) + 1).tolist(), len(places)]
    for first, last in pairwise(cuts):
        yield places[first:last]


def _read_part(
    dataset: dlfs.Dataset, part: Sequence[tuple[int, int]], out: list[Any], on_error: str
) -> None:
    """Read (position, index) pairs as one batch and put the bytes at their positions."""
    policy: dlfs.OnError = "raise" if on_error == "raise" else "skip"
    batch = dataset.read([index for _, index in part], on_error=policy)
    failed = {failure.position: failure.error() for failure in batch.failures}
    views = iter(batch)
    for at, (position, _) in enumerate(part):
        out[position] = failed[at] if at in failed else bytes(next(views))
