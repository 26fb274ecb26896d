"""Tells whether an object is used in the process that made it or in a forked child.

A forked child gets a copy of every object, but not the threads, locks, queue pairs and connections
behind them. An object that owns such resources keeps an ``OwnerProcess`` from its construction and
checks it before each use.

A counter of this module goes up by one in every child that Python forks (``os.register_at_fork``).
The process ID is compared as well: other modules' hooks may run in a child before the counter
moves, and C code may fork without Python. It would not do alone, because the system uses process
IDs again.

Threads: any at once.
"""

from __future__ import annotations

import os

_generation = 0


def _count_fork() -> None:
    global _generation
    _generation += 1


os.register_at_fork(after_in_child=_count_fork)


class OwnerProcess:
    """The process that made this object.

    Unpickling makes the unpickling process the owner.

    Attributes:
        pid: process ID of the owner, for messages.
    """

    __slots__ = ("_generation", "pid")

    def __init__(self) -> None:
        self._generation = _generation
        self.pid = os.getpid()

    def is_current(self) -> bool:
        """Return True if the calling process is the owner, False in its forked children."""
        return self._generation == _generation and self.pid == os.getpid()

    def __reduce__(self) -> tuple[type[OwnerProcess], tuple[()]]:
        return OwnerProcess, ()
