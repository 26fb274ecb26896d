"""One client of the sample server: its requests, and all that is held for it.

A client is a connection. What it has (datasets, channels and, behind those, batches and streams) is
in its ``Session``. When it closes the connection it may still have batches: a channel lives until
its own socket is hung up, which the client does with the last batch and the kernel does when the
client dies; the channel's native thread then gives back at once what was held. A client that breaks
the protocol loses everything. When the service ends, nothing is given back: memory that a client
may still look at must not be read into, so all of it stays until the process is gone.

Requests are answered one after the other; what waits for devices or native threads runs in a worker
thread, so that a slow request of one client keeps no other waiting.

Limits are a process's, over all of its connections, and with larger numbers a user's, over all of
its processes: of channels, of what batches pin of a dataset's memory, and of what requests, batches
and streams take of the service's other memory.

Threads: the trio loop, but for what is said to run in a worker thread.
"""

from __future__ import annotations

import array
import functools
import logging
import os
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, TypeVar
from uuid import UUID
from weakref import WeakValueDictionary

import trio

import dlfs
from dlfs._native.reader import NativeReader
from dlfs._native.server_channel import STATS, ServerChannel, Share
from dlfs.dataset import Dataset
from dlfs.errors import (
    ClosedError,
    DlfsError,
    FormatError,
    LimitError,
    NotFoundError,
    TruncatedError,
    UsageError,
    VersionError,
)
from dlfs.service.dataset_cache import ServedVolume
from dlfs.service.protocol import (
    HEADER,
    PROTOCOL_VERSION,
    REQUESTS,
    ChannelState,
    DatasetState,
    Diagnose,
    Diagnosis,
    Done,
    Figures,
    GetPart,
    GetSnapshot,
    Hello,
    ListVolumes,
    LookAtVolume,
    Message,
    OpenChannel,
    OpenDataset,
    Part,
    Volumes,
    VolumeState,
    Welcome,
    body_bytes,
    decode,
    encode,
    failure_of,
)
from dlfs.service.protocol import ServedVolume as VolumeName
from dlfs.service.snapshot import generation_file
from dlfs.service.sockets import Peer
from dlfs.units import MIB

CHANNELS_MAX = 64
"""Of one client process: callers and epochs that it can have at once."""
CHANNELS_OF_USER_MAX = 1024
"""Of all processes of one user."""
DATASETS_MAX = 64
"""Of one connection."""
PINNED_SHARE = 1 / 8
"""Of a dataset's memory, that the batches of one client process may pin; more is copied."""
PINNED_SHARE_OF_USER = 3 / 4
"""Likewise, of all processes of one user."""
MEMORY_BYTES_MAX = 768 * MIB
"""Of the service's other memory, that one client process may cause: arrays, plans, choices, copies.
Twice a dataset's largest sample if that is more: once where it is read to, and once copied."""
STREAM_SAMPLE_BYTES = 128
"""Of these, for each sample that a stream may look ahead: as many as a dataset's memory holds."""
MEMORY_PROCESSES = 6
"""All processes of one user may cause as much as this many."""
SAMPLES_MAX = 1 << 20
"""Of one batch."""
COPIED_BYTES_MAX = 256 * MIB
"""Memory of one channel for batches that are copied, used as it is needed; more of a dataset that
has larger samples, so that each can be read."""
VOLUME_THREADS_MAX = 8
"""Requests that look at one volume at the same time; others of it wait. A volume that does not
answer takes no more threads than these, and those of other volumes are served on."""
ENDING_THREADS_MAX = 8
"""Channels and datasets that are closed at the same time: each waits for what it is reading."""
FRAME_TIMEOUT_S = 30.0
"""For a frame that has begun, either way; and for a client's first one."""

_RECEIVE_BYTES = 1 << 16
_LINGER_FIRST_S = 0.01
_LINGER_MOST_S = 1.0
Result = TypeVar("Result")

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Common:
    """What all sessions of a server share.

    Attributes:
        volumes: that are served, by UUID.
        snapshot: gives the service's figures; called in a worker thread.
        channel_counts: of each client process, and of each user.
        shares: what each client process and each user may pin of each dataset, and with None in
            place of the dataset, what they may cause of other memory.
        turns: one request at a time sees a volume's newest generation.
        limiters: of the threads that a volume takes.
        endings: of those that close what clients had.
    """

    volumes: dict[UUID, ServedVolume]
    snapshot: Callable[[], dict[str, Any]]
    channel_counts: Counter[str | int] = field(default_factory=Counter)
    shares: WeakValueDictionary[tuple[str | int, UUID | None], Share] = field(
        default_factory=WeakValueDictionary
    )
    turns: dict[UUID, trio.Lock] = field(default_factory=dict)
    limiters: dict[UUID, trio.CapacityLimiter] = field(default_factory=dict)
    endings: trio.CapacityLimiter = field(
        default_factory=lambda: trio.CapacityLimiter(ENDING_THREADS_MAX)
    )

    def volume(self, uuid: UUID) -> ServedVolume:
        """A volume by its UUID.

        Raises:
            NotFoundError: it is not served.
        """
        found = self.volumes.get(uuid)
        if found is None:
            raise NotFoundError(f"look at volume {uuid}: it is not served here")
        return found

    def count_channels(self, peer: Peer, change: int) -> None:
        """Count channels of a process, and of its user."""
        for owner in (peer.process, peer.uid):
            self.channel_counts[owner] += change
            if not self.channel_counts[owner]:
                del self.channel_counts[owner]

    def share(
        self, peer: Peer, dataset: UUID | None, bytes_max: int, bytes_of_user_max: int
    ) -> Share:
        """What a process may pin of a dataset, or cause of other memory, within its user's share.

        Args:
            peer: the process.
            dataset: that is pinned; None: other memory.
            bytes_max: of one process.
            bytes_of_user_max: of all processes of its user.
        """
        of_user = self._share((peer.uid, dataset), bytes_of_user_max, None)
        return self._share((peer.process, dataset), bytes_max, of_user)

    def _share(
        self, key: tuple[str | int, UUID | None], bytes_max: int, parent: Share | None
    ) -> Share:
        share = self.shares.get(key)
        if share is None:
            share = self.shares[key] = Share(bytes_max, parent)
        return share

    async def refresh(self, volume: ServedVolume) -> None:
        """See a volume's newest generation."""
        async with self.turns.setdefault(volume.uuid, trio.Lock()):
            await self.look(volume.uuid, volume.refresh)

    async def look(self, volume: UUID, call: Callable[[], Result]) -> Result:
        """Call what may wait for a volume's devices, in one of its threads."""
        limiter = self.limiters.setdefault(volume, trio.CapacityLimiter(VOLUME_THREADS_MAX))
        return await trio.to_thread.run_sync(call, limiter=limiter)

    async def end(self, close: Callable[[], None]) -> None:
        """Close what a client had."""
        await trio.to_thread.run_sync(close, limiter=self.endings)


@dataclass(eq=False)
class _OpenDataset:
    volume: UUID
    dataset: Dataset
    reader: NativeReader
    share: Share
    memory: Share


@dataclass(eq=False)
class Reply:
    """An answer, the descriptors that go with it, and what to give up when it is sent."""

    message: Message
    descriptors: Sequence[int] = ()
    after: ExitStack = field(default_factory=ExitStack)


class Session:
    """A client that may be served.

    Args:
        common: of all sessions.
        stream: of the connection; closed by ``run``.
        peer: who it is.
    """

    def __init__(self, common: Common, stream: trio.SocketStream, peer: Peer) -> None:
        self._common = common
        self._stream = stream
        self._received = bytearray()
        self._datasets: dict[UUID, _OpenDataset] = {}
        self._channels: list[ServerChannel] = []
        self.peer = peer
        self._handlers: dict[type[Message], Callable[[Any], Awaitable[Reply]]] = {
            ListVolumes: self._list_volumes,
            LookAtVolume: self._look_at_volume,
            OpenDataset: self._open_dataset,
            GetPart: self._get_part,
            OpenChannel: self._open_channel,
            Diagnose: self._diagnose,
            GetSnapshot: self._get_snapshot,
        }

    async def run(self) -> None:
        """Serve the client until it goes, or breaks the protocol; then give up what it had.

        Cancelled, it gives up nothing: the process is about to end.
        """
        try:
            async with self._stream:
                await self._converse()
        except (trio.BrokenResourceError, OSError) as error:
            _log.info("%s went away: %s", self.peer, error)
        except (FormatError, VersionError, trio.TooSlowError) as error:
            _log.warning("%s breaks the protocol: %s", self.peer, error or "too slow")
            await self._drop(list(self._channels))
        except Exception:  # noqa: BLE001  a bug that one client meets: it loses all, others nothing
            _log.exception("serving %s", self.peer)
            await self._drop(list(self._channels))
        await self._linger()
        for opened in self._datasets.values():
            await self._common.end(opened.dataset.close)
        self._datasets.clear()

    async def _linger(self) -> None:
        """Wait until the client has given up its channels, with the batches that it still has."""
        wait_s = _LINGER_FIRST_S
        await self._drop_ended()
        while self._channels:
            await trio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LINGER_MOST_S)
            await self._drop_ended()

    def figures(self) -> dict[str, Any]:
        """Who it is, and what it has."""
        channels = [channel.stats() for channel in list(self._channels)]
        total = {name: sum(c[name] for c in channels) for name in STATS if name != "ended"}
        return {
            "pid": self.peer.pid,
            "uid": self.peer.uid,
            "datasets": [opened.dataset.name for opened in list(self._datasets.values())],
            "channels": len(channels),
            **total,
        }

    async def _drop_ended(self) -> None:
        """Close the channels that the client has closed on its side; their threads have ended."""
        await self._drop([channel for channel in self._channels if channel.ended])

    async def _drop(self, channels: Sequence[ServerChannel]) -> None:
        """Close channels; waits for what their threads are reading."""
        for channel in channels:
            await self._common.end(channel.close)
            self._channels.remove(channel)
            self._common.count_channels(self.peer, -1)

    # ---- frames ----------------------------------------------------------------------------------

    async def _converse(self) -> None:
        """Answer requests until there are no more.

        Raises:
            FormatError: one was malformed; the client was told.
            trio.BrokenResourceError: the client is gone.
            trio.TooSlowError: it takes too long for one.
        """
        try:
            with trio.fail_after(FRAME_TIMEOUT_S):
                hello = await self._receive()
            if hello is None:
                return
            await self._send(self._greet(hello))
            while (request := await self._receive()) is not None:
                await self._send(await self._answer(request))
        except FormatError as error:
            await self._send(Reply(failure_of(error)))
            raise

    def _greet(self, hello: Message) -> Reply:
        if not isinstance(hello, Hello):
            raise FormatError(f"greet a client: expected Hello, got {type(hello).__name__}")
        if hello.protocol != PROTOCOL_VERSION:
            raise VersionError(
                f"connect to the service: it speaks protocol {PROTOCOL_VERSION} (dlfs "
                f"{dlfs.__version__}), the client {hello.protocol} (dlfs {hello.version[:40]})"
            )
        return Reply(Welcome(PROTOCOL_VERSION, dlfs.__version__, os.getpid()))

    async def _receive(self) -> Message | None:
        """The next request; None when the client has closed the connection."""
        if not self._received and not await self._receive_more():
            return None
        with trio.fail_after(FRAME_TIMEOUT_S):
            length = body_bytes(await self._take(HEADER.size))
            return decode(await self._take(length), REQUESTS)

    async def _take(self, count: int) -> bytes:
        while len(self._received) < count:
            if not await self._receive_more():
                raise TruncatedError(
                    f"read a frame: expected {count} bytes, got {len(self._received)}"
                )
        taken = bytes(self._received[:count])
        del self._received[:count]
        return taken

    async def _receive_more(self) -> bool:
        data = await self._stream.receive_some(_RECEIVE_BYTES)
        self._received += data
        return bool(data)

    async def _send(self, reply: Reply) -> None:
        """Send a frame; its descriptors go with its first byte."""
        with reply.after, trio.fail_after(FRAME_TIMEOUT_S):
            try:
                frame, descriptors = encode(reply.message), reply.descriptors
            except LimitError as error:  # figures of very many
                frame, descriptors = encode(failure_of(error)), ()
            rights = array.array("i", descriptors)
            extra = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if rights else []
            sent = await self._stream.socket.sendmsg([frame], extra)
            await self._stream.send_all(frame[sent:])

    # ---- requests --------------------------------------------------------------------------------

    async def _answer(self, request: Message) -> Reply:
        handler = self._handlers.get(type(request))
        if handler is None:
            raise FormatError(f"answer a client: {type(request).__name__} was not expected now")
        try:
            return await handler(request)
        except (DlfsError, OSError, MemoryError) as error:
            _log.info("%s, %s: %s", self.peer, type(request).__name__, error)
            return Reply(failure_of(error))

    async def _list_volumes(self, _request: ListVolumes) -> Reply:
        volumes = self._common.volumes.values()
        return Reply(Volumes(tuple(VolumeName(v.uuid, v.label) for v in volumes)))

    async def _look_at_volume(self, request: LookAtVolume) -> Reply:
        volume = self._common.volume(request.volume)
        await self._common.refresh(volume)
        reply = Reply(VolumeState(volume.info()))
        reply.descriptors = [self._attach_generation(reply, volume)]
        return reply

    def _attach_generation(self, reply: Reply, volume: ServedVolume) -> int:
        access = volume.volume.access
        return reply.after.enter_context(generation_file(access.superblock, access.catalog))

    async def _open_dataset(self, request: OpenDataset) -> Reply:
        if len(self._datasets) == DATASETS_MAX:
            raise LimitError(f"open a dataset: expected at most {DATASETS_MAX} on a connection")
        if request.dataset in self._datasets:
            raise UsageError(f"open dataset {request.dataset}: this connection has it open")
        volume = self._common.volume(request.volume)
        await self._common.refresh(volume)
        borrow = functools.partial(volume.borrow, request.dataset)
        dataset = await self._common.look(volume.uuid, borrow)
        with ExitStack() as undone:
            undone.callback(dataset.close)
            native = dataset.access.reader.native
            assert isinstance(native, NativeReader)
            state = DatasetState(dataset.access.members, native.arena_bytes, native.timeout_ms)
            reply = Reply(state)
            shares = self._shares(request.dataset, native.arena_bytes, dataset)
            generation = self._attach_generation(reply, volume)
            reply.descriptors = [generation, native.arena_descriptor]
            self._datasets[request.dataset] = _OpenDataset(volume.uuid, dataset, native, *shares)
            undone.pop_all()
        return reply

    def _shares(self, uuid: UUID, arena_bytes: int, dataset: Dataset) -> tuple[Share, Share]:
        """What the client's process may pin of a dataset, and cause of other memory."""
        pins = self._common.share(
            self.peer,
            uuid,
            int(arena_bytes * PINNED_SHARE),
            int(arena_bytes * PINNED_SHARE_OF_USER),
        )
        directory = dataset.access.directory
        mean_bytes = dataset.sample_bytes // max(1, len(directory)) + 1
        ahead = min(len(directory), arena_bytes // mean_bytes)
        most = max(MEMORY_BYTES_MAX, 2 * directory.largest_bytes + 64 * MIB)
        most += ahead * STREAM_SAMPLE_BYTES
        memory = self._common.share(self.peer, None, most, MEMORY_PROCESSES * most)
        memory.allow(most)
        if memory.parent is not None:
            memory.parent.allow(MEMORY_PROCESSES * most)
        return pins, memory

    async def _get_part(self, request: GetPart) -> Reply:
        volume = self._common.volume(request.volume)
        reply = Reply(Done())

        def find() -> int:
            directory = reply.after.enter_context(volume.borrow(request.dataset)).directory
            if request.part == "entries":
                return directory.entries_descriptor()
            if request.part == "names":
                return directory.names_descriptor()
            if request.part == "attributes":
                return volume.attributes(request.dataset).descriptor
            raise NotFoundError(f"get part {request.part!r} of a dataset: there is no such part")

        try:
            reply.descriptors = [await self._common.look(volume.uuid, find)]
        except BaseException:
            reply.after.close()
            raise
        reply.message = Part(os.fstat(reply.descriptors[0]).st_size)
        return reply

    def _opened(self, uuid: UUID) -> _OpenDataset:
        opened = self._datasets.get(uuid)
        if opened is None:
            raise ClosedError(f"use dataset {uuid}: this connection has not opened it")
        return opened

    async def _open_channel(self, request: OpenChannel) -> Reply:
        opened = self._opened(request.dataset)
        await self._drop_ended()
        for owner, most, whose in (
            (self.peer.process, CHANNELS_MAX, "in one process"),
            (self.peer.uid, CHANNELS_OF_USER_MAX, "of one user"),
        ):
            if self._common.channel_counts[owner] >= most:
                raise LimitError(
                    f"open a channel: expected at most {most} {whose} (callers and epochs at "
                    "once); close epochs that are not used"
                )
        self._common.count_channels(self.peer, 1)
        try:
            channel = await trio.to_thread.run_sync(_make_channel, opened)
        except BaseException:
            self._common.count_channels(self.peer, -1)
            raise
        self._channels.append(channel)
        descriptors = channel.descriptors
        reply = Reply(ChannelState(), [descriptors.memory, descriptors.wake])
        reply.after.enter_context(descriptors)
        return reply

    async def _diagnose(self, request: Diagnose) -> Reply:
        opened = self._opened(request.dataset)
        found = await self._common.look(opened.volume, opened.dataset.access.reader.diagnose)
        return Reply(Diagnosis(None if found is None else str(found)))

    async def _get_snapshot(self, _request: GetSnapshot) -> Reply:
        return Reply(Figures(await trio.to_thread.run_sync(self._common.snapshot)))


def _make_channel(opened: _OpenDataset) -> ServerChannel:
    largest_bytes = opened.dataset.access.directory.largest_bytes
    return ServerChannel(
        opened.reader,
        opened.share,
        samples_max=SAMPLES_MAX,
        copied_bytes_max=max(COPIED_BYTES_MAX, largest_bytes + MIB),
        memory=opened.memory,
    )
