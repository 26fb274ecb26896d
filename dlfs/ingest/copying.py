"""Copies a dataset from one volume to another, or to another name.

The copy has the samples with their paths, attributes and fields, packed in the order in which the
source stores them, and the directories without samples. It has a UUID and a time of creation of its
own, and the chunks of its volume.

A thread reads the next block from the source, where every sample and column is verified against its
CRC32C, while the dataset writer packs and writes the present one. After any failure, Ctrl-C
included, the target volume has the steps that were committed, and the next copy of the same version
goes on with them; see ``dlfs.dataset.step_writer``.

Memory: two blocks of ``BLOCK_BYTES`` or of one larger sample, the sample memory of the source, and
that of the dataset writer.
"""

from __future__ import annotations

from collections.abc import Generator

import numpy as np

from dlfs.base.arguments import Layout
from dlfs.base.units import MIB
from dlfs.dataset.dataset import Dataset
from dlfs.dataset.step_writer import STEP_BYTES
from dlfs.format.journal import Cursor
from dlfs.ingest.bad_records import BadRecords
from dlfs.ingest.importer import import_dataset
from dlfs.ingest.order import BLOCK_SAMPLES_MAX, take_block
from dlfs.ingest.progress import ProgressCallback
from dlfs.ingest.references import check_copyable
from dlfs.ingest.source import (
    Int64Array,
    SampleBlock,
    Source,
    Uint64Array,
    fingerprint_of,
    stream_ahead,
)
from dlfs.store.info import DatasetInfo
from dlfs.volume.volume import Volume

BLOCK_BYTES = 16 * MIB
"""Size of a block in bytes, unless a single sample is larger. A service pins one at a time."""


def copy_dataset(
    dataset: Dataset,
    volume: Volume,
    name: str | None = None,
    *,
    step_bytes: int | None = STEP_BYTES,
    progress: ProgressCallback | None = None,
) -> DatasetInfo:
    """Copy a dataset to a volume, completely or not at all; every sample is verified.

    A copy that was interrupted is an unfinished import (``Volume.unfinished``): the next copy of
    the same version to the same name goes on with it.

    Args:
        dataset: dataset to copy, from devices or through a service; its volume may be the same.
        volume: volume to write to; the copy takes its write lock.
        name: name of the copy, by default that of the dataset; an existing name gets a new version.
        step_bytes: bytes of samples after which the copy commits its progress, and other writers
            may lock the volume; None: it is whole or not at all.
        progress: called after each block, and once at the start.

    Returns:
        The new dataset.

    Raises:
        FormatError: a sample or a column of the dataset is damaged.
        StaleError: the dataset was removed meanwhile.
        SpaceError: the volume has too little free space.
        UsageError: the name is not allowed, or the volume was opened through a service; or the
            dataset is a checkpoint, and the volume does not hold its tensors; or an unfinished
            import of this name has another source.
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
        step_bytes=step_bytes,
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
        self.fingerprint = fingerprint_of("dataset", str(dataset.uuid))
        self._first = 0
        self.bad = BadRecords(carried=dataset.bad_records().of_version(dataset.version))

    def seek(self, count: int, cursor: Cursor | None = None) -> int:
        """Begin behind the first samples; see ``Source.seek``."""
        del cursor
        self._first = count
        return count

    def blocks(self, *, layout: Layout, seed: int) -> Generator[SampleBlock, None, None]:  # noqa: ARG002
        """Read every sample once, in storage order whatever the layout is.

        Raises:
            FormatError: a sample, a column or the directory is damaged.
            StaleError: the dataset was removed.
            DeviceError: a device failed.
        """
        return stream_ahead(self._blocks(), bad=self.bad)

    def _blocks(self) -> Generator[SampleBlock, None, None]:
        directory, total = self._dataset.directory, len(self._dataset)
        position = self._first
        while position < total:
            # Blocks end at multiples of this, so that they depend on the position alone.
            count = min(total - position, BLOCK_SAMPLES_MAX - position % BLOCK_SAMPLES_MAX)
            order = directory.order(position, count)
            sizes = self._dataset.lengths(order)
            every, first = np.arange(count, dtype=np.uint64), 0
            while first < count:
                block, offsets = take_block(every, sizes.view(np.uint64), first, BLOCK_BYTES)
                yield self._block(order[block], offsets, sizes[block])
                first += len(block)
            position += count
        if not total:  # an empty dataset may have columns
            nothing = np.zeros(0, np.int64)
            yield self._block(nothing.view(np.uint64), nothing, nothing)

    def _block(self, indices: Uint64Array, offsets: Int64Array, lengths: Int64Array) -> SampleBlock:
        """Read samples into memory of their own, one after the other, and their attributes."""
        if len(indices) == 1:  # maybe a large one: without a second copy in memory
            data = np.empty(int(lengths[0]), np.uint8)
            self._dataset.read_into(int(indices[0]), data.data)
        else:
            with self._dataset.read(indices) as batch:
                data, _ = batch.pack()
        columns = {name: self._dataset.column(name, indices) for name in self._columns}
        return SampleBlock(self._dataset.paths_of(indices), data, offsets, lengths, columns)
