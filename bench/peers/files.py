"""One file a sample: on the file system itself, and through PyTorch's DataLoader."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.datasets import Source, write_files
from bench.errors import Unavailable
from bench.peers.peer import GLOBAL, Peer, Reader

FILES_MAX = 40_000


def write_listing(source: Source, folder: Path) -> None:
    """Write the path and length of each sample, as a trainer's manifest does."""
    paths = (source.path(index) for index in range(len(source)))
    (folder / "paths").write_bytes(b"".join(path + b"\0" for path in paths))
    np.save(folder / "lengths.npy", source.lengths)


class FilesReader(Reader):
    """Opens, reads and closes a file for each sample: three system calls.

    Args:
        folder: folder with the listing.
        root: root folder of the files.
    """

    def __init__(self, folder: Path, root: Path) -> None:
        top = os.fsencode(root) + b"/"
        self._paths = [top + path for path in (folder / "paths").read_bytes().split(b"\0")[:-1]]
        self._lengths: list[int] = np.load(folder / "lengths.npy").tolist()

    def __len__(self) -> int:
        return len(self._paths)

    def sample(self, index: int) -> bytes:
        """Read one sample."""
        descriptor = os.open(self._paths[index], os.O_RDONLY)
        try:
            return os.read(descriptor, self._lengths[index])
        finally:
            os.close(descriptor)

    def read(self, indices: Any) -> list[bytes]:
        return [self.sample(index) for index in indices]


class Files(Peer):
    """Plain files on the file system of the data."""

    name = "files"
    about = "os.open, os.read of the exact length, os.close for each file, one thread"
    samples_max = FILES_MAX

    def prepare(self, source: Source, folder: Path) -> None:
        write_files(source, folder / "tree")
        write_listing(source, folder)

    def open(self, folder: Path) -> Reader:
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
    """Put all bytes into one tensor, which a worker passes to the trainer in shared memory."""
    import torch

    data = bytearray(b"".join([data for _, data in items])) or bytearray(1)
    lengths = torch.tensor([len(data) for _, data in items])
    indices = torch.tensor([index for index, _ in items])
    return indices, lengths, torch.frombuffer(data, dtype=torch.uint8)


class LoaderReader(Reader):
    """PyTorch's DataLoader over plain files.

    Args:
        folder: folder of the files.
        workers: number of processes that read; 0: the trainer reads.
    """

    own_order = GLOBAL

    def __init__(self, folder: Path, workers: int) -> None:
        try:
            import torch.utils.data
        except ImportError as error:
            raise Unavailable("torch is not installed: make bench PACKAGES=torch") from error
        self._torch = torch
        self._samples = _Samples(FilesReader(folder, folder / "tree"))
        self._workers = workers

    def epoch(self, seed: int, batch: int) -> Iterator[TensorBatch]:
        loader = self._torch.utils.data.DataLoader(
            self._samples,
            batch_size=batch,
            shuffle=True,
            num_workers=self._workers,
            collate_fn=_collate,
            generator=self._torch.Generator().manual_seed(seed),
        )
        for indices, lengths, data in loader:
            yield TensorBatch(indices, lengths, data)


class Loader(Peer):
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

    def open(self, folder: Path) -> Reader:
        return LoaderReader(folder, self.workers)


PEERS = (Files(), Loader(0), Loader(2))
