"""Writes a run of chunks, one after the other, to the members of a volume at full queue depth.

A window is aligned memory for a few chunks. The caller fills the current window and calls
``advance``. The chunks of the window then get locations on the volume and are written while the
caller fills the next window. The number of windows is fixed, which bounds the memory. If all are in
flight, ``advance`` waits for the oldest. With replicas, every copy of a chunk is written from the
same memory. Data is durable only after the caller flushes the devices.

Threads: one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlfs.base.closing import Closing
from dlfs.base.units import MIB
from dlfs.block import BlockDevice, Kind, QueuePair, aligned_buffer, operation_error
from dlfs.format.geometry import ChunkRun, Geometry
from dlfs.store.space import append_run, count_chunks

WINDOW_BYTES = 1 * MIB
"""Size of a window in bytes, unless a chunk is larger. Writes of this size reach the bandwidth of
an NVMe device."""

BUFFER_BYTES = 32 * MIB
"""Size of all windows together, in bytes, unless three windows are larger."""

WINDOWS_MIN = 3


Window = NDArray[np.uint8]


class _Write(NamedTuple):
    """A write in flight."""

    window: Window
    member: int
    offset_bytes: int
    length_bytes: int


class ChunkWriter(Closing):
    """A sequential writer of whole chunks.

    Args:
        devices: devices of the members, in order, writable.
        geometry: geometry of the volume.
        take: allocates at most that many chunks in one run; called for each window.
        runs: chunks that are written already, before the first window, in data order.
        copies: numbers of the copies to write; all by default.

    Attributes:
        take: the allocator; another one serves the windows from then on.
        runs: these runs and those that were allocated, in data order.
        chunk_count: chunks of these runs.

    Threads: one at a time.
    """

    def __init__(
        self,
        devices: Sequence[BlockDevice],
        geometry: Geometry,
        take: Callable[[int], ChunkRun],
        runs: Sequence[ChunkRun] = (),
        copies: Sequence[int] = (),
    ) -> None:
        self._devices = devices
        self._geometry = geometry
        self._copies = copies or range(geometry.replicas)
        self.take = take
        self.runs: list[ChunkRun] = list(runs)
        self.chunk_count = count_chunks(runs)
        window_bytes = max(geometry.chunk_bytes, WINDOW_BYTES)
        count = max(WINDOWS_MIN, BUFFER_BYTES // window_bytes)
        memory = aligned_buffer(window_bytes * count, max(4096, geometry.block_bytes))
        self._windows = deque(
            memory[i * window_bytes : (i + 1) * window_bytes] for i in range(count)
        )
        self._in_flight: deque[Window] = deque()
        pieces = count * (window_bytes // geometry.chunk_bytes) * geometry.replicas
        self._queues: list[QueuePair] = []
        self._writes: dict[int, _Write] = {}  # in flight, by tag
        self._tag = 0
        for device in devices:
            self._queues.append(device.queue_pair(min(max(pieces // len(devices), 1), 128)))

    @property
    def window(self) -> Window:
        """Current window, ``uint8[n_bytes]``; the caller fills it from its start."""
        return self._windows[0]

    @property
    def address(self) -> int:
        """Offset of the current window in the written data, in bytes."""
        return self.chunk_count * self._geometry.chunk_bytes

    def advance(self, used_bytes: int) -> None:
        """Start writing the chunks of the current window, and make the next window the current one.

        Args:
            used_bytes: bytes of the window that hold data; the rest of their last chunk becomes
                zeros.

        Raises:
            SpaceError: the volume has too few free chunks.
            DeviceError: an earlier write failed.
        """
        window = self._windows.popleft()
        chunk_bytes = self._geometry.chunk_bytes
        count = -(-used_bytes // chunk_bytes)
        window[used_bytes : count * chunk_bytes] = 0
        self._in_flight.append(window)
        done = 0
        while done < count:
            run = self.take(count - done)
            self._write_run(window, done * chunk_bytes, run)
            append_run(self.runs, run)
            done += run.chunk_count
        self.chunk_count += count
        if not self._windows:
            self._reap_oldest()

    def write_parts(self, parts: Sequence[NDArray[np.uint8]]) -> None:
        """Write arrays one after the other; the rest of the last chunk becomes zeros.

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
        """Wait until all writes have completed. The data is not yet durable.

        Raises:
            DeviceError: a write failed.
        """
        while self._in_flight:
            self._reap_oldest()

    def close(self) -> None:
        """Wait for the writes in flight, ignore their results, and close the queue pairs."""
        for queue in self._queues:
            queue.close()
        self._queues.clear()

    def _write_run(self, window: Window, start: int, run: ChunkRun) -> None:
        """Write all copies of a run: by one request on a single member, else chunk by chunk."""
        step = run.chunk_count if len(self._devices) == 1 else 1
        bytes_each = step * self._geometry.chunk_bytes
        for i in range(run.chunk_count // step):
            piece = window[start + i * bytes_each : start + (i + 1) * bytes_each]
            for copy in self._copies:
                chunk = run.first_chunk + i * step
                member, offset_bytes = self._geometry.locate(chunk, copy)
                self._submit(window, member, piece, offset_bytes)

    def _submit(
        self, window: Window, member: int, piece: NDArray[np.uint8], offset_bytes: int
    ) -> None:
        self._tag += 1
        self._writes[self._tag] = _Write(window, member, offset_bytes, piece.nbytes)
        while not self._queues[member].submit(Kind.WRITE, piece, offset_bytes, self._tag):
            self._collect(member)

    def _collect(self, member: int) -> None:
        """Wait for at least one completion of a member."""
        for tag, result in self._queues[member].poll(-1):
            _, _, offset_bytes, length_bytes = self._writes.pop(tag)
            if result < 0:
                uri = self._devices[member].uri
                raise operation_error(uri, Kind.WRITE, offset_bytes, length_bytes, result)

    def _reap_oldest(self) -> None:
        window = self._in_flight[0]
        while write := next((w for w in self._writes.values() if w.window is window), None):
            self._collect(write.member)
        self._windows.append(self._in_flight.popleft())
