"""The staging area: a directory on a local file system with the files of datasets not yet sealed.

Layout on disk (names that older releases wrote must stay readable)::

    AREA/                       mode 0700: programs reach it through the mount only
        volume                  JSON: the UUID of the volume that it belongs to
        lock                    locked (flock) by the server that uses the staging area
        datasets/               what the mount shows as incoming, with its owner and mode
            NAME/
                since           empty; its modification time is when NAME was begun
                seal            JSON, while NAME is being sealed: the UUID of the new dataset
                files/          what the mount shows as incoming/NAME
        making/                 datasets that are being created
        removed/                datasets that are being deleted

A dataset is sealed in three steps. First ``seal`` is written, with the UUID of the new dataset.
Then the files are imported, and the commit of the volume makes the dataset real. Last, NAME moves
to ``removed``. After a crash before the commit, NAME exists and the dataset does not; after a crash
behind the commit, both exist. The next start looks the UUID up in the volume and either deletes
``seal`` or removes NAME, so nothing is imported twice or lost. Each step is durable before the next
one begins.

Names are bytes. Programs control everything below ``files``. So it is accessed through descriptors,
one name at a time, and no symbolic link is followed.

Threads: any. One server uses a staging area at a time.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TypeVar
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
from dlfs.json_records import from_json, to_json
from dlfs.staging.entries import opened, walk_files
from dlfs.staging.protocol import StagedContents

FORMAT = 1
LOCK_SECONDS = 10.0
"""Longest wait for a server that is ending to release the staging area, in seconds."""

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_POLL_SECONDS = 0.05
_RECORD_BYTES_MAX = 4096
_INCOMPLETE = {"lock", "volume.new"}
"""Files of a staging area whose creation was interrupted."""


class StagingArea:
    """An open staging area. A context manager.

    Args:
        folder: its directory; created if it is missing.
        volume: UUID of the volume that its datasets are for.
        wait_seconds: longest wait for another server to release it.

    Raises:
        UsageError: the directory is no staging area, or that of another volume or user.
        LockedError: another server uses the staging area.
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
                f"open the staging area {self.folder}: {error.strerror}", error.errno or 0
            ) from error
        except DlfsError:
            self.close()
            raise

    def __enter__(self) -> StagingArea:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the staging area and unlock it. Idempotent."""
        if self._lock >= 0:
            with suppress(AttributeError):
                os.close(self.datasets)
            os.close(self._lock)
            self._lock = -1

    # ---- datasets --------------------------------------------------------------------------------

    def names(self) -> list[bytes]:
        """Return the names of the datasets that are not sealed, in byte order."""
        with os.scandir(self.datasets) as entries:
            return sorted(os.fsencode(entry.name) for entry in entries)

    def path(self, name: bytes) -> str:
        """Return the path of the directory with a dataset's files."""
        return os.path.join(self.folder, "datasets", os.fsdecode(name), "files")

    def create(self, name: bytes, *, mode: int, uid: int, gid: int) -> None:
        """Create an empty dataset.

        Raises:
            UsageError: the name is not allowed for a new dataset.
            OSError: EEXIST: the name exists; EPERM: the owner cannot be set; ENAMETOOLONG: the
                name is too long for a new dataset.
        """
        _check_name(name)
        new = self._unused_path("making")  # after a failure, the next start deletes it
        files = new + b"/files"
        os.mkdir(new, 0o700)
        os.mkdir(files, 0o700)
        if (uid, gid) != (os.geteuid(), os.getegid()):
            os.chown(files, uid, gid)
        os.chmod(files, mode)
        os.close(os.open(new + b"/since", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
        _move_new(new, os.fsencode(self.folder) + b"/datasets/" + name)
        os.fsync(self.datasets)

    def rename(self, old: bytes, new: bytes) -> None:
        """Rename a dataset; an empty dataset of the new name is replaced.

        Raises:
            UsageError: the name is not allowed for a new dataset.
            OSError: ENOTEMPTY: the replaced dataset is not empty; ENAMETOOLONG as for ``create``.
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
        self.take_out(name)

    def contents(self, name: bytes) -> StagedContents:
        """Count the files and bytes of a dataset, with one system call for each file.

        Raises:
            OSError: it cannot be read.
        """
        with opened(self.datasets, name, _DIRECTORY) as wrapper:
            since = os.stat("since", dir_fd=wrapper).st_mtime
            with opened(wrapper, "files", _DIRECTORY) as directory:
                files, file_bytes = _count(directory)
        return StagedContents(files, file_bytes, since)

    # ---- sealing ---------------------------------------------------------------------------------

    def begin_seal(self, name: bytes, uuid: UUID) -> None:
        """Record durably that a dataset is about to be sealed under this UUID."""
        with opened(self.datasets, name, _DIRECTORY) as wrapper:
            _write_record(wrapper, "seal", _SealRecord(uuid))

    def cancel_seal(self, name: bytes) -> None:
        """Record durably that a dataset was not sealed."""
        with opened(self.datasets, name, _DIRECTORY) as wrapper:
            with suppress(FileNotFoundError):
                os.unlink("seal", dir_fd=wrapper)
            os.fsync(wrapper)

    def take_out(self, name: bytes) -> None:
        """Remove a dataset from the staging area; ``delete_removed`` deletes its files later.

        Raises:
            OSError: there is no such dataset.
        """
        os.rename(os.fsencode(self.folder) + b"/datasets/" + name, self._unused_path("removed"))
        os.fsync(self.datasets)

    def recover(self, sealed: Collection[UUID]) -> list[bytes]:
        """Finish or undo the seals that a crash interrupted. Call it before any other method.

        Args:
            sealed: UUIDs of all datasets of the volume.

        Returns:
            The names of the datasets that had been sealed.

        Raises:
            OSError: the staging area cannot be read or written.
            FormatError: a record is damaged.
        """
        making = os.fsencode(self.folder) + b"/making"
        for name in os.listdir(making):
            os.rename(os.path.join(making, name), self._unused_path("removed"))
        done = []
        for name in self.names():
            uuid = self._seal_record(name)
            if uuid in sealed:
                self.take_out(name)
                done.append(name)
            elif not os.path.lexists(self.path(name)):  # being removed
                self.take_out(name)
            elif uuid is not None:
                self.cancel_seal(name)
        return done

    def delete_removed(self) -> None:
        """Delete the files of removed datasets, whatever their depth and permissions."""
        base = os.fsencode(self.folder) + b"/removed"
        pending = [os.path.join(base, name) for name in os.listdir(base)]
        while pending:
            folder = pending.pop()
            for name, is_folder in _entries_to_delete(folder):
                path = os.path.join(folder, name)
                if is_folder:  # moved to the top, so that no path gets too long
                    pending.append(self._unused_path("removed"))
                    os.rename(path, pending[-1])
                else:
                    os.unlink(path)
            os.rmdir(folder)

    # ---- inside ----------------------------------------------------------------------------------

    def _prepare(self, volume: UUID, wait_seconds: float) -> None:
        fresh = not self.folder.exists()
        self.folder.mkdir(mode=0o700, exist_ok=True)
        owner = self.folder.stat().st_uid
        if owner != os.geteuid():  # that user could put another directory in its place
            raise UsageError(
                f"open the staging area {self.folder}: expected a directory of user "
                f"{os.geteuid()}, got one of user {owner}"
            )
        found = set(os.listdir(self.folder))
        if "volume" not in found and not found <= _INCOMPLETE:
            raise UsageError(
                f"open the staging area {self.folder}: expected an empty or missing directory, or "
                "a staging area, got other files in it"
            )
        if not fresh:
            self.folder.chmod(0o700)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._lock = os.open(self.folder / "lock", flags, 0o600)
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
                        f"open the staging area {self.folder}: process {holder or '?'} uses it"
                    ) from error
            time.sleep(_POLL_SECONDS)
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, b"%d\n" % os.getpid(), 0)

    def _check_volume(self, volume: UUID) -> None:
        root = os.open(self.folder, _DIRECTORY)
        try:
            found = _read_record(root, "volume", _AreaRecord, f"the staging area {self.folder}")
            if found is None:
                _write_record(root, "volume", _AreaRecord(FORMAT, str(volume)))
                return
        finally:
            os.close(root)
        if found.format != FORMAT:
            raise UsageError(
                f"open the staging area {self.folder}: expected format {FORMAT}, got {found.format}"
            )
        if found.volume != str(volume):
            raise UsageError(
                f"open the staging area {self.folder}: expected one of volume {volume}, "
                f"got one of volume {found.volume}"
            )

    def _seal_record(self, name: bytes) -> UUID | None:
        where = f"the staging area {self.folder}, dataset {display(name)!r}"
        with opened(self.datasets, name, _DIRECTORY) as wrapper:
            found = _read_record(wrapper, "seal", _SealRecord, where)
        return None if found is None else found.uuid

    def _unused_path(self, part: str) -> bytes:
        """Return a path that does not exist."""
        base = os.fsencode(self.folder / part)
        return b"%s/%d-%d" % (base, time.time_ns(), next(self._numbers))


def _check_name(name: bytes) -> None:
    """Check that a new dataset may have a name."""
    try:
        new_dataset_name(name)
    except LimitError as error:
        raise OSError(errno.ENAMETOOLONG, str(error)) from error


def _move_new(old: bytes, new: bytes) -> None:
    """Rename a directory; fail with EEXIST if the new name exists."""
    try:
        os.rename(old, new)
    except OSError as error:
        if error.errno == errno.ENOTEMPTY:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from error
        raise


@dataclass(frozen=True)
class _AreaRecord:
    """Contents of the file ``volume``: format of the staging area and UUID of its volume."""

    format: int
    volume: str = ""


@dataclass(frozen=True)
class _SealRecord:
    """Contents of the file ``seal``: UUID of the dataset version that is being sealed."""

    uuid: UUID


_Record = TypeVar("_Record")


def _write_record(directory: int, name: str, record: object) -> None:
    """Write a small file atomically and durably."""
    draft = f"{name}.new"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    descriptor = os.open(draft, flags, 0o600, dir_fd=directory)
    try:
        os.write(descriptor, to_json(record) + b"\n")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.rename(draft, name, src_dir_fd=directory, dst_dir_fd=directory)
    os.fsync(directory)


def _read_record(directory: int, name: str, kind: type[_Record], where: str) -> _Record | None:
    """Read what ``_write_record`` wrote; None if the file does not exist."""
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    except FileNotFoundError:
        return None
    try:
        return from_json(os.read(descriptor, _RECORD_BYTES_MAX), kind)
    except FormatError as error:
        raise FormatError(f"read {name!r} of {where}: {error}") from error
    finally:
        os.close(descriptor)


def _count(directory: int) -> tuple[int, int]:
    """Count regular files below a directory, and their bytes."""
    files = file_bytes = 0
    for _, status in walk_files(directory):
        if stat.S_ISREG(status.st_mode):
            files += 1
            file_bytes += status.st_size
    return files, file_bytes


def _entries_to_delete(folder: bytes) -> list[tuple[bytes, bool]]:
    """Return the entries of a directory, made accessible first; True marks directories."""
    os.chmod(folder, stat.S_IRWXU)
    with os.scandir(folder) as entries:
        found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for name, is_folder in found:
        if is_folder:  # a directory without write permission cannot be moved
            os.chmod(os.path.join(folder, name), stat.S_IRWXU)
    return found
