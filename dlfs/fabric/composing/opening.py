"""Connects to the target of a storage node, which a text names."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from dlfs.errors import UsageError
from dlfs.fabric.composing.nvmet import NvmetTarget
from dlfs.fabric.composing.spdk import SpdkTarget
from dlfs.fabric.composing.target import ComposingTarget

SPDK_SOCKET = "/var/tmp/spdk.sock"
"""Socket of nvmf_tgt's JSON-RPC, by default."""


def open_target(where: str = "nvmet") -> ComposingTarget:
    """Connect to the target of a storage node.

    Args:
        where: ``nvmet``, the kernel of this machine; ``nvmet+ssh://[USER@]HOST[:PORT]``, that of
            another one; ``spdk`` or ``spdk:SOCKET``, an nvmf_tgt of this machine;
            ``spdk://ADDRESS:PORT``, one whose JSON-RPC listens at a TCP address.

    Raises:
        UsageError: a malformed target, or the package ``spdk`` is not installed.
        DeviceLostError: no connection to nvmf_tgt.
    """
    if where == "nvmet":
        return NvmetTarget()
    if where == "spdk" or (where.startswith("spdk:/") and not where.startswith("spdk://")):
        return SpdkTarget(where.removeprefix("spdk").removeprefix(":") or SPDK_SOCKET)
    parts = urlsplit(where)
    try:
        port = parts.port
    except ValueError:
        port = -1
    bare = not (parts.path or parts.query or parts.fragment or parts.password) and port != -1
    if bare and parts.scheme == "nvmet+ssh" and parts.hostname and parts.hostname[0] != "-":
        return NvmetTarget(parts.hostname, user=parts.username or "", port=port)
    if bare and parts.scheme == "spdk" and parts.hostname and port and not parts.username:
        _check_address(parts.hostname, where)
        return SpdkTarget(parts.hostname, port)
    raise UsageError(
        f"compose: expected the target nvmet, nvmet+ssh://[USER@]HOST, spdk, spdk:SOCKET or "
        f"spdk://ADDRESS:PORT, got {where[:200]!a}"
    )


def _check_address(text: str, where: str) -> None:
    try:
        ipaddress.ip_address(text)
    except ValueError as error:
        raise UsageError(f"compose: {where}: expected an IP address, got {text!a}") from error
