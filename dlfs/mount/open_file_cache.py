r"""Samples that programs have open on the mount: read whole, verified, held while they are read.

A CRC32C covers a whole sample, so a sample is read whole before its first byte goes out. It is held
in memory for as long as a file handle on it is open, within one budget; when that is full the
sample used longest ago gives way and would be read again. A sample larger than the budget is not
held: it is read through once, to verify it, and then part by part as programs ask for it.

Threads: the FUSE loop (one thread, trio) owns everything here. A few threads of our own do the
reading, since a read waits for a device: each takes all requests that are waiting, up to a limit,
and reads them as one batch, so that many programs' single reads become one call. A request is
handed over through a SimpleQueue and its result through plain attributes; the loop is only woken
when a handler waits already: `finished` is set before `awaited` is read on one side, `awaited` is
set before `finished` is read on the other. Large samples have threads of their own, so that small
ones never wait behind them. A small sample that is the only one held is waited for by the loop
itself, for a moment at most: being woken takes it longer than a device takes for most reads, and
with nothing else under way hardly anybody is kept waiting.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Protocol

import trio

from dlfs.arguments import OnError
from dlfs.connection import DatasetSession
from dlfs.errors import DlfsError, LimitError, NativeError
from dlfs.reader import Batch, LargeSample
from dlfs.units import GIB, MIB

SMALL_BYTES_MAX = 1 * MIB
"""Up to here a sample is read when its file is opened, and in one batch with others."""

SAMPLE_BYTES_MAX = 4 * GIB
"""Larger ones cannot be read through the mount: they would be held in memory whole."""

SMALL_THREADS = 2
LARGE_THREADS = 2
BATCH_SAMPLES_MAX = 64

PATIENCE_SECONDS = 0.002
"""How long the loop itself waits for a sample at most."""

_READ_SHARE_STEP = 1 / 8

ReadError = DlfsError | OSError | MemoryError


class SampleSource(Protocol):
    """What samples are read from: a Dataset."""

    def read(self, indices: Sequence[int], *, on_error: OnError = "raise") -> Batch:
        """Read samples as one batch."""

    def __getitem__(self, index: int, /) -> bytes:
        """Read one sample."""

    def get_kept(self, index: int) -> bytes | None:
        """A sample if it is in memory, at once."""

    @property
    def access(self) -> DatasetSession:
        """The open reader of the dataset."""


class Holder(Protocol):
    """What must stay open while a sample of it is: a slot of the mount."""

    def hold(self) -> None:
        """Keep it open."""

    def let_go(self) -> None:
        """Undo a ``hold``."""


def _taken_lock() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


@dataclass(eq=False)
class Fetch:
    """One reading of one sample, under way or done."""

    source: SampleSource
    index: int
    wake: Callable[[Fetch], None]
    """Called on the loop with the fetch when it has finished, if it was awaited.

    It refers to no fetch: in a cycle the bytes would stay until the collector comes along.
    """
    data: bytes = b""
    error: ReadError | None = None
    finished: bool = False
    ended: threading.Lock = field(default_factory=_taken_lock)
    """Let go of by the thread when it has finished."""
    awaited: bool = False
    event: trio.Event | None = None
    """Set when it has finished, if somebody waited."""

    async def wait(self, *, patiently: bool = False) -> None:
        """Wait until it has finished.

        Args:
            patiently: the first who waits may keep the loop waiting for a moment.
        """
        if self.finished:
            return
        if self.event is None:
            if patiently and self.ended.acquire(timeout=PATIENCE_SECONDS):
                return
            self.event = trio.Event()
        self.awaited = True
        if not self.finished:
            await self.event.wait()


@dataclass(eq=False)
class OpenSample:
    """A sample with open file handles."""

    inode: int
    holder: Holder
    source: SampleSource
    index: int
    length_bytes: int
    handle_count: int = 0
    fetch: Fetch | None = None
    was_read: bool = False
    verified: LargeSample | None = None
    """What its parts are read from, once it was verified: it is larger than the budget."""
    turn: trio.Lock = field(default_factory=trio.Lock)
    """One at a time verifies it."""


class ReadThreads:
    """Threads that read samples in batches.

    Args:
        token: of the trio loop that waits for them.
    """

    def __init__(self, token: trio.lowlevel.TrioToken) -> None:
        self._token = token
        self._small: SimpleQueue[Fetch | None] = SimpleQueue()
        self._large: SimpleQueue[Fetch | None] = SimpleQueue()
        lanes = [(self._small, BATCH_SAMPLES_MAX)] * SMALL_THREADS
        lanes += [(self._large, 1)] * LARGE_THREADS
        self._threads = [
            threading.Thread(target=self._serve, args=lane, name=f"dlfs-read-{number}", daemon=True)
            for number, lane in enumerate(lanes)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, fetch: Fetch, length_bytes: int) -> None:
        """Have a sample read."""
        (self._small if length_bytes <= SMALL_BYTES_MAX else self._large).put(fetch)

    def close(self) -> None:
        """End the threads, after what they are reading. Blocks."""
        for _ in self._threads:
            self._small.put(None)
            self._large.put(None)
        for thread in self._threads:
            thread.join()

    def _serve(self, queue: SimpleQueue[Fetch | None], batch_max: int) -> None:
        while self._serve_some(queue, batch_max):
            pass

    def _serve_some(self, queue: SimpleQueue[Fetch | None], batch_max: int) -> bool:
        """Wait for fetches and read them; a thread that waits again refers to none of them.

        Returns:
            False when the thread is to end.
        """
        fetches: list[Fetch] = []
        more = queue.get()
        while more is not None:
            fetches.append(more)
            if len(fetches) == batch_max:
                break
            try:
                more = queue.get_nowait()
            except Empty:
                break
        for source in dict.fromkeys(fetch.source for fetch in fetches):
            self._read(source, [fetch for fetch in fetches if fetch.source is source])
        return more is not None

    def _read(self, source: SampleSource, fetches: list[Fetch]) -> None:
        error: ReadError = NativeError("read samples for the mount: the reading thread failed")
        try:
            read_into(source, fetches)
        except (DlfsError, OSError, MemoryError) as caught:
            error = caught
        finally:
            for fetch in fetches:
                if not fetch.finished:
                    fetch.error = error
                self._finish(fetch)

    def _finish(self, fetch: Fetch) -> None:
        fetch.finished = True
        fetch.ended.release()
        if fetch.awaited:
            try:
                self._token.run_sync_soon(fetch.wake, fetch)
            except trio.RunFinishedError:
                return  # unmounted meanwhile: nobody waits any more


def read_into(source: SampleSource, fetches: list[Fetch]) -> None:
    """Read the samples of some fetches as one batch, each getting its bytes or its own error."""
    if len(fetches) == 1:
        fetches[0].data = source[fetches[0].index]
        fetches[0].finished = True
        return
    with source.read([fetch.index for fetch in fetches], on_error="skip") as batch:
        failed = {failure.position: failure for failure in batch.failures}
        taken = 0
        for position, fetch in enumerate(fetches):
            if position in failed:
                fetch.error = failed[position].error()
            else:
                fetch.data = batch.tobytes(taken)
                taken += 1
            fetch.finished = True


def _kept(sample: OpenSample) -> bytes | None:
    """The bytes of a small sample that is in memory: here sooner than from a thread."""
    if sample.length_bytes > SMALL_BYTES_MAX:
        return None
    try:
        return sample.source.get_kept(sample.index)
    except DlfsError:
        return None  # reading it will tell


class HeldSamples:
    """The samples that are open, and their bytes.

    Args:
        threads: what reads them.
        budget_bytes: held at most, but for one sample of up to ``SMALL_BYTES_MAX``.
    """

    def __init__(self, threads: ReadThreads, *, budget_bytes: int) -> None:
        self._threads = threads
        self._budget_bytes = budget_bytes
        self._held_bytes = 0
        self._samples: dict[int, OpenSample] = {}
        self._fetched: OrderedDict[OpenSample, Fetch] = OrderedDict()  # used longest ago first
        self._part_threads = trio.CapacityLimiter(LARGE_THREADS)
        self._turn = trio.Lock()  # first come, first served, when the budget is full
        self._read_share = 1.0  # of the files opened lately, those whose bytes the kernel asked for

    @property
    def held_bytes(self) -> int:
        """The memory in use, what is being read included."""
        return self._held_bytes

    def open(
        self, inode: int, holder: Holder, source: SampleSource, index: int, length_bytes: int
    ) -> OpenSample:
        """Note one more handle on a sample; begin to read it if it is small and likely to be read.

        The kernel's cache answers reads of files that were read before, without a word to us, and a
        reading begun for nothing costs more than one begun a little later: so it depends on whether
        files opened lately were read.

        Raises:
            LimitError: the sample is too large to be read through the mount.
        """
        if length_bytes > SAMPLE_BYTES_MAX:
            raise LimitError(
                f"open sample {index}: expected at most {SAMPLE_BYTES_MAX} bytes on a mount, "
                f"got {length_bytes}"
            )
        sample = self._samples.get(inode)
        if sample is None:
            sample = OpenSample(inode, holder, source, index, length_bytes)
            self._samples[inode] = sample
            holder.hold()
        sample.handle_count += 1
        likely = self._read_share >= 0.5 and 0 < length_bytes <= SMALL_BYTES_MAX
        if sample.fetch is None and likely and self._fits(length_bytes):
            self._start(sample)
        return sample

    def release(self, sample: OpenSample) -> None:
        """Note that a handle is gone; with the last one goes the memory."""
        sample.handle_count -= 1
        if sample.handle_count:
            return
        del self._samples[sample.inode]
        if sample.length_bytes:
            self._read_share += (sample.was_read - self._read_share) * _READ_SHARE_STEP
        fetch = sample.fetch
        if fetch is not None:
            fetch.awaited = True
            if not fetch.finished:
                return  # its end will be noticed
            self._drop(sample)
        sample.holder.let_go()

    async def read_range(
        self, sample: OpenSample, offset_bytes: int, size_bytes: int
    ) -> bytes | memoryview:
        """Read a range of an open sample; shorter at the sample's end.

        Raises:
            DlfsError: the sample cannot be read, or it is damaged.
        """
        if sample.length_bytes > max(self._budget_bytes, SMALL_BYTES_MAX):
            return await self._read_part(sample, offset_bytes, size_bytes)
        data = await self.read(sample)
        if not offset_bytes and size_bytes >= len(data):
            return data
        return memoryview(data)[offset_bytes : offset_bytes + size_bytes]

    async def _read_part(
        self, sample: OpenSample, offset_bytes: int, size_bytes: int
    ) -> bytes | memoryview:
        sample.was_read = True
        async with sample.turn:
            if sample.verified is None:
                large = LargeSample(sample.source.access.reader, sample.index)
                await trio.to_thread.run_sync(large.verify, limiter=self._part_threads)
                sample.verified = large
        room = bytearray(max(0, min(size_bytes, sample.length_bytes - offset_bytes)))
        read = partial(sample.verified.read_part, memoryview(room), offset_bytes)
        if room:
            await trio.to_thread.run_sync(read, limiter=self._part_threads)
        return memoryview(room)

    async def read(self, sample: OpenSample) -> bytes:
        """The bytes of an open sample, read if they are not held.

        Raises:
            DlfsError: it cannot be read.
        """
        sample.was_read = True
        fetch = sample.fetch
        if fetch is None:
            if not sample.length_bytes:
                return b""
            fetch = await self._fetch(sample)
        else:
            self._fetched.move_to_end(sample)
        only = len(self._fetched) == 1 and sample.length_bytes <= SMALL_BYTES_MAX
        await fetch.wait(patiently=only)
        if fetch.error is not None:
            if sample.fetch is fetch:
                self._drop(sample)  # the next read tries again
            raise fetch.error
        return fetch.data

    async def _fetch(self, sample: OpenSample) -> Fetch:
        """Begin to read a sample, as soon as there is room for it."""
        async with self._turn:
            while sample.fetch is None and not self._fits(sample.length_bytes):
                # What could give way has, so all the rest is being read.
                await next(iter(self._fetched.values())).wait()
            return sample.fetch or self._start(sample)

    def _fits(self, length_bytes: int) -> bool:
        """Whether a sample may be read now, after others gave way as far as they can."""
        room = self._budget_bytes - length_bytes
        if self._held_bytes > room:
            for sample, fetch in list(self._fetched.items()):
                if self._held_bytes > room and fetch.finished:
                    self._drop(sample)
        return self._held_bytes <= room or not self._fetched

    def _start(self, sample: OpenSample) -> Fetch:
        fetch = Fetch(sample.source, sample.index, partial(self._finished, sample))
        sample.fetch = fetch
        self._fetched[sample] = fetch
        self._held_bytes += sample.length_bytes
        kept = _kept(sample)
        if kept is None:
            self._threads.submit(fetch, sample.length_bytes)
        else:
            fetch.data = kept
            fetch.finished = True
        return fetch

    def _finished(self, sample: OpenSample, fetch: Fetch) -> None:
        if fetch.event is not None:
            fetch.event.set()
        if not sample.handle_count and sample.fetch is fetch:
            self._drop(sample)
            sample.holder.let_go()

    def _drop(self, sample: OpenSample) -> None:
        sample.fetch = None
        del self._fetched[sample]
        self._held_bytes -= sample.length_bytes
