"""HDF5 by h5py: contiguous datasets, because chunks would be read whole for every sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from bench.datasets import Source
from bench.peers.packages import needed
from bench.peers.peer import Buffer, Peer, Reader

WRITE_BYTES = 64 << 20
"""Bytes written at once."""


class Hdf5Reader(Reader):
    """Reads one selection a sample: lists of rows must be sorted in h5py, and are slower.

    Samples of one length are rows; others are slices of one long row.
    """

    def __init__(self, folder: Path) -> None:
        self._file = needed("h5py").File(folder / "data.h5", "r")
        self._data = self._file["data"]
        self._offsets: list[int] = []
        if "offsets" in self._file:
            self._offsets = self._file["offsets"][:].tolist()

    def read(self, indices: Any) -> list[Buffer]:
        data, offsets = self._data, self._offsets
        if not offsets:
            return [data[index].data for index in indices]
        return [data[offsets[index] : offsets[index + 1]].data for index in indices]

    def close(self) -> None:
        self._file.close()


class Hdf5(Peer):
    """HDF5: rows of one dataset, or one long row with offsets."""

    name = "hdf5"
    about = "contiguous uint8 dataset, one row (or slice) a sample by dataset[...] (docs.h5py.org)"
    packages = ("h5py",)

    def prepare(self, source: Source, folder: Path) -> None:
        lengths = source.lengths
        with needed("h5py").File(folder / "data.h5", "w", libver="latest") as file:
            if len(set(lengths.tolist())) == 1:
                shape: tuple[int, ...] = (len(source), int(lengths[0]))
            else:
                offsets = np.concatenate(([0], np.cumsum(lengths)))
                file.create_dataset("offsets", data=offsets)
                shape = (int(offsets[-1]),)
            _write(file.create_dataset("data", shape, np.uint8), shape, source)

    def open(self, folder: Path) -> Reader:
        return Hdf5Reader(folder)


def _write(dataset: Any, shape: tuple[int, ...], source: Source) -> None:
    """Write the samples one after the other, many at once."""
    pending: list[bytes] = []
    pending_bytes = position = 0
    for index, _, data in source:
        pending.append(data)
        pending_bytes += len(data)
        if pending_bytes >= WRITE_BYTES or index == len(source) - 1:
            rows = np.frombuffer(b"".join(pending), np.uint8).reshape(-1, *shape[1:])
            dataset[position : position + len(rows)] = rows
            position += len(rows)
            pending, pending_bytes = [], 0


PEERS = (Hdf5(),)
