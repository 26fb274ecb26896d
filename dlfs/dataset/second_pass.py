"""The second pass of an import: reads its samples so that neighbours come from everywhere.

The first pass packs samples as the source gives them, shuffled within windows of some size. The
second pass reads them again from the volume, in blocks of about that size. Each block has samples
of all windows, and is shuffled by itself. So its order is drawn from the seed over the whole
dataset, with memory for one block.

The data space of the first pass is cut into strata of equal size, each at most about a window, and
each stratum into a cell for each block. A block has one cell of each stratum, chosen by the seed. A
sample belongs to the cell in which it starts. As the samples of a window are in a random order, a
cell is a random choice of them. A cell is a range of addresses, so a block is read by few long
requests.

Memory: the directories and attributes of the first pass as they are on the volume, 4 bytes for each
sample, and one block.

Threads: one at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlfs._native.checksums import crc32c
from dlfs._native.packing import sum_ranges
from dlfs._native.permutation import packing_permutation
from dlfs.base.closing import Closing
from dlfs.base.wording import quote
from dlfs.block import aligned_buffer
from dlfs.connection.unfinished import UnfinishedSteps, column_of, load_step
from dlfs.errors import ChecksumError
from dlfs.fields import FIELDS_COLUMN
from dlfs.format.geometry import DataSpace
from dlfs.format.location import pack_locations
from dlfs.store.chunk_reader import CopyOrder, copy_orders, read_blocks, read_ranges
from dlfs.store.transaction import Generation

STRATA = 256
"""Fewest strata: of two windows, each block then has as many samples as the other within 1%."""
BLOCK_SAMPLES = 1 << 16
"""Samples of a block, however small they are: their paths are Python objects while it is packed."""
GAP_BYTES = 64 * 1024
"""Longest gap between two samples that are read by one request, in bytes."""
_BLOCK_STREAM = 1 << 63
"""Number of the permutation of block 0; those below are of the windows of the first pass."""
_CELL_STREAM = (1 << 64) - 1
"""Number of the permutation that chooses cells."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples to read next: step and index in its directory of each, in the order of packing."""

    steps: NDArray[np.uint32]
    indices: NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Samples:
    """Samples of a batch: sample ``i`` is ``data[offsets[i]:offsets[i] + lengths[i]]``."""

    paths: list[bytes]
    data: NDArray[np.uint8]
    offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]
    columns: dict[str, NDArray[Any]]


class SecondPass(Closing):
    """The samples of the first pass of an import, in the order of the second one.

    Args:
        base: generation that has the import.
        steps: its steps; the first pass is complete.
        seed: seed of the order.
        block_bytes: bytes of samples of a block.

    Attributes:
        directories: paths of directories without samples.

    Raises:
        FormatError, DeviceError: as ``load_step``.
    """

    def __init__(
        self, base: Generation, steps: UnfinishedSteps, *, seed: int, block_bytes: int
    ) -> None:
        first = steps.of_pass(second=False).in_order()
        self._name, self._seed, self._block_bytes = first.record.name, seed, block_bytes
        self._steps = first
        self._loaded = [load_step(base, first.record, step) for step in first.steps]
        self._directories = [directory for directory, _ in self._loaded]
        self.directories = [
            path for directory in self._directories for path in directory.empty_directories()
        ]
        chunk_bytes = base.geometry.chunk_bytes
        self._starts = [step.header.first_chunk * chunk_bytes for step in first.steps]
        data_bytes, samples = first.record.data_bytes, first.record.sample_count
        blocks = max(-(-data_bytes // block_bytes), -(-samples // BLOCK_SAMPLES), 1)
        strata = max(STRATA, first.window_count, blocks)
        self._stratum_bytes = max(1, -(-data_bytes // strata))
        turns = packing_permutation(strata, seed, _CELL_STREAM).map()
        self._turns = turns * np.uint64(blocks) // np.uint64(strata)
        self._block_count = blocks
        chosen = [self._by_block(step) for step in range(len(self._directories))]
        self._orders = [order for order, _ in chosen]
        self._bounds = [bounds for _, bounds in chosen]

    def _by_block(self, step: int) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
        """Return the samples of a step sorted by their block, and where each block begins."""
        addresses = self._directories[step].addresses() + np.uint64(self._starts[step])
        size, count = np.uint64(self._stratum_bytes), np.uint64(self._block_count)
        strata = np.minimum(addresses // size, np.uint64(len(self._turns) - 1))
        cells = np.minimum((addresses - strata * size) * count // size, count - np.uint64(1))
        blocks = ((cells + self._turns[strata]) % count).astype(np.uint32)
        order = np.argsort(blocks, kind="stable").astype(np.uint32)
        bounds = np.searchsorted(blocks[order], np.arange(self._block_count + 1))
        return order, bounds.astype(np.uint32)

    def close(self) -> None:
        """Release the directories."""
        for directory in self._directories:
            directory.close()

    def batches(self, skip: int) -> Iterator[Batch]:
        """Yield the batches, each of at most a block, without the first samples.

        Args:
            skip: number of samples of the batches that are done.
        """
        for number in range(self._block_count):
            count = sum(int(bounds[number + 1] - bounds[number]) for bounds in self._bounds)
            if count <= skip:
                skip -= count
            else:
                for batch in self._cut(self._block(number, count)):
                    if skip:
                        skip -= len(batch.steps)
                    else:
                        yield batch

    def _block(self, number: int, count: int) -> Batch:
        """Return the samples of a block in the order of packing."""
        steps, indices = np.empty(count, np.uint32), np.empty(count, np.uint32)
        at = 0
        for step, bounds in enumerate(self._bounds):
            found = self._orders[step][bounds[number] : bounds[number + 1]]
            steps[at : at + len(found)], indices[at : at + len(found)] = step, found
            at += len(found)
        order = packing_permutation(count, self._seed, _BLOCK_STREAM + number).map()
        return Batch(steps[order], indices[order])

    def _cut(self, block: Batch) -> Iterator[Batch]:
        """Cut a block that has more bytes than others; a larger sample is a batch by itself."""
        lengths = np.empty(len(block.steps), np.int64)
        for step in np.unique(block.steps).tolist():
            of_step = block.steps == step
            lengths[of_step] = self._directories[step].lengths(block.indices[of_step])
        ends = np.cumsum(lengths)
        first = 0
        while first < len(ends):
            limit = ends[first] - lengths[first] + self._block_bytes * 5 // 4
            end = max(first + 1, int(np.searchsorted(ends, limit, side="right")))
            yield Batch(block.steps[first:end], block.indices[first:end])
            first = end

    # ---- reading ---------------------------------------------------------------------------------

    def read(self, base: Generation, space: DataSpace, batch: Batch) -> Samples:
        """Read a batch, and verify its samples.

        Args:
            base: generation that has the import.
            space: data space of the first pass in that generation.
            batch: samples to read.

        Raises:
            ChecksumError: a sample is damaged in all copies.
            DeviceError: a read failed.
        """
        order = np.lexsort((batch.indices, batch.steps))
        steps, indices = batch.steps[order], batch.indices[order]
        firsts = np.flatnonzero(np.diff(steps, prepend=-1))
        paths: list[bytes] = []
        places: list[tuple[NDArray[Any], ...]] = []
        columns: dict[str, list[NDArray[Any]]] = {name: [] for name in self._steps.names}
        for chosen in np.split(indices, firsts[1:]):
            step = int(steps[len(paths)])
            directory, table = self._loaded[step]
            paths += directory.names_of(chosen)
            addresses = directory.addresses(chosen) + np.uint64(self._starts[step])
            places.append((addresses, directory.lengths(chosen), directory.crcs(chosen)))
            for name, values in columns.items():
                values.append(column_of(table, name, self._steps, chosen))
        addresses, lengths, crcs = map(np.concatenate, zip(*places, strict=True))
        data, offsets = self._read_ranges(base, space, addresses, lengths)
        self._verify(base, space, (addresses, lengths, crcs), data, offsets, paths)
        back = np.empty(len(order), np.int64)
        back[order] = np.arange(len(order))
        found = {name: np.concatenate(values)[back] for name, values in columns.items()}
        if self._steps.encoder is not None:
            found[FIELDS_COLUMN] = np.full(len(order), self._steps.encoder.text, object)
        in_order = [paths[at] for at in back.tolist()]
        return Samples(in_order, data, offsets[back], lengths[back], found)

    def _read_ranges(
        self,
        base: Generation,
        space: DataSpace,
        addresses: NDArray[np.uint64],
        lengths: NDArray[np.int64],
    ) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Read samples; return a buffer, and the offset of each in it."""
        block, offsets = base.geometry.block_bytes, np.zeros(len(addresses), np.int64)
        chosen = np.flatnonzero(lengths)
        chosen = chosen[np.argsort(addresses[chosen], kind="stable")]
        if not len(chosen):
            return np.empty(0, np.uint8), offsets
        begins = addresses[chosen].astype(np.int64)
        ends = begins + lengths[chosen]
        low, high = begins // block * block, -(-ends // block) * block
        is_first = np.ones(len(chosen), bool)
        is_first[1:] = low[1:] > high[:-1] + GAP_BYTES
        firsts = np.flatnonzero(is_first)
        starts, stops = low[firsts], high[np.append(firsts[1:], len(chosen)) - 1]
        bases = np.concatenate([[0], np.cumsum(stops - starts)])
        data = aligned_buffer(int(bases[-1]), max(block, 4096))
        ranges = [
            (start, data[first:end])
            for start, first, end in zip(
                starts.tolist(), bases[:-1].tolist(), bases[1:].tolist(), strict=True
            )
        ]
        read_ranges(base.sources, space, ranges)
        number = np.cumsum(is_first) - 1
        offsets[chosen] = begins - starts[number] + bases[number]
        return data, offsets

    def _verify(
        self,
        base: Generation,
        space: DataSpace,
        places: tuple[NDArray[np.uint64], NDArray[np.int64], NDArray[np.uint32]],
        data: NDArray[np.uint8],
        offsets: NDArray[np.int64],
        paths: list[bytes],
    ) -> None:
        """Check the checksums of samples; read those that are wrong from other copies."""
        addresses, lengths, crcs = places
        order = np.argsort(offsets, kind="stable")
        order = order[lengths[order] > 0]
        where = pack_locations(offsets[order], lengths[order], crcs[order])
        found = sum_ranges(where, window=data, window_address=0)
        for at in order[found != crcs[order]].tolist():
            start, length = int(addresses[at]), int(lengths[at])
            place = data[int(offsets[at]) : int(offsets[at]) + length]
            for choice in copy_orders(base.geometry)[1:]:
                place[:] = _read_sample(base, space, start, length, choice)
                if _sum(place) == crcs[at]:
                    break
            else:
                raise ChecksumError(
                    f"read sample {quote(paths[at])} of the unfinished import of "
                    f"{quote(self._name)}: expected CRC32C {int(crcs[at]):08x}, got "
                    f"{_sum(place):08x}"
                )


def _read_sample(
    base: Generation, space: DataSpace, address: int, length: int, choice: CopyOrder
) -> NDArray[np.uint8]:
    skipped = address % base.geometry.block_bytes
    data = read_blocks(base.sources, space, address - skipped, skipped + length, choice)
    return data[skipped:]


def _sum(data: NDArray[np.uint8]) -> int:
    return crc32c(data.data)
