"""At which address of this host workers elsewhere reach the coordinator of an import.

The option ``--listen`` says it. Otherwise it is the address from which this host reaches the Ray
cluster, or, for workers that join by a file, the one that the name of this host has, as in Slurm.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass

from dlfs.errors import DeviceError, UsageError

_ANY = "192.0.2.1"
"""An address of no host (RFC 5737): the way to it is the default route."""
_UDP_PORT = 9  # nothing is sent


@dataclass(frozen=True)
class Address:
    """An address at which the coordinator listens.

    Attributes:
        host: name or address.
        port: TCP port; 0 for any that is free.
    """

    host: str
    port: int = 0


def parse_listen(text: str) -> Address:
    """Read an address as the option ``--listen`` has it: ``HOST``, ``HOST:PORT``, ``[IPV6]:PORT``.

    Raises:
        UsageError: it is none, or of all interfaces.
    """
    matched = re.fullmatch(
        r"(?:\[([0-9a-fA-F:.]+)\]|([^\s:\[\]/]+))(?::(\d{1,5}))?", text, re.ASCII
    )
    port = int(matched[3] or 0) if matched is not None else 0
    if matched is None or port > 65535:
        raise UsageError(f"--listen {text}: expected HOST, HOST:PORT or [IPV6]:PORT, got {text!r}")
    host = matched[1] or matched[2]
    if host in ("0.0.0.0", "::"):
        raise UsageError(
            f"--listen {text}: expected the address at which the workers reach this host, got that "
            "of all interfaces"
        )
    return Address(host, port)


def named_address() -> Address:
    """Return the address that the name of this host has.

    Raises:
        DeviceError: it has none that other hosts could reach.
    """
    name = socket.gethostname()
    try:
        found = {str(row[4][0]) for row in socket.getaddrinfo(name, None)}
    except OSError:
        found = set()
    # IPv4 addresses first, as in most names of nodes.
    for each in sorted(found, key=lambda each: (":" in each, each)):
        address = ipaddress.ip_address(each.partition("%")[0])
        if not address.is_loopback and not address.is_link_local:
            return Address(each)
    got = ", ".join(sorted(found)) or "none"
    raise DeviceError(
        f"listen for workers: expected an address of {name} that other hosts reach, got {got}; "
        "give it by --listen",
        0,
    )


def address_towards(host: str | None) -> Address:
    """Return the address of this host from which it reaches another one.

    Args:
        host: name or address; None for the default route.

    Raises:
        DeviceError: it does not reach it.
    """
    target = host or _ANY
    try:
        family, _, _, _, address = socket.getaddrinfo(target, _UDP_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as made:
            made.connect(address)
            return Address(str(made.getsockname()[0]))
    except OSError as error:
        raise DeviceError(
            f"listen for workers: expected a route to {host or 'other hosts'}: "
            f"{error.strerror or error}; give the address of this host by --listen",
            error.errno or 0,
        ) from error
