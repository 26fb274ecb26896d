"""A writer's lease on a device that several hosts reach: exclusion by reads and writes alone.

The lease is the lock record (``dlfs.block.lock``) with a mark: a nonce, and a counter that its
holder changes every ``renew_s``. Only whole-block reads and writes are asked of the device, so the
algorithm is Fischer's, with leases that are kept alive instead of locks that are held for ever.
Times are always differences of one host's own clock; no two clocks are ever compared.

**Claiming.** Watch the record until it is free: it has no mark, or its mark has not changed for its
``expiry_ms`` (a change means that the holder lives: LockedError, which names it). Write an own
record with a fresh nonce. When more than ``claim_s`` passed between the start of the last read and
the end of this write, the claim is void: start again. Else flush, wait a little more than
``claim_s`` and read once more: who finds the own mark holds the lease.

**Holding.** Every ``renew_s`` the holder reads the record, sees its own nonce, and writes the next
counter. It may write to the device until ``valid_s`` after the *start* of its last renewal that
succeeded, by its own clock, which goes on during suspend. After that, or once it sees another's
record, the lease is lost for good: ``check`` raises, and nothing more is submitted. The initiator
knows the deadline too (``limit_writes``): libdlfs looks at the clock right before each call that
sends a write, its data or a repetition, over SPDK right before each call in which SPDK may send.
Through a controller that was made anew it sends no write before ``confirm`` has read the record,
and the reservation, through that controller.

**Releasing.** Zeros over the own record, under the same deadline. A holder for which a write ended
in an error leaves its record to expire: such a write may still take effect, so that who comes next
must wait for it. So does who gives up while it takes over from a dead holder: reservations may have
changed hands already.

What is assumed:

1. A read returns what the last write that took effect left in its first 512 bytes (NVMe promises
   one logical block).
2. A write that succeeds takes effect once, before its completion; one that fails takes effect no
   later than ``late_s`` after it was submitted, or never. Between the last look at the deadline and
   the end of a write that it allowed there are at most ``late_s`` (command time-outs and reconnects
   included; the system sends what it holds of a write for no longer than a command's time-out).
3. Clocks of hosts differ by less than a part in twenty in rate.
4. The target ends the connections of a host within twice the keep-alive timeout of its silence.
   ``lock_exclusive`` refuses a keep-alive timeout of more than half of ``late_s``.

What follows, with ``expiry_s = 1.05 * (valid_s + late_s)``:

- *Of two claims, not both succeed.* Let A's write take effect before B's. Both were valid, so B
  last read less than ``claim_s`` before its write took effect, and A checks at least ``claim_s``
  after its own. If B's write came before A's check, A sees B's record. If it came after, B's last
  read came after A's write, and saw A's claim.
- *Nobody takes a lease while its holder, or a late write of it, is alive.* Who takes A's lease saw
  one mark for ``expiry_s``. In that time no renewal of A succeeded, so A's last one started before
  it: A's deadline, and ``late_s`` after that all its writes, ended before ``expiry_s`` did.
- A claim that takes effect late, over the record of a living holder, costs that holder its lease
  (at its next renewal it sees another's record) and gives it to nobody before ``expiry_s`` more.

*A holder that stands still* (SIGSTOP, a stopped virtual machine) and goes on when its lease has
been taken over finds its deadline passed, by its clock. Two cases are left: a clock that stood
still as well, and a stop within the microsecond between the look at the clock and the call that
sends. In both the host was silent for ``late_s`` after its deadline at least, so that by assumption
4 the target has ended its connections: nothing sent through them is executed, and through new
ones nothing is sent before the record was read, which is another's. A target that has
reservations needs no such assumption for hosts that were preempted (``dlfs.block.reservation``). A
list of the chunks that a holder may write, in its record, would protect data and no superblock, and
was left out.

How long it takes: a free lease ``claim_s``; a living holder is known after about its ``renew_s``; a
dead one after its ``expiry_s``. Threads: ``check`` any; the others one at a time, except that
``renew`` may run beside ``check``. A forked child neither renews nor holds.

Source: L. Lamport, A Fast Mutual Exclusion Algorithm (1987), section 2, for Fischer's algorithm; G.
Chockler and D. Malkhi, Light-Weight Leases for Storage-Centric Coordination (2004).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias, TypeVar

from dlfs.block.lock import RECORD_BYTES, HolderRecord, LeaseMark
from dlfs.errors import DeviceError, DeviceTimeoutError, LeaseLostError, LockedError
from dlfs.forks import OwnerProcess

RENEW_S = 2.0
"""Between two renewals."""

VALID_S = 20.0
"""A holder may write so long after the start of its last successful renewal."""

LATE_S = 20.0
"""No write takes effect later than this after it was allowed: the bound of assumption 2."""

CLAIM_S = 1.0
"""The longest valid claim, and the wait behind it."""

POLL_S = 0.25
"""Between two looks at a record that may be dead."""

DRIFT = 1.05
"""What the rates of two hosts' clocks may differ by, and more."""

CLAIM_ROUNDS_MAX = 4
"""Claims that came to nothing before a device is called too slow to be locked."""


@dataclass(frozen=True)
class LeaseTimes:
    """The times of a lease, in seconds. All who share a device should have the same."""

    renew_s: float = RENEW_S
    valid_s: float = VALID_S
    late_s: float = LATE_S
    claim_s: float = CLAIM_S
    poll_s: float = POLL_S

    @property
    def notice_s(self) -> float:
        """A wait longer than this is told: a living holder is known by then."""
        return self.renew_s * 1.25

    @property
    def expiry_s(self) -> float:
        """How long a record must have been seen unchanged to be dead."""
        return (self.valid_s + self.late_s) * DRIFT


# ---- steps ---------------------------------------------------------------------------------------
# The algorithm is written as generators of steps, so that a test can run several of them in any
# order that the assumptions allow.


@dataclass(frozen=True)
class Read:
    """Read the record; answered with its content."""


@dataclass(frozen=True)
class Write:
    """Write a record, or zeros."""

    record: HolderRecord | None

    @property
    def content(self) -> bytes:
        """What is written, ``RECORD_BYTES`` long."""
        return bytes(RECORD_BYTES) if self.record is None else self.record.encode()


@dataclass(frozen=True)
class Flush:
    """Make the record durable."""


@dataclass(frozen=True)
class MakeWay:
    """Remove what keeps this host from writing to a device whose lease is free."""

    lapsed: bool
    """It was left by a holder who died."""


@dataclass(frozen=True)
class Wait:
    """Let time pass."""

    seconds: float


Step: TypeAlias = Read | Write | Flush | MakeWay | Wait
T = TypeVar("T")
Steps: TypeAlias = Generator[Step, bytes, T]
"""Steps with a result. Every step is answered with bytes, which only ``Read`` gives a meaning."""


@dataclass(frozen=True)
class Sighting:
    """A record that was seen free."""

    read_at: float
    """Just before the read that saw it."""
    lapsed: bool
    """It is that of a holder who died."""


class HeldError(Exception):
    """Another's lease is alive."""

    def __init__(self, content: bytes) -> None:
        super().__init__(content)
        self.content = content


Clock: TypeAlias = Callable[[], float]
Waiting: TypeAlias = Callable[[bytes, float], None]
"""Called once with a record that may be dead and the seconds that it is watched for."""


def watch(times: LeaseTimes, now: Clock, waiting: Waiting) -> Steps[Sighting]:
    """Look at the record until it is known whether somebody holds the lease.

    Raises:
        HeldError: somebody does.
    """
    first: LeaseMark | None = None
    seen_at, told = 0.0, False
    while True:
        read_at = now()
        content = yield Read()
        mark = LeaseMark.decode(content)
        if mark is None:
            return Sighting(read_at, lapsed=False)
        if first is None:
            first, seen_at = mark, now()
        if mark != first:
            raise HeldError(content)
        expiry_s = max(times.expiry_s, mark.expiry_ms / 1000)
        if read_at - seen_at >= expiry_s:
            return Sighting(read_at, lapsed=True)
        if read_at - seen_at >= times.notice_s and not told:
            told = True
            waiting(content, expiry_s)
        yield Wait(times.poll_s)


# ---- what runs the steps -------------------------------------------------------------------------


class LeaseBlock(Protocol):
    """The place of a device's lock record, and what may stand before it."""

    @property
    def uri(self) -> str:
        """The device's, for errors."""

    def read_record(self) -> bytes:
        """The content of the record's block."""

    def write_record(self, content: bytes) -> None:
        """Replace it, ``RECORD_BYTES`` long."""

    def flush_record(self) -> None:
        """Make it durable."""

    def make_way(self, *, lapsed: bool) -> None:
        """See ``MakeWay``."""

    def limit_writes(self, until_s: float | None) -> None:
        """Have writes sent before a time only, and by the way that the record was read last.

        Args:
            until_s: of the lease's clock; None: writes are not limited.

        Raises:
            LeaseLostError: another host has taken this one's reservation.
            DeviceError: that cannot be told.
        """


def boot_clock() -> float:
    """Seconds since the system started, suspend included: the clock of leases."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Lease:
    """One process's lease on one device.

    Args:
        block: the place of the record.
        record: of the holder.
        times: of the lease.
        waiting: told of a long wait, with the record that is waited out and the seconds.
        now: the clock; for tests.
        sleep: lets time pass; for tests.
    """

    def __init__(
        self,
        block: LeaseBlock,
        record: HolderRecord,
        *,
        times: LeaseTimes,
        waiting: Waiting = lambda _content, _seconds: None,
        now: Clock = boot_clock,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._block = block
        self._record = record
        self._waiting = waiting
        self._now = now
        self._sleep = sleep
        self._owner = OwnerProcess()
        self._deadline: float | None = None
        self._loss: str | None = None
        self._doubtful = False
        self.times = times

    # ---- claiming --------------------------------------------------------------------------------

    def acquire(self) -> None:
        """Take the lease, waiting for what may be dead.

        Raises:
            LockedError: another holds it; the message names it.
            DeviceTimeoutError: the device is too slow.
            DeviceError: it failed.
        """
        self._block.limit_writes(None)
        try:
            self._run(self.claiming())
        except HeldError as held:
            raise LockedError(f"lock {self._block.uri}: held by {describe(held.content)}") from held
        except LeaseLostError as error:  # the claim was refused: a host that was faster
            raise LockedError(f"lock {self._block.uri}: {error}") from error
        except DeviceError:
            raise
        except BaseException:  # given up in a wait
            self.release()
            raise

    def claiming(self) -> Steps[None]:
        """The steps of ``acquire``.

        Raises:
            HeldError: another's lease is alive.
            DeviceTimeoutError: the device is too slow for a valid claim.
        """
        times = self.times
        yield Read()  # what the device sets up on first use is no part of the claim's time
        for _ in range(CLAIM_ROUNDS_MAX):
            seen = yield from watch(times, self._now, self._waiting)
            # Once others were put out of the way, the record must tell of it until all is done.
            self._doubtful = self._doubtful or seen.lapsed
            yield MakeWay(seen.lapsed)
            mark = LeaseMark(secrets.token_hex(16), 0, round(times.expiry_s * 1000))
            self._record = replace(self._record, lease=mark)
            began_at = self._now()
            yield Write(self._record)
            if self._now() - seen.read_at >= times.claim_s:
                continue  # void, and left alone: it may lie over a living holder's record
            self._deadline = began_at + times.valid_s
            yield Flush()
            yield Wait(times.claim_s * DRIFT)
            content = yield Read()
            if LeaseMark.decode(content) == mark and self._now() < self._deadline:
                self._doubtful = False
                self._block.limit_writes(self._deadline)
                return
            self._deadline = None
        raise DeviceTimeoutError(
            f"lock {self._block.uri}: expected a read and a write of one block within "
            f"{times.claim_s:g} s, got {CLAIM_ROUNDS_MAX} that took longer or were overwritten"
        )

    # ---- holding ---------------------------------------------------------------------------------

    def renew(self) -> None:
        """Prolong the lease, or lose it.

        Raises:
            LeaseLostError: it is lost.
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
        # Counted before the write: one that fails may still take effect, and must not be repeated.
        self._record = replace(self._record, lease=replace(own, counter=own.counter + 1))
        began_at = self._now()
        self.check()
        yield Write(self._record)
        self._deadline = began_at + self.times.valid_s
        self._block.limit_writes(self._deadline)

    def confirm(self) -> None:
        """Read the record again after a reconnect; writes go on if it is still this lease's.

        May run within a write of ``renew`` or ``release``, which waits for it.

        Raises:
            LeaseLostError: it is lost.
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
        """Allow a write to the device.

        Raises:
            LeaseLostError: the lease is not this process's any more.
        """
        if not self._owner.is_current():
            raise LeaseLostError(f"write to {self._block.uri}: its lease is the parent process's")
        if self._loss is None and self._deadline is not None and self._now() >= self._deadline:
            self._loss = f"it could not be renewed for {self.times.valid_s:g} s"
        if self._loss is not None:
            raise LeaseLostError(
                f"write to {self._block.uri}: the lease of this writer is lost: {self._loss}"
            )

    def doubt(self) -> None:
        """Note that a write to the device failed, and may take effect late."""
        self._doubtful = True

    @property
    def lost(self) -> bool:
        """Whether nothing may be written any more."""
        try:
            self.check()
        except LeaseLostError:
            return True
        return False

    # ---- releasing -------------------------------------------------------------------------------

    @property
    def releasable(self) -> bool:
        """Whether it may be given back; else it is lost, or must be left to expire."""
        return self._deadline is not None and not self._doubtful and not self.lost

    def release(self) -> None:
        """Give the lease back, unless it is lost or must be left to expire.

        Raises:
            DeviceError: the device failed; the lease expires.
        """
        try:
            self._run(self.releasing())
        finally:
            self._loss = self._loss or "it was given back"

    def releasing(self) -> Steps[None]:
        """The steps of ``release``."""
        if self.releasable:
            mark = LeaseMark.decode((yield Read()))
            if mark is not None and mark.nonce == self._mark().nonce and self.releasable:
                yield Write(None)
                self._block.limit_writes(None)

    # ---- running ---------------------------------------------------------------------------------

    def _run(self, steps: Steps[None]) -> None:
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
        elif isinstance(step, MakeWay):
            block.make_way(lapsed=step.lapsed)
        else:
            self._sleep(step.seconds)
        return b""

    def _mark(self) -> LeaseMark:
        mark = self._record.lease
        assert mark is not None, "a lease that was never claimed"
        return mark


def describe(content: bytes) -> str:
    """A record in words."""
    record = HolderRecord.decode(content)
    return "another writer, which left no record" if record is None else str(record)
