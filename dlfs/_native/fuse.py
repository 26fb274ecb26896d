"""libdlfs_fuse: the mount's native loop, which answers the kernel without Python.

The library is there where dlfs was built beside libfuse3, and loaded on first use. It asks its
owner what it cannot know by itself: questions that ``wait`` fetches and ``answer`` answers.

Source: ``native/fuse/dlfs_fuse.h``.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from collections.abc import Sequence
from ctypes import (
    POINTER,
    Structure,
    byref,
    c_char_p,
    c_int,
    c_int32,
    c_int64,
    c_uint8,
    c_uint32,
    c_uint64,
    c_void_p,
)
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlfs._native import abi
from dlfs._native.batch import NativeFailure
from dlfs._native.directory import NativeDirectory
from dlfs._native.library import bind, check, library
from dlfs._native.reader import NativeReader
from dlfs.errors import ClosedError, DeviceError, NativeError

_FILE_NAME = "libdlfs_fuse.so"

VERSION = 2
SLOT_MAX = 65535
NAME_BYTES_MAX = 255
HANDLES = 1
ASK_CHILD, ASK_ROOT, ASK_LIST, ASK_SPACE, ASK_OPEN, ASK_ERROR = range(1, 7)
NO_MEMBER = (1 << 32) - 1
"""The member of a failure that is of no sample alone."""

GUIDE = (
    "install libfuse3 3.12 or newer with its headers (apt install libfuse3-dev pkg-config), then "
    "build dlfs again; or mount with --fuse=pyfuse3"
)


class Config(Structure):
    """``dlfs_fuse_config``."""

    _fields_ = (
        ("mountpoint", c_char_p),
        ("options", c_char_p),
        ("held_bytes", c_uint64),
        ("uid", c_uint32),
        ("gid", c_uint32),
        ("file_mode", c_uint32),
        ("threads_max", c_uint32),
        ("root_timeout_ms", c_uint32),
        ("flags", c_uint32),
        ("busy_poll_us", c_uint32),
        ("reserved", c_uint32),
    )


class Question(Structure):
    """``dlfs_fuse_question``."""

    _fields_ = (
        ("ticket", c_uint64),
        ("kind", c_uint32),
        ("slot", c_uint32),
        ("failure", abi.Failure),
        ("name_bytes", c_uint32),
        ("name", c_uint8 * (NAME_BYTES_MAX + 1)),
        ("reserved", c_uint32),
    )


class Answer(Structure):
    """``dlfs_fuse_answer``."""

    _fields_ = (
        ("ticket", c_uint64),
        ("error", c_int32),
        ("slot", c_uint32),
        ("modified_ns", c_int64),
        ("capacity_bytes", c_uint64),
        ("free_bytes", c_uint64),
        ("sample_count", c_uint64),
    )


class Slot(Structure):
    """``dlfs_fuse_slot``."""

    _fields_ = (
        ("number", c_uint32),
        ("version", c_uint32),
        ("generation", c_uint32),
        ("reserved", c_uint32),
        ("modified_ns", c_int64),
    )


class Stats(Structure):
    """``dlfs_fuse_stats``."""

    _fields_ = (
        ("lookups", c_uint64),
        ("opens", c_uint64),
        ("reads", c_uint64),
        ("read_bytes", c_uint64),
        ("ahead", c_uint64),
        ("ahead_used", c_uint64),
        ("questions", c_uint64),
        ("held_bytes", c_uint64),
    )


STRUCTURES: dict[str, type[Structure]] = {
    "dlfs_fuse_config": Config,
    "dlfs_fuse_question": Question,
    "dlfs_fuse_answer": Answer,
    "dlfs_fuse_slot": Slot,
    "dlfs_fuse_stats": Stats,
}

PROTOTYPES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "dlfs_fuse_version": (c_uint32, ()),
    "dlfs_fuse_build": (c_char_p, ()),
    "dlfs_fuse_mount": (c_int, (POINTER(Config), POINTER(c_void_p))),
    "dlfs_fuse_run": (c_int, (c_void_p,)),
    "dlfs_fuse_stop": (None, (c_void_p,)),
    "dlfs_fuse_abandon": (None, (c_void_p,)),
    "dlfs_fuse_destroy": (None, (c_void_p,)),
    "dlfs_fuse_wait": (c_int, (c_void_p, c_int, POINTER(Question))),
    "dlfs_fuse_answer_question": (c_int, (c_void_p, POINTER(Answer))),
    "dlfs_fuse_define": (c_int, (c_void_p, POINTER(Slot))),
    "dlfs_fuse_open": (c_int, (c_void_p, c_uint32, c_void_p, c_void_p)),
    "dlfs_fuse_withdraw": (c_int, (c_void_p, c_uint32)),
    "dlfs_fuse_list": (c_int, (c_void_p, c_char_p, c_uint64, c_void_p, c_uint32)),
    "dlfs_fuse_expire": (None, (c_void_p, c_uint32)),
    "dlfs_fuse_get_stats": (None, (c_void_p, POINTER(Stats))),
}


def _path() -> Path:
    named = os.environ.get("DLFS_FUSE_LIBRARY")
    return Path(named) if named else Path(__file__).with_name(_FILE_NAME)


def is_built() -> bool:
    """Whether this dlfs was built with the native loop."""
    return _path().exists()


@functools.cache
def fuse_library() -> ctypes.CDLL:
    """Load libdlfs_fuse, once.

    Raises:
        NativeError: it is missing, cannot be loaded, or is of another version.
    """
    path = _path()
    library()  # first: it is the one that libdlfs_fuse is to use
    if not path.exists():
        raise NativeError(f"load {path}: this dlfs was built without libfuse3; {GUIDE}")
    try:
        loaded = ctypes.CDLL(str(path), use_errno=False)
    except OSError as error:
        raise NativeError(f"load {path}: {error}; {GUIDE}") from error
    bind(loaded, PROTOTYPES, path)
    got = loaded.dlfs_fuse_version()
    if got != VERSION:
        raise NativeError(f"load {path}: expected version {VERSION}, got {got}")
    return loaded


@dataclass(frozen=True, slots=True, kw_only=True)
class FuseOptions:
    """How to mount.

    Attributes:
        options: of the mount, such as ``ro``.
        held_bytes: memory for samples that are read in parts, or ahead.
        uid: of every file and directory.
        gid: of every file and directory.
        file_mode: permission bits of files.
        threads_max: that answer the kernel.
        root_seconds: how long the kernel may keep what it knows of the root.
        busy_poll_us: a thread stays awake so long for what is about to come, at most 10,000.
        handles: have the kernel open files, as if it could not do without.
    """

    options: Sequence[str]
    held_bytes: int
    uid: int
    gid: int
    file_mode: int
    threads_max: int
    root_seconds: float
    busy_poll_us: int = 0
    handles: bool = False


@dataclass(frozen=True, slots=True)
class FuseQuestion:
    """What the loop wants to know.

    Attributes:
        ticket: for the answer.
        kind: ``ASK_*``.
        slot: of ``ASK_OPEN`` and ``ASK_ERROR``.
        name: of ``ASK_CHILD``.
        failure: of ``ASK_ERROR``.
    """

    ticket: int
    kind: int
    slot: int
    name: bytes
    failure: NativeFailure


class NativeFuse:
    """A mounted file system that the native loop serves.

    Args:
        path: absolute, of the directory.
        options: how to mount.

    Raises:
        NativeError: there is no libdlfs_fuse.
        DeviceError: the system refused; libfuse has said why on standard error.

    Threads: any at once; ``close`` when nothing else is called any more.
    """

    def __init__(self, path: str, options: FuseOptions) -> None:
        config = Config(
            mountpoint=os.fsencode(path),
            options=",".join(options.options).encode(),
            held_bytes=options.held_bytes,
            uid=options.uid,
            gid=options.gid,
            file_mode=options.file_mode,
            threads_max=options.threads_max,
            root_timeout_ms=int(1000 * options.root_seconds),
            flags=HANDLES if options.handles else 0,
            busy_poll_us=options.busy_poll_us,
        )
        handle = c_void_p()
        self._library = fuse_library()
        code = self._library.dlfs_fuse_mount(byref(config), byref(handle))
        if code == -errno.EIO:
            raise DeviceError(
                f"mount on {path}: the system refused (is /dev/fuse there, fusermount3 installed, "
                "and allow_other permitted?)"
            )
        check(code, f"mount on {path}")
        self._handle: c_void_p | None = handle
        self._lent: dict[int, NativeReader] = {}

    @property
    def _open_handle(self) -> c_void_p:
        if self._handle is None:
            raise ClosedError("use a native mount: it is closed")
        return self._handle

    def run(self) -> None:
        """Answer the kernel until the file system is unmounted, or ``stop``.

        Raises:
            DeviceError: the loop failed.
        """
        check(self._library.dlfs_fuse_run(self._open_handle), "answer the kernel")

    def stop(self) -> None:
        """Have ``run`` return as soon as no request is under way; call it until it does."""
        self._library.dlfs_fuse_stop(self._open_handle)

    def wait(self, seconds: float) -> FuseQuestion | None:
        """The next question; None when there is none in time.

        Raises:
            ClosedError: there will be none any more.
        """
        question = Question()
        code = self._library.dlfs_fuse_wait(self._open_handle, int(1000 * seconds), byref(question))
        if code == -errno.ESHUTDOWN:
            raise ClosedError("wait for questions of a mount: it has ended")
        if not check(code, "wait for questions of a mount"):
            return None
        return FuseQuestion(
            question.ticket,
            question.kind,
            question.slot,
            bytes(question.name)[: question.name_bytes],
            NativeFailure(*(getattr(question.failure, n) for n, *_ in abi.Failure._fields_)),
        )

    def answer(
        self,
        ticket: int,
        *,
        error: int = 0,
        slot: int = 0,
        modified_ns: int = 0,
        capacity_bytes: int = 0,
        free_bytes: int = 0,
        sample_count: int = 0,
    ) -> None:
        """Answer a question; nothing happens when the mount has ended meanwhile."""
        answer = Answer(
            ticket=ticket,
            error=error,
            slot=slot,
            modified_ns=modified_ns,
            capacity_bytes=capacity_bytes,
            free_bytes=free_bytes,
            sample_count=sample_count,
        )
        code = self._library.dlfs_fuse_answer_question(self._open_handle, byref(answer))
        if code != -errno.ENOENT:
            check(code, "answer a question of a mount")

    def define(self, number: int, *, version: int, generation: int, modified_ns: int) -> None:
        """Make a slot known; again does nothing."""
        slot = Slot(number=number, version=version, generation=generation, modified_ns=modified_ns)
        code = self._library.dlfs_fuse_define(self._open_handle, byref(slot))
        check(code, f"show dataset number {number}")

    def open(self, slot: int, directory: NativeDirectory, reader: NativeReader) -> None:
        """Give a slot its dataset; again does nothing. Both are kept alive until ``withdraw``."""
        if slot in self._lent:
            return
        handle = reader.borrow()
        code = self._library.dlfs_fuse_open(self._open_handle, slot, directory.handle, handle)
        if code < 0:
            reader.give_back()
        check(code, f"open dataset number {slot}")
        self._lent[slot] = reader

    def withdraw(self, slot: int) -> None:
        """Have a slot answer ESTALE, and wait until nobody uses its dataset."""
        check(
            self._library.dlfs_fuse_withdraw(self._open_handle, slot),
            f"withdraw dataset number {slot}",
        )
        reader = self._lent.pop(slot, None)
        if reader is not None:
            reader.give_back()

    def list(self, names: Sequence[bytes], slots: Sequence[int]) -> None:
        """Say what the root lists, in this order."""
        packed = b"".join(name + b"\0" for name in names)
        numbers = (c_uint32 * max(1, len(slots)))(*slots)
        code = self._library.dlfs_fuse_list(
            self._open_handle, packed, len(packed), numbers, len(names)
        )
        check(code, f"list {len(names)} datasets")

    def expire(self, seconds: float) -> None:
        """Give up held samples that nobody has used for so long."""
        self._library.dlfs_fuse_expire(self._open_handle, int(1000 * seconds))

    def stats(self) -> dict[str, int]:
        """``dlfs_fuse_stats`` by name."""
        stats = Stats()
        self._library.dlfs_fuse_get_stats(self._open_handle, byref(stats))
        return {name: int(getattr(stats, name)) for name, *_ in Stats._fields_}

    def abandon(self) -> None:
        """Have ``close`` unmount nothing: the mount was taken away, another may be in its place."""
        self._library.dlfs_fuse_abandon(self._open_handle)

    def close(self) -> None:
        """Unmount, and free what is left. Idempotent."""
        handle, self._handle = self._handle, None
        if handle is None:
            return
        self._library.dlfs_fuse_destroy(handle)
        for reader in self._lent.values():
            reader.give_back()
        self._lent.clear()
