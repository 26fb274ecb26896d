"""``Machine``: reads the settings of a machine and of this process below a root directory.

With the root ``/`` it is this machine. A test gives a directory with copies of some files of /proc,
/sys and /etc instead; then nothing but these files is read, and ``live`` is False.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dlfs._native.clock import KernelClock, read_kernel_clock
from dlfs.base.forks import cached_property
from dlfs.base.threads import run_in_time

STAT_SECONDS = 2.0
"""Longest wait for a file system to report its state, in seconds."""

CAP_IPC_LOCK, CAP_SYS_ADMIN, CAP_SYS_RESOURCE = 14, 21, 24
"""Numbers of capabilities, capabilities(7)."""

CONTAINERS = ("/.dockerenv", "/run/.containerenv", "/run/systemd/container")
"""Files that container engines and systemd-nspawn make."""
CONTAINER_VARIABLES = ("container", "KUBERNETES_SERVICE_HOST")
"""Environment variables that container engines, and Kubernetes, set."""

_ESCAPED = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class MountLine:
    """A line of /proc/self/mountinfo.

    Attributes:
        point: the mount point.
        options: options of the mount and of the file system.
        kind: type of the file system.
    """

    point: str
    options: frozenset[str]
    kind: str


class Machine:
    """The settings of a machine, and of the process that reads them.

    Args:
        root: directory below which the files are read.
        clock: state of the kernel's clock; by default that of this machine, if the root is ``/``.

    Attributes:
        root: as given.
        live: True if the root is ``/``: then system calls tell about the same machine.
    """

    def __init__(self, root: str | Path = "/", *, clock: KernelClock | None = None) -> None:
        self.root = Path(root)
        self.live = self.root == Path("/")
        self._clock = clock

    def path(self, name: str) -> Path:
        """Return where a file is that has this absolute path on the machine."""
        return self.root / name.lstrip("/")

    def read(self, name: str) -> str | None:
        """Return the text of a file, without white space at its ends; None if it is unreadable."""
        try:
            return self.path(name).read_text("utf-8", "replace").strip()
        except OSError:
            return None

    def number(self, name: str) -> int | None:
        """Return the number in a file; None if it has none, or is unreadable."""
        text = self.read(name)
        return int(text) if text is not None and re.fullmatch(r"-?\d+", text) else None

    def exists(self, name: str) -> bool:
        """Return True if there is such a file that this process can see."""
        try:
            return self.path(name).exists()
        except OSError:
            return False

    def names(self, folder: str) -> list[str]:
        """Return the sorted names in a folder; none if it is unreadable."""
        try:
            return sorted(os.listdir(self.path(folder)))
        except OSError:
            return []

    # ---- the process -----------------------------------------------------------------------------

    @cached_property
    def status(self) -> dict[str, str]:
        """The fields of /proc/self/status."""
        lines = (self.read("/proc/self/status") or "").splitlines()
        return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}

    @cached_property
    def uid(self) -> int:
        """Effective user ID of the process."""
        ids = self.status.get("Uid", "").split()
        return int(ids[1]) if len(ids) > 1 else os.geteuid()

    @cached_property
    def groups(self) -> set[int]:
        """All groups of the process, its effective one included."""
        ids = self.status.get("Gid", "").split()[1:2] + self.status.get("Groups", "").split()
        return {int(each) for each in ids}

    def has_capability(self, number: int) -> bool:
        """Return True if the process has a capability."""
        return bool(int(self.status.get("CapEff", "0"), 16) >> number & 1)

    @cached_property
    def in_user_namespace(self) -> bool:
        """True if the process is in another user namespace than the machine's first one."""
        lines = (self.read("/proc/self/uid_map") or "0 0 4294967295").split()
        return lines != ["0", "0", "4294967295"]

    @cached_property
    def container(self) -> str | None:
        """The sign by which the process is known to be in a container; None if there is none."""
        file = next((name for name in CONTAINERS if self.exists(name)), None)
        variables = (f"${name}" for name in CONTAINER_VARIABLES if name in os.environ)
        return file or (next(variables, None) if self.live else None)

    def limit(self, name: str) -> tuple[int | None, int | None]:
        """Return the soft and the hard limit of a resource, by its name in /proc/self/limits.

        None stands for no limit, also if the file does not have it.
        """
        text = self.read("/proc/self/limits") or ""
        found = re.search(rf"^{re.escape(name)}\s+(\S+)\s+(\S+)", text, re.MULTILINE)
        soft, hard = found.groups() if found else ("unlimited", "unlimited")
        return (
            int(soft) if soft.isdecimal() else None,
            int(hard) if hard.isdecimal() else None,
        )

    # ---- the machine -----------------------------------------------------------------------------

    @cached_property
    def release(self) -> str:
        """Release of the kernel."""
        found = self.read("/proc/sys/kernel/osrelease")
        return found or (platform.release() if self.live else "")

    @cached_property
    def kernel(self) -> tuple[int, int]:
        """Version of the kernel; (0, 0) if it is unknown."""
        found = re.match(r"(\d+)\.(\d+)", self.release)
        return (int(found[1]), int(found[2])) if found else (0, 0)

    @cached_property
    def memory(self) -> dict[str, int]:
        """The fields of /proc/meminfo, sizes in bytes."""
        found = {}
        for line in (self.read("/proc/meminfo") or "").splitlines():
            words = line.split()
            if len(words) > 1 and words[1].isdecimal():
                found[words[0].rstrip(":")] = int(words[1]) * (1024 if len(words) > 2 else 1)
        return found

    @cached_property
    def mounts(self) -> list[MountLine]:
        """The mounts that the process sees, in the order in which they were made."""
        return list(self._read_mounts())

    def _read_mounts(self) -> Iterator[MountLine]:
        for line in (self.read("/proc/self/mountinfo") or "").splitlines():
            before, _, after = line.partition(" - ")
            words, others = before.split(" "), after.split(" ", 2)
            if len(words) > 5 and len(others) == 3:
                point = _ESCAPED.sub(lambda found: chr(int(found[1], 8)), words[4])
                options = frozenset(f"{words[5]},{others[2]}".split(","))
                yield MountLine(point, options, others[0])

    def mount_of(self, point: str) -> MountLine | None:
        """Return what is mounted at a mount point; None if nothing is."""
        return next((each for each in reversed(self.mounts) if each.point == point), None)

    @cached_property
    def clock(self) -> KernelClock | None:
        """State of the kernel's clock; None if it cannot be read."""
        if self._clock is None and self.live:
            try:
                return read_kernel_clock()
            except OSError:
                return None
        return self._clock

    def free_bytes(self, folder: str) -> int:
        """Return how many bytes a file system has free for this user.

        Raises:
            TimeoutError: it does not answer.
            OSError: it cannot be asked.
        """
        found = run_in_time(lambda: os.statvfs(self.path(folder)), STAT_SECONDS)
        return (found.f_bavail if self.uid else found.f_bfree) * found.f_frsize
