"""Ends a node service by its socket, within a time, and removes what a killed one left.

A service that runs holds the lock next to its socket, whose file names its process
(``sockets.ServiceRecord``). A process that does not have this file open gets no signal: the record
may be that of an earlier service, or be forged by the socket's user. The service gets SIGTERM, upon
which it unmounts, removes its socket and ends. One that hangs, or was stopped by a signal, gets
SIGKILL after the time. What a killed service leaves is then removed here: its mount, which fails
every call, its socket and its lock file; and files in shared memory that no process has open
(``dlfs.directory.sharing``).

Source: pidfd_open(2): a process ID that is used again would name another process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import signal
import time
from dataclasses import dataclass
from enum import StrEnum

from dlfs._native.handle import Descriptor
from dlfs.base.json_records import from_json
from dlfs.directory.sharing import remove_leftovers
from dlfs.errors import DeviceError, DlfsError, FormatError
from dlfs.mount import mountpoint as mountpoints
from dlfs.service.sockets import ServiceRecord, clear, lock_path, own_pid_namespace, path_of

KILL_WAIT_S = 10.0
"""Longest wait for a killed process to be gone, in seconds."""
_RECORD_BYTES_MAX = 16384
_PAUSE_S = 0.02
_DYING_S = 1.0
"""Longest wait for a process that has closed its files to be gone, in seconds."""


class Ending(StrEnum):
    """How a service ended."""

    ABSENT = "absent"
    """There was none, nor anything left of one."""
    DEAD = "dead"
    """It had been killed before; what it left was removed."""
    ENDED = "ended"
    """It ended by itself when it was asked to."""
    KILLED = "killed"
    """It did not end in time and was killed; what it left was removed."""


@dataclass(frozen=True)
class StoppedService:
    """Where a service was, and how it ended."""

    socket: str
    ending: Ending


def stop_service(uri: str, timeout_s: float) -> StoppedService:
    """End a service, and return when nothing of it is left.

    Args:
        uri: ``unix:PATH`` of its socket.
        timeout_s: time that the service has to end by itself, in seconds; then it is killed.

    Raises:
        UsageError: ``uri`` has another form.
        ExistsError: another program listens on the socket.
        DeviceError: the service runs in another container (EXDEV), or belongs to another user
            (EPERM); it does not end although it was killed (ETIMEDOUT); its mount or its files
            cannot be removed.

    Threads: any.
    """
    path = os.path.abspath(path_of(uri))
    try:
        ending = _end(path, timeout_s)
    except OSError as error:
        if isinstance(error, DlfsError):
            raise
        raise DeviceError(f"stop the service at {path}: {error}", error.errno or 0) from error
    remove_leftovers()
    return StoppedService(path, ending)


def _end(path: str, timeout_s: float) -> Ending:
    lock = Descriptor()
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        lock.fill(os.open, lock_path(path), flags)
    except FileNotFoundError:
        if not os.path.lexists(path):
            return Ending.ABSENT
        clear(path)  # refuses the socket of another program
        return Ending.DEAD
    with lock:
        ending = Ending.DEAD
        if not _try_lock(lock):
            ending = _signal(lock, path, timeout_s)
        if os.fstat(lock.value).st_nlink:
            _clean(lock, path)
        return ending


def _signal(lock: Descriptor, path: str, timeout_s: float) -> Ending:
    """End the process that holds a lock, by SIGTERM or else SIGKILL; return with the lock."""
    deadline = time.monotonic() + timeout_s
    while (record := _read_record(lock)) is None:  # it has just taken the lock
        if _try_lock(lock):
            return Ending.DEAD
        if time.monotonic() >= deadline:
            raise DeviceError(
                f"stop the service at {path}: its lock file does not name its process",
                errno.ETIMEDOUT,
            )
        time.sleep(_PAUSE_S)
    if record.pid_namespace != own_pid_namespace():
        raise DeviceError(
            f"stop the service at {path}: it runs in another container, as its process "
            f"{record.pid}; stop it there",
            errno.EXDEV,
        )
    process = Descriptor()
    try:
        process.fill(os.pidfd_open, record.pid)
    except ProcessLookupError:
        process.close()
    with process:
        if _try_lock(lock):  # it ended by itself, and its ID may be another process's
            return Ending.DEAD
        if process.value >= 0 and not _has_open(record.pid, lock):
            # A killed process has closed its files in one thread before the others are gone.
            if _wait(process, _DYING_S) and _try_lock(lock):
                return Ending.DEAD
            raise DeviceError(
                f"stop the service at {path}: its lock file names process {record.pid}, which does "
                "not have it open; another process holds the lock",
                errno.EPERM,
            )
        if _signal_and_wait(process, signal.SIGTERM, timeout_s) and _try_lock(lock):
            return Ending.ENDED
        if _signal_and_wait(process, signal.SIGKILL, KILL_WAIT_S) and _try_lock(lock):
            return Ending.KILLED
    raise DeviceError(
        f"stop the service at {path}: process {record.pid} was killed and is not gone after "
        f"{KILL_WAIT_S:g} s: it waits for the kernel, perhaps for a disk",
        errno.ETIMEDOUT,
    )


def _has_open(pid: int, lock: Descriptor) -> bool:
    """Return True if a process has the lock file open; its pidfd keeps the ID from being reused."""
    own = os.fstat(lock.value)
    with contextlib.suppress(FileNotFoundError), os.scandir(f"/proc/{pid}/fd") as descriptors:
        for each in descriptors:
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(each.stat(), own):
                    return True
    return False


def _signal_and_wait(process: Descriptor, number: signal.Signals, timeout_s: float) -> bool:
    """Send a signal to a process; return True if the process has ended in time."""
    if process.value < 0:
        return True
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(process.value, number)
    return _wait(process, timeout_s)


def _wait(process: Descriptor, timeout_s: float) -> bool:
    """Return True if a process ends within a time."""
    poll = select.poll()
    poll.register(process.value, select.POLLIN)
    return bool(poll.poll(int(1000 * timeout_s)))


def _clean(lock: Descriptor, path: str) -> None:
    """Remove the mount, the socket and the lock file of a killed service, whose lock is held."""
    record = _read_record(lock)
    if record is not None and record.mount is not None:
        mount = mountpoints.record_of(record.mount)
        if (
            mount is not None
            and mount.file_system_type == mountpoints.FILE_SYSTEM_TYPE
            and mountpoints.is_dead(record.mount)
        ):
            mountpoints.detach(record.mount)
    clear(path)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(lock_path(path))


def _read_record(lock: Descriptor) -> ServiceRecord | None:
    """Return what a lock file says; None if the service has not written it yet."""
    text = os.pread(lock.value, _RECORD_BYTES_MAX, 0)
    try:
        return from_json(text, ServiceRecord)
    except FormatError:
        return None


def _try_lock(lock: Descriptor) -> bool:
    try:
        fcntl.flock(lock.value, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
