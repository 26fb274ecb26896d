"""System calls on one entry of a directory that is open as a descriptor.

The handlers below ``incoming`` run these functions in worker threads. A name is one component,
never a path. No symbolic link is followed, and an entry is compared with the expected identity; so
nothing outside the staging area is touched, even if a program renames entries at the same time. A
server that runs as root gives each new file to the user that made the request; any other server can
make files of its own user only.

Threads: any. Raises OSError, as the system call did.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NamedTuple

from dlfs.staging.inode_table import Identity

_PATH_ONLY = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_READ_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_OPEN_FLAGS = os.O_ACCMODE | os.O_TRUNC | os.O_SYNC | os.O_DSYNC
"""Flags that are passed on to the file system. O_APPEND is not: the kernel has computed the offset.
O_DIRECT is not: the server's buffers are not aligned."""


class Owner(NamedTuple):
    """Owner and group of a new file."""

    uid: int
    gid: int


@dataclass(frozen=True)
class Change:
    """New values of a file's attributes; None for those that stay.

    With ``clears_ids``, a new size also clears the bits that set user and group.
    """

    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    size_bytes: int | None = None
    access_ns: int | None = None
    modify_ns: int | None = None
    clears_ids: bool = False


def refusal(number: int) -> OSError:
    """Return the error with which a request is refused."""
    return OSError(number, os.strerror(number))


def identity_of(status: os.stat_result) -> Identity:
    """Return the identity of a file: its device and inode number."""
    return status.st_dev, status.st_ino


def stat_entry(directory: int, name: bytes) -> os.stat_result:
    """Return the attributes of an entry."""
    return os.stat(name, dir_fd=directory, follow_symlinks=False)


def stat_expected(directory: int, name: bytes, identity: Identity) -> os.stat_result:
    """Return the attributes of an entry; fail with ESTALE if it is another file than expected."""
    return _check(stat_entry(directory, name), identity)


@contextmanager
def opened(directory: int, name: str | bytes, flags: int = _PATH_ONLY) -> Iterator[int]:
    """Open an entry for the duration of a block; the value is its descriptor."""
    descriptor = os.open(name, flags, dir_fd=directory)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def list_names(directory: int) -> list[bytes]:
    """Return the names of all entries of a directory."""
    with opened(directory, ".", _READ_DIRECTORY) as readable:
        return [os.fsencode(name) for name in os.listdir(readable)]


def walk_files(directory: int) -> Iterator[tuple[bytes, os.stat_result]]:
    """Yield path and attributes of every entry below a directory that is no directory.

    The entries of a directory come before those of its subdirectories. Entries that are removed
    meanwhile are left out. The directories of one path are open at a time.
    """
    opened_directories = [os.open(".", _READ_DIRECTORY, dir_fd=directory)]
    paths = [b""]
    pending: list[list[bytes]] = []
    try:
        while opened_directories:
            current, path = opened_directories[-1], paths[-1]
            if len(pending) < len(opened_directories):
                pending.append([])
                with os.scandir(current) as found:
                    for entry in found:
                        name = os.fsencode(entry.name)
                        if entry.is_dir(follow_symlinks=False):
                            pending[-1].append(name)
                            continue
                        with suppress(FileNotFoundError):
                            status = entry.stat(follow_symlinks=False)
                            yield path + name, status
            if pending[-1]:
                name = pending[-1].pop()
                with suppress(FileNotFoundError, NotADirectoryError):
                    below = os.open(name, _READ_DIRECTORY | os.O_NOFOLLOW, dir_fd=current)
                    opened_directories.append(below)
                    paths.append(path + name + b"/")
            else:
                pending.pop()
                paths.pop()
                os.close(opened_directories.pop())
    finally:
        for descriptor in opened_directories:
            os.close(descriptor)


def find_files(directory: int, identities: Collection[Identity]) -> dict[Identity, bytes]:
    """Return a path below a directory of each file with one of these identities.

    It reads the attributes of every entry below the directory.
    """
    return {
        identity: path
        for path, status in walk_files(directory)
        if (identity := identity_of(status)) in identities
    }


def open_below(directory: int, names: list[bytes], identity: Identity) -> int:
    """Open a directory below another one; fail with ESTALE if it has not the expected identity."""
    current = directory
    try:
        for name in names:
            below = os.open(name, _PATH_ONLY | os.O_DIRECTORY, dir_fd=current)
            if current != directory:
                os.close(current)
            current = below
        _check(os.fstat(current), identity)
    except OSError:
        if current != directory:
            os.close(current)
        raise
    return current


def open_file(
    directory: int, name: bytes, identity: Identity, flags: int, *, clears_ids: bool = False
) -> int:
    """Open a file; fail with ESTALE if it has not the expected identity.

    With ``clears_ids``, truncating it clears the bits that set user and group.
    """
    descriptor = os.open(name, _open_flags(flags) | os.O_NOFOLLOW, dir_fd=directory)
    try:
        _check(os.fstat(descriptor), identity)
        return _truncated(descriptor, flags, clears_ids=clears_ids)
    except OSError:
        os.close(descriptor)
        raise


def open_unlinked(unlinked: int, flags: int, *, clears_ids: bool) -> int:
    """Open a file by another descriptor of it, as ``open_file``."""
    descriptor = os.open(_proc_path(unlinked), _open_flags(flags))
    try:
        return _truncated(descriptor, flags, clears_ids=clears_ids)
    except OSError:
        os.close(descriptor)
        raise


def create(
    directory: int,
    name: bytes,
    flags: int,
    mode: int,
    owner: Owner,
    *,
    clears_ids: bool = False,
) -> tuple[int, os.stat_result]:
    """Create and open a file; open an existing one unless O_EXCL forbids it."""
    wanted = flags & _OPEN_FLAGS & ~os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(name, wanted | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=directory)
    except FileExistsError:
        if flags & os.O_EXCL:
            raise
        status = stat_entry(directory, name)
        identity = identity_of(status)
        descriptor = open_file(directory, name, identity, flags, clears_ids=clears_ids)
        return descriptor, os.fstat(descriptor)
    try:
        _set_owner(directory, descriptor, owner)
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
        with opened(directory, name, _PATH_ONLY | os.O_DIRECTORY) as descriptor:
            group_bit = os.fstat(descriptor).st_mode & stat.S_ISGID
            _set_owner(directory, descriptor, owner)
            os.chmod(_proc_path(descriptor), mode & 0o7777 | group_bit)
            return os.fstat(descriptor)
    except OSError:
        os.rmdir(name, dir_fd=directory)
        raise


def make_node(directory: int, name: bytes, mode: int, owner: Owner) -> os.stat_result:
    """Make a regular file, FIFO or socket; devices are refused with EPERM."""
    if stat.S_IFMT(mode) not in (stat.S_IFREG, stat.S_IFIFO, stat.S_IFSOCK):
        raise refusal(errno.EPERM)
    os.mknod(name, stat.S_IFMT(mode) | 0o600, dir_fd=directory)
    try:
        with opened(directory, name) as descriptor:
            _set_owner(directory, descriptor, owner)
            os.chmod(_proc_path(descriptor), mode & 0o7777)
            return os.fstat(descriptor)
    except OSError:
        os.unlink(name, dir_fd=directory)
        raise


def make_symlink(directory: int, name: bytes, text: bytes, owner: Owner) -> os.stat_result:
    """Make a symbolic link."""
    os.symlink(text, name, dir_fd=directory)
    status = stat_entry(directory, name)
    if not _has_other_owner(status, owner):
        return status
    try:
        os.chown(name, *_new_owner(directory, owner), dir_fd=directory, follow_symlinks=False)
    except PermissionError:
        if status.st_uid != owner.uid:
            os.unlink(name, dir_fd=directory)
            raise
    return stat_entry(directory, name)


def read_link(directory: int, name: bytes, identity: Identity) -> bytes:
    """Return the target of a symbolic link; fail with ESTALE if it is another file."""
    with opened(directory, name) as descriptor:
        _check(os.fstat(descriptor), identity)
        return read_opened_link(descriptor)


def read_opened_link(descriptor: int) -> bytes:
    """Return the target of a symbolic link by its O_PATH descriptor."""
    return os.readlink(b"", dir_fd=descriptor)


def hard_link(
    directory: int, name: bytes, identity: Identity, into: int, new: bytes
) -> os.stat_result:
    """Add a name to a file."""
    stat_expected(directory, name, identity)
    os.link(name, new, src_dir_fd=directory, dst_dir_fd=into, follow_symlinks=False)
    return stat_entry(into, new)


def unlink(directory: int, name: bytes) -> int:
    """Remove a name.

    Returns:
        An O_PATH descriptor of the file. Until it is closed, no other file can get the same
        identity; its link count shows the names that are left.
    """
    return _remove(directory, name, os.unlink)


def remove_directory(directory: int, name: bytes) -> int:
    """Remove an empty directory. Return a descriptor of it, as ``unlink``."""
    return _remove(directory, name, os.rmdir)


def _remove(directory: int, name: bytes, remove: Callable[..., None]) -> int:
    descriptor = os.open(name, _PATH_ONLY, dir_fd=directory)
    try:
        remove(name, dir_fd=directory)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def closing(descriptor: int | None) -> Iterator[None]:
    """Close a descriptor, if there is one, at the end of the block."""
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def rename(
    directory: int, name: bytes, into: int, new: bytes, *, replace: bool, across: bool = False
) -> tuple[os.stat_result, int | None]:
    """Rename an entry.

    Args:
        directory: descriptor of its directory.
        name: its name.
        into: descriptor of the new directory.
        new: its new name.
        replace: replace an entry of the new name; otherwise fail with EEXIST.
        across: the new directory is in another dataset. This fails with EXDEV if a file would keep
            a name outside of what is moved, because it would lie in both datasets.

    Returns:
        The attributes of the entry before, and a descriptor of the replaced file as from
        ``unlink``, or None.
    """
    moved = stat_entry(directory, name)
    if across and _keeps_names(directory, name, moved):
        raise refusal(errno.EXDEV)
    replaced: int | None = None
    with suppress(FileNotFoundError):
        replaced = os.open(new, _PATH_ONLY, dir_fd=into)
    try:
        if replaced is not None and not replace:
            raise refusal(errno.EEXIST)
        os.rename(name, new, src_dir_fd=directory, dst_dir_fd=into)
    except OSError:
        if replaced is not None:
            os.close(replaced)
        raise
    return moved, replaced


def _keeps_names(directory: int, name: bytes, status: os.stat_result) -> bool:
    """Return True if a file would keep a name when an entry is moved.

    It reads the attributes of every file below a directory, whose names must not change meanwhile.
    """
    if not stat.S_ISDIR(status.st_mode):
        return status.st_nlink > 1
    names_left: dict[Identity, int] = {}
    with opened(directory, name, _PATH_ONLY | os.O_DIRECTORY) as top:
        for _, found in walk_files(top):
            if found.st_nlink > 1:
                identity = identity_of(found)
                names_left[identity] = names_left.get(identity, found.st_nlink) - 1
    return any(names_left.values())


def change(directory: int, name: bytes, identity: Identity, wanted: Change) -> os.stat_result:
    """Change the attributes of an entry; fail with ESTALE if it is another file than expected."""
    with opened(directory, name) as descriptor:
        status = _check(os.fstat(descriptor), identity)
        if not stat.S_ISLNK(status.st_mode):
            return change_by_descriptor(descriptor, wanted)
        if wanted.mode is not None or wanted.size_bytes is not None:
            raise refusal(errno.EOPNOTSUPP)
        if wanted.uid is not None or wanted.gid is not None:
            os.chown(name, *_owner_ids(wanted), dir_fd=directory, follow_symlinks=False)
        if wanted.access_ns is not None or wanted.modify_ns is not None:
            os.utime(name, ns=_times(status, wanted), dir_fd=directory, follow_symlinks=False)
        return stat_entry(directory, name)


def change_opened(file: int | str, status: os.stat_result, wanted: Change) -> None:
    """Change the attributes of an open file, or of a path; ``status`` has the present ones."""
    if wanted.size_bytes is not None:
        os.truncate(file, wanted.size_bytes)
        if wanted.clears_ids:
            clear_ids(file, status)
    if wanted.uid is not None or wanted.gid is not None:
        os.chown(file, *_owner_ids(wanted))
    if wanted.mode is not None:
        os.chmod(file, wanted.mode & 0o7777)
    if wanted.access_ns is not None or wanted.modify_ns is not None:
        os.utime(file, ns=_times(status, wanted))


def clear_ids(file: int | str, status: os.stat_result) -> None:
    """Clear the bits of a mode that set user and group, as the kernel does after a write.

    The bit of the group stays without execute permission for it: it means something else then.
    """
    kept = stat.S_IMODE(status.st_mode) & ~stat.S_ISUID
    if kept & stat.S_IXGRP:
        kept &= ~stat.S_ISGID
    if stat.S_ISREG(status.st_mode) and kept != stat.S_IMODE(status.st_mode):
        os.chmod(file, kept)


def change_by_descriptor(descriptor: int, wanted: Change) -> os.stat_result:
    """Change the attributes of a file or directory by any descriptor of it, such as O_PATH."""
    change_opened(_proc_path(descriptor), os.fstat(descriptor), wanted)
    return os.fstat(descriptor)


def write_all(descriptor: int, data: bytes | memoryview, offset: int) -> int:
    """Write all bytes. Return the number of written bytes, which is smaller on a full disk."""
    done = os.pwrite(descriptor, data, offset)
    left = memoryview(data)[done:]
    while left:
        try:
            more = os.pwrite(descriptor, left, offset + done)
        except OSError:
            return done
        done += more
        left = left[more:]
    return done


def sync_directory(directory: int) -> None:
    """Make the entries of a directory durable."""
    with opened(directory, ".", _READ_DIRECTORY) as readable:
        os.fsync(readable)


def _check(status: os.stat_result, identity: Identity) -> os.stat_result:
    if identity_of(status) != identity:
        raise refusal(errno.ESTALE)
    return status


def _open_flags(flags: int) -> int:
    return flags & _OPEN_FLAGS & ~os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC


def _truncated(descriptor: int, flags: int, *, clears_ids: bool) -> int:
    """Truncate an open file if the flags say so. Return its descriptor."""
    if flags & os.O_TRUNC:
        wanted = Change(size_bytes=0, clears_ids=clears_ids)
        change_opened(descriptor, os.fstat(descriptor), wanted)
    return descriptor


def _proc_path(descriptor: int) -> str:
    """Return a path that leads to the file of an O_PATH descriptor."""
    return f"/proc/self/fd/{descriptor}"


def _set_owner(directory: int, descriptor: int, owner: Owner) -> None:
    """Set owner and group of a new file; the group only if this process may."""
    status = os.fstat(descriptor)
    if _has_other_owner(status, owner):
        try:
            os.chown(_proc_path(descriptor), *_new_owner(directory, owner))
        except PermissionError:
            if status.st_uid != owner.uid:
                raise


def _has_other_owner(status: os.stat_result, owner: Owner) -> bool:
    return (status.st_uid, status.st_gid) != owner


def _new_owner(directory: int, owner: Owner) -> tuple[int, int]:
    """Return owner and group of a new entry; -1 if it inherits the directory's group."""
    keeps = os.fstat(directory).st_mode & stat.S_ISGID
    return owner.uid, -1 if keeps else owner.gid


def _owner_ids(wanted: Change) -> tuple[int, int]:
    return -1 if wanted.uid is None else wanted.uid, -1 if wanted.gid is None else wanted.gid


def _times(status: os.stat_result, wanted: Change) -> tuple[int, int]:
    access = status.st_atime_ns if wanted.access_ns is None else wanted.access_ns
    modify = status.st_mtime_ns if wanted.modify_ns is None else wanted.modify_ns
    return access, modify
