"""``examine``: runs the checks of a machine, one after the other.

To add a check, write a function that takes a ``Machine`` and yields ``Finding``s, and list it in
``CHECKS``. It reads files through the machine only, and needs no rights: what cannot be read is no
finding, or one that says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from dlfs.base.arguments import check_choice
from dlfs.diagnosis.checks import (
    identity,
    kernel,
    limits,
    memory,
    mounting,
    network,
    targets,
    versions,
)
from dlfs.diagnosis.finding import Finding, Severity, problem
from dlfs.diagnosis.machine import Machine

Check = Callable[[Machine], Iterator[Finding]]

CHECKS: tuple[Check, ...] = (
    versions.check_versions,
    kernel.check_kernel,
    kernel.check_uring,
    kernel.check_clock,
    mounting.check_device,
    mounting.check_parameters,
    mounting.check_apparmor,
    mounting.check_selinux,
    mounting.check_mounts,
    memory.check_groups,
    memory.check_swap,
    memory.check_overcommit,
    memory.check_huge_pages,
    memory.check_shared_memory,
    limits.check_files,
    limits.check_locked_memory,
    limits.check_threads,
    limits.check_sizes,
    network.check_tcp,
    network.check_system,
    network.check_export,
    identity.check_identity,
)

NAMES = (
    *("versions", "kernel", "io_uring", "clock", "fuse", "fusermount3", "apparmor", "selinux"),
    *("mounts", "memory", "swap", "overcommit", "huge pages", "shared memory", "open files"),
    *("locked memory", "threads", "sizes", "tcp", "leases", "backlog", "nvmet", "identity"),
    *("target", "volume", "service"),
)
"""Names that findings have."""


def examine(
    machine: Machine, named: Sequence[str] = (), *, skip: Sequence[str] = ()
) -> Iterator[Finding]:
    """Examine a machine, and what the user named; yield the findings as they are made.

    Args:
        machine: the machine.
        named: volumes, devices, storage nodes and services, as on the command line.
        skip: names of checks whose findings are left out, of ``NAMES``.

    Raises:
        UsageError: what is named is no URI, or no check has a name to be left out.
    """
    for name in skip:
        check_choice(name, NAMES, option="skip", action="examine the machine")
    for check in CHECKS if machine.status else (versions.check_versions, _miss_proc):
        for finding in _run(check, machine):
            if finding.check not in skip:
                yield finding
    for finding in targets.check_targets(machine, named):
        if finding.check not in skip:
            yield finding


def _miss_proc(_: Machine) -> Iterator[Finding]:
    """Yield the finding of a system without /proc, where most settings cannot be read."""
    yield problem(
        "kernel",
        Severity.ERROR,
        got="no such file",
        source="/proc/self/status",
        expected="/proc, which most of these checks read",
        why="nothing can be mounted, and other processes are not seen",
        fix="mount -t proc proc /proc, or a container that shows it",
    )


def _run(check: Check, machine: Machine) -> Iterator[Finding]:
    """Run a check. Files of /proc that have another form than expected are a finding, too."""
    try:
        yield from check(machine)
    except (OSError, ValueError) as error:
        yield problem(
            check.__name__.removeprefix("check_").replace("_", " "),
            Severity.NOTE,
            got=str(error),
            source=str(machine.root),
            expected="files of a known form",
            why="this check could not be made",
            fix="report it, with the version of the kernel",
        )


def worst(findings: Sequence[Finding]) -> Severity:
    """Return the highest severity of findings."""
    return max((finding.severity for finding in findings), default=Severity.OK)
