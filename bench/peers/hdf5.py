"""HDF5 by h5py: contiguous datasets, because chunks would be read whole for every sample."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.datasets import WRITE_BYTES, Source
from bench.peers.packages import needed
from bench.peers.peer import Buffer, Peer, Reader

ENDS = ".ends"
"""End of the name of a dataset with the ends of samples of different lengths."""


def write_rows(
    file: Any,
    name: str,
    dtype: Any,
    lengths: NDArray[np.int64],
    blocks: Iterable[NDArray[Any]],
    shape: tuple[int, ...] = (),
) -> None:
    """Write samples as a contiguous dataset: as rows if they have one length, else as slices.

    Args:
        file: an open HDF5 file.
        name: name of the dataset.
        dtype: type of the elements.
        lengths: length of each sample, in its first dimension.
        blocks: elements of whole samples, one or more at a time.
        shape: the other dimensions of a sample.
    """
    if len(set(lengths.tolist())) == 1:
        whole: tuple[int, ...] = (len(lengths), int(lengths[0]), *shape)
    else:
        whole = (int(lengths.sum()), *shape)
        file.create_dataset(name + ENDS, data=np.cumsum(lengths))
    rows = file.create_dataset(name, whole, dtype)
    position = 0
    for block in blocks:
        part = block.reshape(-1, *whole[1:])
        rows[position : position + len(part)] = part
        position += len(part)


class Rows:
    """The samples that `write_rows` wrote.

    It reads one selection a sample: lists of rows must be sorted in h5py, and are slower.
    """

    def __init__(self, file: Any, name: str) -> None:
        self._data = file[name]
        self._ends: list[int] = file[name + ENDS][:].tolist() if name + ENDS in file else []

    def __getitem__(self, index: int) -> NDArray[Any]:
        """Read one sample."""
        if not self._ends:
            found: NDArray[Any] = self._data[index]
        else:
            found = self._data[self._ends[index - 1] if index else 0 : self._ends[index]]
        return found


class Hdf5(Peer):
    """HDF5: samples of one length are rows of a dataset; others are slices of one long row."""

    name = "hdf5"
    about = "contiguous uint8 dataset, one row (or slice) a sample by dataset[...] (docs.h5py.org)"
    packages = ("h5py",)

    def prepare(self, source: Source, folder: Path) -> None:
        blocks = (
            np.frombuffer(b"".join(map(source.data, range(first, last))), np.uint8)
            for first, last in source.ranges(WRITE_BYTES)
        )
        with needed("h5py").File(folder / "data.h5", "w", libver="latest") as file:
            write_rows(file, "data", np.uint8, source.lengths, blocks)

    def open(self, folder: Path) -> Reader:
        file = needed("h5py").File(folder / "data.h5", "r")
        rows = Rows(file, "data")

        def read(indices: Any) -> list[Buffer]:
            return [rows[index].data for index in indices]

        return Reader(read, release=file.close)


PEERS = (Hdf5(),)
