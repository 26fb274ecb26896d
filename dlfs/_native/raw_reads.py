"""Reads a device as fast as it can, to measure it: many submissions and completions a call.

``NativeQueue`` crosses from Python to C once for each request, which a fast device would wait for.
Here one call submits all requests that have room, and one collects all completions.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dlfs._native import abi
from dlfs._native.device import NativeDevice, NativeQueue, aligned_buffer, operation_error
from dlfs._native.library import check, library
from dlfs.base.threads import start_thread
from dlfs.errors import DeviceTimeoutError

SILENT_SECONDS = 5.0
"""Time without any completion after which a device counts as silent, in seconds."""

_OPERATION = np.dtype(
    [("buffer", "<u8"), ("offset", "<u8"), ("length", "<u4"), ("kind", "<u4"), ("tag", "<u8")]
)
_COMPLETION = np.dtype([("tag", "<u8"), ("result", "<i8")])
_POLL_MS = 100  # a signal handler (Ctrl-C) runs between two waits

Offsets = Callable[[int], npt.NDArray[np.int64]]
"""Returns the offsets of the next reads, as many as it is asked for."""


@dataclass(frozen=True, slots=True)
class RawReads:
    """Reads that a device has done.

    Attributes:
        count: number of reads.
        read_bytes: bytes read.
        seconds: time that they took.
    """

    count: int
    read_bytes: int
    seconds: float


def read_raw(
    device: NativeDevice,
    offsets: Offsets,
    *,
    request_bytes: int,
    depth: int,
    seconds: float,
    stop: threading.Event,
) -> RawReads:
    """Read from a device for some time, with a number of requests always in flight.

    Args:
        device: the device.
        offsets: gives the offsets of the reads, multiples of the device's blocks.
        request_bytes: bytes of a read, a multiple of the device's blocks.
        depth: reads in flight, 1..4096.
        seconds: time to read; the reads in flight then are waited for and counted.
        stop: ends the reads when it is set.

    Raises:
        DeviceTimeoutError: nothing was read for ``SILENT_SECONDS``; a thread waits for the reads.
        DeviceError: a read failed.
        UsageError: the depth is out of range.
    """
    buffer = aligned_buffer(depth * request_bytes, max(device.block_bytes, 4096))
    queue = device.queue(depth, writable=False)
    try:
        queue.register(buffer)  # and keeps it until all reads have ended
        found = _Loop(queue, buffer, request_bytes, depth).run(offsets, seconds, stop)
    except DeviceTimeoutError:
        start_thread(threading.Thread(target=queue.close, name="dlfs-abandoned", daemon=True))
        raise
    except BaseException:
        queue.close()
        raise
    queue.close()
    return found


class _Loop:
    """Requests in flight, each with a piece of the buffer."""

    def __init__(
        self, queue: NativeQueue, buffer: npt.NDArray[np.uint8], request_bytes: int, depth: int
    ) -> None:
        self._queue = queue
        self._request_bytes = request_bytes
        self._operations = (abi.Operation * depth)()
        self._completions = (abi.Completion * depth)()
        self._rows = np.frombuffer(memoryview(self._operations), _OPERATION)
        self._results = np.frombuffer(memoryview(self._completions), _COMPLETION)
        self._rows["length"] = request_bytes
        self._rows["kind"] = abi.OP_READ
        self._start = buffer.ctypes.data
        self._free = np.arange(depth, dtype=np.uint64)
        self._places = np.zeros(depth, np.int64)

    def run(self, offsets: Offsets, seconds: float, stop: threading.Event) -> RawReads:
        """Read until the time is over, and collect all reads."""
        depth = len(self._free)
        began = heard = now = time.monotonic()
        count = 0
        while True:
            if now < began + seconds and not stop.is_set():
                self._submit(offsets)
            elif len(self._free) == depth:
                break
            got = self._collect()
            count += got
            now = time.monotonic()
            heard = now if got else heard
            if now - heard > SILENT_SECONDS:
                raise DeviceTimeoutError(
                    f"read {self._queue.device.uri}: no completion for {SILENT_SECONDS:g} s"
                )
        return RawReads(count, count * self._request_bytes, max(now - began, 1e-9))

    def _submit(self, offsets: Offsets) -> None:
        """Submit a read for each free piece of the buffer."""
        free = self._free
        rows = self._rows[: len(free)]
        rows["tag"] = free
        rows["buffer"] = self._start + free * np.uint64(self._request_bytes)
        places = offsets(len(free))
        rows["offset"] = places
        self._places[free.astype(np.int64)] = places
        taken = library().dlfs_queue_submit(self._queue.handle, self._operations, len(free))
        if taken < 0:
            raise operation_error(
                self._queue.device.uri, abi.OP_READ, int(places[0]), self._request_bytes, taken
            )
        self._free = free[taken:].copy()

    def _collect(self) -> int:
        """Wait a while for completions; return their number."""
        room = len(self._completions)
        got = library().dlfs_queue_poll(self._queue.handle, self._completions, room, _POLL_MS)
        check(got, f"poll {self._queue.device.uri}")
        done = self._results[:got]
        wrong = np.flatnonzero(done["result"] != self._request_bytes)
        if wrong.size:
            tag, result = (int(each) for each in done[int(wrong[0])])
            place = int(self._places[tag])
            raise operation_error(
                self._queue.device.uri, abi.OP_READ, place, self._request_bytes, result
            )
        self._free = np.concatenate([self._free, done["tag"]])
        return int(got)
