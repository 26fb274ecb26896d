"""The parts of objects that survive a fork: their owner process, and locks that a child can take.

A forked child gets a copy of every object, but not the threads, queue pairs and connections behind
them. An object that owns such resources keeps an ``OwnerProcess`` from its construction and checks
it before each use.

A lock that a thread of the parent holds at the fork would stay locked in the child for ever. So all
locks and events of this package are those of this module. In every child that Python forks
(``os.register_at_fork``) each one that another thread held becomes free. What the thread that
forked holds itself stays locked, and that thread goes on with what it was doing.

The critical section of the other thread ends in its middle. Code under such a lock therefore keeps
its state usable at every step: it makes a thing completely and then assigns it once; it does not
count users. A child that finds the assignment missing makes the thing again.

A counter of this module goes up by one in every child. The process ID is compared as well: other
modules' hooks may run in a child before the counter moves, and C code may fork without Python. It
would not do alone, because the system uses process IDs again.

Threads: any at once.
"""

from __future__ import annotations

import _thread
import os
import threading
from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar, overload

from dlfs.base.closing import LiveObjects

T = TypeVar("T")

_generation = 0


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


class Lock(_thread.RLock):  # type: ignore[misc] # which CPython allows
    """A lock that a forked child finds free, unless the thread that forked holds it.

    The thread that holds it may take it again, such as in a finalizer that the garbage collector
    runs, or in a signal handler.
    """

    __slots__ = ()

    def __new__(cls) -> Self:
        """Make a lock and register it for the children of this process."""
        lock = super().__new__(cls)
        _locks.add(lock)
        return lock


_locks: LiveObjects[Lock] = LiveObjects()


class Event(threading.Event):
    """A ``threading.Event`` with a lock that a forked child finds free."""

    def __init__(self) -> None:
        super().__init__()
        self._cond = threading.Condition(Lock())


class cached_property(Generic[T]):  # noqa: N801 - named as that of functools
    """A property that is computed at its first use and kept.

    That of functools has, in Python 3.11, a lock for all objects of a class, which no child renews.
    Without a lock, two threads may compute the value; both compute the same one.
    """

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, _owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, _owner: type) -> Self: ...

    @overload
    def __get__(self, instance: object, _owner: type) -> T: ...

    def __get__(self, instance: object | None, _owner: type) -> Self | T:
        if instance is None:
            return self
        value = self._compute(instance)
        instance.__dict__[self._name] = value  # which is found before this descriptor
        return value


def _enter_child() -> None:
    """Count the fork, and free the locks that threads of the parent hold."""
    global _generation
    _generation += 1
    for lock in _locks:
        if not lock._is_owned():  # type: ignore[attr-defined] # as threading and logging use it
            lock._at_fork_reinit()  # type: ignore[attr-defined]


os.register_at_fork(after_in_child=_enter_child)
