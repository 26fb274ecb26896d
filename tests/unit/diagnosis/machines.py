"""A machine that is set up well, as a tree of files, in which a test plants a misconfiguration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dlfs._native.clock import KernelClock
from dlfs.diagnosis.doctor import examine
from dlfs.diagnosis.finding import Finding
from dlfs.diagnosis.machine import Machine

LIMIT = "{:<26}{:<21}{:<21}{}\n"
LIMITS = {
    "Max file size": ("unlimited", "unlimited"),
    "Max data size": ("unlimited", "unlimited"),
    "Max processes": ("96365", "96365"),
    "Max open files": ("1024", "524288"),
    "Max locked memory": ("unlimited", "unlimited"),
    "Max address space": ("unlimited", "unlimited"),
}
STATUS = """Name:\tdlfs
Uid:\t1000\t1000\t1000\t1000
Gid:\t1000\t1000\t1000\t1000
Groups:\t100 1000
Threads:\t3
CapEff:\t0000000000000000
NoNewPrivs:\t0
Seccomp:\t0
THP_enabled:\t1
"""
MOUNTS = """22 27 0:21 / /proc rw,relatime - proc proc rw
25 24 0:23 / /dev/shm rw,nosuid,nodev - tmpfs tmpfs rw,size=8g
31 23 0:28 / /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw
"""
GROUP = "/sys/fs/cgroup/user.slice/job"
MACHINE_ID = "3d1219c7c4c5404aaa1f6d2a48adfda4"
WELL_SET = {
    "/proc/sys/kernel/osrelease": "6.12.0-13-amd64",
    "/proc/sys/kernel/io_uring_disabled": "0",
    "/proc/sys/kernel/io_uring_group": "-1",
    "/proc/self/status": STATUS,
    "/proc/self/uid_map": "         0          0 4294967295",
    "/proc/self/cgroup": "0::/user.slice/job",
    "/proc/self/mountinfo": MOUNTS,
    "/proc/meminfo": "MemTotal: 67108864 kB\nSwapTotal: 0 kB\nCommitLimit: 33554432 kB\n"
    "Committed_AS: 1048576 kB\nHugePages_Total: 0\nHugePages_Free: 0\n",
    "/proc/sys/vm/overcommit_memory": "0",
    "/proc/sys/vm/swappiness": "60",
    "/proc/sys/fs/fuse/max_pages_limit": "256",
    "/proc/sys/fs/fuse/default_request_timeout": "0",
    "/proc/sys/fs/fuse/max_request_timeout": "0",
    "/proc/sys/fs/leases-enable": "1",
    "/proc/sys/net/core/somaxconn": "4096",
    "/proc/sys/net/ipv4/tcp_rmem": "4096\t131072\t6291456",
    "/proc/sys/net/ipv4/tcp_wmem": "4096\t16384\t4194304",
    "/proc/sys/net/ipv4/tcp_window_scaling": "1",
    "/proc/sys/net/ipv4/tcp_moderate_rcvbuf": "1",
    f"{GROUP}/memory.max": "max",
    f"{GROUP}/memory.current": "1073741824",
    f"{GROUP}/memory.stat": "anon 536870912\ninactive_file 268435456",
    f"{GROUP}/pids.max": "max",
    f"{GROUP}/pids.current": "12",
    "/sys/module/fuse/parameters/enable_uring": "N",
    "/sys/module/fuse/parameters/max_user_bgreq": "7866",
    "/sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
    "/sys/devices/system/clocksource/clocksource0/current_clocksource": "tsc",
    "/sys/devices/system/clocksource/clocksource0/available_clocksource": "tsc hpet acpi_pm",
    "/dev/fuse": "",
    "/dev/shm/x": "",
    "/usr/bin/fusermount3": "",
    "/etc/fuse.conf": "# comment\nuser_allow_other\n",
    "/etc/machine-id": MACHINE_ID,
}

Files = Mapping[str, str | None]


def limits(**changed: tuple[str, str]) -> str:
    """Return the text of /proc/self/limits; changed limits by their names with underscores."""
    rows = LIMITS | {name.replace("_", " "): each for name, each in changed.items()}
    head = LIMIT.format("Limit", "Soft Limit", "Hard Limit", "Units")
    return head + "".join(LIMIT.format(name, *each, "") for name, each in rows.items())


def plant(root: Path, files: Files, clock: KernelClock | None = None) -> Machine:
    """Return a machine that is set up well but for some files; None removes one."""
    for name, text in {**WELL_SET, "/proc/self/limits": limits(), **files}.items():
        if text is not None:
            path = root / name.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text.rstrip("\n") + "\n")
    helper = root / "usr/bin/fusermount3"
    if helper.exists():
        helper.chmod(0o4755)
    return Machine(root, clock=clock or KernelClock(synchronized=True, rate=1.00001))


def problems(machine: Machine) -> list[Finding]:
    """Return what is found but for that with which all is well."""
    return [finding for finding in examine(machine) if finding.severity]
