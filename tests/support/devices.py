"""Block devices for tests and benchmarks that record, stop or fail, wrapped around real ones.

- ``RecordingDevice`` logs every write and flush. From the log the media can be rebuilt as a crash
  after any event would leave them: the writes so far, the last one torn at a sector, or any number
  of the writes since the last flush in any order.
- ``StoppingDevice`` stops after a given write: it fails from then on, or kills its process.
- ``FaultyDevice`` fails at random from a seed, in native code, so that C readers meet the faults.

A wrapper owns the device that it wraps and closes it. Several devices of one volume share a
``WriteLog`` or a ``StopPoint``, which then count the writes of all of them. Native readers bypass
the first two wrappers, which change writes only.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from ctypes import byref
from dataclasses import asdict, dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from dlfs._native.device import NativeDevice, device_handle
from dlfs._native.library import check
from dlfs.base.closing import Closing
from dlfs.base.units import MIB
from dlfs.block.device import BlockDevice, Kind, NativeBackedDevice, QueuePair
from dlfs.block.lock import HolderRecord
from dlfs.errors import DeviceError, LimitError, LockedError
from tests.support.faults import FaultConfig, fault_library

if TYPE_CHECKING:
    from dlfs._native.device import BytesLike

__all__ = [
    "Faults",
    "FaultyDevice",
    "FaultyNativeDevice",
    "FlushEvent",
    "RecordingDevice",
    "StopPoint",
    "StoppingDevice",
    "WrappingDevice",
    "WriteEvent",
    "WriteLog",
]

SECTOR_BYTES = 512
"""Bytes that a power cut never tears: NVMe promises at least one logical block."""

RECORDED_BYTES_MAX = 256 * MIB
"""Largest size of a device whose initial contents are recorded in memory."""


def _of_inner(name: str) -> Any:
    """Return a property that is the inner device's."""
    return property(attrgetter(f"inner.{name}"))


class WrappingDevice(Closing):
    """Forwards everything to an inner device, with hooks around writes and flushes."""

    def __init__(self, inner: BlockDevice) -> None:
        self.inner = inner

    def before_write(self, offset_bytes: int, data: memoryview) -> None:
        """Called before a write is forwarded."""

    def after_write(self, offset_bytes: int, data: memoryview) -> None:
        """Called after a write was accepted."""

    def before_flush(self) -> None:
        """Called before a flush is forwarded."""

    def after_flush(self) -> None:
        """Called after a flush succeeded."""

    def before_read(self) -> None:
        """Called before a read through Python is forwarded."""

    uri = _of_inner("uri")
    identity = _of_inner("identity")
    size_bytes = _of_inner("size_bytes")
    block_bytes = _of_inner("block_bytes")
    writable = _of_inner("writable")
    operation_timeout_ms = _of_inner("operation_timeout_ms")
    drops_reads = _of_inner("drops_reads")
    queue_pairs_max = _of_inner("queue_pairs_max")
    gap_bytes = _of_inner("gap_bytes")
    native = _of_inner("native")
    grants_expire = _of_inner("grants_expire")
    lease_times = _of_inner("lease_times")
    writer_key = _of_inner("writer_key")
    writers_admitted = _of_inner("writers_admitted")
    incarnation = _of_inner("incarnation")
    begin_granted = _of_inner("begin_granted")
    extend_grant = _of_inner("extend_grant")
    end_granted = _of_inner("end_granted")
    check_can_grant = _of_inner("check_can_grant")
    admit_writers = _of_inner("admit_writers")
    dismiss_writers = _of_inner("dismiss_writers")
    expel_writer = _of_inner("expel_writer")
    granted_writers_gone = _of_inner("granted_writers_gone")

    def queue_pair(self, depth: int) -> QueuePair:
        """Create a queue pair of the inner device whose writes call the hooks."""
        return _WrappingQueuePair(self, self.inner.queue_pair(depth))

    def read(self, offset_bytes: int, length_bytes: int) -> bytes:
        """Read whole blocks. Raises what the inner device does."""
        self.before_read()
        return self.inner.read(offset_bytes, length_bytes)

    def write(self, offset_bytes: int, data: BytesLike) -> None:
        """Write whole blocks. Raises what the inner device and the hooks do."""
        view = memoryview(data).cast("B")  # type: ignore[arg-type]  # numpy before Python 3.12
        self.before_write(offset_bytes, view)
        self.inner.write(offset_bytes, view)
        self.after_write(offset_bytes, view)

    def flush(self) -> None:
        """Make every completed write durable. Raises what the inner device and the hooks do."""
        self.before_flush()
        self.inner.flush()
        self.after_flush()

    def lock_exclusive(self, holder: str, *, record: bool = True) -> None:
        """Take the inner device's lock; no hook is called for its record."""
        self.inner.lock_exclusive(holder, record=record)

    def unlock(self) -> None:
        """Release the inner device's lock."""
        self.inner.unlock()

    def close(self) -> None:
        """Close the inner device."""
        self.inner.close()


class _WrappingQueuePair(Closing):
    """A queue pair whose operations call the hooks of its device."""

    def __init__(self, device: WrappingDevice, inner: QueuePair) -> None:
        self._device = device
        self._inner = inner

    @property
    def depth(self) -> int:
        return self._inner.depth

    @property
    def in_flight(self) -> int:
        return self._inner.in_flight

    def submit(self, kind: int, buffer: BytesLike, offset_bytes: int, tag: int) -> bool:
        if kind != Kind.WRITE:
            self._device.before_read()
            return self._inner.submit(kind, buffer, offset_bytes, tag)
        if self._inner.in_flight >= self._inner.depth:
            return False  # the hooks must not count a write that is not accepted
        view = memoryview(buffer).cast("B")  # type: ignore[arg-type]  # numpy before Python 3.12
        self._device.before_write(offset_bytes, view)
        accepted = self._inner.submit(kind, buffer, offset_bytes, tag)
        if accepted:
            self._device.after_write(offset_bytes, view)
        return accepted

    def poll(self, timeout_ms: int = 0) -> list[tuple[int, int]]:
        return self._inner.poll(timeout_ms)

    def close(self) -> None:
        self._inner.close()


# ---- recording -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class WriteEvent:
    """A write to a device, which is named by its number in the log."""

    device: int
    offset_bytes: int
    data: bytes


@dataclass(frozen=True)
class FlushEvent:
    """A flush of a device, which is named by its number in the log."""

    device: int


class WriteLog:
    """The initial contents of one or more devices, and their writes and flushes in order.

    Threads: any at once.
    """

    def __init__(self) -> None:
        self.events: list[WriteEvent | FlushEvent] = []
        self._bases: list[bytes] = []
        self._numbers: dict[str, int] = {}  # by URI
        self._mutex = threading.Lock()

    def add_device(self, device: BlockDevice) -> int:
        """Add a device with its contents, unless it was opened before; return its number."""
        with self._mutex:
            if device.uri not in self._numbers:
                self._numbers[device.uri] = len(self._bases)
                self._bases.append(device.read(0, device.size_bytes))
            return self._numbers[device.uri]

    def add(self, event: WriteEvent | FlushEvent) -> None:
        """Append an event."""
        with self._mutex:
            self.events.append(event)

    def images(self, count: int) -> list[bytes]:
        """Return the contents of each device after ``count`` events."""
        return [bytes(image) for image in self._replay(count)]

    def torn_images(self, count: int, chance: random.Random) -> list[bytes]:
        """Return the contents after ``count`` events and random sectors of the next write."""
        images = self._replay(count)
        if count < len(self.events):
            event = self.events[count]
            if isinstance(event, WriteEvent):
                _apply_torn(images[event.device], event, chance)
        return [bytes(image) for image in images]

    def reordered_images(self, count: int, chance: random.Random) -> list[bytes]:
        """Return contents that a power cut after ``count`` events may leave.

        They include every write before the last flush of its device. Of the later writes they
        include a random subset in random order, each whole or torn.
        """
        images = [bytearray(base) for base in self._bases]
        pending: list[list[WriteEvent]] = [[] for _ in self._bases]
        for event in self.events[:count]:
            if isinstance(event, WriteEvent):
                pending[event.device].append(event)
                continue
            for write in pending[event.device]:
                _apply(images[event.device], write)
            pending[event.device].clear()
        for image, writes in zip(images, pending, strict=True):
            for write in chance.sample(writes, chance.randint(0, len(writes))):
                if chance.random() < 0.5:
                    _apply(image, write)
                else:
                    _apply_torn(image, write, chance)
        return [bytes(image) for image in images]

    def _replay(self, count: int) -> list[bytearray]:
        images = [bytearray(base) for base in self._bases]
        for event in self.events[:count]:
            if isinstance(event, WriteEvent):
                _apply(images[event.device], event)
        return images


def _apply(image: bytearray, write: WriteEvent) -> None:
    image[write.offset_bytes : write.offset_bytes + len(write.data)] = write.data


def _apply_torn(image: bytearray, write: WriteEvent, chance: random.Random) -> None:
    for start in range(0, len(write.data), SECTOR_BYTES):
        if chance.random() < 0.5:
            sector = write.data[start : start + SECTOR_BYTES]
            offset = write.offset_bytes + start
            image[offset : offset + len(sector)] = sector


class RecordingDevice(WrappingDevice):
    """A device that logs every write and flush.

    Args:
        inner: device to wrap; at most 256 MiB, since its initial contents are recorded.
        log: log that the devices of a volume share; a new one by default.

    Raises:
        LimitError: the device is too large.
    """

    def __init__(self, inner: BlockDevice, log: WriteLog | None = None) -> None:
        super().__init__(inner)
        if inner.size_bytes > RECORDED_BYTES_MAX:
            raise LimitError(
                f"record {inner.uri}: expected at most {RECORDED_BYTES_MAX} bytes, "
                f"got {inner.size_bytes}"
            )
        self.log = WriteLog() if log is None else log
        self.number = self.log.add_device(inner)

    def after_write(self, offset_bytes: int, data: memoryview) -> None:
        """Log the write."""
        self.log.add(WriteEvent(self.number, offset_bytes, bytes(data)))

    def after_flush(self) -> None:
        """Log the flush."""
        self.log.add(FlushEvent(self.number))


# ---- stopping ------------------------------------------------------------------------------------


class StopPoint:
    """The write after which one or more devices stop.

    Args:
        writes: number of writes that are done; the next write or flush stops.
        action: ``error``: that operation and all later ones fail; ``kill``: SIGKILL to this
            process.
        torn_blocks: blocks of the stopping write that still reach the media.

    Threads: any at once.
    """

    def __init__(
        self, writes: int, *, action: Literal["error", "kill"] = "error", torn_blocks: int = 0
    ) -> None:
        self.writes = writes
        self.action = action
        self.torn_blocks = torn_blocks
        self.done = 0
        self.stopped = False
        self._mutex = threading.Lock()

    def take_write(self) -> bool:
        """Count a write; return True if it is the one that stops, or a later one."""
        with self._mutex:
            if not self.stopped and self.done < self.writes:
                self.done += 1
                return False
            return True

    def is_due(self) -> bool:
        """Return True if all writes before the stop are done."""
        with self._mutex:
            return self.stopped or self.done >= self.writes

    def stop(self, uri: str) -> NoReturn:
        """Kill the process, or fail from now on.

        Raises:
            DeviceError: always, unless the process is killed.
        """
        self.stopped = True
        if self.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise DeviceError(f"use {uri}: stopped on purpose after {self.done} writes")


class StoppingDevice(WrappingDevice):
    """A device that stops at a ``StopPoint``, like a crash or a failing disk.

    Args:
        inner: device to wrap.
        point: stop point, which the devices of a volume share.
    """

    def __init__(self, inner: BlockDevice, point: StopPoint) -> None:
        super().__init__(inner)
        self.point = point

    def before_write(self, offset_bytes: int, data: memoryview) -> None:
        """Count the write, or stop."""
        if not self.point.take_write():
            return
        torn_bytes = self.point.torn_blocks * self.block_bytes
        if torn_bytes and not self.point.stopped:
            self.inner.write(offset_bytes, data[:torn_bytes])
        self.point.stop(self.uri)

    def before_flush(self) -> None:
        """Stop if all writes before the stop are done."""
        if self.point.is_due():
            self.point.stop(self.uri)

    def before_read(self) -> None:
        """Fail after the stop."""
        if self.point.stopped:
            self.point.stop(self.uri)


# ---- failing -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Faults:
    """The failures of a faulty device; each probability is per million operations."""

    seed: int = 0
    """Seed of all random choices: the n-th operation of the k-th queue pair always fails the same
    way.
    """
    error_per_million: int = 0
    """Operations that fail with EIO, per million."""
    short_per_million: int = 0
    """Reads that return fewer bytes than requested, per million."""
    flip_per_million: int = 0
    """Reads that succeed with one bit flipped, per million."""
    stall_per_million: int = 0
    """Operations that finish ``stall_ms`` late, per million."""
    stall_ms: int = 0
    reorder: bool = False
    """Return completions in a random order."""
    bad_first_bytes: int = 0
    """Start of a range whose reads always fail; ``bad_length_bytes`` long."""
    bad_length_bytes: int = 0
    lost_from: int = 0
    """Number of the operation at which the device is lost, over all queue pairs, from 1; 0: never.
    """
    lost_polls: bool = False
    """Once the device is lost, polls fail rather than single operations."""


_stalling: list[object] = []
"""Devices below those whose operations may hang when their reader is closed: never freed."""


class FaultyNativeDevice(NativeDevice):
    """A native device that fails on purpose over another, which it keeps alive.

    Raises:
        UsageError: a probability is over a million in a million.
    """

    def __init__(self, inner: NativeDevice, faults: Faults, *, uri: str) -> None:
        config = FaultConfig(**asdict(faults))
        owner = inner.handle
        handle = device_handle(owner)
        code = fault_library().dlfs_device_create_fault(owner, byref(config), byref(handle))
        check(code, f"make {uri}")
        super().__init__(handle, uri, writable=inner.writable)
        self._inner: NativeDevice | None = inner
        if faults.stall_per_million:
            _stalling.append(owner)

    def lose(self, lost: bool) -> None:
        """Make the device lost, or reachable again."""
        code = fault_library().dlfs_device_fault_lose(self.handle, int(lost))
        check(code, f"lose {self.uri}")

    def close(self) -> None:
        """Free the device. Further calls do nothing."""
        super().close()
        self._inner = None


class FaultyDevice(NativeBackedDevice):
    """A device that fails at random from a seed.

    Args:
        inner: device to wrap.
        faults: kinds of faults and their probabilities.

    Raises:
        UsageError: a probability is more than a million in a million.
    """

    def __init__(self, inner: BlockDevice, faults: Faults | None = None) -> None:
        self._faulty = FaultyNativeDevice(inner.native, faults or Faults(), uri=inner.uri)
        super().__init__(
            self._faulty, uri=inner.uri, identity=inner.identity, writable=inner.writable
        )
        self.inner = inner

    def lose(self, lost: bool = True) -> None:
        """Make everything fail with DeviceLostError; ``lost=False`` ends that."""
        self._faulty.lose(lost)

    def _acquire(self, record: HolderRecord) -> bool:
        try:
            self.inner.lock_exclusive(record.holder, record=False)
        except LockedError:
            return False
        return True

    def _release(self) -> None:
        self.inner.unlock()

    def check_can_grant(self) -> None:
        """Check the inner device."""
        self.inner.check_can_grant()

    def _begin_granted(self, slot: int) -> None:
        self.inner.begin_granted(slot)

    def _extend_grant(self, until_s: float, incarnation: int) -> None:
        self.inner.extend_grant(until_s, incarnation=incarnation)

    def _end_granted(self) -> None:
        self.inner.end_granted()

    def granted_writers_gone(self, slot: int | None = None) -> bool:
        """Ask the inner device."""
        return self.inner.granted_writers_gone(slot)

    def _close_native(self, native: NativeDevice) -> None:
        native.close()
        self.inner.close()
