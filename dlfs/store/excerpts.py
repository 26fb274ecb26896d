"""Reads a long segment in excerpts: at their offsets in an address space, but not all at once.

The memory of a segment is mapped as a whole, and only those of its pages that were read take
memory. So code that reads a segment which is all in memory reads an excerpt of one. Every block is
verified when it is read; with replicas, what is wrong in one copy is read from the next.

Threads: one at a time.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from dlfs._native.checksums import crc32c_blocks
from dlfs.base.units import KIB
from dlfs.errors import ChecksumError
from dlfs.store.chunk_reader import CopyOrder

BLOCK_BYTES = 4096
"""Bytes of a segment that one checksum covers."""

READ_BYTES = 256 * KIB
"""Bytes that are read ahead, at the least, and kept behind, at the most."""

ReadRange = Callable[[int, NDArray[np.uint8], CopyOrder], None]
"""Reads the bytes of a segment from an offset on into memory of whole blocks."""


class SegmentReader:
    """Reads ranges of a segment, and where its copies are tried.

    Args:
        read: reads a range.
        orders: orders in which copies are tried.
        where: name of the segment in errors.
    """

    def __init__(self, read: ReadRange, orders: Sequence[CopyOrder], where: str) -> None:
        self.read = read
        self.orders = orders
        self.where = where


class Excerpts:
    """The memory of a range of a segment.

    Args:
        reader: reads the segment.
        origin: offset of the range in the segment, a multiple of the block size.
        size_bytes: length of the range, whole blocks.

    Attributes:
        memory: ``uint8[size_bytes]``; the caller reads only what was fetched and not released.
    """

    def __init__(self, reader: SegmentReader, origin: int, size_bytes: int) -> None:
        self._reader = reader
        self._origin = origin
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        self._mapping = mmap.mmap(-1, max(size_bytes, BLOCK_BYTES), flags=flags)
        with suppress(OSError):  # a kernel without huge pages
            self._mapping.madvise(mmap.MADV_NOHUGEPAGE)
        self.memory: NDArray[np.uint8] = np.frombuffer(self._mapping, np.uint8)[:size_bytes]
        self._checksums: NDArray[np.uint32] = np.empty(0, np.uint32)
        self._first_checked = 0

    def cover(self, checksums: NDArray[np.uint32], first_byte: int = 0) -> None:
        """Set the checksums of all blocks from an offset on; those before are not fetched."""
        self._checksums, self._first_checked = checksums, first_byte

    def read(self, start: int, end: int, choice: CopyOrder) -> None:
        """Read a range of whole blocks, unverified."""
        if start < end:
            self._reader.read(self._origin + start, self.memory[start:end], choice)

    def fetch(self, start: int, end: int) -> None:
        """Read a range of whole blocks and verify it.

        Raises:
            ChecksumError: a block is wrong in all copies.
            DeviceError: a read failed.
        """
        first = (start - self._first_checked) // BLOCK_BYTES
        expected = self._checksums[first : first + (end - start) // BLOCK_BYTES]
        wrong: NDArray[np.intp] = np.empty(0, np.intp)
        for number, choice in enumerate(self._reader.orders):
            if not number:
                self.read(start, end, choice)
            for block in wrong.tolist():
                at = start + block * BLOCK_BYTES
                self.read(at, at + BLOCK_BYTES, choice)
            got = crc32c_blocks(self.memory[start:end].data, BLOCK_BYTES)
            wrong = np.flatnonzero(got != expected)
            if not len(wrong):
                return
        block = int(wrong[0])
        raise ChecksumError(
            f"read {self._reader.where}: expected CRC32C {int(expected[block]):#010x} of the block "
            f"at byte {self._origin + start + block * BLOCK_BYTES}, got {int(got[block]):#010x}"
        )

    def release(self, start: int, end: int) -> None:
        """Free the memory of a range of whole blocks, which is not read any more."""
        if start < end:
            self._mapping.madvise(mmap.MADV_DONTNEED, start, end - start)


class Cursor:
    """Reads a range of an excerpt from its start to its end, and frees what it has passed.

    Args:
        excerpts: memory of the range.
        start: offset of its first byte.
        end: offset of its end.
    """

    def __init__(self, excerpts: Excerpts, start: int, end: int) -> None:
        self._excerpts = excerpts
        self._read = start // BLOCK_BYTES * BLOCK_BYTES  # end of what was fetched
        # A block that the range shares with what is before it is not freed.
        self._freed = -(-start // BLOCK_BYTES) * BLOCK_BYTES
        self._end = -(-end // BLOCK_BYTES) * BLOCK_BYTES

    def need(self, start: int, end: int) -> NDArray[np.uint8]:
        """Return the bytes of a range; none before its start is asked for again.

        Raises:
            ChecksumError, DeviceError: as ``Excerpts.fetch``.
        """
        if end > self._read:
            ahead = min(self._end, max(end, self._read + READ_BYTES))
            ahead = -(-ahead // BLOCK_BYTES) * BLOCK_BYTES
            self._excerpts.fetch(self._read, ahead)
            self._read = ahead
        passed = start // BLOCK_BYTES * BLOCK_BYTES
        if passed - self._freed >= READ_BYTES:
            self._excerpts.release(self._freed, passed)
            self._freed = passed
        return self._excerpts.memory[start:end]
