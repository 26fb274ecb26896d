"""The system call mount(2), which Python does not have.

Source: mount(2); Linux, fs/fuse/inode.c (fuse_fs_parameters).
"""

from __future__ import annotations

import ctypes
import os
from ctypes import c_char_p, c_ulong

READ_ONLY = 1
NO_SET_USER_ID = 2
NO_DEVICES = 4
BIND = 4096
"""Flags of mounts: MS_RDONLY, MS_NOSUID, MS_NODEV and MS_BIND."""


def mount(source: str, target: str, kind: str, flags: int, data: str) -> None:
    """Mount a file system.

    Args:
        source: what is mounted, as ``mount`` shows it.
        target: the mount point.
        kind: type of the file system, such as ``fuse.dlfs``.
        flags: flags of the mount.
        data: options of the file system, with commas between them.

    Raises:
        OSError: the system refused.
    """
    call = ctypes.CDLL(None, use_errno=True).mount
    call.argtypes = [c_char_p, c_char_p, c_char_p, c_ulong, c_char_p]
    words = [os.fsencode(word) for word in (source, target, kind)]
    if call(*words, flags, data.encode()):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), target)
