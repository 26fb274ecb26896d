"""Namespaces on SPDK's nvmf_tgt: each is a logical volume (lvol) of an lvol store, or a file.

The calls are those of SPDK's JSON-RPC, made by the client of the package ``spdk``. nvmf_tgt loses
exports when it ends, but not lvols and files: ``create`` with the same request exports one again,
with the same UUID. Files are made by this process (``files.py``), so nvmf_tgt must run on this
machine, by a user who may write to them; it has them as aio devices, named as the file. nvmf_tgt
reads keys from their files, too: it reads a key for authentication whenever a host proves that it
has it, and a TLS key when the host is added.

Source: SPDK 26.05's JSON-RPC; ``spdk`` 26.9.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

from dlfs.base.extras import install_command
from dlfs.base.units import MIB
from dlfs.errors import (
    DeviceError,
    DeviceLostError,
    ExistsError,
    NotFoundError,
    SpaceError,
    UsageError,
)
from dlfs.fabric.composing.files import reserve_file, resize_file
from dlfs.fabric.composing.namespaces import (
    FILE_SUFFIX,
    MODEL,
    ComposedNamespace,
    NamespaceRequest,
    format_listener,
)
from dlfs.fabric.composing.target import ComposingTarget
from dlfs.fabric.keys import key_directory, read_key
from dlfs.fabric.recipes import DISCOVERY_NQN

_TIMEOUT_S = 60.0
_TRANSFER_BYTES_MAX = 1 << 20
"""Most bytes of one command. SPDK's default, 128 KiB, would split the reads of whole chunks."""
_FILE_BLOCK_BYTES = 4096


class SpdkTarget(ComposingTarget):
    """A running nvmf_tgt.

    Args:
        address: path of its JSON-RPC's Unix socket, or an IP address.
        port: TCP port of its JSON-RPC, with an IP address.

    Raises:
        UsageError: the package ``spdk`` is not installed.
        DeviceLostError: nothing answers there.
    """

    def __init__(self, address: str, port: int | None = None) -> None:
        try:
            from spdk.rpc.client import JSONRPCClient, JSONRPCException
        except ImportError as error:
            raise UsageError(
                f"compose on SPDK: expected the package spdk; {install_command('spdk')}"
            ) from error
        super().__init__(f"compose on nvmf_tgt at {address}" + (f":{port}" if port else ""))
        self._refusal: type[Exception] = JSONRPCException
        self._is_remote = port is not None
        try:
            self._client = JSONRPCClient(address, port, timeout=_TIMEOUT_S)
        except (JSONRPCException, OSError) as error:
            raise DeviceLostError(f"{self._what}: no answer: is nvmf_tgt running?") from error

    def _call(self, method: str, **parameters: object) -> Any:
        """Call a method and return its result.

        Raises:
            SpaceError: the lvol store has too little space.
            DeviceError: nvmf_tgt refused the call, or does not answer.
        """
        try:
            return self._client.call(method, parameters)
        except (self._refusal, OSError) as error:
            said = _message(str(error))
            kind = SpaceError if "No space left" in said else DeviceError
            raise kind(f"{self._what}: {method}: {said}") from error

    # ---- looking ---------------------------------------------------------------------------------

    def list(self) -> list[ComposedNamespace]:
        """Return the composed namespaces, by name."""
        subsystems = self._call("nvmf_get_subsystems")
        lvols = {name: bdev for bdev in self._call("bdev_get_bdevs") for name in _names(bdev)}
        made = [
            self._decode(subsystem, space, lvols[space["bdev_name"]])
            for subsystem in subsystems
            if subsystem.get("model_number") == MODEL
            for space in subsystem["namespaces"]
            if space["bdev_name"] in lvols  # it was not deleted meanwhile
        ]
        return sorted(made, key=lambda each: each.name)

    def _decode(
        self, subsystem: dict[str, Any], space: dict[str, Any], lvol: dict[str, Any]
    ) -> ComposedNamespace:
        name: str = lvol["name"]  # the UUID, of an lvol; a file has its UUID as an alias
        backing = name if _is_file(name) else (lvol["aliases"] or [name])[0]
        return ComposedNamespace(
            name=backing.rpartition("/")[2].removesuffix(FILE_SUFFIX if _is_file(backing) else ""),
            nqn=subsystem["nqn"],
            uuid=UUID(space["uuid"]),
            size_bytes=lvol["num_blocks"] * lvol["block_size"],
            backing=backing,
            listeners=tuple(
                format_listener(at["traddr"], at["trsvcid"]) for at in subsystem["listen_addresses"]
            ),
            allowed_hosts=tuple(sorted(host["nqn"] for host in subsystem["hosts"])),
            authenticated_hosts=tuple(
                sorted(host["nqn"] for host in subsystem["hosts"] if host.get("dhchap_key"))
            ),
        )

    def _subsystem(self, nqn: str) -> dict[str, Any] | None:
        found = [each for each in self._call("nvmf_get_subsystems") if each["nqn"] == nqn]
        return found[0] if found else None

    def _backing_bytes(self, backing: str) -> int | None:
        """Return the size of an lvol or of a file's device; None if there is none."""
        for bdev in self._call("bdev_get_bdevs"):
            if backing in _names(bdev):
                size: int = bdev["num_blocks"] * bdev["block_size"]
                return size
        return None

    def _whole_clusters(self, store: str, size_bytes: int) -> int:
        """Return the size rounded up to whole clusters of an lvol store, as SPDK rounds it."""
        stores = {each["name"]: each for each in self._call("bdev_lvol_get_lvstores")}
        if store not in stores:
            names = ", ".join(sorted(stores)) or "none"
            raise NotFoundError(
                f"{self._what}: expected an lvol store, got {store!r}; there are: {names}"
            )
        cluster_bytes: int = stores[store]["cluster_size"]
        return -(-size_bytes // cluster_bytes) * cluster_bytes

    # ---- changing --------------------------------------------------------------------------------

    def create(self, request: NamespaceRequest) -> ComposedNamespace:
        """Create and export a namespace, as ``ComposingTarget`` says.

        On an lvol store, the size is rounded up to whole clusters.

        Raises:
            UsageError: the store is a folder, and nvmf_tgt is reached by TCP.
            NotFoundError: there is no such lvol store or folder.
            SpaceError: the lvol store, or the folder's file system, has too little space.
        """
        backing = _backing(request)
        for each in self.list():
            if (each.nqn == request.nqn) != (each.backing == backing) or (
                each.name == request.name and each.backing != backing
            ):
                raise ExistsError(
                    f"{self._what}: {each.name} is composed already, as {each.nqn} in "
                    f"{each.backing}"
                )
        subsystem = self._subsystem(request.nqn)
        if subsystem is not None and subsystem.get("model_number") != MODEL:
            raise ExistsError(
                f"{self._what}: {request.nqn} is exported already, and was not composed"
            )
        with self._other_create_named(request):
            if request.in_folder:
                self._make_file_device(request)
            else:
                self._make_lvol(request, backing)
        keys = self._add_keys(request)
        made = False
        try:
            if subsystem is None:
                with self._other_create_named(request):
                    subsystem = self._make_subsystem(request.nqn)
                made = True
            self._export(request, backing, subsystem, keys)
        except BaseException:
            if made:
                self._remove_export(request.nqn)
            self._remove_keys(request.name, set(keys.values()))
            raise
        self._remove_keys(request.name, keep=set(keys.values()) or None)
        return self._find(request.name)

    @contextmanager
    def _other_create_named(self, request: NamespaceRequest) -> Iterator[None]:
        """Name another ``create`` that was faster, if the block fails because of it."""
        try:
            yield
        except SpaceError:
            raise
        except DeviceError as error:
            found = self._backing_bytes(_backing(request))
            if self._subsystem(request.nqn) is None and found is None:
                raise
            raise ExistsError(
                f"{self._what}: {request.name} is being composed by another command at this "
                f"moment; 'dlfs compose ls' shows it"
            ) from error

    def _make_subsystem(self, nqn: str) -> dict[str, Any]:
        self._call(
            "nvmf_create_subsystem", nqn=nqn, model_number=MODEL, serial_number="DLFS",
            allow_any_host=False,
        )  # fmt: skip
        return {"hosts": [], "namespaces": [], "listen_addresses": []}

    def _add_keys(self, request: NamespaceRequest) -> dict[str, str]:
        """Have nvmf_tgt read the key files; returns the names that they have there.

        Returns:
            Names of keys, by the parameter of ``nvmf_subsystem_add_host`` that takes each.
        """
        keys: dict[str, str] = {}
        for parameter, name in (
            ("dhchap_key", request.dhchap_key),
            ("dhchap_ctrlr_key", request.dhchap_ctrl_key),
            ("psk", request.tls_psk),
        ):
            if name:
                read_key(name)  # which checks the file
                # The names differ each time, since the host uses the present ones until it is set.
                keys[parameter] = f"{_key_prefix(request.name)}{secrets.token_hex(4)}"
                path = str(key_directory().absolute() / name)
                self._call("keyring_file_add_key", name=keys[parameter], path=path)
        return keys

    def _make_lvol(self, request: NamespaceRequest, backing: str) -> None:
        wanted = self._whole_clusters(request.store, request.size_bytes)
        found = self._backing_bytes(backing)
        if found is None:
            self._call(
                "bdev_lvol_create",
                lvs_name=request.store,
                lvol_name=request.name,
                size_in_mib=wanted // MIB,
            )
        elif found != wanted:
            raise ExistsError(
                f"{self._what}: {request.name} exists with {found} bytes, not {wanted}; "
                f"resize changes the size"
            )

    def _make_file_device(self, request: NamespaceRequest) -> None:
        if self._is_remote:
            raise UsageError(
                f"{self._what}: expected the name of an lvol store, got {request.store}: files are "
                "made on this machine, and nvmf_tgt may run on another one; name its socket"
            )
        reserve_file(request.file, request.size_bytes, self._what)
        if self._backing_bytes(request.file) is None:
            self._call(
                "bdev_aio_create",
                name=request.file,
                filename=request.file,
                block_size=_FILE_BLOCK_BYTES,
            )

    def _remove_keys(
        self, name: str, doomed: set[str] | None = None, *, keep: set[str] | None = None
    ) -> None:
        """Remove keys of a namespace from nvmf_tgt: the given ones, or all others than ``keep``."""
        if doomed is None and keep is None:
            return
        for key in self._call("keyring_get_keys"):
            known: str = key["name"]
            own = known.startswith(_key_prefix(name))
            if own and (known in doomed if doomed is not None else known not in (keep or ())):
                self._call("keyring_file_remove_key", name=known)

    def _export(
        self,
        request: NamespaceRequest,
        backing: str,
        subsystem: dict[str, Any],
        keys: dict[str, str],
    ) -> None:
        nqn = request.nqn
        if not any(each["trtype"] == "TCP" for each in self._call("nvmf_get_transports")):
            self._call("nvmf_create_transport", trtype="TCP", max_io_size=_TRANSFER_BYTES_MAX)
        known = {host["nqn"] for host in subsystem["hosts"]}
        for host in request.allowed_hosts:
            if host not in known:
                self._call("nvmf_subsystem_add_host", nqn=nqn, host=host, **keys)
            elif "dhchap_key" in keys:
                chap = {name: key for name, key in keys.items() if name != "psk"}
                self._call("nvmf_subsystem_set_keys", nqn=nqn, host=host, **chap)
        for host in known - set(request.allowed_hosts):
            self._call("nvmf_subsystem_remove_host", nqn=nqn, host=host)
        if not subsystem["namespaces"]:
            space = {"bdev_name": backing, "nsid": 1, "uuid": str(request.uuid)}
            self._call("nvmf_subsystem_add_ns", nqn=nqn, namespace=space)
        self._listen(nqn, request, request.port, secure=bool(request.tls_psk))
        self._listen(DISCOVERY_NQN, request, request.discovery_port)
        self._list_hosts(request.allowed_hosts)

    def _list_hosts(self, hosts: tuple[str, ...]) -> None:
        """Have discovery answer hosts; with an export with TLS, it answers listed ones only."""
        discovery = self._subsystem(DISCOVERY_NQN)
        listed = {host["nqn"] for host in discovery["hosts"]} if discovery is not None else set()
        for host in hosts:
            if host not in listed:
                self._call("nvmf_subsystem_add_host", nqn=DISCOVERY_NQN, host=host)

    def _listen(
        self, nqn: str, request: NamespaceRequest, port: int, *, secure: bool = False
    ) -> None:
        subsystem = self._subsystem(nqn)
        listening = subsystem["listen_addresses"] if subsystem is not None else []
        if any((at["traddr"], at["trsvcid"]) == (request.address, str(port)) for at in listening):
            return
        place = {
            "trtype": "TCP",
            "adrfam": request.family.replace("ip", "IP"),
            "traddr": request.address,
            "trsvcid": str(port),
        }
        options = {"secure_channel": True} if secure else {}
        self._call("nvmf_subsystem_add_listener", nqn=nqn, listen_address=place, **options)

    def _resize(self, found: ComposedNamespace, size_bytes: int) -> None:
        if _is_file(found.backing):
            resize_file(found.backing, size_bytes, self._what)
            self._call("bdev_aio_rescan", name=found.backing)
            return
        self._call("bdev_lvol_resize", name=found.backing, size_in_mib=size_bytes // MIB)

    def _withdraw(self, found: ComposedNamespace, *, delete: bool) -> None:
        self._remove_export(found.nqn)
        self._remove_keys(found.name, keep=set())
        if _is_file(found.backing):
            self._call("bdev_aio_delete", name=found.backing)
            if delete:
                Path(found.backing).unlink(missing_ok=True)
        elif delete:
            self._call("bdev_lvol_delete", name=found.backing)

    def _remove_export(self, nqn: str) -> None:
        if self._subsystem(nqn) is not None:
            self._call("nvmf_delete_subsystem", nqn=nqn)

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._client.close()


def _message(text: str) -> str:
    """Return what a JSON-RPC error says, without its JSON."""
    said = text.partition("response:")[2].strip()
    try:
        return str(json.loads(said)["message"])
    except (ValueError, KeyError, TypeError):
        return " ".join(said.split()) or text


def _backing(request: NamespaceRequest) -> str:
    """Return the name that nvmf_tgt has for the device of a namespace."""
    return request.file if request.in_folder else f"{request.store}/{request.name}"


def _is_file(backing: str) -> bool:
    return backing.startswith("/")


def _key_prefix(name: str) -> str:
    return f"dlfs-{name}@"  # a character that no name has; a colon would name a keyring


def _names(bdev: dict[str, Any]) -> list[str]:
    return [bdev["name"], *bdev["aliases"]]
