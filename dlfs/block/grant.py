"""The permission of one handle of a shared device to write under grants, until a deadline.

The writer has no lease. A coordinator confirms from time to time that it may go on writing, and the
writer extends its grant by that confirmation. Like a lease's, the deadline is on ``boot_clock``, is
checked here before anything is submitted, and by the initiator where it sends (``limit_writes``).
docs/leases.md has what follows from it.

Threads: any.
"""

from __future__ import annotations

from collections.abc import Callable

from dlfs.base.forks import OwnerProcess
from dlfs.block.lease import boot_clock
from dlfs.errors import LeaseLostError


class Grant:
    """A handle's permission to write, which nothing has extended yet.

    Args:
        uri: URI of the device, for error messages.
        now: the clock; replaced in tests.
    """

    def __init__(self, uri: str, *, now: Callable[[], float] = boot_clock) -> None:
        self._uri = uri
        self._now = now
        self._owner = OwnerProcess()
        self._until_s: float | None = None
        self._has_ended = False

    def extend(self, until_s: float) -> None:
        """Permit writes until a time of the clock, in seconds."""
        self._until_s = until_s

    def end(self) -> None:
        """Permit no further write."""
        self._has_ended = True

    def check(self) -> None:
        """Check that this process may write to the device now.

        Raises:
            LeaseLostError: the grant has ended, is not given yet, or is the parent process's.
        """
        reason = self._find_refusal()
        if reason is not None:
            raise LeaseLostError(f"write to {self._uri}: {reason}")

    def _find_refusal(self) -> str | None:
        if not self._owner.is_current():
            return "the grant is the parent process's"
        if self._has_ended:
            return "granted writing through this device object has ended"
        if self._until_s is None:
            return "no grant was given to this writer yet"
        late_s = self._now() - self._until_s
        if late_s < 0:
            return None
        return (
            f"its grant ended {late_s:.3f} s ago, at {self._until_s:.3f} s of this host's boot "
            "clock, and was not extended"
        )
