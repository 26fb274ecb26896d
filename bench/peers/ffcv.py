"""FFCV: a beton file of arrays, in FFCV's own random order.

FFCV has no wheel: pip compiles it against the C++ headers of OpenCV and libturbojpeg, so that it is
in no extra. FFCV batches arrays of one shape, such as samples of one length. Its `BytesField` has
no decoder that fills a batch: data sets of several lengths are refused.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.datasets import Source
from bench.errors import Unavailable
from bench.peers.packages import DATA, INDEX, workers
from bench.peers.peer import GLOBAL, Peer, Reader, Rows

NAME = "samples.beton"


def _epoch(
    path: Path, seed: int, batch: int
) -> Generator[tuple[NDArray[np.int64], Rows], None, None]:
    """Read all samples in random order, in memory that FFCV reuses for later batches."""
    from ffcv.fields.decoders import IntDecoder, NDArrayDecoder
    from ffcv.loader import Loader, OrderOption

    loader = Loader(
        str(path),
        batch_size=batch,
        num_workers=workers(),
        order=OrderOption.RANDOM,
        seed=seed,
        drop_last=False,
        pipelines={INDEX: [IntDecoder()], DATA: [NDArrayDecoder()]},
    )
    batches = iter(loader)
    try:
        for indices, data in batches:
            yield indices[:, 0], Rows(data)
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

    def open(self, folder: Path) -> Reader:
        _require()  # the first epoch compiles the pipeline
        return Reader(epoch=partial(_epoch, folder / NAME), own_order=GLOBAL)


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
