"""The identity by which targets know this host.

What relies on it: lists of allowed hosts on targets, keys of authentication, and NVMe reservations,
by which a target tells the writer from hosts that it shuts out. The lease of a writer does not: its
record has a random number of its own (``dlfs.block.lease``). So of two hosts with one identity, one
may write with the reservation of the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from uuid import uuid4

from dlfs.block.host import HostFiles, find_contradiction, find_identity
from dlfs.diagnosis.finding import Finding, Severity, ok, problem
from dlfs.diagnosis.machine import Machine
from dlfs.errors import UsageError

NQN, ID, MACHINE = "/etc/nvme/hostnqn", "/etc/nvme/hostid", "/etc/machine-id"
_PREFIX = "nqn.2014-08.org.nvmexpress:uuid:"


def check_identity(machine: Machine) -> Iterator[Finding]:
    """Check the NQN and the ID of this host, and whether another one may have the same."""
    files = HostFiles(*(machine.path(name) for name in (NQN, ID, MACHINE)))
    try:
        nqn, host_id = find_identity(files=files)
    except UsageError as error:
        yield _no_identity(machine, str(error))
        return
    stated = bool(machine.read(NQN) or machine.read(ID))
    source = f"{NQN}, {ID}" if stated else MACHINE
    if find_contradiction(nqn, host_id):
        yield problem(
            "identity",
            Severity.WARNING,
            got=f"{nqn}, and the host ID {host_id}",
            source=source,
            expected="the same UUID in both",
            why="targets, and reservations on them, may take the two for different hosts",
            fix=f"echo {nqn.removeprefix(_PREFIX)} >{ID}",
        )
    elif not stated and (container := _image_of(machine)):
        yield problem(
            "identity",
            Severity.WARNING,
            got=f"a machine ID of the container's image ({container})",
            source=MACHINE,
            expected="an ID of this container alone",
            why="all containers of the image are one host to targets: reservations do not tell "
            "their writers apart",
            fix=f"echo {_PREFIX}{uuid4()} >{NQN}, or hostnqn= and hostid= in URIs",
        )
    else:
        yield ok("identity", nqn, source)


def _no_identity(machine: Machine, message: str) -> Finding:
    """Return the finding of a host without identity, or with a malformed one."""
    malformed = next((name for name in (NQN, ID) if f"read {machine.path(name)}:" in message), None)
    own = uuid4()
    fix = f"mkdir -p /etc/nvme && echo {_PREFIX}{own} >{NQN} && echo {own} >{ID}"
    got = message.rpartition("got ")[2] if malformed else _shown_id(machine)
    expected = {NQN: "an NQN (nqn.yyyy-mm...)", ID: "a UUID"}.get(malformed or "")
    return problem(
        "identity",
        Severity.NOTE if machine.container and not malformed else Severity.ERROR,
        got=got,
        source=malformed or MACHINE,
        expected=expected or f"32 hexadecimal digits, or an NQN in {NQN}",
        why="NVMe/TCP volumes cannot be opened without hostnqn= and hostid= in their URIs",
        fix=fix if malformed or machine.container else f"systemd-machine-id-setup, or {fix}",
    )


def _shown_id(machine: Machine) -> str:
    text = machine.read(MACHINE)
    if text is None:
        return "no such file"
    return ascii(text[:40]) if text else "an empty file"


def _image_of(machine: Machine) -> str | None:
    """Return the sign of a container whose machine ID is a file of its image; None otherwise."""
    return machine.container if machine.mount_of(MACHINE) is None else None
