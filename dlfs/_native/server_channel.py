"""The service's end of channels: what lets other processes use a reader.

The service makes its reader with ``NativeReader(..., shared=True)``, a ``Share`` for each client,
and a ``ServerChannel`` for each channel that the client asks for. It passes to the client, over a
socket of its own, ``reader.arena_descriptor`` with ``reader.arena_bytes`` once, and the two
descriptors of every channel, and then closes its copies of those two. A native thread serves each
channel; Python has no part in it. The client's end is ``channel``.

When the client is gone, however it ended, ``ServerChannel.ended`` says so, and all that the client
had is given back by then.

Source: ``channel.h``.
"""

from __future__ import annotations

import threading
from ctypes import byref, c_int, c_void_p

from dlfs._native import abi, channel_abi
from dlfs._native.channel import ChannelDescriptors
from dlfs._native.library import Collected, check, library
from dlfs._native.reader import NativeReader
from dlfs.forks import OwnerProcess

SAMPLES_MAX = 1 << 16
"""Most samples of one batch, by default."""

BATCHES_MAX = 1 << 12
"""Most batches that a client may have at a time on one channel, by default."""

COPIED_BYTES_MAX = 256 << 20
"""Memory of one channel for batches copied out of the arena; pages are used as they are needed."""

STATS = tuple(name for name, *_ in channel_abi.ChannelStats._fields_)
"""Names of the counters that ``ServerChannel.stats`` returns."""

ENDED_CLOSED = abi.E_CLOSED
ENDED_PROTOCOL = abi.E_PROTOCOL


class Share(Collected):
    """A bound on bytes that one client may cause, over all of its channels, or one user.

    Args:
        bytes_max: most bytes: pinned in one reader's arena, or of the service's other memory.
        parent: the share of the client's user; what this one takes counts there too.

    Attributes:
        parent: as given.

    Threads: any at once.
    """

    def __init__(self, bytes_max: int, parent: Share | None = None) -> None:
        handle = c_void_p()
        within = None if parent is None else parent.handle
        code = library().dlfs_share_create_within(within, bytes_max, byref(handle))
        check(code, f"make a share of {bytes_max} bytes")
        self.handle: c_void_p | None = handle
        self.parent = parent  # found by others as long as this one is

    @property
    def pinned_bytes(self) -> int:
        """Bytes that are taken of it now."""
        pinned: int = library().dlfs_share_pinned_bytes(self.handle)
        return pinned

    def allow(self, bytes_max: int) -> None:
        """Raise its bound to at least so many bytes."""
        library().dlfs_share_allow(self.handle, bytes_max)

    def __del__(self) -> None:
        handle = getattr(self, "handle", None)
        if handle is not None and not self._at_exit():
            library().dlfs_share_destroy(handle)
            self.handle = None


class ServerChannel(Collected):
    """The service's end of a channel, and the native thread that serves it.

    Args:
        reader: made with ``shared=True``; not closed before this channel is.
        share: what the client may pin in the arena; more is copied.
        memory: what it may cause of the service's other memory; None: no bound.
        samples_max: of one batch, 1..2**20.
        batches_max: that the client has at once, 1..65536.
        copied_bytes_max: memory for batches copied out of the arena.

    Raises:
        LimitError: the client has no memory left for another channel.
        UsageError: a number is out of range, or the reader's arena is not shared.
        DeviceError: no memory, no more descriptors, no more threads.

    Attributes:
        descriptors: the client's. Pass them on, then ``descriptors.close()``.

    Threads: any at once.
    """

    def __init__(
        self,
        reader: NativeReader,
        share: Share,
        *,
        samples_max: int = SAMPLES_MAX,
        batches_max: int = BATCHES_MAX,
        copied_bytes_max: int = COPIED_BYTES_MAX,
        memory: Share | None = None,
    ) -> None:
        self._reader = reader
        self._owner = OwnerProcess()
        self._lock = threading.Lock()
        config = channel_abi.ChannelConfig(
            reader=reader.acquire(),
            share=share.handle,
            copied_bytes_max=copied_bytes_max,
            samples_max=samples_max,
            batches_max=batches_max,
            memory=None if memory is None else memory.handle,
        )
        handle, descriptor, wake = c_void_p(), c_int(), c_int()
        code = library().dlfs_channel_create(
            byref(config), byref(handle), byref(descriptor), byref(wake)
        )
        if code < 0:
            reader.release()
        check(code, f"make a channel for batches of {samples_max} samples")
        self._handle: c_void_p | None = handle  # and the loan of the reader, until it is closed
        self._last_stats = channel_abi.ChannelStats(ended=ENDED_CLOSED)
        self.descriptors = ChannelDescriptors(descriptor.value, wake.value)

    def stats(self) -> dict[str, int]:
        """``dlfs_channel_stats`` by name; the last ones when it is closed."""
        with self._lock:
            if self._handle is not None:
                library().dlfs_channel_get_stats(self._handle, byref(self._last_stats))
            stats = self._last_stats
            return {name: int(getattr(stats, name)) for name, *_ in stats._fields_}

    @property
    def ended(self) -> int:
        """0 while it serves, then ``ENDED_CLOSED`` or ``ENDED_PROTOCOL``; ``close`` it then."""
        return self.stats()["ended"]

    def close(self) -> None:
        """End the thread and give back all that the client had. Idempotent.

        Waits for a read that is under way: at most the reader's timeout, so call it from a thread
        that may. The client's batches may change under it from now on.
        """
        with self._lock:
            handle, self._handle = self._handle, None
        if handle is None or not self._owner.is_current():
            return
        library().dlfs_channel_get_stats(handle, byref(self._last_stats))
        library().dlfs_channel_destroy(handle)
        self._reader.release()

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None and not self._at_exit():
            self.close()
