"""A namespace in memory or in a file, with a simulated volatile write cache.

A ``Namespace`` with a volatile cache keeps the contents of each block from before its first write
since the last flush. ``lose_cache`` restores them, as a power loss would.

A ``SlowNamespace`` can execute a write after the connection that sent it has ended.
"""

from __future__ import annotations

import mmap
import os
import threading
import uuid
from pathlib import Path

from dlfs.errors import UsageError
from tests.support.nvme.reservation import Reservations


class Namespace:
    """The blocks, the identifier and the reservations of a namespace.

    Args:
        size_bytes: a multiple of ``block_bytes``.
        nsid: namespace ID, 1 or more.
        block_bytes: 512 or more, a power of two.
        path: file with the contents, which grows to ``size_bytes``; None: memory.
        identity: UUID and NGUID of the namespace; random by default.
        volatile_cache: True if writes may be lost until they are flushed.

    Raises:
        UsageError: the size is not a multiple of the block size.
    """

    def __init__(
        self,
        size_bytes: int,
        *,
        nsid: int = 1,
        block_bytes: int = 512,
        path: Path | None = None,
        identity: uuid.UUID | None = None,
        volatile_cache: bool = True,
    ) -> None:
        if size_bytes <= 0 or block_bytes & (block_bytes - 1) or size_bytes % block_bytes:
            raise UsageError(
                f"make a namespace: expected whole blocks of {block_bytes} bytes, "
                f"got {size_bytes} bytes"
            )
        self.nsid = nsid
        self.size_bytes = size_bytes
        self.block_bytes = block_bytes
        self.uuid = identity or uuid.uuid4()
        self.volatile_cache = volatile_cache
        self.read_only = False
        self.ana_group = 1
        self.reservations = Reservations()
        self._map = None if path is None else _map_file(path, size_bytes)
        self.contents = memoryview(bytearray(size_bytes) if self._map is None else self._map)
        self._undo: dict[int, bytes] = {}

    @property
    def blocks(self) -> int:
        """Size in blocks (NSZE)."""
        return self.size_bytes // self.block_bytes

    def read(self, block: int, count: int) -> memoryview:
        """Return a view of blocks; IndexError if they are out of range."""
        start, end = self._range(block, count)
        return self.contents[start:end]

    def write(self, block: int, data: bytes | bytearray | memoryview) -> None:
        """Overwrite blocks; IndexError if they are out of range."""
        start, end = self._range(block, len(data) // self.block_bytes)
        if self.volatile_cache:
            for at in range(start, end, self.block_bytes):
                if at not in self._undo:
                    self._undo[at] = bytes(self.contents[at : at + self.block_bytes])
        self.contents[start:end] = data

    def flush(self) -> None:
        """Make all writes durable."""
        self._undo.clear()

    def lose_cache(self) -> None:
        """Undo all writes since the last flush."""
        for at, old in self._undo.items():
            self.contents[at : at + len(old)] = old
        self._undo.clear()

    def close(self) -> None:
        """Close the file, if there is one. Idempotent."""
        if self._map is not None and not self._map.closed:
            self.contents.release()
            self._map.close()

    def _range(self, block: int, count: int) -> tuple[int, int]:
        if block + count > self.blocks:
            raise IndexError(f"blocks {block}..{block + count} of {self.blocks}")
        return block * self.block_bytes, (block + count) * self.block_bytes


class SlowNamespace(Namespace):
    """A namespace that can delay one write.

    Args:
        size_bytes: a multiple of ``block_bytes``.
        late_s: time after which a delayed write takes effect, in seconds; at most the Command
            Quiesce Time of a correct controller.

    Attributes:
        delays_next: True if the next write is to be delayed; reset by that write.
        landed: set when the delayed write has taken effect.

    Threads: the delayed write takes effect in a separate thread.
    """

    def __init__(self, size_bytes: int, *, late_s: float) -> None:
        super().__init__(size_bytes)
        self.delays_next = False
        self.landed = threading.Event()
        self._late_s = late_s

    def write(self, block: int, data: bytes | bytearray | memoryview) -> None:
        """Overwrite blocks, now or delayed; IndexError if they are out of range."""
        if not self.delays_next:
            super().write(block, data)
            return
        self.delays_next = False
        threading.Timer(self._late_s, self._land, (block, bytes(data))).start()

    def _land(self, block: int, data: bytes) -> None:
        super().write(block, data)
        self.landed.set()


def _map_file(path: Path, size_bytes: int) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(descriptor, max(size_bytes, os.fstat(descriptor).st_size))
        return mmap.mmap(descriptor, size_bytes)
    finally:
        os.close(descriptor)
