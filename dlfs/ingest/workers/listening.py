"""``Listener``: where workers join an import; it admits those that prove who they are.

Over the UNIX socket the kernel says which process connects: it must be of this user, and visible to
this process, which holds it by a pidfd and so can kill it. Over TCP a worker must send the secret
of the import, by TLS.

A stranger costs one descriptor and a short buffer, for ``HANDSHAKE_S`` at most; there are no more
than ``STRANGERS_MAX`` at a time.

Threads: one.
"""

from __future__ import annotations

import logging
import os
import secrets
import select
import socket
import struct
from dataclasses import dataclass

from dlfs._native.handle import Descriptor
from dlfs.base.closing import closed_on_error
from dlfs.errors import DeviceError, DlfsError, UsageError
from dlfs.ingest.workers.connection import Connection
from dlfs.ingest.workers.invitation import Credentials, Invitation
from dlfs.ingest.workers.messages import AnyMessage, Hello, from_worker

HANDSHAKE_S = 10.0
"""Time in which a peer must have proved who it is, in seconds."""
STRANGERS_MAX = 64
"""Most peers at a time that have not."""
BACKLOG = 128

_CREDENTIALS = struct.Struct("3i")
_NAME_BYTES = 16
_log = logging.getLogger("dlfs")


@dataclass(eq=False)
class Peer:
    """The other side of a connection.

    Attributes:
        connection: the connection.
        process: pidfd of the process; None over TCP.
        until_s: time by which it must have proved who it is.
    """

    connection: Connection
    process: Descriptor | None
    until_s: float

    def close(self) -> None:
        """Close the connection, and release the process."""
        self.connection.close()
        if self.process is not None:
            self.process.close()


class Listener:
    """A listening socket. A context manager, which closes it.

    Args:
        host: address to listen at by TCP; None for a UNIX socket.
        port: TCP port; 0 for any that is free.
        shown: name of this host for workers elsewhere; by default the address.

    Attributes:
        invitation: what workers need to join.

    Raises:
        DeviceError: the system refuses the address.
        NativeError: this DLFS was built without OpenSSL, and ``host`` is given.
    """

    def __init__(self, host: str | None = None, port: int = 0, shown: str | None = None) -> None:
        self._credentials = None if host is None else Credentials.make()
        try:
            if host is None:
                self._socket = socket.socket(socket.AF_UNIX)
            else:
                family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
                self._socket = socket.socket(family)
            with closed_on_error(self):
                self.invitation = self._listen(host, port, shown)
        except OSError as error:
            raise DeviceError(
                f"listen for workers at {host or 'a UNIX socket'}: {error.strerror or error}",
                error.errno or 0,
            ) from error

    def _listen(self, host: str | None, port: int, shown: str | None) -> Invitation:
        self._socket.setblocking(False)
        if host is None or self._credentials is None:
            name = f"dlfs-import-{secrets.token_hex(_NAME_BYTES)}"
            self._socket.bind(f"\0{name}")
            found = Invitation(name)
        else:
            self._socket.bind((host, port))
            found = self._credentials.invite(shown or host, self._socket.getsockname()[1])
        self._socket.listen(BACKLOG)
        return found

    def fileno(self) -> int:
        """Return the descriptor of the socket."""
        return self._socket.fileno()

    def accept(self, now_s: float) -> Peer | None:
        """Return the next peer that connects; None if there is none, or it may not join."""
        try:
            connected, _ = self._socket.accept()
        except OSError:  # nothing there, it has gone, or no descriptor is left
            return None
        try:
            with closed_on_error(connected):
                return self._take(connected, now_s)
        except (DlfsError, OSError) as error:
            _log.warning("import: a worker was not admitted: %s", error)
            return None

    def _take(self, connected: socket.socket, now_s: float) -> Peer:
        context = None if self._credentials is None else self._credentials.context
        process = None if self._credentials is not None else _process_of(connected)
        made = Connection(connected, from_worker, context=context, is_server=True)
        return Peer(made, process, now_s + HANDSHAKE_S)

    def admit(self, peer: Peer, message: AnyMessage) -> Hello:
        """Admit a peer by its first message.

        Raises:
            UsageError: it does not prove that it may join.
        """
        if not isinstance(message, Hello):
            raise UsageError(f"join an import: expected Hello, got {type(message).__name__}")
        if self._credentials is not None and not self._credentials.proves(message.secret):
            raise UsageError("join an import: expected the secret of this import, got another one")
        peer.connection.admit()
        return message

    def close(self) -> None:
        """Close the socket; closing it again does nothing."""
        self._socket.close()

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


def _process_of(connected: socket.socket) -> Descriptor:
    """Return a pidfd of the process at the other end of a UNIX socket.

    Raises:
        UsageError: it is of another user, or in a PID namespace that this process does not see.
        OSError: it has ended.
    """
    raw = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _gid = _CREDENTIALS.unpack(raw)
    if uid != os.geteuid():
        raise UsageError(f"join an import: expected a process of user {os.geteuid()}, got {uid}")
    if not pid:
        raise UsageError("join an import: expected a process of this PID namespace, got another")
    process = Descriptor()
    process.fill(os.pidfd_open, pid)
    # A process that has ended has closed its socket before its ID could name another one.
    poll = select.poll()
    poll.register(connected, 0)
    if any(events & (select.POLLHUP | select.POLLERR) for _, events in poll.poll(0)):
        raise UsageError("join an import: the process has ended")
    return process
