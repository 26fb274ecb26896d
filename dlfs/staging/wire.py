"""The kernel's FUSE protocol, as far as the file system of the staging area uses it.

Requests and replies are structs in the byte order of the machine. A ``Request`` is decoded from the
bytes that were read from /dev/fuse; the functions below it make the replies. No library is used:
pyfuse3 and libfuse before 3.17 cannot name the file to which the kernel passes reads and writes
through, and pyfuse3 serves one mount in a process.

Pure conversions without I/O, but for ``Backing``, which registers files with the kernel.

Source: Linux, include/uapi/linux/fuse.h, protocol 7.40.
"""

from __future__ import annotations

import fcntl
import os
from struct import Struct
from typing import NamedTuple

from dlfs.staging.entries import Change, Owner
from dlfs.units import KIB, MIB

WRITE_BYTES_MAX = MIB
"""Most bytes of one READ or WRITE request."""

REQUEST_BYTES_MAX = WRITE_BYTES_MAX + 64 * KIB
"""Buffer for one request, in bytes."""

CACHE_SECONDS = 1
"""Time for which the kernel may cache names and attributes, in seconds."""

_BACKGROUND_MAX = 64
_STACK_DEPTH = 2  # the kernel's most: the staging area may lie on overlayfs, as in a container

# Requests.
LOOKUP, FORGET, GETATTR, SETATTR, READLINK, SYMLINK = range(1, 7)
MKNOD, MKDIR, UNLINK, RMDIR, RENAME, LINK, OPEN, READ, WRITE, STATFS, RELEASE = range(8, 19)
FSYNC, SETXATTR, GETXATTR, LISTXATTR, REMOVEXATTR = range(20, 25)
INIT, OPENDIR, READDIR, RELEASEDIR, FSYNCDIR = range(26, 31)
CREATE, DESTROY, BATCH_FORGET, READDIRPLUS, RENAME2 = 35, 38, 42, 44, 45

NOTIFY_INVAL_ENTRY = 3

# Arguments of requests, which names follow in some.
HEADER_IN = Struct("=IIQQIIIHH")  # length, request, ID, node, user, group, process, extensions
INIT_IN = Struct("=IIIII")  # major, minor, read-ahead, flags, more flags
NODE_IN = Struct("=Q")  # a node, or a count
FORGET_IN = Struct("=QQ")  # node, count
PAIR_IN = Struct("=II")  # size or flags, and what depends on the request
SETATTR_IN = Struct("=IIQQQqqqIIIIIIII")
MKNOD_IN = Struct("=IIII")  # mode, device, umask, padding
RENAME2_IN = Struct("=QII")  # new directory, flags, padding
CREATE_IN = Struct("=IIII")  # flags, mode, umask, flags of the protocol
TRANSFER_IN = Struct("=QQIIQII")  # handle, offset, size, flags, lock owner, open flags, padding
HANDLE_IN = Struct("=QI")  # handle, flags

_HEADER_OUT = Struct("=IiQ")  # length, negative errno or notification, ID
_INIT_OUT = Struct("=IIIIHHIIHHIIH22x")
_ENTRY_OUT = Struct("=QQQQII")  # node, generation, seconds and nanoseconds to cache it
_ATTRIBUTES_OUT = Struct("=QII")
_ATTRIBUTES = Struct("=QQQqqqIIIIIIIIII")
_OPEN_OUT = Struct("=QIi")
_STATFS_OUT = Struct("=QQQQQIII28x")
_PAIR_OUT = Struct("=II")
_INVAL_ENTRY = Struct("=QII")
_DIRENT = Struct("=QQII")
_BACKING_MAP = Struct("=iIQ")
_BACKING = Struct("=i")

_BACKING_OPEN = 1 << 30 | _BACKING_MAP.size << 16 | 229 << 8 | 1  # FUSE_DEV_IOC_BACKING_OPEN
_BACKING_CLOSE = 1 << 30 | _BACKING.size << 16 | 229 << 8 | 2

_MINOR_MIN, _MINOR = 23, 40
"""First protocol with 64-byte replies to INIT, and the one that this module knows."""

# Flags of INIT.
_ASYNC_READ, _ATOMIC_O_TRUNC, _EXPORT_SUPPORT, _BIG_WRITES = 1 << 0, 1 << 3, 1 << 4, 1 << 5
_READDIRPLUS, _ASYNC_DIO, _PARALLEL_DIROPS = 1 << 13, 1 << 15, 1 << 18
_MAX_PAGES, _KILLPRIV_V2, _INIT_EXT, _PASSTHROUGH = 1 << 22, 1 << 28, 1 << 30, 1 << 37
_WANTED = _ASYNC_READ | _ATOMIC_O_TRUNC | _EXPORT_SUPPORT | _BIG_WRITES | _READDIRPLUS
_WANTED |= _ASYNC_DIO | _PARALLEL_DIROPS | _MAX_PAGES | _KILLPRIV_V2 | _INIT_EXT | _PASSTHROUGH

# Flags of requests and replies.
WRITE_CLEARS_IDS, OPEN_CLEARS_IDS = 1 << 2, 1 << 0
_SET_MODE, _SET_UID, _SET_GID, _SET_SIZE, _SET_ATIME, _SET_MTIME, _SET_HANDLE = (
    1 << bit for bit in range(7)
)
_SET_CLEARS_IDS = 1 << 11
_OPEN_PASSTHROUGH = 1 << 7

_NS = 10**9


class Request(NamedTuple):
    """A request of the kernel.

    Attributes:
        kind: one of the numbers above.
        number: the ID that the reply repeats.
        node: inode number of the file.
        caller: user and group of the program.
        body: the arguments.
    """

    kind: int
    number: int
    node: int
    caller: Owner
    body: bytes

    @classmethod
    def decode(cls, data: bytes) -> Request:
        """Decode the bytes that one read of /dev/fuse returned."""
        _, kind, number, node, uid, gid, _, _, _ = HEADER_IN.unpack_from(data)
        return cls(kind, number, node, Owner(uid, gid), data[HEADER_IN.size :])

    def names(self, start: int = 0) -> list[bytes]:
        """Return the names that follow the first bytes of the arguments; each ends with NUL."""
        return self.body[start:].split(b"\0")

    def change(self) -> tuple[Change, int | None]:
        """Return the attributes that SETATTR sets, and the handle of the open file, if any."""
        (valid, _, handle, size, _, atime, mtime, _, atime_ns, mtime_ns, _, mode, _, uid, gid,
         _) = SETATTR_IN.unpack_from(self.body)  # fmt: skip
        wanted = Change(
            mode=mode if valid & _SET_MODE else None,
            uid=uid if valid & _SET_UID else None,
            gid=gid if valid & _SET_GID else None,
            size_bytes=size if valid & _SET_SIZE else None,
            access_ns=atime * _NS + atime_ns if valid & _SET_ATIME else None,
            modify_ns=mtime * _NS + mtime_ns if valid & _SET_MTIME else None,
            clears_ids=bool(valid & _SET_CLEARS_IDS),
        )
        return wanted, handle if valid & _SET_HANDLE else None


class Entry(NamedTuple):
    """A file that a reply names: its inode number on the mount, and its attributes."""

    node: int
    status: os.stat_result


class Opened(NamedTuple):
    """A handle of an open file; the file to which the kernel passes it through, or 0."""

    handle: int
    backing: int = 0


# ---- replies -------------------------------------------------------------------------------------


def reply_header(number: int, error: int, body: bytes) -> bytes:
    """Return the header of a reply; ``error`` is an errno or 0."""
    return _HEADER_OUT.pack(_HEADER_OUT.size + len(body), -error, number)


def init(request: Request, *, pass_through: bool) -> tuple[bytes, bool]:
    """Return the reply to INIT, and True if the kernel will pass reads and writes through.

    The reply is empty if the kernel's protocol is too old.
    """
    major, minor, read_ahead, low, high = INIT_IN.unpack_from(request.body + bytes(4))
    offered = low | (high << 32 if low & _INIT_EXT else 0)
    accepted = offered & (_WANTED if pass_through else _WANTED & ~_PASSTHROUGH)
    if major != 7 or minor < _MINOR_MIN:
        return b"", False
    body = _INIT_OUT.pack(
        *(7, min(minor, _MINOR), read_ahead, accepted & 0xFFFFFFFF),
        *(_BACKGROUND_MAX, _BACKGROUND_MAX * 3 // 4, WRITE_BYTES_MAX, 1),
        *(WRITE_BYTES_MAX // os.sysconf("SC_PAGESIZE"), 0, accepted >> 32),
        *(_STACK_DEPTH if accepted & _PASSTHROUGH else 0, 0),
    )
    return body, bool(accepted & _PASSTHROUGH)


def attributes(found: Entry) -> bytes:
    """Return the reply with a file's attributes."""
    return _ATTRIBUTES_OUT.pack(CACHE_SECONDS, 0, 0) + _attributes(found.status)


def entry(found: Entry) -> bytes:
    """Return the reply with a file's inode number and attributes."""
    return _ENTRY_OUT.pack(found.node, 0, CACHE_SECONDS, CACHE_SECONDS, 0, 0) + _attributes(
        found.status
    )


def opened(file: Opened) -> bytes:
    """Return the reply with a handle."""
    return _OPEN_OUT.pack(file.handle, _OPEN_PASSTHROUGH if file.backing else 0, file.backing)


def size(count: int) -> bytes:
    """Return the reply with a number of bytes."""
    return _PAIR_OUT.pack(count, 0)


def space(found: os.statvfs_result) -> bytes:
    """Return the reply to STATFS."""
    return _STATFS_OUT.pack(
        *(found.f_blocks, found.f_bfree, found.f_bavail, found.f_files, found.f_ffree),
        *(found.f_bsize, found.f_namemax, found.f_frsize),
    )


def entry_is_gone(parent: int, name: bytes) -> bytes:
    """Return the notification that a directory does not contain a name any more."""
    body = _INVAL_ENTRY.pack(parent, len(name), 0) + name + b"\0"
    return _HEADER_OUT.pack(_HEADER_OUT.size + len(body), NOTIFY_INVAL_ENTRY, 0) + body


class Listing:
    """The reply to READDIRPLUS, or to READDIR, which is filled entry by entry.

    Args:
        bytes_max: size of the kernel's buffer.
        plus: each entry has its inode number and attributes, which count as a look-up.
    """

    def __init__(self, bytes_max: int, *, plus: bool) -> None:
        self._left = bytes_max
        self._plus = plus
        self._parts: list[bytes] = []

    @property
    def plus(self) -> bool:
        """True if each entry counts as a look-up."""
        return self._plus

    def append(self, name: bytes, found: Entry, position: int) -> bool:
        """Append an entry, after which the listing goes on at a position; False if it is full."""
        status = found.status
        dirent = _DIRENT.pack(status.st_ino, position, len(name), status.st_mode >> 12)
        part = (entry(found) if self._plus else b"") + dirent + name
        part += bytes(-len(part) % 8)
        if len(part) > self._left:
            return False
        self._left -= len(part)
        self._parts.append(part)
        return True

    def encode(self) -> bytes:
        """Return the reply."""
        return b"".join(self._parts)


def _attributes(status: os.stat_result) -> bytes:
    times = status.st_atime_ns, status.st_mtime_ns, status.st_ctime_ns
    return _ATTRIBUTES.pack(
        *(status.st_ino, status.st_size, status.st_blocks),
        *(time // _NS for time in times),
        *(time % _NS for time in times),
        *(status.st_mode, status.st_nlink, status.st_uid, status.st_gid),
        *(0, status.st_blksize, 0),
    )


# ---- passing through -----------------------------------------------------------------------------


class Backing:
    """Files of the staging area to which the kernel passes reads and writes through.

    Args:
        kernel: descriptor of /dev/fuse, or -1 if the kernel does not offer it.
    """

    def __init__(self, kernel: int = -1) -> None:
        self._kernel = kernel

    def open(self, descriptor: int) -> int:
        """Register an open file. Return its number, or 0 if the kernel refuses it."""
        if self._kernel < 0:
            return 0
        try:
            file = bytearray(_BACKING_MAP.pack(descriptor, 0, 0))
            return int(fcntl.ioctl(self._kernel, _BACKING_OPEN, file, True))
        except OSError:  # EPERM without CAP_SYS_ADMIN, ELOOP on a stack of file systems
            return 0

    def close(self, number: int) -> None:
        """Release a registered file."""
        if number:
            fcntl.ioctl(self._kernel, _BACKING_CLOSE, bytearray(_BACKING.pack(number)), True)
