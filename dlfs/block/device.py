"""The interface of block devices, and the base class of those that libdlfs implements.

A ``BlockDevice`` reads and writes whole blocks through queue pairs, each used by one thread at a
time. ``read`` and ``write`` transfer one range per call, from any thread, through a queue pair
that the device keeps; they are meant for small structures such as superblocks. Samples are read by
C code, which uses ``native`` directly.

Writers write through ``write`` and ``queue_pair`` and never through ``native``, so that a device
that wraps another, as tests do, sees every write.

A device has one writer at a time. ``lock_exclusive`` takes a lock that ends with its process, and
writes a record of its holder for the error message of the next writer (``dlfs.block.lock``). On
devices that several hosts reach, the record itself is the lock: a lease (``dlfs.block.shared``).

The workers of an import write without the lock, each through a handle of its own: **granted
writing**. A coordinator, which takes the lock to commit only, tells each worker which ranges are
its own. ``begin_granted`` takes the place of ``lock_exclusive``; it limits when a handle writes,
not where. On files and disks a granted writer has a slot, a lock that lasts until its last write
has ended. On shared namespaces each grant has a deadline, after which nothing is sent
(docs/leases.md).
"""

from __future__ import annotations

import abc
import math
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar, Protocol, Self, runtime_checkable

from dlfs._native import abi
from dlfs._native.device import (
    Kind,
    NativeDevice,
    NativeQueue,
    aligned_buffer,
    as_bytes_array,
    operation_error,
)
from dlfs.base.closing import Closing
from dlfs.base.deadlines import Deadline, current_deadline
from dlfs.base.forks import OwnerProcess
from dlfs.base.threads import start_thread
from dlfs.base.units import KIB, MIB
from dlfs.block import lock, silence
from dlfs.block.slots import COORDINATOR_SLOT
from dlfs.errors import (
    ClosedError,
    DeviceError,
    DeviceTimeoutError,
    DlfsError,
    LimitError,
    LockedError,
    UsageError,
)

if TYPE_CHECKING:
    from dlfs._native.device import BytesLike
    from dlfs.block.lease import LeaseTimes

__all__ = [
    "BlockDevice",
    "Kind",
    "NativeBackedDevice",
    "QueuePair",
    "aligned_buffer",
    "operation_error",
]

_CONVENIENCE_DEPTH = 32
_BOUNCE_BYTES = 16 * MIB
_WAIT_SLICE_MS = 100  # after which a thread looks whether another one found the device silent

_unclosed: list[QueuePair] = []
"""Queue pairs that are never closed, because no thread could be started to wait for their reads."""


class QueuePair(Protocol):
    """A queue of operations on a block device.

    Threads: one at a time. A forked child may only close it.
    """

    @property
    def depth(self) -> int:
        """Most operations in flight."""

    @property
    def in_flight(self) -> int:
        """Operations that were submitted and not yet returned by ``poll``."""

    def submit(self, kind: int, buffer: BytesLike, offset_bytes: int, tag: int) -> bool:
        """Submit a read or write of whole blocks; see ``NativeQueue.submit``."""

    def poll(self, timeout_ms: int = 0) -> list[tuple[int, int]]:
        """Return the completions that are ready; see ``NativeQueue.poll``."""

    def close(self) -> None:
        """Wait for operations in flight, then free the queue pair. Idempotent."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: object) -> None: ...


@runtime_checkable
class BlockDevice(Protocol):
    """A device that reads and writes whole logical blocks.

    Threads: any at once, except ``close``.
    """

    @property
    def uri(self) -> str:
        """URI that opens the same device."""

    @property
    def identity(self) -> str:
        """Identifier that is equal for all objects of one device, whatever their URIs."""

    @property
    def size_bytes(self) -> int:
        """Size of the device, a multiple of ``block_bytes``."""

    @property
    def block_bytes(self) -> int:
        """Size of a logical block, the unit of reads and writes: a power of two, 512..65536."""

    @property
    def writable(self) -> bool:
        """True if the device was opened for writing."""

    @property
    def operation_timeout_ms(self) -> int:
        """Upper bound of one operation with its retries, in milliseconds; 0: unbounded."""

    @property
    def drops_reads(self) -> bool:
        """True if closing a queue pair ends its reads; else it waits for them."""

    @property
    def queue_pairs_max(self) -> int:
        """Most queue pairs that its target grants this process; 0: no limit."""

    @property
    def gap_bytes(self) -> int:
        """Bytes that cost about as much time as one more request: a span may read such gaps."""

    @property
    def native(self) -> NativeDevice:
        """The libdlfs device for native readers. Keep this object while C uses its handle."""

    def queue_pair(self, depth: int) -> QueuePair:
        """Create a queue pair with up to ``depth`` operations in flight, 1..4096.

        Raises:
            UsageError: the depth is out of range.
            LimitError: the target grants no more queue pairs.
            DeviceError: the kernel or the target refuses it, or the device is lost.
            ClosedError: the device is closed.
        """

    def read(self, offset_bytes: int, length_bytes: int) -> bytes:
        """Read whole blocks.

        Args:
            offset_bytes: a multiple of ``block_bytes``.
            length_bytes: a multiple of ``block_bytes``.

        In a call with a deadline (``dlfs.base.deadlines``), it waits no longer than that allows.

        Raises:
            UsageError: the range is misaligned or beyond the device's end.
            DeviceTimeoutError: the device does not answer, or is known not to.
            DeviceError: the device failed.
            TruncatedError: the file behind the device ends too early.
            ClosedError: the device is closed.
        """

    def write(self, offset_bytes: int, data: BytesLike) -> None:
        """Write whole blocks; durable after ``flush``.

        Args:
            offset_bytes: a multiple of ``block_bytes``.
            data: a multiple of ``block_bytes`` long. Unaligned data is copied first.

        Raises:
            UsageError: the range is misaligned or beyond the device's end.
            DeviceError: the device is read-only or failed.
            LeaseLostError: this writer's lease is lost.
            ClosedError: the device is closed.
        """

    def flush(self) -> None:
        """Make every completed write durable.

        Raises:
            LeaseLostError: this writer's lease is lost.
            DeviceError: the device failed; completed writes may be lost.
            ClosedError: the device is closed.
        """

    def lock_exclusive(self, holder: str, *, record: bool = True) -> None:
        """Take the writer's lock.

        Files, disks and memory never wait. A shared namespace waits until it is known that no other
        host writes: ``dlfs.block.lease`` states how long.

        Args:
            holder: describes the writer, for error messages.
            record: also write a record of the holder into the lock block, whose former content is
                lost. A lease always is such a record.

        Raises:
            LockedError: another writer has the lock; the message names it.
            UsageError: the device is read-only, or already locked through this object.
            DeviceError: the device failed.
        """

    def unlock(self) -> None:
        """Release the lock. Idempotent; ``close`` does it too."""

    # ---- granted writing: a worker's side --------------------------------------------------------

    @property
    def grants_expire(self) -> bool:
        """True if a grant ends at its deadline; False if it ends with its writer's last write."""

    @property
    def lease_times(self) -> LeaseTimes | None:
        """Durations of leases and grants; None if grants do not expire."""

    @property
    def writer_key(self) -> int | None:
        """Key by which the target knows this host as a writer, for ``expel_writer``.

        None before ``begin_granted`` or ``lock_exclusive``, and if there are no reservations.
        """

    def incarnation(self) -> int:
        """Return the number of the connection to the target, for ``extend_grant``; 0: none.

        Raises:
            ClosedError: the device is closed.
        """

    def begin_granted(self, slot: int) -> None:
        """Make this handle one that writes under grants only, until it is closed.

        A worker calls it before it asks its coordinator for the first grant. Where grants expire,
        every write is refused until ``extend_grant`` has been called.

        Args:
            slot: number of the writer on its host, 0..1023, or ``COORDINATOR_SLOT``. No two living
                writers have the same.

        Raises:
            LockedError: a living writer has the slot, or other software reserved the device.
            UsageError: the device is read-only or locked, was begun before, or cannot be written
                under grants, as ``check_can_grant``.
            DeviceError: the device failed.
        """

    def extend_grant(self, until_s: float, *, incarnation: int) -> None:
        """Permit writes until a time. Sends nothing and does not wait.

        After a reconnect, writes wait for an extension of the new incarnation, but no longer than
        until the deadline. Has no effect where grants do not expire.

        Args:
            until_s: deadline on ``lease.boot_clock``.
            incarnation: what ``incarnation`` returned before the worker sent the request that its
                coordinator has confirmed.

        Raises:
            UsageError: granted writing has not begun, or has ended.
            ClosedError: the device is closed.
        """

    def end_granted(self) -> None:
        """Write no more through this handle. Idempotent; ``close`` does it too.

        On files and disks the slot becomes free when the writes in flight have ended.

        Raises:
            DeviceError: the file cannot be opened again; ``close`` then frees the slot.
        """

    # ---- granted writing: the coordinator's side -------------------------------------------------

    def check_can_grant(self) -> None:
        """Check that workers may write to this device under grants.

        Raises:
            UsageError: it is a file on a file system that several hosts may mount, a device in
                memory, or a namespace whose reservations would lock workers out.
            DeviceError: the device failed.
        """

    def admit_writers(self) -> bool:
        """Let registered hosts write while another one has the lock. The caller has the lock.

        Each coordinator calls it once. It removes the writers of all other hosts, which those of an
        earlier coordinator are; only then do its own workers begin. Does nothing where the target
        has no reservations.

        Returns:
            True if a host was fenced off, now or when the lock was taken: ``dismiss_writers`` must
            keep the fence.

        Raises:
            UsageError: this object does not have the lock.
            LeaseLostError: another host took the lock over.
            DeviceError: the target failed or refused.
        """

    @property
    def writers_admitted(self) -> bool:
        """False if the lock's holder excludes all other hosts, as where it replaced a dead writer.

        True where the target has no reservations. Valid from ``lock_exclusive`` to ``unlock``.
        """

    def dismiss_writers(self, *, fence: bool) -> None:
        """End what ``admit_writers`` began, also for another coordinator. The caller has the lock.

        Args:
            fence: True if a writer was lost, which may be stopped only: the target refuses the
                writes of other hosts after ``unlock`` too, until one of them takes the lock.

        Raises:
            UsageError: this object does not have the lock.
            LeaseLostError: another host took the lock over.
            DeviceError: the target failed or refused.
        """

    def expel_writer(self, key: int | None, living: Collection[int | None] = ()) -> bool:
        """Have the target refuse every write of a lost writer's host from now on.

        Args:
            key: ``writer_key`` of the lost writer.
            living: keys of the hosts of writers that live. These hosts are not expelled, nor is
                this one.

        Returns:
            True if the target refuses the host's writes and executes none of them any more. False
            if only the deadline of its grant ends them.

        Raises:
            LeaseLostError: this host was itself expelled, by another coordinator.
            DeviceError: the target failed or refused.
        """

    def granted_writers_gone(self, slot: int | None = None) -> bool:
        """Return True if no granted writer of a slot can write any more, on files and disks.

        Always True where grants expire: there, the deadline tells.

        Args:
            slot: number of the writer; None for those of all workers.

        Raises:
            DeviceError: the system does not answer.
            ClosedError: the device is closed.
        """

    def close(self) -> None:
        """Free the device, now or with its last queue pair. Idempotent."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: object) -> None: ...


def leave(device: BlockDevice, queue: QueuePair) -> None:
    """Close a queue pair. In a call with a deadline, a thread waits for reads that may not end.

    Args:
        device: the device of the queue pair.
        queue: the queue pair, which is not used any more.
    """
    if device.drops_reads or not queue.in_flight or current_deadline() is None:
        queue.close()
        return
    waiting = threading.Thread(target=queue.close, name="dlfs-abandoned", daemon=True)
    try:
        start_thread(waiting)
    except LimitError:
        _unclosed.append(queue)


class NativeBackedDevice(abc.ABC, Closing):
    """A block device over a ``NativeDevice``. Subclasses implement its lock."""

    gap_bytes = 16 * KIB
    drops_reads = False

    def __init__(self, native: NativeDevice, *, uri: str, identity: str, writable: bool) -> None:
        self.uri = uri
        self.identity = identity
        self.writable = writable
        self.size_bytes = native.size_bytes
        self.block_bytes = native.block_bytes
        self._native: NativeDevice | None = native
        self._locked_by: OwnerProcess | None = None  # the process that took the lock
        self._recorded = False
        self._granted_to: OwnerProcess | None = None  # the process that began granted writing
        self._grant_has_ended = False

    def __repr__(self) -> str:
        state = "closed" if self._native is None else f"{self.size_bytes} bytes"
        return f"<{type(self).__name__} {self.uri}: {state}>"

    @property
    def operation_timeout_ms(self) -> int:
        """Upper bound of one operation with its retries, in milliseconds; 0: unbounded."""
        return 0

    @property
    def queue_pairs_max(self) -> int:
        """Most queue pairs that its target grants this process; 0: no limit."""
        return 0

    @property
    def native(self) -> NativeDevice:
        """The libdlfs device, for native readers.

        Raises:
            ClosedError: the device is closed.
        """
        if self._native is None:
            raise ClosedError(f"use {self.uri}: the device is closed")
        return self._native

    def queue_pair(self, depth: int) -> NativeQueue:
        """Create a queue pair; see ``BlockDevice.queue_pair``."""
        return self.native.queue(depth, writable=self.writable)

    # ---- conveniences ----------------------------------------------------------------------------

    @contextmanager
    def pooled_queue(self) -> Iterator[NativeQueue]:
        """Use one of the device's idle queue pairs, or a new one, in a ``with`` statement."""
        queue = self.queue_pair(_CONVENIENCE_DEPTH)
        try:
            yield queue
        except BaseException:
            queue.close()  # one that failed is not used again
            raise
        queue.release()

    def _transfer(self, kind: Kind, buffer: BytesLike, offset_bytes: int) -> None:
        with self.pooled_queue() as queue:
            queue.transfer(kind, buffer, offset_bytes)

    def read(self, offset_bytes: int, length_bytes: int) -> bytes:
        """Read whole blocks; see ``BlockDevice.read``."""
        in_range = 0 <= length_bytes <= self.size_bytes and 0 <= offset_bytes <= self.size_bytes
        if not in_range or length_bytes % self.block_bytes or offset_bytes % self.block_bytes:
            raise UsageError(
                f"read {self.uri} at byte {offset_bytes}, {length_bytes} bytes: expected whole "
                f"blocks of {self.block_bytes} bytes within {self.size_bytes} bytes"
            )
        buffer = aligned_buffer(length_bytes, self.block_bytes)
        deadline = current_deadline()
        if deadline is None:
            self._transfer(Kind.READ, buffer, offset_bytes)
        else:
            deadline.admit(self.operation_timeout_ms)
            self._read_within(deadline, buffer, offset_bytes)
            deadline.credit(length_bytes)
        return buffer.tobytes()

    @property
    def reopener(self) -> Callable[[], BlockDevice] | None:
        """Function that opens the device again for reading; None if it cannot be opened again."""
        return None

    def _read_within(self, deadline: Deadline, buffer: BytesLike, offset_bytes: int) -> None:
        """Read for as long as a deadline gives the device; note it if it does not answer."""
        action = f"read {self.uri} at byte {offset_bytes}, {memoryview(buffer).nbytes} bytes"  # type: ignore[arg-type]
        silence.check_answers(self.uri, action)
        began_s = time.monotonic()
        wait = _Wait(self, action, deadline.device_s)
        try:
            queue = self.queue_pair(_CONVENIENCE_DEPTH)
        except DeviceTimeoutError:
            silence.note_unanswered(self)
            raise
        try:
            wait.read(queue, buffer, offset_bytes)
        except BaseException as error:
            leave(self, queue)
            waited_s = time.monotonic() - began_s
            if isinstance(error, DeviceTimeoutError):
                silence.note_unanswered(self, waited_s=waited_s if wait.was_cut else None)
            raise
        queue.release()

    def write(self, offset_bytes: int, data: BytesLike) -> None:
        """Write whole blocks; see ``BlockDevice.write``."""
        array = as_bytes_array(data)
        if array.nbytes % self.block_bytes:
            raise UsageError(
                f"write {self.uri} at byte {offset_bytes}, {array.nbytes} bytes: expected whole "
                f"blocks of {self.block_bytes} bytes"
            )
        if array.ctypes.data % self.block_bytes == 0:
            self._transfer(Kind.WRITE, array, offset_bytes)
            return
        bounce = aligned_buffer(min(array.nbytes, _BOUNCE_BYTES), self.block_bytes)
        for start in range(0, array.nbytes, _BOUNCE_BYTES):
            chunk = array[start : start + _BOUNCE_BYTES]
            bounce[: chunk.nbytes] = chunk
            self._transfer(Kind.WRITE, bounce[: chunk.nbytes], offset_bytes + start)

    def flush(self) -> None:
        """Make every completed write durable; see ``BlockDevice.flush``."""
        self.native.flush()

    # ---- the writer's lock -----------------------------------------------------------------------

    locks_by_record: ClassVar[bool] = False
    """True if the lock is itself a record in the lock block, so that no other one is written."""

    @abc.abstractmethod
    def _acquire(self, record: lock.HolderRecord) -> bool:
        """Take the lock for this holder; return False if another holder has it."""

    @abc.abstractmethod
    def _release(self) -> None:
        """Release the lock that ``_acquire`` took."""

    def lock_exclusive(self, holder: str, *, record: bool = True) -> None:
        """Take the writer's lock; see ``BlockDevice.lock_exclusive``."""
        if not self.writable:
            raise UsageError(f"lock {self.uri}: the device was opened read-only")
        if self._locked_by is not None and self._locked_by.is_current():
            raise UsageError(f"lock {self.uri}: it is locked through this object already")
        if self._granted_to is not None:
            raise UsageError(f"lock {self.uri}: this object writes under grants")
        own = lock.HolderRecord.of_this_process(holder)
        try:
            if not self._acquire(own):
                raise LockedError(f"lock {self.uri}: held by {self._describe_holder()}")
            self._locked_by = OwnerProcess()
            if record and not self.locks_by_record:
                self._recorded = True
                self._write_record(own.encode())
        except LockedError:
            raise
        except BaseException:
            self._locked_by = self._locked_by or OwnerProcess()  # Ctrl-C: it may be taken
            self.unlock()
            raise

    def unlock(self) -> None:
        """Release the lock. Does nothing if this object does not hold it in this process."""
        if self._locked_by is None or not self._locked_by.is_current():
            return
        try:
            if self._recorded:
                self._write_record(bytes(lock.RECORD_BYTES))
        finally:
            self._release()  # first: if Ctrl-C comes in between, closing the device does it again
            self._recorded = False
            self._locked_by = None

    def _record_span(self) -> int:
        """Return the bytes of the blocks that hold the record; 0 if the device is too small."""
        span = max(lock.RECORD_BYTES, self.block_bytes)
        return span if self.size_bytes >= lock.RECORD_OFFSET_BYTES + span else 0

    def _write_record(self, record: bytes) -> None:
        span = self._record_span()
        if span:
            self.write(lock.RECORD_OFFSET_BYTES, record.ljust(span, b"\0"))
            self.flush()

    def _describe_holder(self) -> str:
        span = self._record_span()
        try:
            content = self.read(lock.RECORD_OFFSET_BYTES, span) if span else b""
        except DeviceError as error:
            return f"another writer (its record cannot be read: {error})"
        found = lock.HolderRecord.decode(content)
        return "another writer, which left no record" if found is None else str(found)

    # ---- granted writing -------------------------------------------------------------------------

    lease_times: LeaseTimes | None = None
    """Durations of leases and grants; None if grants do not expire."""

    @property
    def grants_expire(self) -> bool:
        """True if a grant ends at its deadline; False if it ends with its writer's last write."""
        return self.lease_times is not None

    @property
    def writer_key(self) -> int | None:
        """Key by which the target knows this host as a writer; None: it has no reservations."""
        return None

    def incarnation(self) -> int:
        """Return the number of the connection to the target; 0: the device has none."""
        del self
        return 0

    @abc.abstractmethod
    def check_can_grant(self) -> None:
        """Check that workers may write under grants; see ``BlockDevice.check_can_grant``."""

    def _begin_granted(self, slot: int) -> None:
        """Prepare granted writing by the writer of a slot. Subclasses that can grant do so."""

    def _extend_grant(self, until_s: float, incarnation: int) -> None:
        """Permit writes until a time, where grants expire."""

    def _end_granted(self) -> None:
        """Refuse all writes from now on."""

    def begin_granted(self, slot: int) -> None:
        """Write under grants only; see ``BlockDevice.begin_granted``."""
        action = f"write to {self.uri} under grants"
        if self._granted_to is not None:
            raise UsageError(f"{action}: this object does, or did, so already")
        if not self.writable:
            raise UsageError(f"{action}: the device was opened read-only")
        if not 0 <= slot <= COORDINATOR_SLOT:
            raise UsageError(f"{action}: expected a slot in 0..{COORDINATOR_SLOT}, got {slot}")
        if self._locked_by is not None and self._locked_by.is_current():
            raise UsageError(f"{action}: it is locked through this object")
        self.check_can_grant()
        self._granted_to = OwnerProcess()
        try:
            self._begin_granted(slot)
        except BaseException:
            self.end_granted()
            raise

    def extend_grant(self, until_s: float, *, incarnation: int) -> None:
        """Permit writes until a time; see ``BlockDevice.extend_grant``."""
        if self._granted_to is None or not self._granted_to.is_current() or self._grant_has_ended:
            raise UsageError(
                f"extend a grant of {self.uri}: granted writing has "
                + ("ended" if self._grant_has_ended else "not begun in this process")
            )
        self._extend_grant(until_s, incarnation)

    def end_granted(self) -> None:
        """Write no more; see ``BlockDevice.end_granted``."""
        if self._granted_to is None or not self._granted_to.is_current() or self._grant_has_ended:
            return
        self._end_granted()
        self._grant_has_ended = True

    def admit_writers(self) -> bool:
        """Let registered hosts write; see ``BlockDevice.admit_writers``."""
        self._check_locked("admit writers to")
        return False

    @property
    def writers_admitted(self) -> bool:
        """False if the lock's holder excludes all other hosts."""
        return True

    def dismiss_writers(self, *, fence: bool) -> None:
        """End what ``admit_writers`` began; see ``BlockDevice.dismiss_writers``."""
        del fence
        self._check_locked("dismiss the writers of")

    def _check_locked(self, action: str) -> None:
        if self._locked_by is None or not self._locked_by.is_current():
            raise UsageError(f"{action} {self.uri}: expected that this object has the lock")

    def expel_writer(self, key: int | None, living: Collection[int | None] = ()) -> bool:
        """Have the target refuse the writes of a host; see ``BlockDevice.expel_writer``."""
        del key, living
        return False

    def granted_writers_gone(self, slot: int | None = None) -> bool:
        """Return True if no granted writer can write; see ``BlockDevice.granted_writers_gone``."""
        del slot
        return True

    # ---- life ------------------------------------------------------------------------------------

    def close(self) -> None:
        """Release the lock and free the device. Does nothing the second time.

        Raises:
            DeviceError: the lock's record could not be removed, or granted writing not be ended;
                the device is closed anyway.
        """
        if self._native is None:
            return
        failure: DlfsError | None = None
        try:
            self.end_granted()
            self.unlock()
        except DlfsError as error:
            failure = error
        native = self._native
        self._native = None
        self._close_native(native)
        if failure is not None:
            raise failure

    def _close_native(self, native: NativeDevice) -> None:
        native.close()


class _Wait:
    """The wait of one read for a device, which has a limit.

    Args:
        device: the device.
        action: the read, for errors.
        limit_s: longest wait, in seconds.
    """

    def __init__(self, device: NativeBackedDevice, action: str, limit_s: float) -> None:
        self._uri = device.uri
        self._own_limit_s = device.operation_timeout_ms / 1000
        self._action = action
        self._limit_s = limit_s
        self._until_s = time.monotonic() + limit_s
        self.was_cut = False  # by the limit; else the device itself gave up

    def read(self, queue: NativeQueue, buffer: BytesLike, offset_bytes: int) -> None:
        """Read whole blocks of any length, a MiB at a time.

        Raises:
            DeviceTimeoutError: the device did not answer in time.
            DeviceError: the device failed.
        """
        array = as_bytes_array(buffer)
        for start in range(0, array.nbytes, MIB):
            piece = array[start : start + MIB]
            while not queue.submit(Kind.READ, piece, offset_bytes + start, piece.nbytes):
                self._poll(queue, offset_bytes)
        while queue.in_flight:
            self._poll(queue, offset_bytes)

    def _poll(self, queue: NativeQueue, offset_bytes: int) -> None:
        left_ms = math.ceil((self._until_s - time.monotonic()) * 1000)
        completions = queue.poll(max(0, min(left_ms, _WAIT_SLICE_MS)))
        for length, result in completions:
            if result == abi.E_TIMEOUT:
                raise silence.timeout_error(self._action, self._own_limit_s)
            if result < 0:
                raise operation_error(self._uri, Kind.READ, offset_bytes, length, result)
            if result < length:
                raise operation_error(self._uri, Kind.READ, offset_bytes, length, abi.E_TRUNCATED)
        if not completions and left_ms <= 0:
            self.was_cut = True
            raise silence.timeout_error(self._action, self._limit_s)
        if not completions:
            silence.check_answers(self._uri, self._action)
