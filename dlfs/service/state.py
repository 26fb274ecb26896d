"""``ServerState``: the volumes, sessions, limits and worker threads of a service.

Threads: the trio loop.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import UUID
from weakref import WeakValueDictionary

import trio

import dlfs
from dlfs._native.server_channel import ServerChannel, Share
from dlfs.base.units import format_bytes
from dlfs.connection.connection import OpenOptions
from dlfs.errors import ClosedError, DlfsError, LimitError, NotFoundError, drop_tracebacks
from dlfs.fields import FieldSpan
from dlfs.service.access import Access
from dlfs.service.dataset_cache import DatasetCache, ServedVolume
from dlfs.service.sockets import AllowList, Peer
from dlfs.store.transaction import Generation

if TYPE_CHECKING:
    from dlfs.service.mount import ServiceMount
    from dlfs.service.session import Session

VOLUME_THREADS_MAX = 8
"""Most worker threads that requests for one volume use at a time. A volume that does not answer
blocks no more threads than these."""
CLOSING_THREADS_MAX = 8
"""Most worker threads that close channels and datasets; each waits for a read that is under way."""

REVOKED_POLL_S = 1.0
"""Time between two looks for revoked channels whose clients have ended, in seconds."""

IDLE_SECONDS = 5.0
"""Time between two reads of a volume's newest generation for which no request asks, in seconds."""

_log = logging.getLogger(__name__)

Result = TypeVar("Result")

Arena = tuple[UUID, UUID, FieldSpan]
"""A sample memory: volume, dataset, and the fields of its samples; no fields for whole samples."""


class Refreshes:
    """The refreshes of one volume: one at a time, whose outcome waiting requests share.

    A request needs what was committed before it came. So it takes the outcome of any refresh that
    began after it came.
    """

    def __init__(self) -> None:
        self._lock = trio.Lock()
        self._started = 0
        self._shared = 0
        """Number of the last refresh whose outcome is shared; a cancelled one has none."""
        self._error: Exception | None = None

    async def run(self, refresh: Callable[[], Awaitable[None]]) -> None:
        """Refresh the volume, or share the outcome of a refresh that begins from now on.

        Raises:
            Exception: as ``refresh``.
        """
        started_before = self._started
        async with self._lock:
            if self._shared <= started_before:
                self._started += 1
                outcome: Exception | None = None
                try:
                    await refresh()
                except (DlfsError, OSError, MemoryError) as error:
                    drop_tracebacks(error)
                    outcome = error
                self._shared, self._error = self._started, outcome
            shared = self._error
        if shared is not None:
            raise shared


@dataclass(eq=False)
class ServerState:
    """State that all sessions of a service share.

    Attributes:
        volumes: the volumes that the service serves, by UUID; clients attach and detach some.
        cache: cache of their open datasets.
        open_options: options for opening the devices of further volumes.
        mount: mount of the service; None: it has none.
        access: the rights of its clients, and the published sockets.
        let_in: lets the users that a volume's rule names connect to the service's own socket.
        attaching: lock of the changes of ``volumes``.
        sessions: the sessions, in order of connection; the values have no meaning.
        channel_counts: open channels of each client process and of each user.
        step_bytes: length of the open steps of unfinished imports of each client process and of
            each user.
        revoked: channels that are served no longer, whose clients have not hung up yet: they may
            read what they have in place.
        shares: bounds on pinned bytes, by process or user and by sample memory; with None in
            place of the sample memory, bounds on the service's other memory.
        refreshes: the refreshes of each volume.
        volume_limiters: limiter of the worker threads of each volume.
        closing_limiter: limiter of the worker threads that close channels and datasets.
    """

    volumes: dict[UUID, ServedVolume]
    cache: DatasetCache
    open_options: OpenOptions = field(default_factory=OpenOptions)
    mount: ServiceMount | None = None
    access: Access = field(default_factory=Access)
    let_in: Callable[[AllowList | None], None] = lambda _rule: None
    attaching: trio.Lock = field(default_factory=trio.Lock)
    sessions: dict[Session, None] = field(default_factory=dict)
    channel_counts: Counter[str | int] = field(default_factory=Counter)
    step_bytes: Counter[str | int] = field(default_factory=Counter)
    revoked: dict[ServerChannel, Peer] = field(default_factory=dict)
    shares: WeakValueDictionary[tuple[str | int, Arena | None], Share] = field(
        default_factory=WeakValueDictionary
    )
    refreshes: dict[UUID, Refreshes] = field(default_factory=dict)
    volume_limiters: dict[UUID, trio.CapacityLimiter] = field(default_factory=dict)
    closing_limiter: trio.CapacityLimiter = field(
        default_factory=lambda: trio.CapacityLimiter(CLOSING_THREADS_MAX)
    )
    _started_at_s: float = field(default_factory=time.monotonic)
    _started_s: float = field(default_factory=time.time)
    _ending: bool = False
    _waits: set[trio.CancelScope] = field(default_factory=set)
    """Scopes of the calls in threads, which a cancellation does not reach before the end."""

    def snapshot(self, viewer: Peer | None = None) -> dict[str, Any]:
        """Return the counters of the service, its clients and its open datasets. Any thread.

        Args:
            viewer: the client that asks, which gets what is counted for the volumes that it may
                read; None, and the service's owner, get everything.

        Returns:
            Plain values for JSON: ``version``, ``pid``; ``started_s``, the Unix time of its start,
            and ``uptime_s``; ``volumes``, a list with ``uuid`` and ``label``; ``clients``, a list
            with ``pid``, ``uid``, ``datasets``, ``channels`` and sums of the channels' counters;
            ``memory``, with the bound of the memory for samples, ``memory_bytes``, and its part in
            use, ``held_bytes``; ``datasets``, a list with ``users``, ``cache_bytes``, which a
            dataset holds of that memory, and the counters of ``reader`` and ``members``. For the
            owner also ``sockets``, the published ones, a list with ``name``, ``path``, ``note`` and
            ``volumes``.
        """
        everything = viewer is None or self.access.is_owner(viewer)
        volumes = list(self.volumes.values())
        sessions = list(self.sessions)
        datasets = self.cache.statistics()
        memory = self.cache.memory
        if viewer is not None and not everything:
            volumes = self.access.readable(viewer, volumes)
            may = {volume.uuid for volume in volumes}
            sessions = [
                each for each in sessions if self.access.sees(viewer, each.peer, each.volumes, may)
            ]
            datasets = [each for each in datasets if UUID(each["volume"]) in may]
        return {
            "version": dlfs.__version__,
            "pid": os.getpid(),
            "started_s": self._started_s,
            "uptime_s": time.monotonic() - self._started_at_s,
            "volumes": [{"uuid": str(volume.uuid), "label": volume.label} for volume in volumes],
            "clients": [session.statistics() for session in sessions],
            "memory": memory.stats(None if everything else [each.memory for each in volumes]),
            "datasets": datasets,
            **({"sockets": self.access.sockets.statistics()} if everything else {}),
        }

    def sessions_of(self, volume: UUID) -> list[Session]:
        """Return the sessions whose clients have datasets of a volume open."""
        return [session for session in self.sessions if session.uses(volume)]

    def volume(self, uuid: UUID) -> ServedVolume:
        """Return a volume by its UUID.

        Raises:
            NotFoundError: the service does not serve it.
        """
        found = self.volumes.get(uuid)
        if found is None:
            raise NotFoundError(f"find volume {uuid}: this service does not serve it")
        return found

    def volume_for(self, peer: Peer, uuid: UUID) -> ServedVolume:
        """Return a volume that a client may read, by its UUID.

        Raises:
            NotFoundError: the service does not serve it.
            DeviceError: the client may not read it (EACCES).
        """
        found = self.volume(uuid)
        self.access.check_read(peer, found)
        return found

    def count_channels(self, peer: Peer, change: int) -> None:
        """Add to the channel counts of a process and of its user."""
        self._count(self.channel_counts, peer, change)

    def _count(self, counts: Counter[str | int], peer: Peer, change: int) -> None:
        for owner in (peer.process, peer.account):
            counts[owner] += change
            if not counts[owner]:
                del counts[owner]

    def charge_step(self, peer: Peer, size: int, most: int, most_of_user: int) -> None:
        """Count a step that a client opens.

        Args:
            peer: the client process.
            size: length of the step's directory and columns, in bytes.
            most: most bytes of the open steps of one process.
            most_of_user: most bytes of those of all processes of the user.

        Raises:
            LimitError: it would be more.
        """
        for owner, limit, whose in (
            (peer.process, most, "in one process"),
            (peer.account, most_of_user, f"of {peer.user}"),
        ):
            if self.step_bytes[owner] + size > limit:
                raise LimitError(
                    f"open a step of an import: expected at most {format_bytes(limit)} of names "
                    f"and locations {whose}, got {format_bytes(self.step_bytes[owner] + size)}; "
                    "read in smaller windows"
                )
        self._count(self.step_bytes, peer, size)

    def refund_step(self, peer: Peer, size: int) -> None:
        """Undo ``charge_step``."""
        self._count(self.step_bytes, peer, -size)

    def share(
        self, peer: Peer, arena: Arena | None, bytes_max: int, bytes_of_user_max: int
    ) -> Share:
        """Return the bound on a process's memory, which lies within the bound of its user.

        Args:
            peer: the client process.
            arena: sample memory that is pinned; None: the service's other memory.
            bytes_max: bound for one process.
            bytes_of_user_max: bound for all processes of the user.
        """
        of_user = self.shares.setdefault((peer.account, arena), Share(bytes_of_user_max, None))
        return self.shares.setdefault((peer.process, arena), Share(bytes_max, of_user))

    async def refresh(self, volume: ServedVolume, *, idle: bool = False) -> None:
        """Load a volume's newest generation.

        Args:
            volume: the volume.
            idle: True if no request asks for it: see ``ServedVolume.keep_current``.
        """
        refresh = volume.keep_current if idle else volume.refresh
        refreshes = self.refreshes.setdefault(volume.uuid, Refreshes())
        await refreshes.run(functools.partial(self.run_for_volume, volume, refresh))

    async def keep_current(self) -> None:
        """Follow the volumes without requests, so that no device stays open that has left one.

        A volume that cannot be read is left alone until a request has refreshed it.
        """
        failed: dict[UUID, Generation] = {}
        while True:
            await trio.sleep(IDLE_SECONDS)
            for uuid, volume in list(self.volumes.items()):
                try:
                    generation = volume.generation()
                    if failed.get(uuid) is generation:
                        continue
                    await self.refresh(volume, idle=True)
                except ClosedError:
                    continue  # it was detached meanwhile
                except (DlfsError, OSError, MemoryError) as error:
                    failed[uuid] = generation
                    _log.info("volume %s stays as it was read last: %s", uuid, error)

    async def close_revoked(self) -> None:
        """Close the revoked channels whose clients have hung up."""
        while True:
            await trio.sleep(REVOKED_POLL_S)
            for channel, peer in list(self.revoked.items()):
                if channel.ended:
                    await self.close(channel.close)
                    del self.revoked[channel]
                    self.count_channels(peer, -1)

    async def run_for_volume(self, volume: ServedVolume, call: Callable[[], Result]) -> Result:
        """Run a call that may wait for a volume's devices in one of the volume's threads.

        Raises:
            NotFoundError: the volume was detached meanwhile.
        """
        if self.volume(volume.uuid) is not volume:  # attached again
            raise NotFoundError(f"use volume {volume.uuid}: it was detached meanwhile")
        limiter = self.volume_limiters.setdefault(
            volume.uuid, trio.CapacityLimiter(VOLUME_THREADS_MAX)
        )
        return await self._run(call, limiter)

    def runs_for_volume(self, volume: UUID) -> bool:
        """Return True if a call of ``run_for_volume`` for a volume is waiting or running."""
        limiter = self.volume_limiters.get(volume)
        if limiter is None:
            return False
        statistics = limiter.statistics()
        return statistics.borrowed_tokens + statistics.tasks_waiting > 0

    async def close(self, close: Callable[[], None]) -> None:
        """Close a channel or dataset of a client in a worker thread."""
        await self._run(close, self.closing_limiter)

    async def _run(self, call: Callable[[], Result], limiter: trio.CapacityLimiter) -> Result:
        """Run a call in a thread to its end, unless the service ends: then abandon it."""
        with trio.CancelScope(shield=not self._ending) as scope:
            self._waits.add(scope)
            try:
                return await trio.to_thread.run_sync(call, limiter=limiter, abandon_on_cancel=True)
            finally:
                self._waits.discard(scope)
        raise AssertionError  # this scope is not cancelled itself

    async def wait_for_end(self) -> None:
        """Wait until the service is cancelled; then no longer wait for calls in threads.

        These may wait for a device. The process ends without them.
        """
        try:
            await trio.sleep_forever()
        finally:
            self._ending = True
            for scope in self._waits:
                scope.shield = False
