"""The memory for samples that the readers of a process share (``native/include/dlfs/arena.h``)."""

from __future__ import annotations

from ctypes import byref

from dlfs._native import abi
from dlfs._native.handle import Handle, process_number
from dlfs._native.library import check, library
from dlfs.base.forks import OwnerProcess


class NativeArena:
    """A ``dlfs_arena``.

    Args:
        memory_bytes: bound of the memory, at least four chunks.
        chunk_bytes: chunk size of the volume whose readers share it.
        shared: True if other processes can map the memory (``dlfs._native.server_channel``).

    Raises:
        LimitError: the memory is smaller than four chunks, or too large to address.

    Threads: any at once. A forked child must make a new one.
    """

    def __init__(self, memory_bytes: int, chunk_bytes: int, *, shared: bool = False) -> None:
        self._owner = OwnerProcess()
        self.handle = Handle(library().dlfs_arena_destroy, process=process_number())
        flags = abi.ARENA_SHARED if shared else 0
        config = abi.ArenaConfig(memory_bytes=memory_bytes, chunk_bytes=chunk_bytes, flags=flags)
        message = f"share {memory_bytes} bytes of memory for chunks of {chunk_bytes}"
        check(library().dlfs_arena_create(byref(config), byref(self.handle)), message)

    def is_current(self) -> bool:
        """Return True in the process that made it, False in its forked children."""
        return self._owner.is_current()

    def stats(self) -> dict[str, int]:
        """Return the fields of ``dlfs_arena_stats`` by name."""
        stats = abi.ArenaStats()
        library().dlfs_arena_get_stats(self.handle, byref(stats))
        return abi.counters(stats)
