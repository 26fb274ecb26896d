"""Attaches and detaches the volumes of a node service, and publishes sockets for them.

Threads: the trio loop; what waits for devices runs in worker threads.
"""

from __future__ import annotations

import errno
import functools
import logging
from collections.abc import Sequence
from uuid import UUID

import trio

from dlfs.base.wording import quote
from dlfs.errors import DeviceError, ExistsError, NotFoundError, StaleError, UsageError
from dlfs.service.dataset_cache import ServedVolume
from dlfs.service.protocol import Attached, VolumeName
from dlfs.service.published import PublishedVolume, SocketRecord
from dlfs.service.sockets import AllowList
from dlfs.service.state import ServerState

RULE_ON_MOUNT = (
    "a volume that only some may read cannot be on the service's mount, which all may use; serve "
    "it without --mount, and mount it by 'dlfs mount'"
)
_USE_POLL_S = 0.02
_ENDING_S = 0.5
"""Time for the ends of clients that closed just before, which the service sees a little later."""

_log = logging.getLogger(__name__)


async def attach(
    state: ServerState,
    members: Sequence[str],
    rule: AllowList | None = None,
    memory_bytes: int | None = None,
) -> Attached:
    """Serve one more volume, and show it in a mount with a directory for each volume.

    Args:
        state: the service.
        members: URIs of the volume's members.
        rule: users and groups that may read it; None: all that may use the service.
        memory_bytes: memory for its samples, if it has a rule; None: a share.

    Raises:
        ExistsError: the service serves it already.
        UsageError: it has a rule, and the service shows its volumes on a mount; or it has memory
            without a rule.
        DlfsError: it cannot be opened or shown.
    """
    if rule is not None and state.mount is not None:
        raise UsageError(f"attach volume {', '.join(members)}: {RULE_ON_MOUNT}")
    if rule is None and memory_bytes is not None:
        raise UsageError(
            f"attach volume {', '.join(members)}: expected a rule of who may read it (--allow) for "
            "memory of its own"
        )
    opening = functools.partial(
        ServedVolume, members, state.cache, state.open_options, lambda _: rule, memory_bytes
    )
    volume = await trio.to_thread.run_sync(opening)
    try:
        async with state.attaching:
            if volume.uuid in state.volumes:
                raise ExistsError(f"attach volume {volume.uuid}: it is served already")
            mount = None if state.mount is None else await state.mount.add(volume)
            state.volumes[volume.uuid] = volume
    except BaseException:
        volume.close()
        raise
    state.let_in(rule)
    _log.info("attached volume %s (%s)", volume.uuid, volume.label)
    return Attached(VolumeName(volume.uuid, volume.label), mount)


async def detach(state: ServerState, volume: UUID, *, force: bool) -> None:
    """Stop serving a volume, take it out of the mount, and close its devices.

    Raises:
        NotFoundError: the service does not serve it.
        DeviceError: clients or programs on the mount use it, or a socket is published for it
            (EBUSY), without ``force``.
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


async def publish(state: ServerState, name: str, wanted: Sequence[str], note: str) -> str:
    """Publish a socket for volumes that the service serves, and return its path.

    Raises:
        NotFoundError: the service does not serve one of them.
        UsageError: one has no rule, so its memory is shared with others; or as
            ``PublishedSockets.publish``.
        DlfsError: as ``PublishedSockets.publish``.
    """
    volumes = []
    for each in wanted:
        found = [v for v in state.volumes.values() if each in (v.label, str(v.uuid))]
        if len(found) != 1:
            raise NotFoundError(
                f"publish socket {name!r}: expected one volume {quote(each)}, got {len(found)}"
            )
        (volume,) = found
        if volume.rule is None:
            raise UsageError(
                f"publish socket {name!r}: volume {quote(each)} has no rule, so its memory is that "
                "of other volumes too; attach it again with --allow, for example user:root"
            )
        volumes.append(
            PublishedVolume(volume.uuid, volume.members, volume.rule, volume.memory_bytes)
        )
    return state.access.sockets.publish(SocketRecord(name, tuple(volumes), note))


async def unpublish(state: ServerState, name: str) -> None:
    """Close a published socket, end its clients and wait until they hold nothing any more.

    Raises:
        NotFoundError: no such socket is published.
    """
    state.access.sockets.unpublish(name)
    while sessions := [session for session in state.sessions if session.peer.entrance == name]:
        for session in sessions:
            session.drop()
        await trio.sleep(_USE_POLL_S)


async def serve_recorded(state: ServerState, volume: PublishedVolume) -> None:
    """Serve the volume of a published socket's record, unless the service does already.

    Raises:
        DlfsError: it cannot be opened, or the URIs lead to another volume.
    """
    if volume.uuid in state.volumes:
        return
    try:
        done = await attach(state, volume.members, volume.rule, volume.memory_bytes)
    except ExistsError:  # another socket's record has it too
        return
    if done.volume.uuid != volume.uuid:
        await detach(state, done.volume.uuid, force=True)
        raise StaleError(
            f"serve volume {volume.uuid} again: its URIs lead to volume {done.volume.uuid} now"
        )


async def _end_use(state: ServerState, volume: UUID, *, force: bool) -> None:
    """Take a volume out of the mount and wait until no client and no request uses it."""
    names = state.access.sockets.names_for(volume)
    if names and not force:
        raise DeviceError(
            f"detach volume {volume}: sockets are published for it: {', '.join(names)}; unpublish "
            "them first, or use force=True",
            errno.EBUSY,
        )
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
