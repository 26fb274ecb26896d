"""Mounts of this machine: lists, binds and detaches them, and opens directories to single users.

No function here makes a request to a file system that is mounted, so none waits for its server.
mount(8) and umount(8) look at both ends of a mount first, and would.

Source: mount(2), umount(2), proc_pid_mountinfo(5); Linux, include/uapi/linux/posix_acl_xattr.h.
"""

from __future__ import annotations

import ctypes
import os
import re
import struct
from pathlib import Path

MOUNTINFO = Path("/proc/self/mountinfo")

_BIND = 4096
_DETACH, _NO_FOLLOW = 2, 8
_OCTAL = re.compile(r"\\([0-7]{3})")
_ACL_VERSION = 2
_READ_SEARCH = 5
_USER_OBJECT, _USER, _GROUP_OBJECT, _MASK, _OTHER = 0x01, 0x02, 0x04, 0x10, 0x20
_UNDEFINED_ID = 0xFFFFFFFF

_library = ctypes.CDLL(None, use_errno=True)


def mounts_below(directory: str) -> dict[str, str]:
    """Return the device number of the topmost mount on each path below a directory."""
    found = {}
    with MOUNTINFO.open(encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            columns = line.split(" ")
            path = _OCTAL.sub(lambda match: chr(int(match[1], 8)), columns[4])
            if path.startswith(directory + "/"):
                found[path] = columns[2]
    return found


def bind(source: str, target: str) -> None:
    """Show the file system mounted on ``source`` on ``target`` as well.

    Raises:
        OSError: the system refuses.
    """
    _check(
        _library.mount(os.fsencode(source), os.fsencode(target), None, ctypes.c_ulong(_BIND), None),
        target,
    )


def detach(path: str) -> None:
    """Detach the topmost mount on a path, also one in use.

    Raises:
        OSError: the system refuses, or nothing is mounted there.
    """
    _check(_library.umount2(os.fsencode(path), _DETACH | _NO_FOLLOW), path)


def open_to_user(directory: str, uid: int) -> None:
    """Let one user, and nobody else, read a directory of root, by an access control list.

    The user owns nothing: an owner could change the mode, and so let others in.

    Args:
        directory: the directory.
        uid: ID of the user.

    Raises:
        OSError: the file system has no access control lists.
    """
    entries = [
        (_USER_OBJECT, 7, _UNDEFINED_ID),
        (_USER, _READ_SEARCH, uid),
        (_GROUP_OBJECT, 0, _UNDEFINED_ID),
        (_MASK, _READ_SEARCH, _UNDEFINED_ID),
        (_OTHER, 0, _UNDEFINED_ID),
    ]
    packed = b"".join(struct.pack("<HHI", *entry) for entry in entries)
    os.setxattr(directory, "system.posix_acl_access", struct.pack("<I", _ACL_VERSION) + packed)


def _check(result: int, path: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), path)
