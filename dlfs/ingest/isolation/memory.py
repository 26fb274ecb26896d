"""Memory that this process shares with the one that reads a source: a file without a name."""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class SharedMemory:
    """A block of memory that grows and never shrinks.

    Owns: the descriptor. The mapped memory stays while an array of it does.

    Args:
        descriptor: descriptor of the memory in this process.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._mapped: mmap.mmap | None = None

    @classmethod
    def create(cls, size_bytes: int) -> SharedMemory:
        """Make a block, whose descriptor a child process can inherit."""
        descriptor = os.memfd_create("dlfs-import", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        made = cls(descriptor)
        made.grow(size_bytes)
        return made

    def grow(self, size_bytes: int) -> None:
        """Give the block at least a size."""
        if os.fstat(self.descriptor).st_size < size_bytes:
            os.ftruncate(self.descriptor, -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)

    def view(self) -> memoryview:
        """Return all of the block as it is now."""
        size = os.fstat(self.descriptor).st_size
        if self._mapped is None or len(self._mapped) < size:
            self._mapped = mmap.mmap(self.descriptor, size)
        return memoryview(self._mapped)

    def array(self, size_bytes: int) -> NDArray[np.uint8]:
        """Return the first bytes of the block.

        Raises:
            ValueError: the block is shorter.
        """
        import numpy as np

        return np.frombuffer(self.view(), np.uint8, size_bytes)

    def close(self) -> None:
        """Close the descriptor; closing it again does nothing."""
        self._mapped = None
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
