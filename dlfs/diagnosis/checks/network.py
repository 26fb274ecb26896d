"""TCP's settings, which connections to targets depend on, and the kernel's own target.

DLFS does not set the sizes of sockets' buffers: the kernel adapts them, up to net.ipv4.tcp_rmem and
tcp_wmem. So net.core.rmem_max and wmem_max, which limit what programs ask for, are no matter.
"""

from __future__ import annotations

from collections.abc import Iterator

from dlfs.base.units import MIB, format_bytes
from dlfs.diagnosis.finding import Finding, Severity, ok, problem
from dlfs.diagnosis.machine import Machine

TCP = "/proc/sys/net/ipv4"
NVMET = "/sys/kernel/config/nvmet"
LEASES = "/proc/sys/fs/leases-enable"
BACKLOG = "/proc/sys/net/core/somaxconn"

BUFFER_BYTES_MIN = MIB
"""Least maximum of a socket's buffer, in bytes: half of it is in flight, 0.5 GB/s at 1 ms."""
BACKLOG_MIN = 128
"""Clients that may wait to connect to a node service (``dlfs.service.sockets.BACKLOG``)."""


def check_tcp(machine: Machine) -> Iterator[Finding]:
    """Check the settings that limit the window of a connection."""
    sound = True
    for name, of_what in (("tcp_rmem", "reads"), ("tcp_wmem", "writes")):
        sizes = (machine.read(f"{TCP}/{name}") or "").split()
        if len(sizes) != 3 or int(sizes[2]) >= BUFFER_BYTES_MIN:
            continue
        sound = False
        yield problem(
            "tcp",
            Severity.WARNING,
            got=f"at most {format_bytes(int(sizes[2]))}",
            source=f"{TCP}/{name}",
            expected=f"{format_bytes(BUFFER_BYTES_MIN)} or more",
            why=f"a connection to a target has no more of {of_what} in flight than half of this",
            fix=f"sysctl -w net.ipv4.{name}='{sizes[0]} {sizes[1]} {6 * MIB}'",
        )
    for name, why in (
        ("tcp_window_scaling", "a connection has at most 64 KiB in flight"),
        ("tcp_moderate_rcvbuf", "the kernel does not enlarge the buffers of connections"),
    ):
        if machine.number(f"{TCP}/{name}") == 0:
            sound = False
            yield problem(
                "tcp",
                Severity.WARNING,
                got="0",
                source=f"{TCP}/{name}",
                expected="1",
                why=why,
                fix=f"sysctl -w net.ipv4.{name}=1",
            )
    if sound and machine.exists(f"{TCP}/tcp_rmem"):
        largest = int((machine.read(f"{TCP}/tcp_rmem") or "0").split()[-1])
        yield ok("tcp", f"buffers grow up to {format_bytes(largest)}", f"{TCP}/tcp_rmem")


def check_system(machine: Machine) -> Iterator[Finding]:
    """Check the other settings of the kernel: leases of files, connections that wait."""
    if machine.number(LEASES) == 0:
        yield problem(
            "leases",
            Severity.WARNING,
            got="0",
            source=LEASES,
            expected="1",
            why="'dlfs seal' does not notice that a program still has a file open for writing",
            fix="sysctl -w fs.leases-enable=1",
        )
    elif machine.exists(LEASES):
        yield ok("leases", "of files are enabled", LEASES)
    waiting = machine.number(BACKLOG)
    if waiting is not None and waiting < BACKLOG_MIN:
        yield problem(
            "backlog",
            Severity.WARNING,
            got=str(waiting),
            source=BACKLOG,
            expected=f"{BACKLOG_MIN} or more",
            why="processes that connect to a node service at once wait for each other",
            fix="sysctl -w net.core.somaxconn=4096",
        )
    elif waiting is not None:
        yield ok("backlog", str(waiting), BACKLOG)


def check_export(machine: Machine) -> Iterator[Finding]:
    """Check what this machine exports by the kernel's target, as a storage node."""
    ports = machine.names(f"{NVMET}/ports")
    if not ports:
        yield ok("nvmet", "exports nothing here", NVMET)
        return
    over_tcp = [
        port for port in ports if machine.read(f"{NVMET}/ports/{port}/addr_trtype") == "tcp"
    ]
    if over_tcp and not machine.exists("/sys/module/nvmet_tcp"):
        yield problem(
            "nvmet",
            Severity.ERROR,
            got=f"port {over_tcp[0]} is for tcp, and the module is not loaded",
            source="/sys/module/nvmet_tcp",
            expected="the module",
            why="trainers cannot connect to this storage node",
            fix="modprobe nvmet-tcp, then start the export again",
        )
    opened = [
        name
        for name in machine.names(f"{NVMET}/subsystems")
        if machine.read(f"{NVMET}/subsystems/{name}/attr_allow_any_host") == "1"
    ]
    for name in opened:
        yield problem(
            "nvmet",
            Severity.WARNING,
            got="1",
            source=f"{NVMET}/subsystems/{name}/attr_allow_any_host",
            expected="0, and a list of hosts",
            why="every host that reaches this one can read and write the device",
            fix="'dlfs target recipe --allow NQN' makes an export for named hosts only",
        )
    if not opened and (not over_tcp or machine.exists("/sys/module/nvmet_tcp")):
        yield ok("nvmet", f"{len(ports)} ports, hosts are listed", NVMET)
