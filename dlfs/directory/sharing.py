"""One copy of a dataset's directory for all processes of a node and user.

A part of a directory segment lives in a file in memory, ``/dev/shm/dlfs-UID/KEY.part``, which every
process that has opened the dataset maps read-only. KEY names volume, dataset, part and the digest
of the segment's header, so a file always has the bytes that are on the volume. The first process to
open the dataset allocates the file, lets the device read directly into it, verifies every block,
and publishes it by a rename. The last process to close the dataset removes it. Without shared
memory, or with too little of it, the part is loaded into private memory instead.

Locks (``flock``, which the kernel releases however a process ends): a process that maps
``KEY.part`` has a shared lock on it; a process that creates, publishes or removes files of KEY has
an exclusive lock on ``KEY.lock``.

The locks distinguish files in use from those that a killed process left. A published file without a
lock is complete, and the next process to open KEY takes it over. An unpublished one (``KEY.load``)
is overwritten by the next process to load KEY. Every process that loads a part first removes
unlocked files. A lock belongs to the open file, which a forked child would share with its parent.
So a fork opens the file again and locks it for the child, and either process may be the last to
close. An exclusive lock is released before its file is closed: closing alone would leave it locked
while a child that another thread forked meanwhile has a copy of the descriptor.

The directory must belong to the user with mode 0700. No symbolic link is followed, and a file of
another owner is not used. Processes of one user trust each other.

Threads: any at once.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import mmap
import os
import stat
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from dlfs._native.device import aligned_buffer
from dlfs._native.directory import NativeDirectory
from dlfs._native.handle import Descriptor
from dlfs._native.mapping import map_file
from dlfs.base.closing import LiveObjects, LiveValues, Uses
from dlfs.base.deadlines import limit_call, waiting
from dlfs.directory.frozen import FrozenDirectory
from dlfs.errors import FormatError
from dlfs.format.constants import DIRECTORY_BLOCK_BYTES

SHARED_ROOT = Path("/dev/shm")

LOADER_WAIT_S = 60.0
"""Longest wait for a process that loads a part, before loading it privately, in seconds."""

_WAIT_FIRST_S = 0.001
_WAIT_MOST_S = 0.05
_F_SEAL_FUTURE_WRITE = 0x10  # linux/fcntl.h, since 5.1; Python 3.11 has no name for it
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
_SUFFIXES = (".part", ".load", ".lock")

ReadInto = Callable[[int, memoryview], None]
"""Reads from a byte offset of the segment into a whole buffer; both are multiples of 4096 bytes."""


@dataclass(frozen=True, slots=True)
class DirectoryIdentity:
    """Identifies a directory: in the names of its shared files, and in errors."""

    volume_uuid: UUID
    dataset_uuid: UUID
    label: str


@dataclass(frozen=True, slots=True)
class DirectorySizes:
    """Lengths of the parts, as stored in the catalog; the names part follows the entries part."""

    entries_bytes: int
    names_bytes: int


def load_directory(
    identity: DirectoryIdentity,
    sizes: DirectorySizes,
    read_into: ReadInto,
    *,
    others: Sequence[ReadInto] = (),
    root: Path | None = SHARED_ROOT,
    wait_s: float = LOADER_WAIT_S,
    uses: Uses | None = None,
) -> FrozenDirectory:
    """Open a dataset's directory, shared with the user's other processes where possible.

    Args:
        identity: identifies the directory.
        sizes: lengths of its parts.
        read_into: reads the segment; called with 4096-aligned memory, for the header, then for the
            whole of a part unless another process has it. It must not keep the memory. For the
            names it is called later, by the first thread that needs them.
        others: read the same from other copies; called in turn while the bytes are malformed.
        root: where shared memory is mounted; None keeps the directory private.
        wait_s: longest wait for another process that is loading the same, in seconds.
        uses: calls under way after which the directory may be closed; loading the names is one.

    Raises:
        FormatError: the segment is malformed (ChecksumError), or not the dataset's.
        DlfsError: whatever ``read_into`` raises.
    """
    header = aligned_buffer(DIRECTORY_BLOCK_BYTES, DIRECTORY_BLOCK_BYTES)
    read_into(0, header.data)
    readers = (read_into, *others)
    loader = _Loader(root, _key(identity, header), identity, sizes, readers, wait_s, uses)
    try:
        directory = FrozenDirectory(
            loader.load_entries(),
            loader.load_names,
            label=identity.label,
            release=loader.release,
            descriptors=loader.descriptors,
        )
        _check_identity(directory, identity, sizes)  # another process may have read it
    except BaseException:
        loader.release()
        raise
    return directory


def remove_leftovers(root: Path = SHARED_ROOT) -> None:
    """Remove the shared files of the user that killed processes left, and their empty directory.

    Files that a process has open stay. A process that opens a dataset meanwhile may load its
    directory privately.
    """
    path = root / f"dlfs-{os.geteuid()}"
    place = _Place.open(root) if path.is_dir() else None
    if place is not None:
        place.remove(path)


@dataclass(eq=False)
class _Loader:
    """Loads the parts of one directory into memory, and releases them."""

    root: Path | None
    key: str
    identity: DirectoryIdentity
    sizes: DirectorySizes
    readers: Sequence[ReadInto]
    wait_s: float
    uses: Uses | None
    parts: list[Part] = field(default_factory=list)

    def load_entries(self) -> NDArray[np.uint8]:
        return self._load(0, self.sizes.entries_bytes)

    def load_names(self) -> NDArray[np.uint8]:
        with self.uses or contextlib.nullcontext(), limit_call():
            names = self._load(1, self.sizes.names_bytes)
        self.readers = ()  # which keep devices open
        return names

    def release(self) -> None:
        while self.parts:
            self.parts.pop().release()

    def descriptors(self) -> tuple[int, ...]:
        return tuple(part.descriptor for part in self.parts)

    def _load(self, number: int, size: int) -> NDArray[np.uint8]:
        name = f"{self.key}-{('entries', 'names')[number]}"
        part = open_part(self.root, name, size, partial(self._fill, number), self.wait_s)
        self.parts.append(part)
        return part.memory

    def _fill(self, part: int, memory: memoryview) -> None:
        """Read a part (0 entries, 1 names) from the first source that has it intact."""
        loaded = np.frombuffer(memory, np.uint8)
        entries = self.parts[0].memory if part else loaded
        problem: FormatError | None = None
        for read_into in self.readers:
            read_into(self.sizes.entries_bytes if part else 0, memory)
            try:
                self._verify(entries, part, loaded)
            except FormatError as error:
                problem = problem or error
            else:
                return
        if problem is not None:
            raise problem

    def _verify(self, entries: NDArray[np.uint8], part: int, memory: NDArray[np.uint8]) -> None:
        directory = NativeDirectory(entries, label=self.identity.label)
        try:
            directory.verify_memory(part, memory)
            _check_identity(directory, self.identity, self.sizes)
        finally:
            directory.close()


def _key(identity: DirectoryIdentity, header: NDArray[np.uint8]) -> str:
    digest = hashlib.blake2b(header.tobytes(), digest_size=8).hexdigest()
    return f"{identity.volume_uuid.hex}-{identity.dataset_uuid.hex}-{digest}"


def _check_identity(
    directory: NativeDirectory, identity: DirectoryIdentity, sizes: DirectorySizes
) -> None:
    got = directory.dataset_uuid, directory.names_bytes
    if got != (identity.dataset_uuid, sizes.names_bytes):
        raise FormatError(
            f"open {identity.label}: expected the dataset {identity.dataset_uuid} with "
            f"{sizes.names_bytes} bytes of names, got {got[0]} with {got[1]}"
        )


# ---- parts ---------------------------------------------------------------------------------------


@dataclass(eq=False)
class Part:
    """A part in memory, and its file if it is shared."""

    memory: NDArray[np.uint8]
    place: _Place | None = None
    name: str = ""
    file: Descriptor = field(default_factory=Descriptor)
    finalizer: weakref.finalize[..., Any] | None = None

    @property
    def descriptor(self) -> int:
        """Descriptor of the part's file; -1 without one."""
        return self.file.value

    def release(self) -> None:
        """Release the memory; the last process to do so removes the file. Idempotent.

        Views of the memory stay valid: a mapping outlives the file's name.
        """
        self.memory = np.empty(0, np.uint8)
        if self.finalizer is not None:
            self.finalizer()
        self.file.close()

    def adopt(self, file: Descriptor) -> None:
        """Keep the part's file open and locked by this descriptor from now on."""
        self.file, self.finalizer = file, None
        if file.value >= 0 and self.place is not None:
            self.finalizer = weakref.finalize(
                self, self.place.close_file, self.name, file, os.getpid()
            )


def open_part(
    root: Path | None, name: str, size: int, fill: Callable[[memoryview], None], wait_s: float
) -> Part:
    """Map a part that another process published, or load and publish it, or load it privately.

    Args:
        root: where shared memory is mounted; None: privately.
        name: name of the part, different for different bytes.
        size: length in bytes, at least 1.
        fill: fills new memory of that size with verified bytes.
        wait_s: longest wait for another process that is loading the same, in seconds.

    Raises:
        DlfsError: whatever ``fill`` raises.
    """
    place = None if root is None else _Place.open(root)
    if place is not None:
        with waiting(wait_s) as longest_s:
            part = place.obtain(name, size, fill, time.monotonic() + longest_s)
        if part is not None:
            return part
    return _load_privately(size, fill)


def _load_privately(size: int, fill: Callable[[memoryview], None]) -> Part:
    """Load a part into a file without a name, which the last process to close it frees.

    The file is sealed: a process that gets its descriptor can map it, but not change it. If the
    system refuses such a file (RLIMIT_FSIZE counts it), private memory is used.
    """
    file = _make_nameless(size)
    try:
        memory = mmap.mmap(file.value, size)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        fill(memoryview(memory))
        if file.value >= 0:
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        file.close()
        raise
    view = np.frombuffer(memory, np.uint8)
    view.flags.writeable = False
    return Part(view, file=file)


def _make_nameless(size: int) -> Descriptor:
    """Create a nameless file of a size in memory; without a descriptor if the system refuses it."""
    file = Descriptor()
    file.fill(os.memfd_create, "dlfs-part", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(file.value, size)
    except OSError:
        file.close()
    return file


class _Place:
    """The user's directory of shared parts."""

    def __init__(self, folder: Descriptor) -> None:
        self._folder = folder  # which it closes
        self.descriptor = folder.value

    @classmethod
    def open(cls, root: Path) -> _Place | None:
        """Open or create the directory; None if that fails, or it is not safe to use."""
        path = root / f"dlfs-{os.geteuid()}"
        place = _places.get(path)
        with contextlib.suppress(OSError):
            if place is not None and os.path.samestat(path.lstat(), os.fstat(place.descriptor)):
                return place
        folder = Descriptor()
        try:
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode=0o700)
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            folder.fill(os.open, path, flags)
        except OSError:
            return None
        status = os.fstat(folder.value)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            return None
        place = cls(folder)
        _places.put(path, place)
        return place

    def obtain(
        self, name: str, size: int, fill: Callable[[memoryview], None], deadline: float
    ) -> Part | None:
        """Map or load a part; None if it must be private."""
        try:
            part = self._map_published(name, size)
            if part is not None:
                return part
            self.sweep(except_name=name)
            with self.locked(name, deadline) as locked:
                if not locked:
                    return None
                # The process that had the lock before may have published it.
                return self._map_published(name, size) or self._load(name, size, fill)
        except (_UnusableError, FileNotFoundError):  # the latter: ``remove_leftovers`` removed it
            return None

    # ---- files -------------------------------------------------------------------------------

    def _open_file(self, file_name: str, flags: int) -> Descriptor:
        """Open a regular file of ours.

        Raises:
            FileNotFoundError: there is none.
            _UnusableError: the file is not ours, or the file system refuses.
        """
        flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        file = Descriptor()
        try:
            file.fill(os.open, file_name, flags, 0o600, dir_fd=self.descriptor)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise _UnusableError from error
        status = os.fstat(file.value)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise _UnusableError
        return file

    def _unlink(self, file_name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(file_name, dir_fd=self.descriptor)

    def _exists(self, file_name: str) -> bool:
        try:
            os.stat(file_name, dir_fd=self.descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    # ---- locks -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def locked(self, name: str, deadline: float) -> Iterator[bool]:
        """Acquire a key's lock; False if another process still has it at the deadline.

        The lock file is removed with the last file of its key, so a lock is valid only while the
        file still has its name.
        """
        wait_s = _WAIT_FIRST_S
        while (lock := self._try_lock(name)) is None:
            if time.monotonic() >= deadline:
                yield False
                return
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, _WAIT_MOST_S)
        try:
            yield True
        finally:
            if not self._exists(f"{name}.part") and not self._exists(f"{name}.load"):
                self._unlink(f"{name}.lock")
            fcntl.flock(lock, fcntl.LOCK_UN)  # which a forked child may have a copy of
            lock.close()

    def _try_lock(self, name: str) -> Descriptor | None:
        lock = self._open_file(f"{name}.lock", os.O_RDWR | os.O_CREAT)
        _locks.add(lock)
        if _try_flock(lock, fcntl.LOCK_EX):
            if os.fstat(lock.value).st_nlink > 0:
                return lock
            fcntl.flock(lock, fcntl.LOCK_UN)
        lock.close()
        return None

    # ---- life of a part ----------------------------------------------------------------------

    def _map_published(self, name: str, size: int) -> Part | None:
        """Map a published part; None if there is none."""
        while True:
            try:
                file = self._open_file(f"{name}.part", os.O_RDONLY)
            except FileNotFoundError:
                return None
            # Only a process that is removing the file has it locked exclusively, and only briefly.
            fcntl.flock(file, fcntl.LOCK_SH)
            if os.fstat(file.value).st_nlink > 0:
                break
            file.close()
        if os.fstat(file.value).st_size != size:
            file.close()
            raise _UnusableError
        return self._map_locked(name, file, size)

    def _load(self, name: str, size: int, fill: Callable[[memoryview], None]) -> Part:
        """Load a part and publish it. The caller has the key's lock."""
        loading = f"{name}.load"
        self._unlink(loading)  # left by a process that was killed while loading
        file = self._open_file(loading, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            try:  # now: a full file system is an error here, not a later SIGBUS
                os.posix_fallocate(file.value, 0, size)
            except OSError as error:
                raise _UnusableError from error
            memory = mmap.mmap(file.value, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            fill(memoryview(memory))
            os.fchmod(file.value, 0o400)
            reader = self._open_file(loading, os.O_RDONLY)
            fcntl.flock(reader, fcntl.LOCK_SH)
            os.rename(
                loading, f"{name}.part", src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor
            )
        except BaseException:
            self._unlink(loading)
            raise
        finally:
            file.close()
        return self._map_locked(name, reader, size)

    def _map_locked(self, name: str, file: Descriptor, size: int) -> Part:
        """Map a part whose file is open with a shared lock."""
        try:
            memory = map_file(file.value, size)
        except OSError as error:
            file.close()
            raise _UnusableError from error
        part = Part(memory, self, name)
        part.adopt(file)
        _locked_parts.add(part)
        return part

    def close_file(self, name: str, file: Descriptor, owner: int) -> None:
        """Close a part's file, and remove it if no other process has it open.

        A child that was forked without this module's fork handlers shares the parent's lock, so it
        must not decide by it.
        """
        if os.getpid() == owner:
            with contextlib.suppress(OSError, _UnusableError):
                self._remove_unheld(name, file, time.monotonic() + _WAIT_MOST_S)
        file.close()

    def _remove_unheld(self, name: str, file: Descriptor, deadline: float) -> None:
        with self.locked(name, deadline) as locked:
            # Releasing the shared lock and trying for the exclusive one: one of several last
            # closers gets it.
            if locked and _try_flock(file, fcntl.LOCK_EX):
                if os.fstat(file.value).st_nlink > 0:
                    self._unlink(f"{name}.part")
                fcntl.flock(file, fcntl.LOCK_UN)

    def remove(self, path: Path) -> None:
        """Remove files that no process has locked, then the directory if it is empty."""
        self.sweep()
        with contextlib.suppress(OSError):
            path.rmdir()

    def sweep(self, *, except_name: str = "") -> None:
        """Remove files that killed processes left: those that no process has locked."""
        with os.scandir(self.descriptor) as entries:
            names = {Path(entry.name).stem for entry in entries if entry.name.endswith(_SUFFIXES)}
        for name in names - {except_name}:
            with contextlib.suppress(OSError, _UnusableError):
                self._sweep_name(name)

    def _sweep_name(self, name: str) -> None:
        with self.locked(name, deadline=0.0) as locked:
            if not locked:
                return
            self._unlink(f"{name}.load")
            try:
                file = self._open_file(f"{name}.part", os.O_RDONLY)
            except FileNotFoundError:
                return
            with file:
                if _try_flock(file, fcntl.LOCK_EX):
                    self._unlink(f"{name}.part")
                    fcntl.flock(file, fcntl.LOCK_UN)


_places: LiveValues[Path, _Place] = LiveValues()
"""Open directories of shared parts."""


class _UnusableError(Exception):
    """Shared memory cannot be used for this part, but private memory can."""


def _try_flock(file: Descriptor, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EINTR):
            raise
        return False
    return True


# ---- fork ----------------------------------------------------------------------------------------

_locked_parts: LiveObjects[Part] = LiveObjects()
_locks: LiveObjects[Descriptor] = LiveObjects()
_forking = threading.local()


def _before_fork() -> None:
    """Take the child's locks before it exists: the parent may close right after the fork."""
    _forking.spares = [(part, _open_again(part)) for part in _locked_parts if part.descriptor >= 0]


def _after_fork_in_child() -> None:
    """Switch to the child's locks, which closing the shared descriptors does not release."""
    for lock in _locks:
        lock.close()
    _locks.clear()
    for part, file in getattr(_forking, "spares", ()):
        if part.finalizer is not None and part.finalizer.detach() is not None:
            part.file.close()
            part.adopt(file)
        else:
            file.close()
    _forking.spares = ()


def _open_again(part: Part) -> Descriptor:
    """Open a part's file again and lock it; without /proc or a free descriptor, return no file.

    The child's mapping stays valid without it: only the next process to open the part may have to
    load it again.
    """
    file = Descriptor()
    with contextlib.suppress(OSError):
        file.fill(os.open, f"/proc/self/fd/{part.descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        if not _try_flock(file, fcntl.LOCK_SH):
            file.close()
    return file


os.register_at_fork(
    before=_before_fork,
    # The owners close the child's descriptors in the parent; the child's locks stay. No bytecode
    # runs, in which Ctrl-C would be lost: exceptions of these hooks are ignored.
    after_in_parent=partial(setattr, _forking, "spares", ()),
    after_in_child=_after_fork_in_child,
)
