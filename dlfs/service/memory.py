"""``ServiceMemory``: the memory for samples of a node service, which its clients map.

One arena has all of it, for the datasets of all volumes, their choices of fields, their streams and
the mount. An arena has slots of one chunk. So volumes of several chunk sizes divide the memory
equally, by their sizes when the first dataset is opened. A volume of another size can then no
longer be attached.

The arenas live as long as the service: what a client still maps of them is a part of the memory.
There is no access control between the datasets: a client maps the samples of all.

Threads: any at once.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from dlfs._native.arena import NativeArena
from dlfs.base.forks import Lock
from dlfs.base.units import format_bytes
from dlfs.errors import LimitError
from dlfs.reader.budget import MEMORY_CHUNKS_MIN, MemoryBudget


class ServiceMemory(MemoryBudget):
    """The memory of a service.

    Args:
        size_bytes: bound of the memory, in bytes. An arena has at least four chunks.
    """

    shared = True

    def __init__(self, size_bytes: int) -> None:
        super().__init__(size_bytes)
        self._lock = Lock()
        self._sizes: Counter[int] = Counter()
        """Volumes of each chunk size, until there are arenas."""
        self._arenas: dict[int, NativeArena] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return MemoryBudget, (self.size_bytes,)  # a process of its own has memory of its own

    def add_volume(self, chunk_bytes: int, where: str) -> None:
        """Note the chunk size of a volume that the service serves from now on.

        Args:
            chunk_bytes: chunk size of the volume.
            where: the volume, for the error.

        Raises:
            LimitError: the memory is divided already, and has none for this size.
        """
        with self._lock:
            if self._arenas and chunk_bytes not in self._arenas:
                sizes = ", ".join(format_bytes(size) for size in sorted(self._arenas))
                raise LimitError(
                    f"serve volume {where}: its chunks have {format_bytes(chunk_bytes)}, and the "
                    f"service has divided its memory among chunks of {sizes}; start the service "
                    "again with this volume on its command line, or serve it by another one"
                )
            self._sizes[chunk_bytes] += 1

    def remove_volume(self, chunk_bytes: int) -> None:
        """Undo ``add_volume``. An arena of its chunk size stays."""
        with self._lock:
            self._sizes -= Counter([chunk_bytes])

    def arena(self, chunk_bytes: int) -> NativeArena:
        """Return the arena for chunks of this size.

        Args:
            chunk_bytes: chunk size of a volume that the service serves.

        Raises:
            LimitError: the memory is too large to address.
        """
        with self._lock:
            if not self._arenas:
                part_bytes = self.size_bytes // len(self._sizes)
                self._arenas = {
                    size: NativeArena(max(part_bytes, MEMORY_CHUNKS_MIN * size), size, shared=True)
                    for size in self._sizes
                }
            return self._arenas[chunk_bytes]

    def stats(self) -> dict[str, int]:
        """Return the sums of ``NativeArena.stats`` over the arenas; the bound is known before."""
        with self._lock:
            each = [arena.stats() for arena in self._arenas.values()]
        if not each:
            return {"memory_bytes": self.size_bytes, "held_bytes": 0, "readers": 0}
        return {name: sum(stats[name] for stats in each) for name in each[0]}
