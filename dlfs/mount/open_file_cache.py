"""The open-file cache of the pyfuse3 server: samples that programs have open, read and verified.

A sample of up to a chunk, or a MiB, is read as a whole before its first byte is sent. It stays in
memory as long as a file handle on it is open, within one budget. When the budget is full, the least
recently used sample is evicted; it is read again if it is requested again. Of a larger sample what
is requested is read, and the dataset's reader keeps the chunks that it lies in.

Threads: the FUSE loop (trio) owns the cache. A small sample that is in the reader's memory, or that
the devices send within half a millisecond, is copied in the loop: two changes of the thread that
has Python's lock would take longer than the device. ``_ReaderThreads`` read the others: to hand a
sample to a waiting thread takes half the time of ``trio.to_thread.run_sync``. Large samples have
threads of their own, so that small ones never wait for them.

The devices begin to read a small sample when its file is looked up. That takes 50 to 100 us, in
which the loop answers the look-up and the open.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Protocol

import trio

from dlfs._native.single_reads import NativeBegunRead
from dlfs.base.threads import start_thread
from dlfs.base.units import MIB
from dlfs.connection.connection import DatasetSession
from dlfs.errors import DlfsError, StaleError

_log = logging.getLogger(__name__)

SMALL_BYTES_MAX = 1 * MIB
"""Largest sample that is read when its file is looked up or opened, before any read request."""

SMALL_READS_MAX = 32
"""Most small samples that are read at the same time, each by a thread."""
LARGE_READS_MAX = 2
"""Most other whole samples that are read at the same time, each by a thread."""

RANGE_READS_MAX = 8
"""Most ranges of larger samples that are read at the same time."""

_READ_SHARE_STEP = 1 / 8

PROMPT_PAUSE = 16
"""Samples for which the loop does not wait after the devices did not send one at once."""

EARLY_PAUSE = 16
"""Files for which no read begins with the look-up after one was read in vain."""

EARLY_SECONDS = 1.0
"""Longest time of a read that no program asks for, in seconds, or up to twice that."""


class SampleSource(Protocol):
    """The part of ``Dataset`` that the cache uses."""

    def __getitem__(self, index: int, /) -> bytes:
        """Read one sample."""

    def read_into(self, index: int, buffer: bytearray, *, offset_bytes: int) -> int:
        """Read a range of a sample."""

    @property
    def session(self) -> DatasetSession:
        """The open reader of the dataset, which this may have to open again."""

    @property
    def present_session(self) -> DatasetSession | None:
        """The open reader of the dataset, or None."""


class Pinnable(Protocol):
    """A dataset that stays open while it is pinned."""

    def pin(self) -> None:
        """Prevent the dataset from being closed."""

    def unpin(self) -> None:
        """Undo one ``pin``."""


@dataclass(eq=False)
class Load:
    """One read of a whole sample: under way until it has data or an error."""

    data: bytes | None = None
    error: Exception | None = None
    ended: trio.Event | None = None
    """Made by the first task that waits, and set by ``end``."""

    @property
    def done(self) -> bool:
        """True if the read has ended."""
        return self.data is not None or self.error is not None

    async def wait(self) -> None:
        """Wait until the read has ended; return at once, without a turn of the loop, if it has."""
        while not self.done:
            if self.ended is None:
                self.ended = trio.Event()
            await self.ended.wait()

    def end(self, result: bytes | Exception) -> None:
        """Set the result of the read and wake the tasks that wait for it."""
        if isinstance(result, Exception):
            self.error = result
        else:
            self.data = result
        if self.ended is not None:
            self.ended.set()


@dataclass(eq=False)
class OpenSample:
    """A sample with open file handles."""

    inode: int
    dataset: Pinnable
    source: SampleSource
    index: int
    length_bytes: int
    in_ranges: bool = False
    """True if what is requested is read, and not the whole sample."""
    handle_count: int = 0
    load: Load | None = None
    was_read: bool = False
    """True once a program has read from one of the handles."""
    withdrawn: bool = False
    """True once the dataset was removed from the mount, so that no read may begin."""


@dataclass(eq=False)
class _EarlyRead:
    """A read that began when its file was looked up."""

    inode: int
    dataset: Pinnable
    read: NativeBegunRead


class OpenFileCache:
    """The open samples and their bytes.

    Args:
        budget_bytes: most memory of cached samples, except that one sample of up to
            ``SMALL_BYTES_MAX`` is always cached.

    Threads: the FUSE loop, within ``trio.run``.
    """

    def __init__(self, *, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._cached_bytes = 0
        self._samples: dict[int, OpenSample] = {}  # by inode number
        self._loads: OrderedDict[OpenSample, Load] = OrderedDict()  # least recently used first
        self._small = _ReaderThreads(SMALL_READS_MAX, "dlfs-small-read", self._end)
        self._large = _ReaderThreads(LARGE_READS_MAX, "dlfs-large-read", self._end)
        self._range_reads = trio.CapacityLimiter(RANGE_READS_MAX)
        self._room_lock = trio.Lock()  # serves tasks in order of arrival while the budget is full
        self._read_share = 1.0  # share of recently opened files that were also read
        self._prompt_pause = 0  # samples that the loop is still not to wait for
        self._early: _EarlyRead | None = None
        self._early_pause = 0  # files that are still not read with their look-up

    @property
    def cached_bytes(self) -> int:
        """Memory in use, including samples that are being read, in bytes."""
        return self._cached_bytes

    def expect(
        self, inode: int, dataset: Pinnable, source: SampleSource, index: int, length_bytes: int
    ) -> None:
        """Have the devices read a small sample that was looked up: it is likely to be requested.

        The devices work while the program opens the file. One such read is under way at a time, so
        it serves one program; if others look files up meanwhile, it is given up.
        """
        self.give_up_early_read()
        if self._early_pause:
            self._early_pause -= 1
            return
        likely = self._read_share >= 0.5 and 0 < length_bytes <= SMALL_BYTES_MAX
        if not likely or self._prompt_pause or inode in self._samples:
            return
        session = source.present_session
        try:
            read = None if session is None else session.reader.begin(index)
        except DlfsError:
            return  # the read that follows raises the error
        if read is not None:
            dataset.pin()
            self._early = _EarlyRead(inode, dataset, read)

    async def give_up_early_reads(self) -> None:
        """Give up reads that no program asks for, without end: they hold a queue pair."""
        while True:
            early = self._early
            await trio.sleep(EARLY_SECONDS)
            if early is self._early:
                self.give_up_early_read()

    def give_up_early_read(self) -> None:
        """End the read that began with a look-up, if there is one."""
        early, self._early = self._early, None
        if early is None:
            return
        self._early_pause = EARLY_PAUSE
        early.read.cancel()
        try:
            early.dataset.unpin()
        except DlfsError as error:  # no request waits for this, which could report it
            _log.warning("close a dataset that was removed: %s", error)

    def _take_early_read(self, sample: OpenSample) -> NativeBegunRead | None:
        """Return the read that began when this sample was looked up.

        One of another file is given up: its program has left it.
        """
        early = self._early
        if early is None or early.inode != sample.inode:
            self.give_up_early_read()
            return None
        self._early = None
        early.dataset.unpin()  # the sample has a pin of its own
        return early.read

    def open(
        self,
        inode: int,
        dataset: Pinnable,
        source: SampleSource,
        index: int,
        length_bytes: int,
        *,
        chunk_bytes: int,
    ) -> OpenSample:
        """Add a handle on a sample, and start to read the sample if it is likely to be requested.

        The kernel answers reads of a file from its own cache if the file was read before; then the
        server sees an open without a read. A small sample is therefore read at once only if most
        recently opened files were read.
        """
        sample = self._samples.get(inode)
        if sample is None:
            in_ranges = length_bytes > max(SMALL_BYTES_MAX, chunk_bytes)
            sample = OpenSample(inode, dataset, source, index, length_bytes, in_ranges)
            self._samples[inode] = sample
            dataset.pin()
        sample.handle_count += 1
        likely = self._read_share >= 0.5 and 0 < length_bytes <= SMALL_BYTES_MAX
        later = self._prompt_pause == 0  # the read takes so little time that it need not begin now
        if sample.load is None and likely and not later and self._make_room(length_bytes):
            self._start(sample)
        return sample

    def release(self, sample: OpenSample) -> None:
        """Remove a handle; with the last one, free the memory and unpin the dataset."""
        sample.handle_count -= 1
        if sample.handle_count or sample.withdrawn:
            return
        del self._samples[sample.inode]
        if sample.length_bytes:
            self._read_share += (sample.was_read - self._read_share) * _READ_SHARE_STEP
        if sample.load is None or sample.load.done:
            self._free(sample)  # otherwise the end of the read frees it

    def withdraw(self, dataset: Pinnable) -> None:
        """Fail later reads of the open samples of a dataset, which is unpinned after present ones.

        The handles stay, and are to be released.
        """
        if self._early is not None and self._early.dataset is dataset:
            self.give_up_early_read()
        for sample in [each for each in self._samples.values() if each.dataset is dataset]:
            del self._samples[sample.inode]
            sample.withdrawn = True
            if sample.load is None or sample.load.done:
                self._free(sample)  # otherwise the end of the read frees it

    async def read_range(
        self, sample: OpenSample, offset_bytes: int, size_bytes: int
    ) -> bytes | memoryview:
        """Read a range of an open sample; it is shorter at the end of the sample.

        Raises:
            StaleError: the dataset was removed from the mount.
            DlfsError: the sample cannot be read, or it is damaged.
        """
        if sample.in_ranges:
            return await self._read_range(sample, offset_bytes, size_bytes)
        data = await self.read(sample)
        if not offset_bytes and size_bytes >= len(data):
            return data
        return memoryview(data)[offset_bytes : offset_bytes + size_bytes]

    async def read(self, sample: OpenSample) -> bytes:
        """Return the bytes of an open sample; read it if it is not cached.

        Raises:
            DlfsError: it cannot be read.
        """
        sample.was_read = True
        _check(sample)
        if not sample.length_bytes:
            return b""
        load = sample.load or self._start_at_once(sample) or await self._start_when_room(sample)
        if sample in self._loads:
            self._loads.move_to_end(sample)
        await load.wait()
        if load.error is not None:
            if sample.load is load:
                self._evict(sample)  # the next read tries again
            raise load.error
        assert load.data is not None
        return load.data

    async def _read_range(
        self, sample: OpenSample, offset_bytes: int, size_bytes: int
    ) -> bytes | memoryview:
        sample.was_read = True
        _check(sample)
        buffer = bytearray(max(0, min(size_bytes, sample.length_bytes - offset_bytes)))
        read = partial(sample.source.read_into, sample.index, buffer, offset_bytes=offset_bytes)
        sample.dataset.pin()
        try:
            await trio.to_thread.run_sync(read, limiter=self._range_reads)
        finally:
            sample.dataset.unpin()
        return memoryview(buffer)

    def _start_at_once(self, sample: OpenSample) -> Load | None:
        """Start to read a sample if the budget has room for it and no other waits for room."""
        free = not self._room_lock.locked() and self._make_room(sample.length_bytes)
        return self._start(sample) if free else None

    async def _start_when_room(self, sample: OpenSample) -> Load:
        """Start to read a sample as soon as the budget has room for it."""
        async with self._room_lock:
            while sample.load is None and not self._make_room(sample.length_bytes):
                # Everything evictable is gone, so all cached samples are still being read.
                await next(iter(self._loads.values())).wait()
            _check(sample)
            return sample.load or self._start(sample)

    def _make_room(self, length_bytes: int) -> bool:
        """Evict samples as needed. Return True if a sample of this size may be read now."""
        limit = self._budget_bytes - length_bytes
        if self._cached_bytes > limit:
            for sample, load in list(self._loads.items()):
                if self._cached_bytes > limit and load.done:
                    self._evict(sample)
        return self._cached_bytes <= limit or not self._loads

    def _start(self, sample: OpenSample) -> Load:
        load = Load(self._read_promptly(sample))
        sample.load = self._loads[sample] = load
        self._cached_bytes += sample.length_bytes
        if not load.done:
            threads = self._small if sample.length_bytes <= SMALL_BYTES_MAX else self._large
            threads.submit(sample)
        return load

    def _read_promptly(self, sample: OpenSample) -> bytes | None:
        """Return a small sample from the reader's memory, or from the devices if they are fast."""
        if sample.length_bytes > SMALL_BYTES_MAX:
            return None
        prompt = self._prompt_pause == 0
        early = self._take_early_read(sample)
        session = sample.source.present_session
        found = None
        try:
            if early is not None:
                found = early.get(sample.length_bytes)
            elif session is not None:  # else a thread opens the dataset again
                reader = session.reader
                found = (reader.get_if_prompt if prompt else reader.get_if_cached)(sample.index)
        except DlfsError:
            found = None  # the read that follows raises the error
        if not prompt:
            self._prompt_pause -= 1
        elif found is None:
            self._prompt_pause = PROMPT_PAUSE
        return found

    def _end(self, sample: OpenSample, result: bytes | Exception) -> None:
        """Take the result of a read. Runs in the loop."""
        assert sample.load is not None  # a read under way is not evicted
        sample.load.end(result)
        if not sample.handle_count or sample.withdrawn:
            self._free(sample)

    def close(self) -> None:
        """End the reader threads after the reads under way; no request may follow. Blocks."""
        self._small.close()
        self._large.close()

    def _free(self, sample: OpenSample) -> None:
        if sample.load is not None:
            self._evict(sample)
        sample.dataset.unpin()

    def _evict(self, sample: OpenSample) -> None:
        sample.load = None
        del self._loads[sample]
        self._cached_bytes -= sample.length_bytes


def _check(sample: OpenSample) -> None:
    if sample.withdrawn:
        raise StaleError(f"read sample {sample.index}: its dataset is not in the mount any more")


class _ReaderThreads:
    """Threads that read whole samples for the loop.

    Args:
        count: number of threads, and so most samples that are read at the same time.
        name: name of the threads, for debuggers.
        deliver: called in the loop with each sample, and its bytes or its error.
    """

    def __init__(
        self, count: int, name: str, deliver: Callable[[OpenSample, bytes | Exception], None]
    ) -> None:
        self._deliver = deliver
        self._token = trio.lowlevel.current_trio_token()
        self._waiting: SimpleQueue[OpenSample | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            start_thread(thread)

    def submit(self, sample: OpenSample) -> None:
        """Queue a sample to be read."""
        self._waiting.put(sample)

    def close(self) -> None:
        """End the threads after all queued samples. Blocks."""
        for _ in self._threads:
            self._waiting.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (sample := self._waiting.get()) is not None:
            result: bytes | Exception
            try:
                result = sample.source[sample.index]
            except Exception as error:  # noqa: BLE001  the request's handler reports it
                result = error
            self._token.run_sync_soon(self._deliver, sample, result)
            del sample, result  # an idle thread must keep no bytes in memory
