"""System calls on one entry of a directory that is held by a descriptor.

What the handlers below ``incoming`` run in threads. A name is one component, never a path; no
symbolic link is followed, and what a name leads to is compared with what was meant, so that nothing
outside the spool is ever touched, whatever is renamed at the same time. A server that is root gives
what it makes to whoever asked for it; another one can make files of its own user only.

Threads: any. Raises OSError, as the system call did.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NamedTuple

from dlfs.staging.inode_table import Identity

_LOOK = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN_FLAGS = os.O_ACCMODE | os.O_TRUNC | os.O_SYNC | os.O_DSYNC
"""What is passed on. Not O_APPEND: the kernel has worked out where to write. Not O_DIRECT: our
buffers are not aligned."""


class Owner(NamedTuple):
    """Whom a new file belongs to."""

    uid: int
    gid: int


@dataclass(frozen=True)
class Change:
    """What is to be changed of a file's attributes; None where nothing is."""

    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    size_bytes: int | None = None
    access_ns: int | None = None
    modify_ns: int | None = None


def identity_of(status: os.stat_result) -> Identity:
    """What tells a file from every other on the spool."""
    return status.st_dev, status.st_ino


def look(directory: int, name: bytes) -> os.stat_result:
    """Attributes of an entry."""
    return os.stat(name, dir_fd=directory, follow_symlinks=False)


def look_at(directory: int, name: bytes, identity: Identity) -> os.stat_result:
    """Attributes of an entry that must be a certain file; ESTALE when it is another."""
    return _check(look(directory, name), identity)


def look_through(directory: int, names: list[bytes]) -> list[tuple[bytes, os.stat_result]]:
    """Attributes of several entries; those that are gone are left out."""
    found = []
    for name in names:
        try:
            found.append((name, look(directory, name)))
        except FileNotFoundError:
            continue
    return found


def list_names(directory: int) -> list[bytes]:
    """All entries of a directory held by an O_PATH descriptor."""
    opened = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory)
    try:
        return [os.fsencode(name) for name in os.listdir(opened)]
    finally:
        os.close(opened)


def open_below(directory: int, names: list[bytes], identity: Identity) -> int:
    """Hold a directory some levels down; ESTALE when it is another one than it was."""
    current = directory
    try:
        for name in names:
            below = os.open(name, _LOOK | os.O_DIRECTORY, dir_fd=current)
            if current != directory:
                os.close(current)
            current = below
        _check(os.fstat(current), identity)
    except OSError:
        if current != directory:
            os.close(current)
        raise
    return current


def open_file(directory: int, name: bytes, identity: Identity, flags: int) -> int:
    """Open a file that must be a certain one."""
    wanted = flags & _OPEN_FLAGS & ~os.O_TRUNC
    descriptor = os.open(
        name, wanted | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory
    )
    try:
        _check(os.fstat(descriptor), identity)
        if flags & os.O_TRUNC:
            os.ftruncate(descriptor, 0)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def create(
    directory: int, name: bytes, flags: int, mode: int, owner: Owner
) -> tuple[int, os.stat_result]:
    """Create and open a file; one that is there already is opened, unless O_EXCL forbids it."""
    wanted = flags & _OPEN_FLAGS & ~os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(name, wanted | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=directory)
    except FileExistsError:
        if flags & os.O_EXCL:
            raise
        status = look(directory, name)
        descriptor = open_file(directory, name, identity_of(status), flags)
        return descriptor, os.fstat(descriptor)
    try:
        _give(directory, descriptor, owner)
        os.fchmod(descriptor, mode & 0o7777)
        return descriptor, os.fstat(descriptor)
    except OSError:
        os.close(descriptor)
        os.unlink(name, dir_fd=directory)
        raise


def make_directory(directory: int, name: bytes, mode: int, owner: Owner) -> os.stat_result:
    """Make a directory."""
    os.mkdir(name, 0o700, dir_fd=directory)
    try:
        descriptor = os.open(name, _LOOK | os.O_DIRECTORY, dir_fd=directory)
        try:
            group_bit = os.fstat(descriptor).st_mode & stat.S_ISGID
            _give(directory, descriptor, owner)
            os.chmod(_magic(descriptor), mode & 0o7777 | group_bit)
            return os.fstat(descriptor)
        finally:
            os.close(descriptor)
    except OSError:
        os.rmdir(name, dir_fd=directory)
        raise


def make_node(directory: int, name: bytes, mode: int, owner: Owner) -> os.stat_result:
    """Make a regular file, FIFO or socket; devices are refused with EPERM."""
    if stat.S_IFMT(mode) not in (stat.S_IFREG, stat.S_IFIFO, stat.S_IFSOCK):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
    os.mknod(name, stat.S_IFMT(mode) | 0o600, dir_fd=directory)
    try:
        descriptor = os.open(name, _LOOK, dir_fd=directory)
        try:
            _give(directory, descriptor, owner)
            os.chmod(_magic(descriptor), mode & 0o7777)
            return os.fstat(descriptor)
        finally:
            os.close(descriptor)
    except OSError:
        os.unlink(name, dir_fd=directory)
        raise


def make_link(directory: int, name: bytes, text: bytes, owner: Owner) -> os.stat_result:
    """Make a symbolic link."""
    os.symlink(text, name, dir_fd=directory)
    status = look(directory, name)
    if not _differs(status, owner):
        return status
    try:
        os.chown(name, *_new_owner(directory, owner), dir_fd=directory, follow_symlinks=False)
    except PermissionError:
        if status.st_uid != owner.uid:
            os.unlink(name, dir_fd=directory)
            raise
    return look(directory, name)


def read_link(directory: int, name: bytes) -> bytes:
    """The text of a symbolic link."""
    return os.readlink(name, dir_fd=directory)


def hard_link(
    directory: int, name: bytes, identity: Identity, into: int, new: bytes
) -> os.stat_result:
    """Give a file one more name."""
    look_at(directory, name, identity)
    os.link(name, new, src_dir_fd=directory, dst_dir_fd=into, follow_symlinks=False)
    return look(into, new)


def unlink(directory: int, name: bytes) -> int:
    """Remove a name.

    Returns:
        What it led to, held by an O_PATH descriptor: until that is closed nothing else can have its
        identity, and its links are those that are left.
    """
    return _without(directory, name, os.unlink)


def remove_directory(directory: int, name: bytes) -> int:
    """Remove an empty directory; it, held as by ``unlink``."""
    return _without(directory, name, os.rmdir)


def _without(directory: int, name: bytes, remove: Callable[..., None]) -> int:
    descriptor = os.open(name, _LOOK, dir_fd=directory)
    try:
        remove(name, dir_fd=directory)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def closing(descriptor: int | None) -> Iterator[None]:
    """Close what is held at the end of the block, if anything is."""
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def rename(
    directory: int, name: bytes, into: int, new: bytes, *, replace: bool, across: bool = False
) -> tuple[os.stat_result, int | None]:
    """Rename an entry; it, as it was before, and what it replaced, held as by ``unlink``.

    ``across`` datasets a file with several names cannot go: it would lie in both.
    """
    moved = look(directory, name)
    if across and moved.st_nlink > 1 and not stat.S_ISDIR(moved.st_mode):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
    replaced: int | None = None
    with suppress(FileNotFoundError):
        replaced = os.open(new, _LOOK, dir_fd=into)
    try:
        if replaced is not None and not replace:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        os.rename(name, new, src_dir_fd=directory, dst_dir_fd=into)
    except OSError:
        if replaced is not None:
            os.close(replaced)
        raise
    return moved, replaced


def change(directory: int, name: bytes, identity: Identity, wanted: Change) -> os.stat_result:
    """Change the attributes of an entry that must be a certain file."""
    descriptor = os.open(name, _LOOK, dir_fd=directory)
    try:
        status = _check(os.fstat(descriptor), identity)
        if not stat.S_ISLNK(status.st_mode):
            change_opened(_magic(descriptor), status, wanted)
            return os.fstat(descriptor)
        if wanted.mode is not None or wanted.size_bytes is not None:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        if wanted.uid is not None or wanted.gid is not None:
            os.chown(name, *_ids(wanted), dir_fd=directory, follow_symlinks=False)
        if wanted.access_ns is not None or wanted.modify_ns is not None:
            os.utime(name, ns=_times(status, wanted), dir_fd=directory, follow_symlinks=False)
        return look(directory, name)
    finally:
        os.close(descriptor)


def change_opened(file: int | str, status: os.stat_result, wanted: Change) -> None:
    """Change the attributes of a file by its descriptor; ``status`` is what it has now."""
    if wanted.size_bytes is not None:
        os.truncate(file, wanted.size_bytes)
    if wanted.uid is not None or wanted.gid is not None:
        os.chown(file, *_ids(wanted))
    if wanted.mode is not None:
        os.chmod(file, wanted.mode & 0o7777)
    if wanted.access_ns is not None or wanted.modify_ns is not None:
        os.utime(file, ns=_times(status, wanted))


def change_held(directory: int, wanted: Change) -> os.stat_result:
    """Change the attributes of a directory that is held by an O_PATH descriptor."""
    change_opened(_magic(directory), os.fstat(directory), wanted)
    return os.fstat(directory)


def write_all(descriptor: int, data: bytes, offset: int) -> int:
    """Write all of it; what was written when the space ends in between."""
    done = os.pwrite(descriptor, data, offset)
    rest = memoryview(data)[done:]
    while rest:
        try:
            more = os.pwrite(descriptor, rest, offset + done)
        except OSError:
            return done
        done += more
        rest = rest[more:]
    return done


def sync_directory(directory: int) -> None:
    """Make the entries of a directory held by an O_PATH descriptor durable."""
    opened = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _check(status: os.stat_result, identity: Identity) -> os.stat_result:
    if identity_of(status) != identity:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
    return status


def _magic(descriptor: int) -> str:
    """A path that leads to what an O_PATH descriptor holds, and nowhere else."""
    return f"/proc/self/fd/{descriptor}"


def _give(directory: int, descriptor: int, owner: Owner) -> None:
    """Make what was just created its owner's; its group too, as far as this process may."""
    status = os.fstat(descriptor)
    if _differs(status, owner):
        try:
            os.chown(_magic(descriptor), *_new_owner(directory, owner))
        except PermissionError:
            if status.st_uid != owner.uid:
                raise


def _differs(status: os.stat_result, owner: Owner) -> bool:
    return (status.st_uid, status.st_gid) != owner


def _new_owner(directory: int, owner: Owner) -> tuple[int, int]:
    """Owner and group of a new entry: a set-group-ID directory hands down its own group."""
    keeps = os.fstat(directory).st_mode & stat.S_ISGID
    return owner.uid, -1 if keeps else owner.gid


def _ids(wanted: Change) -> tuple[int, int]:
    return -1 if wanted.uid is None else wanted.uid, -1 if wanted.gid is None else wanted.gid


def _times(status: os.stat_result, wanted: Change) -> tuple[int, int]:
    access = status.st_atime_ns if wanted.access_ns is None else wanted.access_ns
    modify = status.st_mtime_ns if wanted.modify_ns is None else wanted.modify_ns
    return access, modify
