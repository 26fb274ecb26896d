"""Namespaces to compose, and composed ones."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from uuid import NAMESPACE_URL, UUID, uuid5

from dlfs.base.units import MIB, format_bytes
from dlfs.errors import UsageError
from dlfs.fabric.recipes import Export

MODEL = "DLFS composed"
"""Model number of the subsystems that are composed; it tells them from others."""

FILE_SUFFIX = ".namespace"
"""Suffix of the files that hold the bytes of namespaces, in the folder that is their store."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_STORE = re.compile(r"/[A-Za-z0-9._/-]{0,1023}|[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def check_name(name: str) -> None:
    """Check the name of a composed namespace.

    Raises:
        UsageError: it is no name.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"compose: expected a name of at most 63 letters, digits, '.', '_' and '-', "
            f"got {name[:100]!a}"
        )


def check_size(size_bytes: int) -> None:
    """Check the size of a namespace, in bytes.

    Raises:
        UsageError: it is not a multiple of 1 MiB, or not positive.
    """
    if size_bytes <= 0 or size_bytes % MIB:
        raise UsageError(
            f"compose: expected a size that is a multiple of 1 MiB, got {size_bytes} bytes"
        )


@dataclass(frozen=True, kw_only=True)
class NamespaceRequest(Export):
    """A namespace to compose on a storage node, and its export.

    Args:
        name: name, unique on the target.
        size_bytes: size, a multiple of 1 MiB.
        store: place of its bytes: the absolute path of a folder of the storage node or, on SPDK
            only, the name of an lvol store.
        address: IP address of the storage node that hosts connect to.
        allowed_hosts: NQNs of the hosts that may connect, at least one.
        nqn: NQN of its subsystem; by default derived from address, store and name.
        port: TCP port for data.
        discovery_port: TCP port for discovery; may be the same.
        dhchap_key: name of the key, of this machine's key directory, that each host must prove to
            have; empty: none.
        dhchap_ctrl_key: name of the key that the target proves to have; empty: none.
        tls_psk: name of the key that encrypts all connections; empty: none. On SPDK only.

    Raises:
        UsageError: a value is invalid.
    """

    name: str
    size_bytes: int
    store: str
    device: str = field(init=False, default="")
    auth: bool = field(init=False, default=False)
    tls: bool = field(init=False, default=False)
    dhchap_key: str = ""
    dhchap_ctrl_key: str = ""
    tls_psk: str = ""

    def __post_init__(self) -> None:
        check_name(self.name)
        check_size(self.size_bytes)
        if not _STORE.fullmatch(self.store) or ".." in self.store.split("/"):
            raise UsageError(
                f"compose {self.name}: expected the absolute path of a folder, or the name of an "
                f"lvol store, of letters, digits, '.', '_', '-' and '/', got {self.store[:100]!a}"
            )
        if self.dhchap_ctrl_key and not self.dhchap_key:
            raise UsageError(
                f"compose {self.name}: expected a dhchap_key with the dhchap_ctrl_key, got none"
            )
        object.__setattr__(self, "device", f"/{self.store.strip('/')}/{self.name}")
        if not self.nqn:
            place = f"nvme-tcp://{self.address}{self.device}"
            made = f"nqn.2014-08.org.nvmexpress:uuid:{uuid5(NAMESPACE_URL, place)}"
            object.__setattr__(self, "nqn", made)
        super().__post_init__()

    @property
    def in_folder(self) -> bool:
        """True if the store is a folder, so that the bytes are those of a file."""
        return self.store.startswith("/")

    @property
    def file(self) -> str:
        """Path of the file in the folder that is the store."""
        return f"{self.store.rstrip('/')}/{self.name}{FILE_SUFFIX}"

    @property
    def key_options(self) -> str:
        """The options that a trainer's URI needs for the keys, each after an ampersand."""
        names = ("dhchap_key", "dhchap_ctrl_key", "tls_psk")
        return "".join(f"&{name}={getattr(self, name)}" for name in names if getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class ComposedNamespace:
    """A namespace that was composed on a storage node.

    Attributes:
        name: its name.
        nqn: NQN of its subsystem; it is namespace 1.
        uuid: UUID of the namespace.
        size_bytes: its size.
        backing: file or lvol that holds its bytes.
        listeners: addresses and ports of its subsystem, such as ``10.0.0.11:4420``.
        allowed_hosts: NQNs of the hosts that may connect.
        authenticated_hosts: NQNs of those that must prove to have a key.
    """

    name: str
    nqn: str
    uuid: UUID
    size_bytes: int
    backing: str
    listeners: tuple[str, ...]
    allowed_hosts: tuple[str, ...]
    authenticated_hosts: tuple[str, ...] = ()

    @property
    def uri(self) -> str:
        """Device URI of the namespace, without names of keys; empty if nothing listens."""
        return f"nvme-tcp://{self.listeners[0]}/{self.nqn}?nsid=1" if self.listeners else ""


def format_listener(address: str, port: str) -> str:
    """Return an address and a port as in a URI, an IPv6 address in brackets."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def check_resize(found: ComposedNamespace, size_bytes: int, *, shrink: bool) -> None:
    """Check the new size of a namespace.

    Raises:
        UsageError: the size is invalid, or smaller than now without ``shrink``.
    """
    check_size(size_bytes)
    if size_bytes < found.size_bytes and not shrink:
        raise UsageError(
            f"resize {found.name}: expected at least {format_bytes(found.size_bytes)}, its size, "
            f"got {format_bytes(size_bytes)}; shrink=True loses the bytes behind that"
        )
