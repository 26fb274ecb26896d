"""Checks for mounting: /dev/fuse, fusermount3, the kernel's parameters, security modules.

Root mounts by mount(2), other users by fusermount3; everybody unmounts by fusermount3 where it is
installed (``dlfs.mount.mountpoint``).
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import replace

from dlfs.base.deadlines import CALL_TIMEOUT_MS
from dlfs.base.threads import run_in_time
from dlfs.diagnosis.checks.kernel import uring_refusal
from dlfs.diagnosis.finding import Finding, Severity, ok, problem
from dlfs.diagnosis.machine import CAP_SYS_ADMIN, STAT_SECONDS, Machine

DEVICE = "/dev/fuse"
CONFIG = "/etc/fuse.conf"
ENABLE_URING = "/sys/module/fuse/parameters/enable_uring"
BACKGROUND = "/sys/module/fuse/parameters/max_user_bgreq"
PAGES = "/proc/sys/fs/fuse/max_pages_limit"
TIMEOUTS = ("/proc/sys/fs/fuse/default_request_timeout", "/proc/sys/fs/fuse/max_request_timeout")
STATUS = "/proc/self/status"
APPARMOR = "/sys/module/apparmor/parameters/enabled"
APPARMOR_PROFILES = "/sys/kernel/security/apparmor/profiles"
APPARMOR_RULES = ("/etc/apparmor.d/fusermount3", "/etc/apparmor.d/local/fusermount3")
SELINUX = "/sys/fs/selinux/enforce"
LABEL = "/proc/self/attr/current"

FILE_SYSTEM_TYPE = "fuse.dlfs"
READ_AHEAD_PAGES = 256
"""Pages of the kernel's largest request that a mount asks for: 1 MiB (``native/fuse``)."""
BACKGROUND_MAX = 64
"""Requests of the kernel's own read-ahead that a mount asks for (``native/fuse/operations.c``)."""
KEEPER_SECONDS = 60
"""Time for which the keeper of a mount starts servers that fail (``FAILING_SECONDS_MAX``)."""
MOUNTS_MAX = 1000
"""Default of mount_max in /etc/fuse.conf: mounts of all users but root."""


def check_device(machine: Machine) -> Iterator[Finding]:
    """Check that the kernel offers FUSE, and that this user can mount.

    Most containers read mounts that are made outside: what one lacks for mounting is a note.
    """
    findings = [_find_device(machine)]
    findings += [_check_root(machine)] if machine.uid == 0 else _check_helper(machine)
    most = Severity.NOTE if machine.container else Severity.ERROR
    for each in findings:
        yield replace(each, severity=min(each.severity, most))


def _find_device(machine: Machine) -> Finding:
    got = "found"
    if not machine.exists(DEVICE):
        got = "no such file"
    elif machine.live and machine.uid == 0:
        try:
            os.close(os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC))
        except OSError as error:
            got = error.strerror or str(error)
    if got == "found":
        return ok("fuse", got, DEVICE)
    return problem(
        "fuse",
        Severity.ERROR,
        got=got,
        source=DEVICE,
        expected="a device that can be opened",
        why="nothing can be mounted; the Python API works without",
        fix="modprobe fuse; in a container: docker run --device /dev/fuse",
    )


def _check_root(machine: Machine) -> Finding:
    if machine.has_capability(CAP_SYS_ADMIN):
        return ok("fuse", "root may mount", STATUS)
    return problem(
        "fuse",
        Severity.ERROR,
        got="root without CAP_SYS_ADMIN",
        source=STATUS,
        expected="CAP_SYS_ADMIN",
        why="mount(2) is refused",
        fix="docker run --cap-add SYS_ADMIN, or mount outside and pass the descriptor by "
        "'dlfs hold' and 'dlfs mount --holder'",
    )


# ---- fusermount3 ---------------------------------------------------------------------------------


def _check_helper(machine: Machine) -> Iterator[Finding]:
    """Check fusermount3, by which users other than root mount."""
    places = [f"{folder}/fusermount3" for folder in os.environ.get("PATH", "").split(":") if folder]
    found = next((place for place in places if machine.exists(place)), None)
    if found is None:
        yield _helper_problem("not on the PATH", "$PATH", "apt install fuse3")
    elif not _is_privileged(machine, found):
        fix = f"chown root {found} && chmod 4755 {found}"
        yield _helper_problem("it does not run as root", found, fix)
    elif machine.status.get("NoNewPrivs") == "1":
        fix = "NoNewPrivileges=no in the unit; in a container, allow privilege escalation"
        yield _helper_problem("this process may gain no privileges (NoNewPrivs: 1)", STATUS, fix)
    else:
        yield ok("fusermount3", "runs as root", found)
    yield from _check_config(machine)


def _is_privileged(machine: Machine, path: str) -> bool:
    """Return True if a program runs with the rights of root: by its mode or by capabilities."""
    place = machine.path(path)
    found = place.stat()
    by_mode = bool(found.st_mode & stat.S_ISUID) and (found.st_uid == 0 or not machine.live)
    try:
        return by_mode or bool(os.getxattr(place, "security.capability"))
    except OSError:
        return by_mode


def _helper_problem(got: str, source: str, fix: str) -> Finding:
    return problem(
        "fusermount3",
        Severity.ERROR,
        got=got,
        source=source,
        expected="a program that runs as root",
        why="only root can mount without it",
        fix=fix,
    )


def _check_config(machine: Machine) -> Iterator[Finding]:
    """Check the limits that /etc/fuse.conf sets to users other than root."""
    lines = [line.strip() for line in (machine.read(CONFIG) or "").splitlines()]
    if "user_allow_other" in lines:
        yield ok("fusermount3", "user_allow_other", CONFIG)
    else:
        yield problem(
            "fusermount3",
            Severity.NOTE,
            got="no line user_allow_other",
            source=CONFIG,
            expected="user_allow_other",
            why="'dlfs mount --allow-other' is refused to users other than root",
            fix=f"echo user_allow_other >>{CONFIG}",
        )
    values = [re.fullmatch(r"mount_max\s*=\s*(-?\d+)", line) for line in lines]
    allowed = next((int(each[1]) for each in reversed(values) if each), MOUNTS_MAX)
    count = sum(mount.kind.partition(".")[0] in ("fuse", "fuseblk") for mount in machine.mounts)
    if 0 <= allowed <= count:
        yield problem(
            "fusermount3",
            Severity.ERROR,
            got=f"{count} mounts, mount_max {allowed}",
            source=CONFIG,
            expected=f"a mount_max above {count}",
            why="fusermount3 refuses another mount",
            fix=f"mount_max = {max(MOUNTS_MAX, 2 * count)} in {CONFIG}",
        )


# ---- parameters of the kernel --------------------------------------------------------------------


def check_parameters(machine: Machine) -> Iterator[Finding]:
    """Check the kernel's parameters for mounts."""
    yield from _check_uring(machine)
    pages = machine.number(PAGES)
    if pages is not None and pages < READ_AHEAD_PAGES:
        yield problem(
            "fuse",
            Severity.WARNING,
            got=str(pages),
            source=PAGES,
            expected=f"{READ_AHEAD_PAGES} or more",
            why=f"the kernel asks a mount for {4 * pages} KiB at a time, instead of 1 MiB",
            fix=f"sysctl -w fs.fuse.max_pages_limit={READ_AHEAD_PAGES}",
        )
    elif pages is not None:
        yield ok("fuse", f"requests of {pages} pages", PAGES)
    background = machine.number(BACKGROUND)
    if background is not None and 0 < background < BACKGROUND_MAX and machine.uid:
        yield problem(
            "fuse",
            Severity.WARNING,
            got=str(background),
            source=BACKGROUND,
            expected=f"{BACKGROUND_MAX} or more",
            why="the kernel reads fewer files of a mount ahead at once",
            fix=f"echo {BACKGROUND_MAX} >{BACKGROUND}",
        )
    yield from _check_timeouts(machine)


def _check_uring(machine: Machine) -> Iterator[Finding]:
    offered = machine.read(ENABLE_URING)
    if offered != "Y":
        got = "the kernel does not have it" if offered is None else "N: requests by /dev/fuse"
        yield ok("fuse", got, ENABLE_URING)
    elif uring_refusal(machine) is not None:
        yield problem(
            "fuse",
            Severity.WARNING,
            got="Y, but this user may not use io_uring",
            source=ENABLE_URING,
            expected="both, or neither",
            why="requests come by /dev/fuse, and a mount has no keeper",
            fix=f"dlfs mount --no-uring, or echo N >{ENABLE_URING}",
        )
    else:
        yield problem(
            "fuse",
            Severity.NOTE,
            got="Y: requests by io_uring",
            source=ENABLE_URING,
            expected="N where a mount must outlive its server",
            why="a mount over io_uring is faster, and has no keeper",
            fix="dlfs mount --no-uring, for a keeper",
        )


def _check_timeouts(machine: Machine) -> Iterator[Finding]:
    """Check the time after which the kernel aborts a mount that has not answered."""
    needed = KEEPER_SECONDS + CALL_TIMEOUT_MS // 1000
    for name in TIMEOUTS:
        seconds = machine.number(name)
        if seconds is not None and 0 < seconds < needed:
            yield problem(
                "fuse",
                Severity.WARNING,
                got=f"{seconds} s",
                source=name,
                expected=f"0, or {needed} s and more",
                why="the kernel ends a mount whose device or server is away for longer",
                fix=f"sysctl -w fs.fuse.{name.rpartition('/')[2]}=0",
            )


def check_mounts(machine: Machine) -> Iterator[Finding]:
    """Find mounts of DLFS whose server does not answer."""
    points = [mount.point for mount in machine.mounts if mount.kind == FILE_SYSTEM_TYPE]
    for point in points if machine.live else ():
        try:
            run_in_time(lambda point=point: os.statvfs(point), STAT_SECONDS)  # type: ignore[misc]
        except TimeoutError as error:
            yield _dead_mount(point, str(error), f"dlfs umount --lazy {point}")
        except OSError as error:
            if error.errno == errno.EACCES:
                continue  # another user's
            yield _dead_mount(point, error.strerror or str(error), f"dlfs umount {point}")
        else:
            yield ok("mounts", "answers", point)


def _dead_mount(point: str, got: str, fix: str) -> Finding:
    return problem(
        "mounts",
        Severity.ERROR,
        got=got,
        source=point,
        expected="an answer of its server",
        why="programs that use this mount fail or wait",
        fix=f"{fix}, then dlfs mount",
    )


# ---- security modules ----------------------------------------------------------------------------


def check_apparmor(machine: Machine) -> Iterator[Finding]:
    """Check AppArmor's rules for fusermount3 and for this process."""
    if machine.read(APPARMOR) != "Y":
        yield ok("apparmor", "not enabled", APPARMOR)
        return
    label = machine.read(LABEL) or "unconfined"
    if label.rstrip("\0").endswith("(enforce)"):
        yield problem(
            "apparmor",
            Severity.NOTE,
            got=label.rstrip("\0"),
            source=LABEL,
            expected="unconfined, or a profile with a rule for mount",
            why="the profiles of container engines forbid mount(2)",
            fix="docker run --security-opt apparmor=unconfined",
        )
    profiles = machine.read(APPARMOR_PROFILES)
    loaded = [line for line in (profiles or "").splitlines() if line.startswith("fusermount3 ")]
    if profiles is None and machine.exists(APPARMOR_RULES[0]):
        loaded = ["fusermount3 (of an unknown mode)"]  # only root can read which are loaded
    if not loaded or loaded[0].endswith("(complain)"):
        yield ok("apparmor", "no rules for fusermount3", APPARMOR_PROFILES)
        return
    yield _fusermount_rules(machine)


def _fusermount_rules(machine: Machine) -> Finding:
    """Return the finding of a profile that limits where fusermount3 mounts."""
    text = "\n".join(machine.read(name) or "" for name in APPARMOR_RULES)
    rules = re.findall(r"^\s*mount\s.*?->\s*\"?(.+?)\"?,\s*$", text, re.MULTILINE)
    where = ", ".join(dict.fromkeys(rules)) or "the directories of the profile"
    kept = "options=(nosuid,nodev) options in (ro,rw)"
    return problem(
        "apparmor",
        Severity.NOTE,
        got=f"fusermount3 mounts on {where}",
        source=APPARMOR_RULES[0],
        expected="your mount points among these",
        why="elsewhere, users other than root cannot mount, and nobody can unmount",
        fix=f"lines 'mount fstype=fuse.dlfs {kept} -> /data/**/,' and 'umount /data/**/,' in "
        f"{APPARMOR_RULES[1]}, then apparmor_parser -r {APPARMOR_RULES[0]}",
    )


def check_selinux(machine: Machine) -> Iterator[Finding]:
    """Check SELinux's domain of this process."""
    if machine.read(SELINUX) != "1":
        got = "not enabled" if machine.read(SELINUX) is None else "permissive"
        yield ok("selinux", got, SELINUX)
        return
    label = (machine.read(LABEL) or "").rstrip("\0")
    domain = label.split(":")[2] if label.count(":") >= 2 else "unknown"
    if domain == "unconfined_t":
        yield ok("selinux", "enforcing; this process is unconfined", LABEL)
        return
    is_container = domain.startswith("container_t")
    yield problem(
        "selinux",
        Severity.WARNING if is_container else Severity.NOTE,
        got=f"enforcing, domain {domain}",
        source=LABEL,
        expected="a domain that may mount FUSE",
        why="the policy may forbid fusermount3 or /dev/fuse to this domain",
        fix="docker run --security-opt label=disable"
        if is_container
        else "ausearch -m avc -c fusermount3 shows what was denied",
    )
