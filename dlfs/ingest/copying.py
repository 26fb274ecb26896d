"""Copies a dataset from one volume to another, or to another name.

The copy has the samples with their paths, attributes and fields, packed in the order in which the
source stores them, and the directories without samples. So it has the content digest of the source.
If the volumes have chunks and blocks of one size, each chunk has the same samples, too, however the
source was written: then the packing digests are equal, and an epoch in any order goes on with the
copy. It has a UUID and a time of creation of its own.

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
from dlfs.dataset.step_cutter import STEP_BYTES
from dlfs.format.geometry import Geometry
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
"""Size of a block in bytes, unless a single sample is larger. A service pins one at a time. Of a
dataset with larger chunks, a copy in steps may have other chunks."""
SPAN_BYTES = 256 * MIB
"""Bytes of samples after which the copy begins a chunk, so that a step can end there, where the
volumes have chunks of different sizes."""


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
        DatasetSource(dataset, volume.session.superblock.geometry),
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

    Blocks depend on the position of their first sample alone. They end where a chunk ends, as far
    as their size allows, and wherever a chunk ends before it is full, as behind a step of an import
    and a version that was appended to.

    Args:
        dataset: dataset to read; the caller closes it.
        target: geometry of the volume that the samples are copied to.
    """

    gives_shuffled = True

    def __init__(self, dataset: Dataset, target: Geometry) -> None:
        self._dataset = dataset
        own = dataset.session.geometry
        self._chunk_bytes = own.chunk_bytes
        self._keeps_chunks = (own.chunk_bytes, own.block_bytes) == (
            target.chunk_bytes,
            target.block_bytes,
        )
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
        total = len(self._dataset)
        position, since_bytes = self._first, SPAN_BYTES
        while position < total:
            order, sizes = self._look_ahead(position)
            every = np.arange(len(sizes), dtype=np.uint64)
            block, offsets = take_block(every, sizes.view(np.uint64), 0, BLOCK_BYTES)
            count = min(len(block), total - position)
            if self._keeps_chunks:
                count, begins_chunk = self._end_with_chunk(position, order, sizes, count)
            else:
                begins_chunk = since_bytes >= SPAN_BYTES
                since_bytes = 0 if begins_chunk else since_bytes
            chosen = slice(count)
            yield self._block(order[chosen], offsets[chosen], sizes[chosen], begins_chunk)
            since_bytes += int(sizes[chosen].sum())
            position += count
        if not total:  # an empty dataset may have columns
            nothing = np.zeros(0, np.int64)
            yield self._block(nothing.view(np.uint64), nothing, nothing, True)

    def _look_ahead(self, position: int) -> tuple[Uint64Array, Int64Array]:
        """Return indices and lengths of samples from a position on: a block, and one behind it."""
        left, count = min(len(self._dataset) - position, BLOCK_SAMPLES_MAX + 1), 1 << 10
        while True:
            count = min(count, left)
            order = self._dataset.directory.order(position, count)
            sizes = self._dataset.lengths(order)
            if count == left or int(sizes[:-1].sum()) > BLOCK_BYTES:
                return order, sizes
            count *= 8

    def _end_with_chunk(
        self, position: int, order: Uint64Array, sizes: Int64Array, count: int
    ) -> tuple[int, bool]:
        """End a block of samples with a chunk; return their number, and if they begin a chunk.

        Args:
            position: position of the first sample.
            order: indices of the samples, and of the one behind the block if there is one.
            sizes: their lengths.
            count: most samples of the block.
        """
        directory, chunk = self._dataset.directory, np.uint64(self._chunk_bytes)
        order, sizes = order[: count + 1], sizes[: count + 1].astype(np.uint64)
        if position:
            before = directory.order(position - 1, 1)
            order = np.concatenate([before, order])
            sizes = np.concatenate([self._dataset.lengths(before).astype(np.uint64), sizes])
        addresses = directory.addresses(order)
        begins = addresses[1:] // chunk != addresses[:-1] // chunk
        room = (chunk - (addresses + sizes)[:-1] % chunk) % chunk
        is_early = begins & (sizes[1:] <= room) & (room > 0) & (sizes[:-1] <= chunk)
        if not position:
            begins, is_early = (np.concatenate([[True], each]) for each in (begins, is_early))
        ends = np.flatnonzero(is_early[1:])
        if len(ends):
            return int(ends[0]) + 1, bool(begins[0])
        ends = np.flatnonzero(begins[1:])
        if len(begins) > count and len(ends):
            count = int(ends[-1]) + 1
        return count, bool(begins[0])

    def _block(
        self,
        indices: Uint64Array,
        offsets: Int64Array,
        lengths: Int64Array,
        begins_chunk: bool,
    ) -> SampleBlock:
        """Read samples into memory of their own, one after the other, and their attributes."""
        if len(indices) == 1:  # maybe a large one: without a second copy in memory
            data = np.empty(int(lengths[0]), np.uint8)
            self._dataset.read_into(int(indices[0]), data.data)
        else:
            with self._dataset.read(indices) as batch:
                data, _ = batch.pack()
        columns = {name: self._dataset.column(name, indices) for name in self._columns}
        paths = self._dataset.paths_of(indices)
        return SampleBlock(paths, data, offsets, lengths, columns, begins_chunk=begins_chunk)
