"""``SamplePacker``: packs samples into chunks, through a stage in memory.

Small samples are buffered in the stage. A full stage is packed by one native call, in a shuffled
order or in the order of the calls, into the windows of a ``ChunkWriter``. The windows are written
at full queue depth while the next ones are packed. The packing order does not affect the index:
samples may be added in any order of paths.

Layout ``shuffled`` permutes the samples of each stage by the seed, so that neighbours in a chunk
come from anywhere in that stage. Stages are numbered within their part of the source, so that
parts can be packed in any order. A source that is shuffled already is packed without the buffer.
Layout ``path`` packs in the order of the calls, and so does a copy of a dataset, which also says
where chunks begin.

Threads: one. Memory: the stage, the windows, and the paths of the samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dlfs._native.packing import Packer
from dlfs._native.permutation import packing_permutation
from dlfs.base.arguments import Layout
from dlfs.base.units import MIB
from dlfs.block import BlockDevice
from dlfs.directory.builder import DirectoryBuilder
from dlfs.format.geometry import ChunkRun, Geometry
from dlfs.format.location import LOCATION, unpack_locations
from dlfs.store.chunk_writer import ChunkWriter
from dlfs.store.sample_buffer import SAMPLES_MAX, SampleBuffer
from dlfs.store.transaction import flush_all

STAGE_BYTES_SHUFFLED = 256 * MIB
"""Size of the stage in which samples are shuffled, in bytes."""

PART_SHIFT = 32
"""Bits of the number of a permutation that have the number of the stage in its part of the source;
the bits above them have the number of the part."""

STAGE_BYTES_ORDERED = 8 * MIB
"""Size of the stage whose samples are packed by one call without a shuffle, in bytes."""


class ChunkSource(Protocol):
    """The chunks that samples are packed into."""

    @property
    def devices(self) -> Sequence[BlockDevice]:
        """Devices of the members of the volume, in order."""

    @property
    def geometry(self) -> Geometry:
        """Layout of the chunks over the members."""

    def take(self, count: int) -> ChunkRun:
        """Allocate 1 to ``count`` chunks in one run.

        Raises:
            SpaceError: there is none.
        """


class SamplePacker:
    """Packs the samples of one dataset, or of one step of it.

    Args:
        source: where the chunks come from.
        stage: empty stage; the caller may use it again after ``close``, which empties it.
        layout: order in which samples are packed.
        seed: seed of the shuffled order.
        part: number of the part of the source that the samples are of.
        stage_count: number of stages of the part that were packed in earlier steps.
        source_shuffled: True if samples arrive in a shuffled order and are packed in it.

    Attributes:
        directory: paths and locations of the samples that are packed.
        chunk_bytes: size of a chunk, in bytes.
        stage_count: number of stages of the part that were packed, those of earlier steps included.
    """

    def __init__(
        self,
        source: ChunkSource,
        stage: SampleBuffer,
        *,
        layout: Layout,
        seed: int,
        part: int = 0,
        stage_count: int = 0,
        source_shuffled: bool,
    ) -> None:
        self._source = source
        self._stage = stage
        self._seed = seed
        self._part = part
        self._fills_chunks = layout == "shuffled"
        self._shuffles = layout == "shuffled" and not source_shuffled
        self.directory = DirectoryBuilder()
        self._has_packed = False  # the directory has samples
        self.stage_count = stage_count
        geometry = source.geometry
        self.chunk_bytes = geometry.chunk_bytes
        self._packer = Packer(
            chunk_bytes=geometry.chunk_bytes, block_bytes=geometry.block_bytes, address=0
        )
        self._chunks: ChunkWriter | None = None

    def __contains__(self, path: object) -> bool:
        """Return True if a sample of this path was added."""
        return path in self._stage or (self._has_packed and path in self.directory)

    @property
    def window_count(self) -> int:
        """Number of windows of the shuffle in the part so far, of all of its steps."""
        return self.stage_count + bool(len(self._stage))

    @property
    def size_bytes(self) -> int:
        """Bytes that the samples take on the volume, as an upper bound for those in the stage."""
        return self._packer.address + 2 * self._stage.used_bytes

    @property
    def chunks(self) -> ChunkWriter:
        """The chunks that the samples are written to."""
        if self._chunks is None:
            source = self._source
            self._chunks = ChunkWriter(source.devices, source.geometry, source.take)
        return self._chunks

    @property
    def parts(self) -> NDArray[np.uint32]:
        """See ``Packer.parts``."""
        return self._packer.parts

    def add(self, path: bytes, data: NDArray[np.uint8]) -> None:
        """Add one sample."""
        if not self._stage.fits(data.size):
            self.drain()
        if self._stage.fits(data.size):
            self._stage.add(path, data)
        else:
            self._pack([path], data, np.zeros(1, np.int64), np.array([data.size]), None)

    def add_batch(
        self,
        paths: Sequence[bytes],
        source: NDArray[np.uint8],
        offsets: NDArray[np.int64],
        lengths: NDArray[np.int64],
        begins_chunk: bool | None,
    ) -> None:
        """Add samples: sample ``i`` is ``source[offsets[i]:offsets[i] + lengths[i]]``.

        ``begins_chunk`` is as in ``DatasetWriter.add_batch``.
        """
        if begins_chunk is not None or not self._shuffles:
            self.drain()
            if begins_chunk:
                self._packer.begin_chunk(self.chunks.window, self.chunks.address)
            is_fixed = begins_chunk is not None
            self._pack(list(paths), source, offsets, lengths, None, is_fixed=is_fixed)
            return
        first = 0
        while first < len(paths):
            first = self._stage_some(paths, source, offsets, lengths, first)

    def _stage_some(
        self,
        paths: Sequence[bytes],
        source: NDArray[np.uint8],
        offsets: NDArray[np.int64],
        lengths: NDArray[np.int64],
        first: int,
    ) -> int:
        """Stage as many samples as fit, at least one; return the position of the next one."""
        if not self._stage.fits(int(lengths[first])):
            self.drain()
        if not self._stage.fits(int(lengths[first])):
            only = slice(first, first + 1)
            self._pack(list(paths[only]), source, offsets[only], lengths[only], None)
            return first + 1
        room = self._stage.capacity_bytes - self._stage.used_bytes
        more = SAMPLES_MAX - len(self._stage)
        ends = np.cumsum(lengths[first : first + more])
        count = int(np.searchsorted(ends, room, side="right"))
        chosen = slice(first, first + count)
        low = int(offsets[chosen].min())
        high = int((offsets[chosen] + lengths[chosen]).max())
        if high - low == int(ends[count - 1]):
            span = source[low:high]
            self._stage.add_span(paths[chosen], span, offsets[chosen] - low, lengths[chosen])
        else:
            for path, start, size in zip(
                paths[chosen], offsets[chosen].tolist(), lengths[chosen].tolist(), strict=True
            ):
                self._stage.add(path, source[start : start + size])
        return first + count

    def drain(self) -> None:
        """Pack the samples of the stage."""
        stage = self._stage
        if not len(stage):
            return
        source, offsets, lengths = stage.contents()
        order = None
        if self._shuffles:
            number = self._part << PART_SHIFT | self.stage_count
            order = packing_permutation(len(stage), self._seed, number).map()
        self._pack(stage.paths, source, offsets, lengths, order)
        self.stage_count += 1
        stage.clear()

    def _pack(
        self,
        paths: list[bytes],
        source: NDArray[np.uint8],
        offsets: NDArray[np.int64],
        lengths: NDArray[np.int64],
        order: NDArray[np.uint64] | None,
        *,
        is_fixed: bool = False,
    ) -> None:
        """Pack samples into windows and start writing the full windows.

        If the order is fixed, no sample is moved to fill a chunk.
        """
        if self._fills_chunks and not is_fixed:
            order = np.arange(len(paths), dtype=np.uint64) if order is None else order
            self._packer.fill_chunks(lengths, order)
        locations = self._pack_into_windows(len(paths), source, offsets, lengths, order)
        self.directory.add_many(paths, *unpack_locations(locations))
        self._has_packed = True

    def _pack_into_windows(
        self,
        count: int,
        source: NDArray[np.uint8],
        offsets: NDArray[np.int64],
        lengths: NDArray[np.int64],
        order: NDArray[np.uint64] | None,
    ) -> NDArray[Any]:
        """Return the locations, LOCATION[n_samples], in the order of offsets and lengths."""
        chunks = self.chunks
        locations: NDArray[Any] = np.zeros(count, LOCATION)
        first = 0
        while True:
            unwritten = slice(first, None)
            first += self._packer.pack(
                source,
                offsets if order is not None else offsets[unwritten],
                lengths if order is not None else lengths[unwritten],
                order=order[unwritten] if order is not None else None,
                window=chunks.window,
                window_address=chunks.address,
                locations=locations if order is not None else locations[unwritten],
            )
            if first == count:
                break
            chunks.advance(chunks.window.size)
        return locations

    def finish(self) -> ChunkWriter:
        """Pack what is left, make all windows durable, and return the chunks."""
        self.drain()
        chunks = self.chunks
        length = self._packer.address - chunks.address
        if length:
            chunks.advance(length)
        chunks.drain()
        flush_all(self._source.devices)
        return chunks

    def close(self) -> None:
        """Close the windows, and empty the stage. Idempotent."""
        self._stage.clear()
        self._stage = SampleBuffer(0)
        if self._chunks is not None:
            self._chunks.close()
