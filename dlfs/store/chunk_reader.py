"""Reads ranges of a data space from the members of a volume at full queue depth.

``read_into`` brings one range into memory whole: catalogs, directories. ``scan_space`` passes a
whole space by in order, window after window, reading ahead: verification. Both report a failed read
by the device and the byte where it failed. One thread each; memory is bounded by the windows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from dlfs.block import BlockDevice, Kind, QueuePair, aligned_buffer, operation_error
from dlfs.errors import DlfsError
from dlfs.format.geometry import DataSpace
from dlfs.units import MIB

PIECE_BYTES = 1 * MIB
"""No read is larger."""

DEPTH = 32
"""Reads in flight on one member."""

WINDOW_BYTES = 4 * MIB
"""A window of a scan holds this much, or one chunk."""

WINDOWS = 3
"""Windows of a scan: one under hand, the others being read."""


@dataclass(frozen=True, slots=True)
class FailedRead:
    """A piece of a space that could not be read."""

    address: int
    length_bytes: int
    error: DlfsError


@dataclass(eq=False)
class _Range:
    """A range on its way into memory."""

    memory: NDArray[np.uint8]
    pending: list[int]
    failures: list[FailedRead] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Window:
    """A range of a data space in memory, until the next one is asked for."""

    address: int
    memory: NDArray[np.uint8]
    failures: tuple[FailedRead, ...]
    """What they should have brought is undefined."""


class _Fetcher:
    """Queue pairs of all members, and what is in flight on them."""

    def __init__(self, devices: Sequence[BlockDevice]) -> None:
        self._devices = devices
        self._queues: list[QueuePair] = []
        self._in_flight: dict[int, tuple[_Range, int, int, int]] = {}
        self._tag = 0
        for device in devices:
            self._queues.append(device.queue_pair(DEPTH))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for queue in self._queues:
            queue.close()

    def start(self, space: DataSpace, address: int, memory: NDArray[np.uint8]) -> _Range:
        """Start reading as much as the memory holds from an address on."""
        wanted = _Range(memory, [0] * len(self._devices))
        at = 0
        for piece in space.pieces(address, memory.nbytes):
            for start in range(0, piece.length_bytes, PIECE_BYTES):
                length = min(PIECE_BYTES, piece.length_bytes - start)
                part = memory[at : at + length]
                self._submit(wanted, piece.member, part, piece.offset_bytes + start, address + at)
                at += length
        return wanted

    def finish(self, wanted: _Range) -> None:
        """Wait until a range has come, or failed."""
        for member, _ in enumerate(wanted.pending):
            while wanted.pending[member]:
                self._collect(member)

    def _submit(
        self,
        wanted: _Range,
        member: int,
        part: NDArray[np.uint8],
        offset_bytes: int,
        address: int,
    ) -> None:
        self._tag += 1
        self._in_flight[self._tag] = (wanted, offset_bytes, part.nbytes, address)
        wanted.pending[member] += 1
        while not self._queues[member].submit(Kind.READ, part, offset_bytes, self._tag):
            self._collect(member)

    def _collect(self, member: int) -> None:
        for tag, result in self._queues[member].poll(-1):
            wanted, offset_bytes, length_bytes, address = self._in_flight.pop(tag)
            wanted.pending[member] -= 1
            if result < 0:
                uri = self._devices[member].uri
                error = operation_error(uri, Kind.READ, offset_bytes, length_bytes, result)
                wanted.failures.append(FailedRead(address, length_bytes, error))


def read_into(
    devices: Sequence[BlockDevice],
    space: DataSpace,
    address: int,
    memory: NDArray[np.uint8],
) -> None:
    """Read a range of a space into memory.

    Args:
        devices: the members, in order.
        space: where the bytes lie.
        address: a multiple of the volume's block size.
        memory: uint8[n_bytes], whole blocks, aligned to them; all of it is filled.

    Raises:
        DeviceError: a read failed.
        UsageError: the range leaves the space.
    """
    with _Fetcher(devices) as fetcher:
        wanted = fetcher.start(space, address, memory)
        fetcher.finish(wanted)
    if wanted.failures:
        raise wanted.failures[0].error


def read_blocks(
    devices: Sequence[BlockDevice], space: DataSpace, address: int, length_bytes: int
) -> NDArray[np.uint8]:
    """Read a range of a space: ``read_into`` into new memory, the range of any length.

    Args:
        devices: the members, in order.
        space: where the bytes lie.
        address: a multiple of the volume's block size.
        length_bytes: of what is returned; whole blocks are read.

    Raises:
        DeviceError: a read failed.
        UsageError: the range leaves the space.
    """
    block = space.geometry.block_bytes
    memory = aligned_buffer(-(-length_bytes // block) * block, max(block, 4096))
    read_into(devices, space, address, memory)
    return memory[:length_bytes]


def scan_space(devices: Sequence[BlockDevice], space: DataSpace) -> Iterator[Window]:
    """Pass a whole space by, in order, in windows of whole chunks, reading ahead."""
    window_bytes = max(WINDOW_BYTES, space.geometry.chunk_bytes)
    addresses = range(0, space.size_bytes, window_bytes)
    buffers = [
        aligned_buffer(window_bytes, max(4096, space.geometry.block_bytes))
        for _ in range(min(WINDOWS, len(addresses)))
    ]
    with _Fetcher(devices) as fetcher:
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
