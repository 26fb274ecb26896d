"""Mounts, finds, checks and unmounts mount points, and detaches the mounts of killed servers.

A server that dies by SIGKILL leaves its mount behind: the kernel fails every request below it with
ENOTCONN ("Transport endpoint is not connected"). The next mount on that directory detaches it
first. libfuse's auto_unmount is not used: it needs a second process per mount, and it uncovers
the empty directory below when the server dies; programs would then see a dataset without files
instead of an error.

Source: proc_pid_mountinfo(5); umount(2), MNT_DETACH; fusermount3(1).
"""

from __future__ import annotations

import errno
import os
import queue
import re
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dlfs._native.mounting import NO_DEVICES, NO_SET_USER_ID, READ_ONLY, mount
from dlfs.base.threads import start_thread
from dlfs.errors import DeviceError, ExistsError, NotFoundError, UsageError
from dlfs.mount.descriptors import receive

FILE_SYSTEM_TYPE = "fuse.dlfs"
MOUNTINFO = Path("/proc/self/mountinfo")

_OCTAL = re.compile(rb"\\([0-7]{3})")
_UNMOUNT_TIMEOUT_S = 30
_ANSWER_TIMEOUT_S = 30.0
"""Longest wait for the answer of a mount, in seconds; devices that are away may take 15."""


@dataclass(frozen=True)
class MountRecord:
    """One mount, from a line of mountinfo."""

    mountpoint: bytes
    file_system_type: str
    options: str
    device: str
    """Device number of the file system as MAJOR:MINOR; unique while a file on it is open."""
    mount_id: str
    """Number of the mount, unique while it is mounted; a rename of a parent does not change it."""
    root: bytes
    """Path of the mounted directory in its file system; of a bind mount, that of its source."""


def parse_mountinfo(text: bytes) -> list[MountRecord]:
    """Parse a mountinfo file; malformed lines are skipped."""
    records = []
    for line in text.split(b"\n"):
        before, separator, after = line.partition(b" - ")
        fields = before.split(b" ")
        after_separator = after.split(b" ")
        if separator and len(fields) >= 6 and len(after_separator) >= 3:
            records.append(
                MountRecord(_unescape(fields[4]), after_separator[0].decode("ascii", "replace"),
                            fields[5].decode("ascii", "replace"),
                            fields[2].decode("ascii", "replace"),
                            fields[0].decode("ascii", "replace"),
                            _unescape(fields[3]))
            )  # fmt: skip
    return records


def _mounts() -> list[MountRecord]:
    """Return the mounts of this process's mount namespace.

    Raises:
        DeviceError: the kernel does not list them, because /proc is not mounted, or hidden.
    """
    try:
        return parse_mountinfo(MOUNTINFO.read_bytes())
    except OSError as error:
        raise DeviceError(
            f"list the mounts: {MOUNTINFO} cannot be read: {error.strerror}; a mount needs /proc: "
            "'mount -t proc proc /proc' as root, or a container that shows it",
            error.errno or 0,
        ) from error


def find_mount(directory: str | os.PathLike[str]) -> MountRecord | None:
    """Return the topmost mount exactly on a directory, or None."""
    return record_of(absolute(directory))


def record_of(path: str) -> MountRecord | None:
    """Return the topmost mount exactly on an absolute path, without a request to any mount."""
    wanted = os.fsencode(path)
    found = [r for r in _mounts() if r.mountpoint == wanted]
    return found[-1] if found else None


def find_again(record: MountRecord) -> MountRecord | None:
    """Return the present record of a mount, or None if it was unmounted.

    The mount point differs after a directory above it was renamed. The caller must know that the
    file system still exists: the kernel gives the numbers of an unmounted one to the next one.
    """
    wanted = (record.mount_id, record.device, record.file_system_type)
    for found in _mounts():
        if (found.mount_id, found.device, found.file_system_type) == wanted:
            return found
    return None


def device_of(path: str) -> str | None:
    """Return the device of the mount exactly on a directory, or None.

    A server remembers the device of its mount. If the device differs when the server ends, its
    mount was detached (``umount --lazy``) and another one may be in its place, which must stay.
    """
    record = record_of(path)
    return None if record is None else record.device


def absolute(directory: str | os.PathLike[str]) -> str:
    """Return the absolute path with links in the parent resolved; works on a dead mount too."""
    parent, name = os.path.split(os.path.abspath(directory))
    return os.path.join(os.path.realpath(parent), name) if name else parent


def is_dead(directory: str | os.PathLike[str]) -> bool:
    """Return True if the server of the mount on a directory is gone.

    Raises:
        DeviceError: the mount does not answer in time, because its server or keeper is stopped.

    Threads: any; starts another one, which ends with the answer, since the call has no timeout.
    """
    codes: queue.SimpleQueue[int] = queue.SimpleQueue()

    def ask() -> None:
        try:
            os.statvfs(directory)  # not stat, which the kernel may answer from its cache
        except OSError as error:
            codes.put(error.errno or 0)
        else:
            codes.put(0)

    asking = threading.Thread(target=ask, daemon=True)
    start_thread(asking)
    try:
        code = codes.get(timeout=_ANSWER_TIMEOUT_S)
    except queue.Empty:
        raise DeviceError(
            f"mount on {directory}: DLFS is mounted there already; expected its answer within "
            f"{_ANSWER_TIMEOUT_S:g} s, got none: its server or its keeper is stopped, or starts; "
            f"'dlfs umount --lazy {directory}' ends that mount",
            errno.ETIMEDOUT,
        ) from None
    asking.join()  # the process may be about to fork, and must have one thread
    # The last two: the kernel is still ending the connection, over io_uring the last.
    return code in (errno.ENOTCONN, errno.ECONNABORTED, errno.ECANCELED)


def prepare(directory: str | os.PathLike[str]) -> str:
    """Check that a directory can be mounted on; detach the mount of a dead server first.

    Returns:
        The absolute path of the directory.

    Raises:
        NotFoundError: the directory does not exist.
        ExistsError: DLFS is mounted there already.
        UsageError: it is not a directory, or not empty.
        DeviceError: a dead mount could not be detached; the mount there does not answer.
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
    """Return a path as mountinfo has it, without a request to the mount there."""
    path = absolute(directory)
    if find_mount(path) is not None or not os.path.islink(path):
        return path
    return absolute(os.path.realpath(path))


def unmount(directory: str | os.PathLike[str], *, lazy: bool = False) -> tuple[str, list[str]]:
    """Unmount a DLFS mount.

    Args:
        directory: the mount point.
        lazy: unmount even if files on it are open; the server ends when the last one is closed.

    Returns:
        The absolute path of the mount point, and processes of other mount namespaces that still
        have the mount (``holders``).

    Raises:
        UsageError: DLFS is not mounted there.
        DeviceError: the system refuses (EBUSY: files are open, EPERM: another user mounted it), or
            the mount does not answer.
    """
    path, device = find_dlfs(directory, "unmount")
    _unmount(path, lazy=lazy)
    return path, holders(device)


def holders(device: str) -> list[str]:
    """Return the processes whose mount namespaces have a DLFS mount, one for each namespace.

    A container or a sandbox that starts while a directory is mounted gets a copy of the mount. The
    server then serves on after the mount itself is gone.

    Args:
        device: number of the file system, as in a ``MountRecord``.

    Returns:
        Such as ``1234 (sh)``. Processes of other users are left out, unless root asks.
    """
    found: list[str] = []
    for process, records in mount_namespaces():
        if any((r.device, r.file_system_type) == (device, FILE_SYSTEM_TYPE) for r in records):
            with suppress(OSError):  # the process has ended
                name = (process / "comm").read_text(errors="replace").strip()
                found.append(f"{process.name} ({name})")
    return found


def mount_namespaces() -> Iterator[tuple[Path, list[MountRecord]]]:
    """Yield the folder in /proc of a process of each mount namespace, and the mounts in it.

    Those of other users are left out, unless root asks.
    """
    seen: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has ended, or is another user's
            namespace = os.readlink(process / "ns/mnt")
            if namespace not in seen:
                records = parse_mountinfo((process / "mountinfo").read_bytes())
                seen.add(namespace)
                yield process, records


def find_dlfs(
    directory: str | os.PathLike[str], action: str, expected: str = "a mount of DLFS"
) -> tuple[str, str]:
    """Return the absolute path and the device of a DLFS mount.

    Args:
        directory: the mount point.
        action: what is to be done with the mount, for the message.
        expected: what must be there, likewise.

    Raises:
        UsageError: DLFS is not mounted there.
    """
    path = resolve(directory)
    record = find_mount(path)
    if record is None or record.file_system_type != FILE_SYSTEM_TYPE:
        what = "nothing" if record is None else record.file_system_type
        raise UsageError(f"{action} {path}: expected {expected}, got {what} mounted there")
    return path, record.device


def detach_moved(record: MountRecord) -> None:
    """Detach a mount that a rename of a directory above it has moved, if it has.

    The caller must know that the file system still exists, as for ``find_again``.

    Raises:
        DeviceError: the system refused.
    """
    found = find_again(record)
    if found is not None and found.mountpoint != record.mountpoint:
        detach(os.fsdecode(found.mountpoint))


def detach(path: str) -> None:
    """Detach a mount at once, even if programs use it.

    Raises:
        DeviceError: the system refuses.
    """
    _unmount(path, lazy=True)


def mount_file_system(path: str, options: Sequence[str]) -> int:
    """Mount by mount(2) as root, and otherwise by fusermount3, which needs no root rights.

    Args:
        path: the mount point.
        options: options that fusermount3 takes.

    Returns:
        A descriptor of /dev/fuse, from which the kernel's requests are read.

    Raises:
        NotFoundError: fusermount3 is not installed.
        DeviceError: the system refused the mount; fusermount3 has printed the reason.
    """
    return _mount_as_root(path, options) if os.geteuid() == 0 else _mount_by_helper(path, options)


def _mount_as_root(path: str, options: Sequence[str]) -> int:
    """Mount as fusermount3 does for root."""
    words = dict(word.partition("=")[::2] for word in options)
    source = words.pop("fsname")
    kind = f"fuse.{words.pop('subtype')}"
    flags = NO_SET_USER_ID | NO_DEVICES | (READ_ONLY if words.pop("ro", None) is not None else 0)
    kernel = -1
    try:
        kernel = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        own = {"fd": kernel, "rootmode": "40000", "user_id": os.getuid(), "group_id": os.getgid()}
        given = [f"{name}={value}" if value else name for name, value in words.items()]
        data = ",".join([*(f"{name}={value}" for name, value in own.items()), *given])
        mount(source, path, kind, flags, data)
    except OSError as error:
        if kernel >= 0:
            os.close(kernel)
        missing = "; 'modprobe fuse' as root, or a container that has it" if kernel < 0 else ""
        raise DeviceError(
            f"mount on {path}: the system refused: {error.filename}: {error.strerror}{missing}",
            error.errno or 0,
        ) from error
    return kernel


def _mount_by_helper(path: str, options: Sequence[str]) -> int:
    helper = shutil.which("fusermount3")
    if helper is None:
        raise NotFoundError(f"mount on {path}: expected fusermount3 (package fuse3) on the PATH")
    here, there = socket.socketpair()
    with here, there:
        done = subprocess.run(
            [helper, "-o", ",".join(options), "--", path],
            env={**os.environ, "_FUSE_COMMFD": str(there.fileno())},
            pass_fds=[there.fileno()],
            check=False,
        )
        if done.returncode:
            raise DeviceError(
                f"mount on {path}: the system refused (is /dev/fuse there, and allow_other "
                "permitted?)"
            )
        _, (kernel,) = receive(here, 1, 1)
    return kernel


def _unmount(path: str, *, lazy: bool) -> None:
    """Unmount by fusermount3, which needs no root rights, or else by umount."""
    helper = shutil.which("fusermount3")
    command = [helper, "-u", *(["-z"] if lazy else [])] if helper else _umount_command(lazy)
    try:
        result = subprocess.run(
            [*command, "--", path],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_UNMOUNT_TIMEOUT_S,
            check=False,
            env={**os.environ, "LC_ALL": "C"},  # its message is read below
        )
    except subprocess.TimeoutExpired as error:
        raise DeviceError(
            f"unmount {path}: no end within {_UNMOUNT_TIMEOUT_S} s, since its server does not "
            "answer; use --lazy",
            errno.ETIMEDOUT,
        ) from error
    if result.returncode:
        message = result.stderr.strip() or f"exit status {result.returncode}"
        busy = "busy" in message.lower()
        hint = "; close the files that are open on it, or use --lazy" if busy else ""
        raise DeviceError(f"unmount {path}: {message}{hint}", errno.EBUSY if busy else errno.EPERM)


def _umount_command(lazy: bool) -> list[str]:
    command = shutil.which("umount")
    if command is None:
        raise NotFoundError("unmount: expected fusermount3 (package fuse3) or umount on the PATH")
    return [command, *(["-l"] if lazy else [])]


def _unescape(field: bytes) -> bytes:
    return _OCTAL.sub(lambda match: bytes([int(match[1], 8)]), field)
