"""Recipes: scripts that export a device of a storage node, which an administrator runs there.

A storage node runs a stock target and no DLFS code. A recipe is a shell script with three verbs,
``start``, ``verify`` and ``undo``, for the Linux kernel's nvmet (through configfs) or SPDK's
nvmf_tgt (by JSON-RPC). For nvmet there also is the JSON that nvmetcli restores at boot, with the
same settings (a test compares them). A script's settings are at its head, quoted for the shell.

A recipe exports one device as namespace 1 of a separate subsystem, to the hosts that it names only.
A fixed UUID keeps the namespace's identity the same after every start.

Source: Linux ``drivers/nvme/target/configfs.c``; nvmetcli 0.8, ``nvmet/nvme.py`` (the JSON's
form); SPDK 26.05's JSON-RPC and the ``spdk`` client of PyPI, 26.9.
"""

from __future__ import annotations

import inspect
import ipaddress
import json
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any
from uuid import NAMESPACE_URL, UUID, uuid5

from dlfs.block.uri import DISCOVERY_PORT, NQN_BYTES_MAX, NVME_TCP_PORT
from dlfs.errors import UsageError
from dlfs.fabric.tls_identity import derive, expand

PATH_BYTES_MAX = 4095
PORT_ID_MAX = 8192
"""Highest port ID of nvmetcli. Recipes use the TCP port as port ID."""
KEYS = "/etc/dlfs/keys"
"""Directory of a storage node with a file for each host's key, named as the host, and the
controller's key, named as the subsystem. The name of a host's TLS key ends in ``.tls``."""
DISCOVERY_NQN = "nqn.2014-08.org.nvmexpress.discovery"

# NQNs become folder names in configfs: no slash, and nothing that a shell would interpret.
_NQN = re.compile(r"nqn\.\d{4}-\d{2}\.[A-Za-z0-9._:+@=-]+")


@dataclass(frozen=True, kw_only=True)
class Export:
    """The device that a recipe exports, its addresses, and the hosts that may connect.

    Args:
        device: absolute path of a block device or file on the storage node.
        address: IP address of the storage node that trainers connect to.
        allowed_hosts: NQNs of the hosts that may connect, at least one.
        nqn: NQN of the subsystem; by default derived from address, port and device.
        port: TCP port for data, 1..65535.
        discovery_port: TCP port for discovery; may be the same.
        auth: demand the keys that are in ``KEYS`` on the storage node.
        tls: encrypt all connections with the TLS keys that are in ``KEYS``.

    Raises:
        UsageError: a value is invalid.
    """

    device: str
    address: str
    allowed_hosts: tuple[str, ...]
    nqn: str = ""
    port: int = NVME_TCP_PORT
    discovery_port: int = DISCOVERY_PORT
    auth: bool = False
    tls: bool = False

    def __post_init__(self) -> None:
        _check_device(self.device)
        _check_address(self.address)
        if not self.nqn:
            uuid = uuid5(NAMESPACE_URL, f"nvme-tcp://{self.address}:{self.port}{self.device}")
            object.__setattr__(self, "nqn", f"nqn.2014-08.org.nvmexpress:uuid:{uuid}")
        if not self.allowed_hosts:
            raise UsageError(
                "make a recipe: expected the NQN of each host that may connect, got none"
            )
        for nqn in (self.nqn, *self.allowed_hosts):
            _check_nqn(nqn)
        for port in self.ports:
            if not 1 <= port <= 65535:
                raise UsageError(f"make a recipe: expected a port 1..65535, got {port}")

    @property
    def uuid(self) -> UUID:
        """UUID of the namespace, derived from the subsystem's NQN."""
        return uuid5(NAMESPACE_URL, self.nqn)

    @property
    def family(self) -> str:
        """Family of the address: ``ipv4`` or ``ipv6``."""
        return f"ipv{ipaddress.ip_address(self.address).version}"

    @property
    def ports(self) -> tuple[int, ...]:
        """The TCP ports, each once."""
        return tuple(dict.fromkeys((self.port, self.discovery_port)))


def _check_device(device: str) -> None:
    if not device.startswith("/") or not device.isprintable():
        raise UsageError(
            f"make a recipe: expected the absolute path of a device, printable, got {device!a}"
        )
    if len(device.encode()) > PATH_BYTES_MAX:
        raise UsageError(f"make a recipe: expected a path of at most {PATH_BYTES_MAX} bytes")


def _check_address(address: str) -> None:
    try:
        found = ipaddress.ip_address(address)
    except ValueError as error:
        raise UsageError(
            f"make a recipe: expected the IP address that trainers connect to, got {address!a}"
        ) from error
    if found.is_unspecified or found.is_multicast or "%" in address:
        raise UsageError(f"make a recipe: expected one address of the storage node, got {address}")


def _check_nqn(nqn: str) -> None:
    if len(nqn) > NQN_BYTES_MAX or not _NQN.fullmatch(nqn) or nqn == DISCOVERY_NQN:
        raise UsageError(
            f"make a recipe: expected an NQN (nqn.yyyy-mm.domain:name) of letters, digits and "
            f". _ : + @ = -, at most {NQN_BYTES_MAX} bytes, got {nqn[:300]!a}"
        )


# ---- scripts -------------------------------------------------------------------------------------


def _settings(export: Export) -> dict[str, str]:
    return {
        "device": export.device,
        "nqn": export.nqn,
        "uuid": str(export.uuid),
        "family": export.family,
        "address": export.address,
        "ports": " ".join(map(str, export.ports)),
        "allowed_hosts": " ".join(export.allowed_hosts),
        "keys": KEYS if export.auth else "",
        "tls_keys": KEYS if export.tls else "",
    }


def script(template: str, settings: Mapping[str, str]) -> str:
    """Return a script of ``templates``, with its settings quoted for the shell.

    Args:
        template: name of the file.
        settings: values of the shell's variables, by name.
    """
    lines = (f"{name}={shlex.quote(value)}" for name, value in settings.items())
    text = _template(template).replace("@NVMET_FUNCTIONS@\n", _template("nvmet_functions.sh"))
    text = text.replace("@EXPORT_FUNCTIONS@\n", _template("export_functions.sh"))
    imports = "import base64, hashlib, hmac, subprocess, sys, zlib\n"
    tls_identity = "\n".join([imports, inspect.getsource(expand), inspect.getsource(derive)])
    text = text.replace("@TLS_IDENTITY@", tls_identity)
    return text.replace("@SETTINGS@", "\n".join(lines))


def _template(name: str) -> str:
    return resources.files("dlfs.fabric").joinpath("templates", name).read_text("utf-8")


def nvmet_script(export: Export) -> str:
    """Return a shell script for the kernel's target."""
    return script("nvmet.sh", _settings(export))


def spdk_script(export: Export) -> str:
    """Return a shell script for SPDK's target."""
    further = {
        "bdev": f"dlfs-{export.uuid.hex[:12]}",
        "port": str(export.port),
        "discovery_port": str(export.discovery_port),
    }
    return script("spdk.sh", {**_settings(export), **further})


# ---- nvmetcli ------------------------------------------------------------------------------------


def nvmetcli_json(export: Export) -> str:
    """Return the JSON of ``nvmetcli restore`` with the same settings for the kernel's target.

    Raises:
        UsageError: a port is above nvmetcli's highest port number, or keys are demanded.
    """
    if export.auth or export.tls:
        raise UsageError("make a recipe: nvmetcli does not set keys; use nvmet or spdk")
    if max(export.ports) > PORT_ID_MAX:
        raise UsageError(
            f"make a recipe: nvmetcli takes ports up to {PORT_ID_MAX}, got {max(export.ports)}"
        )
    config = {
        "hosts": [{"nqn": host} for host in export.allowed_hosts],
        "ports": [_nvmetcli_port(export, port) for port in export.ports],
        "subsystems": [
            {
                "allowed_hosts": list(export.allowed_hosts),
                "attr": {"allow_any_host": "0"},
                "namespaces": [
                    {
                        "device": {"path": export.device, "uuid": str(export.uuid)},
                        "enable": 1,
                        "nsid": 1,
                    }
                ],
                "nqn": export.nqn,
            }
        ],
    }
    return json.dumps(config, indent=2) + "\n"


def _nvmetcli_port(export: Export, port: int) -> dict[str, Any]:
    return {
        "addr": {
            "adrfam": export.family,
            "traddr": export.address,
            "trsvcid": str(port),
            "trtype": "tcp",
        },
        "portid": port,
        "subsystems": [export.nqn],
    }


RECIPES: Mapping[str, Callable[[Export], str]] = {
    "nvmet": nvmet_script,
    "nvmetcli": nvmetcli_json,
    "spdk": spdk_script,
}
"""Functions that return a recipe, by its kind."""
