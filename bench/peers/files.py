"""One file a sample: on the file system itself, and through PyTorch's DataLoader."""

from __future__ import annotations

import os
from collections.abc import Generator
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.datasets import Source, write_files
from bench.peers.packages import needed
from bench.peers.peer import GLOBAL, Joined, Peer, Reader

FILES_MAX = 40_000


def write_listing(source: Source, folder: Path) -> None:
    """Write the path and length of each sample, as a trainer's manifest does."""
    paths = (source.path(index) for index in range(len(source)))
    (folder / "paths").write_bytes(b"".join(path + b"\0" for path in paths))
    np.save(folder / "lengths.npy", source.lengths)


class FileReader:
    """Opens, reads and closes a file for each sample of a listing: three system calls."""

    def __init__(self, folder: Path, root: Path) -> None:
        top = os.fsencode(root) + b"/"
        self._paths = [top + path for path in (folder / "paths").read_bytes().split(b"\0")[:-1]]
        self._lengths: list[int] = np.load(folder / "lengths.npy").tolist()

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> bytes:
        descriptor = os.open(self._paths[index], os.O_RDONLY)
        try:
            return os.read(descriptor, self._lengths[index])
        finally:
            os.close(descriptor)


def reader_of_files(folder: Path, root: Path) -> Reader:
    """Return a reader of the files below a root folder whose listing is in a folder."""
    files = FileReader(folder, root)
    return Reader(lambda indices: [files[index] for index in indices])


class Files(Peer):
    """Plain files on the file system of the data."""

    name = "files"
    about = "os.open, os.read of the exact length, os.close for each file, one thread"
    samples_max = FILES_MAX

    def prepare(self, source: Source, folder: Path) -> None:
        write_files(source, folder / "tree")
        write_listing(source, folder)

    def open(self, folder: Path) -> Reader:
        return reader_of_files(folder, folder / "tree")


# ---- DataLoader ----------------------------------------------------------------------------------


class _Samples(FileReader):
    """The data set that workers read: an item is a sample with its index."""

    def __getitem__(self, index: int) -> tuple[int, bytes]:  # type: ignore[override]
        return index, super().__getitem__(index)


def _collate(items: list[tuple[int, bytes]]) -> tuple[Any, Any, Any]:
    """Put all bytes into one tensor, which a worker passes to the trainer in shared memory."""
    import torch

    data = bytearray(b"".join([data for _, data in items])) or bytearray(1)
    offsets = torch.tensor([0, *accumulate(len(data) for _, data in items)])
    indices = torch.tensor([index for index, _ in items])
    return indices, offsets, torch.frombuffer(data, dtype=torch.uint8)


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
        torch = needed("torch")
        samples = _Samples(folder, folder / "tree")

        def epoch(
            seed: int, batch: int
        ) -> Generator[tuple[NDArray[np.integer], Joined], None, None]:
            loader = torch.utils.data.DataLoader(
                samples,
                batch_size=batch,
                shuffle=True,
                num_workers=self.workers,
                collate_fn=_collate,
                generator=torch.Generator().manual_seed(seed),
            )
            for indices, offsets, data in loader:
                yield indices.numpy(), Joined(offsets.numpy(), memoryview(data.numpy()))

        return Reader(epoch=epoch, own_order=GLOBAL)


PEERS = (Files(), Loader(0), Loader(2))
