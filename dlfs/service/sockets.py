"""The service's socket: its path, how it is created, and which users may connect.

A service holds a lock next to its socket (``PATH.lock``, ``flock``) while it runs, and writes into
that file which process it is and where it mounts (``ServiceRecord``). A socket whose lock is free
was left by a killed service, and a new service replaces it. A service that ends removes socket and
lock file. A lock counts only while its file still has its name, so two services
that start at the same time cannot both hold the lock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import grp
import itertools
import os
import pwd
import socket
import stat
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from dlfs.base.json_records import to_json
from dlfs.base.wording import quote
from dlfs.errors import DeviceError, ExistsError, NotFoundError, UsageError

SCHEME = "unix:"
MODE = 0o660
MODE_OPEN = 0o666
"""Mode of the socket if the allow-list names users or groups beyond the socket's own: then the
allow-list alone decides."""
BACKLOG = 128
PATH_BYTES_MAX = 107
"""Longest path of a socket in bytes: the size of sun_path less its zero byte, unix(7)."""

_CREDENTIALS = struct.Struct("3i")
_SO_PEERGROUPS = 59  # asm-generic/socket.h, since Linux 4.13; Python has no name for it
_SO_PEERPIDFD = 77  # since Linux 6.5
_connections = itertools.count(1)
_GROUPS_BYTES_MAX = 1024  # the most that Python's getsockopt returns
_NAME_BYTES_MAX = 64


class _HasOptions(Protocol):
    """A socket of the standard library or of trio."""

    def getsockopt(self, level: int, optname: int, buflen: int, /) -> bytes:
        """Return a socket option, like ``socket.getsockopt``."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Process and user at the other end of a connection, as the kernel reports them.

    Attributes:
        pid: process ID; 0 if the process is in a PID namespace that this process does not see.
        uid: user ID.
        groups: group IDs.
        process: unique name of the process.
        entrance: name of the published socket that it came through; empty for the service's own
            socket.
        note: text by which the published socket's owner knows it, such as a pod's name.
    """

    pid: int
    uid: int
    groups: frozenset[int]
    process: str
    entrance: str = ""
    note: str = ""

    @property
    def account(self) -> int | str:
        """The user whose limits apply: the published socket, whatever users are behind it."""
        return f"socket {self.entrance}" if self.entrance else self.uid

    @property
    def user(self) -> str:
        """The user in words, for messages."""
        if not self.entrance:
            return f"user {self.uid}"
        return f"user {self.uid} behind socket {self.entrance}" + (
            f" ({self.note})" if self.note else ""
        )

    def __str__(self) -> str:
        return f"{self.process} of {self.user}"


@dataclass(frozen=True, slots=True)
class AllowList:
    """Users and groups that may use a service, or read one of its volumes.

    Root and the service's own user may as well.

    Attributes:
        users: user IDs.
        groups: group IDs.
    """

    users: frozenset[int] = field(default_factory=frozenset)
    groups: frozenset[int] = field(default_factory=frozenset)

    def allows(self, peer: Peer, socket_group: int | None = None) -> bool:
        """Return True if a peer may.

        Args:
            peer: the process.
            socket_group: group that may if the list names none: the group of the socket.
        """
        groups = self.groups or ({socket_group} if socket_group is not None else set())
        return peer.uid in {0, os.geteuid(), *self.users} or not groups.isdisjoint(peer.groups)

    @property
    def names_others(self) -> bool:
        """Return True if it names anyone but root and the service's own user."""
        return bool(self.groups or self.users - {0, os.geteuid()})


def parse_allow_list(text: str) -> AllowList:
    """Read ``user:NAME`` and ``group:NAME``, joined by commas; names or IDs.

    Raises:
        UsageError: the text has another form.
        NotFoundError: there is no such user or group.
    """
    users, groups = set(), set()
    for each in text.split(","):
        kind, _, name = each.strip().partition(":")
        if kind not in ("user", "group") or not name:
            raise UsageError(f"allow {quote(text)}: expected user:NAME or group:NAME, with commas")
        if kind == "user":
            users.add(user_number(name))
        else:
            groups.add(group_number(name))
    return AllowList(frozenset(users), frozenset(groups))


def user_number(name: str) -> int:
    """Return the ID of a user, given by name or ID.

    Raises:
        NotFoundError: there is no such user.
    """
    return _number("user", name, lambda: pwd.getpwnam(name).pw_uid)


def group_number(name: str) -> int:
    """Return the ID of a group; raises as ``user_number``."""
    return _number("group", name, lambda: grp.getgrnam(name).gr_gid)


def _number(kind: str, name: str, look_up: Callable[[], int]) -> int:
    if name.isdecimal():
        return int(name)
    try:
        return look_up()
    except KeyError as error:
        raise NotFoundError(f"allow {kind} {name!r}: there is no such {kind}") from error


def peer_of(connection: _HasOptions) -> Peer:
    """Return process and user at the other end of a connection."""
    level = socket.SOL_SOCKET
    raw = connection.getsockopt(level, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(raw)
    others = b""
    with contextlib.suppress(OSError):  # an old kernel, or more groups than fit
        others = connection.getsockopt(level, _SO_PEERGROUPS, _GROUPS_BYTES_MAX)
    process = f"process {pid}" if pid else _name_hidden(connection)
    return Peer(pid, uid, frozenset({gid, *memoryview(others).cast("I")}), process)


def _name_hidden(connection: _HasOptions) -> str:
    """Name a process of another PID namespace by its pidfd, or else by its connection.

    Since Linux 6.9, all pidfds of one process share an inode that no other process has. On older
    kernels, each connection counts as a process.
    """
    with contextlib.suppress(OSError, struct.error):
        (pidfd,) = struct.unpack("i", connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, 4))
        try:
            name = os.readlink(f"/proc/self/fd/{pidfd}")
        finally:
            os.close(pidfd)
        if name.startswith("pidfd:"):
            return f"process {name}"
    return f"a process behind connection {next(_connections)}"


# ---- paths ---------------------------------------------------------------------------------------


def default_path(label: str) -> str:
    """Return the default path of a service's socket.

    It is ``/run/dlfs/LABEL.sock`` for root and ``$XDG_RUNTIME_DIR/dlfs/LABEL.sock`` for others.

    Args:
        label: label of the volume, or its UUID if it has none.

    Raises:
        UsageError: the user is not root, and XDG_RUNTIME_DIR is not set.
    """
    name = "".join(c if c.isalnum() or c in "-_." else "_" for c in label)[:_NAME_BYTES_MAX]
    root = "/run" if os.geteuid() == 0 else os.environ.get("XDG_RUNTIME_DIR")
    if not root:
        raise UsageError("choose a socket: expected XDG_RUNTIME_DIR to be set; name one: --socket")
    return str(Path(root) / "dlfs" / f"{name.lstrip('.') or 'volume'}.sock")


def path_of(uri: str) -> str:
    """Return the path in ``unix:PATH``.

    Raises:
        UsageError: the URI has another form.
    """
    path = uri.removeprefix(SCHEME)
    if not uri.startswith(SCHEME) or not path or "\0" in path:
        hint = f"; did you mean {quote(SCHEME + uri)}?" if uri and ":" not in uri else ""
        raise UsageError(f"connect to {quote(uri)}: expected unix:/PATH/OF/SOCKET{hint}")
    return path


@dataclass(frozen=True, slots=True)
class ServiceRecord:
    """What a service's lock file says of it.

    Attributes:
        pid: process ID, in the PID namespace of the service.
        pid_namespace: number of that namespace.
        mount: absolute path of its mount; None if it has none.
    """

    pid: int
    pid_namespace: int
    mount: str | None


def own_pid_namespace() -> int:
    """Return the number of this process's PID namespace."""
    return os.stat("/proc/self/ns/pid").st_ino


# ---- listening -----------------------------------------------------------------------------------


@dataclass(eq=False)
class Listener:
    """A listening socket and its files.

    Attributes:
        socket: the listening socket.
        path: path of the socket.
        group: group ID of the socket's file.
        lock: descriptor of the locked lock file; -1 if systemd created the socket.
    """

    socket: socket.socket
    path: str
    group: int
    lock: int = -1

    def let_in(self, rule: AllowList | None) -> None:
        """Let the users that a volume's rule names connect; the service then refuses all others.

        The mode of a socket that systemd created is left as it is.
        """
        if self.lock >= 0 and rule is not None and rule.names_others:
            os.chmod(self.path, MODE_OPEN)

    def close(self) -> None:
        """Close the socket; remove its files first, unless systemd created it."""
        if self.lock >= 0:
            for path in (self.path, lock_path(self.path)):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
            os.close(self.lock)
        self.lock = -1
        self.socket.close()


def adopt(found: socket.socket) -> Listener:
    """Return a listener for a socket that systemd created and will remove.

    Raises:
        UsageError: the socket has no file that clients could connect to.
    """
    path = os.fsdecode(found.getsockname())
    try:
        return Listener(found, path, os.stat(path).st_gid)
    except (OSError, ValueError) as error:  # ValueError: an abstract name begins with a zero byte
        raise UsageError(
            f"listen on {path!r}: expected a socket with a path, as ListenStream=/run/... gives it"
        ) from error


def listen(
    path: str, allow: AllowList, *, make_directory: bool = False, mount: str | None = None
) -> Listener:
    """Create a socket and listen on it; replace the socket of a dead service.

    Args:
        path: path of the socket.
        allow: allow-list that determines the socket's group and mode.
        make_directory: create the socket's directory if it is missing, open to every user.
        mount: where the service mounts, for its record.

    Raises:
        NotFoundError: the socket's directory does not exist.
        ExistsError: a service listens on the path, or the path is another file.
        UsageError: the path is too long.
        DeviceError: the system cannot create the socket.
    """
    if len(os.fsencode(path)) > PATH_BYTES_MAX:
        raise UsageError(
            f"listen on {path}: expected at most {PATH_BYTES_MAX} bytes, "
            f"got {len(os.fsencode(path))}"
        )
    folder = os.path.dirname(os.path.abspath(path))
    if not make_directory and not os.path.isdir(folder):
        raise NotFoundError(
            f"listen on {path}: expected an existing directory, got {folder}, which is none; make "
            "it first, or name another socket"
        )
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    lock = -1
    try:
        if make_directory:
            os.makedirs(folder, mode=0o755, exist_ok=True)
        lock = _lock(path)
        clear(path)
        record = ServiceRecord(os.getpid(), own_pid_namespace(), mount)
        os.ftruncate(lock, 0)
        os.pwrite(lock, to_json(record), 0)
        return Listener(made, path, _bind(made, path, allow), lock)
    except OSError as error:
        made.close()
        if lock >= 0:
            os.close(lock)
        if isinstance(error, ExistsError):
            raise
        raise DeviceError(f"listen on {path}: {error}", error.errno or errno.EIO) from error


def _lock(path: str) -> int:
    """Take the lock of a socket and return its descriptor.

    Raises:
        ExistsError: a service holds the lock.
        OSError: the lock file cannot be created.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    while True:
        lock = os.open(lock_path(path), flags, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(lock)
            raise ExistsError(f"listen on {path}: a service listens there already") from error
        if os.fstat(lock).st_nlink:
            return lock
        os.close(lock)  # the previous service has just removed this file


def lock_path(path: str) -> str:
    """Return the path of the lock file of a socket."""
    return f"{path}.lock"


def clear(path: str) -> None:
    """Remove the socket of a dead service.

    Raises:
        ExistsError: the path is another file, or a process listens on the socket.
    """
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(status.st_mode):
        raise ExistsError(f"listen on {path}: expected nothing or a dead socket there")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as trial:
        try:
            trial.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
    raise ExistsError(f"listen on {path}: another process listens there already")


def _bind(made: socket.socket, path: str, allow: AllowList) -> int:
    """Bind a socket to its path, set group and mode, listen, and return the group.

    Clients cannot connect before the socket listens, so group and mode are set in time.
    """
    made.bind(path)
    try:
        if len(allow.groups) == 1:
            os.chown(path, -1, next(iter(allow.groups)))
        other_users = allow.users - {0, os.geteuid()}
        os.chmod(path, MODE_OPEN if other_users or len(allow.groups) > 1 else MODE)
        made.listen(BACKLOG)
        return os.stat(path).st_gid
    except OSError:
        os.unlink(path)
        raise
