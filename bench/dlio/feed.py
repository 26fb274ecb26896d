"""Decoded batches of a DLFS dataset, some of them in advance, for the plug-in of DLIO.

This module does not depend on DLIO. A thread takes batches in the epoch's order, up to
``lookahead`` of them before the caller needs them. Other threads decode their samples as DLIO's own
readers do. Below that, DLFS reads ahead by itself.

Threads: one thread iterates; several call the decoder at once.
"""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

import dlfs
from dlfs.adapters.tf import example_parser

if TYPE_CHECKING:
    from typing_extensions import Buffer

Decoder = Callable[[Sequence[memoryview]], None]
"""Decodes samples and discards the result, as DLIO's readers do: DLIO trains on a made-up image."""

TRAIN = b"train/"
VOLUME, DATASET = "DLFS_DLIO_VOLUME", "DLFS_DLIO_DATASET"
"""Environment variables with the URI and the name of the plug-in's dataset."""


def decode_jpeg(samples: Sequence[memoryview]) -> None:
    """Decode the pixels of each image."""
    from PIL import Image

    for sample in samples:
        np.asarray(Image.open(io.BytesIO(sample)))


class MemoryFile(io.RawIOBase):
    """A file over memory. Unlike `io.BytesIO`, it does not copy the memory first."""

    def __init__(self, memory: memoryview) -> None:
        self._memory, self._at = memory, 0

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._memory)}[whence]
        self._at = origin + offset
        return self._at

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer) -> int:
        target = memoryview(buffer).cast("B")
        found = self._memory[self._at : self._at + len(target)]
        target[: len(found)] = found
        self._at += len(found)
        return len(found)


def decode_npz(samples: Sequence[memoryview]) -> None:
    """Decode the array ``x`` of each archive."""
    for sample in samples:
        with io.BufferedReader(MemoryFile(sample), 1 << 18) as file:
            np.load(file, allow_pickle=True)["x"]


@cache
def _record_parser() -> Callable[[Sequence[memoryview]], object]:
    """Return a parser of a batch of the features that DLIO's reader of TFRecords parses."""
    import tensorflow

    return example_parser(
        {
            "image": tensorflow.io.FixedLenFeature([], tensorflow.string),
            "size": tensorflow.io.FixedLenFeature([], tensorflow.int64),
        }
    )


DECODERS: dict[str, Decoder] = {
    "jpeg": decode_jpeg,
    "npz": decode_npz,
    "tfrecord": lambda records: _record_parser()(records),
}


def training_samples(dataset: dlfs.Dataset) -> np.ndarray | None:
    """Return a mask of the samples to train on, ``bool[n_samples]``; None for records: all."""
    first, last = dataset.lower_bound(TRAIN), dataset.lower_bound(TRAIN[:-1] + b"0")
    if first == last:
        return None
    mask = np.zeros(len(dataset), bool)
    mask[first:last] = True
    return mask


class Feed:
    """Epochs of decoded batches.

    Args:
        dataset: open dataset, which the caller closes.
        batch_size: samples of a batch, 1 and up.
        decode: decoder; threads call it with some of a batch's samples.
        seed: seed of the order.
        rank: rank of this process, 0..world_size-1.
        world_size: number of ranks that share an epoch.
        threads: number of decoding threads, 1 and up.
        lookahead: number of batches begun before the caller needs them, 1 and up.
    """

    def __init__(
        self,
        dataset: dlfs.Dataset,
        batch_size: int,
        decode: Decoder,
        *,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        threads: int = 1,
        lookahead: int = 2,
    ) -> None:
        self._dataset = dataset
        self._batch_size = batch_size
        self._decode = decode
        self._seed, self._rank, self._world_size = seed, rank, world_size
        self._threads, self._lookahead = threads, lookahead
        self._where = training_samples(dataset)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="decode")

    def epoch(self, number: int) -> Iterator[int]:
        """Decode an epoch's full batches in a random order; yield the samples of each."""
        batches = self._dataset.batches(
            self._batch_size,
            seed=self._seed,
            epoch=number,
            rank=self._rank,
            world_size=self._world_size,
            where=self._where,
            drop_last=True,
        )
        with batches, ThreadPoolExecutor(1, thread_name_prefix="ahead") as ahead:
            begun = deque(ahead.submit(self._take, batches) for _ in range(self._lookahead))
            try:
                while count := begun.popleft().result():
                    begun.append(ahead.submit(self._take, batches))
                    yield count
            finally:  # also if the caller leaves the epoch early
                for future in begun:
                    future.cancel()

    def _take(self, batches: dlfs.Epoch) -> int:
        """Decode the next batch; return its number of samples, 0 after the last one."""
        batch = next(batches, None)
        if batch is None:
            return 0
        with batch:
            samples = list(batch)
            size = -(-len(samples) // self._threads)
            parts = [samples[first : first + size] for first in range(0, len(samples), size)]
            list(self._pool.map(self._decode, parts))
            return len(samples)

    def close(self) -> None:
        """End the threads. Idempotent."""
        self._pool.shutdown(cancel_futures=True)
