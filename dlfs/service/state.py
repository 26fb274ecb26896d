"""``ServerState``: the volumes, limits and worker threads that all sessions of a service share.

Threads: the trio loop.
"""

from __future__ import annotations

import functools
import logging
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar
from uuid import UUID
from weakref import WeakValueDictionary

import trio

from dlfs._native.server_channel import ServerChannel, Share
from dlfs.errors import ClosedError, DlfsError, NotFoundError, drop_tracebacks
from dlfs.fields import FieldSpan
from dlfs.service.dataset_cache import ServedVolume
from dlfs.service.protocol import Attached
from dlfs.service.sockets import Peer
from dlfs.store.transaction import Generation

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

Arena = tuple[UUID, FieldSpan]
"""A sample memory: the dataset, and the fields of its samples; no fields for whole samples."""


class Attachments(Protocol):
    """The part of a service that attaches and detaches volumes while it runs."""

    async def attach(self, members: Sequence[str]) -> Attached:
        """Serve one more volume.

        Raises:
            DlfsError: it cannot be opened or mounted, or is served already.
        """

    async def detach(self, volume: UUID, *, force: bool) -> None:
        """Stop serving a volume.

        Raises:
            NotFoundError: the service does not serve it.
            DeviceError: it is in use (EBUSY), and ``force`` is not set.
        """

    def connect_incoming(self, uid: int) -> socket.socket:
        """Return a connection to the server of the staging area, for a client of a user.

        Raises:
            UsageError: the service has no staging area.
        """


class Refreshes:
    """The refreshes of one volume: one at a time, whose outcome waiting requests share.

    A request needs what was committed before it came. So it takes the outcome of any refresh that
    began after it came.
    """

    def __init__(self) -> None:
        self._lock = trio.Lock()
        self._begun = 0
        self._shared = 0
        """Number of the last refresh whose outcome is shared; a cancelled one has none."""
        self._error: Exception | None = None

    async def run(self, refresh: Callable[[], Awaitable[None]]) -> None:
        """Refresh the volume, or share the outcome of a refresh that begins from now on.

        Raises:
            Exception: as ``refresh``.
        """
        begun_before = self._begun
        async with self._lock:
            if self._shared <= begun_before:
                self._begun += 1
                outcome: Exception | None = None
                try:
                    await refresh()
                except (DlfsError, OSError, MemoryError) as error:
                    drop_tracebacks(error)
                    outcome = error
                self._shared, self._error = self._begun, outcome
            shared = self._error
        if shared is not None:
            raise shared


@dataclass(eq=False)
class ServerState:
    """State that all sessions of a server share.

    Attributes:
        volumes: the volumes that the service serves, by UUID.
        snapshot: returns the service's counters; called in a worker thread.
        attachments: attaches and detaches volumes.
        channel_counts: open channels of each client process and of each user.
        revoked: channels that are served no longer, whose clients have not hung up yet: they may
            read what they have in place.
        shares: bounds on pinned bytes, by process or user and by sample memory; with None in
            place of the sample memory, bounds on the service's other memory.
        refreshes: the refreshes of each volume.
        volume_limiters: limiter of the worker threads of each volume.
        closing_limiter: limiter of the worker threads that close channels and datasets.
    """

    volumes: dict[UUID, ServedVolume]
    snapshot: Callable[[], dict[str, Any]]
    attachments: Attachments
    channel_counts: Counter[str | int] = field(default_factory=Counter)
    revoked: dict[ServerChannel, Peer] = field(default_factory=dict)
    shares: WeakValueDictionary[tuple[str | int, Arena | None], Share] = field(
        default_factory=WeakValueDictionary
    )
    refreshes: dict[UUID, Refreshes] = field(default_factory=dict)
    volume_limiters: dict[UUID, trio.CapacityLimiter] = field(default_factory=dict)
    closing_limiter: trio.CapacityLimiter = field(
        default_factory=lambda: trio.CapacityLimiter(CLOSING_THREADS_MAX)
    )
    _ending: bool = False
    _waits: set[trio.CancelScope] = field(default_factory=set)
    """Scopes of the calls in threads, which a cancellation does not reach before the end."""

    def volume(self, uuid: UUID) -> ServedVolume:
        """Return a volume by its UUID.

        Raises:
            NotFoundError: the service does not serve it.
        """
        found = self.volumes.get(uuid)
        if found is None:
            raise NotFoundError(f"find volume {uuid}: this service does not serve it")
        return found

    def count_channels(self, peer: Peer, change: int) -> None:
        """Add to the channel counts of a process and of its user."""
        for owner in (peer.process, peer.uid):
            self.channel_counts[owner] += change
            if not self.channel_counts[owner]:
                del self.channel_counts[owner]

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
        of_user = self._share((peer.uid, arena), bytes_of_user_max, None)
        return self._share((peer.process, arena), bytes_max, of_user)

    def _share(
        self, key: tuple[str | int, Arena | None], bytes_max: int, parent: Share | None
    ) -> Share:
        share = self.shares.get(key)
        if share is None:
            share = self.shares[key] = Share(bytes_max, parent)
        return share

    async def refresh(self, volume: ServedVolume) -> None:
        """Load a volume's newest generation."""
        await self._refresh(volume, volume.refresh)

    async def _refresh(self, volume: ServedVolume, refresh: Callable[[], None]) -> None:
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
                    await self._refresh(volume, volume.keep_current)
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
