"""Attaches and detaches the volumes of a node service while it runs.

Threads: the trio loop; what waits for devices runs in worker threads.
"""

from __future__ import annotations

import errno
import functools
import logging
from collections.abc import Sequence
from uuid import UUID

import trio

from dlfs.errors import DeviceError, ExistsError, NotFoundError
from dlfs.service.dataset_cache import ServedVolume
from dlfs.service.protocol import Attached, VolumeName
from dlfs.service.state import ServerState

_USE_POLL_S = 0.02
_ENDING_S = 0.5
"""Time for the ends of clients that closed just before, which the service sees a little later."""

_log = logging.getLogger(__name__)


async def attach(state: ServerState, members: Sequence[str]) -> Attached:
    """Serve one more volume, and show it in a mount with a directory for each volume.

    Raises:
        ExistsError: the service serves it already.
        DlfsError: it cannot be opened or shown.
    """
    async with state.attaching:
        opening = functools.partial(ServedVolume, members, state.cache, state.open_options)
        volume = await trio.to_thread.run_sync(opening)
        try:
            if volume.uuid in state.volumes:
                raise ExistsError(f"attach volume {volume.uuid}: it is served already")
            mount = None if state.mount is None else await state.mount.add(volume)
        except BaseException:
            volume.close()
            raise
        state.volumes[volume.uuid] = volume
    _log.info("attached volume %s (%s)", volume.uuid, volume.label)
    return Attached(VolumeName(volume.uuid, volume.label), mount)


async def detach(state: ServerState, volume: UUID, *, force: bool) -> None:
    """Stop serving a volume, take it out of the mount, and close its devices.

    Raises:
        NotFoundError: the service does not serve it.
        DeviceError: clients or programs on the mount use it (EBUSY), without ``force``.
    """
    async with state.attaching:
        found = state.volumes.pop(volume, None)  # from now on, nothing of it is opened
        if found is None:
            raise NotFoundError(f"detach volume {volume}: this service does not serve it")
        try:
            await _end_use(state, volume, force=force)
        except BaseException:
            state.volumes[volume] = found
            raise
        await trio.to_thread.run_sync(state.cache.remove_others, volume, ())
        await trio.to_thread.run_sync(found.close)
    _log.info("detached volume %s (%s)", volume, found.label)


async def _end_use(state: ServerState, volume: UUID, *, force: bool) -> None:
    """Take a volume out of the mount and wait until no client and no request uses it."""
    with trio.move_on_after(0 if force else _ENDING_S):
        while state.sessions_of(volume):
            await trio.sleep(_USE_POLL_S)
    users = sorted({str(session.peer.pid) for session in state.sessions_of(volume)})
    if users and not force:
        raise DeviceError(
            f"detach volume {volume}: processes read it: {', '.join(users)}; force=True takes "
            "it from them",
            errno.EBUSY,
        )
    if state.mount is not None:
        await state.mount.remove(volume, force=force)
    while state.cache.is_used(volume) or state.runs_for_volume(volume):
        for session in state.sessions_of(volume):
            session.drop()
        await trio.sleep(_USE_POLL_S)
