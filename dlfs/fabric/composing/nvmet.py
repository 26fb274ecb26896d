"""Namespaces on nvmet, the Linux kernel's target: each is a file of the storage node.

A shell script (``templates/nvmet_compose.sh``) does the work, through configfs. It runs on this
machine, or on the storage node by ssh, with root's rights, and needs no DLFS there. The kernel
loses exports at a restart; ``create`` with the same request exports the file again, with the same
UUID.

Source: Linux ``drivers/nvme/target/configfs.c``.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import PurePosixPath
from uuid import UUID

from dlfs.errors import (
    DeviceError,
    DeviceLostError,
    DlfsError,
    ExistsError,
    NotFoundError,
    SpaceError,
    UsageError,
)
from dlfs.fabric.composing.namespaces import (
    FILE_SUFFIX,
    MODEL,
    ComposedNamespace,
    NamespaceRequest,
    format_listener,
)
from dlfs.fabric.composing.target import ComposingTarget
from dlfs.fabric.keys import read_key
from dlfs.fabric.recipes import script

SSH = "ssh -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=10"
"""Command that reaches a storage node; the environment's ``DLFS_SSH`` replaces it."""
_TIMEOUT_S = 600.0
"""Longest run of the script, in seconds: some file systems write all blocks that they reserve."""
_SSH_FAILED = 255
_ERRORS: dict[int, type[DlfsError]] = {2: NotFoundError, 17: ExistsError, 28: SpaceError}
"""Errors by the exit codes of the script."""


class NvmetTarget(ComposingTarget):
    """The kernel's target on this machine or, by ssh, on another one.

    Args:
        host: host name or address for ssh; empty: this machine.
        user: user for ssh, who must be root; empty: as ssh chooses.
        port: port for ssh; None: as ssh chooses.

    Raises:
        UsageError: the user or host begins with a hyphen, as an option of ssh does.
    """

    def __init__(self, host: str = "", *, user: str = "", port: int | None = None) -> None:
        if host.startswith("-") or user.startswith("-"):
            raise UsageError(f"compose: expected a host for ssh, got {user}@{host}")
        super().__init__(f"compose on nvmet of {host or 'this machine'}")
        self._command = ["sh"]
        if host:
            place = [f"{user}@{host}" if user else host]
            port_options = ["-p", str(port)] if port is not None else []
            ssh = shlex.split(os.environ.get("DLFS_SSH") or SSH)
            self._command = [*ssh, *port_options, *place, "sh"]

    def _run(self, verb: str, settings: dict[str, str] | None = None) -> str:
        """Run a verb of the script and return its output."""
        given = {"model": MODEL, "nqn": "", **(settings or {})}
        try:
            done = subprocess.run(
                [*self._command, "-s", verb],
                input=script("nvmet_compose.sh", given),
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise DeviceLostError(f"{self._what}: no answer in {_TIMEOUT_S:.0f} s") from error
        except OSError as error:
            raise DeviceLostError(f"{self._what}: {error}") from error
        if done.returncode == 0:
            return done.stdout
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        message = f"{self._what}: {said}"
        if done.returncode == _SSH_FAILED and len(self._command) > 1:
            raise DeviceLostError(message)
        raise _ERRORS.get(done.returncode, DeviceError)(message)

    def list(self) -> list[ComposedNamespace]:
        """Return the composed namespaces, by name."""
        return sorted(
            (self._decode(line) for line in self._run("list").splitlines()),
            key=lambda each: each.name,
        )

    def _decode(self, line: str) -> ComposedNamespace:
        try:
            nqn, uuid, size_bytes, path, listeners, hosts, proven = line.split("\t")
            places = listeners.split()
            return ComposedNamespace(
                name=PurePosixPath(path).name.removesuffix(FILE_SUFFIX),
                nqn=nqn,
                uuid=UUID(uuid),
                size_bytes=int(size_bytes),
                backing=path,
                listeners=tuple(map(format_listener, places[::2], places[1::2])),
                allowed_hosts=tuple(hosts.split()),
                authenticated_hosts=tuple(proven.split()),
            )
        except ValueError as error:
            raise DeviceError(f"{self._what}: expected a namespace, got {line[:200]!a}") from error

    def create(self, request: NamespaceRequest) -> ComposedNamespace:
        """Create and export a namespace, as ``ComposingTarget`` says.

        Raises:
            UsageError: the store is no folder's path; a key is malformed; there is a ``tls_psk``.
            NotFoundError: the storage node has no such folder, or this machine no such key.
            SpaceError: the folder's file system has too little space.
        """
        if not request.in_folder:
            raise UsageError(
                f"{self._what}: expected the absolute path of a folder to store "
                f"{request.name}, got {request.store!r}"
            )
        if request.tls_psk:
            raise UsageError(
                f"{self._what}: nvmet takes TLS keys from its kernel's keyring and needs tlshd; "
                f"export {request.name} without tls_psk, or on SPDK"
            )
        settings = {
            "name": request.name,
            "nqn": request.nqn,
            "uuid": str(request.uuid),
            "store": request.store.rstrip("/") or "/",
            "file": request.file,
            "size_bytes": str(request.size_bytes),
            "family": request.family,
            "address": request.address,
            "ports": " ".join(map(str, request.ports)),
            "allowed_hosts": " ".join(request.allowed_hosts),
            # The script reaches the storage node on ssh's standard input, never as an argument.
            "dhchap_key": read_key(request.dhchap_key) if request.dhchap_key else "",
            "dhchap_ctrl_key": read_key(request.dhchap_ctrl_key) if request.dhchap_ctrl_key else "",
        }
        twins = [each for each in self.list() if each.name == request.name]
        if any(each.nqn != request.nqn for each in twins):
            raise ExistsError(
                f"{self._what}: {request.name} is composed already, as {twins[0].nqn} in "
                f"{twins[0].backing}"
            )
        self._run("create", settings)
        return self._find(request.name)

    def _resize(self, found: ComposedNamespace, size_bytes: int) -> None:
        self._run("resize", {**_place(found), "size_bytes": str(size_bytes)})

    def _withdraw(self, found: ComposedNamespace, *, delete: bool) -> None:
        self._run("withdraw", {**_place(found), "delete": str(int(delete))})


def _place(found: ComposedNamespace) -> dict[str, str]:
    """Return the script's settings that name a composed namespace."""
    return {
        "nqn": found.nqn,
        "file": found.backing,
        "store": str(PurePosixPath(found.backing).parent),
        "ports": " ".join(listener.rpartition(":")[2] for listener in found.listeners),
    }
