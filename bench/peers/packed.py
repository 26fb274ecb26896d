"""All samples one after the other in one file, with their offsets in another: no format at all."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.datasets import Source
from bench.peers.peer import Peer, Reader, Samples


class PreadReader(Reader):
    """Reads each sample by ``os.pread``."""

    def __init__(self, folder: Path) -> None:
        offsets = np.load(folder / "offsets.npy")
        self._starts: list[int] = offsets[:-1].tolist()
        self._lengths: list[int] = np.diff(offsets).tolist()
        self._descriptor = os.open(folder / "data", os.O_RDONLY)
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_RANDOM)

    def read(self, indices: Any) -> list[bytes]:
        descriptor, starts, lengths = self._descriptor, self._starts, self._lengths
        return [os.pread(descriptor, lengths[index], starts[index]) for index in indices]

    def close(self) -> None:
        os.close(self._descriptor)


class Rows:
    """A batch of samples of one length: the rows of an array."""

    def __init__(self, rows: NDArray[np.uint8]) -> None:
        self._rows = rows
        self.lengths = np.full(len(rows), rows.shape[1], np.int64)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, position: int) -> memoryview:
        return memoryview(self._rows[position])


class MapReader(Reader):
    """Copies samples out of a mapped file: rows of one length by one index, others one by one."""

    takes_arrays = True

    def __init__(self, folder: Path) -> None:
        self._offsets: NDArray[np.int64] = np.load(folder / "offsets.npy")
        self._map: Any = np.memmap(folder / "data", np.uint8, "r")
        self._map._mmap.madvise(mmap.MADV_RANDOM)
        lengths = np.diff(self._offsets)
        self._rows: NDArray[np.uint8] | None = None
        if len(set(lengths.tolist())) == 1:
            self._rows = np.asarray(self._map).reshape(len(lengths), -1)

    def read(self, indices: Any) -> Sequence[bytes] | Samples:
        if self._rows is not None:
            return Rows(self._rows[indices])
        view = memoryview(self._map)
        starts = self._offsets[indices].tolist()
        ends = self._offsets[np.asarray(indices) + 1].tolist()
        return [bytes(view[start:end]) for start, end in zip(starts, ends, strict=True)]

    def close(self) -> None:
        self._rows = self._map = None


class Pread(Peer):
    """pread on one packed file: ``data``, with ``offsets.npy``, ``int64[n + 1]``."""

    name = "pread"
    about = "os.pread of each sample from one packed file, posix_fadvise(RANDOM), one thread"

    def prepare(self, source: Source, folder: Path) -> None:
        offsets = np.zeros(len(source) + 1, np.int64)
        np.cumsum(source.lengths, out=offsets[1:])
        np.save(folder / "offsets.npy", offsets)
        with open(folder / "data", "wb", buffering=1 << 20) as file:
            for _, _, data in source:
                file.write(data)

    def open(self, folder: Path) -> Reader:
        return PreadReader(folder)


class Memmap(Peer):
    """numpy.memmap on the same packed file."""

    name = "memmap"
    about = (
        "numpy.memmap over one packed file with offsets, madvise(RANDOM), samples copied out "
        "(numpy.org/doc/stable/reference/generated/numpy.memmap.html)"
    )
    packages = ("numpy",)
    data_of = "pread"

    def open(self, folder: Path) -> Reader:
        return MapReader(folder)


PEERS = (Pread(), Memmap())
