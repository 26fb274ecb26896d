"""Sockets by which a peer notices that this process has ended, and descriptors that come by them.

Forked children close their copies. Libdlfs closes such a socket after the last use of it, possibly
long after the Python object that opened it was deleted. Therefore each descriptor is registered
with the inode of its socket. A descriptor with another inode was closed and reused for another
file, and is not closed again.

Threads: any.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Sequence
from ctypes import POINTER, c_int, c_uint8

from dlfs._native.handle import Descriptor
from dlfs._native.library import library

_inodes: dict[int, int] = {}
"""Inode of the socket behind each registered descriptor. A reused descriptor replaces its entry."""


def close_in_children(descriptor: int) -> None:
    """Make forked children close their copy of a socket while it is open in this process."""
    _inodes[descriptor] = os.fstat(descriptor).st_ino


def _after_fork_in_child() -> None:
    for descriptor, inode in _inodes.items():
        with contextlib.suppress(OSError):  # it was closed
            if os.fstat(descriptor).st_ino == inode:
                os.close(descriptor)
    _inodes.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


class OwnedSocket(socket.socket):
    """A socket that is closed, without a warning, when it is collected; no bytecode runs then.

    An exception on the return of the call that creates it leaves no other owner.
    """

    __slots__ = ()

    __del__ = socket.SocketType.close


def receive(connection: int, memory: bytearray, owners: Sequence[Descriptor]) -> int:
    """Receive bytes and descriptors from a Unix socket, without waiting.

    Args:
        connection: descriptor of the socket.
        memory: gets the bytes, as many as come and fit.
        owners: the first of them without a descriptor get those that come.

    Returns:
        The number of bytes; 0 at the end of the connection.

    Raises:
        BlockingIOError: nothing is there.
        OSError: the connection failed; EMSGSIZE if more descriptors came than there are owners.
    """
    slot = POINTER(c_int)
    places = (slot * len(owners))(*map(slot, owners))
    buffer = (c_uint8 * len(memory)).from_buffer(memory)
    got: int = library().dlfs_handle_receive(connection, buffer, len(memory), places, len(owners))
    if got < 0:
        raise OSError(-got, os.strerror(-got))
    return got
