"""Copies of objects that are samples: a file for each block, whose samples lie as in a buffer.

The objects are divided into blocks of samples in the order in which they are imported, as soon as
the size of each is known, and the blocks into groups, each of at most half the bound of the spool.
A step of the import ends behind each group, and then its files are deleted. If all sizes are known
beforehand, the groups are the parts of the source, within the same bound. The division follows
from the sizes alone. So an import that goes on at the beginning of a block, and finds the files of
an earlier run, divides them in the same way: an object is there if the bytes at its place have the
CRC32C of the manifest.

Threads: the thread of the event loop places objects; another one takes the blocks, in turn.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from dlfs._native.handle import Descriptor
from dlfs.ingest.order import BLOCK_SAMPLES_MAX, round_up
from dlfs.ingest.remote.digests import file_crc
from dlfs.ingest.remote.failures import disk_errors
from dlfs.ingest.remote.fetching import Copies, Fetch, Place
from dlfs.ingest.remote.manifest import Manifest
from dlfs.ingest.source import Bytes, Int64Array


@dataclass(slots=True)
class Block:
    """Samples that follow each other in the order of the import.

    Attributes:
        first: position of the first one in the order.
        begins_group: True if a step has to end before the block.
        sizes: size of each sample in bytes.
        size_bytes: sum of these.
        group_bytes: bytes on the disk of the blocks of its group before it.
        missing: number of samples that are not there yet.
        is_closed: True if no further sample belongs to it.
    """

    first: int
    begins_group: bool = False
    sizes: list[int] = field(default_factory=list)
    size_bytes: int = 0
    group_bytes: int = 0
    missing: int = 0
    is_closed: bool = False

    @property
    def is_complete(self) -> bool:
        """True if all samples are there."""
        return self.is_closed and not self.missing

    @property
    def disk_bytes(self) -> int:
        """Bytes that the file takes on the disk."""
        return round_up(self.size_bytes)


class BlockDivision:
    """Divides samples into blocks, one after the other.

    Args:
        first: position of the first sample in the order, which begins a block.
        group_bytes: bytes on the disk of the blocks of its group before it.
        block_bytes: most bytes of a block of more than one sample.
        group_bytes_max: most bytes of a group of more than one block; None without a bound.
        ends: positions in the order at which groups end in any case.
    """

    def __init__(
        self,
        first: int,
        group_bytes: int,
        block_bytes: int,
        group_bytes_max: int | None,
        ends: Collection[int] = (),
    ) -> None:
        self.blocks = [Block(first, group_bytes=group_bytes)]
        self._block_bytes = block_bytes
        self._group_bytes_max = group_bytes_max
        self._ends = frozenset(ends)

    def add(self, size_bytes: int) -> Block:
        """Add the next sample to a block; return the block, at whose end it is."""
        block = self.blocks[-1]
        is_full = block.size_bytes + size_bytes > self._block_bytes
        is_full |= len(block.sizes) == BLOCK_SAMPLES_MAX
        ends_group = block.first + len(block.sizes) in self._ends
        if block.sizes and (is_full or ends_group):
            block.is_closed = True
            group_bytes = 0 if ends_group else block.group_bytes + block.disk_bytes
            block = Block(block.first + len(block.sizes), ends_group, group_bytes=group_bytes)
            self.blocks.append(block)
        block.sizes.append(size_bytes)
        block.size_bytes += size_bytes
        block.missing += 1
        group_bytes = block.group_bytes + block.disk_bytes
        bound = self._group_bytes_max
        if bound is not None and block.group_bytes and group_bytes > bound:
            block.begins_group, block.group_bytes = True, 0
        return block


class BlockCopies(Copies):
    """The files of blocks, named by the positions of their first samples.

    Args:
        folder: folder of the files.
        manifest: manifest with the CRC32C of the objects that are there.
        division: divides the samples.
        count: number of the objects to place.
        passed: number of the first of these that are not read any more.
        limit_bytes: most bytes of the files; a larger object is placed when there is no other.
    """

    def __init__(
        self,
        folder: str,
        manifest: Manifest,
        division: BlockDivision,
        count: int,
        passed: int,
        limit_bytes: int,
    ) -> None:
        self._folder = folder
        self._manifest = manifest
        self._division = division
        self._count = count
        self._passed = passed
        self._limit_bytes = limit_bytes
        self._used_bytes = 0
        self._places: dict[int, tuple[Block, int]] = {}  # of the objects that are not complete
        self._files: dict[int, Descriptor] = {}
        self._announced = -1
        self._taken = self._deleted = 0
        self._ends: deque[int] = deque()

    # ---- on the event loop -----------------------------------------------------------------------

    def place(self, number: int, fetch: Fetch) -> Place | None:
        """Find the place of the next object; see ``Copies``."""
        size_bytes = fetch.item.size_bytes
        if number not in self._places:
            before = self._division.blocks[-1]
            block = self._division.add(size_bytes)
            if before.is_complete:
                self._end(before)
            self._places[number] = block, block.size_bytes - size_bytes
            if block.begins_group and block.first > self._announced:
                self._announced = block.first
                self.wake()
        block, offset = self._places[number]
        added = block.disk_bytes - round_up(offset)
        if self._used_bytes and self._used_bytes + added > self._limit_bytes:
            return None
        self._used_bytes += added
        if number + 1 == self._count:
            block.is_closed = True
        path = self._path(block)
        if block.first not in self._files:
            file = self._files[block.first] = Descriptor()
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            with disk_errors(path):
                file.fill(os.open, path, flags, 0o600)
        return Place(self._files[block.first].value, path, offset)

    def is_complete(self, number: int, fetch: Fetch, place: Place) -> bool:
        """Return True if an earlier run has fetched an object and its copy is not damaged."""
        if number < self._passed:
            return True
        expected = self._manifest.objects.get(fetch.key)
        if expected is None:
            return False
        last = place.offset_bytes + fetch.item.size_bytes
        with disk_errors(place.path):
            if file_crc(place.file, place.offset_bytes, last) == expected:
                return True
        self._manifest.append(fetch.key, dropped=True)
        return False

    def finish(self, number: int, fetch: Fetch) -> None:
        """Count an object of a block."""
        del fetch
        block, _ = self._places.pop(number)
        block.missing -= 1
        if block.is_complete:
            self._end(block)

    def _end(self, block: Block) -> None:
        """Close the file of a block that is complete."""
        self._files.pop(block.first).close()
        self.wake()

    def release(self, size_bytes: int) -> None:
        """Take note that files of so many bytes were deleted."""
        self._used_bytes -= size_bytes

    def close(self) -> None:
        """Close the files."""
        while self._files:
            self._files.popitem()[1].close()

    # ---- in the thread that takes the blocks -----------------------------------------------------

    @property
    def next_block(self) -> Block | None:
        """The next block to take, if its first sample has a place."""
        blocks = self._division.blocks
        found = blocks[self._taken] if self._taken < len(blocks) else None
        return found if found is not None and found.sizes else None

    def take(self, block: Block, buffer: Bytes) -> None:
        """Read the next block, which is complete, into a buffer of its size."""
        path = self._path(block)
        with disk_errors(path), Descriptor() as file:
            file.fill(os.open, path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            view, position = buffer.data, 0
            while count := os.preadv(file.value, [view[position:]], position):
                position += count
            if position < len(view):
                raise OSError(errno.EIO, f"expected {len(view)} bytes, got {position}")
        self._taken += 1

    def end_group(self) -> None:
        """Take note that a step ends behind the blocks that were taken."""
        self._ends.append(self._taken)

    def delete_group(self) -> int:
        """Delete the files up to the next end of a step; return their bytes on the disk.

        Threads: that which commits the steps.
        """
        size_bytes, end = 0, self._ends.popleft()
        for block in self._division.blocks[self._deleted : end]:
            with disk_errors(self._path(block)), suppress(FileNotFoundError):
                os.unlink(self._path(block))
            size_bytes += block.disk_bytes
            block.sizes = []
        self._deleted = end
        return size_bytes

    def _path(self, block: Block) -> str:
        return f"{self._folder}/{block.first}"


def offsets_of(block: Block) -> tuple[Int64Array, Int64Array]:
    """Return the offset and the size of each sample in the block, ``int64[n]`` both."""
    lengths = np.array(block.sizes, np.int64)
    return np.cumsum(lengths) - lengths, lengths
