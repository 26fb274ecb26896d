"""Keeps a loader's position in memory that DataLoader's workers share with the training process.

A ``DataLoader`` whose dataset is a ``Loader`` starts its workers without a word to the ``Loader``
of the training process, so the workers themselves find out which epoch an iteration is. The
training process writes where the next iteration begins (``set``). The first worker of an iteration
takes it from there, records it as the begin of this iteration and the epoch behind it as the begin
of the next one (``begin``); the other workers of the iteration find the record.

The workers of one iteration know each other by the base seed that DataLoader draws for it, the
numbers of their processes, which are consecutive, and how many iterations they have begun, which is
equal in persistent workers. There is no lock. Two workers that both find no record write the same
one; a worker that reads the begin of the next iteration looks for the record again afterwards,
since it is written before that begin changes.

Threads: the training process is the only one that calls ``set``; each worker calls ``begin``.
"""

from __future__ import annotations

import multiprocessing
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dlfs.adapters.torch.states import State, next_epoch

_FIELDS = ("seed", "shuffle", "window_chunks", "epoch", "position")
_SHUFFLES = ("global", "chunk", None)
_UINT64 = 1 << 64

RECORDS = 64
"""Iterations, newest of each slot, whose begin is on record: several may be under way at a time."""

# The layout of the shared memory, in words of 8 bytes.
_SET = slice(0, 7)  # how often it was set, whether batches were given up to there, and the fields
_NEXT = slice(7, 13)  # of which setting the next iteration is a successor, and its fields
_RECORD_WORDS = 7  # tag, process, fields
_RECORDS_AT = 13


class Cursor:
    """The state that the next iteration begins with, shared between processes.

    Args:
        state: a plain state of an epoch.
    """

    def __init__(self, state: State) -> None:
        words = _RECORDS_AT + RECORDS * _RECORD_WORDS
        self._state = state  # for what never changes, such as the dataset
        self._memory = torch.zeros(words, dtype=torch.int64).share_memory_()
        self.set(state)

    def __setstate__(self, values: dict[str, Any]) -> None:
        self.__dict__.update(values)
        if not self._memory.is_shared():  # a pickle outside of starting a process
            self._memory = self._memory.share_memory_()

    @property
    def _words(self) -> npt.NDArray[np.uint64]:
        words: npt.NDArray[np.uint64] = self._memory.numpy().view(np.uint64)
        return words

    @property
    def was_begun(self) -> bool:
        """True if workers have begun an iteration since ``set`` was last called."""
        words = self._words
        return bool(words[_NEXT][0] == words[_SET][0])

    @property
    def was_given(self) -> bool:
        """True if the training process was given batches up to the state, which was not loaded."""
        return bool(self._words[_SET][1]) and not self.was_begun

    def get(self) -> State:
        """Return the plain state that the next iteration begins with."""
        words = self._words
        return self._unpack(words[_NEXT][1:] if self.was_begun else words[_SET][2:])

    def set(self, state: State, *, given: bool = False) -> None:
        """Begin the next iteration with a plain state of the same dataset and selection.

        Args:
            state: where it begins.
            given: the training process was given the batches before it. An iteration of a
                ``DataLoader``'s workers begins with the whole epoch then.
        """
        words = self._words[_SET]
        words[:] = [int(words[0]) + 1, given, *_pack(state)]

    def begin(
        self, seed: int, worker: int, workers: int, iteration: int, own: State | None
    ) -> State:
        """Return the plain state that an iteration begins with, in one of its workers.

        Args:
            seed: DataLoader's base seed of the iteration.
            worker: 0..workers-1.
            workers: of the iteration.
            iteration: counts those that this worker process has begun.
            own: the state that was loaded in the worker; None: the iteration begins at the cursor.
        """
        tag = (hash((seed, iteration)) % _UINT64) | 1
        first = max(0, _process_number() - worker)
        words = self._words
        begin = _RECORDS_AT + (tag >> 1) % RECORDS * _RECORD_WORDS
        record = words[begin : begin + _RECORD_WORDS]

        def is_recorded() -> bool:
            # A generator that is seeded anew before each iteration draws equal base seeds; then
            # the processes tell the iterations apart.
            return int(record[0]) == tag and abs(first - int(record[1])) < workers

        if is_recorded():
            return own or self._unpack(record[2:])
        setting = words[_SET][0]
        state = own or self.get()
        if own is None and self.was_given:
            state = {**state, "position": 0}
        if is_recorded():
            return own or self._unpack(record[2:])
        record[1:] = [first, *_pack(state)]
        record[0] = tag
        words[_NEXT][1:] = _pack(next_epoch(state))
        words[_NEXT][0] = setting
        return state

    def _unpack(self, words: npt.NDArray[np.uint64]) -> State:
        values = dict(zip(_FIELDS, words.tolist(), strict=True))
        return {**self._state, **values, "shuffle": _SHUFFLES[values["shuffle"]]}


def _pack(state: State) -> list[int]:
    return [_SHUFFLES.index(state[name]) if name == "shuffle" else state[name] for name in _FIELDS]


def _process_number() -> int:
    """Return which child of the training process this one is; multiprocessing counts them."""
    identity: tuple[int, ...] = getattr(multiprocessing.current_process(), "_identity", ())
    return identity[-1] if identity else 0
