"""Writes a run of chunks, one after the other, to the members of a volume at full queue depth.

With replicas, every copy of a chunk is written from the same memory.

A window is a few chunks of aligned memory. The caller fills the window under hand and calls
``advance``; its chunks are then given places on the volume and written while the next window is
filled. There is a fixed number of windows, so memory is bounded, and the oldest is waited for when
all are in flight. Nothing is durable before the caller flushes the devices. One thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from dlfs.block import BlockDevice, Kind, QueuePair, aligned_buffer, operation_error
from dlfs.format.geometry import ChunkRun, Geometry
from dlfs.store.space import append_run
from dlfs.units import MIB

WINDOW_BYTES = 1 * MIB
"""A window holds this much, or one chunk: writes this large reach an NVMe device's bandwidth."""

BUFFER_BYTES = 32 * MIB
"""All windows together hold this much, or three windows."""

WINDOWS_MIN = 3


@dataclass(eq=False)
class _Window:
    memory: NDArray[np.uint8]
    pending: list[int] = field(default_factory=list)
    """Writes in flight, by member."""


class ChunkWriter:
    """A sequential writer of whole chunks.

    Args:
        devices: the members, in order, writable.
        geometry: the volume's.
        take: gives at most so many chunks of the volume, in one run; the writer asks as it goes.

    Threads: one at a time.
    """

    def __init__(
        self,
        devices: Sequence[BlockDevice],
        geometry: Geometry,
        take: Callable[[int], ChunkRun],
    ) -> None:
        self._devices = devices
        self._geometry = geometry
        self._take = take
        self.runs: list[ChunkRun] = []
        self.chunk_count = 0
        window_bytes = max(geometry.chunk_bytes, WINDOW_BYTES)
        count = max(WINDOWS_MIN, BUFFER_BYTES // window_bytes)
        memory = aligned_buffer(window_bytes * count, max(4096, geometry.block_bytes))
        self._windows = deque(
            _Window(memory[i * window_bytes : (i + 1) * window_bytes], [0] * len(devices))
            for i in range(count)
        )
        self._in_flight: deque[_Window] = deque()
        pieces = count * (window_bytes // geometry.chunk_bytes) * geometry.replicas
        self._queues: list[QueuePair] = []
        self._written: dict[int, tuple[_Window, int, int]] = {}
        self._tag = 0
        for device in devices:
            self._queues.append(device.queue_pair(min(max(pieces // len(devices), 1), 128)))

    @property
    def window(self) -> NDArray[np.uint8]:
        """The window under hand, uint8[n_bytes]; the caller fills it from its start."""
        return self._windows[0].memory

    @property
    def address(self) -> int:
        """Where the window under hand stands in the space of what is written, in bytes."""
        return self.chunk_count * self._geometry.chunk_bytes

    def advance(self, used_bytes: int) -> None:
        """Start writing the window's first chunks, and take up the next window.

        Args:
            used_bytes: how much of the window holds data; zeroes follow up to the chunk's end.

        Raises:
            SpaceError: the volume has too few free chunks.
            DeviceError: an earlier write failed.
        """
        window = self._windows.popleft()
        chunk_bytes = self._geometry.chunk_bytes
        count = -(-used_bytes // chunk_bytes)
        window.memory[used_bytes : count * chunk_bytes] = 0
        self._in_flight.append(window)
        done = 0
        while done < count:
            run = self._take(count - done)
            self._write_run(window, done * chunk_bytes, run)
            append_run(self.runs, run)
            done += run.chunk_count
        self.chunk_count += count
        if not self._windows:
            self._reap_oldest()

    def write_parts(self, parts: Sequence[NDArray[np.uint8]]) -> None:
        """Write bytes, one part behind the other, zeroes behind them up to the last chunk's end.

        Raises:
            SpaceError: the volume has too few free chunks.
            DeviceError: a write failed.
        """
        used = 0
        for part in parts:
            start = 0
            while start < part.size:
                length = min(part.size - start, self.window.size - used)
                self.window[used : used + length] = part[start : start + length]
                start += length
                used += length
                if used == self.window.size:
                    self.advance(used)
                    used = 0
        if used:
            self.advance(used)

    def drain(self) -> None:
        """Wait until everything is written (not yet durable).

        Raises:
            DeviceError: a write failed.
        """
        while self._in_flight:
            self._reap_oldest()

    def close(self) -> None:
        """Wait for what is in flight, whatever becomes of it, and give back the queue pairs."""
        for queue in self._queues:
            queue.close()
        self._queues.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _write_run(self, window: _Window, start: int, run: ChunkRun) -> None:
        """Write all copies of a run: in one piece on a lone member, else chunk by chunk."""
        step = run.chunk_count if len(self._devices) == 1 else 1
        bytes_each = step * self._geometry.chunk_bytes
        for i in range(run.chunk_count // step):
            piece = window.memory[start + i * bytes_each : start + (i + 1) * bytes_each]
            for copy in range(self._geometry.replicas):
                chunk = run.first_chunk + i * step
                member, offset_bytes = self._geometry.locate(chunk, copy)
                self._submit(window, member, piece, offset_bytes)

    def _submit(
        self, window: _Window, member: int, piece: NDArray[np.uint8], offset_bytes: int
    ) -> None:
        self._tag += 1
        self._written[self._tag] = (window, offset_bytes, piece.nbytes)
        window.pending[member] += 1
        while not self._queues[member].submit(Kind.WRITE, piece, offset_bytes, self._tag):
            self._collect(member)

    def _collect(self, member: int) -> None:
        """Wait for at least one completion of a member."""
        for tag, result in self._queues[member].poll(-1):
            window, offset_bytes, length_bytes = self._written.pop(tag)
            window.pending[member] -= 1
            if result < 0:
                uri = self._devices[member].uri
                raise operation_error(uri, Kind.WRITE, offset_bytes, length_bytes, result)

    def _reap_oldest(self) -> None:
        window = self._in_flight[0]
        for member, _ in enumerate(window.pending):
            while window.pending[member]:
                self._collect(member)
        self._windows.append(self._in_flight.popleft())
