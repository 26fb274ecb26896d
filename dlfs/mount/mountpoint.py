"""Mount points: finding, checking and unmounting them, and cleaning up after a killed server.

A server that dies by SIGKILL leaves its mount behind: the kernel answers everything below it with
ENOTCONN ("Transport endpoint is not connected"). The next mount on that directory finds it so,
detaches it and goes on. libfuse's auto_unmount is not used: it keeps a second process per mount,
and uncovers the empty directory below when the server dies, so that programs would see a data set
without files where they should see an error.

Source: proc_pid_mountinfo(5); umount(2), MNT_DETACH; fusermount3(1).
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from dlfs.errors import DeviceError, ExistsError, NotFoundError, UsageError

FILE_SYSTEM_TYPE = "fuse.dlfs"
MOUNTINFO = Path("/proc/self/mountinfo")

_OCTAL = re.compile(rb"\\([0-7]{3})")
_UNMOUNT_TIMEOUT_S = 30


@dataclass(frozen=True)
class MountRecord:
    """One line of mountinfo."""

    mountpoint: bytes
    file_system_type: str
    options: str
    device: str
    """Of the file system, as MAJOR:MINOR: no other's while a file on it is open."""


def parse_mountinfo(text: bytes) -> list[MountRecord]:
    """Read the lines of a mountinfo file; lines that are not such are left out."""
    records = []
    for line in text.split(b"\n"):
        before, separator, after = line.partition(b" - ")
        fields = before.split(b" ")
        behind = after.split(b" ")
        if separator and len(fields) >= 6 and len(behind) >= 3:
            records.append(
                MountRecord(_unescape(fields[4]), behind[0].decode("ascii", "replace"),
                            fields[5].decode("ascii", "replace"),
                            fields[2].decode("ascii", "replace"))
            )  # fmt: skip
    return records


def find_mount(directory: str | os.PathLike[str]) -> MountRecord | None:
    """What is mounted exactly on a directory, the topmost if several are; None when nothing is."""
    wanted = os.fsencode(absolute(directory))
    found = [r for r in parse_mountinfo(MOUNTINFO.read_bytes()) if r.mountpoint == wanted]
    return found[-1] if found else None


def device_of(path: str) -> str | None:
    """The device of what is mounted exactly on a directory; None when nothing is.

    A server notes it when it has mounted. Where it is another one in the end, somebody has taken
    the mount away (``umount --lazy``), and what is there now is not the server's to unmount.
    """
    record = find_mount(path)
    return None if record is None else record.device


def absolute(directory: str | os.PathLike[str]) -> str:
    """The absolute path of a mount point, links in it resolved; works on a dead mount too."""
    parent, name = os.path.split(os.path.abspath(directory))
    return os.path.join(os.path.realpath(parent), name) if name else parent


def is_dead(directory: str | os.PathLike[str]) -> bool:
    """Whether the server of what is mounted on a directory is gone."""
    try:
        os.statvfs(directory)  # stat may be answered from the kernel's cache
    except OSError as error:
        return error.errno in (errno.ENOTCONN, errno.ECONNABORTED)
    return False


def prepare(directory: str | os.PathLike[str]) -> str:
    """Make sure that a directory may be mounted on; the mount of a dead server is detached first.

    Returns:
        Its absolute path.

    Raises:
        NotFoundError: there is no such directory.
        ExistsError: DLFS is mounted there already.
        UsageError: it is no directory, or it is not empty.
        DeviceError: a dead mount could not be detached.
    """
    path = resolve(directory)
    record = find_mount(path)
    if record is not None and record.file_system_type == FILE_SYSTEM_TYPE:
        if not is_dead(path):
            raise ExistsError(
                f"mount on {path}: DLFS is mounted there already; 'dlfs umount {path}' ends that "
                "mount"
            )
        _unmount(path, lazy=True)
    try:
        if os.listdir(path):
            raise UsageError(
                f"mount on {path}: expected an empty directory, got files in it; move them away, "
                "or mount elsewhere"
            )
    except FileNotFoundError as error:
        raise NotFoundError(
            f"mount on {path}: no such directory; 'mkdir -p {path}' makes it"
        ) from error
    except NotADirectoryError as error:
        raise UsageError(f"mount on {path}: expected a directory, got a file") from error
    return path


def resolve(directory: str | os.PathLike[str]) -> str:
    """The path that mountinfo has; what is mounted there is not asked."""
    path = absolute(directory)
    return absolute(os.path.realpath(path)) if os.path.islink(path) else path


def unmount(directory: str | os.PathLike[str], *, lazy: bool = False) -> str:
    """Unmount a DLFS mount.

    Args:
        directory: where it is mounted.
        lazy: also while files on it are open; it then goes away when the last is closed.

    Returns:
        The mount's absolute path.

    Raises:
        UsageError: DLFS is not mounted there.
        DeviceError: the system refuses (EBUSY: files are open, EPERM: someone else's mount).
    """
    path = resolve(directory)
    record = find_mount(path)
    if record is None or record.file_system_type != FILE_SYSTEM_TYPE:
        what = "nothing" if record is None else record.file_system_type
        raise UsageError(f"unmount {path}: expected a mount of DLFS, got {what} mounted there")
    _unmount(path, lazy=lazy)
    return path


def detach(path: str) -> None:
    """Take a mount away at once, whoever uses it.

    Raises:
        DeviceError: the system refuses.
    """
    _unmount(path, lazy=True)


def _unmount(path: str, *, lazy: bool) -> None:
    """Unmount through fusermount3, which needs no root, or umount where that is missing."""
    helper = shutil.which("fusermount3")
    command = [helper, "-u", *(["-z"] if lazy else [])] if helper else _umount_command(lazy)
    result = subprocess.run(
        [*command, "--", path],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_UNMOUNT_TIMEOUT_S,
        check=False,
    )
    if result.returncode:
        said = result.stderr.strip() or f"exit status {result.returncode}"
        busy = "busy" in said.lower()
        hint = "; close the files that are open on it, or use --lazy" if busy else ""
        raise DeviceError(f"unmount {path}: {said}{hint}", errno.EBUSY if busy else errno.EPERM)


def _umount_command(lazy: bool) -> list[str]:
    command = shutil.which("umount")
    if command is None:
        raise NotFoundError("unmount: expected fusermount3 (package fuse3) or umount on the PATH")
    return [command, *(["-l"] if lazy else [])]


def _unescape(field: bytes) -> bytes:
    return _OCTAL.sub(lambda match: bytes([int(match[1], 8)]), field)
