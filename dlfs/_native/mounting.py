"""The system calls that mount, which Python does not have.

Source: mount(2), open_tree(2), move_mount(2); Linux, include/uapi/linux/mount.h, and
fs/fuse/inode.c (fuse_fs_parameters).
"""

from __future__ import annotations

import ctypes
import os
from ctypes import c_char_p, c_ulong

READ_ONLY = 1
NO_SET_USER_ID = 2
NO_DEVICES = 4
NO_PROGRAMS = 8
REMOUNT = 32
BIND = 4096
"""Flags of mounts: MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT and MS_BIND."""


_OPEN_TREE, _MOVE_MOUNT = 428, 429
_HERE, _EMPTY_PATH, _CLONE = -100, 0x1000, 1
_SOURCE_IS_DESCRIPTOR, _BENEATH = 0x4, 0x200


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


def mount_beneath(directory: int, target: str) -> None:
    """Mount a directory beneath the topmost mount of a target; it shows when that one is detached.

    Args:
        directory: descriptor of the directory.
        target: the mount point, on which something is mounted.

    Raises:
        OSError: the system refused; EINVAL before Linux 6.5.
    """
    tree = _call(_OPEN_TREE, directory, b"", _EMPTY_PATH | _CLONE | os.O_CLOEXEC)
    try:
        where = os.fsencode(target)
        _call(_MOVE_MOUNT, tree, b"", _HERE, where, _SOURCE_IS_DESCRIPTOR | _BENEATH)
    finally:
        os.close(tree)


def _call(number: int, *arguments: int | bytes) -> int:
    result = int(ctypes.CDLL(None, use_errno=True).syscall(number, *arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result
