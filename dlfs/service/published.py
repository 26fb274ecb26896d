"""The published sockets of a node service: each is the right to read certain volumes.

A process that can reach a published socket may read its volumes. So whoever publishes one decides
by its directory who that is: a CSI driver binds the directory into one pod. Neither the IDs of
users, which pods choose, nor the PIDs of another namespace matter.

A published socket NAME is ``DIRECTORY/NAME/dlfs.sock``, of mode 666 in a directory of mode 755.
Only the service's user and root enter DIRECTORY itself, so nobody reaches a socket through it; a
bind mount of ``DIRECTORY/NAME`` leads there. ``DIRECTORY/.NAME.json`` records the volumes, so that
the next service listens at the same paths. The directory of a socket stays as long as the socket is
published, so a bind mount of it shows the next service's socket.

One service at a time uses a DIRECTORY: it holds a lock on ``DIRECTORY/.lock``.

Threads: the trio loop.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from uuid import UUID

import trio

from dlfs.base.json_records import from_json, to_json
from dlfs.base.wording import quote
from dlfs.errors import (
    DeviceError,
    DlfsError,
    ExistsError,
    FormatError,
    LimitError,
    NotFoundError,
    UsageError,
)
from dlfs.service.sockets import BACKLOG, PATH_BYTES_MAX, AllowList

SOCKETS_MAX = 1024
"""Most published sockets of a service."""
NOTE_MAX = 256
"""Longest note of a published socket, in characters."""
SOCKET_NAME = "dlfs.sock"
"""Name of each socket in its directory."""
NEW_SOCKET_NAME = ".new"
"""Its name until clients can connect to it."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MODE = 0o666
_RETRY_FIRST_S = 1.0
_RETRY_LONGEST_S = 60.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PublishedVolume:
    """A volume that a socket was published for, and how the next service opens it.

    Attributes:
        uuid: UUID of the volume.
        members: URIs of its members.
        rule: users and groups that may read it at the service's own socket.
        memory_bytes: memory for its samples; None: a share.
        for_sockets: it is detached with the last socket that is published for it.
    """

    uuid: UUID
    members: tuple[str, ...]
    rule: AllowList
    memory_bytes: int | None = None
    for_sockets: bool = False


@dataclass(frozen=True)
class SocketRecord:
    """What is recorded of a published socket.

    Attributes:
        name: name of the socket, unique in the service.
        volumes: the volumes that its clients may read.
        note: text by which its owner knows it, for logs and statistics.
    """

    name: str
    volumes: tuple[PublishedVolume, ...]
    note: str = ""


@dataclass(eq=False)
class _Published:
    """A published socket."""

    record: SocketRecord
    path: str
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    retry: trio.Event = field(default_factory=trio.Event)
    """Set when its volumes are to be tried again at once."""


Handle = Callable[[trio.SocketStream, SocketRecord], Awaitable[None]]
"""Serves a client of a published socket."""
Serve = Callable[[PublishedVolume], Awaitable[None]]
"""Has the service serve a volume, unless it does already; raises a DlfsError if it cannot."""


class PublishedSockets:
    """The published sockets of a service.

    Args:
        directory: absolute path of their directory, made if it is missing; None: the service
            publishes none.

    Raises:
        NotFoundError: the directory's parent does not exist.
        ExistsError: another service uses the directory.
        UsageError: other users may enter the directory, or its path is too long.
        DeviceError: the system refuses.
    """

    def __init__(self, directory: str | None = None) -> None:
        self._directory = directory
        self._sockets: dict[str, _Published] = {}
        self._nursery: trio.Nursery | None = None
        self._handle: Handle | None = None
        self._lock = -1 if directory is None else _prepare(directory)

    def __contains__(self, name: str) -> bool:
        """Return True if a socket of this name is published."""
        return name in self._sockets

    def volumes_of(self, name: str) -> frozenset[UUID]:
        """Return the volumes that clients of a socket may read: none if it is not published."""
        found = self._sockets.get(name)
        return frozenset(v.uuid for v in found.record.volumes) if found else frozenset()

    def names_for(self, volume: UUID) -> list[str]:
        """Return the names of the sockets that are published for a volume."""
        return [name for name in self._sockets if volume in self.volumes_of(name)]

    def statistics(self) -> list[dict[str, object]]:
        """Return name, path, note and volumes of each socket, for JSON. Any thread."""
        return [
            {
                "name": each.record.name,
                "path": each.path,
                "note": each.record.note,
                "volumes": [str(volume.uuid) for volume in each.record.volumes],
            }
            for each in list(self._sockets.values())
        ]

    async def serve(self, handle: Handle, serve: Serve, task_status: trio.TaskStatus[None]) -> None:
        """Listen at the sockets that are recorded, and at those to come, until cancelled.

        A recorded socket whose volumes cannot be opened is tried again and again.

        Args:
            handle: serves a client.
            serve: serves a volume of a record.
            task_status: is told that ``publish`` may be called.
        """
        async with trio.open_nursery() as nursery:
            self._nursery, self._handle = nursery, handle
            for record in self._load():
                published = _Published(record, self._path_of(record.name))
                self._sockets[record.name] = published
                nursery.start_soon(self._run, published, None, serve)
            task_status.started()
            await trio.sleep_forever()

    def publish(self, record: SocketRecord) -> str:
        """Listen at a new socket and return its path; record it for the next service.

        A socket that is published for the same volumes is left as it is.

        Raises:
            UsageError: the service publishes no sockets, or the name or note is malformed.
            ExistsError: a socket of this name is published for other volumes.
            LimitError: there are as many as may be.
            DeviceError: the system refuses.
        """
        self._check(record)
        path = self._path_of(record.name)
        found = self._sockets.get(record.name)
        if found is not None:
            if self.volumes_of(record.name) != {volume.uuid for volume in record.volumes}:
                listed = ", ".join(str(volume.uuid) for volume in found.record.volumes)
                raise ExistsError(
                    f"publish socket {record.name}: it is published for other volumes: {listed}; "
                    "unpublish it first, or use another name"
                )
            found.retry.set()
            return path
        if len(self._sockets) >= SOCKETS_MAX:
            raise LimitError(f"publish socket {record.name}: expected at most {SOCKETS_MAX}")
        published = _Published(record, path)
        try:
            self._write(record)
            listening = _listen(path)
        except OSError as error:
            self._remove_files(record.name)
            raise DeviceError(f"publish socket {path}: {error}", error.errno or 0) from error
        self._sockets[record.name] = published
        assert self._nursery is not None  # requests come only while ``serve`` runs
        self._nursery.start_soon(self._run, published, listening, None)
        _log.info("published %s for %s (%s)", path, _list(record), record.note)
        return path

    def unpublish(self, name: str) -> None:
        """Stop listening at a socket and remove its files and its record.

        Raises:
            NotFoundError: no such socket is published.
        """
        found = self._sockets.pop(name, None)
        if found is None:
            raise NotFoundError(f"unpublish socket {name}: no such socket is published")
        found.scope.cancel()
        self._remove_files(name)
        _log.info("unpublished %s (%s)", found.path, found.record.note)

    def close(self) -> None:
        """Remove the sockets, whose records and directories stay for the next service."""
        for each in self._sockets.values():
            with contextlib.suppress(OSError):
                os.unlink(each.path)
        self._sockets.clear()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    # ---- listening -------------------------------------------------------------------------------

    async def _run(
        self, published: _Published, listening: socket.socket | None, serve: Serve | None
    ) -> None:
        """Accept clients until the socket is unpublished; at first restore a recorded one."""
        handle, nursery = self._handle, self._nursery
        assert handle is not None

        async def handle_client(stream: trio.SocketStream) -> None:
            await handle(stream, published.record)

        with published.scope:
            if listening is None:
                assert serve is not None
                listening = await _restore(published, serve)
            with listening:
                accepting = trio.SocketListener(trio.socket.from_stdlib_socket(listening))
                # Clients outlive this scope: their sessions release what they hold.
                await trio.serve_listeners(handle_client, [accepting], handler_nursery=nursery)

    # ---- records and files -----------------------------------------------------------------------

    def _check(self, record: SocketRecord) -> None:
        if self._directory is None:
            raise UsageError(
                f"publish socket {quote(record.name)}: this service publishes none; start it with "
                "--sockets DIR"
            )
        if not _NAME.fullmatch(record.name):
            raise UsageError(
                f"publish socket {quote(record.name)}: expected a name of 1 to 64 letters, digits, "
                "'.', '_' and '-', that begins with a letter or digit"
            )
        if len(record.note) > NOTE_MAX or not (record.note.isprintable() or not record.note):
            raise UsageError(
                f"publish socket {record.name}: expected a note of at most {NOTE_MAX} printable "
                f"characters, got {len(record.note)}"
            )
        length = len(os.fsencode(self._path_of(record.name)))
        if length > PATH_BYTES_MAX:
            raise UsageError(
                f"publish socket {self._path_of(record.name)}: expected a path of at most "
                f"{PATH_BYTES_MAX} bytes, got {length}"
            )

    def _path_of(self, name: str) -> str:
        return os.path.join(self._directory or "", name, SOCKET_NAME)

    def _record_of(self, name: str) -> str:
        return os.path.join(self._directory or "", f".{name}.json")

    def _load(self) -> Sequence[SocketRecord]:
        """Read the records; one that cannot be read is logged and left alone.

        Directories without a record are removed, which a killed service may have left.
        """
        found = []
        names = set(os.listdir(self._directory) if self._directory else ())
        for name in sorted(names):
            if _NAME.fullmatch(name) and f".{name}.json" not in names:
                self._remove_files(name)
            stem = name.removeprefix(".").removesuffix(".json")
            if name != f".{stem}.json" or not _NAME.fullmatch(stem):
                continue
            path = os.path.join(self._directory or "", name)
            try:
                with open(path, "rb") as file:
                    record = from_json(file.read(), SocketRecord)
                found.append(replace(record, name=stem))
            except (OSError, FormatError) as error:
                _log.warning("the record %s of a published socket is left alone: %s", path, error)
        return found[:SOCKETS_MAX]

    def _write(self, record: SocketRecord) -> None:
        """Write a record: whole or not at all."""
        path = self._record_of(record.name)
        temporary = f"{path}.new"
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(to_json(record))
        os.replace(temporary, path)

    def _remove_files(self, name: str) -> None:
        path = self._path_of(name)
        for file in (path, _new(path), self._record_of(name), f"{self._record_of(name)}.new"):
            with contextlib.suppress(OSError):
                os.unlink(file)
        with contextlib.suppress(OSError):  # its owner has put something else there
            os.rmdir(os.path.dirname(path))


async def _restore(published: _Published, serve: Serve) -> socket.socket:
    """Have the volumes of a record served, and listen; try again as long as that fails."""
    wait_s = _RETRY_FIRST_S
    while True:
        try:
            for volume in published.record.volumes:
                await serve(volume)
            listening = _listen(published.path)
        except (DlfsError, OSError, MemoryError) as error:
            _log.warning("socket %s is not back yet: %s", published.path, error)
        else:
            _log.info("%s is back for %s", published.path, _list(published.record))
            return listening
        with trio.move_on_after(wait_s):
            await published.retry.wait()
        published.retry = trio.Event()
        wait_s = min(2 * wait_s, _RETRY_LONGEST_S)


def _list(record: SocketRecord) -> str:
    return ", ".join(f"volume {volume.uuid}" for volume in record.volumes) or "no volume"


def _prepare(directory: str) -> int:
    """Make the directory of the sockets, and return the descriptor of its lock."""
    folder = os.path.dirname(directory)
    if not os.path.isdir(folder):
        raise NotFoundError(f"publish sockets in {directory}: there is no directory {folder}")
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(directory, 0o700)
        status = os.stat(directory)
        if status.st_mode & 0o077 or status.st_uid not in (0, os.geteuid()):
            raise UsageError(
                f"publish sockets in {directory}: expected a directory of mode 700 of this user, "
                f"got {status.st_mode & 0o777:o} of user {status.st_uid}; who can enter it may "
                "read all volumes that are published"
            )
        lock = os.open(
            os.path.join(directory, ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
    except OSError as error:
        raise DeviceError(f"publish sockets in {directory}: {error}", error.errno or 0) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise ExistsError(f"publish sockets in {directory}: a service uses it already") from error
    return lock


def _new(path: str) -> str:
    return os.path.join(os.path.dirname(path), NEW_SOCKET_NAME)


def _listen(path: str) -> socket.socket:
    """Listen at a path; replace what a service before has left there.

    Raises:
        OSError: the system refuses.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(os.path.dirname(path))
    os.chmod(os.path.dirname(path), 0o755)
    new = _new(path)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(new)
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        made.bind(new)
        os.chmod(new, _MODE)
        made.listen(BACKLOG)
        os.replace(new, path)  # when all clients can connect
    except OSError:
        made.close()
        raise
    return made
