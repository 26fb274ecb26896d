"""``Cursor``: the position of a loader, in words that DataLoader's workers share with the trainer.

A ``DataLoader`` whose dataset is a ``Loader`` starts its workers without informing the ``Loader``
of the training process, so the workers determine which epoch an iteration is. The training process
writes where the next iteration begins (``set``). The first worker of an iteration reads that,
records it as the begin of this iteration, and writes the following epoch as the begin of the next
one (``begin``). The other workers of the iteration find the record.

The workers of one iteration identify it by the base seed that DataLoader draws for it, the numbers
of their processes, which are consecutive, and the number of iterations that they have begun, which
is equal in persistent workers. There is no lock. Two workers that both find no record write the
same one. A worker that reads the begin of the next iteration then looks for the record again,
because the record is written before that begin changes.

Threads: only the training process calls ``set``; each worker calls ``begin``.
"""

from __future__ import annotations

import multiprocessing

import numpy as np
import numpy.typing as npt

from dlfs.adapters.torch.sources import Source
from dlfs.adapters.torch.states import State, next_epoch
from dlfs.adapters.torch.worker_memory import WorkerMemory
from dlfs.epoch.options import EpochOptions

_FIELDS = ("seed", "shuffle", "window_chunks", "epoch", "position")
_SHUFFLES = ("global", "chunk", None)
_UINT64 = 1 << 64

RECORDS = 64
"""Most iterations in progress whose begin is recorded."""

# The layout of the shared memory, in words of 8 bytes.
_SET = slice(0, 7)  # number of the setting, True if batches before it were given, and its fields
_NEXT = slice(7, 13)  # number of the setting that the next iteration follows, and its fields
_RECORD_WORDS = 7  # tag, process, fields
_RECORDS_AT = 13


class Cursor:
    """The state with which the next iteration begins, shared between processes.

    Args:
        state: plain state of an epoch.
    """

    def __init__(self, state: State) -> None:
        words = _RECORDS_AT + RECORDS * _RECORD_WORDS
        self._state = state  # for constant values, such as the dataset
        self._memory = WorkerMemory(words)
        self.set(state)

    @property
    def _words(self) -> npt.NDArray[np.uint64]:
        return self._memory.words.view(np.uint64)

    @property
    def was_begun(self) -> bool:
        """True if workers have begun an iteration since ``set`` was last called."""
        words = self._words
        return bool(words[_NEXT][0] == words[_SET][0])

    @property
    def was_given(self) -> bool:
        """True if the training process got the batches before the state, which was not loaded."""
        return bool(self._words[_SET][1]) and not self.was_begun

    def get(self) -> State:
        """Return the plain state with which the next iteration begins."""
        words = self._words
        return self._unpack(words[_NEXT][1:] if self.was_begun else words[_SET][2:])

    def set(self, state: State, *, given: bool = False) -> None:
        """Begin the next iteration with a plain state of the same dataset and selection.

        Args:
            state: state at which it begins.
            given: True if the training process got the batches before the state. An iteration of a
                ``DataLoader``'s workers then begins with the whole epoch.
        """
        words = self._words[_SET]
        words[:] = [int(words[0]) + 1, given, *_pack(state)]

    def begin(
        self, seed: int, worker: int, workers: int, iteration: int, own: State | None
    ) -> State:
        """Return the plain state with which an iteration begins, in one of its workers.

        Args:
            seed: DataLoader's base seed of the iteration.
            worker: number of the worker, 0..workers-1.
            workers: number of workers of the iteration.
            iteration: number of iterations that this worker process has begun.
            own: state that was loaded in the worker; None to begin at the cursor.
        """
        tag = (hash((seed, iteration)) % _UINT64) | 1
        # The numbers that multiprocessing gave the workers are consecutive.
        identity: tuple[int, ...] = getattr(multiprocessing.current_process(), "_identity", ())
        first = max(0, (identity[-1] if identity else 0) - worker)
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


def start_cursor(dataset: Source, options: EpochOptions) -> tuple[int, Cursor]:
    """Return the samples of an epoch, and a cursor at its beginning."""
    whole = dataset.start_epoch(options.whole())
    return len(whole), Cursor(whole.state())
