"""NVMe namespaces through SPDK, polled from user space: over PCIe and RDMA.

TCP works too, and is what tests and benchmarks use, because they could run no other transport so
far. Programs use ``nvme-tcp:`` for it, which has digests, authentication and TLS.

The URI holds SPDK's transport ID (``trtype``, ``traddr``, ``trsvcid``, ``subnqn`` and so on),
``hostnqn`` [that of this host], ``nsid``, and DLFS's own options:

    timeout_ms             time limit of one command [10000]
    connect_ms             time limit of one attempt to connect [5000]
    reconnect_ms           time without a connection after which a controller is lost [10000]
    keepalive_ms           keep-alive timeout of the target [10000]
    huge=1 memory_mib      huge pages and memory of SPDK's environment [none over TCP and RDMA; 128]
    cores=0-3+8            CPUs that SPDK's thread may use [all that the process may use]
    shm_id                 ID by which SPDK processes share memory [private]
    bounce=1               copy all data through SPDK's memory, as for devices that need DMA

A process has one SPDK environment. Its first device starts the environment with its options; the
options of later devices must agree with them. Devices of one process share one connection to a
controller, with the time limits of the first device. A thread that waits for
completions keeps a CPU busy, as usual with SPDK; an idle queue pair uses none.

Flushes, leases and lost connections work as over NVMe/TCP (``dlfs/nvme.h``). A write whose answer
is missing is repeated when the controller has quiesced, or ends with an error; the connections of
all devices to that controller are closed first. No write is sent after the lease's deadline.

SPDK does not survive fork: in a forked child every call but ``close`` raises ClosedError. Start
workers that read through SPDK with spawn or forkserver.

Source: SPDK, ``spdk_nvme_transport_id_parse``; NVM Express Base Specification 2.0, section 4.5
(identifiers of namespaces).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING
from uuid import UUID

from dlfs._native.device import NativeDevice
from dlfs._native.spdk import (
    ADMIN,
    COMMAND_BYTES_MAX,
    IO,
    Command,
    SpdkInfo,
    SpdkNamespace,
    SpdkOptions,
    open_namespace,
)
from dlfs.base.forks import OwnerProcess
from dlfs.block.host import host_identity
from dlfs.block.nvme import NvmeCommand, NvmeResult
from dlfs.block.shared import SharedNamespaceDevice
from dlfs.block.uri import SpdkUri
from dlfs.errors import ClosedError, UsageError

if TYPE_CHECKING:
    from dlfs.block.device import BlockDevice

TIMEOUT_MS = 10_000
CONNECT_MS = 5_000
RECONNECT_MS = 10_000
KEEPALIVE_MS = 10_000
MEMORY_MIB = 128


def _options(uri: SpdkUri, *, writable: bool) -> SpdkOptions:
    keys = dict(uri.transport_id)
    numbers = {key: value for key, value in uri.options if isinstance(value, int)}
    cores = dict(uri.options).get("cores")
    nqn, host_id = host_identity(keys.pop("hostnqn", None), None)
    return SpdkOptions(
        transport_id=" ".join(f"{key}:{value}" for key, value in keys.items()),
        nsid=uri.nsid,
        host_nqn=nqn,
        host_id=host_id,
        writable=writable,
        bounce=bool(numbers.get("bounce")),
        timeout_ms=numbers.get("timeout_ms", TIMEOUT_MS),
        connect_ms=numbers.get("connect_ms", CONNECT_MS),
        reconnect_ms=numbers.get("reconnect_ms", RECONNECT_MS),
        keepalive_ms=numbers.get("keepalive_ms", KEEPALIVE_MS),
        memory_mib=numbers.get("memory_mib", MEMORY_MIB),
        huge=bool(numbers["huge"]) if "huge" in numbers else None,
        cores=None if cores is None else str(cores).replace("+", ","),
        shm_id=numbers.get("shm_id"),
    )


def _identity(uri: SpdkUri, info: SpdkInfo) -> str:
    """Return the namespace's identifier, the same over every path and for ``NvmeTcpDevice``."""
    if info.uuid:
        return f"nvme:uuid:{UUID(bytes=info.uuid)}"
    if info.nguid:
        return f"nvme:nguid:{info.nguid.hex()}"
    if info.eui64:
        return f"nvme:eui64:{info.eui64.hex()}"
    return f"nvme:{info.subsystem_nqn or info.serial}:{uri.nsid}"


class SpdkDevice(SharedNamespaceDevice):
    """A namespace through SPDK.

    Args:
        uri: names the namespace.
        writable: True to open it for writing too.

    Raises:
        NativeError: dlfs was built without SPDK.
        NotFoundError: the controller has no such namespace.
        UsageError: the transport ID is malformed, or the namespace's blocks do not fit.
        DeviceError: no connection, or SPDK cannot start; the message contains SPDK's.
        ClosedError: this process is a fork of one that uses SPDK.
    """

    def __init__(self, uri: SpdkUri, *, writable: bool = False) -> None:
        options = _options(uri, writable=writable)
        native, self._namespace = open_namespace(options, uri=str(uri))
        self.info = self._namespace.info
        self._address = uri
        self._nsid = uri.nsid
        self._keep_alive_s = options.keepalive_ms / 1000
        self._operation_timeout_ms = options.timeout_ms + options.reconnect_ms
        self._owner = OwnerProcess()
        self._runner = _SpdkRunner(self._namespace)
        identity = _identity(uri, self.info)
        super().__init__(native, uri=str(uri), identity=identity, writable=writable)

    @property
    def native(self) -> NativeDevice:
        """The libdlfs device, for native readers.

        Raises:
            ClosedError: the device is closed, or this process is a fork of the one that opened it.
        """
        if not self._owner.is_current():
            raise ClosedError(
                f"use {self.uri}: SPDK does not survive fork; start workers with spawn or "
                "forkserver, and open the device there"
            )
        return super().native

    @property
    def runner(self) -> _SpdkRunner:
        """Runner of single commands on the namespace's controller."""
        return self._runner

    @property
    def nsid(self) -> int:
        """Namespace ID."""
        return self._nsid

    @property
    def keep_alive_s(self) -> float:
        """Silence after which the target ends this host's connections, in seconds; 0: never."""
        return self._keep_alive_s

    @property
    def operation_timeout_ms(self) -> int:
        """Upper bound of one operation with its retries, in milliseconds."""
        return self._operation_timeout_ms

    @property
    def reopener(self) -> Callable[[], BlockDevice] | None:
        """Function that opens the namespace again for reading."""
        return partial(SpdkDevice, self._address)


class _SpdkRunner:
    """A ``CommandRunner`` over SPDK's controller."""

    def __init__(self, namespace: SpdkNamespace) -> None:
        self._namespace = namespace

    def _run(
        self, queue: int, command: NvmeCommand, data: bytearray | None, to_device: bool
    ) -> NvmeResult:
        if data is not None and (len(data) > COMMAND_BYTES_MAX or len(data) % 4):
            raise UsageError(
                f"run an NVMe command: expected a multiple of 4 bytes of data, at most "
                f"{COMMAND_BYTES_MAX}, got {len(data)}"
            )
        words = (command.cdw10, command.cdw11, command.cdw12, command.cdw13, command.cdw14)
        encoded = Command(opcode=command.opcode, nsid=command.nsid, cdw=(*words, command.cdw15))
        answer = self._namespace.run(queue, encoded, data, to_device=to_device)
        return NvmeResult(answer.status, answer.value)

    def run_admin(
        self, command: NvmeCommand, data: bytearray | None = None, *, to_device: bool = False
    ) -> NvmeResult:
        """Run one admin command; see ``CommandRunner``."""
        return self._run(ADMIN, command, data, to_device)

    def run_io(
        self, command: NvmeCommand, data: bytearray | None = None, *, to_device: bool = False
    ) -> NvmeResult:
        """Run one command on an I/O queue; see ``CommandRunner``."""
        return self._run(IO, command, data, to_device)
