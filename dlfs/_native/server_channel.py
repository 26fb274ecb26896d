"""The service's end of channels, which let other processes use a reader.

The service makes a ``NativeArena(..., shared=True)`` for its readers, a ``Share`` for each client,
and a ``ServerChannel`` for each channel that the client requests. It passes ``reader.arena()`` to
the client once, and the two descriptors of every channel, over a separate socket. Then it closes
its copies of the channel's descriptors. A native thread serves each channel; no Python code runs
for a request. The client's end is ``channel``.

After the client's end for any reason, ``ServerChannel.ended`` is not 0; by then the channel has
released the client's batches and stream.

Source: ``channel.h``.
"""

from __future__ import annotations

from ctypes import byref

from dlfs._native import abi
from dlfs._native.channel import ChannelDescriptors
from dlfs._native.handle import Handle, process_number
from dlfs._native.library import check, library
from dlfs._native.reader import NativeReader
from dlfs.base.forks import Lock

SAMPLES_MAX = 1 << 16
"""Most samples of one batch, by default."""

BATCHES_MAX = 1 << 12
"""Most unreleased batches of one channel, by default."""

COPIED_BYTES_MAX = 256 << 20
"""Memory of one channel for batches that are copied out of the arena, in bytes. Only the pages that
are in use take memory."""

STATS = tuple(name for name, *_ in abi.ChannelStats._fields_)
"""Names of the counters that ``ServerChannel.stats`` returns."""

ENDED_CLOSED = abi.E_CLOSED


class Share:
    """A bound on memory for all channels of one client, or of one user.

    Args:
        bytes_max: most bytes pinned of an arena, or used of the service's other memory. Of a reader
            that may hold a part of the arena at present, that part of the bytes may be pinned.
        parent: share of the client's user; the bytes of this share count there as well.

    Attributes:
        parent: share of the client's user.

    Threads: any at once.
    """

    def __init__(self, bytes_max: int, parent: Share | None = None) -> None:
        within = None if parent is None else parent.handle
        self.handle: Handle = Handle(library().dlfs_share_destroy, within)
        code = library().dlfs_share_create_within(within, bytes_max, byref(self.handle))
        check(code, f"make a share of {bytes_max} bytes")
        self.parent = parent  # keeps the parent alive: others find it by weak reference

    def allow(self, bytes_max: int) -> None:
        """Raise the bound to at least ``bytes_max``."""
        library().dlfs_share_allow(self.handle, bytes_max)


class ServerChannel:
    """The service's end of a channel, and the native thread that serves it.

    Args:
        reader: a reader in an arena made with ``shared=True``.
        share: bound on the bytes that the client pins in the arena; batches beyond it are copied.
        memory: bound on the service's other memory for the client; None: no bound.
        samples_max: most samples of one batch, 1..2**20.
        batches_max: most unreleased batches, 1..65536.
        copied_bytes_max: memory for batches copied out of the arena, in bytes.

    Raises:
        LimitError: the client has no memory left for another channel.
        UsageError: a number is out of range, or the reader's arena is not shared.
        DeviceError: the system has no memory, descriptors or threads left.

    Attributes:
        descriptors: the client's descriptors: pass them on, then call ``descriptors.close()``.

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
        self._lock = Lock()
        owner = reader.handle
        config = abi.ChannelConfig(
            reader=owner,
            share=share.handle,
            copied_bytes_max=copied_bytes_max,
            samples_max=samples_max,
            batches_max=batches_max,
            memory=None if memory is None else memory.handle,
        )
        self._last_stats = abi.ChannelStats(ended=ENDED_CLOSED)
        self.descriptors = ChannelDescriptors()
        used = (owner, share.handle, None if memory is None else memory.handle)
        self._handle: Handle | None = Handle(
            library().dlfs_channel_destroy, *used, process=reader.process
        )
        code = library().dlfs_channel_create(
            byref(config),
            byref(self._handle),
            byref(self.descriptors.memory),
            byref(self.descriptors.wake),
        )
        self._process = reader.process
        check(code, f"make a channel for batches of {samples_max} samples")

    def stats(self) -> dict[str, int]:
        """Return the channel's counters by name; after ``close``, the last ones."""
        with self._lock:
            if self._handle is not None:
                library().dlfs_channel_get_stats(self._handle, byref(self._last_stats))
            return abi.counters(self._last_stats)

    @property
    def ended(self) -> int:
        """0 while the channel serves; then ``ENDED_CLOSED`` or the code of an error."""
        return self.stats()["ended"]

    def revoke(self) -> None:
        """Serve the client no longer; its next call fails. Idempotent.

        The bytes of its batches stay until it has closed its end: then ``ended`` is not 0. The
        reader may be closed. Waits for a read that is under way, at most the reader's timeout.

        Threads: one at a time, and not during ``close``.
        """
        handle = self._handle
        if handle is not None:
            library().dlfs_channel_revoke(handle)
            handle.keeps = handle.keeps[1:]  # but the reader: the native channel keeps its memory

    def close(self) -> None:
        """End the thread and release the client's batches and stream. Idempotent.

        Waits for a read that is under way, at most the reader's timeout. The memory of the
        client's batches may change from now on.
        """
        with self._lock:
            handle, self._handle = self._handle, None
        if handle is None:
            return
        if self._process == process_number():
            library().dlfs_channel_get_stats(handle, byref(self._last_stats))
        handle.free()
