"""Volumes as trees of files: which path names what, and what is known of it.

What a mount shows, for adapters that speak of files: the newest version of every dataset under its
name, ``NAME@VERSION`` for others, below it the samples as files and the parts of their paths as
directories. Volumes are opened once in a process, whoever asks, and closed with their last user.

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
    """A volume and those of its datasets that were used. Any threads."""

    def __init__(self, uri: str, options: tuple[int | None, int, dlfs.Engine]) -> None:
        memory_bytes, depth, engine = options
        self.volume = (
            dlfs.connect(uri)
            if uri.startswith("unix:")
            else dlfs.open(uri, memory_bytes=memory_bytes, depth=depth, engine=engine)
        )
        self._datasets: dict[str, dlfs.Dataset] = {}

    def names(self) -> list[str]:
        """Of the datasets."""
        return sorted({info.name for info in self.volume.datasets()})

    def dataset(self, name: str) -> dlfs.Dataset | None:
        """The newest version of a dataset, or with ``NAME@VERSION`` that one; None if none."""
        dataset = self._datasets.get(name)
        if dataset is None:
            if name not in self.volume:
                self.volume.refresh()
            if name not in self.volume:
                return None
            dataset = self._datasets.setdefault(name, self.volume.dataset(name))
        return dataset

    def refresh(self) -> None:
        """See the newest generation, and the newest versions."""
        self.volume.refresh()
        self._datasets.clear()


_VOLUMES: weakref.WeakValueDictionary[tuple[Any, ...], OpenVolume] = weakref.WeakValueDictionary()
"""What the file systems of all threads have open."""


def shared_volume(uri: str, options: tuple[int | None, int, dlfs.Engine]) -> OpenVolume:
    """A volume that the process may have open already.

    Args:
        uri: what ``dlfs.open`` takes, or ``dlfs.connect`` (``unix:PATH``).
        options: memory in bytes, depth and engine; a service has its own.

    Raises:
        DlfsError: as ``dlfs.open`` and ``dlfs.connect``.
    """
    volume = _VOLUMES.get((uri, options))
    if volume is None:  # two threads may both open it; the first one's is kept
        volume = _VOLUMES.setdefault((uri, options), OpenVolume(uri, options))
    return volume


class Node:
    """A file or a directory.

    Attributes:
        path: as the file system names it.
        volume: that it is on.
        dataset: that it is in; None for the volume's own directory.
        base: the path of the dataset's directory.
        inner: its path inside of the dataset.
        index: of a file; -1 for a directory.
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

    @property
    def is_directory(self) -> bool:
        """Whether it is one."""
        return self.index < 0

    @property
    def created(self) -> datetime:
        """When the dataset was made or, of a volume, the volume; UTC."""
        described = self.dataset.info if self.dataset is not None else self.volume.volume.info()
        return described.created

    def range(self) -> tuple[int, int]:
        """Return the range of indices first..last-1 below a directory of a dataset."""
        assert self.dataset is not None
        return self.dataset.directory.subtree_range(self.inner)

    def describe_directory(self, path: str) -> dict[str, Any]:
        """What fsspec calls the info of a directory in the same dataset."""
        made = self.created.timestamp()
        return {"name": path, "size": 0, "type": "directory", "mtime": made}

    def describe_files(self, paths: Iterable[str], indices: Any) -> list[dict[str, Any]]:
        """Likewise of files.

        Args:
            paths: as the file system names them.
            indices: ``int64[n_paths]``, of their samples.
        """
        assert self.dataset is not None
        made, tag = self.created.timestamp(), self.dataset.uuid.hex
        lengths = self.dataset.lengths(indices).tolist()
        return [
            {
                "name": path,
                "size": size,
                "type": "file",
                "mtime": made,
                "index": index,
                "ETag": f"{tag}-{index}",
            }
            for path, size, index in zip(paths, lengths, indices.tolist(), strict=True)
        ]

    def describe_children(self) -> list[dict[str, Any]]:
        """Likewise of all that a directory of a dataset has in it, in path order."""
        assert self.dataset is not None
        children = self.dataset.children(self.inner)
        paths = [self.path + "/" + text_path(child.name) for child in children]
        first = np.array([child.first_index for child in children], np.int64)
        found = self.describe_files(paths, first)
        for at, child in enumerate(children):
            if child.is_directory:
                found[at] = self.describe_directory(paths[at])
        return found

    def describe_tree(self, with_directories: bool) -> list[dict[str, Any]]:
        """Likewise of all files below a directory, and of the directories if they are wanted."""
        assert self.dataset is not None
        first, last = self.range()
        raw = self.dataset.paths(first, last - first)
        paths = [f"{self.base}/{text_path(one)}" for one in raw]
        found = self.describe_files(paths, np.arange(first, last))
        if with_directories:
            found += [self.describe_directory(path) for path in directories(paths, self.path)]
        return found


def find_inside(node: Node) -> Node:
    """Find out whether a path of a dataset is a file or a directory.

    Raises:
        FileNotFoundError: neither.
    """
    assert node.dataset is not None
    if node.inner:
        node.index = int(node.dataset.index_of([node.inner])[0])
        first, last = (0, 1) if node.index >= 0 else node.range()
        if first >= last:
            raise missing(node.path)
    return node


def directories(names: Iterable[str], root: str) -> Iterator[str]:
    """The directories that sorted names of files lie in, from ``root`` on, each once."""
    yield root
    seen = {root}
    for name in names:
        parent = name.rpartition("/")[0]
        while parent not in seen:
            seen.add(parent)
            yield parent
            parent = parent.rpartition("/")[0]


def missing(path: str) -> FileNotFoundError:
    """The error of a path that names nothing."""
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


def raw_path(path: str) -> bytes:
    """A path as datasets have it."""
    return path.encode("utf-8", "surrogateescape")


def text_path(raw: bytes) -> str:
    """A path for Python's users, as ``os.fsdecode`` would."""
    return raw.decode("utf-8", "surrogateescape")
