"""Attaches and detaches the volumes of a node service, and publishes sockets for them.

Threads: the trio loop; what waits for devices runs in worker threads.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
from collections.abc import Sequence
from uuid import UUID

import trio

from dlfs.base.wording import quote
from dlfs.errors import DeviceError, ExistsError, NotFoundError, StaleError, UsageError
from dlfs.service.dataset_cache import ServedVolume
from dlfs.service.protocol import Attached, PublishSocket, VolumeName
from dlfs.service.published import PublishedVolume, SocketRecord
from dlfs.service.sockets import AllowList
from dlfs.service.state import ServerState

RULE_ON_MOUNT = (
    "a volume that only some may read cannot be on the service's mount, which all may use; serve "
    "it without --mount, and mount it by 'dlfs mount'"
)
_ROOT = AllowList(frozenset({0}), frozenset())
"""Rule of a volume that is read by root, the service's user, and clients of published sockets."""
_USE_POLL_S = 0.02
_ENDING_S = 0.5
"""Time for the ends of clients that closed just before, which the service sees a little later."""

_log = logging.getLogger(__name__)


async def attach(
    state: ServerState,
    members: Sequence[str],
    rule: AllowList | None = None,
    memory_bytes: int | None = None,
    *,
    for_sockets: bool = False,
) -> Attached:
    """Serve one more volume, and show it in a mount with a directory for each volume.

    Args:
        state: the service.
        members: URIs of the volume's members.
        rule: users and groups that may read it; None: all that may use the service.
        memory_bytes: memory for its samples, if it has a rule; None: a share.
        for_sockets: detach it with the last socket that is published for it; one that the service
            serves already is left as it is.

    Raises:
        ExistsError: the service serves it already, without ``for_sockets``.
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
                if for_sockets:
                    volume.close()
                    return Attached(VolumeName(volume.uuid, volume.label), None)
                raise ExistsError(f"attach volume {volume.uuid}: it is served already")
            mount = None if state.mount is None else await state.mount.add(volume)
            volume.for_sockets = for_sockets
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


async def publish(state: ServerState, request: PublishSocket) -> str:
    """Publish a socket, and return its path; attach the volumes that it is to bring.

    Raises:
        NotFoundError: the service does not serve one of the volumes.
        UsageError: one has no rule, so its memory is shared with others; or as
            ``PublishedSockets.publish``.
        DlfsError: as ``attach`` and ``PublishedSockets.publish``.
    """
    try:
        brought = [await _bring(state, members, request.memory_bytes) for members in request.attach]
        volumes = [
            *(_find(state, request.name, wanted) for wanted in request.volumes),
            *map(state.volume, brought),
        ]
        recorded = tuple(_to_publish(request.name, volume) for volume in volumes)
        return state.access.sockets.publish(SocketRecord(request.name, recorded, request.note))
    except BaseException:
        await _detach_unused(state)
        raise


async def _bring(state: ServerState, members: tuple[str, ...], memory_bytes: int | None) -> UUID:
    """Serve a volume as long as sockets are published for it, unless the service does already."""
    for volume in state.volumes.values():
        if volume.members == members:
            return volume.uuid
    done = await attach(state, members, _ROOT, memory_bytes, for_sockets=True)
    return done.volume.uuid


def _find(state: ServerState, name: str, wanted: str) -> ServedVolume:
    """Return the volume of a label or UUID, for which a socket is to be published."""
    found = [v for v in state.volumes.values() if wanted in (v.label, str(v.uuid))]
    if len(found) != 1:
        raise NotFoundError(
            f"publish socket {name!r}: expected one volume {quote(wanted)}, got {len(found)}"
        )
    return found[0]


def _to_publish(name: str, volume: ServedVolume) -> PublishedVolume:
    """Return what the record of a published socket has of a volume."""
    if volume.rule is None:
        raise UsageError(
            f"publish socket {name!r}: volume {quote(volume.label or str(volume.uuid))} has no "
            "rule, so its memory is that of other volumes too; attach it again with --allow, for "
            "example user:root"
        )
    return PublishedVolume(
        volume.uuid, volume.members, volume.rule, volume.memory_bytes, volume.for_sockets
    )


async def unpublish(state: ServerState, name: str) -> None:
    """Close a published socket, end its clients and wait until they hold nothing any more.

    Volumes that it has brought are detached, unless other sockets are published for them.

    Raises:
        NotFoundError: no such socket is published.
    """
    try:
        state.access.sockets.unpublish(name)
        while sessions := [s for s in state.sessions if s.peer.entrance == name]:
            for session in sessions:
                session.drop()
            await trio.sleep(_USE_POLL_S)
    finally:
        await _detach_unused(state)


async def _detach_unused(state: ServerState) -> None:
    """Detach the volumes that sockets have brought, and for which none is published any more.

    One that root reads at the service's own socket stays until the next call.
    """
    for volume in list(state.volumes.values()):
        if volume.for_sockets and not state.access.sockets.names_for(volume.uuid):
            with contextlib.suppress(NotFoundError, DeviceError):
                await detach(state, volume.uuid, force=False)


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
    state.volumes[done.volume.uuid].for_sockets = volume.for_sockets
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
