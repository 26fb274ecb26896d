"""Reads samples for the pyfuse3 server, and keeps copies of those that were read last.

A sample of up to a chunk is read as a whole before its first byte is sent. A copy of it stays
within a budget, so that the devices read it once for a program that reads the file page by page. Of
a larger sample only the requested range is read; the dataset's reader verifies and keeps the chunks
that it lies in.

Threads: the FUSE loop (trio) owns the cache. Worker threads of trio read.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from functools import partial

import trio

from dlfs.dataset.dataset import Dataset

READS_MAX = 32
"""Most samples and ranges that are read at the same time, each by a thread."""

ENTRY_BYTES = 1024
"""Memory that a copy takes beside its bytes, at most."""


@dataclass(eq=False)
class _Copy:
    """A sample in the cache."""

    charged_bytes: int
    data: bytes | None = None
    lock: trio.Lock = field(default_factory=trio.Lock)
    """Held by the request that reads the sample; others for the same sample wait for it."""


class SampleCache:
    """The samples that were read last.

    Args:
        budget_bytes: most memory of all copies; the newest one stays, whatever its size.

    Attributes:
        cached_bytes: memory of the copies, including those that are being read.

    Threads: the FUSE loop.
    """

    def __init__(self, *, budget_bytes: int) -> None:
        self.cached_bytes = 0
        self._budget_bytes = budget_bytes
        self._copies: OrderedDict[int, _Copy] = OrderedDict()  # least recently used first
        self._reads = trio.CapacityLimiter(READS_MAX)

    async def read(self, inode: int, dataset: Dataset, index: int, length_bytes: int) -> bytes:
        """Return a whole sample, that of a file; read it if there is no copy.

        Raises:
            DlfsError: the sample cannot be read, or it is damaged; the next call tries again.
        """
        copy = self._copies.get(inode)
        if copy is None:
            copy = self._copies[inode] = _Copy(length_bytes + ENTRY_BYTES)
            self.cached_bytes += copy.charged_bytes
            while self.cached_bytes > self._budget_bytes and len(self._copies) > 1:
                self.cached_bytes -= self._copies.popitem(last=False)[1].charged_bytes
        self._copies.move_to_end(inode)
        async with copy.lock:
            if copy.data is None:
                copy.data = await trio.to_thread.run_sync(
                    dataset.__getitem__, index, abandon_on_cancel=True, limiter=self._reads
                )
        return copy.data

    async def read_range(
        self, dataset: Dataset, index: int, offset_bytes: int, size_bytes: int
    ) -> bytearray:
        """Read a range that lies within a sample, which is not cached; raises as ``read``."""
        buffer = bytearray(size_bytes)
        read = partial(dataset.read_into, index, buffer, offset_bytes=offset_bytes)
        await trio.to_thread.run_sync(read, abandon_on_cancel=True, limiter=self._reads)
        return buffer
