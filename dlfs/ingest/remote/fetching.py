"""Fetches objects into files: many requests in flight, each at most ``PIECE_BYTES``.

An object is fetched in pieces, which ``REQUESTS`` threads take one after the other. Each streams
its piece to the piece's place in the object's file. So memory is bounded by the requests in flight,
whatever the size of an object. The object's CRC32C, which goes into the manifest, follows from
those of its pieces. If the store gives other digests, the thread that completes the object reads
the file once more for them. If a digest differs, the object is fetched once more.

A bound on the copies keeps the objects in their order: the next one is begun when the copies that
were begun before, and that the caller has not released since, leave room for it. An object that is
larger than the bound is fetched when there is no other copy.

A request that fails for a temporary reason is repeated after a random, growing delay. The first
other error ends all threads, each after its present request.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

import numpy as np

from dlfs._native.checksums import combine_crc32c, crc32c
from dlfs._native.handle import Descriptor
from dlfs.base.forks import Event, Lock
from dlfs.base.threads import ThreadPool
from dlfs.errors import ChecksumError, ClosedError
from dlfs.ingest.progress import Meter
from dlfs.ingest.remote.digests import Digests, compute, file_crc
from dlfs.ingest.remote.failures import IncompleteError, disk_errors, with_retries
from dlfs.ingest.remote.manifest import Manifest
from dlfs.ingest.remote.stores import RemoteObject, Store

REQUESTS = 16
"""Most requests in flight, and so the number of threads."""

DISK_BLOCK_BYTES = 4096
"""Unit in which file systems give space to files, in bytes."""

_FETCHES_MAX = 2
"""Most times that an object whose digest differs is fetched."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """An object to fetch, and where: it is written to ``part``, and renamed when complete."""

    store: Store
    item: RemoteObject
    key: str
    part: str
    target: str

    @property
    def disk_bytes(self) -> int:
        """Bytes that the copy takes on the disk."""
        return -(-self.item.size_bytes // DISK_BLOCK_BYTES) * DISK_BLOCK_BYTES


class _Open:
    """An object whose file is open; ``pieces_left`` reaches 0 when all its bytes are there."""

    def __init__(self, fetch: Fetch, number: int) -> None:
        self.fetch = fetch
        self.number = number
        self.lock = Lock()
        self.digests: Digests = dict(fetch.item.digests)
        self.pieces_left = 0
        self.crcs: dict[int, int] = {}
        """CRC32C of each complete piece, by its first byte."""
        self.file = Descriptor()
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self.file.fill(os.open, fetch.part, flags, 0o600)

    def crc32c(self) -> int:
        """Return the CRC32C of the object, all of whose pieces are complete."""
        found = self.crcs.get(0, 0)
        for first, last in islice(_pieces(self.fetch.item), 1, None):
            before, crc = np.array([[found], [self.crcs[first]]], np.uint32)
            found = int(combine_crc32c(before, crc, np.array([last - first]))[0])
        return found


_Task = tuple[_Open, int, int]
"""A piece to fetch: its object, its first byte, and the byte after its last."""


class Fetcher:
    """Fetches some objects, once.

    Args:
        fetches: the objects; their folders exist.
        manifest: manifest that records complete pieces and objects.
        meter: counts the objects that are complete.
        limit_bytes: most bytes of copies that are not released; None without a bound.
        complete: keys of objects that are there already.
    """

    def __init__(
        self,
        fetches: Sequence[Fetch],
        manifest: Manifest,
        meter: Meter,
        *,
        limit_bytes: int | None = None,
        complete: Collection[str] = (),
    ) -> None:
        self._fetches = fetches
        self._manifest = manifest
        self._meter = meter
        self._limit_bytes = limit_bytes
        self._complete = complete
        self._changed = threading.Condition(Lock())  # of all below, and the open files
        self._stop = Event()
        self._error: BaseException | None = None
        self._open: set[_Open] = set()
        self._tasks: Iterator[_Task] = iter(())
        self._next = 0
        self._used_bytes = 0
        self._is_there = bytearray(len(fetches))
        self._there_count = self._wanted_count = 0
        self._pool: ThreadPool | None = None

    def run(self) -> None:
        """Fetch all objects; see ``wait``."""
        self.start()
        self.wait(len(self._fetches))

    def start(self) -> None:
        """Start the threads."""
        pieces = sum(len(list(_pieces(one.item))) or 1 for one in self._fetches[:REQUESTS])
        self._pool = ThreadPool(REQUESTS, thread_name_prefix="dlfs-fetch")
        for _ in range(max(1, min(REQUESTS, pieces))):
            self._pool.submit(self._work)

    def wait(self, count: int) -> None:
        """Wait until the first objects are complete.

        Args:
            count: number of these objects.

        Raises:
            ClosedError: another thread has closed this object.
            ChecksumError: an object does not have the digest that its store gives.
            TruncatedError: the bodies of responses end too early, again and again.
            DeviceError: an object changed, or a store refuses or cannot be reached.
            OSError: a file cannot be written.
        """
        with self._changed:
            self._wanted_count = count
            self._changed.wait_for(lambda: self._there_count >= count or self._stop.is_set())
            if self._error is not None:
                raise self._error
            if self._there_count < count:
                raise ClosedError("fetch objects: the import has ended")

    def release(self, size_bytes: int) -> None:
        """Take note that the caller has deleted copies of so many bytes on the disk."""
        with self._changed:
            self._used_bytes -= size_bytes
            self._changed.notify_all()

    def cancel(self) -> None:
        """End all waits, and the threads after their present requests."""
        with self._changed:
            self._stop.set()
            self._changed.notify_all()

    def close(self) -> None:
        """End the threads, and close the files of objects that are not complete."""
        self.cancel()
        if self._pool is not None:
            self._pool.shutdown()
        while self._open:
            self._open.pop().file.close()

    def _work(self) -> None:
        try:
            while (task := self._next_task()) is not None:
                self._run_task(*task)
        except BaseException as error:  # noqa: BLE001 - which ``wait`` raises
            with self._changed:
                self._error = self._error or error
            self.cancel()

    def _next_task(self) -> _Task | None:
        """Return the next piece to fetch, in order, when there is room for its object."""
        with self._changed:
            while not self._stop.is_set():
                if task := next(self._tasks, None):
                    return task
                if self._next == len(self._fetches):
                    return None
                fetch = self._fetches[self._next]
                used_bytes = self._used_bytes + fetch.disk_bytes
                if self._limit_bytes is None or used_bytes <= max(
                    self._limit_bytes, fetch.disk_bytes
                ):
                    self._used_bytes = used_bytes
                    self._begin(fetch)
                else:
                    self._changed.wait()
            return None

    def _begin(self, fetch: Fetch) -> None:
        """Begin the next object: open its file, and find the pieces to fetch."""
        number, self._next = self._next, self._next + 1
        if fetch.key in self._complete:
            self._note_complete(number)
            return
        opened = _Open(fetch, number)
        opened.digests.update(self._manifest.digests(fetch.key))
        self._open.add(opened)
        missing = list(self._missing(opened))
        if not missing:  # it is empty, or was complete but for its record
            missing = [(0, 0)]
        opened.pieces_left = len(missing)
        self._tasks = iter([(opened, first, last) for first, last in missing])

    def _note_complete(self, number: int) -> None:
        self._is_there[number] = True
        end = self._is_there.find(0, self._there_count)
        self._there_count = len(self._is_there) if end < 0 else end
        if self._there_count >= self._wanted_count:  # to wake a thread costs as much as an object
            self._changed.notify_all()

    def _missing(self, opened: _Open) -> Iterator[tuple[int, int]]:
        """Yield the pieces that no earlier run has fetched, or that are damaged since."""
        fetch, known = opened.fetch, self._manifest.pieces(opened.fetch.key)
        for first, last in _pieces(fetch.item):
            if first in known and file_crc(opened.file.value, first, last) == known[first]:
                opened.crcs[first] = known[first]
            else:
                yield first, last

    def _run_task(self, opened: _Open, first: int, last: int) -> None:
        if last > first:
            self._fetch(opened, first, last)
        with opened.lock:
            opened.pieces_left -= 1
            is_complete = opened.pieces_left == 0
        if is_complete:
            self._finish(opened)

    def _fetch(self, opened: _Open, first: int, last: int) -> None:
        """Fetch a piece into the object's file, with further attempts after temporary errors."""
        fetch, item = opened.fetch, opened.fetch.item

        def request() -> tuple[Digests, int]:
            position, crc = first, 0

            def write(data: bytes) -> None:
                """Write the next bytes to their place in the file."""
                nonlocal position, crc
                left = memoryview(data)
                if len(left) > last - position:
                    raise IncompleteError(f"expected {last - first} bytes, got more")
                crc = crc32c(left, crc)
                while left:
                    with disk_errors(fetch.part):  # another request cannot help
                        count = os.pwrite(opened.file.value, left, position)
                    position, left = position + count, left[count:]

            digests = fetch.store.read(item, first, last, write)
            if position != last:
                raise IncompleteError(
                    f"expected {last - first} bytes, got {position - first} before the response "
                    "ended"
                )
            return digests, crc

        what = f"import {item.shown}: read bytes {first} to {last}"
        digests, crc = with_retries(request, what, self._stop)
        with opened.lock:
            opened.digests.update(digests)
            opened.crcs[first] = crc
        if last - first < item.size_bytes:
            self._manifest.append(fetch.key, piece=first, crc32c=crc, digests=digests)

    def _finish(self, opened: _Open) -> None:
        """Check an object that is complete, record it, and give its file its name."""
        fetch, item = opened.fetch, opened.fetch.item
        for attempt in range(_FETCHES_MAX):
            crc = opened.crc32c()
            others = opened.digests.keys() - {"crc32c"}
            got = {"crc32c": f"{crc:08x}"}
            if others:
                got |= compute(opened.file.value, 0, item.size_bytes, others)
            wrong = [name for name, digits in opened.digests.items() if got[name] != digits]
            if not wrong:
                break
            self._manifest.append(fetch.key, dropped=True)
            if attempt + 1 == _FETCHES_MAX:
                name = wrong[0]
                raise ChecksumError(
                    f"import {item.shown}: expected {name} {opened.digests[name]} of its "
                    f"{item.size_bytes} bytes, got {got[name]}"
                )
            for first, last in _pieces(item):
                self._fetch(opened, first, last)
        with_retries(lambda: fetch.store.check_unchanged(item), f"import {item.shown}", self._stop)
        os.ftruncate(opened.file.value, item.size_bytes)
        facts = {"url": item.shown, "bytes": item.size_bytes, "version": item.version}
        self._manifest.append(fetch.key, **facts, crc32c=crc)
        with suppress(FileNotFoundError):  # a rename over a file makes ext4 write the copy to disk
            os.unlink(fetch.target)
        os.rename(fetch.part, fetch.target)
        with self._changed:
            self._open.discard(opened)
            opened.file.close()
            self._meter.add(1, item.size_bytes)
            self._note_complete(opened.number)


def _pieces(item: RemoteObject) -> Iterator[tuple[int, int]]:
    for first in range(0, item.size_bytes, item.piece_bytes):
        yield first, min(first + item.piece_bytes, item.size_bytes)
