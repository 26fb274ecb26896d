"""Tells whether an object is used in the process that made it or in a forked child.

A forked child gets a copy of every object, but not the threads, locks, queue pairs and connections
behind them. An object that owns such resources keeps an ``OwnerProcess`` from its construction and
checks it before each use. The check compares two integers and makes no system call.

A counter of this module goes up by one in every child that Python forks (``os.register_at_fork``).
Process IDs would not do: the system uses them again.

Limits: a fork by C code that does not call ``PyOS_AfterFork_Child`` is not counted.
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
        return self._generation == _generation

    def __reduce__(self) -> tuple[type[OwnerProcess], tuple[()]]:
        return OwnerProcess, ()
