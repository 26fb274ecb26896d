"""The kernel: its version, io_uring, clocks."""

from __future__ import annotations

import errno
import math
import time
from collections.abc import Iterator
from pathlib import Path

import dlfs
from dlfs.base.wording import join_words
from dlfs.block.lease import DRIFT
from dlfs.diagnosis.finding import Finding, Severity, ok, problem
from dlfs.diagnosis.machine import CAP_SYS_ADMIN, Machine
from dlfs.errors import DlfsError

RELEASE = "/proc/sys/kernel/osrelease"
URING_DISABLED = "/proc/sys/kernel/io_uring_disabled"
URING_GROUP = "/proc/sys/kernel/io_uring_group"
CLOCK_SOURCE = "/sys/devices/system/clocksource/clocksource0/current_clocksource"
CLOCK_SOURCES = "/sys/devices/system/clocksource/clocksource0/available_clocksource"

NEEDED = (
    ((5, 1), Severity.ERROR, "a node service does not start: its memory cannot be sealed"),
    (
        (5, 11),
        Severity.WARNING,
        "a pool of threads reads files and disks, for io_uring has no time limits before",
    ),
    ((6, 9), Severity.NOTE, "a mount whose server dies gets no other one: it has no keeper"),
)
"""First releases of Linux that parts of DLFS need, and what happens with older ones:
``native/src/platform/memory_shared.c``, ``native/src/device/uring.c``, and the keeper of mounts."""

SLOW_CLOCKS = {"acpi_pm", "hpet", "hyperv_clocksource_msr", "jiffies", "pit", "refined-jiffies"}
"""Clock sources that a process cannot read without a system call."""

_FILTERED = 2  # value of Seccomp in /proc/self/status


def check_kernel(machine: Machine) -> Iterator[Finding]:
    """Compare the kernel's version with those that DLFS needs."""
    for needed, severity, why in NEEDED:
        if machine.kernel < needed:
            yield problem(
                "kernel",
                severity,
                got=machine.release or "nothing",
                source=RELEASE,
                expected=f"Linux {needed[0]}.{needed[1]} or newer",
                why=why,
                fix="boot a newer kernel",
            )
            return
    yield ok("kernel", f"Linux {machine.release}", RELEASE)


# ---- io_uring ------------------------------------------------------------------------------------

_THREADS = "a pool of threads reads files and disks instead, at more processor time a read"


def check_uring(machine: Machine) -> Iterator[Finding]:
    """Find out whether DLFS may use io_uring, and why not."""
    if (found := uring_refusal(machine)) is not None:
        yield found
    elif not machine.live:
        yield ok("io_uring", f"allowed ({_disabled(machine)})", URING_DISABLED)
    else:
        yield _try_uring(machine)


def uring_refusal(machine: Machine) -> Finding | None:
    """Return the finding of a sysctl that forbids this process io_uring; None if none does."""
    level = _disabled(machine)
    may_use = machine.has_capability(CAP_SYS_ADMIN) or (
        machine.number(URING_GROUP) in machine.groups
    )
    if level == 0 or (level == 1 and may_use):
        return None
    return problem(
        "io_uring",
        Severity.WARNING,
        got=str(level),
        source=URING_DISABLED,
        expected="0" if level == 2 else "0, or this user in the group kernel.io_uring_group",
        why=_THREADS,
        fix="sysctl -w kernel.io_uring_disabled=0",
    )


def _disabled(machine: Machine) -> int:
    """Return the value of the sysctl, 0 on kernels before 6.6, which do not have it."""
    return machine.number(URING_DISABLED) or 0


def _try_uring(machine: Machine) -> Finding:
    """Have libdlfs make a ring."""
    from dlfs._native.device import NativeDevice

    try:
        NativeDevice.open_file(
            dlfs.__file__, uri=Path(dlfs.__file__).name, engine="uring", buffered=True
        ).close()
    except DlfsError as error:
        return _refused_uring(machine, error)
    return ok("io_uring", "a ring can be made", "io_uring_setup(2)")


def _refused_uring(machine: Machine, error: DlfsError) -> Finding:
    number = getattr(error, "errno", None)
    if int(machine.status.get("Seccomp", "0")) == _FILTERED:
        fix = "a seccomp profile of the container that allows io_uring_setup, io_uring_enter and "
        fix += "io_uring_register (docker run --security-opt seccomp=FILE)"
    elif number == errno.ENOSYS and machine.kernel >= (5, 11):
        fix = "install liburing-dev and build DLFS again: it was built without"
    elif number == errno.ENOMEM:
        fix = "LimitMEMLOCK=infinity in the unit, or ulimit -l unlimited"
    elif number in (errno.EMFILE, errno.ENFILE):
        fix = "a higher limit of open files: see open files"
    else:
        fix = "allow io_uring to this user"
    return problem(
        "io_uring",
        Severity.WARNING,
        got=str(error).rpartition(": ")[2],
        source="io_uring_setup(2)",
        expected="a ring",
        why=_THREADS,
        fix=fix,
    )


# ---- clocks --------------------------------------------------------------------------------------


def check_clock(machine: Machine) -> Iterator[Finding]:
    """Check the clocks: their cost, their rate, and whether they are synchronized."""
    yield from _check_source(machine)
    if machine.live:
        yield _check_boot_clock()
    if (clock := machine.clock) is None:
        return
    # Each of two hosts may use half of the difference that leases allow.
    allowed = math.sqrt(DRIFT)
    if not 1 / allowed < clock.rate < allowed:
        yield problem(
            "clock",
            Severity.ERROR,
            got=f"it runs at {clock.rate:.3f} of the time",
            source="adjtimex(2)",
            expected=f"a rate within {allowed - 1:.1%} of 1",
            why="a lease of a writer ends by this clock: two hosts could write at once",
            fix="adjtimex --tick 10000 --frequency 0, then a service such as chrony",
        )
    elif clock.synchronized:
        yield ok("clock", "synchronized", "adjtimex(2)")
    else:
        yield problem(
            "clock",
            Severity.NOTE,
            got="not synchronized",
            source="adjtimex(2)",
            expected="synchronized",
            why="times in logs and of datasets may be wrong; leases do not depend on it",
            fix="apt install chrony",
        )


def _check_source(machine: Machine) -> Iterator[Finding]:
    source = machine.read(CLOCK_SOURCE)
    if source is None:
        return
    if source not in SLOW_CLOCKS:
        yield ok("clock", f"clock source {source}", CLOCK_SOURCE)
        return
    others = [
        each for each in (machine.read(CLOCK_SOURCES) or "").split() if each not in SLOW_CLOCKS
    ]
    kernel_line = "boot with tsc=reliable, if the machine's manual says that its TSC is"
    yield problem(
        "clock",
        Severity.WARNING,
        got=source,
        source=CLOCK_SOURCE,
        expected=join_words(others or ["tsc"], "or"),
        why="each look at the clock becomes a system call; DLFS looks in every round of reads",
        fix=f"echo {others[0]} >{CLOCK_SOURCE}" if others else kernel_line,
    )


def _check_boot_clock() -> Finding:
    """Read the clock of leases."""
    name = "clock_gettime(CLOCK_BOOTTIME)"
    try:
        seconds = time.clock_gettime(time.CLOCK_BOOTTIME)
    except OSError as error:
        return problem(
            "clock",
            Severity.ERROR,
            got=error.strerror or str(error),
            source=name,
            expected="the time since the start, including suspend",
            why="leases of writers are measured with it: NVMe/TCP volumes cannot be written",
            fix="a kernel or sandbox that has this clock",
        )
    return ok("clock", f"{seconds:.0f} s since the start", name)
