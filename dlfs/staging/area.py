"""The staging area: an ordinary directory in which programs write what is to become datasets.

Layout on disk::

    AREA/
        NAME/                   a dataset that is being written, by any program
        .dlfs/                  belongs to the server that uses the staging area
            volume              JSON: the UUID of the volume that it belongs to
            lock                locked (flock) by the server
            socket              at which the server takes requests (``server``)
            sealing/UUID/NAME/  NAME, while it is sealed as the dataset of that UUID
            removed/            what is being deleted

A dataset is sealed in three steps. First NAME moves to ``sealing/UUID``, out of the sight of
programs. Then the files are imported, and the commit of the volume makes the dataset real. Last,
``UUID`` moves to ``removed``. After a crash before the commit, the volume has no dataset of that
UUID, and NAME moves back; after a crash behind the commit, it has one, and the files are removed.
Each step is durable before the next one begins, so nothing is imported twice or lost.

Names are bytes. Programs control everything below NAME, also while it is sealed, by descriptors
that they have open. So it is accessed through descriptors, one name at a time, and no symbolic link
is followed.

Threads: any, for one dataset at a time. One server uses a staging area at a time.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID, uuid4

from dlfs.base.json_records import from_json, to_json
from dlfs.errors import (
    DeviceError,
    DlfsError,
    ExistsError,
    FormatError,
    LockedError,
    NotFoundError,
    UsageError,
    write_error,
)
from dlfs.format.paths import display
from dlfs.staging.protocol import StagedContents

FORMAT = 2
LOCK_SECONDS = 10.0
"""Longest wait for a server that is ending to release the staging area, in seconds."""

PRIVATE = ".dlfs"
"""Name of the server's directory in a staging area."""
SOCKET = "socket"

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
NO_DIRECTORY = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
"""Errnos of opening a directory that is missing, a file, or a symbolic link."""

_POLL_SECONDS = 0.05
_RECORD_BYTES_MAX = 4096
_BACKLOG = 128


class StagingArea:
    """An open staging area. A context manager.

    Args:
        folder: its directory; created if it is missing, with mode 0700.
        volume: UUID of the volume that its datasets are for.
        wait_seconds: longest wait for another server to release it.

    Raises:
        UsageError: the directory cannot be a staging area, or it is that of another volume or user.
        LockedError: another server uses the staging area.
        DeviceError: it cannot be read or written.
    """

    def __init__(
        self, folder: str | os.PathLike[str], volume: UUID, *, wait_seconds: float = LOCK_SECONDS
    ) -> None:
        self.folder = Path(os.path.abspath(folder))
        self._opened: list[int] = []
        try:
            self._root = self._open_own(str(self.folder), (0, os.geteuid()))
            self._private = self._open_own(PRIVATE, (os.geteuid(),), dir_fd=self._root, mode=0o755)
            self._lock = self._take_lock(wait_seconds)
            self._check_volume(volume)
            self._sealing = self._open_own("sealing", (os.geteuid(),), dir_fd=self._private)
            self._removed = self._open_own("removed", (os.geteuid(),), dir_fd=self._private)
            for directory in (self._private, self._root):
                os.fsync(directory)
        except OSError as error:
            self.close()
            if isinstance(error, DlfsError):
                raise
            raise write_error(f"{self._what()}: {error.strerror}", error.errno or 0) from error
        except DlfsError:
            self.close()
            raise

    def __enter__(self) -> StagingArea:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the staging area and unlock it. Idempotent."""
        while self._opened:
            os.close(self._opened.pop())

    # ---- datasets --------------------------------------------------------------------------------

    def names(self) -> list[bytes]:
        """Return the names of the directories that are not sealed, in byte order."""
        with os.scandir(self._root) as entries:
            return sorted(
                os.fsencode(entry.name)
                for entry in entries
                if entry.is_dir(follow_symlinks=False) and entry.name != PRIVATE
            )

    def path(self, name: bytes) -> str:
        """Return the path of a directory, for messages."""
        return os.path.join(self.folder, display(name))

    def owner(self, name: bytes) -> int:
        """Return the user ID of a directory's owner.

        Raises:
            OSError: there is no such entry.
        """
        return os.stat(name, dir_fd=self._root, follow_symlinks=False).st_uid

    def contents(self, name: bytes) -> StagedContents:
        """Count the files and bytes of a directory, with one system call for each file.

        Raises:
            OSError: it cannot be read.
        """
        with _opened(name, self._root) as directory:
            files = file_bytes = 0
            since = os.fstat(directory).st_ctime
            for status in _walk(directory):
                if stat.S_ISREG(status.st_mode):
                    files += 1
                    file_bytes += status.st_size
                since = min(since, status.st_ctime)
            return StagedContents(files, file_bytes, since)

    # ---- sealing ---------------------------------------------------------------------------------

    def take(self, name: bytes, uuid: UUID, owner: int | None) -> int:
        """Take a directory out of sight of programs, durably, to be sealed under a UUID.

        Args:
            name: name of the directory.
            uuid: UUID of the dataset.
            owner: user to whom it must belong; None: it may belong to any.

        Returns:
            A descriptor of the directory, which is the caller's.

        Raises:
            NotFoundError: there is no such directory.
            DeviceError: it belongs to another user (EACCES), or cannot be moved.
        """
        what = f"seal {display(name)!r}"
        if name == PRIVATE.encode():
            raise UsageError(f"{what}: expected another name, got that of the server's directory")
        try:
            directory = os.open(name, DIRECTORY, dir_fd=self._root)
        except OSError as error:
            if error.errno in NO_DIRECTORY:
                raise NotFoundError(f"{what}: {self.path(name)} is no directory") from error
            raise write_error(f"{what}: {error.strerror}", error.errno or 0) from error
        try:
            found = os.fstat(directory)
            if owner not in (None, found.st_uid):
                raise DeviceError(
                    f"{what}: {self.path(name)} belongs to user {found.st_uid}, not to user "
                    f"{owner}",
                    errno.EACCES,
                )
            self._move_out(name, uuid, found, what)
        except BaseException:
            os.close(directory)
            raise
        return directory

    def _move_out(self, name: bytes, uuid: UUID, found: os.stat_result, what: str) -> None:
        try:
            os.mkdir(str(uuid), 0o700, dir_fd=self._sealing)
            with _opened(str(uuid), self._sealing) as place:
                try:
                    os.rename(name, name, src_dir_fd=self._root, dst_dir_fd=place)
                except OSError:
                    os.rmdir(str(uuid), dir_fd=self._sealing)
                    raise
                for directory in (place, self._sealing, self._root):
                    os.fsync(directory)
                moved = os.stat(name, dir_fd=place, follow_symlinks=False)
        except OSError as error:
            raise write_error(
                f"{what}: take {self.path(name)} out of sight: {error.strerror}", error.errno or 0
            ) from error
        if (moved.st_dev, moved.st_ino) != (found.st_dev, found.st_ino):
            self.put_back(uuid)
            raise LockedError(f"{what}: {self.path(name)} was replaced in this moment; seal again")

    def put_back(self, uuid: UUID) -> bytes:
        """Put a directory that was taken back in its place, durably; return its name.

        An empty directory that was made in its place meanwhile is replaced.

        Raises:
            ExistsError: another one has its place; the message names both.
            OSError: it cannot be moved.
        """
        with _opened(str(uuid), self._sealing) as place:
            for name in map(os.fsencode, os.listdir(place)):
                try:
                    os.rename(name, name, src_dir_fd=place, dst_dir_fd=self._root)
                except OSError as error:
                    if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                        raise
                    taken = self.folder / PRIVATE / "sealing" / str(uuid) / display(name)
                    raise ExistsError(
                        f"put {taken} back, which was not sealed: {self.path(name)} was made "
                        "meanwhile; rename that one, then seal, or mount again"
                    ) from error
                os.fsync(self._root)
                break
            else:
                name = b""
        os.rmdir(str(uuid), dir_fd=self._sealing)
        os.fsync(self._sealing)
        return name

    def remove(self, uuid: UUID) -> None:
        """Remove a directory that was taken; ``delete_removed`` deletes its files later.

        Raises:
            OSError: it cannot be moved.
        """
        os.rename(str(uuid), str(uuid), src_dir_fd=self._sealing, dst_dir_fd=self._removed)
        os.fsync(self._sealing)

    def taken(self) -> list[UUID]:
        """Return the UUIDs under which directories were taken and neither put back nor removed."""
        return [UUID(name) for name in sorted(os.listdir(self._sealing))]

    def delete_removed(self, is_ending: Callable[[], bool] = lambda: False) -> None:
        """Delete the files of removed directories, whatever their depth and permissions.

        A directory in one of them is first moved up, so that no path gets too long.

        Args:
            is_ending: asked before each file; True: leave the rest to the next server.
        """
        while names := os.listdir(self._removed):
            for name in names:
                if is_ending():
                    return
                self._delete(name, is_ending)

    def _delete(self, name: str, is_ending: Callable[[], bool]) -> None:
        try:
            _permit(name, self._removed)
            with _opened(name, self._removed) as directory:
                with os.scandir(directory) as entries:
                    found = [(each.name, each.is_dir(follow_symlinks=False)) for each in entries]
                for below, is_directory in found:
                    if is_ending():
                        return
                    if not is_directory:
                        os.unlink(below, dir_fd=directory)
                        continue
                    _permit(below, directory)
                    os.rename(below, str(uuid4()), src_dir_fd=directory, dst_dir_fd=self._removed)
            os.rmdir(name, dir_fd=self._removed)
        except OSError as error:
            if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                raise
            os.unlink(name, dir_fd=self._removed)  # a program has replaced a directory by a file

    # ---- requests --------------------------------------------------------------------------------

    def listen(self) -> socket.socket:
        """Listen for requests; any user may connect, as far as the area's modes permit.

        Raises:
            DeviceError: the file system has no sockets.
        """
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        path = socket_path(self._private)
        try:
            with suppress(FileNotFoundError):
                os.unlink(SOCKET, dir_fd=self._private)  # that of a dead server: the lock is ours
            made.bind(path)
            os.chmod(path, 0o666)
            made.listen(_BACKLOG)
        except OSError as error:
            made.close()
            raise write_error(
                f"listen on {self.folder / PRIVATE / SOCKET}: {error.strerror}", error.errno or 0
            ) from error
        return made

    # ---- inside ----------------------------------------------------------------------------------

    def _what(self) -> str:
        return f"open the staging area {self.folder}"

    def _keep(self, descriptor: int) -> int:
        self._opened.append(descriptor)
        return descriptor

    def _open_own(
        self, path: str, owners: tuple[int, ...], *, dir_fd: int | None = None, mode: int = 0o700
    ) -> int:
        """Open a directory that no other user could replace; make it if it is missing."""
        follow = 0 if dir_fd is not None else os.O_NOFOLLOW
        try:
            directory = self._keep(os.open(path, DIRECTORY & ~follow, dir_fd=dir_fd))
        except FileNotFoundError:
            os.mkdir(path, mode, dir_fd=dir_fd)
            directory = self._keep(os.open(path, DIRECTORY, dir_fd=dir_fd))
            os.fchmod(directory, mode)
        owner = os.fstat(directory).st_uid
        if owner not in owners:
            raise UsageError(
                f"{self._what()}: expected a directory of user {os.geteuid()}, got "
                f"{self.folder / path} of user {owner}"
            )
        return directory

    def _take_lock(self, wait_seconds: float) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        lock = self._keep(os.open("lock", flags, 0o600, dir_fd=self._private))
        deadline = time.monotonic() + wait_seconds
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() >= deadline:
                    holder = os.pread(lock, 100, 0).decode("ascii", "replace").strip()
                    raise LockedError(f"{self._what()}: process {holder or '?'} uses it") from error
            time.sleep(_POLL_SECONDS)
        os.ftruncate(lock, 0)
        os.pwrite(lock, b"%d\n" % os.getpid(), 0)
        return lock

    def _check_volume(self, volume: UUID) -> None:
        found = _read_record(self._private, f"the staging area {self.folder}")
        if found is None:
            _write_record(self._private, _Record(FORMAT, str(volume)))
            return
        if found.format != FORMAT:
            raise UsageError(f"{self._what()}: expected format {FORMAT}, got {found.format}")
        if found.volume != str(volume):
            raise UsageError(
                f"{self._what()}: expected one of volume {volume}, got one of volume {found.volume}"
            )


def socket_path(private: int) -> str:
    """Return a path of the server's socket that is short enough, given its directory."""
    return f"/proc/self/fd/{private}/{SOCKET}"


@contextmanager
def _opened(name: str | bytes, directory: int) -> Iterator[int]:
    """Open a directory in another one, for the duration of a block."""
    descriptor = os.open(name, DIRECTORY, dir_fd=directory)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _walk(directory: int) -> Iterator[os.stat_result]:
    """Yield the attributes of every entry below a directory that is no directory.

    Entries that are removed meanwhile are left out. The directories of one path are open at a time.
    """
    opened = [os.open(".", DIRECTORY, dir_fd=directory)]
    pending: list[list[str]] = []
    try:
        while opened:
            if len(pending) < len(opened):
                with os.scandir(opened[-1]) as scan:
                    entries = list(scan)
                pending.append([e.name for e in entries if e.is_dir(follow_symlinks=False)])
                for entry in entries:
                    if not entry.is_dir(follow_symlinks=False):
                        with suppress(FileNotFoundError):
                            yield os.stat(entry.name, dir_fd=opened[-1], follow_symlinks=False)
            if pending[-1]:
                with suppress(FileNotFoundError, NotADirectoryError):
                    opened.append(os.open(pending[-1].pop(), DIRECTORY, dir_fd=opened[-1]))
            else:
                pending.pop()
                os.close(opened.pop())
    finally:
        for descriptor in opened:
            os.close(descriptor)


def _permit(name: str, directory: int) -> None:
    """Give the server all permissions on a directory in another one; follows no link."""
    if os.geteuid() == 0:
        return
    found = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    try:
        if stat.S_ISDIR(os.fstat(found).st_mode):
            os.chmod(f"/proc/self/fd/{found}", stat.S_IRWXU)
    finally:
        os.close(found)


@dataclass(frozen=True)
class _Record:
    """Contents of the file ``volume``: format of the staging area and UUID of its volume."""

    format: int
    volume: str = ""


def _write_record(directory: int, record: _Record) -> None:
    """Write the file ``volume`` atomically and durably."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    descriptor = os.open("volume.new", flags, 0o600, dir_fd=directory)
    try:
        os.write(descriptor, to_json(record) + b"\n")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.rename("volume.new", "volume", src_dir_fd=directory, dst_dir_fd=directory)
    os.fsync(directory)


def _read_record(directory: int, where: str) -> _Record | None:
    """Read what ``_write_record`` wrote; None if the file does not exist."""
    try:
        descriptor = os.open("volume", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    except FileNotFoundError:
        return None
    try:
        return from_json(os.read(descriptor, _RECORD_BYTES_MAX), _Record)
    except FormatError as error:
        raise FormatError(f"read 'volume' of {where}: {error}") from error
    finally:
        os.close(descriptor)
