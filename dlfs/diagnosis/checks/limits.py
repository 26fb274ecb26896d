"""Limits of the process: open files, locked memory, threads, addresses, sizes of files."""

from __future__ import annotations

from collections.abc import Iterator

from dlfs.base.units import MIB, format_bytes
from dlfs.diagnosis.checks.memory import default_bytes
from dlfs.diagnosis.finding import Finding, Severity, ok, problem
from dlfs.diagnosis.machine import CAP_IPC_LOCK, CAP_SYS_ADMIN, CAP_SYS_RESOURCE, Machine

LIMITS = "/proc/self/limits"

FILES_MIN = 1024
"""Open files of a process that reads: a volume of 64 members over NVMe/TCP takes some 400."""
SERVICE_FILES_MIN = 4096
"""Open files of a node service, which raises its limit to the hard one: four or five a client."""
THREADS_MIN = 256
"""Threads that one process may need: up to 128 of a mount, and some for each member."""

ADDRESS_BYTES, DATA_BYTES = 512 * MIB, 256 * MIB
"""Addresses, and private memory, of a process that reads, beside its memory for samples."""


def check_files(machine: Machine) -> Iterator[Finding]:
    """Check the limits of open files."""
    soft, hard = machine.limit("Max open files")
    if soft is not None and soft < FILES_MIN:
        yield problem(
            "open files",
            Severity.WARNING,
            got=str(soft),
            source=LIMITS,
            expected=f"{FILES_MIN} or more",
            why="volumes of many members, and datasets with many readers, cannot be opened",
            fix=f"ulimit -n {FILES_MIN}, or LimitNOFILE=65536 in the unit",
        )
    elif hard is not None and hard < SERVICE_FILES_MIN:
        yield problem(
            "open files",
            Severity.WARNING,
            got=f"{soft}, at most {hard}",
            source=LIMITS,
            expected=f"at most {SERVICE_FILES_MIN} or more",
            why="a node service raises its limit no higher, and takes four or five for each client",
            fix="LimitNOFILE=65536 in the unit, or a line '* hard nofile 65536' in "
            "/etc/security/limits.conf",
        )
    else:
        yield ok("open files", f"{_shown(soft)}, at most {_shown(hard)}", LIMITS)


def _shown(limit: int | None) -> str:
    return "unlimited" if limit is None else str(limit)


def check_locked_memory(machine: Machine) -> Iterator[Finding]:
    """Check the limit of locked memory, which counts the buffers that io_uring has registered."""
    soft, _ = machine.limit("Max locked memory")
    needed = default_bytes(machine)
    if machine.has_capability(CAP_IPC_LOCK) and not machine.in_user_namespace:
        yield ok("locked memory", "unlimited by CAP_IPC_LOCK", "/proc/self/status")
    elif soft is None or soft >= needed:
        got = "unlimited" if soft is None else format_bytes(soft)
        yield ok("locked memory", got, LIMITS)
    else:
        yield problem(
            "locked memory",
            Severity.NOTE,
            got=format_bytes(soft),
            source=LIMITS,
            expected=f"{format_bytes(needed)} or more, the memory for samples of a volume",
            why="io_uring cannot register this memory, and the kernel looks its pages up at each "
            "read of a file or disk",
            fix="LimitMEMLOCK=infinity in the unit, or a line '* - memlock unlimited' in "
            "/etc/security/limits.conf",
        )


# ---- threads -------------------------------------------------------------------------------------


def check_threads(machine: Machine) -> Iterator[Finding]:
    """Check how many threads this user and this control group may still start."""
    found = list(_thread_limits(machine))
    for left, got, source, fix in found:
        if left >= THREADS_MIN:
            yield ok("threads", got, source)
            continue
        yield problem(
            "threads",
            Severity.WARNING,
            got=got,
            source=source,
            expected=f"{THREADS_MIN} or more that can be started",
            why="a mount, a service or an epoch fails when a thread is refused",
            fix=fix,
        )
    if not found:
        yield ok("threads", "no limit for this user, nor of a control group", LIMITS)


def _thread_limits(machine: Machine) -> Iterator[tuple[int, str, str, str]]:
    """Yield what is left of each limit, its description, its source and how to raise it."""
    soft, _ = machine.limit("Max processes")
    exempt = not machine.in_user_namespace and (
        machine.uid == 0
        or machine.has_capability(CAP_SYS_RESOURCE)
        or machine.has_capability(CAP_SYS_ADMIN)
    )
    if soft is not None and not exempt:
        used = _count_threads(machine)
        fix = "ulimit -u unlimited, or LimitNPROC=infinity in the unit"
        yield soft - used, f"{used} of {soft} of this user", LIMITS, fix
    for folder in _pid_groups(machine):
        most, used_there = (machine.number(f"{folder}/pids.{name}") for name in ("max", "current"))
        if most is not None and used_there is not None:
            fix = "TasksMax=infinity in the unit, or docker run --pids-limit -1"
            got = f"{used_there} of {most} of the control group"
            yield most - used_there, got, f"{folder}/pids.max", fix


def _count_threads(machine: Machine) -> int:
    """Return how many threads the processes of this user have, as far as they can be seen."""
    count = 0
    for name in machine.names("/proc"):
        text = machine.read(f"/proc/{name}/status") if name.isdecimal() else None
        fields = dict(line.partition(":")[::2] for line in (text or "").splitlines())
        if fields.get("Uid", "").split()[:1] == [str(machine.uid)]:
            count += int(fields.get("Threads", "0"))
    return count


def _pid_groups(machine: Machine) -> Iterator[str]:
    """Yield the directories of the process's control groups that count processes."""
    for line in (machine.read("/proc/self/cgroup") or "").splitlines():
        number, controllers, path = line.split(":", 2)
        for mount in machine.mounts:
            unified = number == "0" and mount.kind == "cgroup2"
            counts = "pids" in controllers.split(",") and "pids" in mount.options
            if unified or (counts and mount.kind == "cgroup"):
                yield f"{mount.point}{path}".rstrip("/")


# ---- sizes ---------------------------------------------------------------------------------------


def check_sizes(machine: Machine) -> Iterator[Finding]:
    """Check the limits of addresses, of private memory and of files."""
    needed = default_bytes(machine)
    whole = "samples cannot be read: the memory for them is refused"
    of_files = "large files cannot be made, nor the memory that a node service shares"
    rows = (
        ("Max address space", needed + ADDRESS_BYTES, "-v", "LimitAS", whole),
        ("Max data size", needed + DATA_BYTES, "-d", "LimitDATA", whole),
        ("Max file size", None, "-f", "LimitFSIZE", of_files),
    )
    sound = True
    for name, least, option, setting, why in rows:
        soft, _ = machine.limit(name)
        if soft is None or (least is not None and soft >= least):
            continue
        sound = False
        wanted = "unlimited" if least is None else f"{format_bytes(least)}, or unlimited"
        yield problem(
            "sizes",
            Severity.WARNING,
            got=f"{name[4:]} {format_bytes(soft)}",
            source=LIMITS,
            expected=wanted,
            why=why,
            fix=f"ulimit {option} unlimited, or {setting}=infinity in the unit",
        )
    if sound:
        yield ok("sizes", "no limit of addresses, memory or files is too low", LIMITS)
