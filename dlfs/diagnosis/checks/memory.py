"""Memory: limits of control groups, swap, huge pages, overcommitment, /dev/shm.

The mount option noexec of /dev/shm is no matter: nothing is executed from there.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from dlfs.base.memory_limit import (
    MEMORY_VARIABLE,
    VOLUME_BYTES_MAX,
    VOLUME_SHARE,
    find_limits,
)
from dlfs.base.units import KIB, MIB, format_bytes
from dlfs.diagnosis.finding import Finding, Severity, ok, problem
from dlfs.diagnosis.machine import Machine

MEMINFO = "/proc/meminfo"
MOUNTS = "/proc/self/mountinfo"
STATUS = "/proc/self/status"
TRANSPARENT = "/sys/kernel/mm/transparent_hugepage/enabled"
RESERVED = "/proc/sys/vm/nr_hugepages"
OVERCOMMIT = "/proc/sys/vm/overcommit_memory"
SHARED = "/dev/shm"

DEPTH = 128
"""Default of ``depth`` of ``dlfs.open``: requests in flight to each member."""
CHUNK_BYTES = 256 * KIB
"""Default size of a chunk, which is the largest request for samples."""
SAMPLE_BYTES_MIN = 2 * DEPTH * CHUNK_BYTES
"""Memory that a full queue of requests takes, and batches in use as much again, in bytes."""
SHARED_BYTES_SMALL = 64 * MIB
"""Size of /dev/shm in a container by default: a directory of a million samples fills it."""
SHARED_BYTES_MIN = 4 * MIB
"""Free space in /dev/shm below which directories of a few thousand samples do not fit."""

_COLLAPSING = (6, 1)  # the first kernel with MADV_COLLAPSE, which needs no setting
_STRICT = 2  # value of vm.overcommit_memory


def default_bytes(machine: Machine) -> int:
    """Return the memory for samples that a volume has by default on a machine, in bytes."""
    limits = [limit for limit, _ in _limits(machine)]
    allowed = min([machine.memory.get("MemTotal", 1 << 62), *limits])
    return min(VOLUME_BYTES_MAX, allowed // VOLUME_SHARE)


def _limits(machine: Machine) -> list[tuple[int, Path]]:
    return list(find_limits(machine.path("/proc/self"), machine.root))


def _as_named(machine: Machine, path: Path) -> str:
    """Return the absolute path that a file has on the machine."""
    return f"/{path.relative_to(machine.root)}"


# ---- control groups and swap ---------------------------------------------------------------------


def check_groups(machine: Machine) -> Iterator[Finding]:
    """Check the limits of memory of the process's control groups."""
    total = machine.memory.get("MemTotal", 1 << 62)
    limits = [(limit, path) for limit, path in _limits(machine) if limit < total]
    if not limits:
        yield ok("memory", f"{format_bytes(total)}, no limit of a control group", MEMINFO)
    for limit, path in limits:
        yield _check_group(machine, limit, path)


def _check_group(machine: Machine, limit: int, path: Path) -> Finding:
    source = _as_named(machine, path)
    share = default_bytes(machine)
    used = _used_bytes(path.parent)
    throttles = path.name == "memory.high"
    setting = "MemoryHigh=" if throttles else "MemoryMax="
    if limit // VOLUME_SHARE < SAMPLE_BYTES_MIN:
        return problem(
            "memory",
            Severity.WARNING,
            got=format_bytes(limit),
            source=source,
            expected=f"{format_bytes(VOLUME_SHARE * SAMPLE_BYTES_MIN)} or more",
            why=f"samples of a volume get {format_bytes(share)}, an eighth of it: too little for "
            f"a full queue of {DEPTH} requests",
            fix=f"a higher limit ({setting} of the unit, docker run --memory, Slurm's --mem), or "
            f"{MEMORY_VARIABLE}={format_bytes(SAMPLE_BYTES_MIN).replace(' ', '')}",
        )
    if used is not None and used + share > limit:
        return problem(
            "memory",
            Severity.WARNING,
            got=f"{format_bytes(used)} of {format_bytes(limit)} in use",
            source=source,
            expected=f"{format_bytes(share)} free, the memory for samples of a volume",
            why="the kernel slows the processes of the group down"
            if throttles
            else "the kernel kills a process of the group when memory is short",
            fix=f"a higher limit ({setting} of the unit, docker run --memory, Slurm's --mem), or "
            f"a smaller {MEMORY_VARIABLE}",
        )
    return ok("memory", f"{format_bytes(limit)}; by default {format_bytes(share)} of it", source)


def _used_bytes(group: Path) -> int | None:
    """Return the memory of a control group that the kernel cannot take back from its page cache."""
    for usage, cache in (
        ("memory.current", "inactive_file"),
        ("memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            used = int((group / usage).read_text())
            lines = (group / "memory.stat").read_text().split("\n")
        except (OSError, ValueError):
            continue
        counts = dict(line.split() for line in lines if line)
        return max(0, used - int(counts.get(cache, 0)))
    return None


def check_swap(machine: Machine) -> Iterator[Finding]:
    """Check whether memory for samples may be swapped out."""
    total = machine.memory.get("SwapTotal", 0)
    limits = [path.with_name("memory.swap.max") for _, path in _limits(machine)]
    forbidden = any(_reads_zero(path) for path in limits)
    if total == 0 or forbidden:
        got = "none" if total == 0 else "none for this control group"
        yield ok("swap", got, MEMINFO)
        return
    yield problem(
        "swap",
        Severity.NOTE,
        got=f"{format_bytes(total)}, swappiness {machine.read('/proc/sys/vm/swappiness')}",
        source=MEMINFO,
        expected="none for processes with samples in memory",
        why="samples in memory are not locked there: read from swap, they come slower than from "
        "the volume",
        fix="MemorySwapMax=0 in the unit, or swapoff -a",
    )


def _reads_zero(path: Path) -> bool:
    try:
        return path.read_text().strip() == "0"
    except OSError:
        return False


def check_overcommit(machine: Machine) -> Iterator[Finding]:
    """Check that the kernel grants the memory for samples before it is used."""
    mode = machine.number(OVERCOMMIT)
    if mode is None:
        return
    if mode != _STRICT:
        yield ok("overcommit", str(mode), OVERCOMMIT)
        return
    left = machine.memory.get("CommitLimit", 0) - machine.memory.get("Committed_AS", 0)
    needed = default_bytes(machine)
    if left >= needed:
        yield ok("overcommit", f"2, {format_bytes(left)} are left", OVERCOMMIT)
        return
    yield problem(
        "overcommit",
        Severity.ERROR,
        got=f"2, {format_bytes(max(0, left))} are left to be promised",
        source=f"{OVERCOMMIT}, {MEMINFO}",
        expected=f"{format_bytes(needed)}, the memory for samples of a volume",
        why="a dataset cannot be opened: the kernel promises no more memory",
        fix=f"sysctl -w vm.overcommit_memory=0, or a smaller {MEMORY_VARIABLE}",
    )


# ---- huge pages ----------------------------------------------------------------------------------


def check_huge_pages(machine: Machine) -> Iterator[Finding]:
    """Check whether memory for samples gets huge pages."""
    reserved, free = (machine.memory.get(f"HugePages_{name}", 0) for name in ("Total", "Free"))
    if reserved:
        yield ok("huge pages", f"{free} of {reserved} reserved ones are free", RESERVED)
    setting = machine.read(TRANSPARENT)
    source = TRANSPARENT
    if machine.status.get("THP_enabled") == "0":
        setting, source = "off for this process (THP_enabled: 0)", STATUS
    elif setting is None and not machine.exists("/sys/kernel/mm"):
        return  # /sys is not mounted
    elif setting is None:
        setting = "the kernel does not have them"
    elif "[never]" not in setting:
        yield ok("huge pages", setting, source)
        return
    yield problem(
        "huge pages",
        Severity.NOTE if machine.kernel >= _COLLAPSING or free else Severity.WARNING,
        got=setting,
        source=source,
        expected="madvise or always",
        why="memory for samples and directories has pages of 4 KiB: more of its addresses must be "
        "translated anew",
        fix=f"echo madvise >{TRANSPARENT}"
        if source == TRANSPARENT
        else "a program before that does not switch them off (PR_SET_THP_DISABLE)",
    )


# ---- /dev/shm ------------------------------------------------------------------------------------

_PRIVATE = "each process has its own copy of the directories of datasets, and reads it at the start"


def check_shared_memory(machine: Machine) -> Iterator[Finding]:
    """Check /dev/shm, where the processes of a user share the directories of datasets."""
    mount = machine.mount_of(SHARED)
    if mount is None or not machine.exists(SHARED):
        where = machine.exists(SHARED)
        yield _unshared(
            "a directory, no file system of its own" if where else "no such directory",
            MOUNTS,
            "tmpfs",
            f"mount -t tmpfs -o mode=1777 tmpfs {SHARED}",
            Severity.NOTE if where else Severity.WARNING,
        )
        return
    if mount.kind != "tmpfs":
        fix = f"mount -t tmpfs -o mode=1777 tmpfs {SHARED}"
        yield _unshared(mount.kind, MOUNTS, "tmpfs", fix, Severity.NOTE)
    if "ro" in mount.options:
        yield _unshared("read-only", MOUNTS, "rw", f"mount -o remount,rw {SHARED}")
    elif machine.live and not os.access(SHARED, os.W_OK | os.X_OK):
        yield _unshared("this user may not write", SHARED, "mode 1777", f"chmod 1777 {SHARED}")
    else:
        yield _check_room(machine)
    yield from _check_owner(machine)


def _unshared(
    got: str, source: str, expected: str, fix: str, severity: Severity = Severity.WARNING
) -> Finding:
    return problem(
        "shared memory",
        severity,
        got=got,
        source=source,
        expected=expected,
        why=_PRIVATE,
        fix=fix,
    )


def _check_room(machine: Machine) -> Finding:
    """Check the free space of the file system."""
    try:
        free = machine.free_bytes(SHARED)
    except (OSError, TimeoutError) as error:
        return _unshared(str(error), SHARED, "a file system that answers", f"umount -l {SHARED}")
    if free > SHARED_BYTES_SMALL:
        return ok("shared memory", f"{format_bytes(free)} free", SHARED)
    return problem(
        "shared memory",
        Severity.NOTE if free >= SHARED_BYTES_MIN else Severity.WARNING,
        got=f"{format_bytes(free)} free",
        source=SHARED,
        expected=f"more than {format_bytes(SHARED_BYTES_SMALL)}: 32 bytes a sample, and its path",
        why=f"where a directory does not fit, {_PRIVATE}",
        fix=f"mount -o remount,size=1g {SHARED}, or docker run --shm-size 1g",
    )


def _check_owner(machine: Machine) -> Iterator[Finding]:
    """Check the user's directory in it, which DLFS does not use if others can write there."""
    name = f"{SHARED}/dlfs-{machine.uid}"
    try:
        found = machine.path(name).lstat()
    except OSError:
        return
    owned = found.st_uid == machine.uid or not machine.live
    closed = not stat.S_IMODE(found.st_mode) & (stat.S_IRWXG | stat.S_IRWXO)
    if stat.S_ISDIR(found.st_mode) and owned and closed:
        return
    yield _unshared(
        f"mode {stat.S_IMODE(found.st_mode):04o} of user {found.st_uid}",
        name,
        f"a directory of user {machine.uid}, mode 0700",
        f"rm -r {name}",
    )
