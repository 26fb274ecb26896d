"""Page-locks the sample memory of readers for a GPU, once for all loaders of a process.

A ``PageLock`` is the use of a locked mapping by one loader. The mapping is unlocked with its last
use: when the loaders or the readers are closed. A lock waits for the copies of its loader before
it ends, and keeps the memory mapped until then. A forked child has neither the locks nor the
copies, and leaves both alone. At the end of the process the system unlocks the memory.

Threads: any.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from dlfs import Batch
from dlfs.adapters.torch.cuda import Cuda
from dlfs.base.forks import Lock, OwnerProcess

if TYPE_CHECKING:
    from dlfs._native.sample_memory import SampleMemory


class Copies:
    """Copies out of page-locked memory that are under way, and the batches that they read.

    Args:
        cuda: the GPU.

    Threads: any.
    """

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._lock = Lock()
        self._under_way: deque[tuple[Any, Batch]] = deque()

    def __len__(self) -> int:
        return len(self._under_way)

    @contextmanager
    def begin(self, batch: Batch) -> Iterator[None]:
        """Pin a batch until what is copied in the block has arrived, also if the block raises."""
        with self._lock:
            try:
                yield
            finally:
                self._under_way.append((self._cuda.record(), batch))

    def release_passed(self) -> None:
        """Release the batches whose copies have arrived."""
        with self._lock:
            while self._under_way and self._under_way[0][0].query():
                self._under_way.popleft()

    def wait(self) -> None:
        """Wait until all copies have arrived, and release their batches."""
        with self._lock:
            while self._under_way:
                self._under_way[0][0].synchronize()
                self._under_way.popleft()


@dataclass(slots=True)
class _Locked:
    """A mapping that is page-locked, by its uses."""

    cuda: Cuda
    uses: int
    owner: OwnerProcess


_locked: dict[int, _Locked] = {}
"""Mappings that are page-locked, by address."""

_changing = Lock()


class PageLock:
    """One loader's use of sample memory that is page-locked.

    Args:
        memory: mapping to lock.
        cuda: the GPU to lock it for.
        copies: copies of the loader, which ``close`` waits for.

    Attributes:
        memory: the mapping.
        view: the mapping as a tensor that programs on the GPU read, ``uint8[...]``; None if they
            cannot, or the lock is closed.
        closed: True once ``close`` was called.

    Raises:
        PageLockError: the driver refuses.
    """

    def __init__(self, memory: SampleMemory, cuda: Cuda, copies: Copies) -> None:
        self.memory = memory
        self.closed = False
        self._copies = copies
        self._owner = OwnerProcess()
        self._mapped: object = memory.owner
        with _changing:
            found = _locked.get(memory.address)
            if found is None or not found.owner.is_current():
                cuda.lock(memory.address, memory.size_bytes, writable=memory.writable)
                found = _locked[memory.address] = _Locked(cuda, 0, self._owner)
            found.uses += 1
        self.view = self._make_view(cuda)
        memory.add_user(self)

    def _make_view(self, cuda: Cuda) -> torch.Tensor | None:
        try:
            return cuda.view(self.memory.address, self.memory.size_bytes)
        except RuntimeError as error:
            warnings.warn(
                f"pin_memory: programs on {cuda.device} cannot read page-locked memory: "
                f"{str(error).splitlines()[0]}; small samples are copied one by one",
                stacklevel=2,
            )
            return None

    def close(self) -> None:
        """End this use, after its copies; unlock the mapping with its last use. Idempotent."""
        if not self._owner.is_current():
            return
        with _changing:
            if self.closed:
                return
            self.closed = True  # no copy begins from here on
        self._copies.wait()
        self.view = None
        with _changing:
            found = _locked[self.memory.address]
            found.uses -= 1
            if not found.uses:
                del _locked[self.memory.address]
                found.cuda.unlock(self.memory.address)
        self._mapped = None
