"""Copies a state for ``async_save``, so that training continues while the copy is written.

The memory of a copy is allocated at the first save and used again by later ones, because new memory
costs more than the copy itself. A copy that is still being written is left alone: the next one then
gets memory of its own.

torch's ``StateDictStager`` finds the tensors of a state, also in shards, and copies those of a GPU.
Tensors in the CPU's memory are copied by this module, in blocks, by the calling thread and a few
others. A thread whose core is busy copies fewer blocks, and the caller does not wait for it.

Threads: one stages at a time; copies come back from any thread.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint._state_dict_stager import StateDictStager

from dlfs.base.forks import OwnerProcess
from dlfs.base.threads import ThreadPool
from dlfs.base.units import MIB

COPY_THREADS_MAX = 4
"""Most threads that copy, the caller's included."""

BLOCK_BYTES = 4 * MIB
"""Bytes that a thread copies at a time."""


class _CopyStager(StateDictStager):
    """Finds the storages of a state. Those in the CPU's memory are copied by ``run``."""

    def __init__(self) -> None:
        super().__init__()
        self._blocks: list[tuple[Any, Any]] = []

    def _stage_untyped_storage(self, storage: Any, non_blocking: bool = False) -> Any:
        """Return the copy of a storage; torch calls this once for each storage of a state."""
        if storage.device.type != "cpu" or not storage.nbytes():
            return super()._stage_untyped_storage(storage, non_blocking=non_blocking)
        copy = self._cached_storage_mapping.get(storage)
        if copy is None or copy.nbytes() != storage.nbytes():
            copy = torch.UntypedStorage(storage.nbytes())
            self._cached_storage_mapping[storage] = copy
        target, source = _memory(copy), _memory(storage)
        for start in range(0, source.size, BLOCK_BYTES):
            block = slice(start, start + BLOCK_BYTES)
            self._blocks.append((target[block], source[block]))
        return copy

    def run(self, pool: ThreadPool | None) -> None:
        """Copy the storages that were found, together with the threads of a pool."""
        blocks = iter(self._blocks)
        helpers = range(COPY_THREADS_MAX - 1)
        started = [pool.submit(_copy_blocks, blocks) for _ in helpers] if pool else []
        try:
            _copy_blocks(blocks)
            for one in started:
                if not one.cancel():
                    one.result()
        finally:
            self._blocks = []


def _copy_blocks(blocks: Iterator[tuple[Any, Any]]) -> None:
    """Copy the blocks that no other thread has taken."""
    for target, source in blocks:
        np.copyto(target, source)


def _memory(storage: Any) -> Any:
    """Return the memory of a storage, ``uint8[n_bytes]``."""
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy()


class StagedState(dict[str, Any]):
    """A copied state. Its memory may be used again when this object is gone."""


def _make_free(free: list[_CopyStager], stager: _CopyStager) -> None:
    """Keep the memory of a copy for the next one, unless other memory is free already."""
    if not free:
        free.append(stager)


class Stager:
    """Copies states, and finds memory for the copies."""

    def __init__(self) -> None:
        self._free: list[_CopyStager] = []
        self._owner = OwnerProcess()
        self._pool: ThreadPool | None = None
        self._background: ThreadPool | None = None

    def copy_later(self, state: dict[str, Any]) -> Future[StagedState]:
        """Return the future copy of a state, which must not change until the copy is complete."""
        self._forget_parents()
        if self._background is None:
            self._background = ThreadPool(1, thread_name_prefix="dlfs-stage-later")
        return self._background.submit(self.copy, state)

    def copy(self, state: dict[str, Any]) -> StagedState:
        """Return a copy that does not change with the state.

        Args:
            state: the state, in which tensors may be in dictionaries, lists and tuples.
        """
        stager = self._free.pop() if self._free else _CopyStager()
        staged = StagedState(stager.stage(state))
        stager.run(self._threads())
        weakref.finalize(staged, _make_free, self._free, stager).atexit = False
        return staged

    def _forget_parents(self) -> None:
        """Set the pools of the parent aside in a forked child, which has none of their threads."""
        if not self._owner.is_current():
            self._background = self._pool = None
            self._owner = OwnerProcess()

    def _threads(self) -> ThreadPool | None:
        self._forget_parents()
        helpers = min(COPY_THREADS_MAX, len(os.sched_getaffinity(0))) - 1
        if self._pool is None and helpers:
            self._pool = ThreadPool(helpers, thread_name_prefix="dlfs-stage")
        return self._pool

    def clear(self) -> None:
        """Free the memory of all copies, of those in use when they are gone; end the threads."""
        self._forget_parents()
        for pool in (self._background, self._pool):
            if pool is not None:
                pool.shutdown()
        self._background = self._pool = None
        self._free = []  # copies that are still in use end in the old list
