"""A namespace: memory or a file, in blocks, with the writes that a loss of power would undo.

A ``SlowNamespace`` has a back end that answers late, and goes on when the connection has ended.

With a volatile write cache, what every block held before its first write since the last flush is
kept, so that ``lose_cache`` can bring the durable contents back.
"""

from __future__ import annotations

import mmap
import os
import threading
import uuid
from pathlib import Path

from dlfs.errors import UsageError
from dlfs.testing.nvme.reservation import Reservations


class Namespace:
    """Blocks, an identity, and reservations.

    Args:
        size_bytes: a multiple of ``block_bytes``.
        nsid: 1 or more.
        block_bytes: 512 or more, a power of two.
        path: of a file that holds it; None: memory. The file grows to ``size_bytes``.
        identity: its UUID, and its NGUID; by default made from ``nsid`` and at random.
        volatile_cache: writes may be lost until they are flushed.

    Raises:
        UsageError: the size is no multiple of the blocks.
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
        self.reservations = Reservations()
        self._map = None if path is None else _map_file(path, size_bytes)
        self.contents = memoryview(bytearray(size_bytes) if self._map is None else self._map)
        self._undo: dict[int, bytes] = {}

    @property
    def blocks(self) -> int:
        """NSZE."""
        return self.size_bytes // self.block_bytes

    def read(self, block: int, count: int) -> memoryview:
        """The contents, uncopied; IndexError when they are out of range."""
        start, end = self._range(block, count)
        return self.contents[start:end]

    def write(self, block: int, data: bytes | bytearray | memoryview) -> None:
        """Change the contents; IndexError when they are out of range."""
        start, end = self._range(block, len(data) // self.block_bytes)
        if self.volatile_cache:
            for at in range(start, end, self.block_bytes):
                if at not in self._undo:
                    self._undo[at] = bytes(self.contents[at : at + self.block_bytes])
        self.contents[start:end] = data

    def flush(self) -> None:
        """Make what was written durable."""
        self._undo.clear()

    def lose_cache(self) -> None:
        """Undo what was written since the last flush."""
        for at, old in self._undo.items():
            self.contents[at : at + len(old)] = old
        self._undo.clear()

    def close(self) -> None:
        """Let go of the file, where there is one. Idempotent."""
        if self._map is not None and not self._map.closed:
            self.contents.release()
            self._map.close()

    def _range(self, block: int, count: int) -> tuple[int, int]:
        if block + count > self.blocks:
            raise IndexError(f"blocks {block}..{block + count} of {self.blocks}")
        return block * self.block_bytes, (block + count) * self.block_bytes


class SlowNamespace(Namespace):
    """A namespace whose back end can hold one write and execute it later.

    Args:
        size_bytes: a multiple of ``block_bytes``.
        late_s: time after which a held write takes effect, in seconds; at most the Command Quiesce
            Time of an honest controller.

    Attributes:
        hold: the next write is held; reset by that write.
        landed: set when the held write has taken effect.

    Threads: the held write takes effect in a thread of its own.
    """

    def __init__(self, size_bytes: int, *, late_s: float) -> None:
        super().__init__(size_bytes)
        self.hold = False
        self.landed = threading.Event()
        self._late_s = late_s

    def write(self, block: int, data: bytes | bytearray | memoryview) -> None:
        """Change the contents, or hold the change; IndexError when they are out of range."""
        if not self.hold:
            super().write(block, data)
            return
        self.hold = False
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
