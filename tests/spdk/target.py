"""SPDK's NVMe-oF target on 127.0.0.1, configured through its JSON-RPC.

``DLFS_SPDK_TARGET`` names the program; the default is ``nvmf_tgt`` in PATH. It runs without huge
pages and without PCI. It polls, which keeps a CPU busy, so it must end with its tests. Namespaces
are RAM disks, or files if their contents must outlive the target.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from dlfs._native.spdk import spdk_library
from dlfs.base.units import MIB
from dlfs.errors import NativeError
from tests.nvmet import target
from tests.nvmet.guest import free_port
from tests.support.stopping import stop_process

_MEMORY_MIB = 512
_ANSWER_SECONDS = 30.0
_STOP_SECONDS = 20.0
# With the default of 4 KiB, a read of 64 KiB over TLS takes 44 ms.
_TLS_BUFFER_BYTES = 2 * MIB


def program() -> str | None:
    """Return the path of the target's program, or None."""
    return os.environ.get("DLFS_SPDK_TARGET") or shutil.which("nvmf_tgt")


def lacks_target() -> str | None:
    """Return why SPDK's target cannot run here, or None."""
    found = program()
    if found is None:
        return "no nvmf_tgt in PATH, and DLFS_SPDK_TARGET names none"
    if not os.access(found, os.X_OK):
        return f"DLFS_SPDK_TARGET: no program at {found}"
    return None


def lacks_spdk() -> str | None:
    """Return why SPDK's target and libdlfs_spdk cannot be used here, or None."""
    try:
        spdk_library()
    except NativeError as error:
        return str(error)
    return lacks_target()


@dataclass(frozen=True)
class Namespace(target.Namespace):
    """One namespace of a subsystem; without a path, it is a RAM disk of zeros.

    Attributes:
        fails: it is an error device over that, ``EE_NAME``, which answers as it is told.
    """

    fails: bool = False


def spdk_uri(port: int, nqn: str, nsid: int = 1, **options: object) -> str:
    """Return the URI of a namespace of any target on 127.0.0.1 through SPDK's initiator."""
    words = "".join(f" {key}={value}" for key, value in options.items())
    place = f"trtype=TCP adrfam=IPv4 traddr=127.0.0.1 trsvcid={port}"
    return f"spdk:{place} subnqn={nqn} nsid={nsid}{words}"


class RpcError(Exception):
    """The target refused a call."""


class Rpc:
    """JSON-RPC 2.0 over the target's Unix socket, one call at a time."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(_ANSWER_SECONDS)
        self._serial = 0
        try:
            self._socket.connect(str(path))
        except OSError:
            self._socket.close()
            raise

    def call(self, method: str, **parameters: object) -> Any:
        """Call a method and return its result."""
        self._serial += 1
        request: dict[str, object] = {"jsonrpc": "2.0", "id": self._serial, "method": method}
        if parameters:
            request["params"] = parameters
        self._socket.sendall(json.dumps(request).encode())
        answer = self._receive()
        if "error" in answer:
            raise RpcError(f"{method}: {answer['error']}")
        return answer["result"]

    def _receive(self) -> dict[str, Any]:
        text = ""
        while True:
            part = self._socket.recv(65536)
            if not part:
                raise RpcError("the target closed its socket")
            text += part.decode()
            try:
                answer: dict[str, Any] = json.loads(text)
            except json.JSONDecodeError:
                continue  # the answer is incomplete
            return answer

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


class SpdkTarget:
    """A running target; subsystems come and go.

    Args:
        cpu: CPU that it keeps busy; None: any.
        config: settings of ``nvmf_set_config``, which only a target that starts takes.
        options: options of the TCP transport, by the names of ``nvmf_create_transport``.
    """

    def __init__(
        self,
        *,
        cpu: int | None = None,
        config: Mapping[str, object] | None = None,
        **options: object,
    ) -> None:
        self.port = free_port()
        self._config = config
        self._cpu = cpu
        self._options = options
        self._folder = Path(tempfile.mkdtemp(prefix="dlfs-spdk-"))
        self._process: subprocess.Popen[bytes] | None = None
        self._rpc: Rpc | None = None
        self._subsystems: dict[str, Sequence[Namespace]] = {}

    @property
    def pid(self) -> int:
        """Process ID of the running target."""
        assert self._process is not None
        return self._process.pid

    @property
    def rpc_path(self) -> Path:
        """Path of the socket of its JSON-RPC."""
        return self._folder / "rpc.sock"

    def start(self) -> None:
        """Start the target, for the first time or again with its subsystems."""
        found = program()
        assert found is not None
        cpus = [self._cpu] if self._cpu is not None else sorted(os.sched_getaffinity(0))
        lcores = f"0@({','.join(map(str, cpus))})"
        self.rpc_path.unlink(missing_ok=True)
        command = [found, "--lcores", lcores, "--no-huge", "-s", str(_MEMORY_MIB), "--no-pci"]
        command += ["--disable-cpumask-locks", "--silence-noticelog", "-r", str(self.rpc_path)]
        command += ["--wait-for-rpc"]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self._folder)
        self._rpc = self._connect(self.rpc_path)
        self._rpc.call("nvmf_create_transport", trtype="TCP", **self._options)
        for nqn, namespaces in self._subsystems.items():
            self._make(nqn, namespaces)

    def _connect(self, path: Path) -> Rpc:
        deadline = time.monotonic() + _ANSWER_SECONDS
        while True:
            assert self._process is not None
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"nvmf_tgt did not start: {self.log()}")
            try:
                rpc = Rpc(path)
            except (FileNotFoundError, ConnectionRefusedError):
                time.sleep(0.01)  # the target does not report that its socket exists
                continue
            rpc.call(
                "sock_impl_set_options", impl_name="ssl",
                recv_buf_size=_TLS_BUFFER_BYTES, send_buf_size=_TLS_BUFFER_BYTES,
            )  # fmt: skip
            if self._config is not None:
                rpc.call("nvmf_set_config", **self._config)
            rpc.call("framework_start_init")
            rpc.call("framework_wait_init")
            return rpc

    def log(self) -> str:
        """Return the log of the target."""
        return (self._folder / "log").read_text(errors="replace")

    def call(self, method: str, **parameters: object) -> Any:
        """Call a method of its JSON-RPC."""
        assert self._rpc is not None
        return self._rpc.call(method, **parameters)

    def _make(self, nqn: str, namespaces: Sequence[Namespace]) -> None:
        self.call("nvmf_create_subsystem", nqn=nqn, allow_any_host=True, serial_number="DLFS")
        for nsid, namespace in enumerate(namespaces, 1):
            name = f"{nqn}/{nsid}"
            uuid = str(target.namespace_uuid(nqn, nsid))
            if namespace.path is None:
                blocks = namespace.size_bytes // namespace.block_bytes
                self.call(
                    "bdev_malloc_create",
                    name=name, num_blocks=blocks, block_size=namespace.block_bytes, uuid=uuid,
                )  # fmt: skip
            else:
                with namespace.path.open("ab") as file:
                    file.truncate(namespace.size_bytes)
                self.call(
                    "bdev_aio_create",
                    name=name, filename=str(namespace.path), block_size=namespace.block_bytes,
                    uuid=uuid,
                )  # fmt: skip
            if namespace.fails:
                self.call("bdev_error_create", base_name=name)
                name = f"EE_{name}"
            self.call("nvmf_subsystem_add_ns", nqn=nqn, namespace={"bdev_name": name, "nsid": nsid})
        self.call(
            "nvmf_subsystem_add_listener",
            nqn=nqn,
            listen_address={
                "trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": str(self.port)
            },
        )  # fmt: skip

    def add(self, nqn: str, namespaces: Sequence[Namespace] = (Namespace(),)) -> None:
        """Export namespaces 1, 2, ... as one subsystem."""
        self._make(nqn, namespaces)
        self._subsystems[nqn] = namespaces

    def drop_hosts(self, nqn: str) -> None:
        """Close all connections of a subsystem: its listener goes and comes back."""
        address = {
            "trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": str(self.port)
        }  # fmt: skip
        self.call("nvmf_subsystem_remove_listener", nqn=nqn, listen_address=address)
        self.call("nvmf_subsystem_add_listener", nqn=nqn, listen_address=address)

    def remove(self, nqn: str) -> None:
        """Remove a subsystem and its RAM disks."""
        self.call("nvmf_delete_subsystem", nqn=nqn)
        for nsid, namespace in enumerate(self._subsystems.pop(nqn), 1):
            if namespace.fails:
                self.call("bdev_error_delete", name=f"EE_{nqn}/{nsid}")
            kind = "malloc" if namespace.path is None else "aio"
            self.call(f"bdev_{kind}_delete", name=f"{nqn}/{nsid}")

    @contextmanager
    def subsystem(
        self, nqn: str, namespaces: Sequence[Namespace] = (Namespace(),)
    ) -> Iterator[str]:
        """Export a subsystem in a ``with`` statement; returns its NQN."""
        self.add(nqn, namespaces)
        try:
            yield nqn
        finally:
            self.remove(nqn)

    def spdk_uri(self, nqn: str, nsid: int = 1, **options: object) -> str:
        """Return the URI of a namespace through SPDK's initiator."""
        return spdk_uri(self.port, nqn, nsid, **options)

    def tcp_uri(self, nqn: str, nsid: int = 1, **options: object) -> str:
        """Return the URI of a namespace through libdlfs's initiator."""
        return target.tcp_uri(self.port, nqn, nsid, **options)

    def freeze(self) -> None:
        """Stop the process (SIGSTOP), so that connections stay open but nothing is answered."""
        stop_process(self.pid)

    def thaw(self) -> None:
        """Continue the process after ``freeze``."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Kill the process, as a crash would. Does nothing if it has ended."""
        if self._rpc is not None:
            self._rpc.close()
            self._rpc = None
        if self._process is not None:
            self._process.kill()
            self._process.wait(_STOP_SECONDS)
            self._process = None

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        self.kill()
        shutil.rmtree(self._folder)
