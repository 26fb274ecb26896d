"""Reads ranges of a data space from the members of a volume at full queue depth.

``read_into`` brings one range into memory whole: catalogs, directories. ``scan_space`` passes a
whole space by in order, window after window, reading ahead: verification and repair. Both report a
failed read by the device and the byte where it failed. One thread each; memory is bounded by the
windows.

A read that fails is tried again in halves, down to a block, so that a bad block costs no other one.
With replicas, what one copy does not give is read from the next. Whether the bytes are right only
the caller can tell; when they are not, it reads again by the next of the ``alternatives``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from dlfs.block import BlockDevice, Kind, QueuePair, aligned_buffer, operation_error
from dlfs.errors import DeviceError, DeviceLostError, DeviceTimeoutError, DlfsError
from dlfs.format.geometry import DataSpace, Geometry
from dlfs.units import MIB

PIECE_BYTES = 1 * MIB
"""No read is larger."""

DEPTH = 32
"""Reads in flight on one member."""

WINDOW_BYTES = 4 * MIB
"""A window of a scan holds this much, or one chunk."""

WINDOWS = 3
"""Windows of a scan: one under hand, the others being read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Which copies to ask first.

    Attributes:
        copy: the first to ask; then those behind it, and round again.
        avoid: a member to read from only what no other has.
        only: ask for that copy and no other.
    """

    copy: int = 0
    avoid: int | None = None
    only: bool = False

    def order(self, space: DataSpace, address: int) -> list[int]:
        """The copies of an address to ask for, in order."""
        count = space.geometry.replicas
        if self.only:
            return [self.copy]
        copies = [(self.copy + i) % count for i in range(count)]
        return sorted(copies, key=lambda copy: space.resolve(address, copy)[0] == self.avoid)


NATURAL = Choice()


def alternatives(geometry: Geometry) -> list[Choice]:
    """Ways to read a range, each the next to try when what came by the ones before was wrong."""
    if geometry.replicas == 1:
        return [NATURAL]
    by_copy = [Choice(copy=copy) for copy in range(geometry.replicas)]
    return by_copy + [Choice(avoid=member) for member in range(geometry.member_count)]


@dataclass(frozen=True, slots=True)
class FailedRead:
    """A piece of a space that could not be read."""

    address: int
    length_bytes: int
    error: DlfsError
    absent: bool = False
    """Its member is not there at all."""
    member: int = 0
    """Whose copy was asked for last."""


@dataclass(eq=False)
class _Range:
    """A range on its way into memory."""

    memory: NDArray[np.uint8]
    pending: list[int]
    failures: list[FailedRead] = field(default_factory=list)
    halves: list[_Piece] = field(default_factory=list)
    """Of pieces that could not be read, to be asked for in turn."""


@dataclass(eq=False)
class _Piece:
    """A part of a range that lies in a row on one member, in each of its copies."""

    wanted: _Range
    space: DataSpace
    address: int
    memory: NDArray[np.uint8]
    copies: list[int]
    """Still to be asked for, in order."""
    member: int = 0
    offset_bytes: int = 0
    unreadable: bool = False
    """A member that answers could not give it."""


@dataclass(frozen=True, slots=True)
class Window:
    """A range of a data space in memory, until the next one is asked for."""

    address: int
    memory: NDArray[np.uint8]
    failures: tuple[FailedRead, ...]
    """What they should have brought is undefined."""


class _Fetcher:
    """Queue pairs of all members, and what is in flight on them."""

    def __init__(self, devices: Sequence[BlockDevice], choice: Choice) -> None:
        self._devices = devices
        self._choice = choice
        self._queues: list[QueuePair | None] = []
        self._absences: dict[int, DeviceError] = {}
        self._in_flight: dict[int, _Piece] = {}
        self._tag = 0
        for member, device in enumerate(devices):
            try:
                self._queues.append(device.queue_pair(DEPTH))
            except DeviceError as error:
                self._queues.append(None)
                self._absences[member] = error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for queue in self._queues:
            if queue is not None:
                queue.close()

    def start(self, space: DataSpace, address: int, memory: NDArray[np.uint8]) -> _Range:
        """Start reading as much as the memory holds from an address on."""
        wanted = _Range(memory, [0] * len(self._devices))
        at = 0
        for piece in space.member_ranges(address, memory.nbytes):
            for start in range(0, piece.length_bytes, PIECE_BYTES):
                length = min(PIECE_BYTES, piece.length_bytes - start)
                part = memory[at : at + length]
                copies = self._choice.order(space, address + at)
                self._ask(_Piece(wanted, space, address + at, part, copies))
                at += length
        return wanted

    def finish(self, wanted: _Range) -> None:
        """Wait until a range has come, or failed."""
        while any(wanted.pending) or wanted.halves:
            while wanted.halves:
                self._ask(wanted.halves.pop())
            for member, _ in enumerate(wanted.pending):
                while wanted.pending[member]:
                    self._collect(member)

    def _ask(self, piece: _Piece, error: DlfsError | None = None) -> None:
        """Ask for the next copy of a piece; without any left it has failed, for this reason."""
        absence: DeviceError | None = None
        while piece.copies:
            copy = piece.copies.pop(0)
            piece.member, piece.offset_bytes = piece.space.resolve(piece.address, copy)
            absence = self._absences.get(piece.member)
            if absence is None:
                self._submit(piece)
                return
        if piece.unreadable and piece.memory.nbytes > piece.space.geometry.block_bytes:
            self._halve(piece)
            return
        problem = error or absence
        assert problem is not None
        piece.wanted.failures.append(
            FailedRead(
                piece.address,
                piece.memory.nbytes,
                problem,
                absent=error is None,
                member=piece.member,
            )
        )

    def _halve(self, piece: _Piece) -> None:
        """Have both halves of a piece asked for, so that a bad block costs no other one."""
        block_bytes = piece.space.geometry.block_bytes
        middle = -(-piece.memory.nbytes // (2 * block_bytes)) * block_bytes
        for start, memory in ((0, piece.memory[:middle]), (middle, piece.memory[middle:])):
            address = piece.address + start
            copies = self._choice.order(piece.space, address)
            piece.wanted.halves.append(_Piece(piece.wanted, piece.space, address, memory, copies))

    def _submit(self, piece: _Piece) -> None:
        self._tag += 1
        tag = self._tag
        member = piece.member
        while True:
            queue = self._queues[member]
            if queue is None:
                self._ask(piece, self._absences[member])
                return
            try:
                if queue.submit(Kind.READ, piece.memory, piece.offset_bytes, tag):
                    break
            except DeviceError as error:
                self._ask(piece, error)
                return
            self._collect(member)
        self._in_flight[tag] = piece
        piece.wanted.pending[member] += 1

    def _collect(self, member: int) -> None:
        """Take what a member has to say, waiting for a first answer."""
        queue = self._queues[member]
        assert queue is not None
        try:
            answers = queue.poll(-1)
        except DeviceError as error:
            self._lose(member, queue, error)
            return
        for tag, result in answers:
            piece = self._in_flight.pop(tag)
            piece.wanted.pending[member] -= 1
            if result < 0:
                uri = self._devices[member].uri
                length_bytes = piece.memory.nbytes
                problem = operation_error(uri, Kind.READ, piece.offset_bytes, length_bytes, result)
                gone = isinstance(problem, DeviceLostError | DeviceTimeoutError)
                piece.unreadable |= not gone
                self._ask(piece, problem)

    def _lose(self, member: int, queue: QueuePair, error: DeviceError) -> None:
        """A queue pair failed as a whole: what was asked of it is asked of others."""
        self._queues[member] = None
        self._absences[member] = error
        queue.close()  # then no device writes to the memory any more
        lost = [tag for tag, piece in self._in_flight.items() if piece.member == member]
        for tag in lost:
            piece = self._in_flight.pop(tag)
            piece.wanted.pending[member] -= 1
            self._ask(piece, error)


def read_into(
    devices: Sequence[BlockDevice],
    space: DataSpace,
    address: int,
    memory: NDArray[np.uint8],
    choice: Choice = NATURAL,
) -> None:
    """Read a range of a space into memory.

    Args:
        devices: the members, in order.
        space: where the bytes lie.
        address: a multiple of the volume's block size.
        memory: uint8[n_bytes], whole blocks, aligned to them; all of it is filled.
        choice: which copies to ask first.

    Raises:
        DeviceError: a read failed, in all copies.
        UsageError: the range leaves the space.
    """
    with _Fetcher(devices, choice) as fetcher:
        wanted = fetcher.start(space, address, memory)
        fetcher.finish(wanted)
    if wanted.failures:
        raise wanted.failures[0].error


def read_blocks(
    devices: Sequence[BlockDevice],
    space: DataSpace,
    address: int,
    length_bytes: int,
    choice: Choice = NATURAL,
) -> NDArray[np.uint8]:
    """Read a range of a space: ``read_into`` into new memory, the range of any length.

    Args:
        devices: the members, in order.
        space: where the bytes lie.
        address: a multiple of the volume's block size.
        length_bytes: of what is returned; whole blocks are read.
        choice: which copies to ask first.

    Raises:
        DeviceError: a read failed, in all copies.
        UsageError: the range leaves the space.
    """
    block = space.geometry.block_bytes
    memory = aligned_buffer(-(-length_bytes // block) * block, max(block, 4096))
    read_into(devices, space, address, memory, choice)
    return memory[:length_bytes]


def scan_space(
    devices: Sequence[BlockDevice],
    space: DataSpace,
    choice: Choice = NATURAL,
) -> Generator[Window, None, None]:
    """Pass a whole space by, in order, in windows of whole chunks, reading ahead.

    Args:
        devices: the members, in order.
        space: to read.
        choice: which copies to ask first.
    """
    window_bytes = max(WINDOW_BYTES, space.geometry.chunk_bytes)
    addresses = range(0, space.size_bytes, window_bytes)
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


def _finished(fetcher: _Fetcher, address: int, wanted: _Range) -> Window:
    fetcher.finish(wanted)
    return Window(address, wanted.memory, tuple(wanted.failures))
