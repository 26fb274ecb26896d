"""The sample server: accepts clients on a Unix socket and serves each in a separate task.

The kernel names the process, user and groups of each client (SO_PEERCRED, SO_PEERGROUPS). The
server checks them against an allow-list before it reads anything from the client. An error of a
client, or a bug that its request uncovers, ends that client's session and no other.

Threads: one, the trio loop.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from typing import Any
from uuid import UUID

import trio

import dlfs
from dlfs.errors import DeviceError, LimitError
from dlfs.service.dataset_cache import DatasetCache, ServedVolume
from dlfs.service.protocol import encode, failure_of
from dlfs.service.session import Session
from dlfs.service.sockets import AllowList, Listener, Peer, peer_of
from dlfs.service.state import Attachments, ServerState

CLIENTS_MAX = 1024
"""Most connections at a time."""
CLIENTS_OF_PROCESS_MAX = 128
"""Most connections of one process, which needs one for each volume and dataset that it has open."""
CLIENTS_OF_USER_MAX = 896
"""Most connections of one user."""

_log = logging.getLogger(__name__)


class SampleServer:
    """Serves volumes to the processes of this node.

    Args:
        volumes: the volumes to serve, by UUID; the caller may change them.
        cache: the cache of their open datasets.
        allow: users and groups that may use the service.
        attachments: attaches and detaches volumes for clients.
    """

    def __init__(
        self,
        volumes: dict[UUID, ServedVolume],
        cache: DatasetCache,
        allow: AllowList,
        attachments: Attachments,
    ) -> None:
        self._cache = cache
        self._allow = allow
        self._sessions: dict[Session, None] = {}  # a set in order of connection
        self._started_at_s = time.monotonic()
        self._state = ServerState(volumes, self.snapshot, attachments)

    async def serve(self, listener: Listener) -> None:
        """Accept clients until cancelled. Sessions then release nothing: see ``Session``."""
        accepting = trio.SocketListener(trio.socket.from_stdlib_socket(listener.socket.dup()))

        async def handle(stream: trio.SocketStream) -> None:
            await self._serve_client(stream, listener.group)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._state.wait_for_end)
            nursery.start_soon(self._state.keep_current)
            nursery.start_soon(self._state.close_revoked)
            await trio.serve_listeners(handle, [accepting])

    def snapshot(self) -> dict[str, Any]:
        """Return the counters of the service, its clients and its open datasets. Any thread.

        Returns:
            Plain values for JSON: ``version``, ``pid``, ``uptime_s``; ``volumes``, a list with
            ``uuid`` and ``label``; ``clients``, a list with ``pid``, ``uid``, ``datasets``,
            ``channels`` and sums of the channels' counters; ``memory``, with the bound of the
            memory for samples, ``memory_bytes``, and its part in use, ``held_bytes``; ``datasets``,
            a list with ``users``, ``cache_bytes``, which a dataset holds of that memory, and the
            counters of ``reader`` and ``members``.
        """
        clients = [session.statistics() for session in list(self._sessions)]
        return {
            "version": dlfs.__version__,
            "pid": os.getpid(),
            "uptime_s": time.monotonic() - self._started_at_s,
            "volumes": [
                {"uuid": str(volume.uuid), "label": volume.label}
                for volume in list(self._state.volumes.values())
            ],
            "clients": clients,
            "memory": self._cache.memory.stats(),
            "datasets": self._cache.statistics(),
        }

    def sessions_of(self, volume: UUID) -> list[Session]:
        """Return the sessions whose clients have datasets of a volume open."""
        return [session for session in self._sessions if session.uses(volume)]

    def uses(self, volume: UUID) -> bool:
        """Return True if a request that uses a volume's devices is waiting or running."""
        return self._state.runs_for_volume(volume)

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
        session = Session(self._state, stream, peer)
        self._sessions[session] = None
        try:
            await session.run()
        except Exception:  # noqa: BLE001  a bug in one session must not end the others
            _log.exception("serving %s", peer)
        del self._sessions[session]  # not in a finally: a cancelled session keeps its resources

    def _refusal(self, peer: Peer, group: int) -> DeviceError | LimitError | None:
        """Return the error for a peer that is not served; None if it is served."""
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
