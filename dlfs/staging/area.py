"""The spool: a directory on a local file system that holds what is written before it is sealed.

::

    SPOOL/                      mode 0700: nobody reaches it but through the mount
        volume                  JSON: which volume it belongs to
        lock                    held (flock) by the server that uses it
        datasets/               what the mount shows as incoming, owner and mode too
            NAME/
                since           empty; its time is when NAME was begun
                seal            JSON, while NAME is being sealed: the UUID that it will have
                files/          what the mount shows as incoming/NAME
        making/                 datasets that are just being begun
        removed/                what is being deleted

A dataset is sealed in three steps: ``seal`` is written, with the UUID that the new dataset will
have; the files are imported, and the volume's commit makes the dataset real; NAME moves to
``removed``. A crash before the commit leaves NAME and no such dataset, one after it NAME and the
dataset. The next start asks the volume for the UUID and either drops ``seal`` or lets NAME go, so
nothing is ever imported twice or lost. Every step is made durable before the next one.

Names are bytes. What lies below ``files`` is other people's: it is reached through descriptors, one
name at a time, and no symbolic link is followed.

Threads: any; one server uses a spool at a time.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from uuid import UUID

from dlfs.errors import (
    DlfsError,
    FormatError,
    LimitError,
    LockedError,
    UsageError,
    write_error,
)
from dlfs.format.names import new_dataset_name
from dlfs.format.paths import display
from dlfs.staging.protocol import StagedContents

FORMAT = 1
LOCK_SECONDS = 10.0
"""How long a start waits for a server that is just ending."""

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_POLL_SECONDS = 0.05
_RECORD_BYTES_MAX = 4096
_BEGUN = {"lock", "volume.new"}
"""What a spool may hold whose making was interrupted."""


class Spool:
    """An open spool. A context manager.

    Args:
        folder: made if it is missing.
        volume: that its datasets are for.
        wait_seconds: how long to wait for another server to let go of it.

    Raises:
        UsageError: it is no spool, or another volume's.
        LockedError: another server uses it.
        DeviceError: it cannot be read or written.
    """

    def __init__(
        self, folder: str | os.PathLike[str], volume: UUID, *, wait_seconds: float = LOCK_SECONDS
    ) -> None:
        self.folder = Path(os.path.abspath(folder))
        self._numbers = count(1)
        self._lock = -1
        try:
            self._prepare(volume, wait_seconds)
            self.datasets = os.open(self.folder / "datasets", _DIRECTORY)
        except OSError as error:
            self.close()
            if isinstance(error, DlfsError):
                raise
            raise write_error(
                f"open the spool {self.folder}: {error.strerror}", error.errno or 0
            ) from error
        except DlfsError:
            self.close()
            raise

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of it. Idempotent."""
        if self._lock >= 0:
            with suppress(AttributeError):
                os.close(self.datasets)
            os.close(self._lock)
            self._lock = -1

    # ---- datasets --------------------------------------------------------------------------------

    def names(self) -> list[bytes]:
        """The datasets that are not sealed, in byte order."""
        with os.scandir(self.datasets) as entries:
            return sorted(os.fsencode(entry.name) for entry in entries)

    def path(self, name: bytes) -> str:
        """Where a dataset's files are."""
        return os.path.join(self.folder, "datasets", os.fsdecode(name), "files")

    def make(self, name: bytes, *, mode: int, uid: int, gid: int) -> None:
        """Begin a dataset.

        Raises:
            UsageError: no new dataset may have this name.
            OSError: EEXIST: there is one of that name; EPERM: the owner cannot be set;
                ENAMETOOLONG: the name is too long for a new dataset.
        """
        _check_name(name)
        with self._staging() as staging:
            os.mkdir("files", 0o700, dir_fd=staging.descriptor)
            files = f"{staging.path}/files"
            if (uid, gid) != (os.geteuid(), os.getegid()):
                os.chown(files, uid, gid)
            os.chmod(files, mode)
            os.close(os.open("since", os.O_WRONLY | os.O_CREAT, 0o600, dir_fd=staging.descriptor))
            _move_new(staging.path, os.fsencode(self.folder) + b"/datasets/" + name)
            os.fsync(self.datasets)

    def rename(self, old: bytes, new: bytes) -> None:
        """Give a dataset another name; an empty one of that name gives way.

        Raises:
            UsageError: no new dataset may have this name.
            OSError: ENOTEMPTY: the other one is not empty; ENAMETOOLONG as for ``make``.
        """
        _check_name(new)
        if old == new:
            return
        with suppress(FileNotFoundError):
            self.remove_empty(new)
        base = os.fsencode(self.folder) + b"/datasets/"
        _move_new(base + old, base + new)
        os.fsync(self.datasets)

    def remove_empty(self, name: bytes) -> None:
        """Remove a dataset without files.

        Raises:
            OSError: ENOTEMPTY, ENOENT.
        """
        os.rmdir(os.fsencode(self.path(name)))
        self.let_go(name)

    def contents(self, name: bytes) -> StagedContents:
        """Count what a dataset holds. Takes a system call for each file.

        Raises:
            OSError: it cannot be read.
        """
        wrapper = os.open(name, _DIRECTORY, dir_fd=self.datasets)
        try:
            since = os.stat("since", dir_fd=wrapper).st_mtime
            files, file_bytes = _count(os.open("files", _DIRECTORY, dir_fd=wrapper))
        finally:
            os.close(wrapper)
        return StagedContents(files, file_bytes, since)

    # ---- sealing ---------------------------------------------------------------------------------

    def begin_seal(self, name: bytes, uuid: UUID) -> None:
        """Note durably that a dataset is about to be sealed as the one of that UUID."""
        wrapper = os.open(name, _DIRECTORY, dir_fd=self.datasets)
        try:
            _write_record(wrapper, "seal", {"uuid": str(uuid)})
        finally:
            os.close(wrapper)

    def cancel_seal(self, name: bytes) -> None:
        """Note durably that it was not sealed."""
        wrapper = os.open(name, _DIRECTORY, dir_fd=self.datasets)
        try:
            with suppress(FileNotFoundError):
                os.unlink("seal", dir_fd=wrapper)
            os.fsync(wrapper)
        finally:
            os.close(wrapper)

    def let_go(self, name: bytes) -> None:
        """Take a dataset out of the spool; ``empty_removed`` deletes it then.

        Raises:
            OSError: there is none.
        """
        os.rename(os.fsencode(self.folder) + b"/datasets/" + name, self._fresh("removed"))
        os.fsync(self.datasets)

    def recover(self, sealed: Collection[UUID]) -> list[bytes]:
        """Finish or undo what a crash interrupted. The first thing to do with a spool.

        Args:
            sealed: the UUIDs of all datasets of the volume.

        Returns:
            The names of those that had been sealed.

        Raises:
            OSError: the spool cannot be read or written.
            FormatError: a record is damaged.
        """
        making = os.fsencode(self.folder) + b"/making"
        for name in os.listdir(making):
            os.rename(os.path.join(making, name), self._fresh("removed"))
        done = []
        for name in self.names():
            uuid = self._seal_record(name)
            if uuid in sealed:
                self.let_go(name)
                done.append(name)
            elif not os.path.lexists(self.path(name)):  # being removed
                self.let_go(name)
            elif uuid is not None:
                self.cancel_seal(name)
        return done

    def empty_removed(self) -> None:
        """Delete what was let go of, however deep and however protected."""
        base = os.fsencode(self.folder) + b"/removed"
        pending = [os.path.join(base, name) for name in os.listdir(base)]
        while pending:
            folder = pending.pop()
            for name, is_folder in _entries_to_delete(folder):
                path = os.path.join(folder, name)
                if is_folder:  # moved up, so that no depth is too deep
                    pending.append(self._fresh("removed"))
                    os.rename(path, pending[-1])
                else:
                    os.unlink(path)
            os.rmdir(folder)

    # ---- inside ----------------------------------------------------------------------------------

    def _prepare(self, volume: UUID, wait_seconds: float) -> None:
        fresh = not self.folder.exists()
        self.folder.mkdir(mode=0o700, exist_ok=True)
        owner = self.folder.stat().st_uid
        if owner != os.geteuid():  # who could put another spool in its place
            raise UsageError(
                f"open the spool {self.folder}: expected a directory of user {os.geteuid()}, "
                f"got one of user {owner}"
            )
        found = set(os.listdir(self.folder))
        if "volume" not in found and not found <= _BEGUN:
            raise UsageError(
                f"open the spool {self.folder}: expected an empty or missing directory, or a "
                "spool, got other files in it"
            )
        if not fresh:
            self.folder.chmod(0o700)
        self._lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._take_lock(wait_seconds)
        self._check_volume(volume)
        for part, mode in (("datasets", 0o755), ("making", 0o700), ("removed", 0o700)):
            path = self.folder / part
            if not path.exists():
                path.mkdir()
                path.chmod(mode)

    def _take_lock(self, wait_seconds: float) -> None:
        deadline = time.monotonic() + wait_seconds
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() >= deadline:
                    holder = os.pread(self._lock, 100, 0).decode("ascii", "replace").strip()
                    raise LockedError(
                        f"open the spool {self.folder}: process {holder or '?'} uses it"
                    ) from error
            time.sleep(_POLL_SECONDS)
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, b"%d\n" % os.getpid(), 0)

    def _check_volume(self, volume: UUID) -> None:
        root = os.open(self.folder, _DIRECTORY)
        try:
            found = _read_record(root, "volume", f"the spool {self.folder}")
            if found is None:
                _write_record(root, "volume", {"format": FORMAT, "volume": str(volume)})
                return
        finally:
            os.close(root)
        if found.get("format") != FORMAT:
            raise UsageError(
                f"open the spool {self.folder}: expected format {FORMAT}, "
                f"got {found.get('format')!r}"
            )
        if found.get("volume") != str(volume):
            raise UsageError(
                f"open the spool {self.folder}: expected one of volume {volume}, "
                f"got one of volume {found.get('volume')}"
            )

    def _seal_record(self, name: bytes) -> UUID | None:
        wrapper = os.open(name, _DIRECTORY, dir_fd=self.datasets)
        try:
            where = f"the spool {self.folder}, dataset {display(name)!r}"
            found = _read_record(wrapper, "seal", where)
            return None if found is None else _uuid(found, where)
        finally:
            os.close(wrapper)

    def _fresh(self, part: str) -> bytes:
        """A path that nothing has."""
        base = os.fsencode(self.folder / part)
        return b"%s/%d-%d" % (base, time.time_ns(), next(self._numbers))

    @contextmanager
    def _staging(self) -> Iterator[_Staging]:
        """A directory that is not seen yet; what a failure leaves of it goes at the next start."""
        path = self._fresh("making")
        os.mkdir(path, 0o700)
        descriptor = os.open(path, _DIRECTORY)
        try:
            yield _Staging(os.fsdecode(path), descriptor)
        finally:
            os.close(descriptor)


@dataclass(frozen=True)
class _Staging:
    path: str
    descriptor: int


def _check_name(name: bytes) -> None:
    """Refuse the name of a dataset that could not be sealed."""
    try:
        new_dataset_name(name)
    except LimitError as error:
        raise OSError(errno.ENAMETOOLONG, str(error)) from error


def _move_new(old: str | bytes, new: bytes) -> None:
    """Rename a directory to a name that is free."""
    try:
        os.rename(os.fsencode(old), new)
    except OSError as error:
        if error.errno == errno.ENOTEMPTY:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from error
        raise


def _write_record(directory: int, name: str, record: dict[str, object]) -> None:
    """Write a small file, whole or not at all, durably."""
    draft = f"{name}.new"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    descriptor = os.open(draft, flags, 0o600, dir_fd=directory)
    try:
        os.write(descriptor, json.dumps(record).encode() + b"\n")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.rename(draft, name, src_dir_fd=directory, dst_dir_fd=directory)
    os.fsync(directory)


def _read_record(directory: int, name: str, where: str) -> dict[str, object] | None:
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    except FileNotFoundError:
        return None
    try:
        found = json.loads(os.read(descriptor, _RECORD_BYTES_MAX))
    except ValueError as error:
        raise FormatError(f"read {name!r} of {where}: expected JSON: {error}") from error
    finally:
        os.close(descriptor)
    if not isinstance(found, dict):
        raise FormatError(f"read {name!r} of {where}: expected an object, got {found!r}")
    return found


def _uuid(record: dict[str, object], where: str) -> UUID:
    try:
        return UUID(str(record["uuid"]))
    except (KeyError, ValueError) as error:
        raise FormatError(f"read 'seal' of {where}: expected a UUID, got {record!r}") from error


def _count(top: int) -> tuple[int, int]:
    """Regular files below a directory and their bytes; closes the descriptor."""
    files = file_bytes = 0
    stack = [top]
    pending: list[list[str]] = []
    try:
        while stack:
            if len(pending) < len(stack):
                folders, found, found_bytes = _look_into(stack[-1])
                files, file_bytes = files + found, file_bytes + found_bytes
                pending.append(folders)
            if pending[-1]:
                with suppress(FileNotFoundError, NotADirectoryError):  # it is gone meanwhile
                    stack.append(os.open(pending[-1].pop(), _DIRECTORY, dir_fd=stack[-1]))
            else:
                pending.pop()
                os.close(stack.pop())
    finally:
        for descriptor in stack:
            os.close(descriptor)
    return files, file_bytes


def _look_into(directory: int) -> tuple[list[str], int, int]:
    """Its directories, how many regular files it has, and their bytes."""
    folders, files, file_bytes = [], 0, 0
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.name)
            elif entry.is_file(follow_symlinks=False):
                with suppress(FileNotFoundError):
                    file_bytes += entry.stat(follow_symlinks=False).st_size
                    files += 1
    return folders, files, file_bytes


def _entries_to_delete(folder: bytes) -> list[tuple[bytes, bool]]:
    """What is in a directory of ours, made accessible first; True for directories."""
    os.chmod(folder, stat.S_IRWXU)
    with os.scandir(folder) as entries:
        found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for name, is_folder in found:
        if is_folder:  # a directory that may not be written cannot be moved
            os.chmod(os.path.join(folder, name), stat.S_IRWXU)
    return found
