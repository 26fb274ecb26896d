"""The service's socket as a file: where it is, making it, replacing a dead one, who may use it.

A lock beside the socket (``PATH.lock``, ``flock``) says that its service lives: a socket without a
holder of its lock is what a killed service left, and is replaced. A service that ends removes both;
a lock counts only while its file has its name, so two services that start at once cannot each hold
one.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from dlfs.errors import DeviceError, ExistsError, NotFoundError, UsageError
from dlfs.wording import quote

SCHEME = "unix:"
MODE = 0o660
MODE_OPEN = 0o666
"""Where the allow-list names others than the socket's owner and group: it alone decides."""
BACKLOG = 128
PATH_BYTES_MAX = 107
"""sun_path, with its zero byte: unix(7)."""

_CREDENTIALS = struct.Struct("3i")
_SO_PEERGROUPS = 59  # asm-generic/socket.h, since Linux 4.13; Python has no name for it
_SO_PEERPIDFD = 77  # since Linux 6.5
_connections = itertools.count(1)
_GROUPS_BYTES_MAX = 1024  # more, Python does not ask for
_NAME_BYTES_MAX = 64


class _HasOptions(Protocol):
    """A socket, of this library or that."""

    def getsockopt(self, level: int, optname: int, buflen: int, /) -> bytes:
        """As ``socket.getsockopt``."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is at the other end of a connection, as the kernel says.

    Attributes:
        pid: number of its process; 0 if that is in a PID namespace which this process does not see.
        uid: number of its user.
        groups: numbers of its groups.
        process: what tells its process from all others.
    """

    pid: int
    uid: int
    groups: frozenset[int]
    process: str

    def __str__(self) -> str:
        return f"{self.process} of user {self.uid}"


@dataclass(frozen=True, slots=True)
class AllowList:
    """Who may use a service, besides root and the service's own user.

    Attributes:
        users: their numbers.
        groups: their numbers; empty: the socket's group.
    """

    users: frozenset[int] = field(default_factory=frozenset)
    groups: frozenset[int] = field(default_factory=frozenset)

    def allows(self, peer: Peer, socket_group: int) -> bool:
        """Whether a peer may use the service."""
        groups = self.groups or {socket_group}
        return peer.uid in {0, os.geteuid(), *self.users} or not groups.isdisjoint(peer.groups)


def user_number(name: str) -> int:
    """The number of a user, given by name or number.

    Raises:
        NotFoundError: there is no such user.
    """
    if name.isdecimal():
        return int(name)
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError as error:
        raise NotFoundError(f"allow user {name!r}: there is no such user") from error


def group_number(name: str) -> int:
    """The number of a group, given by name or number.

    Raises:
        NotFoundError: there is no such group.
    """
    if name.isdecimal():
        return int(name)
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError as error:
        raise NotFoundError(f"allow group {name!r}: there is no such group") from error


def peer_of(connection: _HasOptions) -> Peer:
    """Who is at the other end."""
    level = socket.SOL_SOCKET
    raw = connection.getsockopt(level, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(raw)
    others = b""
    with contextlib.suppress(OSError):  # an old kernel, or more groups than fit
        others = connection.getsockopt(level, _SO_PEERGROUPS, _GROUPS_BYTES_MAX)
    process = f"process {pid}" if pid else _name_hidden(connection)
    return Peer(pid, uid, frozenset({gid, *memoryview(others).cast("I")}), process)


def _name_hidden(connection: _HasOptions) -> str:
    """Name a process of another PID namespace: by its pidfd, or as the peer of this connection.

    The pidfds of one process have an inode of their own since Linux 6.9. Where they have not, each
    connection counts as a process.
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


# ---- where ---------------------------------------------------------------------------------------


def default_path(label: str) -> str:
    """Where a service listens by default: ``/run/dlfs/LABEL.sock``; others than root have theirs.

    Args:
        label: of the volume, or what stands for it.

    Raises:
        UsageError: this user has no directory for sockets.
    """
    name = "".join(c if c.isalnum() or c in "-_." else "_" for c in label)[:_NAME_BYTES_MAX]
    root = "/run" if os.geteuid() == 0 else os.environ.get("XDG_RUNTIME_DIR")
    if not root:
        raise UsageError("choose a socket: expected XDG_RUNTIME_DIR to be set; name one: --socket")
    return str(Path(root) / "dlfs" / f"{name.lstrip('.') or 'volume'}.sock")


def path_of(uri: str) -> str:
    """The path in ``unix:PATH``.

    Raises:
        UsageError: it is no such URI.
    """
    path = uri.removeprefix(SCHEME)
    if not uri.startswith(SCHEME) or not path or "\0" in path:
        hint = f"; did you mean {quote(SCHEME + uri)}?" if uri and ":" not in uri else ""
        raise UsageError(f"connect to {quote(uri)}: expected unix:/PATH/OF/SOCKET{hint}")
    return path


# ---- listening -----------------------------------------------------------------------------------


@dataclass(eq=False)
class Listener:
    """A listening socket, and how to leave nothing of it behind.

    Attributes:
        socket: it.
        path: of it.
        group: of it.
    """

    socket: socket.socket
    path: str
    group: int
    lock: int = -1

    def close(self) -> None:
        """Close it; one of ours is removed first."""
        if self.lock >= 0:
            for path in (self.path, _lock_path(self.path)):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
            os.close(self.lock)
        self.lock = -1
        self.socket.close()


def adopt(found: socket.socket) -> Listener:
    """A listening socket of somebody else's making (systemd), who also removes it.

    Raises:
        UsageError: it has no file that clients could connect to.
    """
    path = os.fsdecode(found.getsockname())
    try:
        return Listener(found, path, os.stat(path).st_gid)
    except (OSError, ValueError) as error:  # ValueError: an abstract name begins with a zero byte
        raise UsageError(
            f"listen on {path!r}: expected a socket with a path, as ListenStream=/run/... gives it"
        ) from error


def listen(path: str, allow: AllowList, *, make_directory: bool = False) -> Listener:
    """Make a socket and listen on it; what a dead service left there is replaced.

    Args:
        path: of the socket.
        allow: decides on group and mode.
        make_directory: make the socket's directory if it is missing, for every user to enter.

    Raises:
        NotFoundError: the socket's directory does not exist.
        ExistsError: a service listens there, or there is something else.
        UsageError: the path is too long.
        DeviceError: the system refuses.
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
        _clear(path)
        return Listener(made, path, _bind(made, path, allow), lock)
    except OSError as error:
        made.close()
        if lock >= 0:
            os.close(lock)
        if isinstance(error, ExistsError):
            raise
        raise DeviceError(f"listen on {path}: {error}", error.errno or errno.EIO) from error


def _lock(path: str) -> int:
    """Hold the lock of a socket.

    Raises:
        ExistsError: a service holds it.
        OSError: it cannot be made.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    while True:
        lock = os.open(_lock_path(path), flags, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(lock)
            raise ExistsError(f"listen on {path}: a service listens there already") from error
        if os.fstat(lock).st_nlink:
            return lock
        os.close(lock)  # of a service that has just ended


def _lock_path(path: str) -> str:
    return f"{path}.lock"


def _clear(path: str) -> None:
    """Remove the socket of a dead service.

    Raises:
        ExistsError: something else is there, or somebody else listens.
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
    raise ExistsError(f"listen on {path}: somebody listens there already")


def _bind(made: socket.socket, path: str, allow: AllowList) -> int:
    """Give a socket its path, group and mode, and listen. Returns the group.

    Nobody can connect before it listens, so mode and group are right by then.
    """
    made.bind(path)
    try:
        groups = allow.groups
        if len(groups) == 1:
            os.chown(path, -1, next(iter(groups)))
        strangers = allow.users - {0, os.geteuid()}
        os.chmod(path, MODE_OPEN if strangers or len(groups) > 1 else MODE)
        made.listen(BACKLOG)
        return os.stat(path).st_gid
    except OSError:
        os.unlink(path)
        raise
