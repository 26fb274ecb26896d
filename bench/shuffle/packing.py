"""The shuffle of an import whose source has one class after the other, at 16 times its window.

The volume is real: samples are added class by class, as from an archive, and packed in one pass or
in two; or they are added in runs of a sixteenth of a chunk, whose order is drawn, as from arrays.
Then an epoch of chunk shuffle is measured by the classes of its samples, and by where they
were in the source. No time is measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import dlfs
from bench.datasets import DATASET
from bench.shuffle.measures import (
    batches_of,
    chance_of_chunk,
    class_variance,
    pairs_together,
    sorted_labels,
)
from bench.shuffle.orders import SAMPLE_BYTES, Size
from dlfs._native.permutation import packing_permutation
from dlfs.epoch.options import EpochOptions
from dlfs.epoch.order import Sequence

WINDOWS = 16
"""Windows of an import in the source."""
_ADDED = 1024


@dataclass(frozen=True)
class Packing:
    """Measures of a dataset as an import has packed it; 1.0 is as good as a uniform order.

    Attributes:
        chunk_variance: variance of the number of a class's samples in a chunk.
        class_variance: the same, in a batch of an epoch of chunk shuffle.
        window_variance: variance of the number of samples of a window of the import in such a
            batch.
        pairs_of_source: pairs in such a batch that were within one chunk's length in the source.
    """

    chunk_variance: float
    class_variance: float
    window_variance: float
    pairs_of_source: float


def packings(folder: Path, size: Size) -> dict[str, Packing]:
    """Return the measures of imports in one pass, in two, and in a window as large as the source.

    Args:
        folder: folder for temporary volumes.
        size: sizes; a sixteenth of ``chunks`` is packed.
    """
    chunks = size.chunks // 16
    window_bytes = chunks * size.per_chunk * SAMPLE_BYTES // WINDOWS
    return {
        "in windows: one pass": _packed(folder, size, chunks, window_bytes, one_pass=True),
        "in windows, of runs in a drawn order": _packed(
            folder, size, chunks, window_bytes, one_pass=True, run=max(1, size.per_chunk // 16)
        ),
        "in windows, and a second pass": _packed(folder, size, chunks, window_bytes),
        "in one window": _packed(folder, size, chunks, 2 * WINDOWS * window_bytes),
    }


def _packed(
    folder: Path,
    size: Size,
    chunks: int,
    window_bytes: int,
    *,
    one_pass: bool = False,
    run: int | None = None,
) -> Packing:
    count, path = chunks * size.per_chunk, folder / "packing.img"
    chunk_bytes = size.per_chunk * SAMPLE_BYTES
    source = np.arange(count).reshape(-1, run or count)  # numbers of samples as they are added
    source = source[packing_permutation(len(source), 1).map()].reshape(-1)
    size_bytes = 4 * chunks * chunk_bytes + (16 << 20)
    dlfs.format_volume(path, size_bytes=size_bytes, chunk_bytes=chunk_bytes, block_bytes=4096)
    try:
        with dlfs.open(path) as volume:
            options = {"one_pass": one_pass, "stage_bytes": window_bytes, "seed": 1}
            with volume.step_writer(DATASET, {"fingerprint": 1}, **options) as writer:
                for first in range(0, count, _ADDED):
                    added = min(_ADDED, count - first)
                    paths = [b"%09d" % number for number in source[first : first + added].tolist()]
                    lengths = np.full(added, SAMPLE_BYTES)
                    offsets = np.cumsum(lengths) - lengths
                    writer.add_batch(paths, bytes(added * SAMPLE_BYTES), offsets, lengths)
            with volume[DATASET] as dataset:
                return measure_packing(dataset, size, chunk_bytes, max(1, chunks // 16))
    finally:
        path.unlink()


def measure_packing(dataset: dlfs.Dataset, size: Size, chunk_bytes: int, window: int) -> Packing:
    """Measure a dataset whose samples have the order of the source in the order of their paths.

    Args:
        dataset: the dataset.
        size: sizes of chunks, batches and classes.
        chunk_bytes: chunk size of its volume.
        window: window of the epoch of chunk shuffle, in chunks.
    """
    directory = dataset.directory
    order = np.argsort(directory.addresses(), kind="stable")
    options = EpochOptions(shuffle="chunk", seed=1, window_chunks=window)
    sequence = Sequence(directory, options, chunk_bytes=chunk_bytes)
    epoch = sequence.indices().astype(np.int64)
    return _measured(order, batches_of(epoch, size.batch), size)


def _measured(order: NDArray[np.int64], batches: NDArray[np.int64], size: Size) -> Packing:
    """Measure the samples in the order of their addresses, and batches; as places in the source."""
    count, per_chunk = len(order), size.per_chunk
    classes, windows = sorted_labels(count, size.classes), sorted_labels(count, WINDOWS)
    pairs = pairs_together(batches // per_chunk)
    return Packing(
        chunk_variance=class_variance(classes[batches_of(order, per_chunk)], np.bincount(classes)),
        class_variance=class_variance(classes[batches], np.bincount(classes)),
        window_variance=class_variance(windows[batches], np.bincount(windows)),
        pairs_of_source=pairs / chance_of_chunk(count, per_chunk),
    )
