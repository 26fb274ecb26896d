"""FFCV: a beton file of arrays, in FFCV's own random order.

FFCV has no wheel: pip compiles it against the C++ headers of OpenCV and libturbojpeg, so that it is
in no extra. FFCV batches arrays of one shape, such as samples of one length. Its `BytesField` has
no decoder that fills a batch: data sets of several lengths are refused.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.datasets import Source
from bench.errors import Unavailable
from bench.peers.packages import workers
from bench.peers.peer import GLOBAL, Peer, Reader

INDEX, DATA = "index", "data"
NAME = "samples.beton"


class FfcvSamples:
    """A batch of FFCV: one array, in memory that FFCV reuses for later batches."""

    def __init__(self, indices: NDArray[np.int64], data: NDArray[np.uint8]) -> None:
        self.indices: NDArray[np.integer] = indices[:, 0]
        self.lengths: NDArray[np.integer] = np.full(len(data), data.shape[1])
        self._data = data

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, position: int) -> memoryview:
        return self._data[position].data


class FfcvReader(Reader):
    """Reads a beton file in random order; the first epoch compiles the pipeline."""

    own_order = GLOBAL

    def __init__(self, path: Path) -> None:
        self._path = path

    def epoch(self, seed: int, batch: int) -> Iterator[FfcvSamples]:
        from ffcv.fields.decoders import IntDecoder, NDArrayDecoder
        from ffcv.loader import Loader, OrderOption

        batches = iter(
            Loader(
                str(self._path),
                batch_size=batch,
                num_workers=workers(),
                order=OrderOption.RANDOM,
                seed=seed,
                drop_last=False,
                pipelines={INDEX: [IntDecoder()], DATA: [NDArrayDecoder()]},
            )
        )
        try:
            for indices, data in batches:
                yield FfcvSamples(indices, data)
        finally:
            batches.close()
            batches.join()


class Arrays:
    """The samples in the form that FFCV's writer takes: indexed tuples of index and array."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> tuple[int, NDArray[np.uint8]]:
        return int(index), np.frombuffer(self._source.data(int(index)), np.uint8)


class Ffcv(Peer):
    """FFCV from a beton file, cached by the kernel, written by `DatasetWriter`."""

    name = "ffcv"
    about = "Loader(order=RANDOM) of an NDArrayField (FFCV documentation, Making dataloaders)"
    packages = ("ffcv", "torch")
    random = False

    def prepare(self, source: Source, folder: Path) -> None:
        _require()
        from ffcv.fields import IntField, NDArrayField
        from ffcv.writer import DatasetWriter

        lengths = set(source.lengths.tolist())
        if len(lengths) != 1 or 0 in lengths:
            raise Unavailable("ffcv: it batches arrays of one shape; samples differ in length")
        field = NDArrayField(shape=(lengths.pop(),), dtype=np.dtype(np.uint8))
        fields = {INDEX: IntField(), DATA: field}
        writer = DatasetWriter(str(folder / NAME), fields, num_workers=workers())
        writer.from_indexed_dataset(Arrays(source))

    def open(self, folder: Path) -> FfcvReader:
        _require()
        return FfcvReader(folder / NAME)


def _require() -> None:
    """Import the package, or say how to get it."""
    os.environ["TQDM_DISABLE"] = "1"  # its writer draws a progress bar
    try:
        import ffcv  # noqa: F401
    except ImportError as error:
        raise Unavailable(
            f"ffcv: {error}: it has no wheel; make bench compiles it where pkg-config finds opencv4"
            " and libturbojpeg (apt-get install libopencv-dev libturbojpeg0-dev g++)"
        ) from error


PEERS = (Ffcv(),)
