"""The base class of objects that a ``with`` statement closes at its end.

Threads: those of the subclass.
"""

from __future__ import annotations

from typing import Self


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
