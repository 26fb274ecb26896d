"""HDF5 by h5py: contiguous datasets, because chunks would be read whole for every sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from bench.datasets import WRITE_BYTES, Source
from bench.peers.packages import needed
from bench.peers.peer import Buffer, Peer, Reader


class Hdf5(Peer):
    """HDF5: samples of one length are rows of a dataset; others are slices of one long row.

    It reads one selection a sample: lists of rows must be sorted in h5py, and are slower.
    """

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
            rows = file.create_dataset("data", shape, np.uint8)
            position = 0
            for first, last in source.ranges(WRITE_BYTES):
                data = b"".join(map(source.data, range(first, last)))
                part = np.frombuffer(data, np.uint8).reshape(-1, *shape[1:])
                rows[position : position + len(part)] = part
                position += len(part)

    def open(self, folder: Path) -> Reader:
        file = needed("h5py").File(folder / "data.h5", "r")
        data, offsets = file["data"], file["offsets"][:].tolist() if "offsets" in file else []

        def read(indices: Any) -> list[Buffer]:
            if not offsets:
                return [data[index].data for index in indices]
            return [data[offsets[index] : offsets[index + 1]].data for index in indices]

        return Reader(read, release=file.close)


PEERS = (Hdf5(),)
