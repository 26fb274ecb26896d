"""``WorkerMemory``: words that a training process shares with the workers of its ``DataLoader``.

An object that is made before the ranks are forked or spawned is copied to each of them, and shared
memory would be common to all ranks. So each training process has words of its own: those of its
parent, as they were when it was forked or when the object was pickled. It makes them when it uses
them first, or before it forks. A worker of a ``DataLoader`` uses the words of the process that
started it.

Threads: any; the words are plain memory without a lock.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import get_worker_info

from dlfs.base.closing import LiveObjects

_all: LiveObjects[WorkerMemory] = LiveObjects()


class WorkerMemory:
    """Words of 64 bits, 0 at first.

    Args:
        count: number of words.
    """

    def __init__(self, count: int) -> None:
        self._shared = torch.zeros(count, dtype=torch.int64).share_memory_()
        self._inherited: npt.NDArray[np.int64] | None = None
        """Words as they were when this process got the memory of its parent; None for its own."""
        _all.add(self)

    def __getstate__(self) -> dict[str, Any]:
        words = self.words
        return {"_shared": self._shared, "_inherited": words.copy()}

    def __setstate__(self, values: dict[str, Any]) -> None:
        self.__dict__.update(values)
        _all.add(self)

    @property
    def words(self) -> npt.NDArray[np.int64]:
        """The words of the training process, ``int64[count]``."""
        self.separate()
        words: npt.NDArray[np.int64] = self._shared.numpy()
        return words

    def separate(self) -> None:
        """Make words of this process's own, unless it is a worker, or has them already."""
        if self._inherited is not None and get_worker_info() is None:
            self._shared = torch.from_numpy(self._inherited).share_memory_()
            self._inherited = None

    def inherit(self) -> None:
        """Record the words in a child that was just forked."""
        self._inherited = self._shared.numpy().copy()


def _separate_all() -> None:
    for memory in _all:
        memory.separate()


def _inherit_all() -> None:
    for memory in _all:
        memory.inherit()


os.register_at_fork(before=_separate_all, after_in_child=_inherit_all)
