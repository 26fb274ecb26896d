"""Builds the directory segment of a dataset from a stream of paths in rising order.

Names are encoded as they come, so a builder takes little memory beside the segment: see
``dlfs_directory_builder`` in ``dlfs/import.h``.

Threads: one at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref, c_uint8
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlfs._native import abi
from dlfs._native.handle import Handle
from dlfs._native.library import check, library
from dlfs._native.paths import (
    PathRefusedError,
    PathTable,
    check_samples,
    pack_paths,
    path_at,
)
from dlfs.base.closing import Closing
from dlfs.errors import ClosedError, UsageError

PART_ALIGNMENT_BYTES = 4096
"""Alignment of the memory that parts are built in, as direct I/O needs it; reading needs 64."""


@dataclass(frozen=True, slots=True)
class Segment:
    """The two parts of an encoded directory segment, and what they were made of.

    Attributes:
        entries: all but the names, ``uint8[n_bytes]``.
        names: name blocks and their offsets, ``uint8[n_bytes]``.
        sample_count: number of samples.
        sample_bytes: sum of the lengths of the samples, in bytes.
        hash_seed: seed of the hashes of paths.
    """

    entries: NDArray[np.uint8]
    names: NDArray[np.uint8]
    sample_count: int
    sample_bytes: int
    hash_seed: int


class SegmentBuilder(Closing):
    """Takes samples in the order of their paths; after an error it can only be closed.

    Args:
        dataset_uuid: 16 bytes.
        data_bytes: the size of the data space, which every location must lie in.
        chunk_bytes: chunk size of the volume.

    Raises:
        UsageError: a size is not one of a data space.
    """

    def __init__(self, *, dataset_uuid: bytes, data_bytes: int, chunk_bytes: int) -> None:
        if len(dataset_uuid) != 16:
            raise UsageError(f"build a directory: expected 16 bytes of UUID, got {dataset_uuid!r}")
        config = abi.DirectoryConfig(
            data_bytes=data_bytes,
            chunk_bytes=chunk_bytes,
            dataset_uuid=(c_uint8 * 16).from_buffer_copy(dataset_uuid),
        )
        self._where = f"in {data_bytes} bytes of data"
        self._count = 0
        self._directories: list[bytes] = []
        handle = Handle(library().dlfs_directory_builder_destroy)
        code = library().dlfs_directory_builder_create(byref(config), byref(handle))
        check(code, f"build a directory {self._where}")
        self._handle: Handle | None = handle

    @property
    def handle(self) -> Handle:
        """The owner of the ``dlfs_directory_builder``.

        Raises:
            ClosedError: the builder is closed.
        """
        if self._handle is None:
            raise ClosedError("build a directory: the builder is closed")
        return self._handle

    def add_directories(self, paths: Sequence[bytes]) -> None:
        """Add directories, before all samples.

        Those that samples or other directories lie below are left out of the segment.

        Args:
            paths: each without a slash behind it, in the order of the paths with one.

        Raises:
            PathRefusedError: a path breaks a rule, or is out of order.
            DeviceError: not enough memory.
        """
        text, offsets = pack_paths([path + b"/" for path in paths])
        self._directories += paths
        refusal = abi.PathRefusal()
        code = library().dlfs_directory_builder_add_directories(
            self.handle, text.ctypes.data, offsets.ctypes.data, len(paths), byref(refusal)
        )
        self._raise_refused(refusal, b"")
        check(code, f"add {len(paths)} directories to a directory of samples")

    def add(
        self,
        text: NDArray[np.uint8],
        offsets: NDArray[np.uint64],
        locations: NDArray[Any],
    ) -> None:
        """Add samples, behind those added before.

        Args:
            text: uint8[n_bytes], the paths in strictly rising byte order, one after the other.
            offsets: uint64[n_samples + 1] around each path.
            locations: ``dlfs_location[n_samples]``, in the same order.

        Raises:
            PathRefusedError: a path breaks a rule, or is out of order, or a directory's is.
            DeviceError: not enough memory.
        """
        check_samples(text, offsets, locations)
        count = len(offsets) - 1
        refusal = abi.PathRefusal()
        code = library().dlfs_directory_builder_add(
            self.handle,
            text.ctypes.data,
            offsets.ctypes.data,
            locations.ctypes.data,
            None,
            count,
            byref(refusal),
        )
        if refusal.rule:
            self._raise_refused(refusal, path_at(text, offsets, refusal.index))
        check(code, f"add {count} samples to a directory")
        self._count += count

    def add_table(self, table: PathTable, order: NDArray[np.uint64]) -> None:
        """Add samples of a table, behind those added before.

        Args:
            table: paths and locations of samples.
            order: rows of the samples, by path.

        Raises:
            UsageError: a row is not one of the table.
            PathRefusedError: as ``add``.
            DeviceError: not enough memory.
        """
        view = table.view()
        order = np.ascontiguousarray(order, np.uint64)
        if len(order) and order.max() >= view.count:
            raise UsageError(f"add samples to a directory: expected rows below {view.count}")
        refusal = abi.PathRefusal()
        code = library().dlfs_directory_builder_add(
            self.handle,
            view.names,
            view.offsets,
            view.locations,
            order.ctypes.data,
            len(order),
            byref(refusal),
        )
        if refusal.rule:
            self._raise_refused(refusal, table.paths(order[refusal.index :][:1])[0])
        check(code, f"add {len(order)} samples to a directory")
        self._count += len(order)

    def resize(self, data_bytes: int) -> None:
        """Set the size of the data space, if it was not known at the start.

        Raises:
            UsageError: it is no multiple of the chunk size, or the builder has ended.
        """
        code = library().dlfs_directory_builder_resize(self.handle, data_bytes)
        check(code, f"build a directory in {data_bytes} bytes of data")
        self._where = f"in {data_bytes} bytes of data"

    def finish(self, parts: NDArray[np.uint32] | None = None) -> Segment:
        """Complete the segment; the builder can only be closed then.

        Args:
            parts: CRC32C of each part of a sample larger than a chunk, ``uint32[n_chunks]`` for the
                first chunks of the data space; those after them have no such part.

        Raises:
            PathRefusedError: a directory is, or lies below, a sample.
            UsageError: a location lies outside the data space or in another sample, or neither
                starts a chunk nor lies in one; or the CRC32C of a sample is not that of its parts.
            DeviceError: not enough memory.

        Owns: the parts of the segment keep the memory, also when the builder is closed.
        """
        table = np.empty(0, np.uint32) if parts is None else np.ascontiguousarray(parts, np.uint32)
        refusal = abi.PathRefusal()
        segment = abi.DirectorySegment()
        code = library().dlfs_directory_builder_finish(
            self.handle, table.ctypes.data, len(table), byref(refusal), byref(segment)
        )
        self._raise_refused(refusal, b"")
        check(code, f"build the directory of {self._count} samples {self._where}")
        return Segment(
            self._memory(segment.entries, segment.entries_bytes),
            self._memory(segment.names, segment.names_bytes),
            segment.sample_count,
            segment.sample_bytes,
            segment.hash_seed,
        )

    def _memory(self, address: int, size_bytes: int) -> NDArray[np.uint8]:
        """View memory of the builder, which the view keeps."""
        memory: Any = (c_uint8 * size_bytes).from_address(address)
        memory.owner = self.handle
        return np.frombuffer(memoryview(memory), np.uint8)

    def _raise_refused(self, refusal: abi.PathRefusal, path: bytes) -> None:
        """Raise the error of a path that was refused, if one was."""
        if refusal.is_directory and refusal.rule:
            path = self._directories[refusal.index]
        if refusal.rule:
            raise PathRefusedError(f"build a directory {self._where}", refusal, path)

    def close(self) -> None:
        """Free the builder, unless a segment has its memory. Idempotent."""
        self._handle = None


def build_segment(
    text: NDArray[np.uint8],
    offsets: NDArray[np.uint64],
    locations: NDArray[Any],
    *,
    dataset_uuid: bytes,
    data_bytes: int,
    chunk_bytes: int,
) -> Segment:
    """Build the directory segment of samples that are all in memory, none larger than a chunk.

    Args: as those of ``SegmentBuilder`` and its ``add``.

    Raises: as ``SegmentBuilder.add`` and ``finish``.
    """
    with SegmentBuilder(
        dataset_uuid=dataset_uuid, data_bytes=data_bytes, chunk_bytes=chunk_bytes
    ) as builder:
        builder.add(text, offsets, locations)
        return builder.finish()
