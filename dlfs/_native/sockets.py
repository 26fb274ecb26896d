"""Sockets that tell the other side of this process's death: a forked child closes its copies.

Libdlfs closes such a socket with the last of what needs it, which may be long after the object that
brought it is gone. So descriptors are remembered with the inode of their socket: one that has been
closed, and may stand for another file by now, is left alone.

Threads: any.
"""

from __future__ import annotations

import contextlib
import os

_inodes: dict[int, int] = {}
"""By descriptor. No more than descriptors that were open at once: a new socket takes its place."""


def close_in_children(descriptor: int) -> None:
    """Have forked children close their copy of a socket, for as long as it is open here."""
    _inodes[descriptor] = os.fstat(descriptor).st_ino


def _after_fork_in_child() -> None:
    for descriptor, inode in _inodes.items():
        with contextlib.suppress(OSError):  # it was closed
            if os.fstat(descriptor).st_ino == inode:
                os.close(descriptor)
    _inodes.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
