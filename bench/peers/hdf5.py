"""HDF5 by h5py: contiguous datasets, since chunks would be read whole for every sample."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.machine import Unavailable
from bench.peers.peer import Buffer, Reader, Source

PIECE_BYTES = 64 << 20
"""Written at once."""


def _package() -> Any:
    try:
        import h5py
    except ImportError as error:
        raise Unavailable("h5py is not installed: make bench installs it") from error
    return h5py


class Hdf5Reader:
    """Samples of one length are rows; else they are slices of one long row."""

    def __init__(self, folder: Path) -> None:
        self._file = _package().File(folder / "data.h5", "r")
        self._data = self._file["data"]
        self._offsets: list[int] = []
        if "offsets" in self._file:
            self._offsets = self._file["offsets"][:].tolist()

    def read(self, indices: Sequence[int]) -> list[Buffer]:
        """One selection a sample; h5py's lists of rows must be sorted, and are slower."""
        data, offsets = self._data, self._offsets
        if not offsets:
            return [data[index].data for index in indices]
        return [data[offsets[index] : offsets[index + 1]].data for index in indices]

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Hdf5:
    """HDF5."""

    name = "hdf5"
    about = "contiguous uint8 dataset, one row (or slice) a sample by dataset[...] (docs.h5py.org)"
    packages = ("h5py",)
    random = True

    def prepare(self, source: Source, folder: Path) -> None:
        """Rows, or one long row with offsets; written in pieces."""
        lengths = source.lengths
        same = len(set(lengths.tolist())) == 1
        with _package().File(folder / "data.h5", "w", libver="latest") as file:
            if same:
                shape: tuple[int, ...] = (len(source), int(lengths[0]))
            else:
                offsets = np.concatenate(([0], np.cumsum(lengths)))
                file.create_dataset("offsets", data=offsets)
                shape = (int(offsets[-1]),)
            dataset = file.create_dataset("data", shape, np.uint8)
            flat = _Flat(dataset, shape)
            for _, _, data in source:
                flat.add(data)
            flat.flush()

    def open(self, folder: Path) -> Reader:
        """Open read-only."""
        return Hdf5Reader(folder)


class _Flat:
    """Writes samples one behind the other, many at once."""

    def __init__(self, dataset: Any, shape: tuple[int, ...]) -> None:
        self._dataset, self._row_bytes = dataset, shape[1] if len(shape) == 2 else 0
        self._parts: list[bytes] = []
        self._held = self._at = 0

    def add(self, data: bytes) -> None:
        """The next sample."""
        self._parts.append(data)
        self._held += len(data)
        if self._held >= PIECE_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what is held."""
        piece = np.frombuffer(b"".join(self._parts), np.uint8)
        if self._row_bytes:
            piece = piece.reshape(-1, self._row_bytes)
        self._dataset[self._at : self._at + len(piece)] = piece
        self._at += len(piece)
        self._parts, self._held = [], 0


PEERS = (Hdf5(),)
