"""Volumes as trees of files, for adapters with a file interface.

The tree is that of a mount: the newest version of every dataset under its name, other versions as
``NAME@VERSION``, and in each dataset the samples as files and the parts of their paths as
directories. A process opens each volume once, shares it between file systems, and closes it with
its last user.

Threads: any at once.
"""

from __future__ import annotations

import errno
import os
import weakref
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any

import numpy as np

import dlfs


class OpenVolume:
    """A volume, and the datasets of it that were used. Any threads."""

    def __init__(self, uri: str, options: tuple[int | None, int, dlfs.Engine]) -> None:
        memory_bytes, depth, engine = options
        self.volume = (
            dlfs.connect(uri)
            if uri.startswith("unix:")
            else dlfs.open(uri, memory_bytes=memory_bytes, depth=depth, engine=engine)
        )
        self._datasets: dict[str, dlfs.Dataset] = {}

    def dataset(self, name: str) -> dlfs.Dataset | None:
        """Return the newest version of a dataset, or ``NAME@VERSION``; None if there is none."""
        dataset = self._datasets.get(name)
        if dataset is None:
            if name not in self.volume:
                self.volume.refresh()
            if name not in self.volume:
                return None
            dataset = self._datasets.setdefault(name, self.volume.dataset(name))
        return dataset

    def refresh(self) -> None:
        """See the newest generation, and open the newest versions from now on."""
        self.volume.refresh()
        self._datasets.clear()


_VOLUMES: weakref.WeakValueDictionary[tuple[Any, ...], OpenVolume] = weakref.WeakValueDictionary()
"""Open volumes of all file systems of this process."""


def shared_volume(uri: str, options: tuple[int | None, int, dlfs.Engine]) -> OpenVolume:
    """Return a volume that other file systems of the process may use as well.

    Args:
        uri: URI for ``dlfs.open``, or for ``dlfs.connect`` (``unix:PATH``).
        options: memory in bytes, depth and engine; a service uses its own.

    Raises:
        DlfsError: as ``dlfs.open`` and ``dlfs.connect``.
    """
    volume = _VOLUMES.get((uri, options))
    if volume is None:  # two threads may both open it; the first volume stays
        volume = _VOLUMES.setdefault((uri, options), OpenVolume(uri, options))
    return volume


class PathEntry:
    """A file or a directory.

    Attributes:
        path: path in the file system.
        volume: volume of the path.
        dataset: dataset of the path; None for the volume's root directory.
        base: path of the dataset's directory.
        inner: path within the dataset.
        index: sample index of a file; -1 for a directory.

    Raises:
        FileNotFoundError: the dataset has neither a file nor a directory of this path.
    """

    def __init__(
        self,
        path: str,
        volume: OpenVolume,
        dataset: dlfs.Dataset | None = None,
        base: str = "",
        inner: bytes = b"",
    ) -> None:
        self.path = path
        self.volume = volume
        self.dataset = dataset
        self.base = base
        self.inner = inner
        self.index = -1
        if dataset is not None and inner:
            self.index = int(dataset.index_of([inner])[0])
            if self.index < 0 and not dataset.directory.is_directory(inner):
                raise not_found(path)

    @property
    def is_directory(self) -> bool:
        """True for a directory."""
        return self.index < 0

    @property
    def created(self) -> datetime:
        """Creation time of the dataset or, for the root directory, of the volume; UTC."""
        described = self.dataset.info if self.dataset is not None else self.volume.volume.info()
        return described.created

    def describe_directory(self, path: str) -> dict[str, Any]:
        """Return fsspec's info of a directory in the same dataset."""
        created_s = self.created.timestamp()
        return {"name": path, "size": 0, "type": "directory", "mtime": created_s}

    def describe_files(self, paths: Iterable[str], indices: Any) -> list[dict[str, Any]]:
        """Return fsspec's info of files.

        Args:
            paths: paths in the file system.
            indices: indices of their samples, ``int64[n_paths]``.
        """
        assert self.dataset is not None
        created_s, tag = self.created.timestamp(), self.dataset.uuid.hex
        lengths = self.dataset.lengths(indices).tolist()
        return [
            {
                "name": path,
                "size": size,
                "type": "file",
                "mtime": created_s,
                "index": index,
                "ETag": f"{tag}-{index}",
            }
            for path, size, index in zip(paths, lengths, indices.tolist(), strict=True)
        ]

    def describe_children(self) -> list[dict[str, Any]]:
        """Return fsspec's info of all entries of a directory, in path order."""
        assert self.dataset is not None
        children = self.dataset.children(self.inner)
        paths = [self.path + "/" + text_path(child.name) for child in children]
        files = [at for at, child in enumerate(children) if not child.is_directory]
        indices = np.array([children[at].first_index for at in files], np.int64)
        described = iter(self.describe_files([paths[at] for at in files], indices))
        return [
            self.describe_directory(path) if child.is_directory else next(described)
            for path, child in zip(paths, children, strict=True)
        ]

    def describe_tree(self, with_directories: bool) -> list[dict[str, Any]]:
        """Return fsspec's info of all files below a directory, and of directories on request."""
        assert self.dataset is not None
        first, last = self.dataset.directory.subtree_range(self.inner)
        raw = self.dataset.paths(first, last - first)
        paths = [f"{self.base}/{text_path(one)}" for one in raw]
        found = self.describe_files(paths, np.arange(first, last))
        if with_directories:
            empty = self.dataset.directory.empty_directories(self.inner)
            paths += [f"{self.base}/{text_path(one)}/" for one in empty]
            found += [self.describe_directory(path) for path in directories(paths, self.path)]
        return found


def directories(names: Iterable[str], root: str) -> Iterator[str]:
    """Yield the directories of some file paths, from ``root`` on, each once.

    A path that ends with a slash is that of a directory.
    """
    yield root
    seen = {root}
    for name in names:
        parent = name.rpartition("/")[0]
        while parent not in seen:
            seen.add(parent)
            yield parent
            parent = parent.rpartition("/")[0]


def not_found(path: str) -> FileNotFoundError:
    """Return the error of a path that does not exist."""
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


def raw_path(path: str) -> bytes:
    """Encode a path as datasets store it."""
    return path.encode("utf-8", "surrogateescape")


def text_path(raw: bytes) -> str:
    """Decode a path for Python's users, as ``os.fsdecode``."""
    return raw.decode("utf-8", "surrogateescape")
