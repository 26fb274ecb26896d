"""Finds the processes that use some datasets of a mount, as fuser(1) does for a whole file system.

The kernel opens files of a mount without a request to the server, so only /proc knows. An open file
is recognised by its inode number, which contains the number of its dataset, on a mount of the same
file system in any mount namespace; a mapping by its device and inode number; a working or root
directory by its path in this mount namespace. Nothing here makes a request to any file system but
/proc. Processes of other users are visible to root only, but without ``--allow-other`` only root's
mounts have such users.

Source: proc_pid_fdinfo(5), whose ``ino`` Linux 5.14 added; proc_pid_maps(5); proc_pid_mountinfo(5).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Set
from pathlib import Path

from dlfs.mount.inode_numbers import unpack
from dlfs.mount.mountpoint import MountRecord, mount_namespaces

PROC = Path("/proc")

_FDINFO = re.compile(rb"^(mnt_id|ino):\s*(\d+)$", re.MULTILINE)
_DELETED = b" (deleted)"


def find_users(mount: MountRecord, name: bytes, numbers: Set[int]) -> list[int]:
    """Return the IDs of the processes that use a directory of a mount, or datasets below it.

    Args:
        mount: present record of the mount.
        name: name of the directory, in the root of the mount.
        numbers: numbers in the mount of the directory and of the datasets below it.
    """
    path = os.path.join(mount.mountpoint, name)
    device = mount.device
    processes = [process for process in os.listdir(PROC) if process.isdigit()]
    mounts = {
        record.mount_id.encode()
        for _, records in mount_namespaces()
        for record in records
        if record.device == device
    }
    return sorted(
        int(process)
        for process in processes
        if any(unpack(inode).dataset in numbers for inode in _inodes(process, mounts, device))
        or _stands_in(process, path)
    )


def _read(path: Path) -> bytes:
    """Return what a file of /proc has; nothing if the process has ended or is another user's."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _inodes(process: str, mounts: set[bytes], device: str) -> Iterator[int]:
    """Yield the inodes of a file system that a process has open or mapped."""
    folder = PROC / process / "fdinfo"
    try:
        descriptors = os.listdir(folder)
    except OSError:
        descriptors = []
    for descriptor in descriptors:
        found = dict(_FDINFO.findall(_read(folder / descriptor)))
        if found.get(b"mnt_id") in mounts and b"ino" in found:
            yield int(found[b"ino"])
    major, minor = map(int, device.split(":"))
    wanted = b"%02x:%02x" % (major, minor)
    for line in _read(PROC / process / "maps").split(b"\n"):
        fields = line.split(None, 5)
        if len(fields) >= 5 and fields[3] == wanted:
            yield int(fields[4])


def _stands_in(process: str, path: bytes) -> bool:
    """Return True if the working or root directory of a process is a directory or below it."""
    for link in ("cwd", "root"):
        try:
            target = os.readlink(os.fsencode(PROC / process / link)).removesuffix(_DELETED)
        except OSError:
            continue
        if target == path or target.startswith(path + b"/"):
            return True
    return False
