"""The deadline of a call: one for all that a user's call waits for.

A call that waits for devices ends within ``call_timeout_ms``: 30 s, or a second more than the
longest time in which one of its devices ends an operation by itself. ``limit_call`` begins a call.
What it calls finds the ``Deadline`` by ``current_deadline`` and waits no longer than is left of it:
opening, superblocks, catalogs, directories, retries, other copies, and the diagnosis of a failure.
A call within a call has the deadline of the outer one. Bytes that arrive move the deadline by the
time that they take at 256 KiB/s, so that a slow device ends what it does, and a trickle moves
nothing. Samples are read by libdlfs, which has the same bound and rule (``dlfs/reader.h``).

While other devices may serve instead, one device gets a part of what is left (``limit_device``).

Writers have no deadline: their devices end each operation, and a lease is kept until it expires.

Threads: each has the deadlines of its own calls; worker threads of trio have those of their task.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

CALL_TIMEOUT_MS = 30_000
"""Time within which a call ends, in milliseconds, unless a device has longer timeouts."""

GRACE_MS = 1_000
"""Time added to the timeout of a device, so that the device reports first, in milliseconds. Also
the least time for the diagnosis of a call that has used up its own."""

OTHER_MEMBERS_PART = 1 / 2
"""Part of the time left that one device gets while other devices are to be asked."""

OTHER_COPIES_PART = 1 / 16
"""Part of the time left that one device gets where other copies are known, as in libdlfs."""

LEAST_S = 0.1
"""Least time that a device gets, in seconds, so that no device fails without being asked: the time
of a call may have gone to others, or to a process that was stopped."""

_SECONDS_PER_BYTE = 1 / (256 << 10)


def call_timeout_ms(operation_timeouts_ms: Iterable[int]) -> int:
    """Return the time within which a call ends, in milliseconds.

    Args:
        operation_timeouts_ms: bounds of one operation of each of its devices; 0: unbounded.
    """
    longest_ms = max(operation_timeouts_ms, default=0)
    return max(CALL_TIMEOUT_MS, longest_ms + GRACE_MS if longest_ms else 0)


class Deadline:
    """The deadline of one call.

    Args:
        spent_s: time that the call has taken already, in seconds.

    Attributes:
        part: part of the time left that one device gets.

    Threads: one.
    """

    __slots__ = ("_began_s", "_ends_s", "part")

    def __init__(self, spent_s: float = 0.0) -> None:
        now_s = time.monotonic()
        self._began_s = now_s - spent_s
        self._ends_s = max(self._began_s + CALL_TIMEOUT_MS / 1000, now_s + GRACE_MS / 1000)
        self.part = 1.0

    def admit(self, operation_timeout_ms: int) -> None:
        """Give the call the time that one of its devices needs to end an operation by itself."""
        timeout_ms = call_timeout_ms([operation_timeout_ms])
        self._ends_s = max(self._ends_s, self._began_s + timeout_ms / 1000)

    def credit(self, count: int) -> None:
        """Move the deadline for bytes that have arrived."""
        self._ends_s += count * _SECONDS_PER_BYTE

    @property
    def left_s(self) -> float:
        """Time left of the call, in seconds; 0 once it is over."""
        return max(0.0, self._ends_s - time.monotonic())

    @property
    def device_s(self) -> float:
        """Time for one device, in seconds: a part of the time left, at least ``LEAST_S``."""
        return self.share_s(self.part)

    def share_s(self, part: float) -> float:
        """Return a part of the time left, at least ``LEAST_S``, in seconds."""
        return max(LEAST_S, self.left_s * part)

    def copy(self) -> Deadline:
        """Return a deadline for a thread that works for this call."""
        copied = Deadline()
        copied._began_s, copied._ends_s, copied.part = self._began_s, self._ends_s, self.part
        return copied

    def extend(self, time_s: float) -> None:
        """Move the deadline by a time that another process took for the same work, in seconds."""
        self._ends_s += time_s


_current: ContextVar[Deadline | None] = ContextVar("dlfs_deadline", default=None)


def current_deadline() -> Deadline | None:
    """Return the deadline of the call of this thread; None outside of such calls."""
    return _current.get()


def credit_call(count: int) -> None:
    """Move the deadline of the call of this thread, if there is one, for bytes that arrived."""
    deadline = _current.get()
    if deadline is not None:
        deadline.credit(count)


@contextmanager
def waiting(wait_s: float) -> Iterator[float]:
    """Yield the time that a call may wait for another process that does its work, in seconds.

    It is at most what is left of the call, whose deadline moves by the time that the block takes:
    the other process has a deadline too.
    """
    deadline = _current.get()
    if deadline is None:
        yield wait_s
        return
    began_s = time.monotonic()
    try:
        yield min(wait_s, deadline.left_s)
    finally:
        deadline.extend(time.monotonic() - began_s)


def is_over() -> bool:
    """Return True if this thread's call has no time left."""
    deadline = _current.get()
    return deadline is not None and not deadline.left_s


@contextmanager
def limit_call(spent_s: float = 0.0) -> Iterator[Deadline]:
    """Begin a call that ends within ``call_timeout_ms``, or continue the call under way.

    Args:
        spent_s: time that the call has taken already, in seconds. At least ``GRACE_MS`` is left.
    """
    outer = _current.get()
    if outer is not None:
        yield outer
        return
    deadline = Deadline(spent_s)
    token = _current.set(deadline)
    try:
        yield deadline
    finally:
        _current.reset(token)


@contextmanager
def own_deadline() -> Iterator[None]:
    """Give a thread that has the context of a call a deadline of its own, which ends with it."""
    deadline = _current.get()
    token = _current.set(None if deadline is None else deadline.copy())
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def limit_device(part: float) -> Iterator[None]:
    """Give one device no more than this part of the time left of the call, if there is a call."""
    deadline = _current.get()
    if deadline is None:
        yield
        return
    before, deadline.part = deadline.part, min(deadline.part, part)
    try:
        yield
    finally:
        deadline.part = before


def share_for(devices: int, copies: int) -> float:
    """Return the part of the time left that one of some devices gets, with so many copies."""
    if copies > 1:
        return OTHER_COPIES_PART
    return OTHER_MEMBERS_PART if devices > 1 else 1.0
