"""The options of a mount, which both servers take."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field

from dlfs.base.arguments import check_choice
from dlfs.base.memory_limit import default_memory_bytes
from dlfs.errors import UsageError

FILE_SYSTEM_NAME = "dlfs"
FILE_MODE_DEFAULT = 0o444
BUSY_POLL_US = 200
"""Default busy polling, in microseconds: longer than a small read of most disks takes, and longer
than a program pauses between two files."""
BUSY_POLL_US_MAX = 10_000

SERVERS = ("auto", "native", "pyfuse3")

DEVICE_TRANSPORT = "/dev/fuse"
URING_TRANSPORT = "io_uring"
"""Ways by which the kernel sends requests to a server: reads of /dev/fuse, or io_uring."""

OnReady = Callable[[str, str], None]
"""Called with the absolute path of the mount point and the transport when a mount answers."""


@dataclass(frozen=True, kw_only=True)
class MountOptions:
    """Options of a mount.

    Attributes:
        uid: owner of every file; this process's user by default.
        gid: group of every file; this process's group by default.
        file_mode: permission bits of files, without write; directories get x where these have r.
        allow_other: admit other users; /etc/fuse.conf must permit it unless root mounts.
        cache_bytes: memory for samples of all datasets, also those of open files; pyfuse3 takes a
            quarter more for copies. By default a share of what the process may use.
        incoming: absolute path of the staging area, to which ``incoming`` is a symbolic link; None:
            the mount has no ``incoming``.
        fuse: the server: ``native``, ``pyfuse3``, or ``auto`` (native if possible).
        busy_poll_us: longest busy polling of the native server for a device's answer or the next
            request, before a thread sleeps; 0: none. It polls only while one program uses the
            mount, and pauses polling while the polls find nothing.
        restart: if the native server of a mount in the background dies, another one takes its
            place, where the system permits it (``keeper``).
        uring: have the kernel send requests to the native server over io_uring, if it can.
        nested: show each volume in a directory of its own.
    """

    uid: int = field(default_factory=os.getuid)
    gid: int = field(default_factory=os.getgid)
    file_mode: int = FILE_MODE_DEFAULT
    allow_other: bool = False
    cache_bytes: int = field(default_factory=default_memory_bytes)
    incoming: str | None = None
    fuse: str = "auto"
    busy_poll_us: int = BUSY_POLL_US
    restart: bool = True
    uring: bool = True
    nested: bool = False

    def __post_init__(self) -> None:
        if self.file_mode & ~0o555:
            raise UsageError(
                f"mount: expected a mode of read and execute bits (at most 555), "
                f"got {self.file_mode:o}"
            )
        if self.uid < 0 or self.gid < 0 or self.cache_bytes < 0:
            raise UsageError(
                f"mount: expected uid, gid and memory of at least 0, "
                f"got {self.uid}, {self.gid} and {self.cache_bytes}"
            )
        if not 0 <= self.busy_poll_us <= BUSY_POLL_US_MAX:
            raise UsageError(
                f"mount: expected busy polling of 0 to {BUSY_POLL_US_MAX} us, "
                f"got {self.busy_poll_us}"
            )
        if self.nested and self.incoming is not None:
            raise UsageError(
                "mount: what programs write goes to one volume; mount that without others and "
                "without --nested, with --incoming, on a directory of its own"
            )
        check_choice(self.fuse, SERVERS, option="fuse", action="mount")

    @property
    def directory_mode(self) -> int:
        """Permission bits of sealed directories."""
        return self.file_mode | (self.file_mode & 0o444) >> 2

    def for_kernel(self) -> list[str]:
        """Return the options with which the sealed datasets are mounted."""
        words = ["default_permissions", "ro", f"fsname={FILE_SYSTEM_NAME}", "subtype=dlfs"]
        return words + (["allow_other"] if self.allow_other else [])
