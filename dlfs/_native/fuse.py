"""Bindings of libdlfs_fuse, the native server of a mount, which answers the kernel without Python.

The library is loaded on first use. What it cannot know by itself it requests from its owner by
upcalls: ``next_upcall`` fetches one and ``reply`` completes it. Most are requests of the kernel.

Source: ``native/fuse/dlfs_fuse.h``.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from ctypes import (
    POINTER,
    Structure,
    byref,
    c_char,
    c_char_p,
    c_int,
    c_int32,
    c_int64,
    c_uint32,
    c_uint64,
    c_void_p,
)
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlfs._native import abi
from dlfs._native.abi import fields
from dlfs._native.directory import NativeDirectory
from dlfs._native.handle import Handle, process_number
from dlfs._native.library import bind, check, library
from dlfs._native.reader import NativeReader
from dlfs.errors import ClosedError, NativeError

_FILE_NAME = "libdlfs_fuse.so"

VERSION = 12
DATASET_MAX = 65535
NAME_BYTES_MAX = 255
RESUME, NO_URING, KEPT = 1, 2, 4
UPCALL_OPEN_DATASET, UPCALL_REPORT_FAILURE = 0x10000, 0x10001
NO_MEMBER = (1 << 32) - 1
"""Member number of a failure that concerns a dataset as a whole, not one sample."""
NO_READER = (1 << 32) - 1
"""Reader number of a failure that no reader reported."""

GUIDE = "build dlfs again, or mount with --fuse=pyfuse3"


class CConfig(Structure):
    """``dlfs_fuse_config``."""

    _fields_ = fields(
        (c_uint32, "uid gid file_mode threads_max flags busy_poll_us"),
        (c_int32, "kernel"),
        (c_char_p, "init"),
        (c_uint64, "init_bytes"),
    )


class Upcall(Structure):
    """``dlfs_fuse_upcall``: a request of the native server to its owner.

    Attributes:
        id: number that the reply repeats.
        kind: one of ``UPCALL_*``, or the operation of the kernel's request that the reply answers.
        dataset: number of the dataset, for ``UPCALL_*``.
        failure: what failed, for ``UPCALL_REPORT_FAILURE``.
        inode: of a request of the kernel.
        offset: position in a listing.
        size: most bytes of a listing.
        name: name to be looked up.
        reader: number of the dataset's reader that failed; ``NO_READER`` if none did.
    """

    _fields_ = (
        ("id", c_uint64),
        ("kind", c_uint32),
        ("dataset", c_uint32),
        ("failure", abi.Failure),
        ("inode", c_uint64),
        ("offset", c_uint64),
        ("size", c_uint32),
        ("name", c_char * (NAME_BYTES_MAX + 1)),
        ("reader", c_uint32),
    )


class CReply(Structure):
    """``dlfs_fuse_reply``."""

    _fields_ = (
        ("id", c_uint64),
        ("error", c_int32),
        ("data_bytes", c_uint32),
        ("data", c_char_p),
    )


PROTOTYPES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "dlfs_fuse_version": (c_uint32, ()),
    "dlfs_fuse_create": (c_int, (POINTER(CConfig), POINTER(c_void_p))),
    "dlfs_fuse_run": (c_int, (c_void_p,)),
    "dlfs_fuse_stop": (None, (c_void_p,)),
    "dlfs_fuse_destroy": (None, (c_void_p,)),
    "dlfs_fuse_uring": (c_int, (c_void_p,)),
    "dlfs_fuse_next_upcall": (c_int, (c_void_p, c_int, POINTER(Upcall))),
    "dlfs_fuse_reply_upcall": (c_int, (c_void_p, POINTER(CReply))),
    "dlfs_fuse_add_dataset": (c_int, (c_void_p, c_uint32, c_uint32, c_uint32, c_int64)),
    "dlfs_fuse_open_dataset": (c_int, (c_void_p, c_uint32, c_void_p, c_void_p)),
    "dlfs_fuse_replace_reader": (c_int, (c_void_p, c_uint32, c_void_p)),
    "dlfs_fuse_await_reader": (c_int, (c_void_p, c_uint32, c_int)),
    "dlfs_fuse_withdraw_dataset": (c_int, (c_void_p, c_uint32)),
    "dlfs_fuse_expire_cache": (None, (c_void_p, c_uint32)),
}


def _path() -> Path:
    named = os.environ.get("DLFS_FUSE_LIBRARY")
    return Path(named) if named else Path(__file__).with_name(_FILE_NAME)


def is_built() -> bool:
    """Return True if this dlfs was built with the native server."""
    return _path().exists()


@functools.cache
def fuse_library() -> ctypes.CDLL:
    """Load libdlfs_fuse on the first call and return it.

    Raises:
        NativeError: the library is missing, cannot be loaded or has another version.
    """
    path = _path()
    library()  # loaded first, so that libdlfs_fuse uses this libdlfs
    if not path.exists():
        raise NativeError(f"load {path}: this dlfs was built without it; {GUIDE}")
    try:
        loaded = ctypes.CDLL(str(path), use_errno=False)
    except OSError as error:
        raise NativeError(f"load {path}: {error}; {GUIDE}") from error
    bind(loaded, PROTOTYPES, path)
    got = loaded.dlfs_fuse_version()
    if got != VERSION:
        raise NativeError(f"load {path}: expected version {VERSION}, got {got}")
    return loaded


@dataclass(frozen=True, slots=True)
class KernelConnection:
    """The kernel's side of a file system that was mounted.

    Attributes:
        descriptor: file descriptor of ``/dev/fuse``; stays open after the server has ended.
        init: the kernel's INIT request, which it sends once: as read from the descriptor.
        keeper: another process has the file system, too, and may start another server later.
        resumed: an earlier server has answered INIT; its unanswered requests are sent again.
    """

    descriptor: int
    init: bytes
    keeper: bool
    resumed: bool


class NativeFuse:
    """The native server of a file system that was mounted, which its owner unmounts.

    Args:
        connection: the file system.
        uid: owner of every file and directory.
        gid: group of every file and directory.
        file_mode: permission bits of files.
        threads_max: most threads that answer the kernel.
        busy_poll_us: longest busy polling for an event before a thread sleeps, at most 10,000.
        uring: receive requests over io_uring where the kernel offers it; False if there is a
            keeper.

    Raises:
        NativeError: libdlfs_fuse is not available.

    Threads: any at once. Call ``close`` when no other method is running.
    """

    def __init__(
        self,
        connection: KernelConnection,
        *,
        uid: int,
        gid: int,
        file_mode: int,
        threads_max: int,
        busy_poll_us: int = 0,
        uring: bool = True,
    ) -> None:
        flags = KEPT if connection.keeper else 0
        flags |= RESUME if connection.resumed else 0
        flags |= 0 if uring else NO_URING
        config = CConfig(
            uid=uid,
            gid=gid,
            file_mode=file_mode,
            threads_max=threads_max,
            flags=flags,
            busy_poll_us=busy_poll_us,
            kernel=connection.descriptor,
            init=connection.init,
            init_bytes=len(connection.init),
        )
        self._library = fuse_library()
        # Readers of open datasets, by number: the present one, which is the last, and one before it
        # that may be in use.
        self._readers: dict[int, list[Handle]] = {}
        self._reader_numbers: dict[int, int] = {}
        self._handle: Handle | None = Handle(
            self._library.dlfs_fuse_destroy, self._readers, process=process_number()
        )
        code = self._library.dlfs_fuse_create(byref(config), byref(self._handle))
        check(code, "start the native server of a mount")

    @property
    def _open_handle(self) -> Handle:
        handle = self._handle
        if handle is None:
            raise ClosedError("use the native server of a mount: it is closed")
        return handle

    # ---- the loop --------------------------------------------------------------------------------

    def run(self) -> None:
        """Answer the kernel until the file system is unmounted or ``stop`` is called.

        Raises:
            DeviceError: the loop failed.
        """
        check(self._library.dlfs_fuse_run(self._open_handle), "answer the kernel")

    def stop(self) -> None:
        """Make ``run`` return as soon as no request is under way. Repeat the call until it does."""
        self._library.dlfs_fuse_stop(self._open_handle)

    def close(self) -> None:
        """Free everything. Idempotent."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.free()
            self._readers.clear()

    def uring_queues(self) -> int:
        """Return how many io_uring queues the kernel sends requests to, or a negative errno.

        The errno says why requests come through /dev/fuse: ``EOPNOTSUPP`` if the kernel does not
        offer io_uring, ``ECANCELED`` if the options refuse it, ``EINPROGRESS`` before the first
        request, or the error of creating the queues.
        """
        return int(self._library.dlfs_fuse_uring(self._open_handle))

    # ---- upcalls ---------------------------------------------------------------------------------

    def next_upcall(self, seconds: float) -> Upcall | None:
        """Wait for the next upcall; return None if none comes within the given seconds.

        Raises:
            ClosedError: the mount has ended and makes no more upcalls.
        """
        upcall = Upcall()
        code = self._library.dlfs_fuse_next_upcall(
            self._open_handle, int(1000 * seconds), byref(upcall)
        )
        if code == -errno.ESHUTDOWN:
            raise ClosedError("wait for upcalls of a mount: it has ended")
        return upcall if check(code, "wait for upcalls of a mount") else None

    def reply(self, upcall_id: int, data: bytes = b"", *, error: int = 0) -> None:
        """Complete an upcall, with what the kernel gets. Does nothing if the mount has ended."""
        reply = CReply(upcall_id, error, len(data), data)
        code = self._library.dlfs_fuse_reply_upcall(self._open_handle, byref(reply))
        if code != -errno.ENOENT:
            check(code, "reply to an upcall of a mount")

    # ---- datasets --------------------------------------------------------------------------------

    def add_dataset(self, number: int, *, version: int, generation: int, modified_ns: int) -> None:
        """Register a dataset, unless the number is registered."""
        code = self._library.dlfs_fuse_add_dataset(
            self._open_handle, number, version, generation, modified_ns
        )
        check(code, f"show dataset number {number}")

    def open_dataset(self, number: int, directory: NativeDirectory, reader: NativeReader) -> None:
        """Attach directory and reader to a dataset; both stay alive until ``withdraw_dataset``.

        Does nothing if the dataset is open.
        """
        if number in self._readers:
            return
        owner = reader.handle
        self._readers[number] = [owner]
        self._reader_numbers[number] = 0
        code = self._library.dlfs_fuse_open_dataset(
            self._open_handle, number, directory.handle, owner
        )
        if code < 0:
            del self._readers[number]
        check(code, f"open dataset number {number}")

    def reader_number(self, number: int) -> int:
        """Return the number of an open dataset's present reader, counted from 0."""
        return self._reader_numbers[number]

    def replace_reader(self, number: int, reader: NativeReader) -> None:
        """Have later reads of an open dataset use another reader, of the same directory.

        Waits for reads that still use the reader before the present one. One call at a time.
        """
        self.release_replaced(number, wait=True)
        owner = reader.handle
        self._readers[number].append(owner)
        code = self._library.dlfs_fuse_replace_reader(self._open_handle, number, owner)
        if code < 0:
            self._readers[number].pop()
        check(code, f"replace the reader of dataset number {number}")
        self._reader_numbers[number] += 1

    def release_replaced(self, number: int, *, wait: bool = False) -> None:
        """Release the reader of an open dataset that was replaced, once no thread uses it."""
        if len(self._readers.get(number, ())) > 1:
            code = self._library.dlfs_fuse_await_reader(self._open_handle, number, wait)
            if check(code, f"wait for a reader of dataset number {number}"):
                del self._readers[number][0]

    def withdraw_dataset(self, number: int) -> None:
        """Make a dataset fail with ESTALE, and wait until no thread uses it."""
        check(
            self._library.dlfs_fuse_withdraw_dataset(self._open_handle, number),
            f"withdraw dataset number {number}",
        )
        self._readers.pop(number, None)

    def expire_cache(self, seconds: float) -> None:
        """Free cached samples that were last used at least that many seconds ago."""
        self._library.dlfs_fuse_expire_cache(self._open_handle, int(1000 * seconds))
