"""Reads ranges of a data space from the members of a volume at full queue depth.

``read_into`` reads one range into memory: catalogs, directories. ``scan_space`` reads a whole space
in order, window by window and ahead of the caller: verification and repair. Both report a failed
read with the device and the byte at which it failed.

Each call has a deadline, and ``scan_space`` one for each window (``base.deadlines``). A member that
is silent for the time that it gives one device counts as lost. This holds for devices
that drop reads when their queue pair is closed: others could still write to the memory.

A failed read is repeated in halves, down to one block, so that a bad block costs no other block.
With replicas, bytes that one copy does not give are read from the next. Only the caller can verify
the bytes. If they are wrong, it reads them again by the next of the ``copy_orders``.

Threads: one for each call. Memory: the windows.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dlfs.base.closing import Closing
from dlfs.base.deadlines import OTHER_COPIES_PART, credit_call, current_deadline, limit_call
from dlfs.base.units import MIB
from dlfs.block import (
    BlockDevice,
    Kind,
    QueuePair,
    aligned_buffer,
    check_answers,
    leave,
    note_unanswered,
    operation_error,
    timeout_error,
)
from dlfs.errors import (
    AuthenticationError,
    DeviceError,
    DeviceLostError,
    DeviceTimeoutError,
    DlfsError,
)
from dlfs.format.geometry import DataSpace, Geometry

REQUEST_BYTES_MAX = 1 * MIB
"""Largest read that is submitted to a device, in bytes."""

DEPTH = 32
"""Most reads in flight on one member."""

WAIT_SLICE_MS = 100
"""Time after which a wait looks at the deadline, in milliseconds."""

WINDOW_BYTES = 4 * MIB
"""Size of a window of a scan in bytes, unless a chunk is larger."""

WINDOWS = 3
"""Windows of a scan: the caller has one, the others are being read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyOrder:
    """The order in which the copies of an address are read.

    Attributes:
        copy: number of the first copy; the following numbers come next, modulo the number of
            copies.
        avoid: number of a member whose copies come last.
        only: True to read that copy and no other.
    """

    copy: int = 0
    avoid: int | None = None
    only: bool = False

    def order(self, space: DataSpace, address: int) -> list[int]:
        """Return the copies of an address in the order in which they are read."""
        count = space.geometry.replicas
        if self.only:
            return [self.copy]
        copies = [(self.copy + i) % count for i in range(count)]
        return sorted(copies, key=lambda copy: space.resolve(address, copy)[0] == self.avoid)


FIRST_COPY_FIRST = CopyOrder()


def copy_orders(geometry: Geometry) -> list[CopyOrder]:
    """Return the orders to try in turn, each after wrong bytes came by the orders before it."""
    if geometry.replicas == 1:
        return [FIRST_COPY_FIRST]
    by_copy = [CopyOrder(copy=copy) for copy in range(geometry.replicas)]
    return by_copy + [CopyOrder(avoid=member) for member in range(geometry.member_count)]


@dataclass(frozen=True, slots=True)
class FailedRead:
    """A range of a space that could not be read."""

    address: int
    length_bytes: int
    error: DlfsError
    absent: bool = False
    """True if the member is missing altogether."""
    member: int = 0
    """Number of the member that was read last."""


@dataclass(eq=False)
class _Range:
    """A range that is being read into memory."""

    memory: NDArray[np.uint8]
    failures: list[FailedRead] = field(default_factory=list)
    halves: list[_Request] = field(default_factory=list)
    """Halves of requests that failed, to be submitted next."""


@dataclass(eq=False)
class _Request:
    """A part of a range that is contiguous on one member, in each of its copies."""

    target: _Range
    space: DataSpace
    address: int
    memory: NDArray[np.uint8]
    copies: list[int]
    """Copies that have not been read yet, in order."""
    member: int = 0
    offset_bytes: int = 0
    unreadable: bool = False
    """True if a member answered with an error other than its own loss."""
    error: DlfsError | None = None
    """Error of the last read that failed; None if all members so far are absent."""
    bounce: NDArray[np.uint8] | None = None
    """Memory of the read of a member that may answer after another copy was read; else None."""


@dataclass(frozen=True, slots=True)
class Window:
    """A range of a data space in memory, valid until the next window is requested."""

    address: int
    memory: NDArray[np.uint8]
    failures: tuple[FailedRead, ...]
    """Failed reads; their bytes in the memory are undefined."""

    def failure_at(self, address: int, length_bytes: int) -> FailedRead | None:
        """Return the failed read that covers a part of a range, or None."""
        for failure in self.failures:
            end = failure.address + failure.length_bytes
            if failure.address < address + length_bytes and address < end:
                return failure
        return None


class _Fetcher(Closing):
    """Queue pairs of all members, and the requests in flight on them."""

    def __init__(self, devices: Sequence[BlockDevice], choice: CopyOrder) -> None:
        self._devices = devices
        self._choice = choice
        self._queues: list[QueuePair | DeviceError] = []
        """Queue pair of each member, or the reason why it has none."""
        self._in_flight: dict[int, _Request] = {}
        self._tag = 0
        for device in devices:
            try:
                self._check_silence(device)
                self._queues.append(device.queue_pair(DEPTH))
            except DeviceError as error:
                if isinstance(error, DeviceTimeoutError):
                    note_unanswered(device)
                self._queues.append(error)

    def close(self) -> None:
        for device, queue in zip(self._devices, self._queues, strict=False):
            if not isinstance(queue, DeviceError):
                leave(device, queue)

    def _check_silence(self, device: BlockDevice) -> None:
        """Check that a device is not known to be silent, if this call has a deadline.

        Raises:
            DeviceTimeoutError: it is.
        """
        deadline = current_deadline()
        if deadline is not None:
            deadline.admit(device.operation_timeout_ms)
            check_answers(device.uri, f"read {device.uri}")

    def start(self, space: DataSpace, address: int, memory: NDArray[np.uint8]) -> _Range:
        """Start reading from an address until the memory is full."""
        target = _Range(memory)
        at = 0
        for piece in space.member_ranges(address, memory.nbytes):
            for start in range(0, piece.length_bytes, REQUEST_BYTES_MAX):
                length = min(REQUEST_BYTES_MAX, piece.length_bytes - start)
                part = memory[at : at + length]
                copies = self._choice.order(space, address + at)
                self._send(_Request(target, space, address + at, part, copies))
                at += length
        return target

    def finish(self, target: _Range) -> None:
        """Wait until all requests of a range have completed or failed."""
        while True:
            while target.halves:
                self._send(target.halves.pop())
            request = next((r for r in self._in_flight.values() if r.target is target), None)
            if request is None:
                return
            self._collect(request.member)

    def _send(self, request: _Request) -> None:
        """Submit a request to its next copy; record its failure if no copy is left."""
        while request.copies:
            copy = request.copies.pop(0)
            request.member, request.offset_bytes = request.space.resolve(request.address, copy)
            if self._submit(request):
                return
        if request.unreadable and request.memory.nbytes > request.space.geometry.block_bytes:
            self._halve(request)
            return
        problem = request.error or self._queues[request.member]
        assert isinstance(problem, DlfsError)
        request.target.failures.append(
            FailedRead(
                request.address,
                request.memory.nbytes,
                problem,
                absent=request.error is None,
                member=request.member,
            )
        )

    def _submit(self, request: _Request) -> bool:
        """Submit a request to its member; return False if the member fails or is absent."""
        device = self._devices[request.member]
        while not isinstance(queue := self._queues[request.member], DeviceError):
            request.bounce = None
            if request.copies and current_deadline() is not None and not device.drops_reads:
                request.bounce = aligned_buffer(request.memory.nbytes, device.block_bytes)
            memory = request.memory if request.bounce is None else request.bounce
            self._tag += 1
            tag = self._tag
            try:
                if queue.submit(Kind.READ, memory, request.offset_bytes, tag):
                    self._in_flight[tag] = request
                    return True
            except DeviceError as error:
                request.error = error
                return False
            self._collect(request.member)
            dropped = self._queues[request.member]
            request.error = dropped if isinstance(dropped, DeviceError) else request.error
        return False

    def _halve(self, request: _Request) -> None:
        """Split a failed request into halves, so that a bad block costs no other block."""
        block_bytes = request.space.geometry.block_bytes
        middle = -(-request.memory.nbytes // (2 * block_bytes)) * block_bytes
        for start, memory in ((0, request.memory[:middle]), (middle, request.memory[middle:])):
            address = request.address + start
            copies = self._choice.order(request.space, address)
            request.target.halves.append(
                _Request(request.target, request.space, address, memory, copies)
            )

    def _collect(self, member: int) -> None:
        """Process the completions of a member; wait for the first one."""
        queue = self._queues[member]
        assert not isinstance(queue, DeviceError)
        try:
            completions = self._wait(member, queue)
        except DeviceError as error:
            self._drop_queue(member, queue, error)
            return
        for tag, result in completions:
            request = self._in_flight.pop(tag)
            if result >= 0:
                credit_call(request.memory.nbytes)
                if request.bounce is not None:
                    request.memory[:] = request.bounce
            else:
                problem = _problem(self._devices[member], request, result)
                gone = isinstance(
                    problem, DeviceLostError | DeviceTimeoutError | AuthenticationError
                )
                request.unreadable |= not gone
                request.error = problem
                self._send(request)

    def _has_other_copies(self, member: int) -> bool:
        """Return True if all that a member is asked for may be read from others."""
        absent = {n for n, queue in enumerate(self._queues) if isinstance(queue, DeviceError)}
        return all(
            any(r.space.resolve(r.address, copy)[0] not in absent for copy in r.copies)
            for r in self._in_flight.values()
            if r.member == member
        )

    def _wait(self, member: int, queue: QueuePair) -> list[tuple[int, int]]:
        """Wait for completions of a member: for what is left of the call, or only a part of it.

        A part is enough if other members have the same.

        Raises:
            DeviceTimeoutError: the member does not answer.
            DeviceError: the queue pair failed.
        """
        device = self._devices[member]
        deadline = current_deadline()
        if deadline is None:
            return queue.poll(-1)
        part = OTHER_COPIES_PART if self._has_other_copies(member) else 1.0
        limit_s = deadline.share_s(part)
        until_s = time.monotonic() + limit_s
        while True:
            left_ms = math.ceil((until_s - time.monotonic()) * 1000)
            completions = queue.poll(max(0, min(left_ms, WAIT_SLICE_MS)))
            if completions:
                return completions
            check_answers(device.uri, f"read {device.uri}")
            if left_ms <= 0:
                note_unanswered(device, waited_s=limit_s)
                raise timeout_error(f"read {device.uri}", limit_s)

    def _drop_queue(self, member: int, queue: QueuePair, error: DeviceError) -> None:
        """Close a failed queue pair and send its requests to other copies."""
        self._queues[member] = error
        leave(self._devices[member], queue)
        lost = [tag for tag, request in self._in_flight.items() if request.member == member]
        for tag in lost:
            request = self._in_flight.pop(tag)
            request.error = error
            self._send(request)


def _problem(device: BlockDevice, request: _Request, result: int) -> DlfsError:
    """Return the error of a request that failed; note the device if it did not answer."""
    length_bytes = request.memory.nbytes
    problem = operation_error(device.uri, Kind.READ, request.offset_bytes, length_bytes, result)
    if not isinstance(problem, DeviceTimeoutError):
        return problem
    note_unanswered(device)
    return timeout_error(
        f"read {device.uri} at byte {request.offset_bytes}, {length_bytes} bytes",
        device.operation_timeout_ms / 1000,
    )


def read_into(
    devices: Sequence[BlockDevice],
    space: DataSpace,
    address: int,
    memory: NDArray[np.uint8],
    choice: CopyOrder = FIRST_COPY_FIRST,
) -> None:
    """Read a range of a space into memory.

    Args:
        devices: devices of the members, in order.
        space: space that contains the range.
        address: start of the range, a multiple of the volume's block size.
        memory: ``uint8[n_bytes]``, whole aligned blocks; all of it is filled.
        choice: order in which copies are read.

    Raises:
        DeviceError: a read failed in all copies.
        UsageError: the range leaves the space.
    """
    read_ranges(devices, space, [(address, memory)], choice)


def read_ranges(
    devices: Sequence[BlockDevice],
    space: DataSpace,
    ranges: Sequence[tuple[int, NDArray[np.uint8]]],
    choice: CopyOrder = FIRST_COPY_FIRST,
) -> None:
    """Read several ranges of a space, as many at a time as the queues take.

    Args:
        devices: devices of the members, in order.
        space: space that contains the ranges.
        ranges: address and memory of each; see ``read_into``.
        choice: order in which copies are read.

    Raises:
        DeviceError, UsageError: as ``read_into``.
    """
    with (
        limit_call(),
        _Fetcher(devices, choice) as fetcher,
    ):
        targets = [fetcher.start(space, address, memory) for address, memory in ranges]
        for target in targets:
            fetcher.finish(target)
    for failure in [failure for target in targets for failure in target.failures]:
        raise failure.error


def read_blocks(
    devices: Sequence[BlockDevice],
    space: DataSpace,
    address: int,
    length_bytes: int,
    choice: CopyOrder = FIRST_COPY_FIRST,
) -> NDArray[np.uint8]:
    """Read a range of any length, in whole blocks, into new memory; see ``read_into``."""
    block = space.geometry.block_bytes
    memory = aligned_buffer(-(-length_bytes // block) * block, max(block, 4096))
    read_into(devices, space, address, memory, choice)
    return memory[:length_bytes]


def scan_space(
    devices: Sequence[BlockDevice],
    space: DataSpace,
    choice: CopyOrder = FIRST_COPY_FIRST,
    *,
    start: int = 0,
) -> Generator[Window, None, None]:
    """Read a space to its end in order, in windows of whole chunks, ahead of the caller.

    Args:
        devices: devices of the members, in order.
        space: space to read.
        choice: order in which copies are read.
        start: address of the first chunk to read.
    """
    window_bytes = max(WINDOW_BYTES, space.geometry.chunk_bytes)
    addresses = range(start, space.size_bytes, window_bytes)
    buffers = [
        aligned_buffer(window_bytes, max(4096, space.geometry.block_bytes))
        for _ in range(min(WINDOWS, len(addresses)))
    ]
    with _Fetcher(devices, choice) as fetcher:
        ahead: deque[tuple[int, _Range]] = deque()
        for number, address in enumerate(addresses):
            if len(ahead) == len(buffers):
                yield _finished(fetcher, *ahead.popleft())
            memory = buffers[number % len(buffers)]
            memory = memory[: min(window_bytes, space.size_bytes - address)]
            ahead.append((address, fetcher.start(space, address, memory)))
        while ahead:
            yield _finished(fetcher, *ahead.popleft())


def _finished(fetcher: _Fetcher, address: int, target: _Range) -> Window:
    with limit_call():
        fetcher.finish(target)
    return Window(address, target.memory, tuple(target.failures))
