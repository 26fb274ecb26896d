"""Copies a dataset from one volume to another, or to another name.

The copy has the samples with their paths, attributes and fields, packed in the order in which the
source stores them, and the directories without samples. It has a UUID and a time of creation of its
own, and the chunks of its volume.

A thread reads the next block from the source, where every sample and column is verified against its
CRC32C, while the dataset writer packs and writes the present one. After any failure, Ctrl-C
included, the writer aborts and the target volume stays as it was.

Memory: two blocks of ``BLOCK_BYTES`` or of one larger sample, the sample memory of the source, and
that of the dataset writer, which has every path.
"""

from __future__ import annotations

from collections.abc import Generator

import numpy as np

from dlfs.base.arguments import Layout
from dlfs.base.units import MIB
from dlfs.dataset.dataset import Dataset
from dlfs.ingest.bad_records import BadRecords
from dlfs.ingest.importer import import_dataset
from dlfs.ingest.order import take_block
from dlfs.ingest.progress import ProgressCallback
from dlfs.ingest.references import check_copyable
from dlfs.ingest.source import Array, Bytes, SampleBlock, Source, Uint64Array, stream_ahead
from dlfs.store.info import DatasetInfo
from dlfs.volume.volume import Volume

BLOCK_BYTES = 16 * MIB
"""Size of a block in bytes, unless a single sample is larger. A service pins one at a time."""


def copy_dataset(
    dataset: Dataset,
    volume: Volume,
    name: str | None = None,
    *,
    progress: ProgressCallback | None = None,
) -> DatasetInfo:
    """Copy a dataset to a volume, completely or not at all; every sample is verified.

    Args:
        dataset: dataset to copy, from devices or through a service; its volume may be the same.
        volume: volume to write to; the copy takes its write lock.
        name: name of the copy, by default that of the dataset; an existing name gets a new version.
        progress: called after each block, and once at the start.

    Returns:
        The new dataset.

    Raises:
        FormatError: a sample or a column of the dataset is damaged.
        StaleError: the dataset was removed meanwhile.
        SpaceError: the volume has too little free space.
        UsageError: the name is not allowed, or the volume was opened through a service; or the
            dataset is a checkpoint, and the volume does not hold its tensors.
        LockedError: another writer has locked the volume.
        DeviceError: a device failed.
    """
    check_copyable(dataset, volume)
    info = dataset.info
    report = import_dataset(
        volume,
        DatasetSource(dataset),
        dataset.name if name is None else name,
        layout="path" if info.layout == "path" else "shuffled",
        seed=info.seed,
        allow_empty=True,
        progress=progress,
    )
    return report.dataset


class DatasetSource(Source):
    """The samples of a dataset, in storage order.

    Args:
        dataset: dataset to read; the caller closes it.
    """

    gives_shuffled = True

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._columns = list(dataset.columns)
        self.name = f"{dataset.name}@{dataset.version}"
        self.sample_count = len(dataset)
        self.sample_bytes = dataset.sample_bytes
        self.empty_directories = dataset.empty_directories()
        self.bad = BadRecords(carried=dataset.bad_records().of_version(dataset.version))

    def blocks(self, *, layout: Layout, seed: int) -> Generator[SampleBlock, None, None]:  # noqa: ARG002
        """Read every sample once, in storage order whatever the layout is.

        Raises:
            FormatError: a sample, a column or the directory is damaged.
            StaleError: the dataset was removed.
            DeviceError: a device failed.
        """
        return stream_ahead(self._blocks())

    def _blocks(self) -> Generator[SampleBlock, None, None]:
        paths = self._dataset.paths()  # the writer will hold these objects, too
        order = self._dataset.directory.order()
        sizes = self._dataset.lengths().view(np.uint64)
        position = 0
        while position < len(order):
            chosen, offsets = take_block(order, sizes, position, BLOCK_BYTES)
            data, columns = self._read(chosen, sizes)
            names = [paths[index] for index in chosen.tolist()]
            lengths = sizes[chosen].view(np.int64)
            yield SampleBlock(names, data, offsets, lengths, columns)
            position += len(chosen)
        if not position:  # an empty dataset may have columns
            data, columns = self._read(order, sizes)
            yield SampleBlock([], data, sizes.view(np.int64), sizes.view(np.int64), columns)

    def _read(self, indices: Uint64Array, sizes: Uint64Array) -> tuple[Bytes, dict[str, Array]]:
        """Read samples into memory of their own, one after the other, and their attributes."""
        if len(indices) == 1:  # maybe a large one: without a second copy in memory
            data = np.empty(int(sizes[indices[0]]), np.uint8)
            self._dataset.read_into(int(indices[0]), data.data)
        else:
            with self._dataset.read(indices) as batch:
                data, _ = batch.pack()
        return data, {name: self._dataset.column(name, indices) for name in self._columns}
