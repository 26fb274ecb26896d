"""The sample server: accepts clients on a Unix socket and serves each in a separate task.

The kernel names the process, user and groups of each client (SO_PEERCRED, SO_PEERGROUPS). The
server asks ``access`` before it reads anything from the client. Clients of published sockets are
served in the same way, with the rights of their socket. An error of a client, or a bug that its
request uncovers, ends that client's session and no other.

Threads: one, the trio loop.
"""

from __future__ import annotations

import errno
import functools
import logging
from dataclasses import replace

import trio

from dlfs.errors import DeviceError, LimitError
from dlfs.service.attachments import serve_recorded
from dlfs.service.protocol import encode, failure_of
from dlfs.service.published import SocketRecord
from dlfs.service.session import Session
from dlfs.service.sockets import Listener, Peer, peer_of
from dlfs.service.state import ServerState

CLIENTS_MAX = 4096
"""Most connections at a time. One user, or one published socket, may have as many as are left."""
CLIENTS_OF_PROCESS_MAX = 512
"""Most connections of one process: one for each open volume, dataset and choice of fields."""

_log = logging.getLogger(__name__)


class SampleServer:
    """Serves volumes to the processes of this node.

    Args:
        state: the volumes and all that the sessions share.
    """

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def serve(self, listener: Listener) -> None:
        """Accept clients until cancelled. Sessions then release nothing: see ``Session``."""
        accepting = trio.SocketListener(trio.socket.from_stdlib_socket(listener.socket.dup()))

        async def handle(stream: trio.SocketStream) -> None:
            await self._serve_client(stream)

        sockets = self._state.access.sockets
        recorded = functools.partial(serve_recorded, self._state)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._state.wait_for_end)
            nursery.start_soon(self._state.keep_current)
            nursery.start_soon(self._state.close_revoked)
            await nursery.start(sockets.serve, self._serve_client, recorded)
            await trio.serve_listeners(handle, [accepting])

    async def _serve_client(
        self, stream: trio.SocketStream, entrance: SocketRecord | None = None
    ) -> None:
        try:
            peer = peer_of(stream.socket)
            if entrance is not None:
                peer = replace(peer, entrance=entrance.name, note=entrance.note)
            refusal = self._refusal(peer)
            if refusal is not None:
                _log.warning("refused %s: %s", peer, refusal)
                async with stream:
                    with trio.move_on_after(1.0):
                        await stream.send_all(encode(failure_of(refusal)))
                return
        except (trio.BrokenResourceError, OSError):
            return
        session = Session(self._state, stream, peer)
        self._state.sessions[session] = None
        try:
            await session.run()
        except Exception:  # noqa: BLE001  a bug in one session must not end the others
            _log.exception("serving %s", peer)
        # Not in a finally: a cancelled session keeps its resources.
        del self._state.sessions[session]

    def _refusal(self, peer: Peer) -> DeviceError | LimitError | None:
        """Return the error for a peer that is not served; None if it is served."""
        if not self._state.access.may_connect(peer, self._state.volumes.values()):
            return DeviceError(
                f"use the service: {peer.user} may not ({peer.process}); 'dlfs serve --allow-user "
                "NAME' or --allow-group lets a user in, and --allow for one volume",
                errno.EACCES,
            )
        others = [session.peer for session in self._state.sessions]
        own = sum(other.process == peer.process for other in others)
        users = sum(other.account == peer.account for other in others)
        left = CLIENTS_MAX - len(others)
        for count, limit, whose in (
            (own, CLIENTS_OF_PROCESS_MAX, "of one process"),
            (users, left, f"of {peer.user}, as many as are left"),
        ):
            if count >= limit:
                return LimitError(f"use the service: expected at most {limit} connections {whose}")
        return None
