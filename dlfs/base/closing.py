"""The base class of objects that a ``with`` statement closes at its end, and counted uses.

``closed_on_error`` closes an object that could not be made whole.

``Uses`` counts the calls that are using a resource, so that another thread may close it meanwhile.
``LiveObjects`` remembers objects that are in use, such as those that a forked child must close, and
``LiveValues`` finds them by a key.

Threads: those of the subclass; any for ``Uses``, ``LiveObjects`` and ``LiveValues``.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Generic, Protocol, Self, TypeVar

from dlfs.errors import ClosedError, DlfsError

K = TypeVar("K")
T = TypeVar("T")


class Closing:
    """An object with a method ``close``, for use in a ``with`` statement."""

    __slots__ = ()

    def close(self) -> None:
        """Release what the object owns."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


class Closable(Protocol):
    """An object with a method ``close``."""

    def close(self) -> None:
        """Release what the object owns."""


@contextmanager
def closed_on_error(opened: Closable) -> Iterator[None]:
    """Close an object if the block raises, also by Ctrl-C."""
    try:
        yield
    except BaseException:
        opened.close()
        raise


def close_all(closes: Sequence[Callable[[], None]]) -> None:
    """Call all of some functions, also after one has failed or was interrupted by Ctrl-C.

    Args:
        closes: functions that release something, and do nothing the second time. One that was
            interrupted is called again.

    Raises:
        BaseException: what interrupted one of them; else the first DlfsError of one.
    """
    failure: DlfsError | None = None
    for number, close in enumerate(closes):
        try:
            close()
        except DlfsError as error:
            failure = failure or error
        except BaseException:
            for again in closes[number:]:
                with suppress(DlfsError):
                    again()
            raise
    if failure is not None:
        raise failure


class Uses:
    """The uses of a resource that are under way; the resource is freed after the last of them.

    A use is a ``with`` statement with this object. It has no lock, which a forked child could
    inherit locked: the operations of a deque are atomic.

    Args:
        message: message of the error for a use that begins after ``close``.
    """

    def __init__(self, message: str) -> None:
        self._message = message
        self._users: deque[None] = deque()
        self._closed = False
        self._frees: deque[Callable[[], None]] = deque()

    def __enter__(self) -> None:
        self._users.append(None)
        if self._closed:
            self.__exit__()
            raise ClosedError(self._message)

    def __exit__(self, *_exception: object) -> None:
        self._users.pop()
        if self._closed:
            self._free()

    def close(self, free: Callable[[], None]) -> None:
        """Refuse new uses, and free the resource: now, or at the end of the last use.

        Args:
            free: frees the resource; called once, by the thread that ends the last use, to which
                its exceptions propagate.
        """
        self._frees.append(free)
        self._closed = True
        self._free()

    def _free(self) -> None:
        while not self._users:
            try:
                free = self._frees.pop()
            except IndexError:
                return
            free()


class LiveValues(Generic[K, T]):
    """Objects that are still in use, by a key.

    Unlike ``weakref.WeakValueDictionary``, it runs no bytecode when an object is collected: Python
    would ignore the exception of Ctrl-C.
    """

    _PRUNE_LEAST = 64

    def __init__(self) -> None:
        self._references: dict[K, weakref.ref[T]] = {}
        self._prune_at = self._PRUNE_LEAST

    def get(self, key: K) -> T | None:
        """Return the object of a key; None if there is none, or it was collected."""
        reference = self._references.get(key)
        return None if reference is None else reference()

    def put(self, key: K, value: T) -> None:
        """Remember an object by a key until it is collected."""
        self._references[key] = weakref.ref(value)
        if len(self._references) >= self._prune_at:
            self._prune()

    def clear(self) -> None:
        """Forget all objects."""
        self._references.clear()

    def _prune(self) -> None:
        for key, reference in list(self._references.items()):
            if reference() is None:
                now = self._references.pop(key, reference)
                if now() is not None:  # which another thread has put there meanwhile
                    self._references[key] = now
        self._prune_at = max(self._PRUNE_LEAST, 2 * len(self._references))


class LiveObjects(LiveValues[int, T]):
    """The objects of a kind that are still in use, for hooks that run at a fork."""

    def add(self, made: T) -> None:
        """Remember an object until it is collected."""
        self.put(id(made), made)

    def __iter__(self) -> Iterator[T]:
        found = (reference() for reference in list(self._references.values()))
        return (made for made in found if made is not None)
