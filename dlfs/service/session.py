"""The session of one client connection: answers its requests and owns its resources.

A ``Session`` owns the datasets and channels that its client has opened; each channel owns batches
and streams. All sessions share one ``ServerState`` with the volumes, the limits and the thread
limiters.

A client that closes its control connection may still use batches. So a channel lives until the
channel's own socket is hung up: by the client when it releases the last batch, by the kernel when
the client dies. The channel's native thread then releases the batches at once. A client that breaks
the protocol, or that is dropped, has its channels revoked: its calls fail, and its batches keep
their bytes until it hangs up. When the service ends, it releases nothing: a client may still read
that memory, so the memory must not change until the service's process is gone.

A session answers requests one after the other. Work that waits for devices or native threads runs
in a worker thread, so a slow request of one client does not delay other clients.

Limits apply to a process, over all of its connections, and with larger numbers to a user, over all
of the user's processes. Limited are channels, the bytes that batches pin of the sample memory that
a dataset may have at the time, and the service's other memory that requests, batches and streams
take.

Threads: the trio loop, except where a docstring names a worker thread.
"""

from __future__ import annotations

import array
import errno
import functools
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import trio

import dlfs
from dlfs._native.reader import NativeReader
from dlfs._native.server_channel import STATS, ServerChannel, Share
from dlfs.base.memory_limit import allowed_bytes
from dlfs.base.units import MIB
from dlfs.connection.connection import DatasetSession
from dlfs.dataset.dataset import Dataset
from dlfs.errors import (
    ClosedError,
    DeviceError,
    DlfsError,
    FormatError,
    LimitError,
    NotFoundError,
    TruncatedError,
    UsageError,
    VersionError,
)
from dlfs.reader import MovedError, SampleReader, follow
from dlfs.service import protocol
from dlfs.service.attachments import attach, detach, publish, unpublish
from dlfs.service.dataset_cache import ServedVolume
from dlfs.service.generation_file import generation_file
from dlfs.service.import_steps import headers_file
from dlfs.service.protocol import Message
from dlfs.service.sockets import AllowList, Peer
from dlfs.service.state import ServerState
from dlfs.store.info import describe_volume
from dlfs.store.transaction import Generation

CHANNELS_MAX = 256
"""Most channels of one client process, which needs one for each caller and each open epoch of a
dataset or of a choice of its fields."""
CHANNELS_OF_USER_MAX = 2048
"""Most channels of all processes of one user."""
DATASETS_MAX = 64
"""Most open datasets of one connection."""
PINNED_SHARE = 1 / 2
"""Share of the sample memory that a dataset may have at the time, which the batches of one client
process may pin. Batches beyond it are copied out."""
PINNED_SHARE_OF_USER = 3 / 4
"""Share of that memory that the batches of all processes of one user may pin."""
MEMORY_BYTES_MAX = 768 * MIB
"""Most memory of the service, outside the sample memory, for one client process: arrays, read-ahead
plans, chosen indices and copied batches. As much again may be names, locations and columns of the
steps of imports that it reads. It is raised to twice a dataset's largest sample, which
is read into memory once and copied once, if that is more."""
STREAM_SAMPLE_BYTES = 128
"""Memory that is added to ``MEMORY_BYTES_MAX`` for each sample that a stream may read ahead, in
bytes. A stream reads ahead at most as many samples as the dataset's sample memory holds."""
MEMORY_PROCESSES = 6
"""Limit of that memory for all processes of one user, as a multiple of the limit of a process."""
MEMORY_OF_SOCKET = 1 / 4
"""Share of what the service may use beside its sample memory, which all clients of a published
socket together may cause at most."""
SAMPLES_MAX = 1 << 20
"""Most samples of one batch."""
COPIED_BYTES_MAX = 256 * MIB
"""Memory of one channel for copied batches, in bytes; the system provides its pages when they are
first used. A dataset with larger samples gets more, so that each sample can be read."""
FRAME_TIMEOUT_S = 30.0
"""Longest time to receive or send one frame, and to wait for a client's first frame, in seconds."""
PENDING_S = 1.0
"""Time between two messages that tell a client that its request is worked on, in seconds."""

_RECEIVE_BYTES = 1 << 16
_CHANNEL_POLL_FIRST_S = 0.01
_CHANNEL_POLL_LONGEST_S = 1.0

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _ClientDataset:
    """A dataset that a client has open, with the bounds on the client's memory for it."""

    volume: UUID
    dataset: Dataset
    samples: SampleReader
    reader: NativeReader
    share: Share
    memory: Share
    step_bytes: int = 0
    """What it counts as a step of an unfinished import, in bytes; 0 for a dataset."""


@dataclass(eq=False)
class Reply:
    """An answer, the descriptors that travel with it, and the cleanup once it is sent."""

    message: Message
    descriptors: Sequence[int] = ()
    cleanup: ExitStack = field(default_factory=ExitStack)


class Session:
    """Serves one client connection.

    Args:
        state: the state that all sessions share.
        stream: the connection; ``run`` closes it.
        peer: process and user of the client.
    """

    def __init__(self, state: ServerState, stream: trio.SocketStream, peer: Peer) -> None:
        self._state = state
        self._stream = stream
        self._received = bytearray()
        self._datasets: dict[UUID, _ClientDataset] = {}
        self._channels: dict[ServerChannel, UUID] = {}  # with their datasets
        self.peer = peer
        self._handlers: dict[type[Message], Callable[[Any], Awaitable[Reply]]] = {
            protocol.ListVolumes: self._list_volumes,
            protocol.GetVolume: self._get_volume,
            protocol.OpenDataset: self._open_dataset,
            protocol.GetSteps: self._get_steps,
            protocol.OpenStep: self._open_step,
            protocol.GetSegment: self._get_segment,
            protocol.OpenChannel: self._open_channel,
            protocol.Diagnose: self._diagnose,
            protocol.GetStatistics: self._get_statistics,
            protocol.AttachVolume: self._attach_volume,
            protocol.DetachVolume: self._detach_volume,
            protocol.PublishSocket: self._publish_socket,
            protocol.UnpublishSocket: self._unpublish_socket,
            protocol.ConnectIncoming: self._connect_incoming,
        }
        self._dropped = trio.CancelScope()

    async def run(self) -> None:
        """Serve the client until it disconnects or breaks the protocol, then release its resources.

        A cancelled session releases nothing, because the process is about to end. One that was
        dropped revokes the channels of its client.
        """
        with self._dropped:
            try:
                async with self._stream:
                    await self._converse()
            except (trio.BrokenResourceError, OSError) as error:
                _log.info("%s went away: %s", self.peer, error)
            except (FormatError, VersionError, trio.TooSlowError) as error:
                _log.warning("%s breaks the protocol: %s", self.peer, error or "too slow")
                await self._revoke_channels(list(self._channels))
            except Exception:  # noqa: BLE001  a bug in one session must not end the other sessions
                _log.exception("serving %s", self.peer)
                await self._revoke_channels(list(self._channels))
            await self._await_channels()
        await self._revoke_channels(list(self._channels))  # those of a client that was dropped
        await self._close_datasets(list(self._datasets))

    def drop(self) -> None:
        """End the session, whatever its client does; the client's next call fails.

        This includes a session whose client has closed the connection and still has batches.
        """
        self._dropped.cancel()

    @property
    def volumes(self) -> set[UUID]:
        """The volumes of which the client has datasets open. Any thread."""
        return {opened.volume for opened in list(self._datasets.values())}

    def uses(self, volume: UUID) -> bool:
        """Return True if the client has a dataset of a volume open."""
        return volume in self.volumes

    async def _await_channels(self) -> None:
        """Wait until the client has closed its channels, that is, released its last batches."""
        wait_s = _CHANNEL_POLL_FIRST_S
        await self._close_ended_channels()
        while self._channels:
            await trio.sleep(wait_s)
            wait_s = min(2 * wait_s, _CHANNEL_POLL_LONGEST_S)
            await self._close_ended_channels()

    def statistics(self) -> dict[str, Any]:
        """Return the client's process and user, its open datasets, and sums over its channels."""
        channels = [channel.stats() for channel in list(self._channels)]
        total = {name: sum(c[name] for c in channels) for name in STATS if name != "ended"}
        return {
            "pid": self.peer.pid,
            "uid": self.peer.uid,
            "socket": self.peer.entrance,
            "datasets": [opened.dataset.name for opened in list(self._datasets.values())],
            "channels": len(channels),
            **total,
        }

    async def _close_ended_channels(self) -> None:
        """Close the channels that the client has closed on its side; their threads have ended."""
        for channel in [channel for channel in self._channels if channel.ended]:
            await self._state.close(channel.close)
            del self._channels[channel]
            self._state.count_channels(self.peer, -1)

    async def _revoke_channels(self, channels: Sequence[ServerChannel]) -> None:
        """Serve channels no longer; waits for reads that their threads have under way."""
        for channel in channels:
            channel.descriptors.close()  # the client's end, if its answer was never sent
            await self._state.close(channel.revoke)
            del self._channels[channel]
            self._state.revoked[channel] = self.peer

    # ---- frames ----------------------------------------------------------------------------------

    async def _converse(self) -> None:
        """Answer requests until the client closes the connection.

        Raises:
            FormatError: a request was malformed; the client got a ``Failure``.
            trio.BrokenResourceError: the client is gone.
            trio.TooSlowError: the client took longer than ``FRAME_TIMEOUT_S`` for a frame.
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
            await self._send(Reply(protocol.failure_of(error)))
            raise

    def _greet(self, hello: Message) -> Reply:
        if not isinstance(hello, protocol.Hello):
            raise FormatError(f"greet a client: expected Hello, got {type(hello).__name__}")
        if hello.protocol != protocol.PROTOCOL_VERSION:
            raise VersionError(
                f"connect to the service: it speaks protocol {protocol.PROTOCOL_VERSION} (dlfs "
                f"{dlfs.__version__}), the client {hello.protocol} (dlfs {hello.version[:40]})"
            )
        return Reply(protocol.Welcome(protocol.PROTOCOL_VERSION, dlfs.__version__, os.getpid()))

    async def _receive(self) -> Message | None:
        """Return the next request; None when the client has closed the connection."""
        if not self._received and not await self._receive_more():
            return None
        with trio.fail_after(FRAME_TIMEOUT_S):
            length = protocol.body_bytes(await self._take(protocol.HEADER.size))
            return protocol.decode(await self._take(length), protocol.REQUESTS)

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
        """Send a frame; its descriptors travel with its first byte."""
        with reply.cleanup, trio.fail_after(FRAME_TIMEOUT_S):
            try:
                frame, descriptors = protocol.encode(reply.message), reply.descriptors
            except LimitError as error:  # statistics of very many clients
                frame, descriptors = protocol.encode(protocol.failure_of(error)), ()
            rights = array.array("i", descriptors)
            extra = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if rights else []
            sent = await self._stream.socket.sendmsg([frame], extra)
            await self._stream.send_all(frame[sent:])

    # ---- requests --------------------------------------------------------------------------------

    async def _answer(self, request: Message) -> Reply:
        handler = self._handlers.get(type(request))
        if handler is None:
            raise FormatError(f"answer a client: {type(request).__name__} is not expected now")
        answered = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._report_pending, answered)
            try:
                return await handler(request)
            except (DlfsError, OSError, MemoryError) as error:
                denied = isinstance(error, OSError) and error.errno == errno.EACCES
                level = logging.WARNING if denied else logging.INFO
                _log.log(level, "%s, %s: %s", self.peer, type(request).__name__, error)
                return Reply(protocol.failure_of(error))
            finally:
                answered.set()

    async def _report_pending(self, answered: trio.Event) -> None:
        """Tell the client again and again that its request is worked on, until it is answered."""
        with suppress(
            trio.BrokenResourceError, OSError, trio.TooSlowError
        ):  # sending the answer fails too
            while True:
                with trio.move_on_after(PENDING_S):
                    await answered.wait()
                    return
                await self._send(Reply(protocol.Pending()))

    async def _list_volumes(self, request: protocol.ListVolumes) -> Reply:
        served, access = self._state.volumes.values(), self._state.access
        volumes = access.readable(self.peer, served)
        if request.wanted:
            wanted = [v for v in served if request.wanted in (v.label, str(v.uuid))]
            if wanted and not access.readable(self.peer, wanted):
                raise access.refusal(self.peer, request.wanted, wanted[0].uuid)
        return Reply(protocol.Volumes(tuple(protocol.VolumeName(v.uuid, v.label) for v in volumes)))

    async def _get_volume(self, request: protocol.GetVolume) -> Reply:
        volume = self._state.volume_for(self.peer, request.volume)
        await self._state.refresh(volume)
        generation = volume.generation()
        reply = Reply(protocol.VolumeState(describe_volume(generation)))
        reply.descriptors = [self._attach_generation(reply, generation)]
        return reply

    def _attach_generation(self, reply: Reply, generation: Generation) -> int:
        file = generation_file(generation.superblock, generation.catalog)
        return reply.cleanup.enter_context(file)

    async def _open_dataset(self, request: protocol.OpenDataset) -> Reply:
        volume = await self._begin_opening(request.volume, request.dataset)
        acquire = functools.partial(volume.acquire, request.dataset)
        return await self._open(volume, acquire, request.fields)

    async def _open_step(self, request: protocol.OpenStep) -> Reply:
        volume = await self._begin_opening(request.volume, request.dataset)
        wanted = request.dataset, request.number
        measure = functools.partial(volume.imports.step_bytes, *wanted)
        size = await self._state.run_for_volume(volume, measure)
        self._state.charge_step(self.peer, size, *self._most_memory(MEMORY_BYTES_MAX))
        try:
            acquire = functools.partial(volume.acquire_step, *wanted)
            return await self._open(volume, acquire, (), step_bytes=size)
        except BaseException:
            self._state.refund_step(self.peer, size)
            raise

    async def _get_steps(self, request: protocol.GetSteps) -> Reply:
        volume = self._state.volume_for(self.peer, request.volume)
        await self._state.refresh(volume)
        find = functools.partial(volume.imports.headers, request.dataset, request.first)
        headers = await self._state.run_for_volume(volume, find)
        reply = Reply(protocol.Steps(len(headers)))
        file = headers_file(headers, request.dataset)
        reply.descriptors = [reply.cleanup.enter_context(file)]
        return reply

    async def _begin_opening(self, volume: UUID, dataset: UUID) -> ServedVolume:
        """Return the volume of a dataset that the client may open, at its newest generation."""
        if len(self._datasets) == DATASETS_MAX:
            raise LimitError(f"open a dataset: expected at most {DATASETS_MAX} on a connection")
        if dataset in self._datasets:
            raise UsageError(f"open dataset {dataset}: this connection has it open")
        found = self._state.volume_for(self.peer, volume)
        await self._state.refresh(found)
        return found

    async def _open(
        self,
        volume: ServedVolume,
        acquire: Callable[[], Dataset],
        fields: tuple[str, ...],
        *,
        step_bytes: int = 0,
    ) -> Reply:
        """Open a dataset, or a step of an import, for the client.

        Args:
            volume: its volume.
            acquire: acquires it.
            fields: names of the fields that are read; none for whole samples.
            step_bytes: what the step counts; 0 for a dataset.
        """
        dataset = await self._state.run_for_volume(volume, acquire)
        with ExitStack() as undone:
            undone.callback(dataset.close)
            find = functools.partial(_find_reader, dataset, fields)
            session, samples = await self._state.run_for_volume(volume, find)
            native = samples.native
            assert isinstance(native, NativeReader)
            arena, arena_bytes = native.arena()
            state = protocol.DatasetState(
                session.members, arena_bytes, native.timeout_ms, samples.span
            )
            reply = Reply(state)
            shares = self._shares(volume.uuid, dataset.uuid, arena_bytes, samples)
            if step_bytes:
                about = samples.directory.entries_descriptor()
            else:
                about = self._attach_generation(reply, volume.generation())
            reply.descriptors = [about, arena]
            self._datasets[dataset.uuid] = _ClientDataset(
                volume.uuid, dataset, samples, native, *shares, step_bytes
            )
            undone.pop_all()
        return reply

    def _shares(
        self, volume: UUID, uuid: UUID, arena_bytes: int, samples: SampleReader
    ) -> tuple[Share, Share]:
        """Return the bounds on bytes that the client may pin and on the service's other memory."""
        pins = self._state.share(
            self.peer,
            (volume, uuid, samples.span),
            int(arena_bytes * PINNED_SHARE),
            int(arena_bytes * PINNED_SHARE_OF_USER),
        )
        directory = samples.directory
        mean_bytes = directory.sample_bytes // max(1, len(directory)) + 1
        ahead = min(len(directory), arena_bytes // mean_bytes)
        most = max(MEMORY_BYTES_MAX, 2 * directory.largest_bytes + 64 * MIB)
        most, most_of_user = self._most_memory(most + ahead * STREAM_SAMPLE_BYTES)
        memory = self._state.share(self.peer, None, most, most_of_user)
        memory.allow(most)
        if memory.parent is not None:
            memory.parent.allow(most_of_user)
        return pins, memory

    def _most_memory(self, most: int) -> tuple[int, int]:
        """Return limits of memory for the client's process and for its user, given the first."""
        most_of_user = MEMORY_PROCESSES * most
        if self.peer.entrance:
            others = max(0, allowed_bytes() - self._state.cache.memory.size_bytes)
            most_of_user = min(most_of_user, int(others * MEMORY_OF_SOCKET))
            most = min(most, most_of_user)
        return most, most_of_user

    async def _get_segment(self, request: protocol.GetSegment) -> Reply:
        volume = self._state.volume_for(self.peer, request.volume)

        def find(cleanup: ExitStack) -> int:
            directory = cleanup.enter_context(volume.acquire(request.dataset)).directory
            if request.segment == "entries":
                return directory.entries_descriptor()
            if request.segment == "names":
                return directory.names_descriptor()
            if request.segment == "attributes":
                return self._state.cache.attributes(volume.uuid, request.dataset).descriptor
            raise NotFoundError(f"get segment {request.segment!r} of a dataset: no such segment")

        with ExitStack() as cleanup:
            descriptor = await self._state.run_for_volume(volume, functools.partial(find, cleanup))
            size_bytes = os.fstat(descriptor).st_size
            return Reply(protocol.Segment(size_bytes), [descriptor], cleanup.pop_all())

    def _opened(self, uuid: UUID) -> _ClientDataset:
        opened = self._datasets.get(uuid)
        if opened is None:
            raise ClosedError(f"use dataset {uuid}: this connection has not opened it")
        return opened

    async def _open_channel(self, request: protocol.OpenChannel) -> Reply:
        opened = self._opened(request.dataset)
        await self._close_ended_channels()
        for owner, most, whose in (
            (self.peer.process, CHANNELS_MAX, "in one process"),
            (self.peer.account, CHANNELS_OF_USER_MAX, f"of {self.peer.user}"),
        ):
            if self._state.channel_counts[owner] >= most:
                raise LimitError(
                    f"open a channel: expected at most {most} {whose} (callers and epochs at "
                    "once); close epochs that are not used"
                )
        self._state.count_channels(self.peer, 1)
        try:
            channel = await trio.to_thread.run_sync(_make_channel, opened)
        except BaseException:
            self._state.count_channels(self.peer, -1)
            raise
        self._channels[channel] = request.dataset
        descriptors = channel.descriptors
        reply = Reply(protocol.ChannelState(), [descriptors.memory.value, descriptors.wake.value])
        reply.cleanup.enter_context(descriptors)
        return reply

    async def _diagnose(self, request: protocol.Diagnose) -> Reply:
        opened = self._opened(request.dataset)
        volume = self._state.volume(opened.volume)
        found = await self._state.run_for_volume(volume, opened.samples.diagnose)
        reason = None if found is None else str(found)
        return Reply(protocol.Diagnosis(reason, isinstance(found, MovedError)))

    async def _get_statistics(self, _request: protocol.GetStatistics) -> Reply:
        found = await trio.to_thread.run_sync(self._state.snapshot, self.peer)
        return Reply(protocol.Statistics(found))

    async def _attach_volume(self, request: protocol.AttachVolume) -> Reply:
        self._state.access.check_owner(self.peer, "attach a volume")
        rule = None
        if request.readers is not None:
            rule = AllowList(frozenset(request.readers.users), frozenset(request.readers.groups))
        return Reply(await attach(self._state, request.members, rule, request.memory_bytes))

    async def _detach_volume(self, request: protocol.DetachVolume) -> Reply:
        self._state.access.check_owner(self.peer, "detach a volume")
        if request.force:  # to be dropped as other sessions are would take its answer from it
            await self._release(request.volume)
        await detach(self._state, request.volume, force=request.force)
        return Reply(protocol.Detached())

    async def _publish_socket(self, request: protocol.PublishSocket) -> Reply:
        self._state.access.check_owner(self.peer, "publish a socket")
        return Reply(protocol.Published(await publish(self._state, request)))

    async def _unpublish_socket(self, request: protocol.UnpublishSocket) -> Reply:
        self._state.access.check_owner(self.peer, "unpublish a socket")
        await unpublish(self._state, request.name)
        return Reply(protocol.Unpublished())

    async def _connect_incoming(self, _request: protocol.ConnectIncoming) -> Reply:
        if self.peer.entrance:
            raise DeviceError(f"seal: {self.peer.user} may only read", errno.EACCES)
        if self._state.mount is None:
            raise UsageError(
                "seal: the service has no mount; start it with --mount DIR --incoming AREA"
            )
        connection = self._state.mount.connect_incoming(self.peer.uid)
        reply = Reply(protocol.Incoming(), [connection.fileno()])
        reply.cleanup.enter_context(connection)
        return reply

    async def _release(self, volume: UUID) -> None:
        """Close the client's datasets of a volume, with their channels."""
        datasets = [uuid for uuid, opened in self._datasets.items() if opened.volume == volume]
        channels = [channel for channel, uuid in self._channels.items() if uuid in datasets]
        await self._revoke_channels(channels)
        await self._close_datasets(datasets)

    async def _close_datasets(self, uuids: Sequence[UUID]) -> None:
        for uuid in uuids:
            opened = self._datasets.pop(uuid)
            self._state.refund_step(self.peer, opened.step_bytes)
            await self._state.close(opened.dataset.close)


def _find_reader(dataset: Dataset, fields: tuple[str, ...]) -> tuple[DatasetSession, SampleReader]:
    """Return the reader of whole samples or of some fields, with the session that has it.

    The sizes of the reader's samples are known. If the dataset is moved meanwhile, it is followed.
    """

    def find(session: DatasetSession) -> tuple[DatasetSession, SampleReader]:
        return session, session.readers.reader(fields or None)

    session, samples = follow(lambda: dataset.session, find)
    _ = samples.directory.sample_bytes, samples.directory.largest_bytes
    return session, samples


def _make_channel(opened: _ClientDataset) -> ServerChannel:
    largest_bytes = opened.samples.directory.largest_bytes
    return ServerChannel(
        opened.reader,
        opened.share,
        samples_max=SAMPLES_MAX,
        copied_bytes_max=max(COPIED_BYTES_MAX, largest_bytes + MIB),
        memory=opened.memory,
    )
