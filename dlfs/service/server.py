"""The sample server: accepts clients on a Unix socket and serves each in a task of its own.

Who connects is asked of the kernel (SO_PEERCRED, SO_PEERGROUPS) and checked against an allow-list
before anything of it is read. What a client does wrong, or a fault that its request uncovers, ends
its session and no other.

Threads: one, the trio loop.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Sequence
from typing import Any

import trio

import dlfs
from dlfs.errors import DeviceError, LimitError
from dlfs.service.dataset_cache import ServedVolume, Shelf
from dlfs.service.protocol import encode, failure_of
from dlfs.service.session import Common, Session
from dlfs.service.sockets import AllowList, Listener, Peer, peer_of

CLIENTS_MAX = 1024
"""Connections at once."""
CLIENTS_OF_PROCESS_MAX = 128
"""Of those, of one process: one for each volume and dataset that it has open."""
CLIENTS_OF_USER_MAX = 896
"""Of those, of one user."""

_log = logging.getLogger(__name__)


class SampleServer:
    """Serves volumes to the processes of this node.

    Args:
        volumes: to serve.
        shelf: with their open datasets.
        allow: who may use the service.
    """

    def __init__(self, volumes: Sequence[ServedVolume], shelf: Shelf, allow: AllowList) -> None:
        self._shelf = shelf
        self._allow = allow
        self._sessions: dict[Session, None] = {}  # the oldest first
        self._started_at_s = time.monotonic()
        self._common = Common({volume.uuid: volume for volume in volumes}, self.snapshot)

    async def serve(self, listener: Listener) -> None:
        """Accept clients until cancelled; what each has stays then: see ``Session``."""
        accepting = trio.SocketListener(trio.socket.from_stdlib_socket(listener.socket.dup()))

        async def handle(stream: trio.SocketStream) -> None:
            await self._serve_client(stream, listener.group)

        await trio.serve_listeners(handle, [accepting])

    def snapshot(self) -> dict[str, Any]:
        """The figures of the service, its clients and its open datasets; from any thread.

        Returns:
            Plain values, for JSON: ``version``, ``pid``, ``uptime_s``; ``clients``, a list with
            ``pid``, ``uid``, ``datasets``, ``channels`` and sums of the channels' counters;
            ``datasets``, a list with ``users``, ``cache_bytes``, the ``reader``'s counters and
            those of each of its ``members``.
        """
        clients = [session.figures() for session in list(self._sessions)]
        return {
            "version": dlfs.__version__,
            "pid": os.getpid(),
            "uptime_s": time.monotonic() - self._started_at_s,
            "volumes": [
                {"uuid": str(volume.uuid), "label": volume.label}
                for volume in self._common.volumes.values()
            ],
            "clients": clients,
            "datasets": self._shelf.figures(),
        }

    async def _serve_client(self, stream: trio.SocketStream, group: int) -> None:
        try:
            peer = peer_of(stream.socket)
            refusal = self._refusal(peer, group)
            if refusal is not None:
                _log.warning("refused %s: %s", peer, refusal)
                async with stream:
                    with trio.move_on_after(1.0):
                        await stream.send_all(encode(failure_of(refusal)))
                return
        except (trio.BrokenResourceError, OSError):
            return
        session = Session(self._common, stream, peer)
        self._sessions[session] = None
        try:
            await session.run()
        except Exception:  # noqa: BLE001  a bug that one client meets must not end all others
            _log.exception("serving %s", peer)
        del self._sessions[session]  # but not when cancelled: see Session

    def _refusal(self, peer: Peer, group: int) -> DeviceError | LimitError | None:
        """Why a peer is not served; None: it is."""
        if not self._allow.allows(peer, group):
            return DeviceError(
                f"use the service: user {peer.uid} may not; 'dlfs serve --allow-user NAME' or "
                "--allow-group lets a user in",
                errno.EACCES,
            )
        own = sum(session.peer.process == peer.process for session in self._sessions)
        users = sum(session.peer.uid == peer.uid for session in self._sessions)
        for count, limit, whose in (
            (len(self._sessions), CLIENTS_MAX, "in all"),
            (own, CLIENTS_OF_PROCESS_MAX, "of one process"),
            (users, CLIENTS_OF_USER_MAX, "of one user"),
        ):
            if count >= limit:
                return LimitError(f"use the service: expected at most {limit} connections {whose}")
        return None
