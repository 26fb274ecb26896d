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
from typing import Any

from dlfs._native.handle import Descriptor
from dlfs.base.closing import closed_on_error
from dlfs.base.units import format_count
from dlfs.errors import DeviceError, DlfsError, UsageError
from dlfs.ingest.workers.connection import Connection
from dlfs.ingest.workers.invitation import (
    Credentials,
    Invitation,
    abstract_address,
    boot_id,
)
from dlfs.ingest.workers.messages import AnyMessage, Hello, from_worker

HANDSHAKE_S = 10.0
"""Time in which a peer must have proved who it is, in seconds."""
STRANGERS_MAX = 64
"""Most peers at a time that have not."""
BACKLOG = 128
REFUSAL_NOTE_S = 10.0
"""Least time between two log messages of peers that were not admitted, in seconds."""

_CREDENTIALS = struct.Struct("3i")
_NAME_BYTES = 16
_log = logging.getLogger("dlfs")


@dataclass(eq=False)
class Peer:
    """The other side of a connection.

    Attributes:
        connection: the connection.
        process: pidfd of the process; None over TCP, or if it is in a PID namespace that this
            process does not see.
        until_s: time by which it must have proved who it is.
        is_proved: True if the kernel has said who it is.
    """

    connection: Connection
    process: Descriptor | None
    until_s: float
    is_proved: bool

    def close(self) -> None:
        """Close the connection, and release the process."""
        self.connection.close()
        if self.process is not None:
            self.process.close()


class Listener:
    """The listening sockets of an import. A context manager, which closes them.

    Args:
        host: address to listen at by TCP for workers elsewhere; None for this host only.
        port: TCP port; 0 for any that is free.
        shown: name of this host for workers elsewhere; by default the address.

    Attributes:
        sockets: the sockets.
        invitation: what workers need to join.

    Raises:
        DeviceError: the system refuses the address.
        NativeError: this DLFS was built without OpenSSL, and ``host`` is given.
    """

    def __init__(self, host: str | None = None, port: int = 0, shown: str | None = None) -> None:
        self._credentials = None if host is None else Credentials.make()
        self.sockets: list[socket.socket] = []
        self._noted_s: float | None = None
        self._unnoted = 0  # refusals since then
        with closed_on_error(self):
            name = f"dlfs-import-{secrets.token_hex(_NAME_BYTES)}"
            self._listen(socket.AF_UNIX, abstract_address(name), "a UNIX socket")
            self.invitation = Invitation(name, boot_id())
            if host is not None and self._credentials is not None:
                number = self._listen_by_tcp(host, port)
                secret = self._credentials.secret.hex()
                fingerprint = self._credentials.fingerprint
                self.invitation = Invitation(
                    name, boot_id(), shown or host, number, fingerprint, secret
                )

    def _listen_by_tcp(self, host: str, port: int) -> int:
        """Listen at an address; return the port."""
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise DeviceError(
                f"listen for workers at {host}: {error.strerror}", error.errno or 0
            ) from error
        family, _, _, _, address = found[0]
        self._listen(family, address, f"{host}:{port}" if port else host)
        return int(self.sockets[-1].getsockname()[1])

    def _listen(self, family: int, address: Any, shown: str) -> None:
        made = socket.socket(family)
        self.sockets.append(made)
        made.setblocking(False)
        if family != socket.AF_UNIX:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # that of a killed one
        try:
            made.bind(address)
            made.listen(BACKLOG)
        except OSError as error:
            raise DeviceError(
                f"listen for workers at {shown}: {error.strerror}", error.errno or 0
            ) from error

    def accept(self, listening: socket.socket, now_s: float) -> Peer | None:
        """Return the next peer that connects; None if there is none, or it may not join.

        Args:
            listening: one of ``sockets``.
            now_s: the time.
        """
        try:
            connected, _ = listening.accept()
        except OSError:  # nothing there, it has gone, or no descriptor is left
            return None
        try:
            with closed_on_error(connected):
                return self._take(connected, now_s)
        except (DlfsError, OSError) as error:
            self.note_refusal(error, now_s)
            return None

    def note_refusal(self, error: Exception, now_s: float) -> None:
        """Log why a peer was not admitted; any process can connect, so not too often.

        Args:
            error: the reason.
            now_s: the time.
        """
        if self._noted_s is not None and now_s < self._noted_s + REFUSAL_NOTE_S:
            self._unnoted += 1
            return
        others = f" ({format_count(self._unnoted, 'other')} not logged)" if self._unnoted else ""
        self._noted_s, self._unnoted = now_s, 0
        _log.warning("import: a worker was not admitted: %s%s", error, others)

    def _take(self, connected: socket.socket, now_s: float) -> Peer:
        until_s = now_s + HANDSHAKE_S
        if connected.family == socket.AF_UNIX:
            process = _process_of(connected)
            made = Connection(connected, from_worker, is_server=True)
            return Peer(made, process, until_s, is_proved=True)
        assert self._credentials is not None
        context = self._credentials.context
        made = Connection(connected, from_worker, context=context, is_server=True)
        return Peer(made, None, until_s, is_proved=False)

    def admit(self, peer: Peer, message: AnyMessage) -> Hello:
        """Admit a peer by its first message.

        Raises:
            UsageError: it does not prove that it may join.
        """
        if not isinstance(message, Hello):
            raise UsageError(f"join an import: expected Hello, got {type(message).__name__}")
        known = self._credentials
        if not peer.is_proved and (known is None or not known.proves(message.secret)):
            raise UsageError("join an import: expected the secret of this import, got another one")
        peer.connection.admit()
        return message

    def close(self) -> None:
        """Close the sockets; closing them again does nothing."""
        for each in self.sockets:
            each.close()

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


def _process_of(connected: socket.socket) -> Descriptor | None:
    """Return a pidfd of the process at the other end of a UNIX socket.

    Returns:
        The pidfd; None if the process is in a PID namespace that this one does not see.

    Raises:
        UsageError: it is of another user, or has ended.
        OSError: it has ended.
    """
    raw = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _gid = _CREDENTIALS.unpack(raw)
    if uid != os.geteuid():
        raise UsageError(f"join an import: expected a process of user {os.geteuid()}, got {uid}")
    if not pid:
        return None
    process = Descriptor()
    process.fill(os.pidfd_open, pid)
    # A process that has ended has closed its socket before its ID could name another one.
    poll = select.poll()
    poll.register(connected, 0)
    if any(events & (select.POLLHUP | select.POLLERR) for _, events in poll.poll(0)):
        raise UsageError("join an import: the process has ended")
    return process
