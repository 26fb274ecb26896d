"""The base class of objects that a ``with`` statement closes at its end, and counted uses.

``Uses`` counts the calls that are using a resource, so that another thread may close it meanwhile.

Threads: those of the subclass; any for ``Uses``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Self

from dlfs.errors import ClosedError


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
