"""Follows a dataset whose samples are moved to other chunks of the volume while it is read.

A reader knows the chunks of its dataset when it was opened. If samples cannot be read, the
``Placement`` of the dataset says whether it has other chunks now. The reader then reports
``MovedError``, and the caller opens another reader and reads the same samples again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from dlfs.errors import DlfsError, StaleError

MOVES_MAX = 100
"""Most times that one call follows a dataset to other chunks."""

S = TypeVar("S")
T = TypeVar("T")


class MovedError(StaleError):
    """The samples were moved to other chunks of the volume; another reader finds them."""


class Placement(Protocol):
    """The chunks of an open dataset, which may be moved or removed."""

    moved: bool
    """True once the dataset must be opened anew, since its chunks or members are others."""

    def diagnose(self) -> DlfsError | None:
        """Return the error that explains failed reads: MovedError, StaleError, or None."""


def follow(open_session: Callable[[], S], use: Callable[[S], T]) -> T:
    """Use a session; while the samples are moved, open another one and use that.

    Args:
        open_session: returns the session, or another one after a ``MovedError`` of the last.
        use: reads samples with a session.
    """
    for _ in range(MOVES_MAX):
        try:  # on every read: contextlib.suppress costs more
            return use(open_session())
        except MovedError:
            pass
    return use(open_session())
