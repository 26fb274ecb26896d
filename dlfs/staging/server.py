"""The server of a staging area: takes requests to seal, discard and list datasets.

Any process connects to the socket in the staging area; the kernel names its user (SO_PEERCRED). A
node service connects its own clients (``connect``). Root and the server's user may seal every
dataset, other users those that belong to them. A seal goes on if its client goes away.

Threads: the trio loop; all that waits for files or devices runs in worker threads.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

import trio

from dlfs.base.json_records import from_json, to_json
from dlfs.base.units import format_bytes
from dlfs.errors import DlfsError, FormatError, UsageError
from dlfs.format.paths import display
from dlfs.staging.area import StagingArea
from dlfs.staging.protocol import (
    OPEN,
    REQUEST_BYTES_MAX,
    SEALING,
    SealAnswer,
    SealRequest,
    SealStatus,
    StagedContents,
)
from dlfs.staging.sealer import Seal, Sealer, busy, failed_status
from dlfs.store.members import same_kind
from dlfs.volume.volume import Volume

CONNECTIONS_MAX = 256
"""Most connections through the socket at a time; more wait."""
ACCEPT_SECONDS = 0.1
"""Pause after a connection that cannot be accepted, for want of descriptors, in seconds."""
REQUEST_SECONDS = 10.0
"""Longest time in which a client must send its request, and take an answer, in seconds."""
REPORT_SECONDS = 0.1
"""Time between two answers about the progress of a seal, in seconds."""

_CREDENTIALS = struct.Struct("3i")

_log = logging.getLogger(__name__)


class SealServer:
    """Serves the staging area of a volume.

    Args:
        volume: the volume into which datasets are sealed; must outlive the server.
        folder: directory of the staging area.

    Attributes:
        folder: as given.
        on_sealed: called when a dataset was sealed.
    """

    def __init__(self, volume: Volume, folder: str) -> None:
        self.folder = folder
        self.on_sealed: Callable[[], None] = lambda: None
        self._volume = volume
        self._sealer: Sealer | None = None
        self._nursery: trio.Nursery | None = None
        self._turn = trio.Lock()
        self._under_way: dict[bytes, Seal] = {}
        self._places = trio.Semaphore(CONNECTIONS_MAX)
        self._removed = trio.Event()

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Open the staging area, finish what a crash has interrupted, and serve until cancelled.

        Raises:
            LockedError: another server uses the staging area.
            UsageError: it belongs to another volume or user.
            DeviceError: it cannot be read or written.
            DlfsError: the volume cannot be opened for writing.
        """
        await trio.to_thread.run_sync(_check_writable, self._volume)
        area = await trio.to_thread.run_sync(StagingArea, self.folder, self._volume.uuid)
        with area:
            sealer = self._sealer = Sealer(self._volume, area)
            await trio.to_thread.run_sync(sealer.settle)
            listener = trio.SocketListener(trio.socket.from_stdlib_socket(area.listen()))
            try:
                async with trio.open_nursery() as nursery:
                    self._nursery = nursery
                    nursery.start_soon(_end_when_cancelled, sealer)
                    nursery.start_soon(_log_leftovers, area)
                    nursery.start_soon(self._delete_removed, area, sealer)
                    task_status.started()
                    await self._accept_all(listener, nursery)
            finally:
                self._sealer = self._nursery = None

    def connect(self, uid: int) -> socket.socket:
        """Return a connection for a client whose user is known.

        Raises:
            UsageError: the server does not run.
        """
        if self._nursery is None:
            raise UsageError("seal: the staging area is not served; the log of the mount says why")
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(here))
        self._nursery.start_soon(self._serve, stream, uid)
        return there

    # ---- connections -----------------------------------------------------------------------------

    async def _accept_all(self, listener: trio.SocketListener, nursery: trio.Nursery) -> None:
        async with listener:
            while True:
                await self._places.acquire()
                try:
                    stream = await listener.accept()
                except OSError as error:
                    self._places.release()
                    _log.error("incoming: accept a connection: %s", error)
                    await trio.sleep(ACCEPT_SECONDS)
                else:
                    nursery.start_soon(self._serve_stranger, stream)

    async def _serve_stranger(self, stream: trio.SocketStream) -> None:
        found = stream.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, uid, _ = _CREDENTIALS.unpack(found)
        try:
            await self._serve(stream, uid)
        finally:
            self._places.release()

    async def _serve(self, stream: trio.SocketStream, uid: int) -> None:
        """Answer the one request of a user's connection."""
        owner = None if uid in (0, os.geteuid()) else uid  # whose datasets the user may seal
        try:
            async with stream:
                await self._answer(stream, owner)
        except (trio.BrokenResourceError, trio.TooSlowError):
            pass  # the client is gone, or hangs

    async def _answer(self, stream: trio.SocketStream, owner: int | None) -> None:
        try:
            with trio.fail_after(REQUEST_SECONDS):
                request = from_json(await _receive_line(stream), SealRequest)
            answer = await self._handle(stream, request, owner)
        except (DlfsError, OSError, MemoryError) as error:
            answer = SealAnswer(failed_status(error), final=True)
        except (trio.BrokenResourceError, trio.TooSlowError):
            raise
        except Exception:  # noqa: BLE001  a defect in one request must not end the mount
            _log.exception("incoming: a request failed by a defect of the server")
            status = SealStatus(OPEN, "a request failed by a defect of the server; see its log")
            answer = SealAnswer(status, final=True)
        with trio.CancelScope(shield=True):
            await _send(stream, answer)

    async def _handle(
        self, stream: trio.SocketStream, request: SealRequest, owner: int | None
    ) -> SealAnswer:
        sealer = self._sealer
        assert sealer is not None
        if request.action == "list":
            datasets = await trio.to_thread.run_sync(
                sealer.datasets, owner, dict(self._under_way), abandon_on_cancel=True
            )
            return SealAnswer(SealStatus(OPEN), final=True, datasets=tuple(datasets))
        seal = Seal(_name(request), owner, request.options)
        with self._registered(seal, request.action):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_report, stream, seal)
                try:
                    status = await self._in_turn(sealer, seal, request.action)
                finally:
                    nursery.cancel_scope.cancel()
        return SealAnswer(status, final=True)

    async def _in_turn(self, sealer: Sealer, seal: Seal, action: str) -> SealStatus:
        async with self._turn:
            if action == "discard":
                try:
                    await trio.to_thread.run_sync(sealer.discard, seal)
                except (DlfsError, OSError, MemoryError) as error:
                    return failed_status(error)
                self._removed.set()
                return SealStatus(OPEN)
            seal.status = SealStatus(SEALING)
            try:
                status = await trio.to_thread.run_sync(sealer.seal, seal)
            except (DlfsError, OSError, MemoryError) as error:
                status = failed_status(error)
                _log.error("incoming: %r was not sealed: %s", display(seal.name), status.error)
                sealer.note_error(seal.name, status)
            else:
                self._removed.set()
                self.on_sealed()
            return status

    async def _delete_removed(self, area: StagingArea, sealer: Sealer) -> None:
        """Delete what was sealed or discarded."""
        while True:
            self._removed = trio.Event()
            try:
                await trio.to_thread.run_sync(area.delete_removed, sealer.is_ending)
            except OSError as error:
                _log.error("incoming: delete what was sealed: %s", error)
            await self._removed.wait()

    @contextmanager
    def _registered(self, seal: Seal, action: str) -> Iterator[None]:
        if seal.name in self._under_way:
            raise busy(seal.name, action)
        self._under_way[seal.name] = seal
        try:
            yield
        finally:
            del self._under_way[seal.name]


def describe(found: StagedContents) -> str:
    """Describe the contents of a dataset in a message."""
    since = datetime.fromtimestamp(found.since, UTC).isoformat(sep=" ", timespec="seconds")
    return f"{found.files:,} files, {format_bytes(found.file_bytes)}, since {since}"


def _check_writable(volume: Volume) -> None:
    """Check that datasets can be sealed into a volume.

    Raises:
        DlfsError: it cannot be opened for writing.
    """
    try:
        volume.check_writable()
    except DlfsError as error:
        raise same_kind(
            error, f"mount with --incoming, whose datasets are sealed into the volume: {error}"
        ) from error


# ---- tasks ---------------------------------------------------------------------------------------


async def _report(stream: trio.SocketStream, seal: Seal) -> None:
    """Send the client the progress of its seal, until it is gone."""
    try:
        while True:
            await _send(stream, SealAnswer(seal.status, final=False))
            await trio.sleep(REPORT_SECONDS)
    except (trio.BrokenResourceError, trio.TooSlowError):
        pass


async def _end_when_cancelled(sealer: Sealer) -> None:
    try:
        await trio.sleep_forever()
    finally:
        sealer.end()


async def _log_leftovers(area: StagingArea) -> None:
    """Log the datasets that an earlier server left unsealed."""
    try:
        names = area.names()
    except OSError as error:
        _log.warning("incoming: list what is not sealed: %s", error)
        return
    for name in names:
        try:
            found = await trio.to_thread.run_sync(area.contents, name, abandon_on_cancel=True)
        except OSError as error:
            _log.warning("incoming: %r is not sealed: %s", display(name), error)
            continue
        _log.warning("incoming: %r is not sealed: %s", display(name), describe(found))


# ---- frames --------------------------------------------------------------------------------------


async def _send(stream: trio.SocketStream, answer: SealAnswer) -> None:
    with trio.fail_after(REQUEST_SECONDS):
        await stream.send_all(to_json(answer) + b"\n")


def _name(request: SealRequest) -> bytes:
    try:
        return os.fsencode(request.name)
    except UnicodeError as error:
        raise FormatError(f"seal: expected a name, got {request.name!r}") from error


async def _receive_line(stream: trio.SocketStream) -> bytes:
    received = bytearray()
    while not received.endswith(b"\n"):
        more = await stream.receive_some(REQUEST_BYTES_MAX)
        received += more
        if not more or len(received) > REQUEST_BYTES_MAX:
            raise FormatError(f"seal: expected a line of at most {REQUEST_BYTES_MAX} bytes")
    return bytes(received)
