"""``dlfs://`` for fsspec: programs that use files through fsspec read and write samples.

pandas, pyarrow, Hugging Face ``datasets`` and Dask find this file system by its entry point. A path
names the volume, then the dataset, then the sample::

    dlfs:///data/volume.img!/photos/cat/0001.jpg
    dlfs:///data/a.img,/data/b.img!/photos/cat          several members, in any order

Files have absolute paths, whose first slash is optional (Hugging Face ``datasets`` removes it). The
volume may also be an option. It must be one if its URI has a character that fsspec treats as a
pattern (``?``, ``*``, ``[``)::

    fsspec.open("dlfs://photos/cat/0001.jpg", volume="nvme-tcp://host:4420/NQN?nsid=1")

A dataset is its newest version at its first use; ``NAME@VERSION`` selects another one, and
``invalidate_cache`` looks for newer ones. Files and directories are those of a mount
(``dlfs/mount/SEMANTICS.md``). Of a file larger than a chunk of the volume (256 KiB), the chunks are
read and verified that a range lies in; a smaller one is read whole. Several files (``cat``,
``cat_ranges``, ``get`` of a tree) are read as one batch.

A file opened with ``wb`` or ``xb`` becomes a sample when it is closed, and is not visible before
(``dlfs.adapters.new_files``). Directories need not be made. All other changes fail with EROFS.

Errors are those of files where there are such: ``FileNotFoundError``, ``IsADirectoryError``,
``NotADirectoryError``. All other errors are a ``DlfsError``.

Threads and processes: any thread may use a file system. fsspec makes one for each thread; all of a
process share their open volumes. A file system may be pickled, and used on both sides of a fork.
"""

from __future__ import annotations

import errno
import io
import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

import dlfs
from dlfs.adapters.callers import find_caller
from dlfs.adapters.files import (
    OpenVolume,
    PathEntry,
    not_found,
    raw_path,
    shared_volume,
)
from dlfs.adapters.grouping import group_by_bytes
from dlfs.adapters.new_files import NewSample, NewSampleFile
from dlfs.base.arguments import check_choice, check_integer
from dlfs.base.extras import install_command

try:
    from fsspec.spec import AbstractFileSystem
except ImportError as error:
    raise dlfs.UsageError(
        f"read through fsspec: it cannot be loaded ({error}); {install_command('fsspec')}"
    ) from error

if TYPE_CHECKING:
    from typing_extensions import Buffer

MARK = "!"
"""Character that ends the volume in a path."""

BATCH_BYTES = 64 << 20
"""Largest sum of file lengths that one batch reads, in bytes, if several files are requested."""

BUFFER_BYTES = 256 << 10
"""Size of the buffer of an open file, in bytes; larger reads bypass it."""

RANGE_BYTES_MIN = 1 << 20
"""Longest file that ``cat_ranges`` reads whole, in bytes."""

LOCK_TIMEOUT_S = 60.0
"""Default time that the close of a new file waits for another writer of the volume."""

_SCHEME = re.compile("[a-z][a-z0-9+-]*:")


class DlfsFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """The datasets of volumes as a file system. A volume is opened on its first use.

    Args:
        volume: URI for ``dlfs.open``, or for ``dlfs.connect`` (``unix:PATH``); paths then begin
            with the dataset.
        memory_bytes: sample memory of each volume in each process, in bytes; by default as
            ``dlfs.open``.
        depth: operations in flight per member and thread, 1..4096.
        engine: engine for file devices: ``auto``, ``uring`` or ``threads``.
        keep_versions: versions of a dataset that stay when a file is written to it, >= 1; by
            default all.
        lock_timeout_s: time that the close of a new file waits for another writer of the volume.
        storage_options: options of fsspec itself.
    """

    protocol = "dlfs"
    root_marker = ""

    def __init__(
        self,
        volume: str | Sequence[str] | None = None,
        memory_bytes: int | None = None,
        depth: int = 128,
        engine: dlfs.Engine = "auto",
        keep_versions: int | None = None,
        lock_timeout_s: float = LOCK_TIMEOUT_S,
        **storage_options: Any,
    ) -> None:
        super().__init__(**storage_options)
        if keep_versions is not None:
            check_integer(keep_versions, 1, None, option="keep_versions", action="write files")
        self.keep_versions = keep_versions
        self.lock_timeout_s = lock_timeout_s
        self.volume = volume if volume is None or isinstance(volume, str) else ",".join(volume)
        self._options = (memory_bytes, depth, engine)
        self._opened: dict[str, OpenVolume] = {}

    # ---- paths -----------------------------------------------------------------------------------

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        """Return a path without the protocol and without a slash at its end.

        A slash at its beginning stays if the path of a volume begins with it.
        """
        if isinstance(path, list):
            return [cls._strip_protocol(one) for one in path]
        plain = str(super()._strip_protocol(path))
        return plain if MARK in plain else plain.lstrip("/")

    def _split(self, path: str) -> tuple[OpenVolume, str, str]:
        """Return the volume of a path, the text before the dataset, and the remainder."""
        plain = self._strip_protocol(path)
        if self.volume is not None:
            return self._open_volume(self.volume, path), "", plain.lstrip("/")
        before, mark, remainder = (plain + "/").partition(MARK + "/")
        if not mark:
            reason = f"no volume is named: expected VOLUME{MARK}/DATASET/PATH or the option volume"
            raise FileNotFoundError(errno.ENOENT, reason, path)
        members = (
            one if _SCHEME.match(one) else "/" + one.lstrip("/") for one in before.split(",")
        )
        return self._open_volume(",".join(members), path), before + mark, remainder.rstrip("/")

    def _open_volume(self, uri: str, path: str) -> OpenVolume:
        volume = self._opened.get(uri)
        if volume is None:
            try:
                volume = shared_volume(uri, self._options)
            except dlfs.NotFoundError as error:
                raise FileNotFoundError(errno.ENOENT, str(error), path) from error
            self._opened[uri] = volume
        return volume

    def _find(self, path: str) -> PathEntry:
        """Return the file or directory of a path.

        Raises:
            FileNotFoundError: the path is neither.
        """
        volume, prefix, remainder = self._split(path)
        if not remainder:
            return PathEntry(prefix.rstrip("/"), volume)
        name, _, inner = remainder.partition("/")
        dataset = volume.dataset(name)
        if dataset is None:
            raise not_found(path)
        return PathEntry(prefix + remainder, volume, dataset, prefix + name, raw_path(inner))

    def invalidate_cache(self, path: str | None = None) -> None:
        """Look for newer versions of volumes and datasets from now on, in every thread.

        Open files do not change.
        """
        for volume in self._opened.values():
            volume.refresh()
        super().invalidate_cache(path)

    # ---- listing ---------------------------------------------------------------------------------

    def info(self, path: str, **_options: Any) -> dict[str, Any]:
        """Return the properties of a file or directory without reading it.

        Returns:
            ``name``, ``size`` in bytes (0 for a directory), ``type`` and ``mtime``, the creation
            time of the dataset; for files also ``index`` and an ``ETag`` that is unique for these
            bytes.

        Raises:
            FileNotFoundError: there is no such path.
        """
        entry = self._find(path)
        if entry.is_directory:
            return entry.describe_directory(entry.path)
        assert entry.dataset is not None
        return entry.describe_files([entry.path], np.array([entry.index]))[0]

    def ls(self, path: str, detail: bool = True, **_options: Any) -> list[Any]:
        """List a directory; for a file, the file itself.

        Raises:
            FileNotFoundError: there is no such path.
        """
        entry = self._find(path)
        if not entry.is_directory:
            found = [self.info(path)]
        elif entry.dataset is None:
            base = entry.path + "/" if entry.path else ""
            names = sorted({info.name for info in entry.volume.volume.datasets()})
            found = [entry.describe_directory(base + name) for name in names]
        else:
            found = entry.describe_children()
        return found if detail else [one["name"] for one in found]

    def find(
        self,
        path: str,
        maxdepth: int | None = None,
        withdirs: bool = False,
        detail: bool = False,
        **options: Any,
    ) -> Any:
        """List all files below a directory, sorted by name; for a file, the file itself.

        A tree inside one dataset is a range of its samples, and is listed as such.

        Args:
            path: start of the search; a path that does not exist has no files.
            maxdepth: levels to descend, >= 1; None for all.
            withdirs: True to list directories as well.
            detail: True to return the ``info`` of each by its name.
            options: options of fsspec that have no effect here.
        """
        try:
            entry = self._find(path)
        except FileNotFoundError:
            return {} if detail else []
        if entry.dataset is None or maxdepth is not None:
            return super().find(path, maxdepth, withdirs, detail, **options)
        below = entry.describe_tree(withdirs) if entry.is_directory else [self.info(path)]
        found = {one["name"]: one for one in sorted(below, key=lambda one: str(one["name"]))}
        return found if detail else list(found)

    def exists(self, path: str, **_options: Any) -> bool:
        """Return True if the path is a file or directory; raise if that cannot be determined."""
        return self._kind(path) is not None

    def isdir(self, path: str) -> bool:
        """Return True if the path is a directory.

        Raises:
            UsageError: Lightning's ``ModelCheckpoint`` asks, which would remove files later.
        """
        _refuse_removals()
        return self._kind(path) == "directory"

    def isfile(self, path: str) -> bool:
        """Return True if the path is a file."""
        return self._kind(path) == "file"

    def _kind(self, path: str) -> str | None:
        try:
            return "directory" if self._find(path).is_directory else "file"
        except FileNotFoundError:
            return None

    def created(self, path: str) -> Any:
        """Return the creation time of the dataset, UTC."""
        return self._find(path).created

    modified = created

    # ---- reading ---------------------------------------------------------------------------------

    def _open(
        self, path: str, mode: str = "rb", autocommit: bool = True, **_options: Any
    ) -> SampleFile | NewSampleFile:
        if mode == "rb":
            return SampleFile(self, self._strip_protocol(path))
        if mode not in ("wb", "xb"):
            _refuse(path)
        volume, _, remainder = self._split(path)
        dataset, _, inner = remainder.partition("/")
        sample = NewSample(
            volume=volume,
            path=self._strip_protocol(path),
            dataset=dataset,
            inner=inner,
            lock_timeout_s=self.lock_timeout_s,
            keep_versions=self.keep_versions,
        )
        sample.check(exclusive=mode == "xb")
        return NewSampleFile(sample, exclusive=mode == "xb", autocommit=autocommit)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Do nothing: a directory exists as soon as a file in it does."""

    def mkdir(self, path: str, create_parents: bool = True, **_options: Any) -> None:
        """Do nothing: a directory exists as soon as a file in it does."""

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **_options: Any
    ) -> bytes:
        """Read a file, or a range of it; negative positions count from its end.

        Raises:
            FileNotFoundError: there is no such file.
            IsADirectoryError: it is a directory.
            DlfsError: as ``Dataset.read``.
        """
        dataset, index = self.find_sample(path)
        if start is None and end is None:
            return dataset[index]
        first, last, _ = slice(start, end).indices(int(dataset.lengths([index])[0]))
        data = bytearray(max(0, last - first))
        dataset.read_into(index, data, offset_bytes=first)
        return bytes(data)

    def find_sample(self, path: str) -> tuple[dlfs.Dataset, int]:
        """Return the dataset and the index of the sample that is a file.

        Raises:
            FileNotFoundError: there is no such file.
            IsADirectoryError: it is a directory.
        """
        entry = self._find(path)
        if entry.is_directory:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        assert entry.dataset is not None
        return entry.dataset, entry.index

    def cat(
        self, path: Any, recursive: bool = False, on_error: str = "raise", **options: Any
    ) -> Any:
        """Read one file, or several files by patterns or in a tree.

        Args:
            path: a path, a pattern, or a list of them.
            recursive: True for all files below directories.
            on_error: ``raise``; ``omit`` leaves a file out; ``return`` returns its error in its
                place.
            options: options of ``cat_file``, for a single file.

        Returns:
            The bytes of a single file; a dictionary by path for several.

        Raises:
            UsageError: the policy is unknown.
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
        """Read ranges of files. A file of up to ``RANGE_BYTES_MIN`` is read once for all of them.

        Args:
            paths: paths of the files; a path may occur more than once.
            starts: start of each range in bytes, or one for all.
            ends: end of each range in bytes, or one for all; None for the end of the file.
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
        whole = [path for path in dict.fromkeys(paths) if not self._is_large(path)]
        found = dict(zip(whole, self._read_many(whole, on_error), strict=True))
        out: list[Any] = []
        for path, start, stop in zip(paths, begins, stops, strict=True):
            data = found.get(path)
            if data is not None:
                out.append(data[start:stop] if isinstance(data, bytes) else data)
                continue
            try:
                out.append(self.cat_file(path, start, stop))
            except (OSError, dlfs.DlfsError) as error:
                if on_error == "raise":
                    raise
                out.append(error)
        return out

    def _is_large(self, path: str) -> bool:
        try:
            dataset, index = self.find_sample(path)
        except (OSError, dlfs.DlfsError):
            return False  # the read of it has the error
        return int(dataset.lengths([index])[0]) > RANGE_BYTES_MIN

    def _read_many(self, paths: Sequence[str], on_error: str) -> list[bytes | Exception]:
        """Return the bytes of each path, or its error unless errors are raised."""
        out: list[Any] = [None] * len(paths)
        by_dataset: dict[int, tuple[dlfs.Dataset, list[tuple[int, int]]]] = {}
        for position, path in enumerate(paths):
            try:
                entry = self._find(path)
                if entry.is_directory:
                    raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
            except (OSError, dlfs.DlfsError) as error:
                if on_error == "raise":
                    raise
                out[position] = error
                continue
            assert entry.dataset is not None
            _, positions = by_dataset.setdefault(id(entry.dataset), (entry.dataset, []))
            positions.append((position, entry.index))
        for dataset, positions in by_dataset.values():
            lengths = dataset.lengths([index for _, index in positions])
            for group in group_by_bytes(positions, lengths, BATCH_BYTES):
                _read_group(dataset, group, out, on_error)
        return out


def _refuse(*arguments: Any, **_options: Any) -> NoReturn:
    """Refuse a change.

    Raises:
        OSError: EROFS, always.
    """
    path = next((one for one in arguments if isinstance(one, str)), None)
    raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)


def _refuse_removals() -> None:
    """Refuse a ``ModelCheckpoint`` of Lightning that would remove or replace files during training.

    It asks for its folder when training starts.

    Raises:
        UsageError: it is one, and keeps not all of its files.
    """
    asking = find_caller(
        "lightning.pytorch.callbacks.model_checkpoint",
        "pytorch_lightning.callbacks.model_checkpoint",
    )
    if asking is None or (asking.save_top_k in (-1, 0) and not asking.save_last):
        return
    raise dlfs.UsageError(
        f"save checkpoints to {asking.dirpath}: expected ModelCheckpoint(save_top_k=-1) without "
        f"save_last, got save_top_k={asking.save_top_k} and save_last={asking.save_last}: single "
        "files of a volume cannot be removed or replaced; for a few newest checkpoints use "
        "dlfs.adapters.torch.checkpoint.StorageWriter(..., keep=N), and for last.ckpt a "
        "ModelCheckpoint(save_top_k=0, save_last=True) with a folder, a dataset, of its own"
    )


_CHANGES = (
    *("cp", "cp_file", "copy", "delete", "move", "mv", "rename", "rm", "rm_file", "_rm", "rmdir"),
    "touch",
)
for _name in _CHANGES:
    setattr(DlfsFileSystem, _name, _refuse)


class _SampleBytes(io.RawIOBase):
    """The bytes of a sample, read as they are asked for."""

    def __init__(self, dataset: dlfs.Dataset, index: int) -> None:
        self._dataset = dataset
        self._index = index
        self._offset_bytes = 0
        self.size = int(dataset.lengths([index])[0])

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer) -> int:
        count = self._dataset.read_into(self._index, buffer, offset_bytes=self._offset_bytes)
        self._offset_bytes += count
        return count

    def readall(self) -> bytes:
        if self._offset_bytes == 0:
            data = self._dataset[self._index]
            self._offset_bytes = self.size
            return data
        return self.read(max(0, self.size - self._offset_bytes)) or b""

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._offset_bytes, io.SEEK_END: self.size}[whence]
        if base + offset < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self._offset_bytes = base + offset
        return self._offset_bytes

    def tell(self) -> int:
        return self._offset_bytes


class SampleFile(io.BufferedReader):
    """An open file: what is read of it is read from the sample, ``BUFFER_BYTES`` at a time.

    Args:
        fs: file system of the file.
        path: path of the file.

    Attributes:
        fs: file system of the file.
        path: path of the file.
        size: length of the file in bytes.
    """

    mode = "rb"

    def __init__(self, fs: DlfsFileSystem, path: str) -> None:
        raw = _SampleBytes(*fs.find_sample(path))
        super().__init__(raw, BUFFER_BYTES)
        self.fs = fs
        self.path = path
        self.size = raw.size

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.fs, self.path, self.tell())

    def write(self, _data: object) -> NoReturn:
        """Refuse to write.

        Raises:
            OSError: EROFS, always.
        """
        _refuse(self.path)

    def info(self) -> dict[str, Any]:
        """Return the properties of the file, as the file system does."""
        return self.fs.info(self.path)


def _reopen(fs: DlfsFileSystem, path: str, position: int) -> SampleFile:
    """Open a file again when its pickle is loaded."""
    opened = SampleFile(fs, path)
    opened.seek(position)
    return opened


def _read_group(
    dataset: dlfs.Dataset, group: Sequence[tuple[int, int]], out: list[Any], on_error: str
) -> None:
    """Read (position, index) pairs as one batch and store the bytes at their positions."""
    policy: dlfs.OnError = "raise" if on_error == "raise" else "skip"
    batch = dataset.read([index for _, index in group], on_error=policy)
    failed = {failure.position: failure.error() for failure in batch.failures}
    views = iter(batch)
    for at, (position, _) in enumerate(group):
        out[position] = failed[at] if at in failed else bytes(next(views))
