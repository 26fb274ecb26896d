"""A writer's lease on a device that several hosts reach, by reads and writes of one block alone.

The lease is the lock record (``dlfs.block.lock``) with a mark: a nonce, and a counter that the
holder of the lease changes every ``renew_s``. The algorithm is Fischer's mutual exclusion, extended
by an expiry. It needs only reads and writes of whole blocks. Each host measures intervals on its
own clock; the clocks of two hosts are never compared. docs/leases.md has what it assumes, and why
at most one writer holds the lease.

**Claim.** A writer reads the record until it is free: without a mark, or with one that has not
changed for its ``expiry_ms``. It writes its own record with a new nonce, within ``claim_s`` of the
start of its last read, flushes, waits a little more than ``claim_s`` and reads once more. If the
record has its own mark, it holds the lease.

**Hold.** Every ``renew_s`` the holder reads the record, checks its nonce, and writes the next
counter. It may write to the device until its deadline, ``valid_s`` after the *start* of its last
successful renewal. After the deadline, or once the record has another nonce, the lease is lost for
good: ``check`` raises, and the initiator sends nothing more (``limit_writes``).

**Release.** The holder writes zeros over its own record, before the deadline. If one of its writes
failed, it leaves the record to expire instead: that write may still take effect.

Durations: a claim of a free lease takes ``claim_s``; a living holder is recognized after about its
``renew_s``; a dead one after its ``expiry_s``.

Threads: any may call ``check``. The other methods: one thread at a time, except that ``renew`` may
run concurrently with ``check``. A forked child does not have the lease and does not renew it.

Source: L. Lamport, A Fast Mutual Exclusion Algorithm (1987), section 2, for Fischer's algorithm; G.
Chockler and D. Malkhi, Light-Weight Leases for Storage-Centric Coordination (2004).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias, TypeVar

from dlfs.base.forks import OwnerProcess
from dlfs.block.lock import RECORD_BYTES, HolderRecord, LeaseMark
from dlfs.errors import DeviceError, DeviceTimeoutError, LeaseLostError, LockedError

DRIFT = 1.05
"""Factor on waits that covers the different rates of two hosts' clocks (assumption 3)."""

CLAIM_ROUNDS_MAX = 4
"""Void claims after which a device counts as too slow to be locked."""


@dataclass(frozen=True)
class LeaseTimes:
    """The durations of a lease, in seconds. All writers of a device should have the same."""

    renew_s: float = 2.0
    """Interval between two renewals."""
    valid_s: float = 20.0
    """Time after the start of its last successful renewal in which a holder may write."""
    drain_s: float = 20.0
    """Longest time until an allowed write takes effect: the bound of assumption 2."""
    claim_s: float = 1.0
    """Longest time of a valid claim from its read to its write, and the wait after it."""
    poll_s: float = 0.25
    """Interval between two reads of a record whose holder may be dead."""

    @property
    def notice_s(self) -> float:
        """Time after which a wait is logged: a living holder is recognized by then."""
        return self.renew_s * 1.25

    @property
    def expiry_s(self) -> float:
        """Time for which a record must stay unchanged until its holder counts as dead."""
        return (self.valid_s + self.drain_s) * DRIFT


# ---- steps ---------------------------------------------------------------------------------------
# The algorithm consists of generators of steps, so that a test can interleave several writers in
# every order that the assumptions allow.


@dataclass(frozen=True)
class Read:
    """Read the record. The answer is its content."""


@dataclass(frozen=True)
class Write:
    """Write a record; zeros if it is None."""

    record: HolderRecord | None

    @property
    def content(self) -> bytes:
        """The bytes to write, ``RECORD_BYTES`` long."""
        return bytes(RECORD_BYTES) if self.record is None else self.record.encode()


@dataclass(frozen=True)
class Flush:
    """Make the record durable."""


@dataclass(frozen=True)
class PreemptReservation:
    """Preempt the reservation of an earlier writer on a device whose lease is free."""

    expired: bool
    """True if the lease is free because its holder died."""


@dataclass(frozen=True)
class Wait:
    """Wait for some seconds."""

    seconds: float


Step: TypeAlias = Read | Write | Flush | PreemptReservation | Wait
T = TypeVar("T")
Steps: TypeAlias = Generator[Step, bytes, T]
"""Steps with a result. Every step is answered with bytes, which are empty but for ``Read``."""


@dataclass(frozen=True)
class FreeRecord:
    """A record that was read and found free."""

    read_at: float
    """Time just before that read, on the lease's clock."""
    expired: bool
    """True if it is the record of a dead holder."""


class LeaseAliveError(Exception):
    """Another writer's lease is alive."""

    def __init__(self, content: bytes) -> None:
        super().__init__(content)
        self.content = content


Clock: TypeAlias = Callable[[], float]
WaitNotice: TypeAlias = Callable[[bytes, float], None]
"""Called once in a long wait, with the content of the record and the length of the wait in s."""


def wait_until_free(times: LeaseTimes, now: Clock, notify: WaitNotice) -> Steps[FreeRecord]:
    """Read the record until it is free.

    Raises:
        LeaseAliveError: its mark changed: another writer holds the lease.
    """
    first: LeaseMark | None = None
    seen_at, notified = 0.0, False
    while True:
        read_at = now()
        content = yield Read()
        mark = LeaseMark.decode(content)
        if mark is None:
            return FreeRecord(read_at, expired=False)
        if first is None:
            first, seen_at = mark, now()
        if mark != first:
            raise LeaseAliveError(content)
        expiry_s = max(times.expiry_s, mark.expiry_ms / 1000)
        if read_at - seen_at >= expiry_s:
            return FreeRecord(read_at, expired=True)
        if read_at - seen_at >= times.notice_s and not notified:
            notified = True
            notify(content, expiry_s)
        yield Wait(times.poll_s)


# ---- what runs the steps -------------------------------------------------------------------------


class LeaseBlock(Protocol):
    """The block of a device that holds its lock record, and the device's write permission."""

    @property
    def uri(self) -> str:
        """URI of the device, for error messages."""

    def read_record(self) -> bytes:
        """Read the block of the record."""

    def write_record(self, content: bytes) -> None:
        """Replace the record by ``content``, ``RECORD_BYTES`` long."""

    def flush_record(self) -> None:
        """Make the record durable."""

    def preempt_reservation(self, *, expired: bool) -> None:
        """Preempt an earlier writer's reservation; see ``PreemptReservation``."""

    def limit_writes(self, until_s: float | None) -> None:
        """Permit writes until a time only, through the controller that last read the record.

        Args:
            until_s: end of the permission on the lease's clock; None: writes are not limited.

        Raises:
            LeaseLostError: another host has taken this one's reservation.
            DeviceError: the reservation cannot be read.
        """


def boot_clock() -> float:
    """Return the seconds since the system started, including suspend: the clock of leases."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Lease:
    """One process's lease on one device.

    Args:
        block: the block of the record.
        record: names this writer.
        times: durations of the lease.
        notify: called once in a long wait for a dead holder.
        now: the clock; replaced in tests.
        sleep: waits for some seconds; replaced in tests.
    """

    def __init__(
        self,
        block: LeaseBlock,
        record: HolderRecord,
        *,
        times: LeaseTimes,
        notify: WaitNotice = lambda _content, _seconds: None,
        now: Clock = boot_clock,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._block = block
        self._record = record
        self._notify = notify
        self._now = now
        self._sleep = sleep
        self._owner = OwnerProcess()
        self._deadline: float | None = None
        self._loss: str | None = None
        self._must_expire = False
        self.times = times

    # ---- claiming --------------------------------------------------------------------------------

    def acquire(self) -> None:
        """Take the lease. Waits while the last holder may be dead.

        Raises:
            LockedError: another writer holds it; the message names that writer.
            DeviceTimeoutError: the device is too slow for a valid claim.
            DeviceError: the device failed.
        """
        self._block.limit_writes(None)
        try:
            self._run(self.claiming())
        except LeaseAliveError as alive:
            raise LockedError(
                f"lock {self._block.uri}: held by {describe(alive.content)}"
            ) from alive
        except LeaseLostError as error:  # a reservation refused the claim: another host was faster
            raise LockedError(f"lock {self._block.uri}: {error}") from error
        except DeviceError:
            raise
        except BaseException:  # the wait was cancelled
            self.release()
            raise

    def claiming(self) -> Steps[None]:
        """The steps of ``acquire``.

        Raises:
            LeaseAliveError: another's lease is alive.
            DeviceTimeoutError: the device is too slow for a valid claim.
        """
        times = self.times
        yield Read()  # so that the device's set-up on first use does not count as claim time
        for _ in range(CLAIM_ROUNDS_MAX):
            seen = yield from wait_until_free(times, self._now, self._notify)
            # After the preemption, the record must stay until the claim is complete.
            self._must_expire = self._must_expire or seen.expired
            yield PreemptReservation(seen.expired)
            mark = LeaseMark(secrets.token_hex(16), 0, round(times.expiry_s * 1000))
            self._record = replace(self._record, lease=mark)
            began_at = self._now()
            yield Write(self._record)
            if self._now() - seen.read_at >= times.claim_s:
                continue  # void; the record stays, since it may lie over a living holder's
            self._deadline = began_at + times.valid_s
            yield Flush()
            yield Wait(times.claim_s * DRIFT)
            content = yield Read()
            if LeaseMark.decode(content) == mark and self._now() < self._deadline:
                self._must_expire = False
                self._block.limit_writes(self._deadline)
                return
            self._deadline = None
        raise DeviceTimeoutError(
            f"lock {self._block.uri}: expected a read and a write of one block within "
            f"{times.claim_s:g} s, got {CLAIM_ROUNDS_MAX} that took longer or were overwritten"
        )

    # ---- holding ---------------------------------------------------------------------------------

    def renew(self) -> None:
        """Renew the lease.

        Raises:
            LeaseLostError: the lease is lost.
            DeviceError: the device failed; the lease stays valid until its deadline.
        """
        try:
            self._run(self.renewing())
        except LeaseLostError as error:
            self._loss = self._loss or str(error)
            raise

    def renewing(self) -> Steps[None]:
        """The steps of ``renew``."""
        yield from self.confirming()
        own = self._mark()
        # Counted before the write: a failed write may still take effect, and no counter may be used
        # twice.
        self._record = replace(self._record, lease=replace(own, counter=own.counter + 1))
        began_at = self._now()
        self.check()
        yield Write(self._record)
        self._deadline = began_at + self.times.valid_s
        self._block.limit_writes(self._deadline)

    def confirm(self) -> None:
        """Read the record after a reconnect and permit writes if it is still this lease's.

        May run during a write of ``renew`` or ``release``, which waits for it.

        Raises:
            LeaseLostError: the lease is lost.
            DeviceError: the device failed; writes wait for another call.
        """
        if self._deadline is not None:
            self._run(self.confirming())

    def confirming(self) -> Steps[None]:
        """The steps of ``confirm``."""
        self.check()
        content = yield Read()
        mark = LeaseMark.decode(content)
        if mark is None or mark.nonce != self._mark().nonce:
            self._loss = f"its record is now that of {describe(content)}"
            self._block.limit_writes(0)
        self.check()
        self._block.limit_writes(self._deadline)

    def check(self) -> None:
        """Check that this process may write to the device.

        Raises:
            LeaseLostError: it does not hold the lease any more.
        """
        if not self._owner.is_current():
            raise LeaseLostError(f"write to {self._block.uri}: its lease is the parent process's")
        if self._loss is None and self._deadline is not None and self._now() >= self._deadline:
            self._loss = f"it could not be renewed for {self.times.valid_s:g} s"
        if self._loss is not None:
            raise LeaseLostError(
                f"write to {self._block.uri}: the lease of this writer is lost: {self._loss}"
            )

    def note_failed_write(self) -> None:
        """Note that a write to the device failed: it may take effect late."""
        self._must_expire = True

    @property
    def lost(self) -> bool:
        """True if this process may not write any more."""
        try:
            self.check()
        except LeaseLostError:
            return True
        return False

    # ---- releasing -------------------------------------------------------------------------------

    @property
    def releasable(self) -> bool:
        """True if the lease may be released; else it is lost, or must expire."""
        return self._deadline is not None and not self._must_expire and not self.lost

    def release(self) -> None:
        """Release the lease, unless it is lost or must expire.

        Raises:
            DeviceError: the device failed; the lease will expire.
        """
        try:
            self._run(self.releasing())
        finally:
            self._loss = self._loss or "it was released"

    def releasing(self) -> Steps[None]:
        """The steps of ``release``."""
        if self.releasable:
            mark = LeaseMark.decode((yield Read()))
            if mark is not None and mark.nonce == self._mark().nonce and self.releasable:
                yield Write(None)
                self._block.limit_writes(None)

    # ---- running ---------------------------------------------------------------------------------

    def _run(self, steps: Steps[None]) -> None:
        """Perform all steps, each with the answer of the one before."""
        answer: bytes | None = None
        while True:
            try:
                step = next(steps) if answer is None else steps.send(answer)
            except StopIteration:
                return
            answer = self._perform(step)

    def _perform(self, step: Step) -> bytes:
        block = self._block
        if isinstance(step, Read):
            return block.read_record()
        if isinstance(step, Write):
            block.write_record(step.content)
        elif isinstance(step, Flush):
            block.flush_record()
        elif isinstance(step, PreemptReservation):
            block.preempt_reservation(expired=step.expired)
        else:
            self._sleep(step.seconds)
        return b""

    def _mark(self) -> LeaseMark:
        mark = self._record.lease
        assert mark is not None, "a lease that was never claimed"
        return mark


def describe(content: bytes) -> str:
    """Return a record's text for error messages."""
    record = HolderRecord.decode(content)
    return "another writer, which left no record" if record is None else str(record)
