"""Pools: storage nodes on which the controller composes volumes, from a file of the operator.

A call that deletes or expands a volume has its identifier and nothing else. So a StorageClass names
a pool, and the pool has the storage nodes, the hosts that may connect, and the names of keys. The
identifier is ``POOL/NAME``. A volume consists of *generations*, each of one namespace on every
storage node of the pool: the first one from its creation, and another one from each expansion. The
namespaces of generation 2 have the name ``NAME.2``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import msgspec

from dlfs.base.json_records import from_json
from dlfs.base.units import GIB, MIB, parse_bytes
from dlfs.block.host import host_nqn
from dlfs.errors import FormatError, NotFoundError, UsageError
from dlfs.fabric.composing import (
    ComposedNamespace,
    ComposingTarget,
    NamespaceRequest,
    open_target,
)

NAME_CHARACTERS_MAX = 56
"""Longest name of a volume on its storage nodes; a generation is added to it."""
GENERATIONS_MAX = 16

_POOL = re.compile(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_DIGEST_DIGITS = 16


class StorageNode(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A storage node of a pool.

    Attributes:
        target: as ``dlfs compose --target`` has it.
        address: IP address that hosts connect to.
        port: TCP port for data.
        discoveryPort: TCP port for discovery.
    """

    target: str
    address: str
    port: int = 4420
    discoveryPort: int = 8009  # noqa: N815 - as in the file


class Pool(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A pool, as in the operator's file.

    Attributes:
        nodes: its storage nodes; each volume has a member on every one.
        store: folder of the storage nodes, or name of an lvol store.
        hostNqn: NQN by which all readers and the controller connect; empty: each by its own.
        allowedHosts: NQNs of other hosts that may connect.
        dhchapKey: name of the key that hosts prove to have. ``dhchapCtrlKey``, ``tlsPsk`` likewise.
        defaultSize: size of volumes that are asked for without one.
    """

    nodes: tuple[StorageNode, ...]
    store: str
    hostNqn: str = ""  # noqa: N815
    allowedHosts: tuple[str, ...] = ()  # noqa: N815
    dhchapKey: str = ""  # noqa: N815
    dhchapCtrlKey: str = ""  # noqa: N815
    tlsPsk: str = ""  # noqa: N815
    defaultSize: str = "1GiB"  # noqa: N815

    @property
    def default_bytes(self) -> int:
        """Size of volumes that are asked for without one, in bytes."""
        return parse_bytes(self.defaultSize)


def read_pools(path: Path) -> dict[str, Pool]:
    """Read the operator's file: an object in JSON with a pool for each name.

    Raises:
        UsageError: the file cannot be read, or is wrong.
    """
    action = f"read the pools of {path}"
    try:
        pools = from_json(path.read_bytes(), dict[str, Pool])
    except OSError as error:
        raise UsageError(f"{action}: {error.strerror}") from error
    except FormatError as error:
        raise UsageError(f"{action}: {error}") from error
    for name, pool in pools.items():
        if not _POOL.fullmatch(name):
            raise UsageError(f"{action}: expected names of lower-case letters, got {name[:80]!r}")
        if not pool.nodes or len({node.target for node in pool.nodes}) < len(pool.nodes):
            raise UsageError(f"{action}: {name}: expected storage nodes, each of them once")
        if pool.default_bytes < MIB:
            raise UsageError(f"{action}: {name}: expected a defaultSize of at least 1 MiB")
        for node in pool.nodes:
            _request(pool, node, "check.1", GIB)
    return pools


def _request(pool: Pool, node: StorageNode, name: str, size_bytes: int) -> NamespaceRequest:
    hosts = dict.fromkeys([pool.hostNqn or host_nqn(), *pool.allowedHosts])
    return NamespaceRequest(
        name=name,
        size_bytes=size_bytes,
        store=pool.store,
        address=node.address,
        allowed_hosts=tuple(hosts),
        port=node.port,
        discovery_port=node.discoveryPort,
        dhchap_key=pool.dhchapKey,
        dhchap_ctrl_key=pool.dhchapCtrlKey,
        tls_psk=pool.tlsPsk,
    )


def volume_name(text: str) -> str:
    """Return the name on storage nodes of a volume that has any name in the cluster."""
    if _NAME.fullmatch(text) and len(text) <= NAME_CHARACTERS_MAX:
        return text
    digest = sha256(text.encode(errors="surrogatepass")).hexdigest()[:_DIGEST_DIGITS]
    words = re.sub(r"[^A-Za-z0-9_-]+", "-", text).strip("-_")
    return f"{words[: NAME_CHARACTERS_MAX - _DIGEST_DIGITS - 1]}-{digest}".lstrip("-_")


@dataclass(frozen=True)
class Place:
    """A volume of a pool: where its namespaces are, whether or not they exist.

    Attributes:
        pool_name: name of the pool.
        pool: the pool.
        name: name of the volume on the storage nodes.
    """

    pool_name: str
    pool: Pool
    name: str

    @property
    def volume_id(self) -> str:
        """Identifier of the volume."""
        return f"{self.pool_name}/{self.name}"

    def generations(self, targets: list[ComposingTarget]) -> list[list[ComposedNamespace | None]]:
        """Return the namespaces of each generation, in the order of the storage nodes.

        A generation whose creation was interrupted has None for what is missing.
        """
        found: list[list[ComposedNamespace | None]] = []
        for column, target in enumerate(targets):
            for each in target.list():
                name, _, generation = each.name.rpartition(".")
                if name != self.name or not generation.isdecimal():
                    continue
                while len(found) < int(generation) <= GENERATIONS_MAX:
                    found.append([None] * len(targets))
                found[int(generation) - 1][column] = each
        return found

    def compose(
        self, targets: list[ComposingTarget], generation: int, member_bytes: int
    ) -> list[ComposedNamespace]:
        """Compose the namespaces of a generation, or find them, and export them."""
        name = f"{self.name}.{generation}"
        requests = [_request(self.pool, node, name, member_bytes) for node in self.pool.nodes]
        return [target.create(request) for target, request in zip(targets, requests, strict=True)]

    def uri(self, namespace: ComposedNamespace) -> str:
        """Return the URI by which hosts open a namespace."""
        pool = self.pool
        named = {
            "hostnqn": pool.hostNqn,
            "dhchap_key": pool.dhchapKey,
            "dhchap_ctrl_key": pool.dhchapCtrlKey,
            "tls_psk": pool.tlsPsk,
        }
        return namespace.uri + "".join(f"&{key}={text}" for key, text in named.items() if text)

    def withdraw(self, targets: list[ComposingTarget]) -> None:
        """Delete all namespaces of the volume."""
        for generation in reversed(self.generations(targets)):
            for target, each in zip(targets, generation, strict=True):
                if each is not None:
                    try:
                        target.withdraw(each.name, delete=True)
                    except NotFoundError:  # another call was faster
                        continue


def open_targets(pool: Pool, stack: ExitStack) -> list[ComposingTarget]:
    """Connect to the storage nodes of a pool, until the stack is closed."""
    return [stack.enter_context(open_target(node.target)) for node in pool.nodes]


def volumes_of(
    name: str, pool: Pool, targets: list[ComposingTarget]
) -> Iterator[tuple[Place, list[ComposedNamespace]]]:
    """Yield the volumes that are on all storage nodes of a pool, and their first namespaces."""
    rows: dict[str, list[ComposedNamespace]] = {}
    for target in targets:
        for each in target.list():
            if each.name.endswith(".1"):
                rows.setdefault(each.name.removesuffix(".1"), []).append(each)
    for each_name, row in sorted(rows.items()):
        if len(row) == len(targets):
            yield Place(name, pool, each_name), row
