"""All samples one after the other in one file, with their offsets in another: no format at all."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.datasets import Source
from bench.peers.peer import Peer, Reader, Rows


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
        offsets = np.load(folder / "offsets.npy")
        starts, lengths = offsets[:-1].tolist(), np.diff(offsets).tolist()
        descriptor = os.open(folder / "data", os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)

        def read(indices: Any) -> list[bytes]:
            return [os.pread(descriptor, lengths[index], starts[index]) for index in indices]

        return Reader(read, release=lambda: os.close(descriptor))


class Memmap(Peer):
    """numpy.memmap on the same packed file: rows of one length by one index, others one by one."""

    name = "memmap"
    about = (
        "numpy.memmap over one packed file with offsets, madvise(RANDOM), samples copied out "
        "(numpy.org/doc/stable/reference/generated/numpy.memmap.html)"
    )
    packages = ("numpy",)
    data_of = "pread"

    def open(self, folder: Path) -> Reader:
        offsets: NDArray[np.int64] = np.load(folder / "offsets.npy")
        data: Any = np.memmap(folder / "data", np.uint8, "r")
        data._mmap.madvise(mmap.MADV_RANDOM)
        lengths = np.diff(offsets)
        if len(set(lengths.tolist())) == 1:
            rows = np.asarray(data).reshape(len(lengths), -1)
            return Reader(lambda indices: Rows(rows[indices]), takes_arrays=True)

        def read(indices: NDArray[np.int64]) -> list[bytes]:
            view = memoryview(data)
            starts, ends = offsets[indices].tolist(), offsets[indices + 1].tolist()
            return [bytes(view[start:end]) for start, end in zip(starts, ends, strict=True)]

        return Reader(read, takes_arrays=True)


PEERS = (Pread(), Memmap())
