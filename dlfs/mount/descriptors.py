"""Descriptors of ``/dev/fuse``, and how processes pass descriptors to each other.

The processes that only keep a mount, and serve nothing, import this module and no other of the
package but ``dlfs.errors``: so they are small.

Source: Linux, include/linux/miscdevice.h (FUSE_MINOR), include/uapi/linux/fuse.h and fs/fuse/dev.c;
unix(7), SCM_RIGHTS and SO_PEERCRED.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import select
import socket
import stat
import struct

INIT_BYTES_MAX = 64 << 10
"""Buffer for the kernel's first request, in bytes; the kernel demands at least 8 KiB."""

_INIT = 26
"""Operation of the kernel's first request, FUSE_INIT."""

_RESEND = struct.pack("=IiQ", 16, 7, 0)
"""The notification FUSE_NOTIFY_RESEND: length, code, and 0 for the ID of a request."""

_FUSE_DEVICE = os.makedev(10, 229)
_CREDENTIALS = struct.Struct("3i")  # process, user, group


# ---- /dev/fuse -----------------------------------------------------------------------------------


def is_fuse(descriptor: int) -> bool:
    """Return True if a descriptor is of ``/dev/fuse``, whatever the path of that device is."""
    found = os.fstat(descriptor)
    return stat.S_ISCHR(found.st_mode) and found.st_rdev == _FUSE_DEVICE


def is_connected(kernel: int) -> bool:
    """Return True if the file system of a descriptor of /dev/fuse exists, mounted or in use."""
    poll = select.poll()
    poll.register(kernel, 0)
    return not any(events & select.POLLERR for _, events in poll.poll(0))


def is_init(request: bytes) -> bool:
    """Return True if a request of the kernel is its first one."""
    return len(request) >= 8 and struct.unpack_from("=I", request, 4)[0] == _INIT


def send_again(kernel: int) -> None:
    """Have the kernel send the requests again that were taken and not answered (Linux 6.9).

    Does nothing if the file system is unmounted.
    """
    with contextlib.suppress(OSError):
        os.write(kernel, _RESEND)


def unanswered_init(kernel: int) -> bytes | None:
    """Return the kernel's first request, or None if a server has answered it.

    No other process may read from the descriptor meanwhile. Requests that were taken and not
    answered are sent again later.

    Raises:
        OSError: the file system is unmounted.
    """
    send_again(kernel)
    os.set_blocking(kernel, False)
    try:
        request = os.read(kernel, INIT_BYTES_MAX)
    except OSError as error:
        # There is none; its program has ended; longer ones are permitted by the reply to FUSE_INIT.
        if error.errno not in (errno.EAGAIN, errno.ENOENT, errno.EINVAL):
            raise
        return None
    finally:
        os.set_blocking(kernel, True)
    if is_init(request):
        return request
    send_again(kernel)
    return None


# ---- passing descriptors -------------------------------------------------------------------------


def receive(link: socket.socket, bytes_max: int, count: int) -> tuple[bytes, list[int]]:
    """Receive a message with descriptors, which programs that this process starts do not inherit.

    Args:
        link: the connection.
        bytes_max: most bytes of the message.
        count: most descriptors; the system closes others.

    Returns:
        The message, empty if the other end is closed; the descriptors.

    Raises:
        OSError: the connection failed; BlockingIOError or TimeoutError: nothing came in time.
    """
    found = array.array("i")
    size = socket.CMSG_LEN(count * found.itemsize)
    try:
        got = link.recvmsg(bytes_max, size, socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:  # it has ended with a message unread; its answer comes after that
        got = link.recvmsg(bytes_max, size, socket.MSG_CMSG_CLOEXEC)
    message, controls, _, _ = got
    for level, kind, data in controls:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    return message, list(found)


def close_all(descriptors: list[int]) -> None:
    """Close descriptors."""
    for descriptor in descriptors:
        os.close(descriptor)


def peer_of(link: socket.socket) -> tuple[int, int]:
    """Return process and user ID of the other end of a connection.

    The process ID is 0 for a process that is not in this one's namespace of process IDs.
    """
    data = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(data)
    return process, user
