"""Sockets by which a peer notices that this process has ended: forked children close their copies.

Libdlfs closes such a socket after the last use of it, possibly long after the Python object that
opened it was deleted. Therefore each descriptor is registered with the inode of its socket. A
descriptor with another inode was closed and reused for another file, and is not closed again.

Threads: any.
"""

from __future__ import annotations

import contextlib
import os

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
