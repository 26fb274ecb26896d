"""The files of a directory that is being sealed, read as samples.

The directory is out of the sight of programs, but a program may have a file, or a directory, open
in it. So nothing here trusts that it stays as it is:

- Each directory is opened name by name below its parent, each file in its directory, and no
  symbolic link is followed. What is read lay in the tree when it was opened.
- No file may be open for writing. The kernel says so by refusing a read lease (F_SETLEASE), by
  whichever of its names it was opened. Some file systems have no leases, and a server that is not
  root gets none of other users' files. There, as everywhere, a change of a file is an error.
- All files and directories are looked at again after the last one was read, and before the commit:
  any difference of names, inode, size or times is an error that names the file.

Threads: one at a time.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import stat
from array import array
from collections import Counter
from contextlib import closing
from typing import Any

import numpy as np
import numpy.typing as npt

from dlfs._native.files import read_files
from dlfs.errors import DeviceError, DlfsError, LockedError
from dlfs.ingest.files import Directories, FileTable
from dlfs.ingest.formats.folder import FolderSource
from dlfs.ingest.source import THREADS, LinkPolicy
from dlfs.staging.area import NO_DIRECTORY

_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NO_LEASES = (errno.EACCES, errno.EPERM, errno.EINVAL, errno.ENOLCK, errno.EOPNOTSUPP)
_INT64_MAX = (1 << 63) - 1
_NUMBERS = 5
"""Numbers of a file's or directory's state: device, inode, size, mtime and ctime."""


class StagedSource(FolderSource):
    """The files of a directory that is being sealed.

    Args:
        name: name of the directory, for messages.
        directory: its descriptor, which stays the caller's.
        links: ``skip`` leaves symbolic links out and counts them; ``error`` refuses them.
        owner: user to whom all files must belong; None: they may belong to any.

    Raises:
        LockedError: a file is open for writing.
        DeviceError: a file belongs to another user (EACCES), cannot be read, or changed.
        UsageError: there is a symbolic link.
        LimitError: a path is too long for a sample.
    """

    def __init__(
        self, name: str, directory: int, *, links: LinkPolicy = "error", owner: int | None = None
    ) -> None:
        self._links = links
        self._owner = owner
        self._directories = Directories(directory)
        self.skipped = Counter()
        super(FolderSource, self).__init__(name, name, follow_links=False, directory=directory)

    def close(self) -> None:
        """Close the directories."""
        self._directories.close()
        super().close()

    # ---- the walk --------------------------------------------------------------------------------

    def _find_files(self) -> dict[str, npt.NDArray[Any]]:
        self._walked: list[bytes] = []
        self._walked_states = array("q")
        self.empty_directories = self._walk(b"")
        return {}

    def _open_directory(self, path: bytes) -> int:
        descriptor = os.dup(self._directories.open(path))
        self._walked.append(path)
        self._walked_states.extend(_state(os.fstat(descriptor)))
        return descriptor

    # ---- the files -------------------------------------------------------------------------------

    def _make_table(self) -> FileTable:
        return FileTable()

    def _stat(self) -> None:
        """Look at every file: it is closed for writing, and belongs to the owner."""
        table, states = self._table, array("q")
        places = array("Q")
        numbers = {path: number for number, path in enumerate(self._walked)}
        for index in range(len(table)):
            path = table.path(index)
            folder, _, name = path.rpartition(b"/")
            places.append(numbers[folder])
            states.extend(self._look(path, folder, name))
        table.prepare()
        self._places = np.array(places, np.uint64)  # the number of each file's directory
        self._states = np.array(states, np.int64).reshape(-1, _NUMBERS)
        table.files["length_bytes"] = self._states[:, 2]
        table.files["modified_ns"] = self._states[:, 3]

    def _look(self, path: bytes, folder: bytes, name: bytes) -> tuple[int, ...]:
        try:
            descriptor = os.open(name, _FILE, dir_fd=self._directories.open(folder))
        except OSError as error:
            raise _failure(self._where(path), error) from error
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise _changed(self._where(path))
            if self._owner not in (None, found.st_uid):
                raise DeviceError(
                    f"import {self._where(path)}: it belongs to user {found.st_uid}, not to user "
                    f"{self._owner}",
                    errno.EACCES,
                )
            if _is_open_for_writing(descriptor):
                raise LockedError(f"import {self._where(path)}: the file is open for writing")
        finally:
            os.close(descriptor)
        return _state(found)

    def _check_unchanged(self) -> None:
        """Check that a new walk finds the same files and directories in the same states."""
        name, directory = self.name, self._opened.value
        with closing(StagedSource(name, directory, links=self._links, owner=self._owner)) as now:
            if self._observed() == now._observed():
                return
            before, after = self._entries(), now._entries()
        for path, state in [*before.items(), *after.items()]:
            if before.get(path) != state or after.get(path) != state:
                raise _changed(self._where(path) if path else self.name)
        raise AssertionError

    def _observed(self) -> tuple[object, ...]:
        """Return all that the walk has found, to be compared."""
        states = self._states.tobytes(), self._walked_states.tobytes()
        return self._table.names.tobytes(), self._walked, self.empty_directories, states

    def _entries(self) -> dict[bytes, tuple[int, ...]]:
        """Return the state of each file and directory by its path."""
        walked = np.array(self._walked_states, np.int64).reshape(-1, _NUMBERS)
        paths, states = [*self.file_paths(), *self._walked], [*self._states, *walked]
        return {path: tuple(state.tolist()) for path, state in zip(paths, states, strict=True)}

    # ---- reading ---------------------------------------------------------------------------------

    def _fill(
        self,
        files: npt.NDArray[np.void],
        chosen: npt.NDArray[np.uint64],
        buffer: npt.NDArray[np.uint8],
    ) -> int:
        """Read files, those of one directory together, each by its name in it."""
        places = self._places[chosen]
        failed = 0
        for group in np.split(np.arange(len(files)), np.flatnonzero(np.diff(places)) + 1):
            part = files[group[0] : group[-1] + 1]
            folder = self._walked[places[group[0]]]
            part["position"] += len(folder) + 1 if folder else 0
            try:
                descriptor = self._directories.open(folder)
            except OSError as error:
                part["code"] = -(errno.ESTALE if error.errno in NO_DIRECTORY else error.errno or 0)
                return failed + len(part)
            failed += read_files(
                descriptor, self._table.names, part, buffer, follow_links=False, threads=THREADS
            )
        return failed


def _state(found: os.stat_result) -> tuple[int, ...]:
    inode = found.st_ino & _INT64_MAX
    return found.st_dev, inode, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _is_open_for_writing(descriptor: int) -> bool:
    """Return True if a file is open for writing anywhere; False if the kernel does not say it."""
    try:
        # A program that opens it for writing now waits a moment; its signal must not end us.
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except BlockingIOError:
        return True
    except OSError as error:
        if error.errno not in _NO_LEASES:
            raise
        return False
    fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False


def _changed(where: str) -> DeviceError:
    return DeviceError(f"import {where}: it changed during the import", errno.ESTALE)


def _failure(where: str, error: OSError) -> DlfsError:
    """Return the error of a file that cannot be opened."""
    if error.errno in NO_DIRECTORY:
        return _changed(where)
    if error.errno == errno.EAGAIN:  # a write lease
        return LockedError(f"import {where}: the file is open for writing")
    why = "the file may not be read" if error.errno == errno.EACCES else error.strerror
    return DeviceError(f"import {where}: {why}", error.errno or errno.EIO)
