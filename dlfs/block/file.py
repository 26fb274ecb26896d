"""Block devices that are files or disks of this machine.

libdlfs does the I/O: by io_uring, or by threads where the kernel forbids io_uring, with O_DIRECT
where the file system has it. The writer's lock is ``flock`` on a separate descriptor, so that the
kernel releases it however the process ends. Forked children close their copy of that descriptor, so
that they do not prolong the lock.

Granted writing needs a lock that lasts until the writer's last write has ended. That is the byte of
the writer's slot (``dlfs.block.slots``), locked through the open file that libdlfs writes through.
``begin_granted`` gives libdlfs a new open file, which no child of an earlier fork has. Later forked
children, and the writer itself when it ends, exchange it for one that is open for reading: then
only writes in flight still hold it. Files must lie on a file system of this host alone
(``dlfs.block.file_systems``). Disks count as such: their node is expected to be the same for all
writers, and a command of the disk that has ended to take no effect any more.

A file that a process opens several times for reading is opened once for all of them: they share its
descriptor and idle queue pairs.
"""

from __future__ import annotations

import errno
import fcntl
import grp
import os
import pwd
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlfs._native.device import NativeDevice
from dlfs._native.handle import Descriptor, Handle
from dlfs.base.arguments import Engine
from dlfs.base.closing import LiveObjects, LiveValues
from dlfs.base.deadlines import current_deadline
from dlfs.base.threads import has_ended, start_call
from dlfs.block import silence
from dlfs.block.device import NativeBackedDevice
from dlfs.block.file_systems import check_free_space, check_one_host
from dlfs.block.lock import HolderRecord
from dlfs.block.slots import are_slots_free, lock_slot
from dlfs.block.uri import format_path
from dlfs.errors import (
    DeviceError,
    DlfsError,
    ExistsError,
    LockedError,
    NotFoundError,
    UsageError,
    write_error,
)

if TYPE_CHECKING:
    from dlfs.block.device import BlockDevice

SIZE_MULTIPLE_BYTES = 4096
"""Sizes of new files are rounded down to a multiple of this, which suits smaller blocks too."""


def _identity(status: os.stat_result) -> str:
    if stat.S_ISBLK(status.st_mode):
        return f"disk:{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
    return f"file:{status.st_dev}:{status.st_ino}"


def _os_error(action: str, error: OSError, hint: str = "") -> Exception:
    if error.errno == errno.ENOENT:
        return NotFoundError(f"{action}: no such file or directory{hint}")
    return write_error(f"{action}: {error.strerror or error}", error.errno or 0)


def _as_service(path: str) -> str:
    """Return a hint for an error message if a path looks like a node service's socket."""
    is_socket = path.endswith(".sock") or Path(path).is_socket()
    return f"; did you mean unix:{path}?" if is_socket else ""


def _permission_hint(status: os.stat_result, writable: bool) -> str:
    """Return an error message's hint for a user without permission: owner, group and mode."""
    owner, group = _name_of(pwd.getpwuid, status.st_uid), _name_of(grp.getgrgid, status.st_gid)
    needed = stat.S_IRGRP | (stat.S_IWGRP if writable else 0)
    whose = f"; it is of user {owner} and group {group}, mode {stat.S_IMODE(status.st_mode):03o}"
    if status.st_mode & needed == needed:
        return f"{whose}: become a member of that group, or run as that user"
    return f"{whose}: run as that user, or have the mode changed"


def _name_of(find: Callable[[int], Any], number: int) -> str:
    """Return the name of a user or group; its number if it has none."""
    try:
        return str(find(number)[0])
    except KeyError:
        return str(number)


@dataclass(frozen=True, eq=False)
class _OpenFile:
    """A file that is open."""

    handle: Handle
    status: os.stat_result

    @property
    def is_at_hand(self) -> bool:
        """True if the status of its path is in memory: no other machine and no program is asked."""
        return stat.S_ISREG(self.status.st_mode) and os.major(self.status.st_dev) != 0


_open_files: LiveValues[tuple[object, ...], _OpenFile] = LiveValues()
"""Files and disks that this process has open for reading, by path, engine and ``buffered``. Those
that are opened again need no descriptors and no queue pairs of their own."""

os.register_at_fork(after_in_child=_open_files.clear)


def _open(
    path: str, uri: str, *, writable: bool, engine: Engine, buffered: bool
) -> tuple[NativeDevice, _OpenFile]:
    """Open a file, or use one that is open."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise _os_error(f"open {uri}", error, _as_service(path)) from error
    if stat.S_ISSOCK(status.st_mode):
        raise UsageError(f"open {uri}: it is a socket{_as_service(path)}")
    key = path, engine, buffered
    file = None if writable else _open_files.get(key)
    if file is not None and (again := _open_again(file, path, uri, status)) is not None:
        return again, file
    try:
        native = NativeDevice.open_file(
            path, uri=uri, writable=writable, engine=engine, buffered=buffered
        )
    except DeviceError as error:
        if error.errno not in (errno.EACCES, errno.EPERM):
            raise
        raise DeviceError(f"{error}{_permission_hint(status, writable)}", error.errno) from error
    file = _OpenFile(native.handle, status)
    if not writable:
        _open_files.put(key, file)
    return native, file


def _open_again(
    file: _OpenFile, path: str, uri: str, status: os.stat_result
) -> NativeDevice | None:
    """Return another device of an open file; None if its path names another one, or its size."""
    if (status.st_ino, _identity(status)) != (file.status.st_ino, _identity(file.status)):
        return None
    native = NativeDevice(file.handle, uri, writable=False)
    size_bytes = status.st_size
    if not stat.S_ISREG(status.st_mode):
        with Descriptor() as disk:
            disk.fill(os.open, path, os.O_RDONLY | os.O_CLOEXEC)
            size_bytes = os.lseek(disk.value, 0, os.SEEK_END)
    same_size = native.size_bytes == size_bytes - size_bytes % native.block_bytes
    return native if same_size else None


def _open_in_time(
    path: str, uri: str, *, writable: bool, engine: Engine, buffered: bool
) -> tuple[NativeDevice, _OpenFile]:
    """Open a file, which waits for its disk: libdlfs reads a block.

    Under a deadline, a thread opens the file, unless this process has it open. If the disk does not
    answer, the thread stays.

    Raises:
        DeviceTimeoutError: the disk does not answer in time.
        DlfsError: as ``FileDevice``.
    """
    opening = partial(_open, path, uri, writable=writable, engine=engine, buffered=buffered)
    deadline = current_deadline()
    file = None if writable else _open_files.get((path, engine, buffered))
    if deadline is None or (file is not None and file.is_at_hand):
        return opening()
    action = f"open {uri}"
    silence.check_answers(uri, action)
    limit_s = deadline.device_s
    opened = start_call(opening, "dlfs-open")
    if not has_ended(opened, limit_s):
        reopen = partial(FileDevice, path, buffered=buffered)
        silence.note_silence(uri, reopen, waited_s=limit_s)
        raise silence.timeout_error(action, limit_s)
    return opened.result()


class FileDevice(NativeBackedDevice):
    """A regular file or a disk.

    Args:
        path: path of the file or of the disk's device node.
        writable: True to open it for writing too.
        engine: ``auto`` (io_uring where allowed), ``uring`` or ``threads``.
        buffered: use the page cache although the file system has O_DIRECT.

    Raises:
        NotFoundError: there is no such file.
        UsageError: the path is neither a file nor a disk, or the engine is unknown.
        DeviceError: the file cannot be opened.
    """

    def __init__(
        self,
        path: str | bytes | os.PathLike[str],
        *,
        writable: bool = False,
        engine: Engine = "auto",
        buffered: bool = False,
    ) -> None:
        self.path = os.fsdecode(path)
        self._buffered = buffered
        uri = format_path(self.path)
        native, file = _open_in_time(
            self.path, uri, writable=writable, engine=engine, buffered=buffered
        )
        super().__init__(native, uri=uri, identity=_identity(file.status), writable=writable)
        self._file: _OpenFile | None = file
        self._lock_file = Descriptor()
        _opened.add(self)

    @classmethod
    def create(
        cls, path: str | bytes | os.PathLike[str], size_bytes: int, *, engine: Engine = "auto"
    ) -> FileDevice:
        """Create a file with its space reserved and open it for writing. Leaves none on failure.

        Args:
            path: must not exist.
            size_bytes: at least 4096; rounded down to a multiple of 4096.
            engine: as for opening.

        Raises:
            ExistsError: the file exists.
            SpaceError: the file system has too little space.
            UsageError: the size is too small, or the engine is unknown.
            DeviceError: the file cannot be created.
        """
        name = os.fsdecode(path)
        size_bytes -= size_bytes % SIZE_MULTIPLE_BYTES
        if size_bytes <= 0:
            raise UsageError(f"create {name}: expected at least {SIZE_MULTIPLE_BYTES} bytes")
        with Descriptor() as file:
            try:
                _create(file, name, size_bytes)
                return cls(name, writable=True, engine=engine)
            except BaseException:
                if file.value >= 0:
                    Path(name).unlink(missing_ok=True)
                raise

    @property
    def reopener(self) -> Callable[[], BlockDevice] | None:
        """Function that opens the file again for reading."""
        return partial(FileDevice, self.path, buffered=self._buffered)

    def _acquire(self, _: HolderRecord) -> bool:
        try:
            descriptor = self._lock_file.fill(os.open, self.path, os.O_RDWR | os.O_CLOEXEC)
            if _identity(os.fstat(descriptor)) != self.identity:
                raise UsageError(f"lock {self.uri}: the file was replaced since it was opened")
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._release()
            return False
        except OSError as error:
            self._release()
            raise _os_error(f"lock {self.uri}", error) from error
        except BaseException:
            self._release()
            raise
        return True

    def _release(self) -> None:
        if self._lock_file.value >= 0:  # a child may have a copy, which closing does not unlock
            fcntl.flock(self._lock_file.value, fcntl.LOCK_UN)
        self._lock_file.close()

    # ---- granted writing -------------------------------------------------------------------------

    def check_can_grant(self) -> None:
        """Check that only this host reaches the file; see ``BlockDevice.check_can_grant``."""
        action = f"grant writing to {self.uri}"
        try:
            check_one_host(self.native.descriptor, action)
        except OSError as error:
            raise _os_error(action, error) from error

    def _begin_granted(self, slot: int) -> None:
        action = f"write to {self.uri} under grants"
        with Descriptor() as file:
            try:
                self._reopen(file, os.O_RDWR)
                if not lock_slot(file.value, slot):
                    raise LockedError(f"{action}: a writer that still runs has slot {slot}")
                os.dup2(file.value, self.native.descriptor, inheritable=False)
            except LockedError:
                raise
            except OSError as error:
                raise _os_error(action, error) from error

    def _end_granted(self) -> None:
        try:
            self._become_read_only()
        except OSError as error:
            raise _os_error(f"end granted writing to {self.uri}", error) from error

    def granted_writers_gone(self, slot: int | None = None) -> bool:
        """Return True if no granted writer can write; see ``BlockDevice.granted_writers_gone``."""
        with Descriptor() as file:
            try:
                self._reopen(file, os.O_RDONLY)
                return are_slots_free(file.value, slot)
            except OSError as error:
                raise _os_error(f"find the granted writers of {self.uri}", error) from error

    def _reopen(self, file: Descriptor, access: int) -> None:
        """Open the same file again, whatever its path names by now."""
        descriptor = self.native.descriptor
        direct = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT
        flags = access | direct | os.O_CLOEXEC
        file.fill(os.open, f"/proc/self/fd/{descriptor}", flags)

    def _become_read_only(self) -> None:
        """Exchange libdlfs's open file for one that is open for reading."""
        self.writable = False
        with Descriptor() as file:
            self._reopen(file, os.O_RDONLY)
            os.dup2(file.value, self.native.descriptor, inheritable=False)

    # ---- life ------------------------------------------------------------------------------------

    def _close_native(self, native: NativeDevice) -> None:
        self._file = None
        super()._close_native(native)

    def _leave_to_parent(self) -> None:
        """Release the child's copies of the parent's lock and slot."""
        self._lock_file.close()  # which does not release the parent's lock
        self._locked_by = None
        self._recorded = False
        if self._granted_to is not None and self._native is not None:
            with suppress(OSError, DlfsError):  # it ends with the child, at the latest
                self._become_read_only()


def _create(file: Descriptor, name: str, size_bytes: int) -> None:
    """Create a file and reserve its space.

    Args:
        file: gets the descriptor, which the file then has also if this fails.
        name: path of the file.
        size_bytes: size of the file.
    """
    try:
        file.fill(os.open, name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except FileExistsError as error:
        raise ExistsError(f"create {name}: it exists already") from error
    except OSError as error:
        raise _os_error(f"create {name}", error) from error
    try:
        _reserve(file.value, size_bytes)
        _sync_parent(name)
    except OSError as error:
        raise _os_error(f"create {name}, {size_bytes} bytes", error) from error


def _reserve(descriptor: int, size_bytes: int) -> None:
    """Reserve the space of a new file."""
    check_free_space(descriptor, size_bytes)
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        os.ftruncate(descriptor, size_bytes)  # the file system cannot reserve space
    os.fsync(descriptor)


def _sync_parent(name: str) -> None:
    """Make a new file's directory entry durable."""
    with Descriptor() as parent:
        os.fsync(
            parent.fill(os.open, Path(name).parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        )


_opened: LiveObjects[FileDevice] = LiveObjects()


def _after_fork_in_child() -> None:
    for device in _opened:
        device._leave_to_parent()


os.register_at_fork(after_in_child=_after_fork_in_child)
