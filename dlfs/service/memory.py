"""``ServiceMemory``: the memory for samples of a node service, which its clients map.

A client maps the whole memory that a dataset's samples lie in. So a volume that only some clients
may read has memory of its own: a *part*, with an arena that no other volume uses. The volumes
without a rule of their own share one part for each chunk size, because an arena has slots of one
chunk. In a part, all datasets, their choices of fields, their streams and the mount share the
memory by need.

A part gets its bytes when the first of its datasets is opened, and keeps them: an equal share of
what is left, of which parts without bytes and, where further volumes are expected, one part to come
have the others. The part of one volume takes no more than that volume can fill, or as many bytes as
the operator gave it. It is given back when the volume is detached, as soon as no batch pins it.
Pages are taken from the system when they are first used.

Threads: any at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dlfs._native.arena import NativeArena
from dlfs.base.forks import Lock
from dlfs.base.units import MIB, format_bytes
from dlfs.errors import LimitError
from dlfs.reader.budget import MEMORY_CHUNKS_MIN, MemoryBudget

_MARGIN_BYTES = 64 * MIB
"""Memory that a volume's part may have beyond its samples and a quarter of them, for read-ahead."""


class ServiceMemory:
    """The memory of a service.

    Args:
        size_bytes: bound of the memory, in bytes. A part has at least four chunks.
        expects_volumes: leave memory to volumes that will be attached.
    """

    def __init__(self, size_bytes: int, *, expects_volumes: bool = False) -> None:
        self.size_bytes = size_bytes
        self._expects_volumes = expects_volumes
        self._lock = Lock()
        self._shared: dict[int, MemoryPart] = {}
        """Parts of the volumes without a rule, by chunk size."""
        self._own: set[MemoryPart] = set()
        """Parts of one volume."""
        self._retired: list[NativeArena] = []
        """Arenas of detached volumes, in which batches of clients may pin samples yet."""

    def add_volume(
        self,
        chunk_bytes: int,
        where: str,
        *,
        own: bool = False,
        capacity_bytes: int = 0,
        part_bytes: int | None = None,
    ) -> MemoryPart:
        """Return the part of a volume that the service serves from now on.

        Args:
            chunk_bytes: chunk size of the volume.
            where: the volume, for the error.
            own: give the volume a part of its own.
            capacity_bytes: size of the volume's chunks; with ``own``.
            part_bytes: size of its own part; None: as the module's head says.

        Raises:
            LimitError: the other parts have the memory.
        """
        most_bytes = capacity_bytes + capacity_bytes // 4 + _MARGIN_BYTES if own else None
        with self._lock:
            part = None if own else self._shared.get(chunk_bytes)
            if part is None:
                part = MemoryPart(self, chunk_bytes, most_bytes)
                self._admit(part, where, part_bytes)
                if own:
                    self._own.add(part)
                else:
                    self._shared[chunk_bytes] = part
            part.volumes += 1
            return part

    def _admit(self, part: MemoryPart, where: str, part_bytes: int | None) -> None:
        """Check that there is memory for one more part; reserve it if its size is given.

        Raises:
            LimitError: there is too little.
        """
        free_bytes = self._free_bytes()
        wanted = part.least_bytes if part_bytes is None else max(part_bytes, part.least_bytes)
        taken = len([each for each in self._parts() if each.bytes is not None])
        if (taken or part_bytes is not None) and wanted > free_bytes:
            raise LimitError(
                f"serve volume {where}: expected {format_bytes(wanted)} of memory for its samples, "
                f"which it cannot share; {format_bytes(max(0, free_bytes))} of "
                f"{format_bytes(self.size_bytes)} are left. Start the service again with more "
                "(--cache), with this volume on its command line, or with --sockets, which leaves "
                "memory to volumes that come later; or detach a volume"
            )
        part.bytes = part_bytes if part_bytes is None else wanted

    def remove_volume(self, part: MemoryPart) -> None:
        """Undo ``add_volume``. The arena of a part that volumes share stays."""
        with self._lock:
            part.volumes -= 1
            if part in self._own:
                self._own.discard(part)
                if part.arena_made is not None:
                    self._retired.append(part.arena_made)
            elif not part.volumes and part.bytes is None:
                del self._shared[part.chunk_bytes]

    def make_arena(self, part: MemoryPart) -> NativeArena:
        """Return the arena of a part.

        Raises:
            LimitError: the memory is too large to address.
        """
        with self._lock:
            if part.arena_made is None:
                if part.bytes is None:
                    part.bytes = self._divide(part)
                part.arena_made = NativeArena(part.bytes, part.chunk_bytes, shared=True)
            return part.arena_made

    def stats(self, parts: Iterable[MemoryPart] | None = None) -> dict[str, int]:
        """Return ``NativeArena.stats`` of all parts together, or of some.

        Args:
            parts: those of some volumes; None: all, of which the bound is that of the service.
        """
        with self._lock:
            chosen = set(self._parts() if parts is None else parts)
            arenas = [part.arena_made for part in chosen if part.arena_made is not None]
            bound = sum(part.bytes or 0 for part in chosen)
            if parts is None:
                arenas += self._list_retired()
                bound = max(bound, self.size_bytes)
            each = [arena.stats() for arena in arenas]
        sums = {name: sum(stats[name] for stats in each) for name in ("held_bytes", "readers")}
        return {"memory_bytes": bound, **sums}

    # ---- with the lock held ----------------------------------------------------------------------

    def _parts(self) -> list[MemoryPart]:
        return [*self._shared.values(), *self._own]

    def _list_retired(self) -> list[NativeArena]:
        """Return the arenas of detached volumes that are still in use; drop the others."""
        self._retired = [arena for arena in self._retired if arena.stats()["readers"]]
        return self._retired

    def _free_bytes(self) -> int:
        given = sum(part.bytes or 0 for part in self._parts())
        retired = sum(arena.stats()["memory_bytes"] for arena in self._list_retired())
        return self.size_bytes - given - retired

    def _divide(self, part: MemoryPart) -> int:
        """Return the bytes of a part whose first dataset is opened."""
        waiting = sum(each.bytes is None for each in self._parts())
        share = max(0, self._free_bytes()) // (max(1, waiting) + self._expects_volumes)
        most = share if part.most_bytes is None else min(share, part.most_bytes)
        return max(most, part.least_bytes)


class MemoryPart(MemoryBudget):
    """The memory of one volume, or of all volumes of a chunk size that have no rule.

    Args:
        memory: the service's memory.
        chunk_bytes: chunk size of the volumes.
        most_bytes: most that the part can use, in bytes; None: unknown.

    Attributes:
        volumes: number of volumes that use it.
        bytes: size of the part; None until it is decided.
        arena_made: its arena; None until a dataset is opened. Guarded by the lock of ``memory``.
    """

    shared = True

    def __init__(self, memory: ServiceMemory, chunk_bytes: int, most_bytes: int | None) -> None:
        super().__init__(memory.size_bytes)
        self._memory = memory
        self.chunk_bytes = chunk_bytes
        self.most_bytes = most_bytes
        self.volumes = 0
        self.bytes: int | None = None
        self.arena_made: NativeArena | None = None

    @property
    def least_bytes(self) -> int:
        """The least size of the part, in bytes."""
        return MEMORY_CHUNKS_MIN * self.chunk_bytes

    def __reduce__(self) -> tuple[Any, ...]:
        return MemoryBudget, (self.size_bytes,)  # a process of its own has memory of its own

    def arena(self, chunk_bytes: int) -> NativeArena:
        """Return the part's arena; raises as ``ServiceMemory.make_arena``."""
        assert chunk_bytes == self.chunk_bytes
        return self._memory.make_arena(self)

    def stats(self) -> dict[str, int]:
        """Return ``NativeArena.stats`` of the part, and its bound."""
        return self._memory.stats([self])
