"""Block devices that several hosts may open for writing: NVMe namespaces over a fabric.

The writer's lock is a lease in the lock record (``dlfs.block.lease``), and a reservation for this
host where the target has them (``dlfs.block.reservation``). A background thread keeps the lease
alive. Once it is lost, every write and flush through this device is refused with LeaseLostError,
before anything is sent: a writer that is cut off stops by itself, in time. The initiator, libdlfs's
own or SPDK's, knows the lease's deadline and looks at the clock before it sends; after a reconnect
it sends no write until the background thread has read the record again, and the reservation.

``lock_exclusive`` waits: about a second for a free lease, two for the answer that a writer lives,
and ``LeaseTimes.expiry_s`` (42 s) where a writer died; that wait is told as a warning of the logger
``dlfs.block``, which Python prints on stderr unless told otherwise. After a write that failed, the
lease is not given back but left to expire, since such a write may take effect late. So is a lease
that cannot be given back; ``unlock`` does not fail for it.

A forked child inherits no lease: its writes are refused, and the parent's go on.
"""

from __future__ import annotations

import abc
import logging
import threading
import time
from collections.abc import Callable
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
from dlfs._native.nvme import get_generation, limit_writes
from dlfs.block import lock
from dlfs.block.device import NativeBackedDevice
from dlfs.block.lease import Lease, LeaseTimes, describe
from dlfs.block.nvme import CommandRunner
from dlfs.block.reservation import Reservation
from dlfs.errors import (
    ClosedError,
    DeviceError,
    DeviceLostError,
    DeviceTimeoutError,
    DlfsError,
    LeaseLostError,
    LockedError,
    UsageError,
)
from dlfs.units import KIB

if TYPE_CHECKING:
    from dlfs._native.device import BytesLike

_log = logging.getLogger("dlfs.block")

_LOOK_MS = 50
"""Time between two looks for a controller that was made anew, in milliseconds."""


class SharedNamespaceDevice(NativeBackedDevice):
    """A namespace that other hosts reach too. Subclasses open it, and say how to run commands."""

    gap_bytes = 4 * KIB
    """Driven from user space, a request costs a microsecond or two of either processor, and a KiB
    that TCP brings about 0.25 us: bench/README.md, "Initiators"."""
    locks_by_record = True
    lease_times = LeaseTimes()
    """Of the writer's lease; set it before locking, and the same for all who share the device."""

    def __init__(self, native: NativeDevice, *, uri: str, identity: str, writable: bool) -> None:
        super().__init__(native, uri=uri, identity=identity, writable=writable)
        self._lease: Lease | None = None
        self._renewer: _Renewer | None = None
        self._reservation: Reservation | None = None
        self._given_up = threading.Event()

    @property
    @abc.abstractmethod
    def runner(self) -> CommandRunner:
        """Runs single commands on the namespace's controller."""

    @property
    @abc.abstractmethod
    def nsid(self) -> int:
        """Of the namespace."""

    @property
    def late_writes_s(self) -> float:
        """How long after its submission a write may still take effect, retries included."""
        return self.patience_ms / 1000

    @property
    def keep_alive_s(self) -> float | None:
        """Time after which the target gives a silent host up, in seconds; 0: never.

        None where there are no connections.
        """
        return None

    def generation(self) -> int:
        """Return the number of the controller that is in use, or will be next.

        Raises:
            ClosedError: the device is closed.
        """
        return get_generation(self.native)

    def limit_writes(self, generation: int, until_s: float | None) -> None:
        """Have the initiator send writes through one controller and before a time only.

        Args:
            generation: of the controller.
            until_s: of ``lease.boot_clock``; None: no limit.

        Raises:
            ClosedError: the device is closed.
        """
        until_ns = None if until_s is None else round(until_s * 1e9)
        limit_writes(self.native, generation, until_ns)

    # ---- writing under the lease -----------------------------------------------------------------

    def _check_lease(self) -> None:
        lease = self._lease
        if lease is not None:
            lease.check()

    def _doubt_lease(self) -> None:
        lease = self._lease
        if lease is not None:
            lease.doubt()

    def queue_pair(self, depth: int) -> NativeQueue:
        """Make a queue pair, whose writes are refused once the lease is lost.

        Args:
            depth: operations in flight, 1..4096.

        Raises:
            UsageError: the depth is out of range.
            DeviceError: there are no resources for it.
            ClosedError: the device is closed.
        """
        return _GuardedQueue(self, depth)

    def _transfer(self, kind: Kind, buffer: BytesLike, offset_bytes: int) -> None:
        if kind == Kind.WRITE:
            self._check_lease()  # before a queue pair is made for it
        super()._transfer(kind, buffer, offset_bytes)

    def flush(self) -> None:
        """Make every completed write durable.

        Raises:
            LeaseLostError: this writer's lease is lost.
            DeviceError: the device failed; what was written may be lost.
            ClosedError: it is closed.
        """
        self._check_lease()
        try:
            super().flush()
        except (DeviceLostError, DeviceTimeoutError):
            self._doubt_lease()  # do not look for the device once more to give the lease back
            raise

    # ---- the lease -------------------------------------------------------------------------------

    def _acquire(self, record: lock.HolderRecord) -> bool:
        if not self._record_span():
            raise UsageError(f"lock {self.uri}: it is too small for a lease")
        if self.late_writes_s > self.lease_times.late_s:
            raise UsageError(
                f"lock {self.uri}: expected that its writes end within "
                f"{self.lease_times.late_s:g} s, got time-outs of {self.late_writes_s:g} s in all"
            )
        keep_alive_s, most_s = self.keep_alive_s, self.lease_times.late_s / 2
        if keep_alive_s is not None and not 0 < keep_alive_s <= most_s:
            raise UsageError(
                f"lock {self.uri}: expected keepalive_ms in 1..{most_s * 1000:g}, so that the "
                f"target ends the connections of a writer that stands still before its lease can "
                f"be taken, got {keep_alive_s * 1000:g}"
            )
        self._reservation = Reservation.probe(self.runner, self.nsid, self.uri)
        place = _RecordPlace(self, self._record_span(), self._reservation)
        lease = Lease(place, record, times=self.lease_times, waiting=self._tell, sleep=self._sleep)
        place.lease = lease
        lease.acquire()
        self._lease = lease
        try:
            if self._reservation is not None:
                self._reservation.take()
        except LockedError:
            self._end_lease()
            raise
        except BaseException:  # nobody knows whether it was taken: it goes when the lease expires
            self._lease = None
            raise
        self._renewer = _Renewer(lease, place)
        self._renewer.start()
        return True

    def _sleep(self, seconds: float) -> None:
        if self._given_up.wait(seconds):
            raise ClosedError(f"lock {self.uri}: given up while waiting")

    def give_up(self) -> None:
        """End the wait of a ``lock_exclusive`` in another thread; until ``unlock``, none waits."""
        self._given_up.set()

    def unlock(self) -> None:
        """Give the lease back. Does nothing when this object did not take it in this process."""
        self._given_up.clear()
        super().unlock()

    def _tell(self, content: bytes, seconds: float) -> None:
        _log.warning(
            "%s: waiting up to %.0f s to learn whether its last writer still lives: %s",
            self.uri,
            seconds,
            describe(content),
        )

    def _release(self) -> None:
        """Never fails: what cannot be given back expires."""
        if self._renewer is not None:
            self._renewer.stop()
            self._renewer = None
        try:
            if self._reservation is not None and self._lease is not None and self._lease.releasable:
                self._reservation.give_back()
            self._end_lease()
        except DeviceError as error:
            self._lease = None
            _log.warning("%s: the writer's lock is left to expire: %s", self.uri, error)

    def _end_lease(self) -> None:
        """Give the lease back where that is allowed, and forget it."""
        try:
            if self._lease is not None:
                self._lease.release()
        finally:
            self._lease = None


class _RecordPlace:
    """Where a device's lease lies."""

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
        return self._confirmed == self._device.generation()

    @property
    def uri(self) -> str:
        return self._device.uri

    def read_record(self) -> bytes:
        self._read_through = self._device.generation()
        return self._device.read(lock.RECORD_OFFSET_BYTES, self._span)

    def write_record(self, content: bytes) -> None:
        """Write it. A write that waits for the lease to be confirmed has that done meanwhile."""
        memory = aligned_buffer(self._span, self._device.block_bytes)
        memory[:] = np.frombuffer(content.ljust(self._span, b"\0"), np.uint8)
        with self._device.borrowed_queue() as queue:
            queue.submit(Kind.WRITE, memory, lock.RECORD_OFFSET_BYTES, 0)
            while not (taken := queue.poll(_LOOK_MS)):
                self._confirm()
        if taken[0][1] < 0:
            raise operation_error(
                self.uri, Kind.WRITE, lock.RECORD_OFFSET_BYTES, self._span, taken[0][1]
            )

    def _confirm(self) -> None:
        if self.lease is not None and not self.is_confirmed:
            with suppress(DeviceError):  # the write itself ends, at its lease's end at the latest
                self.lease.confirm()

    def flush_record(self) -> None:
        self._device.flush()

    def make_way(self, *, lapsed: bool) -> None:
        if self._reservation is not None:
            self._reservation.make_way(lapsed=lapsed)

    def limit_writes(self, until_s: float | None) -> None:
        reconnected = self._confirmed not in (None, self._read_through)
        if until_s and reconnected and self._reservation is not None:
            self._reservation.check_not_taken()
        self._device.limit_writes(self._read_through, until_s)
        self._confirmed = self._read_through


class _GuardedQueue(NativeQueue):
    """A queue pair that asks the device's lease before every write, and before going on with one.

    A submitted write's data may still have to be sent: ``poll`` does it. Closing the queue pair
    drops what was not sent.
    """

    def __init__(self, device: SharedNamespaceDevice, depth: int) -> None:
        super().__init__(device.native, depth, writable=device.writable)
        self._check: Callable[[], None] = device._check_lease
        self._doubt: Callable[[], None] = device._doubt_lease

    def submit(self, kind: int, buffer: BytesLike, offset_bytes: int, tag: int) -> bool:
        """Submit one operation; LeaseLostError when it is a write and the lease is lost."""
        if kind == Kind.WRITE:
            self._check()
        return super().submit(kind, buffer, offset_bytes, tag)

    def _before_wait(self) -> None:
        if any(operation.kind == Kind.WRITE for operation in self._in_flight.values()):
            self._check()

    def poll(self, timeout_ms: int = 0) -> list[tuple[int, int]]:
        """Take completions, noting those that failed; LeaseLostError before a write goes on."""
        try:
            taken = super().poll(timeout_ms)
        except DeviceError:
            self._doubt()
            raise
        if any(result < 0 for _, result in taken):
            self._doubt()
        return taken

    def transfer(self, kind: int, buffer: BytesLike, offset_bytes: int) -> None:
        """Read or write a whole range; LeaseLostError when it is a write and the lease is lost."""
        if kind != Kind.WRITE:
            super().transfer(kind, buffer, offset_bytes)
            return
        self._check()
        try:
            super().transfer(kind, buffer, offset_bytes)
        except DeviceError:
            self._doubt()
            raise


class _Renewer(threading.Thread):
    """Keeps a lease alive until it is stopped or the lease is lost."""

    def __init__(self, lease: Lease, place: _RecordPlace) -> None:
        super().__init__(name="dlfs-lease", daemon=True)
        self._lease = lease
        self._place = place
        self._stopping = threading.Event()

    def run(self) -> None:
        """Renew at the lease's interval, and sooner after a failure or a reconnect."""
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
        """Wait until the next renewal is due; False when it is not wanted any more."""
        due_at = time.monotonic() + pause_s
        while not self._stopping.wait(min(_LOOK_MS / 1000, max(0, due_at - time.monotonic()))):
            if time.monotonic() >= due_at or not self._place.is_confirmed:
                return True
        return False

    def stop(self) -> None:
        """Stop, and wait for a renewal under way."""
        self._stopping.set()
        self.join()
