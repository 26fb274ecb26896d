"""One file a sample: on the file system itself, through PyTorch's DataLoader."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.machine import Unavailable
from bench.peers.peer import GLOBAL, Reader, Source

FILES_MAX = 40_000


def write_tree(source: Source, root: Path) -> None:
    """Write samples as files in path order, as unpacking an archive would."""
    made: set[bytes] = set()
    for _, path, data in source:
        target = os.fsencode(root) + b"/" + path
        parent = os.path.dirname(target)
        if parent not in made:
            os.makedirs(parent, exist_ok=True)
            made.add(parent)
        with open(target, "wb", buffering=0) as file:
            file.write(data)


def write_listing(source: Source, folder: Path) -> None:
    """Keep which path is which sample, and its length, as a trainer's manifest does."""
    paths = (source.path(index) for index in range(len(source)))
    (folder / "paths").write_bytes(b"".join(path + b"\0" for path in paths))
    np.save(folder / "lengths.npy", source.lengths)


class FilesReader:
    """Opens, reads and closes a file for each sample: three calls.

    Args:
        folder: with the listing.
        root: of the files.
    """

    def __init__(self, folder: Path, root: Path) -> None:
        top = os.fsencode(root) + b"/"
        self._paths = [top + path for path in (folder / "paths").read_bytes().split(b"\0")[:-1]]
        self._lengths: list[int] = np.load(folder / "lengths.npy").tolist()

    def __len__(self) -> int:
        return len(self._paths)

    def sample(self, index: int) -> bytes:
        """One."""
        descriptor = os.open(self._paths[index], os.O_RDONLY)
        try:
            return os.read(descriptor, self._lengths[index])
        finally:
            os.close(descriptor)

    def read(self, indices: Sequence[int]) -> list[bytes]:
        """One after the other."""
        return [self.sample(index) for index in indices]

    def close(self) -> None:
        """Nothing is held."""


class Files:
    """Plain files on the file system of the data."""

    name = "files"
    about = "os.open, os.read of the exact length, os.close for each file, one thread"
    packages: tuple[str, ...] = ()
    random = True
    samples_max = FILES_MAX

    def prepare(self, source: Source, folder: Path) -> None:
        """A file each, and the listing."""
        write_tree(source, folder / "tree")
        write_listing(source, folder)

    def open(self, folder: Path) -> Reader:
        """Read the listing."""
        return FilesReader(folder, folder / "tree")


# ---- DataLoader ----------------------------------------------------------------------------------


class TensorBatch:
    """A batch that came as one tensor."""

    def __init__(self, indices: Any, lengths: Any, data: Any) -> None:
        self.indices: NDArray[np.int64] = indices.numpy()
        self.lengths: NDArray[np.int64] = lengths.numpy()
        self._data = memoryview(data.numpy())

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, position: int) -> memoryview:
        end = int(self.lengths[: position + 1].sum())
        return self._data[end - int(self.lengths[position]) : end]


class _Samples:
    """The data set that workers read: an item is a sample with its index."""

    def __init__(self, files: FilesReader) -> None:
        self._files = files

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[int, bytes]:
        return index, self._files.sample(index)


def _collate(items: list[tuple[int, bytes]]) -> tuple[Any, Any, Any]:
    """One tensor for all bytes, which goes from worker to trainer in shared memory."""
    import torch

    data = bytearray(b"".join([data for _, data in items])) or bytearray(1)
    lengths = torch.tensor([len(data) for _, data in items])
    indices = torch.tensor([index for index, _ in items])
    return indices, lengths, torch.frombuffer(data, dtype=torch.uint8)


class LoaderReader:
    """PyTorch's DataLoader over plain files.

    Args:
        folder: of the files.
        workers: processes that read; 0: the trainer itself.
    """

    own_order = GLOBAL

    def __init__(self, folder: Path, workers: int) -> None:
        try:
            import torch.utils.data
        except ImportError as error:
            raise Unavailable("torch is not installed: make bench PACKAGES=torch") from error
        self._data = torch.utils.data
        self._torch = torch
        self._samples = _Samples(FilesReader(folder, folder / "tree"))
        self._workers = workers

    def epoch(self, seed: int, batch: int) -> Iterator[TensorBatch]:
        """``shuffle=True``: a permutation of all samples."""
        loader = self._data.DataLoader(
            self._samples,
            batch_size=batch,
            shuffle=True,
            num_workers=self._workers,
            collate_fn=_collate,
            generator=self._torch.Generator().manual_seed(seed),
        )
        for indices, lengths, data in loader:
            yield TensorBatch(indices, lengths, data)

    def close(self) -> None:
        """Workers ended with their epoch."""


class Loader:
    """DataLoader with a number of workers."""

    packages = ("torch",)
    random = False
    data_of = "files"

    def __init__(self, workers: int) -> None:
        self.name = f"dataloader-{workers}"
        self.workers = workers
        self.about = (
            f"torch.utils.data.DataLoader(shuffle=True, num_workers={workers}) over the plain "
            "files; a batch is one tensor (pytorch.org/docs/stable/data.html)"
        )

    def prepare(self, source: Source, folder: Path) -> None:
        """Plain files."""
        Files().prepare(source, folder)

    def open(self, folder: Path) -> Reader:
        """Import PyTorch, read the listing."""
        return LoaderReader(folder, self.workers)


PEERS = (Files(), Loader(0), Loader(2))
