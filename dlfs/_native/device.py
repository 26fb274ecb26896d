"""Native block devices and queue pairs as Python objects.

A ``NativeQueue`` keeps each buffer in an in-flight table until its operation has completed, so that
the kernel never writes to freed memory. Handles are freed by ``close``, or by the garbage
collector (``dlfs._native.handle``); a device after the last queue pair and reader that use it. One
thread at a time may use a queue pair; a device may be used by many at once.

A forked child may close a queue pair that it inherited, but must not use it: it makes its own.
"""

from __future__ import annotations

import enum
import errno
import os
from ctypes import addressof, byref
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from dlfs._native import abi
from dlfs._native.handle import PROCESS_ANY, Handle
from dlfs._native.library import check, error_for, library
from dlfs.base.arguments import Engine, check_choice
from dlfs.base.closing import Closing
from dlfs.errors import ClosedError, DlfsError, NotFoundError, UsageError

if TYPE_CHECKING:
    from typing_extensions import Buffer

    # Before Python 3.12, type checkers do not accept numpy arrays as Buffer.
    BytesLike: TypeAlias = Buffer | npt.NDArray[Any]

DEPTH_MAX = 4096
"""Most operations in flight on one queue pair (``DLFS_DEPTH_MAX``)."""

PIECE_BYTES = 1 << 20
"""Length of each request of a whole transfer, in bytes: enough for full bandwidth on NVMe."""

ENGINES = {
    "auto": abi.ENGINE_AUTO,
    "uring": abi.ENGINE_URING,
    "threads": abi.ENGINE_THREADS,
}

_POLL_SLICE_MS = 100  # a signal handler (Ctrl-C) runs between two slices of a long wait
_POLL_COUNT = 256
_QUEUE_KEEPS = 2  # what every queue pair keeps: the device, and the operations in flight


class Kind(enum.IntEnum):
    """Direction of an operation."""

    READ = abi.OP_READ
    WRITE = abi.OP_WRITE


def aligned_buffer(size_bytes: int, alignment_bytes: int) -> npt.NDArray[np.uint8]:
    """Allocate memory that direct I/O accepts.

    Args:
        size_bytes: length, >= 0.
        alignment_bytes: a power of two.

    Returns:
        ``uint8[size_bytes]``, uninitialised, that starts at a multiple of ``alignment_bytes``.
    """
    memory = np.empty(size_bytes + alignment_bytes, np.uint8)
    start = -memory.ctypes.data % alignment_bytes
    return memory[start : start + size_bytes]


def as_bytes_array(buffer: BytesLike) -> npt.NDArray[np.uint8]:
    """View the bytes of any contiguous buffer as ``uint8[n]``, without a copy.

    Raises:
        UsageError: the buffer is not contiguous.
    """
    view = memoryview(cast("Buffer", buffer))
    if not view.c_contiguous:
        raise UsageError("use a buffer for I/O: expected contiguous memory, got strides")
    return np.frombuffer(view, np.uint8) if view.nbytes else np.empty(0, np.uint8)


def operation_error(
    uri: str, kind: int, offset_bytes: int, length_bytes: int, code: int
) -> DlfsError:
    """Make the error of one failed read or write, with device, action, offset and length."""
    action = Kind(kind).name.lower()
    return error_for(code, f"{action} {uri} at byte {offset_bytes}, {length_bytes} bytes")


def device_handle(*keeps: Handle) -> Handle:
    """Return an empty owner for a ``dlfs_device``, which uses what the given ones own."""
    return Handle(library().dlfs_device_destroy, *keeps)


class NativeDevice(Closing):
    """A ``dlfs_device``.

    Threads: any at once.

    Args:
        handle: owner of the device.
        uri: name of the device in errors.
        writable: True if the device was opened for writing.
    """

    def __init__(self, handle: Handle, uri: str, *, writable: bool) -> None:
        self._handle: Handle | None = handle
        self.uri = uri
        self.writable = writable
        native = library()
        self.size_bytes: int = native.dlfs_device_size_bytes(handle)
        self.block_bytes: int = native.dlfs_device_block_bytes(handle)
        self.kind: str = native.dlfs_device_kind(handle).decode()

    @classmethod
    def open_file(
        cls,
        path: str | bytes,
        *,
        uri: str,
        writable: bool = False,
        buffered: bool = False,
        engine: Engine = "auto",
    ) -> Self:
        """Open a regular file or a disk.

        Args:
            path: path of the file.
            uri: name of the device in errors.
            writable: False opens it read-only.
            buffered: through the page cache, even where the file system has O_DIRECT.
            engine: ``auto``, ``uring`` or ``threads``.

        Raises:
            NotFoundError: there is no such file.
            UsageError: it is neither a file nor a disk, or there is no such engine.
            DeviceError: it cannot be opened.
        """
        check_choice(engine, [*ENGINES], option="engine", action=f"open {uri}")
        flags = (abi.OPEN_WRITE if writable else 0) | (abi.OPEN_BUFFERED if buffered else 0)
        handle = device_handle()
        code = library().dlfs_device_open_file(
            os.fsencode(path), flags, ENGINES[engine], byref(handle)
        )
        if code == -errno.ENOENT:
            raise NotFoundError(f"open {uri}: no such file")
        if code in (-errno.ENOTBLK, -errno.EISDIR):
            got = ", got a folder" if os.path.isdir(path) else ""
            raise UsageError(f"open {uri}: expected a regular file or a block device{got}")
        check(code, f"open {uri}")
        return cls(handle, uri, writable=writable)

    @classmethod
    def memory(cls, size_bytes: int, block_bytes: int, *, uri: str) -> Self:
        """Make a zeroed device in memory.

        Raises:
            UsageError: the sizes do not fit each other.
            DeviceError: not enough memory.
        """
        handle = device_handle()
        code = library().dlfs_device_create_memory(size_bytes, block_bytes, byref(handle))
        check(code, f"make {uri} of {size_bytes} bytes in blocks of {block_bytes}")
        return cls(handle, uri, writable=True)

    @property
    def handle(self) -> Handle:
        """The owner of the ``dlfs_device``; objects that use the device keep it.

        Raises:
            ClosedError: the device is closed.
        """
        handle = self._handle
        if handle is None:
            raise ClosedError(f"use {self.uri}: the device is closed")
        return handle

    @property
    def closed(self) -> bool:
        """Return True after ``close`` was called."""
        return self._handle is None

    @property
    def descriptor(self) -> int:
        """Descriptor of a file or disk; the device owns it.

        Raises:
            DeviceError: the kind of device has none.
            ClosedError: the device is closed.
        """
        return check(library().dlfs_device_descriptor(self.handle), f"use {self.uri} as a file")

    def queue(self, depth: int, *, writable: bool | None = None) -> NativeQueue:
        """Make a queue pair.

        Args:
            depth: operations in flight, 1..4096.
            writable: False forbids writes although the device allows them.

        Raises:
            UsageError: the depth is out of range.
            DeviceError: the kernel has no resources for it.
        """
        return NativeQueue(self, depth, writable=self.writable if writable is None else writable)

    def flush(self) -> None:
        """Make every completed write durable.

        Raises:
            DeviceError: the device failed; what was written may be lost.
        """
        check(library().dlfs_device_flush(self.handle), f"flush {self.uri}")

    def close(self) -> None:
        """Free the device, now or with the last queue pair or reader of it. Idempotent.

        In a forked child, queue pairs that threads of the parent had at the fork stay open for
        good: then the child's copy of the device is freed when the child ends.
        """
        self._handle = None


class _InFlight(NamedTuple):
    """An operation in flight; keeps its buffer alive."""

    tag: int
    kind: int
    buffer: npt.NDArray[np.uint8]


class NativeQueue(Closing):
    """A ``dlfs_queue``: one thread's private path to a device.

    Threads: one at a time.
    """

    def __init__(self, device: NativeDevice, depth: int, *, writable: bool) -> None:
        if not 1 <= depth <= DEPTH_MAX:
            raise UsageError(
                f"make a queue pair of {device.uri}: expected depth 1..{DEPTH_MAX}, got {depth}"
            )
        self._in_flight: dict[int, _InFlight] = {}
        owner = device.handle
        # The end of the queue pair waits for operations in flight, which use buffers of the table.
        self._handle: Handle | None = Handle(library().dlfs_queue_destroy, owner, self._in_flight)
        code = library().dlfs_queue_create(owner, depth, byref(self._handle))
        if code < 0:
            self._handle = None
            del owner  # or the traceback of the error would keep the device open
        check(code, f"make a queue pair of {device.uri}, depth {depth}")
        self.device = device
        self.depth = depth
        self._writable = writable
        self._serial = 0
        self._completions = (abi.Completion * _POLL_COUNT)()

    @property
    def handle(self) -> Handle:
        """The owner of the ``dlfs_queue``.

        Raises:
            ClosedError: the queue pair is closed.
        """
        handle = self._handle
        if handle is None:
            raise ClosedError(f"use a queue pair of {self.device.uri}: it is closed")
        return handle

    @property
    def in_flight(self) -> int:
        """Number of operations submitted and not yet returned by ``poll``."""
        return len(self._in_flight)

    def _check_access(self, kind: int, offset_bytes: int, array: npt.NDArray[np.uint8]) -> None:
        code = 0
        if kind == Kind.WRITE and not self._writable:
            code = -errno.EROFS
        elif kind == Kind.READ and not array.flags.writeable:
            raise UsageError(f"read {self.device.uri}: expected a writable buffer")
        elif not 0 <= offset_bytes < 1 << 63:
            code = -errno.EINVAL
        if code:
            raise operation_error(self.device.uri, kind, offset_bytes, array.nbytes, code)

    def register(self, buffer: BytesLike | None) -> None:
        """Announce the memory that most operations will use; None removes it.

        Raises:
            UsageError: the buffer is empty.
            DeviceError: operations are in flight, or the memory cannot be read.
        """
        array = None if buffer is None else as_bytes_array(buffer)
        base, size = (None, 0) if array is None else (array.ctypes.data, array.nbytes)
        handle = self.handle
        used = handle.keeps[:_QUEUE_KEEPS]
        handle.keeps = (*handle.keeps, array)  # the memory before, too, until it is replaced
        code = library().dlfs_queue_register(handle, base, size)
        check(code, f"register {size} bytes with {self.device.uri}")
        handle.keeps = (*used, array)

    def submit(self, kind: int, buffer: BytesLike, offset_bytes: int, tag: int) -> bool:
        """Submit one read or write of whole blocks.

        Args:
            kind: ``Kind.READ`` or ``Kind.WRITE``.
            buffer: its bytes are read into or written from; aligned to the device's blocks, a
                multiple of them long; kept alive until the operation has completed, and not to be
                touched until then.
            offset_bytes: on the device, a multiple of its blocks.
            tag: returned by ``poll``.

        Returns:
            False when the queue pair is full, and nothing was done.

        Raises:
            UsageError: misaligned, or out of the device's range.
            DeviceError: read-only.
            ClosedError: the queue pair is closed, or belongs to the parent process.
        """
        array = as_bytes_array(buffer)
        self._check_access(kind, offset_bytes, array)
        if array.nbytes >= 1 << 32:
            raise operation_error(self.device.uri, kind, offset_bytes, array.nbytes, -errno.EINVAL)
        serial = self._serial
        operation = abi.Operation(array.ctypes.data, offset_bytes, array.nbytes, kind, serial)
        # Before the call: a signal handler may raise between the call and the next line.
        self._serial = serial + 1
        self._in_flight[serial] = _InFlight(tag, kind, array)
        accepted = library().dlfs_queue_submit(self.handle, byref(operation), 1)
        if accepted == 1:
            return True
        del self._in_flight[serial]
        if accepted < 0:
            raise operation_error(self.device.uri, kind, offset_bytes, array.nbytes, accepted)
        return False

    def poll(self, timeout_ms: int = 0) -> list[tuple[int, int]]:
        """Return completions.

        Args:
            timeout_ms: longest wait for the first one; 0 does not wait, -1 waits without limit.

        Returns:
            (tag, result) of each; the result is the length, or a negative code (``operation_error``
            makes it an error). Empty when nothing is in flight or the time has passed.

        Raises:
            DeviceError: the queue pair as a whole failed.
            ClosedError: it is closed, or belongs to the parent process.
        """
        left = timeout_ms
        while True:
            wait = _POLL_SLICE_MS if left < 0 else min(left, _POLL_SLICE_MS)
            self._before_wait()
            got = library().dlfs_queue_poll(self.handle, self._completions, _POLL_COUNT, wait)
            check(got, f"poll {self.device.uri}")
            if got or not self._in_flight:
                break
            if library().dlfs_queue_in_flight(self.handle) == 0:  # a signal handler has raised
                raise ClosedError(
                    f"poll {self.device.uri}: completions were lost by a call that was "
                    "interrupted; close the queue pair"
                )
            if 0 <= left <= wait:
                break
            left = left - wait if left > 0 else left
        taken = []
        for i in range(got):
            completion = self._completions[i]
            taken.append((self._in_flight.pop(completion.tag).tag, completion.result))
        return taken

    def _before_wait(self) -> None:
        """Called before each part of a wait; subclasses send what was submitted."""

    def transfer(self, kind: int, buffer: BytesLike, offset_bytes: int) -> None:
        """Read or write one range of any length at the queue pair's full depth, and wait.

        Args:
            kind: ``Kind.READ`` or ``Kind.WRITE``.
            buffer: aligned to the device's blocks, a multiple of them long.
            offset_bytes: on the device, a multiple of its blocks.

        Raises:
            UsageError: misaligned, out of range, or other operations are in flight.
            DeviceError: the device failed.
            TruncatedError: it ends too early.
        """
        array = as_bytes_array(buffer)
        self._check_access(kind, offset_bytes, array)
        code = library().dlfs_queue_transfer(
            self.handle, kind, array.ctypes.data, offset_bytes, array.nbytes, PIECE_BYTES
        )
        if code == -errno.EBUSY:
            raise UsageError(f"transfer on {self.device.uri}: other operations are in flight")
        if code < 0:
            raise operation_error(self.device.uri, kind, offset_bytes, array.nbytes, code)

    def release(self) -> None:
        """Give the queue pair, which has nothing in flight, back to its device for the next one."""
        handle, self._handle = self._handle, None
        if handle is not None:
            native = library()
            native.dlfs_handle_free(addressof(handle), native.dlfs_queue_release, PROCESS_ANY)

    def close(self) -> None:
        """Wait for the operations in flight, then free the queue pair. Further calls do nothing."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.free()
            self._in_flight.clear()
