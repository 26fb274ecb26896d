"""Attaches and detaches the volumes of a node service while it runs.

Threads: the trio loop; what waits for devices runs in worker threads.
"""

from __future__ import annotations

import errno
import functools
import logging
import socket
from collections.abc import Callable, Sequence
from uuid import UUID

import trio

from dlfs.connection.connection import OpenOptions
from dlfs.errors import DeviceError, ExistsError, NotFoundError, UsageError
from dlfs.service.dataset_cache import DatasetCache, ServedVolume
from dlfs.service.mount import ServiceMount
from dlfs.service.protocol import Attached, VolumeName
from dlfs.service.session import Session

_USE_POLL_S = 0.02
_ENDING_S = 0.5
"""Time for the ends of clients that closed just before, which the service sees a little later."""

_log = logging.getLogger(__name__)


class VolumeAttachments:
    """The volumes of a service, which come and go.

    Args:
        volumes: the served volumes, by UUID; shared with the sample server.
        cache: cache of their datasets.
        options: options for opening devices.
        sessions_of: returns the sessions whose clients use a volume.
        has_requests: returns True if a request that uses a volume's devices is under way.
        mount: mount of the service; None: it has none.
    """

    def __init__(
        self,
        volumes: dict[UUID, ServedVolume],
        cache: DatasetCache,
        options: OpenOptions,
        sessions_of: Callable[[UUID], Sequence[Session]],
        has_requests: Callable[[UUID], bool],
        mount: ServiceMount | None,
    ) -> None:
        self._volumes = volumes
        self._cache = cache
        self._options = options
        self._sessions_of = sessions_of
        self._has_requests = has_requests
        self._mount = mount
        self._lock = trio.Lock()

    async def attach(self, members: Sequence[str]) -> Attached:
        """Serve one more volume, and show it in a mount with a directory for each volume.

        Raises:
            ExistsError: the service serves it already.
            DlfsError: it cannot be opened or shown.
        """
        async with self._lock:
            opening = functools.partial(ServedVolume, members, self._cache, self._options)
            volume = await trio.to_thread.run_sync(opening)
            try:
                if volume.uuid in self._volumes:
                    raise ExistsError(f"attach volume {volume.uuid}: it is served already")
                mount = None
                if self._mount is not None:
                    mount = await self._mount.add(volume)
            except BaseException:
                volume.close()
                raise
            self._volumes[volume.uuid] = volume
        _log.info("attached volume %s (%s)", volume.uuid, volume.label)
        return Attached(VolumeName(volume.uuid, volume.label), mount)

    async def detach(self, volume: UUID, *, force: bool) -> None:
        """Stop serving a volume, take it out of the mount, and close its devices.

        Raises:
            NotFoundError: the service does not serve it.
            DeviceError: clients or programs on the mount use it (EBUSY), without ``force``.
        """
        async with self._lock:
            found = self._volumes.pop(volume, None)  # from now on, nothing of it is opened
            if found is None:
                raise NotFoundError(f"detach volume {volume}: this service does not serve it")
            try:
                await self._end_use(volume, force=force)
            except BaseException:
                self._volumes[volume] = found
                raise
            await trio.to_thread.run_sync(self._cache.remove_others, volume, ())
            await trio.to_thread.run_sync(found.close)
        _log.info("detached volume %s (%s)", volume, found.label)

    def connect_incoming(self, uid: int) -> socket.socket:
        """Return a connection to the server of the staging area; see ``ServiceMount``."""
        if self._mount is None:
            raise UsageError(
                "seal: the service has no mount; start it with --mount DIR --incoming AREA"
            )
        return self._mount.connect_incoming(uid)

    async def _end_use(self, volume: UUID, *, force: bool) -> None:
        """Take a volume out of the mount and wait until no client and no request uses it."""
        with trio.move_on_after(0 if force else _ENDING_S):
            while self._sessions_of(volume):
                await trio.sleep(_USE_POLL_S)
        users = sorted({str(session.peer.pid) for session in self._sessions_of(volume)})
        if users and not force:
            raise DeviceError(
                f"detach volume {volume}: processes read it: {', '.join(users)}; force=True takes "
                "it from them",
                errno.EBUSY,
            )
        if self._mount is not None:
            await self._mount.remove(volume, force=force)
        while self._cache.is_used(volume) or self._has_requests(volume):
            for session in self._sessions_of(volume):
                session.drop()
            await trio.sleep(_USE_POLL_S)
