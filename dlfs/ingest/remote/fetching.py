"""Fetches objects into files: many requests in flight, each at most ``PIECE_BYTES``.

All requests are coroutines on the thread of fsspec's event loop, which asynchronous file systems
share. ``REQUESTS`` of them take one piece after the other, in the order of the objects, and write
it to its place in the object's copy. So memory is bounded by the requests in flight, whatever the
size of an object. A pool of threads writes what is large, and calls the file systems that are not
asynchronous. The object's CRC32C, which goes into the manifest, follows from those of its pieces.
If the store gives other digests, the object is read once more for them. If a digest differs, it is
fetched once more.

``Copies`` says where the copy of an object goes, and if there is room for it. The objects get their
places in their order, and those behind one that has no room wait for it. If a listing has no size
of an object, as that of a web server, the response to the first request gives it. A body that is
there before that of an earlier object then waits in memory for its place: at most ``REQUESTS`` and
``EARLY_BYTES``; further ones keep their request from being followed by another.

A request that fails for a temporary reason is repeated after a random, growing delay. After the
first other error, and when the import ends, each coroutine ends behind its present request; the
import ends with the error at once, and then cancels one that takes more than ``GRACE_S``.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Protocol, TypeVar

import numpy as np

from dlfs._native.checksums import combine_crc32c, crc32c
from dlfs._native.handle import Descriptor
from dlfs.base.forks import Lock, OwnerProcess
from dlfs.base.threads import ThreadPool
from dlfs.base.units import MIB
from dlfs.errors import ChecksumError, ClosedError
from dlfs.ingest.order import round_up
from dlfs.ingest.progress import Meter
from dlfs.ingest.remote.digests import Digests, compute, file_crc
from dlfs.ingest.remote.failures import IncompleteError, delay_before_next, disk_errors
from dlfs.ingest.remote.manifest import Manifest
from dlfs.ingest.remote.stores import BODY_BYTES, REQUESTS, RemoteObject, Store

EARLY_BYTES = 16 * MIB
"""Most bytes of bodies that wait for the places of earlier objects, but those in flight."""

GRACE_S = 1.0
"""Longest wait for the requests in flight when the import ends, in seconds."""

_FETCHES_MAX = 2
"""Most times that an object whose digest differs is fetched."""

_T = TypeVar("_T")


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
        return round_up(self.item.size_bytes)


@dataclass(frozen=True, slots=True)
class Place:
    """The place of an object's copy: an open file, and the offset of its first byte."""

    file: int
    path: str
    offset_bytes: int = 0


class Copies(Protocol):
    """The places of copies. Only the thread of the event loop calls the methods.

    Attributes:
        wake: function that wakes the thread that waits for copies; set by the fetcher.
    """

    wake: Callable[[], None] = staticmethod(lambda: None)

    @abstractmethod
    def place(self, number: int, fetch: Fetch) -> Place | None:
        """Return the place of the next object, of known size; None until there is room for it."""

    @abstractmethod
    def is_complete(self, number: int, fetch: Fetch, place: Place) -> bool:
        """Return True if the copy is there from an earlier run."""

    @abstractmethod
    def finish(self, number: int, fetch: Fetch) -> None:
        """Take a copy that is complete, and recorded."""

    @abstractmethod
    def release(self, size_bytes: int) -> None:
        """Take note that copies of so many bytes on the disk were deleted."""

    @abstractmethod
    def close(self) -> None:
        """Close the files."""


class FileCopies(Copies):
    """A file for each object, which gets its name when it is complete.

    Args:
        limit_bytes: most bytes of copies that are not released; None without a bound. An object
            that is larger is fetched when there is no other copy.
        complete: keys of objects that are there already.
    """

    def __init__(self, limit_bytes: int | None = None, complete: Collection[str] = ()) -> None:
        self._limit_bytes = limit_bytes
        self._complete = complete
        self._used_bytes = 0
        self._files: dict[int, Descriptor] = {}

    def place(self, number: int, fetch: Fetch) -> Place | None:
        """Open the file of an object; see ``Copies``."""
        used_bytes = self._used_bytes + fetch.disk_bytes
        if self._limit_bytes is not None and used_bytes > max(self._limit_bytes, fetch.disk_bytes):
            return None
        self._used_bytes = used_bytes
        if fetch.key in self._complete:
            return Place(-1, fetch.target)
        file = self._files[number] = Descriptor()
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        with disk_errors(fetch.part):
            file.fill(os.open, fetch.part, flags, 0o600)
        return Place(file.value, fetch.part)

    def is_complete(self, number: int, fetch: Fetch, place: Place) -> bool:
        """Return True for the objects that are there already."""
        del number, place
        return fetch.key in self._complete

    def finish(self, number: int, fetch: Fetch) -> None:
        """Give a file its name, unless it had it before."""
        file = self._files.pop(number, None)
        if file is None:
            return
        os.ftruncate(file.value, fetch.item.size_bytes)
        with suppress(FileNotFoundError):  # a rename over a file makes ext4 write the copy to disk
            os.unlink(fetch.target)
        os.rename(fetch.part, fetch.target)
        file.close()

    def release(self, size_bytes: int) -> None:
        """Take note that copies of so many bytes on the disk were deleted."""
        self._used_bytes -= size_bytes

    def close(self) -> None:
        """Close the files of objects that are not complete."""
        while self._files:
            self._files.popitem()[1].close()


class _Open:
    """An object that is fetched; ``pieces_left`` reaches 0 when all its bytes are there."""

    def __init__(self, number: int, fetch: Fetch, place: Place) -> None:
        self.number = number
        self.fetch = fetch
        self.place = place
        self.digests: Digests = dict(fetch.item.digests)
        self.pieces_left = 0
        self.crcs: dict[int, int] = {}
        """CRC32C of each complete piece, by its first byte."""

    def crc32c(self) -> int:
        """Return the CRC32C of the object, all of whose pieces are complete."""
        found = self.crcs.get(0, 0)
        for first, last in islice(_pieces(self.fetch.item), 1, None):
            before, crc = np.array([[found], [self.crcs[first]]], np.uint32)
            found = int(combine_crc32c(before, crc, np.array([last - first]))[0])
        return found


_Piece = tuple[_Open, int, int]
"""A piece to fetch: its object, its first byte, and the byte after its last."""


class Fetcher:
    """Fetches some objects, once.

    Args:
        fetches: the objects, in their order.
        manifest: manifest that records complete pieces and objects.
        meter: counts the objects that are complete.
        copies: where the copies go; closed with this object.

    Threads: one thread calls the public methods, but ``cancel`` any. What begins with an underscore
    belongs to the thread of the event loop, but for what ``_changed`` guards.
    """

    def __init__(
        self, fetches: Sequence[Fetch], manifest: Manifest, meter: Meter, copies: Copies
    ) -> None:
        self._fetches = fetches
        self._manifest = manifest
        self._meter = meter
        self._copies = copies
        self._owner = OwnerProcess()  # a child has neither the event loop's thread nor the pool's
        self._loop: Any = None
        self._pool: ThreadPool | None = None
        self._workers: list[asyncio.Task[None]] = []
        self._pieces: deque[_Piece] = deque()
        self._next = self._turn = 0
        self._turns: dict[int, asyncio.Future[None]] = {}
        self._early: dict[int, tuple[Fetch, bytes]] = {}
        self._early_bytes = 0
        self._room: asyncio.Future[None] | None = None
        self._waits: set[asyncio.Future[None]] = set()
        self._is_ending = False
        self._is_there = bytearray(len(fetches))

        self._changed = threading.Condition(Lock())  # of all below
        self._is_stopped = self._has_ended = False
        self._error: BaseException | None = None
        self._there_count = self._wanted_count = 0
        copies.wake = self._wake

    def run(self) -> None:
        """Fetch all objects; see ``wait``."""
        self.start()
        self.wait(len(self._fetches))

    def start(self) -> None:
        """Begin to fetch."""
        self._pool = ThreadPool(REQUESTS, thread_name_prefix="dlfs-fetch")
        self._loop = importlib.import_module("fsspec.asyn").get_loop()
        self._call(self._begin_all)

    def wait(self, count: int) -> None:
        """Wait until the first objects are complete.

        Args:
            count: number of these objects.

        Raises:
            DlfsError: see ``wait_for``.
        """
        with self._changed:
            self._wanted_count = count
        self.wait_for(lambda: self._there_count >= count)

    def wait_for(self, is_ready: Callable[[], bool]) -> None:
        """Wait until a condition is true.

        Args:
            is_ready: returns True then; called again when ``Copies.wake`` was called.

        Raises:
            ClosedError: another thread has closed this object.
            ChecksumError: an object does not have the digest that its store gives.
            TruncatedError: the bodies of responses end too early, again and again.
            DeviceError: an object changed, or a store refuses or cannot be reached.
            OSError: a file cannot be written.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: is_ready() or self._error or self._has_ended or self._is_stopped
            )
            if self._error is not None:
                raise self._error
            if not is_ready():
                raise ClosedError("fetch objects: the import has ended")

    def release(self, size_bytes: int) -> None:
        """Take note that the caller has deleted copies of so many bytes on the disk."""

        def release() -> None:
            self._copies.release(size_bytes)
            if self._room is not None and not self._room.done():
                self._room.set_result(None)

        self._call(release)

    def cancel(self) -> None:
        """End all waits, and all requests after ``GRACE_S``."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()
        self._call(self._end_workers)

    def close(self) -> None:
        """End the requests, and close the files of objects that are not complete."""
        self.cancel()
        if self._pool is not None and self._owner.is_current():
            with self._changed:
                self._changed.wait_for(lambda: self._has_ended)
            self._pool.shutdown()
        self._copies.close()

    def _call(self, function: Callable[[], object]) -> None:
        """Have the thread of the event loop call a function."""
        if self._loop is not None and self._owner.is_current():
            self._loop.call_soon_threadsafe(function)

    # ---- on the event loop -----------------------------------------------------------------------

    def _begin_all(self) -> None:
        self._running = self._loop.create_task(self._run())

    async def _run(self) -> None:
        self._workers = [asyncio.create_task(self._work()) for _ in range(REQUESTS)]
        if self._is_stopped:
            self._end_workers()
        await asyncio.wait(self._workers)
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def _end_workers(self) -> None:
        """Have each coroutine end behind its present request, or when the grace is over."""
        self._begin_no_more()
        for worker in self._workers:
            self._loop.call_later(GRACE_S, worker.cancel)

    def _begin_no_more(self) -> None:
        self._is_ending = True
        for wait in self._waits:
            wait.cancel()

    async def _work(self) -> None:
        try:
            while not self._is_ending:
                if self._pieces:
                    await self._run_piece(*self._pieces.popleft())
                elif self._next < len(self._fetches):
                    number, self._next = self._next, self._next + 1
                    await self._begin(number)
                else:
                    return
        except asyncio.CancelledError:
            return
        except BaseException as error:  # noqa: BLE001 - which ``wait`` raises
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()
            self._begin_no_more()

    async def _wait(self, until: asyncio.Future[None]) -> None:
        """Wait for a future, or until a request has failed."""
        if self._is_ending:  # nothing may ever set it
            raise asyncio.CancelledError
        self._waits.add(until)
        try:
            await until
        finally:
            self._waits.discard(until)

    async def _pause(self, delay_s: float) -> None:
        """Wait before the next attempt of a request."""
        until = self._loop.create_future()
        timer = self._loop.call_later(delay_s, until.set_result, None)
        try:
            await self._wait(until)
        finally:
            timer.cancel()

    async def _begin(self, number: int) -> None:
        """Begin an object, and those behind it whose bodies came before."""
        fetch, body = self._fetches[number], None
        if not fetch.item.has_size:
            fetch, body = await self._look_up(fetch)
        if number != self._turn:
            if body is not None and self._put_aside(number, fetch, body):
                return
            self._turns[number] = self._loop.create_future()
            await self._wait(self._turns[number])
        await self._open(number, fetch, body)
        while (early := self._early.pop(self._turn, None)) is not None:
            fetch, body = early
            self._early_bytes -= len(body)
            await self._open(self._turn, fetch, body)

    def _put_aside(self, number: int, fetch: Fetch, body: bytes) -> bool:
        """Let a body wait for its place, if others leave room for it in memory."""
        size_bytes = self._early_bytes + len(body)
        if len(self._early) == REQUESTS or size_bytes > EARLY_BYTES:
            return False
        self._early[number] = fetch, body
        self._early_bytes = size_bytes
        return True

    async def _open(self, number: int, fetch: Fetch, body: bytes | None) -> None:
        """Find the place of the next object when there is room for it, and the pieces to fetch."""
        while (place := self._copies.place(number, fetch)) is None:
            self._room = self._loop.create_future()
            await self._wait(self._room)
        self._turn += 1
        if (turn := self._turns.pop(self._turn, None)) is not None and not turn.done():
            turn.set_result(None)
        if self._copies.is_complete(number, fetch, place):
            self._copies.finish(number, fetch)
            self._note_complete(number)
            return
        opened = _Open(number, fetch, place)
        if body is not None:
            opened.crcs[0] = _write(place, 0, body)
            await self._finish(opened)
            return
        opened.digests.update(self._manifest.digests(fetch.key))
        missing = await self._missing(opened)
        if not missing:  # it is empty, or was complete but for its record
            await self._finish(opened)
            return
        opened.pieces_left = len(missing)
        self._pieces.extend((opened, first, last) for first, last in missing)

    async def _look_up(self, fetch: Fetch) -> tuple[Fetch, bytes | None]:
        """Return an object with its size, and its bytes if they are one piece."""
        item = fetch.item
        if (known := self._manifest.versions.get(fetch.key)) is not None:
            size_bytes, version = known
            return replace(fetch, item=replace(item, size_bytes=size_bytes, version=version)), None
        found, body = await self._repeat(fetch, lambda: fetch.store.look_up(item), "read")
        return Fetch(fetch.store, found, fetch.key, fetch.part, fetch.target), body

    def _note_complete(self, number: int) -> None:
        self._is_there[number] = True
        with self._changed:
            end = self._is_there.find(0, self._there_count)
            self._there_count = len(self._is_there) if end < 0 else end
            if self._there_count >= self._wanted_count > 0:  # waking a thread costs time
                self._changed.notify_all()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    async def _missing(self, opened: _Open) -> list[tuple[int, int]]:
        """Return the pieces that no earlier run has fetched, or that are damaged since."""
        place, known = opened.place, self._manifest.pieces(opened.fetch.key)
        missing = []
        for first, last in _pieces(opened.fetch.item):
            if first in known:
                span = place.offset_bytes + first, place.offset_bytes + last
                if await self._in_thread(file_crc, place.file, *span) == known[first]:
                    opened.crcs[first] = known[first]
                    continue
            missing.append((first, last))
        return missing

    async def _run_piece(self, opened: _Open, first: int, last: int) -> None:
        await self._fetch(opened, first, last)
        opened.pieces_left -= 1
        if opened.pieces_left == 0:
            await self._finish(opened)

    async def _fetch(self, opened: _Open, first: int, last: int) -> None:
        """Fetch a piece into the object's copy."""
        fetch, item = opened.fetch, opened.fetch.item

        async def request() -> tuple[Digests, int]:
            writer = _PieceWriter(opened.place, first, last)
            digests = await fetch.store.fetch(item, first, last, writer.write, self._in_thread)
            writer.check_complete()
            return digests, writer.crc

        what = f"read bytes {first} to {last}"
        digests, opened.crcs[first] = await self._repeat(fetch, request, what)
        opened.digests.update(digests)
        if last - first < item.size_bytes:
            record = {"piece": first, "crc32c": opened.crcs[first], "digests": digests}
            self._manifest.append(fetch.key, **record)

    async def _repeat(self, fetch: Fetch, request: Callable[[], Awaitable[_T]], action: str) -> _T:
        """Run a request, again after temporary errors."""
        attempt = 0
        while True:
            try:
                return await request()
            except Exception as error:  # noqa: BLE001
                attempt += 1
                what = f"import {fetch.item.shown}: {action}"
                delay_s = delay_before_next(error, attempt, what, is_last=self._is_ending)
            await self._pause(delay_s)

    async def _finish(self, opened: _Open) -> None:
        """Check an object that is complete, record it, and hand its copy over."""
        fetch, item = opened.fetch, opened.fetch.item
        for attempt in range(_FETCHES_MAX):
            crc = opened.crc32c()
            got = await self._compute(opened, crc) if opened.digests else {}
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
                await self._fetch(opened, first, last)
        await fetch.store.recheck(item, self._in_thread)
        facts = {"url": item.shown, "bytes": item.size_bytes, "version": item.version}
        if not self._fetches[opened.number].item.has_size:
            facts["looked_up"] = True
        self._manifest.append(fetch.key, **facts, crc32c=crc)
        self._copies.finish(opened.number, fetch)
        self._meter.add(1, item.size_bytes)
        self._note_complete(opened.number)

    async def _compute(self, opened: _Open, crc: int) -> Digests:
        """Return the digests of an object that its store gives, and its CRC32C."""
        others = opened.digests.keys() - {"crc32c"}
        got = {"crc32c": f"{crc:08x}"}
        if others:
            place, size_bytes = opened.place, opened.fetch.item.size_bytes
            span = place.file, place.offset_bytes, place.offset_bytes + size_bytes
            is_small = size_bytes <= BODY_BYTES
            got |= (
                compute(*span, others)
                if is_small
                else await self._in_thread(compute, *span, others)
            )
        return got

    async def _in_thread(self, function: Callable[..., _T], *arguments: Any) -> _T:
        """Call a function that takes long in a thread of the pool."""
        found: _T = await self._loop.run_in_executor(self._pool, function, *arguments)
        return found


class _PieceWriter:
    """Writes the bytes of a piece to their place, and sums them.

    Args:
        place: place of the object.
        first: offset of the piece in the object.
        last: offset behind the piece.
    """

    def __init__(self, place: Place, first: int, last: int) -> None:
        self._place = place
        self._first = self._position = first
        self._last = last
        self.crc = 0

    def write(self, data: bytes) -> None:
        """Write the next bytes."""
        if len(data) > self._last - self._position:
            raise IncompleteError(f"expected {self._last - self._first} bytes, got more")
        self.crc = _write(self._place, self._position, data, self.crc)
        self._position += len(data)

    def check_complete(self) -> None:
        """Check that the piece is there up to its last byte."""
        if self._position != self._last:
            raise IncompleteError(
                f"expected {self._last - self._first} bytes, got {self._position - self._first} "
                "before the response ended"
            )


def _write(place: Place, position: int, data: bytes, crc: int = 0) -> int:
    """Write bytes at a position of an object, and return the CRC32C that they continue."""
    with_crc = crc32c(data, crc)
    first = place.offset_bytes + position
    with disk_errors(place.path):  # another request cannot help
        written = os.pwrite(place.file, data, first)
        while written < len(data):
            written += os.pwrite(place.file, data[written:], first + written)
    return with_crc


def _pieces(item: RemoteObject) -> Iterator[tuple[int, int]]:
    for first in range(0, item.size_bytes, item.piece_bytes):
        yield first, min(first + item.piece_bytes, item.size_bytes)
