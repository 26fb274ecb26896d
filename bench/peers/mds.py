"""MosaicML Streaming: MDS shards, at random by ``dataset[i]`` and in the library's own shuffle.

Shards have the default size, no compression and no hashes. A PyTorch `DataLoader` with one worker a
core reads the library's shuffle, as its guides do. A random batch is ``dataset[indices]``, the list
form of random access in its documentation.

An open data set has its state in shared memory and in lock files of /tmp, under the first free
number. Two processes that look for a number at the same time find the same one and fail, so a lock
lets one process open at a time. The library frees the memory when the process ends, and never
removes the lock files. This adapter releases both with the data set, so that one process can open
many.
"""

from __future__ import annotations

import atexit
import fcntl
import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from bench.datasets import Source
from bench.errors import Unavailable
from bench.peers.packages import (
    DATA,
    INDEX,
    SHARD_BYTES,
    SLOWLY_WRITTEN_MAX,
    collate,
    needed,
    workers,
)
from bench.peers.peer import Buffer, Indices, Peer, Reader

NAME = "shards"
LOCK = "lock"
BLOCK_SAMPLES = 1 << 18
"""Distance within which the library shuffles samples: its default."""
ORDER = f"shards, then samples within {BLOCK_SAMPLES} of each other (py1e)"

_torchvision_operators: Any = None


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "w", encoding="ascii") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _discard(dataset: Any) -> None:
    """Release a data set's shared memory as the library does at exit; remove its lock files."""
    for memory in (
        dataset._shared_barrier._arr.shm,
        dataset._next_epoch.arr.shm,
        dataset._cache_usage.arr.shm,
        dataset._shard_states.shm,
        dataset._shard_access_times.shm,
        dataset._locals_shm,
    ):
        memory.cleanup()
        atexit.unregister(memory.cleanup)
    for path in (dataset._shared_barrier.filelock_path, dataset._cache_filelock_path):
        if os.path.exists(path):
            os.unlink(path)


def write_shards(source: Source, folder: Path, shard_bytes: int) -> None:
    """Write samples with their indices as shards of about a size."""
    columns = {INDEX: "int", DATA: "bytes"}
    with streaming().MDSWriter(out=str(folder), columns=columns, size_limit=shard_bytes) as writer:
        for index, _, data in source:
            writer.write({INDEX: index, DATA: data})


class Mds(Peer):
    """MosaicML Streaming from local shards, written by `MDSWriter`."""

    name = "mds"
    about = "StreamingDataset: dataset[indices]; shuffle=True in a DataLoader (Streaming's guides)"
    packages = ("mosaicml-streaming", "torch")
    samples_max = SLOWLY_WRITTEN_MAX

    def prepare(self, source: Source, folder: Path) -> None:
        write_shards(source, folder / NAME, SHARD_BYTES)

    def open(self, folder: Path) -> Reader:
        package = streaming()
        opened: list[Any] = []

        def dataset(**options: Any) -> Any:
            with _locked(folder / LOCK):
                return package.StreamingDataset(
                    local=str(folder / NAME), shuffle_block_size=BLOCK_SAMPLES, **options
                )

        def read(indices: Any) -> list[Buffer]:
            if not opened:
                opened.append(dataset(batch_size=len(indices)))
            return [sample[DATA] for sample in opened[0][list(indices)]]

        def epoch(seed: int, batch: int) -> Generator[tuple[Indices, list[bytes]], None, None]:
            shuffled = dataset(batch_size=batch, shuffle=True, shuffle_seed=seed)
            try:
                yield from needed("torch.utils.data").DataLoader(
                    shuffled, batch_size=batch, num_workers=workers(), collate_fn=collate
                )
            finally:
                _discard(shuffled)

        def release() -> None:
            for one in opened:
                _discard(one)

        return Reader(read, epoch, release, ORDER)


def streaming() -> Any:
    """Import the package.

    It imports torchvision for image data sets. PyPI's torchvision has operators for CUDA and cannot
    be imported next to a PyTorch without CUDA. Defining two of these operators is enough.
    """
    global _torchvision_operators  # PyTorch removes the operators with the object
    torch = needed("torch")
    try:
        plain = torch.version.cuda is None and "+" not in metadata.version("torchvision")
    except metadata.PackageNotFoundError as error:
        raise Unavailable("torchvision is missing: make bench installs it") from error
    if plain and _torchvision_operators is None:
        _torchvision_operators = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            _torchvision_operators.define(
                f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            )
    return needed("streaming", "mosaicml-streaming")


PEERS = (Mds(),)
