"""Block devices that several hosts may open for writing: NVMe namespaces over a fabric.

The writer's lock is a lease in the lock record (``dlfs.block.lease``), plus a reservation for this
host if the target has reservations (``dlfs.block.reservation``). A background thread renews the
lease. Once the lease is lost, every write and flush through this device raises LeaseLostError
before anything is sent. The initiator, libdlfs's or SPDK's, checks the lease's deadline too before
it sends. After a reconnect it sends no write until the background thread has read the record and
the reservation again.

``lock_exclusive`` waits: about 1 s for a free lease, 2 s until it knows that another writer is
alive, and ``LeaseTimes.expiry_s`` (42 s) if a writer died. That last wait is logged as a warning of
the logger ``dlfs.block``; Python prints warnings on stderr by default. After a failed write the
lease is not released but left to expire, since that write may take effect late. A lease that cannot
be released expires too; ``unlock`` does not fail then.

A forked child does not hold the lease: its writes are refused, and the parent's continue.

Granted writing (``begin_granted``) has a deadline in place of a lease (``dlfs.block.grant``), which
Python and the initiator check at the same places. There is no background thread: each extension
names the controller that it was asked for, and writes through a later one wait for the next
extension, or end at the deadline. Where the target has reservations, the writer registers its host.
"""

from __future__ import annotations

import abc
import logging
import threading
import time
from collections.abc import Collection
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from dlfs._native.device import (
    Kind,
    NativeDevice,
    NativeQueue,
    aligned_buffer,
    operation_error,
)
from dlfs._native.nvme import get_incarnation, limit_writes
from dlfs.base.forks import Event
from dlfs.base.units import KIB
from dlfs.block import lock
from dlfs.block.device import NativeBackedDevice
from dlfs.block.grant import Grant
from dlfs.block.lease import Lease, LeaseTimes, describe
from dlfs.block.nvme import CommandRunner
from dlfs.block.reservation import Reservation
from dlfs.errors import (
    AuthenticationError,
    ClosedError,
    DeviceError,
    DeviceLostError,
    DeviceTimeoutError,
    DlfsError,
    LeaseLostError,
    LockedError,
    UsageError,
)

if TYPE_CHECKING:
    from dlfs._native.device import BytesLike

_log = logging.getLogger("dlfs.block")

_CHECK_MS = 50
"""Interval at which a waiting thread checks for a reconnect, in milliseconds."""


class SharedNamespaceDevice(NativeBackedDevice):
    """A namespace that other hosts reach too. Subclasses open it and run its commands."""

    gap_bytes = 4 * KIB
    """Bytes that cost as much as one more request. A request costs one or two microseconds of
    either host's processor, and a KiB over TCP about 0.25 us (31 us for 128 KiB)."""
    locks_by_record = True
    lease_times: LeaseTimes = LeaseTimes()
    """Durations of the writer's lease and of grants. Set them before locking, equal for all hosts
    of the device."""

    def __init__(self, native: NativeDevice, *, uri: str, identity: str, writable: bool) -> None:
        super().__init__(native, uri=uri, identity=identity, writable=writable)
        self._guard = _LeaseGuard()
        self._renewer: _Renewer | None = None
        self._reservation: Reservation | None = None
        self._lock_wait_cancelled = Event()

    @property
    @abc.abstractmethod
    def runner(self) -> CommandRunner:
        """Runner of single commands on the namespace's controller."""

    @property
    @abc.abstractmethod
    def nsid(self) -> int:
        """Namespace ID."""

    @property
    def write_drain_s(self) -> float:
        """Time after its submission in which a write may take effect, with retries, in seconds."""
        return self.operation_timeout_ms / 1000

    @property
    def keep_alive_s(self) -> float | None:
        """Time after which the target ends the connections of a silent host, in seconds; 0: never.

        None if the device has no connections.
        """
        return None

    def incarnation(self) -> int:
        """Return the incarnation of the controller in use, or of the next one while disconnected.

        Raises:
            ClosedError: the device is closed.
        """
        return get_incarnation(self.native)

    def limit_writes(self, incarnation: int, until_s: float | None) -> None:
        """Make the initiator send writes only through one controller and only until a time.

        Args:
            incarnation: incarnation of the controller.
            until_s: end of the permission on ``lease.boot_clock``; None: no limit.

        Raises:
            ClosedError: the device is closed.
        """
        until_ns = None if until_s is None else round(until_s * 1e9)
        limit_writes(self.native, incarnation, until_ns)

    # ---- writing under the lease -----------------------------------------------------------------

    def queue_pair(self, depth: int) -> NativeQueue:
        """Create a queue pair that refuses writes once the lease is lost."""
        return _GuardedQueue(self.native, depth, writable=self.writable, guard=self._guard)

    def _transfer(self, kind: Kind, buffer: BytesLike, offset_bytes: int) -> None:
        if kind == Kind.WRITE:
            self._check_permission()  # before a queue pair is made for it
        super()._transfer(kind, buffer, offset_bytes)

    def _check_permission(self) -> None:
        """Raise the error of a closed device, or of a writer whose lease or grant is over."""
        if self.native.closed:
            raise ClosedError(f"write to {self.uri}: the device is closed")
        self._guard.check()

    def flush(self) -> None:
        """Make every completed write durable; see ``BlockDevice.flush``."""
        self._check_permission()
        try:
            super().flush()
        except (DeviceLostError, DeviceTimeoutError, AuthenticationError):
            self._guard.note_failed_write()  # so that unlock does not wait for the lost device
            raise

    # ---- the lease -------------------------------------------------------------------------------

    def _acquire(self, record: lock.HolderRecord) -> bool:
        if not self._record_span():
            raise UsageError(f"lock {self.uri}: it is too small for a lease")
        self._check_time_limits(f"lock {self.uri}")
        self._reservation = Reservation.probe(self.runner, self.nsid, self.uri)
        block = _RecordBlock(self, self._record_span(), self._reservation)
        lease = Lease(
            block, record, times=self.lease_times, notify=self._log_wait, sleep=self._sleep
        )
        block.lease = lease
        lease.acquire()
        self._guard.lease = lease
        try:
            if self._reservation is not None:
                self._reservation.acquire()
        except LockedError:
            self._end_lease()
            raise
        except BaseException:  # the reservation may have been taken: the lease must expire
            self._guard.lease = None
            raise
        self._renewer = _Renewer(lease, block)
        self._renewer.start()
        return True

    def _check_time_limits(self, action: str) -> None:
        """Check that writes end, and silent writers are noticed, within the lease's drain time."""
        if self.write_drain_s > self.lease_times.drain_s:
            raise UsageError(
                f"{action}: expected that its writes end within "
                f"{self.lease_times.drain_s:g} s, got time-outs of {self.write_drain_s:g} s in all"
            )
        keep_alive_s, most_s = self.keep_alive_s, self.lease_times.drain_s / 2
        if keep_alive_s is not None and not 0 < keep_alive_s <= most_s:
            raise UsageError(
                f"{action}: expected keepalive_ms in 1..{most_s * 1000:g}, so that the "
                f"target ends the connections of a stopped writer before its lease can "
                f"be taken, got {keep_alive_s * 1000:g}"
            )

    def _sleep(self, seconds: float) -> None:
        if self._lock_wait_cancelled.wait(seconds):
            raise ClosedError(f"lock {self.uri}: cancelled while waiting")

    def cancel_lock_wait(self) -> None:
        """Make a ``lock_exclusive`` that waits in another thread raise ClosedError.

        Calls until the next ``unlock`` do not wait either.
        """
        self._lock_wait_cancelled.set()

    def unlock(self) -> None:
        """Release the lease. Does nothing if this object does not hold it in this process."""
        self._lock_wait_cancelled.clear()
        super().unlock()

    def _log_wait(self, content: bytes, seconds: float) -> None:
        _log.warning(
            "%s: waiting up to %.0f s to learn whether its last writer still lives: %s",
            self.uri,
            seconds,
            describe(content),
        )

    def _release(self) -> None:
        """Release reservation and lease; logs a failure, after which the lease expires."""
        if self._renewer is not None:
            self._renewer.stop()
            self._renewer = None
        try:
            if (
                self._reservation is not None
                and self._guard.lease is not None
                and self._guard.lease.releasable
            ):
                self._reservation.release()
            self._end_lease()
        except DeviceError as error:
            self._guard.lease = None
            _log.warning("%s: the writer's lock is left to expire: %s", self.uri, error)

    def _end_lease(self) -> None:
        """Release the lease if that is allowed, and forget it."""
        try:
            if self._guard.lease is not None:
                self._guard.lease.release()
        finally:
            self._guard.lease = None

    # ---- granted writing -------------------------------------------------------------------------

    def check_can_grant(self) -> None:
        """Check time limits and reservations; see ``BlockDevice.check_can_grant``."""
        action = f"grant writing to {self.uri}"
        self._check_time_limits(action)
        reservation = Reservation.probe(self.runner, self.nsid, self.uri)
        if reservation is not None and not reservation.can_admit:
            raise UsageError(
                f"{action}: expected a target without reservations, or one that has the type Write "
                "Exclusive - Registrants Only (bit 3 of RESCAP): with Write Exclusive alone, each "
                "other writer would lock the workers out"
            )

    def _begin_granted(self, slot: int) -> None:
        del slot  # the deadline excludes a writer, not a lock
        self.limit_writes(self.incarnation(), 0)
        self._guard.grant = Grant(self.uri)
        self._reservation = Reservation.probe(self.runner, self.nsid, self.uri)
        if self._reservation is not None:
            self._reservation.join()

    def _extend_grant(self, until_s: float, incarnation: int) -> None:
        grant = self._guard.grant
        assert grant is not None, "granted writing has begun"
        grant.extend(until_s)
        self.limit_writes(incarnation, until_s)

    def _end_granted(self) -> None:
        if self._guard.grant is not None:
            self._guard.grant.end()
        self.limit_writes(self.incarnation(), 0)

    @property
    def writer_key(self) -> int | None:
        """Key by which the target knows this host as a writer; None: it has no reservations."""
        return None if self._reservation is None else self._reservation.key

    def admit_writers(self) -> bool:
        """Let registered hosts write; see ``BlockDevice.admit_writers``."""
        super().admit_writers()
        if self._reservation is None:
            return False
        self._guard.check()
        return self._reservation.admit()

    @property
    def writers_admitted(self) -> bool:
        """False if the lock's holder excludes all other hosts."""
        return self._reservation is None or self._reservation.admits_writers

    def dismiss_writers(self, *, fence: bool) -> None:
        """End what ``admit_writers`` began; see ``BlockDevice.dismiss_writers``."""
        super().dismiss_writers(fence=fence)
        if self._reservation is not None:
            self._guard.check()
            self._reservation.dismiss(fence=fence)

    def expel_writer(self, key: int | None, living: Collection[int | None] = ()) -> bool:
        """Have the target refuse the writes of a host; see ``BlockDevice.expel_writer``."""
        own = self._reservation or Reservation.probe(self.runner, self.nsid, self.uri)
        if own is None or key is None or key == own.key or key in living:
            return False
        return own.expel(key)


class _RecordBlock:
    """The lock record's block of a device, as its lease uses it."""

    def __init__(
        self, device: SharedNamespaceDevice, span_bytes: int, reservation: Reservation | None
    ) -> None:
        self._device = device
        self._span = span_bytes
        self._reservation = reservation
        self.lease: Lease | None = None
        self._read_through = 0
        self._confirmed: int | None = None

    @property
    def is_confirmed(self) -> bool:
        """True if the record was read through the controller that is in use now."""
        return self._confirmed == self._device.incarnation()

    @property
    def uri(self) -> str:
        return self._device.uri

    def read_record(self) -> bytes:
        self._read_through = self._device.incarnation()
        return self._device.read(lock.RECORD_OFFSET_BYTES, self._span)

    def write_record(self, content: bytes) -> None:
        """Write the record. Confirms the lease while the write waits for that after a reconnect."""
        memory = aligned_buffer(self._span, self._device.block_bytes)
        memory[:] = np.frombuffer(content.ljust(self._span, b"\0"), np.uint8)
        with self._device.pooled_queue() as queue:
            queue.submit(Kind.WRITE, memory, lock.RECORD_OFFSET_BYTES, 0)
            while not (taken := queue.poll(_CHECK_MS)):
                self._confirm()
        if taken[0][1] < 0:
            raise operation_error(
                self.uri, Kind.WRITE, lock.RECORD_OFFSET_BYTES, self._span, taken[0][1]
            )

    def _confirm(self) -> None:
        if self.lease is not None and not self.is_confirmed:
            with suppress(DeviceError):  # the write ends when the lease does, at the latest
                self.lease.confirm()

    def flush_record(self) -> None:
        self._device.flush()

    def preempt_reservation(self, *, expired: bool) -> None:
        if self._reservation is not None:
            self._reservation.preempt_reservation(expired=expired)

    def limit_writes(self, until_s: float | None) -> None:
        reconnected = self._confirmed not in (None, self._read_through)
        if until_s and reconnected and self._reservation is not None:
            self._reservation.check_not_taken()
        self._device.limit_writes(self._read_through, until_s)
        self._confirmed = self._read_through


class _LeaseGuard:
    """The lease or grant of a device, while it has one, for the device and its queue pairs.

    The queue pairs have no reference to the device. So a device that nothing refers to any more is
    closed at once, although it has idle queue pairs.
    """

    def __init__(self) -> None:
        self.lease: Lease | None = None
        self.grant: Grant | None = None

    def check(self) -> None:
        """Raise LeaseLostError if the lease is lost, or nothing is granted now."""
        holds = self.grant or self.lease
        if holds is not None:
            holds.check()

    def note_failed_write(self) -> None:
        """Note that a write may take effect later."""
        lease = self.lease
        if lease is not None:
            lease.note_failed_write()


class _GuardedQueue(NativeQueue):
    """A queue pair that checks the device's lease before every call that may send a write.

    ``poll`` is such a call, since it may send data of a submitted write. Closing the queue pair
    drops unsent data.
    """

    def __init__(
        self, device: NativeDevice, depth: int, *, writable: bool, guard: _LeaseGuard
    ) -> None:
        super().__init__(device, depth, writable=writable)
        self._guard = guard

    def submit(self, kind: int, buffer: BytesLike, offset_bytes: int, tag: int) -> bool:
        """Submit one operation; raises LeaseLostError for a write if the lease is lost."""
        if kind == Kind.WRITE:
            self._guard.check()
        return super().submit(kind, buffer, offset_bytes, tag)

    def _before_wait(self) -> None:
        if any(operation.kind == Kind.WRITE for operation in self._in_flight.values()):
            self._guard.check()

    def poll(self, timeout_ms: int = 0) -> list[tuple[int, int]]:
        """Return completions, noting failed ones; LeaseLostError if writes may not be sent."""
        try:
            taken = super().poll(timeout_ms)
        except DeviceError:
            self._guard.note_failed_write()
            raise
        if any(result < 0 for _, result in taken):
            self._guard.note_failed_write()
        return taken

    def transfer(self, kind: int, buffer: BytesLike, offset_bytes: int) -> None:
        """Read or write a whole range; raises LeaseLostError for a write if the lease is lost."""
        if kind != Kind.WRITE:
            super().transfer(kind, buffer, offset_bytes)
            return
        self._guard.check()
        try:
            super().transfer(kind, buffer, offset_bytes)
        except LeaseLostError:
            self._guard.note_failed_write()
            self._guard.check()  # whose error has the deadline
            raise
        except DeviceError:
            self._guard.note_failed_write()
            raise


class _Renewer(threading.Thread):
    """The thread that renews a lease until it is stopped or the lease is lost."""

    def __init__(self, lease: Lease, block: _RecordBlock) -> None:
        super().__init__(name="dlfs-lease", daemon=True)
        self._lease = lease
        self._block = block
        self._stopping = Event()

    def run(self) -> None:
        """Renew the lease at its interval, and sooner after a failure or a reconnect."""
        pause_s = renew_s = self._lease.times.renew_s
        while self._wait(pause_s):
            try:
                self._lease.renew()
                pause_s = renew_s
            except LeaseLostError:
                return
            except DlfsError:
                pause_s = renew_s / 4

    def _wait(self, pause_s: float) -> bool:
        """Wait until the next renewal is due; return False if the thread is to stop."""
        due_at = time.monotonic() + pause_s
        while not self._stopping.wait(min(_CHECK_MS / 1000, max(0, due_at - time.monotonic()))):
            if time.monotonic() >= due_at or not self._block.is_confirmed:
                return True
        return False

    def stop(self) -> None:
        """Stop the thread and wait until it has ended."""
        self._stopping.set()
        self.join()
