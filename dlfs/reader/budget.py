"""``MemoryBudget``: the memory for samples of an opened volume, one arena in each process."""

from __future__ import annotations

import sys
from typing import Any
from uuid import uuid4

from dlfs._native.arena import NativeArena
from dlfs.base.closing import LiveValues
from dlfs.base.forks import Lock

MEMORY_CHUNKS_MIN = 4
"""Smallest memory of an arena, in chunks."""

_lock = Lock()
_arenas: LiveValues[str, NativeArena] = LiveValues()
"""The arenas of this process, and after a fork those of its parent; by the key of their memory."""


class MemoryBudget:
    """The memory that all readers of an opened volume share.

    A copy, pickled or forked into another process, stands for the same memory: the readers there
    have one arena as well. The workers of a PyTorch ``DataLoader`` have equal parts of the memory.

    Args:
        size_bytes: memory of a process, or of all workers of a ``DataLoader`` together, in bytes.
            An arena has at least four chunks.
        key: of the memory that this one is a copy of; None for a new one.

    Attributes:
        size_bytes: as given.
        shared: True if other processes can map the memory.

    Threads: any at once.
    """

    shared = False

    def __init__(self, size_bytes: int, key: str | None = None) -> None:
        self.size_bytes = size_bytes
        self._key = uuid4().hex if key is None else key

    def __reduce__(self) -> tuple[Any, ...]:
        return MemoryBudget, (self.size_bytes, self._key)

    def arena(self, chunk_bytes: int) -> NativeArena:
        """Return the arena of this process, which is freed with the last reader that keeps it.

        Args:
            chunk_bytes: chunk size of the volume.

        Raises:
            LimitError: the memory is too large to address.
        """
        with _lock:
            arena = _arenas.get(self._key)
            if arena is None or not arena.is_current():
                size_bytes = self.size_bytes // _count_workers()
                least_bytes = MEMORY_CHUNKS_MIN * chunk_bytes
                arena = NativeArena(max(size_bytes, least_bytes), chunk_bytes)
                _arenas.put(self._key, arena)
            return arena

    def stats(self) -> dict[str, int] | None:
        """Return ``NativeArena.stats`` of this process's arena; None if no reader is open."""
        arena = _arenas.get(self._key)
        return None if arena is None or not arena.is_current() else arena.stats()


def _count_workers() -> int:
    """Return how many processes share the memory: the workers, if this is one of a DataLoader."""
    data = sys.modules.get("torch.utils.data")
    worker = None if data is None else data.get_worker_info()
    return 1 if worker is None else max(1, int(worker.num_workers))
