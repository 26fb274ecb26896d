"""The client's end of channels: reads samples through a node service's reader.

A ``ClientReader`` maps the service's sample memory (the arena) and has the methods of
``NativeReader``. Each concurrent call takes a ``ClientChannel``; idle channels are reused. The
samples of its ``NativeBatch``es lie in the arena, and a batch is released when it is collected.
``ClientStream`` is the counterpart of ``NativeStream``. The service's end is ``server_channel``.

When the service ends for any reason, calls under way raise ``ServiceLostError`` at once.

Source: ``channel.h``.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from ctypes import byref, c_uint64, c_void_p
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

from dlfs._native import abi
from dlfs._native.batch import NativeBatch, NativeFailure, batch_owner
from dlfs._native.directory import NativeDirectory
from dlfs._native.handle import Descriptor, Handle, process_number
from dlfs._native.library import check, error_for, library
from dlfs._native.parts import SamplePart, copy_part, copy_sample
from dlfs._native.reader import (
    PLANS,
    NativeSequence,
    Stream,
    StreamOptions,
    member_counters,
    start_of,
)
from dlfs._native.sample_memory import SampleMemory
from dlfs._native.sockets import close_in_children
from dlfs.base.closing import Closing
from dlfs.base.forks import OwnerProcess
from dlfs.errors import ClosedError, DlfsError, LimitError, ServiceLostError


@dataclass(frozen=True, slots=True)
class ChannelDescriptors(Closing):
    """The client's descriptors of a channel.

    Attributes:
        memory: descriptor of the memfd with the rings.
        wake: descriptor of a socket. While any process has a copy of it open, the service does not
            notice the client's death.
    """

    memory: Descriptor = field(default_factory=Descriptor)
    wake: Descriptor = field(default_factory=Descriptor)

    def close(self) -> None:
        """Close both descriptors. Idempotent."""
        self.memory.close()
        self.wake.close()


class ClientChannel:
    """The client's end of one channel (``dlfs_client``).

    Args:
        arena: owner of the mapped sample memory.
        descriptors: the channel's descriptors, which this object closes.
        timeout_ms: longest wait for one answer; 0: no limit.
        directory: directory of the samples, or of the parts of them that are read.
        parts: the directory is of parts, which are never resident.
        process: number of this process, the only one that may use the channel.

    Threads: one at a time.
    """

    def __init__(
        self,
        arena: Handle,
        descriptors: ChannelDescriptors,
        timeout_ms: int,
        directory: NativeDirectory | None,
        parts: bool,
        process: int,
    ) -> None:
        locations = None if directory is None else directory.packed_locations()
        self.handle: Handle | None = Handle(
            library().dlfs_client_destroy, arena, locations, process=process
        )
        close_in_children(descriptors.wake.value)
        with descriptors:
            code = library().dlfs_client_create(
                arena,
                descriptors.memory.value,
                byref(descriptors.wake),
                timeout_ms,
                byref(self.handle),
            )
        check(code, "open a channel to the service")
        if directory is not None:
            flags = abi.CLIENT_PARTS if parts else 0
            code = library().dlfs_client_attach(self.handle, directory.handle, flags)
            check(code, "read resident samples of the service with this directory")

    def stats(self) -> dict[str, int]:
        """Return the counters of ``dlfs_client_stats`` by name."""
        stats = abi.ClientStats()
        library().dlfs_client_get_stats(self.handle, byref(stats))
        return abi.counters(stats)

    def close(self) -> None:
        """End the channel as soon as its last batch is released. Idempotent."""
        handle, self.handle = self.handle, None
        if handle is not None:
            handle.free()


def _limit_error(what: str, count: int, most: int) -> LimitError:
    """Return the error for a refused batch of ``count`` samples, of a channel with a bound."""
    if count > most:
        return LimitError(f"{what}: expected at most {most} in a batch")
    return LimitError(
        f"{what}: with the batches still in use they take more memory than the service has for "
        "this client; release some, or request fewer samples"
    )


class ClientReader:
    """A reader of a node service, with the methods of ``NativeReader``.

    Args:
        arena_descriptor: descriptor of the service's sample memory; the caller may close it later.
        arena_bytes: length of the sample memory.
        open_channel: obtains the descriptors of a new channel from the service. Any thread calls it
            when all channels are in use by calls or streams. Its exceptions propagate.
        timeout_ms: longest wait for one answer, and 4 s for each MiB of its samples, after which
            the service counts as lost; 0: no limit.
        service: name of the service in error messages.
        directory: directory of the samples, or of the parts of them that are read. It must stay
            open while channels are made. With that of samples, those of resident chunks are read
            without a request; see ``channel.h``.
        parts: the directory is of parts.

    Attributes:
        closing: True once ``close`` was called.
        process: number of the process that made the reader.
        lost: True once a channel was lost: the service ended, or must be connected to again.

    Raises:
        UsageError: the arena is shorter than ``arena_bytes``.
        DeviceError: the arena cannot be mapped.

    Every method raises ``ServiceLostError`` if the service or the used channel is lost. A lost
    channel is not used again; the next call obtains a new one.

    Threads: any at once. Closed in a forked child, which must make a new one.
    """

    def __init__(
        self,
        arena_descriptor: int,
        arena_bytes: int,
        open_channel: Callable[[], ChannelDescriptors],
        *,
        timeout_ms: int = 0,
        service: str = "the service",
        directory: NativeDirectory | None = None,
        parts: bool = False,
    ) -> None:
        self.process = process_number()
        self._arena: Handle | None = Handle(library().dlfs_arena_view_unmap, process=self.process)
        code = library().dlfs_arena_view_map(arena_descriptor, arena_bytes, byref(self._arena))
        check(code, f"map {arena_bytes} bytes of the memory of {service}")
        base, size_bytes = c_void_p(), c_uint64()
        library().dlfs_arena_view_memory(self._arena, byref(base), byref(size_bytes))
        self._memory = SampleMemory(self._arena, base.value or 0, size_bytes.value, writable=False)
        self.service = service
        self.lost = False
        self._open_channel = open_channel
        self._timeout_ms = timeout_ms
        self._directory = directory
        self._parts = parts
        self._owner = OwnerProcess()
        self.closing = False
        self._idle: deque[ClientChannel] = deque()  # its operations are atomic
        self._scratch = threading.local()
        self._lost_members = 0

    def read(self, indices: npt.NDArray[np.uint64]) -> NativeBatch:
        """Read samples as one batch.

        Args:
            indices: ``uint64[n]``, contiguous and writable.

        Raises:
            UsageError: an index is out of range.
            LimitError: too many samples for one batch, or the unreleased batches use all memory
                that the service has for this client.
            DlfsError: all reads failed; failures of single samples are in the batch.
        """
        batch, count = batch_owner(), len(indices)
        code = self._call(library().dlfs_client_read, start_of(indices), count, byref(batch))
        what = f"read {count} samples from {self.service}"
        if code == abi.E_LIMIT:
            raise _limit_error(what, count, self._call(library().dlfs_client_samples_max))
        check(code, what)
        return NativeBatch(batch)

    def get(self, index: int, *, flags: int = 0) -> bytes | None:
        """Copy one sample.

        Args:
            index: 0..N-1; not checked here.
            flags: ``abi.GET_CACHED``: only if it is in the service's memory.

        Returns:
            The same as ``NativeReader.get``.
        """
        channel, code = self.take_channel(), 0
        try:
            found, code = copy_sample(
                library().dlfs_client_get, channel.handle, index, flags, self._scratch
            )
        finally:
            self.return_channel(channel, code)
        if code == abi.E_SERVICE:
            check(code, f"read sample {index} from {self.service}")
        return found

    def read_part(self, part: SamplePart, buffer: memoryview) -> NativeFailure:
        """Copy a part of a sample like ``NativeReader.read_part``."""
        read = library().dlfs_client_read_part
        code, failure = copy_part(partial(self._call, read), part, buffer)
        if failure.code == 0:
            check(code, f"read a part of sample {part.index} from {self.service}")
        return failure

    def memory(self) -> SampleMemory:
        """Return the read-only mapping of the service's sample memory.

        Raises:
            ClosedError: the reader is closed, or belongs to another process.
        """
        if self.closing or not self._owner.is_current():
            raise ClosedError("use a reader: it is closed, or belongs to another process")
        return self._memory

    def stats(self) -> dict[str, int]:
        """Return the counters of the service's reader by name, for all clients together."""
        stats = abi.ReaderStats()
        code = self._call(library().dlfs_client_reader_stats, byref(stats))
        check(code, f"get the counters of {self.service}")
        return abi.counters(stats)

    def member_stats(self, member: int) -> dict[str, int | list[int]]:
        """Return the counters of a member by name; ``latency`` is a list of counts.

        Raises:
            UsageError: there is no such member.
        """
        stats = abi.MemberStats()
        code = self._call(library().dlfs_client_member_stats, member, byref(stats))
        check(code, f"get statistics of member {member}")
        return member_counters(stats)

    def lost_members(self) -> int:
        """Return the lost members as a bit mask by member number, as of the last answer."""
        return self._lost_members

    def member_code(self, member: int) -> int:
        """Return the error code with which a member was last lost; 0 if it never was."""
        code = self._call(library().dlfs_client_member_code, member)
        if code == abi.E_SERVICE:
            check(code, f"get the reason why member {member} was lost")
        return code

    def _call(self, function: Callable[..., int], *arguments: object) -> int:
        """Call a function of libdlfs on a channel and return its code."""
        channel, code = self.take_channel(), 0
        try:
            code = function(channel.handle, *arguments)
            return code
        finally:
            self.return_channel(channel, code)

    def close(self) -> None:
        """Close all channels; used ones close on return. Idempotent."""
        self.closing = True
        self._arena = None
        self._memory.close()
        self._close_idle()

    def stream(
        self,
        sequence: NativeSequence,
        options: StreamOptions,
    ) -> ClientStream:
        """Open a stream at the service: see ``NativeReader.stream``."""
        return ClientStream(self, sequence, options)

    def take_channel(self) -> ClientChannel:
        """Take an idle channel, or obtain a new one; the caller must ``return_channel`` it.

        Raises:
            ClosedError: the reader is closed, or belongs to another process.
        """
        if not self._owner.is_current():
            raise ClosedError(f"use a reader: it belongs to process {self._owner.pid}")
        try:
            if not self.closing:
                return self._idle.pop()
        except IndexError:
            pass  # no channel is idle
        arena = self._arena
        if arena is None or self.closing:
            raise ClosedError("use a reader: it is closed")
        try:
            descriptors = self._open_channel()
        except ServiceLostError as error:
            if self.closing:  # another thread closed the connection meanwhile
                raise ClosedError("use a reader: it is closed") from error
            raise
        return ClientChannel(
            arena, descriptors, self._timeout_ms, self._directory, self._parts, self.process
        )

    def return_channel(self, channel: ClientChannel, code: int) -> None:
        """Return a channel for the next caller; close it if its last call lost it."""
        if code == abi.E_SERVICE:
            self.lost = True
            channel.close()
            return
        self._lost_members = library().dlfs_client_lost_members(channel.handle)
        self._idle.append(channel)
        if self.closing:
            self._close_idle()

    def _close_idle(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                self._idle.pop().close()


class ClientStream(Stream):
    """A consumer's share of an epoch, read ahead by the service: see ``NativeStream``.

    Args:
        reader: reader whose channel the stream uses until it is closed.
        sequence: the epoch's order over the client's copy of the directory. The service makes a
            sequence with the same parameters over its copy. For chosen samples, the service gets
            the stream's indices: at most the dataset's samples or 2**20, whichever is more.
        options: positions of the consumer.

    Threads: one at a time.
    """

    def __init__(
        self,
        reader: ClientReader,
        sequence: NativeSequence,
        options: StreamOptions,
    ) -> None:
        self._reader = reader
        config = options.config(sequence)
        self._channel: ClientChannel | None = reader.take_channel()
        handle = self._channel.handle
        assert handle is not None  # as it was taken just now
        super().__init__(library().dlfs_client_stream_next, handle)
        code = library().dlfs_client_stream_open(handle, byref(config))
        del handle  # a traceback that refers to this frame does not keep the channel open
        if code < 0:
            self.close()
        what = f"read {options.count} samples ahead through {reader.service}"
        if code == abi.E_LIMIT:
            most = abi.CHANNEL_SAMPLES_MAX
            raise LimitError(
                f"{what}: expected at most {most} chosen samples, or as many as the dataset has"
            )
        check(code, what)
        self._plan = next(name for name, value in PLANS.items() if value == code)

    @property
    def plan(self) -> str:
        """Plan in use: ``direct``, ``chunks`` or ``chunk_copy``."""
        return self._plan

    def _error(self, code: int, count: int) -> DlfsError:
        """Return the error of a failed ``next``; LimitError: see ``ClientReader.read``."""
        what = f"take the next {count} samples from {self._reader.service}"
        if code == abi.E_LIMIT:
            most = library().dlfs_client_samples_max(self._open_handle())
            return _limit_error(what, count, most)
        return error_for(code, what)

    def close(self) -> None:
        """Close the stream. Idempotent; its batches stay valid."""
        channel, self._channel, self._handle = self._channel, None, None
        if channel is not None and self._owner.is_current():
            code = library().dlfs_client_stream_close(channel.handle)
            self._reader.return_channel(channel, code)
