"""MosaicML Streaming: MDS shards, at random by ``dataset[i]`` and in the library's own shuffle.

Shards of the default size without compression or hashes. Its shuffle is read by a PyTorch
`DataLoader` with one worker a core, as its guides do. A random batch is ``dataset[indices]``, the
list form of random access that its documentation shows.

A data set that is opened keeps its state in shared memory and lock files of /tmp, under the first
number that is free. Two processes that look for one at the same time find the same and fail, so a
lock of ours lets them in one at a time. The library frees the memory when the process ends, and
the lock files never; here both go with the data set, so that one process can open many.
"""

from __future__ import annotations

import atexit
import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from bench.machine import Unavailable
from bench.peers.packages import SHARD_BYTES, SLOWLY_WRITTEN_MAX, needed, workers
from bench.peers.peer import Buffer, Peer, Source

INDEX, DATA = "index", "data"
NAME = "shards"
LOCK = "lock"
BLOCK_SAMPLES = 1 << 18
"""The library's default; it shuffles samples this far."""

_torchvision_operators: Any = None


class MdsReader:
    """A folder of shards."""

    own_order = f"shards, then samples within {BLOCK_SAMPLES} of each other (py1e)"

    def __init__(self, package: Any, folder: Path) -> None:
        self._package = package
        self._folder = folder
        self._dataset: Any = None

    def read(self, indices: Sequence[int]) -> list[Buffer]:
        """One call; the library reads sample after sample."""
        if self._dataset is None:
            self._dataset = self._opened(batch_size=len(indices))
        return [sample[DATA] for sample in self._dataset[list(indices)]]

    def epoch(self, seed: int, batch: int) -> Iterator[list[tuple[int, Buffer]]]:
        """A pass in the shuffle of a seed, by workers."""
        dataset = self._opened(batch_size=batch, shuffle=True, shuffle_seed=seed)
        try:
            yield from needed("torch.utils.data").DataLoader(
                dataset, batch_size=batch, num_workers=workers(), collate_fn=_pairs
            )
        finally:
            _discard(dataset)

    def close(self) -> None:
        """Free what the library shares between processes."""
        if self._dataset is not None:
            _discard(self._dataset)
            self._dataset = None

    def _opened(self, **options: Any) -> Any:
        with _locked(self._folder / LOCK):
            return self._package.StreamingDataset(
                local=str(self._folder / NAME), shuffle_block_size=BLOCK_SAMPLES, **options
            )


def _pairs(samples: list[dict[str, Any]]) -> list[tuple[int, bytes]]:
    return [(int(sample[INDEX]), sample[DATA]) for sample in samples]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "w", encoding="ascii") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _discard(dataset: Any) -> None:
    """Do now what the library does when the process ends, and remove its lock files."""
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


class Mds:
    """MosaicML Streaming from local shards."""

    name = "mds"
    about = "StreamingDataset: dataset[indices]; shuffle=True in a DataLoader (Streaming's guides)"
    packages = ("mosaicml-streaming", "torch")
    random = True
    samples_max = SLOWLY_WRITTEN_MAX

    def prepare(self, source: Source, folder: Path) -> None:
        """Write shards with `MDSWriter`."""
        columns = {INDEX: "int", DATA: "bytes"}
        with _streaming().MDSWriter(
            out=str(folder / NAME), columns=columns, size_limit=SHARD_BYTES
        ) as writer:
            for index, _, data in source:
                writer.write({INDEX: index, DATA: data})

    def open(self, folder: Path) -> MdsReader:
        """Import the library; data sets are opened for reading at random, and for each epoch."""
        return MdsReader(_streaming(), folder)


def _streaming() -> Any:
    """The package.

    It imports torchvision for image data sets. The one of PyPI holds operators for CUDA, without
    which it does not import beside a PyTorch without CUDA; that two of them are known is enough.
    """
    global _torchvision_operators  # PyTorch forgets them with the object
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


PEERS: tuple[Peer, ...] = (Mds(),)
