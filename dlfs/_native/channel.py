"""A service's reader used from another process, through the channels of ``server_channel``.

The client makes a ``ClientReader`` of the service's sample memory and of a function that obtains
another channel. It has the methods of ``NativeReader``; its batches are ``NativeBatch``es whose
samples lie in the service's arena, and are given back when they are collected. ``ClientStream`` is
its ``NativeStream``.

When the service is gone, however it ended, calls under way raise ``ServiceLostError`` at once.

Source: ``channel.h``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from ctypes import byref, c_void_p
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from dlfs._native import abi, channel_abi
from dlfs._native.batch import BatchHandle, NativeBatch, NativeFailure
from dlfs._native.directory import NativeDirectory
from dlfs._native.library import Collected, check, library
from dlfs._native.parts import SamplePart, copy_part
from dlfs._native.reader import (
    PLANS,
    WAIT_MS,
    NativeSequence,
    StreamOptions,
    copy_sample,
    member_counters,
    start_of,
)
from dlfs._native.sockets import close_in_children
from dlfs.errors import ClosedError, LimitError
from dlfs.forks import OwnerProcess


@dataclass(frozen=True, slots=True)
class ChannelDescriptors:
    """The client's ends of a channel: open files, owned by the holder of this object.

    Attributes:
        memory: the memfd of the rings.
        wake: a socket. While a copy of it is open anywhere, the client's death is not noticed.
    """

    memory: int
    wake: int

    def close(self) -> None:
        """Close both, once."""
        os.close(self.memory)
        os.close(self.wake)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class ClientChannel(Collected):
    """A ``dlfs_client``: one caller's way to the service.

    Threads: one at a time.
    """

    def __init__(
        self,
        arena: c_void_p | None,
        descriptors: ChannelDescriptors,
        timeout_ms: int,
        directory: NativeDirectory | None,
    ) -> None:
        handle = c_void_p()
        code = library().dlfs_client_create(
            arena, descriptors.memory, descriptors.wake, timeout_ms, byref(handle)
        )
        if code < 0:
            descriptors.close()
            check(code, "open a channel to the service")
        os.close(descriptors.memory)
        self.handle: c_void_p | None = handle
        close_in_children(descriptors.wake)
        _open_channels.add(self)
        if directory is not None:
            code = library().dlfs_client_attach(handle, directory.handle)
            check(code, "read what the service keeps of a dataset with this directory")

    def stats(self) -> dict[str, int]:
        """``dlfs_client_stats`` by name."""
        stats = channel_abi.ClientStats()
        library().dlfs_client_get_stats(self.handle, byref(stats))
        return {name: int(getattr(stats, name)) for name, *_ in stats._fields_}

    def close(self) -> None:
        """End the channel, with the last of its batches. Idempotent."""
        _open_channels.discard(self)
        handle, self.handle = self.handle, None
        if handle is not None:
            library().dlfs_client_destroy(handle)

    def __del__(self) -> None:
        if getattr(self, "handle", None) is not None and not self._at_exit():
            self.close()


_open_channels: weakref.WeakSet[ClientChannel] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    """Leave the parent's channels. Their memory stays as it is: views of batches may be in use."""
    for channel in list(_open_channels):
        channel.handle = None
    _open_channels.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


def _limit_error(what: str, count: int, channel: ClientChannel) -> LimitError:
    """Why a channel refuses a batch of so many samples."""
    most = library().dlfs_client_samples_max(channel.handle)
    if count > most:
        return LimitError(f"{what}: expected at most {most} in a batch")
    return LimitError(
        f"{what}: with the batches still in use they take more memory than the service has for "
        "this client; release some, or ask for fewer samples"
    )


class ClientReader(Collected):
    """A service's reader, with the methods of ``NativeReader``.

    Args:
        arena_descriptor: the memfd of the service's sample memory; the caller's, who may close it.
        arena_bytes: its length.
        open_channel: obtains the descriptors of another channel from the service; called by any
            thread, when more callers than before are at once in a call or have a stream. What it
            raises, the call raises.
        timeout_ms: for one answer of the service, which is then given up as lost; 0: as long as
            it lives.
        service: what errors call it.
        directory: of the dataset, open while channels are made. With it, samples that the service
            keeps for good are found without asking the service; see ``channel.h``.

    Attributes:
        closing: whether ``close`` was called.
        lost: whether a channel was lost: the service is gone, or is to be connected to anew.

    Raises:
        UsageError: the arena is shorter than said.
        DeviceError: it cannot be mapped.

    Every method raises ``ServiceLostError`` when the service, or the channel in use, is gone. A
    channel that is lost is not used again: the next call obtains another one, if it can.

    Threads: any at once. In a forked child it is closed: make another.
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
    ) -> None:
        handle = c_void_p()
        code = library().dlfs_arena_map(arena_descriptor, arena_bytes, byref(handle))
        check(code, f"map {arena_bytes} bytes of the memory of {service}")
        self.service = service
        self.lost = False
        self._arena: c_void_p | None = handle
        self._open_channel = open_channel
        self._timeout_ms = timeout_ms
        self._directory = directory
        # The locations stay mapped as long as this array is there, whoever closes the directory.
        self._locations = None if directory is None else directory.locations()
        self._owner = OwnerProcess()
        self.closing = False
        self._lock = threading.RLock()  # around the arena; a collector may close a reader under it
        self._idle: deque[ClientChannel] = deque()  # its operations are atomic
        self._scratch = threading.local()
        self._lost_members = 0

    def read(self, indices: npt.NDArray[np.uint64]) -> NativeBatch:
        """Read samples as one batch.

        Args:
            indices: ``uint64[n]``, contiguous and writable.

        Raises:
            UsageError: an index is out of range.
            LimitError: more samples than a batch of the channel may have, or the batches that are
                still in use take all the memory that the service has for this client.
            DlfsError: memory or device as a whole; single samples that fail are in the batch.
        """
        batch = BatchHandle()
        channel, code = self.take_channel(), 0
        try:
            code = library().dlfs_client_read(
                channel.handle, start_of(indices), len(indices), byref(batch.pointer)
            )
        finally:
            self.return_channel(channel, code)
        what = f"read {len(indices)} samples from {self.service}"
        if code == abi.E_LIMIT:
            raise _limit_error(what, len(indices), channel)
        check(code, what)
        return NativeBatch(batch)

    def get(self, index: int, *, cached_only: bool = False) -> bytes | None:
        """Copy one sample.

        Args:
            index: 0..N-1; not checked here.
            cached_only: copy it only if it is in the service's memory, without waiting for
                a device.

        Returns:
            As of ``NativeReader.get``.
        """
        flags = abi.GET_CACHED if cached_only else 0
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
        """Copy a part of a sample, unverified; as ``NativeReader.read_part``."""
        channel, code = self.take_channel(), 0
        try:
            code, failure = copy_part(library().dlfs_client_read_part, channel.handle, part, buffer)
        finally:
            self.return_channel(channel, code)
        if failure.code == 0:
            check(code, f"read a part of sample {part.index} from {self.service}")
        return failure

    def stats(self) -> dict[str, int]:
        """``dlfs_reader_stats`` by name: of the service's reader, for all its clients."""
        stats = abi.ReaderStats()
        channel, code = self.take_channel(), 0
        try:
            code = library().dlfs_client_reader_stats(channel.handle, byref(stats))
        finally:
            self.return_channel(channel, code)
        check(code, f"ask {self.service} for its counters")
        return {name: int(getattr(stats, name)) for name, *_ in abi.ReaderStats._fields_}

    def member_stats(self, member: int) -> dict[str, int | list[int]]:
        """``dlfs_member_stats`` of a member, by name; ``latency`` is a list of counts.

        Raises:
            UsageError: there is no such member.
        """
        stats = abi.MemberStats()
        channel, code = self.take_channel(), 0
        try:
            code = library().dlfs_client_member_stats(channel.handle, member, byref(stats))
        finally:
            self.return_channel(channel, code)
        check(code, f"get statistics of member {member}")
        return member_counters(stats)

    def lost_members(self) -> int:
        """The members that are lost, as bits by number; as of the last answer."""
        return self._lost_members

    def member_code(self, member: int) -> int:
        """Why a member was lost, the last time; 0: it never was."""
        channel, code = self.take_channel(), 0
        try:
            code = library().dlfs_client_member_code(channel.handle, member)
        finally:
            self.return_channel(channel, code)
        if code == abi.E_SERVICE:
            check(code, f"ask why member {member} was lost")
        return int(code)

    def close(self, on_closed: Callable[[], None] | None = None) -> None:
        """Close every channel, or have its last user do it, and call ``on_closed``. Idempotent."""
        self.closing = True
        if not self._owner.is_current():
            return
        self._close_idle()
        with self._lock:
            handle, self._arena = self._arena, None
            if handle is not None:
                library().dlfs_arena_unmap(handle)
        if on_closed is not None:
            on_closed()

    def __del__(self) -> None:
        if getattr(self, "_arena", None) is not None and not self._at_exit():
            self.close()

    def stream(
        self,
        sequence: NativeSequence,
        options: StreamOptions,
    ) -> ClientStream:
        """As ``NativeReader.stream``."""
        return ClientStream(
            self,
            sequence,
            options,
        )

    def take_channel(self) -> ClientChannel:
        """Take an idle channel for a caller of its own, or obtain another one.

        Raises:
            ClosedError: the reader is closed, or belongs to another process.
        """
        if not self._owner.is_current():
            raise ClosedError(f"use a reader: it belongs to process {self._owner.pid}")
        with contextlib.suppress(IndexError):
            if not self.closing:
                return self._idle.pop()
        descriptors = None if self.closing else self._open_channel()
        with self._lock:
            if self._arena is not None and descriptors is not None:
                return ClientChannel(self._arena, descriptors, self._timeout_ms, self._directory)
        if descriptors is not None:
            descriptors.close()
        raise ClosedError("use a reader: it is closed")

    def return_channel(self, channel: ClientChannel, code: int) -> None:
        """Put a channel aside for the next caller, unless its last call's code says it is lost."""
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


class ClientStream(Collected):
    """A part of an epoch, read ahead by the service: the counterpart of ``NativeStream``.

    Args:
        reader: gives a channel for as long as the stream is open.
        sequence: over the client's own copy of the dataset's directory; the service makes one of
            the same parameters over its own. Of one over chosen samples, the service is given
            this stream's indices, no more than the dataset has samples, or 2**20.
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
        self._owner = OwnerProcess()
        config = options.config(sequence)
        self._channel: ClientChannel | None = reader.take_channel()
        code = library().dlfs_client_stream_open(self._channel.handle, byref(config))
        if code < 0:
            self.close()
        what = f"have {options.count} samples read ahead by {reader.service}"
        if code == abi.E_LIMIT:
            most = channel_abi.CHANNEL_SAMPLES_MAX
            raise LimitError(
                f"{what}: expected at most {most} chosen ones, or as many as the dataset has"
            )
        check(code, what)
        self._plan = next(name for name, value in PLANS.items() if value == code)

    @property
    def plan(self) -> str:
        """The plan in use: ``direct``, ``chunks`` or ``harvest``."""
        return self._plan

    def next(self, count: int) -> NativeBatch | None:
        """The next samples, fewer at the end; None when there are none left.

        Raises:
            LimitError: as of ``ClientReader.read``; the same samples come with the next call of
                the same count.
            ServiceLostError: the service is gone.
        """
        batch = BatchHandle()
        code = -errno.EAGAIN
        while code == -errno.EAGAIN:  # a signal handler (Ctrl-C) runs between two waits
            code = library().dlfs_client_stream_next(
                self._open_channel().handle, count, WAIT_MS, byref(batch.pointer)
            )
        if code == abi.E_END:
            return None
        what = f"take the next {count} samples from {self._reader.service}"
        if code == abi.E_LIMIT:
            raise _limit_error(what, count, self._open_channel())
        check(code, what)
        return NativeBatch(batch)

    def _open_channel(self) -> ClientChannel:
        if not self._owner.is_current():
            raise ClosedError(
                f"take the next batch: the epoch belongs to process {self._owner.pid}"
            )
        if self._channel is None:
            raise ClosedError("take the next batch: the epoch is closed")
        return self._channel

    def close(self) -> None:
        """End the reading ahead. Idempotent; batches given out stay valid."""
        channel, self._channel = self._channel, None
        if channel is not None and not self._at_exit() and self._owner.is_current():
            code = library().dlfs_client_stream_close(channel.handle)
            self._reader.return_channel(channel, code)

    def __del__(self) -> None:
        if getattr(self, "_channel", None) is not None and not self._at_exit():
            self.close()
