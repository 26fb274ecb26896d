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

from dlfs._native.device import NativeDevice
from dlfs._native.spdk import namespace_id, open_namespace, run_command
from dlfs.base.forks import OwnerProcess
from dlfs.block.host import host_identity
from dlfs.block.nvme import NativeRunner
from dlfs.block.shared import SharedNamespaceDevice
from dlfs.block.uri import SpdkUri
from dlfs.errors import ClosedError

if TYPE_CHECKING:
    from dlfs.block.device import BlockDevice

DEFAULTS = {
    "timeout_ms": 10_000,
    "connect_ms": 5_000,
    "reconnect_ms": 10_000,
    "keepalive_ms": 10_000,
    "memory_mib": 128,
}
"""The options that have a default."""


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
        keys = dict(uri.transport_id)
        options = DEFAULTS | dict(uri.options)
        cores = options.pop("cores", None)
        nqn, host_id = host_identity(keys.pop("hostnqn", None), None)
        numbers = {key: int(value) for key, value in options.items()}
        native, self.info = open_namespace(
            str(uri),
            transport_id=" ".join(f"{key}:{value}" for key, value in keys.items()),
            nsid=uri.nsid,
            host_nqn=nqn,
            host_id=host_id,
            writable=writable,
            cores=None if cores is None else str(cores).replace("+", ","),
            numbers=numbers,
        )
        self._address = uri
        self._numbers = numbers
        self._owner = OwnerProcess()
        self._runner = NativeRunner(partial(run_command, native))
        name = namespace_id(self.info)
        if name is None:
            name = f"{(self.info.subsystem_nqn or self.info.serial).decode()}:{uri.nsid}"
        super().__init__(native, uri=str(uri), identity=f"nvme:{name}", writable=writable)

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
    def runner(self) -> NativeRunner:
        """Runner of single commands on the namespace's controller."""
        return self._runner

    @property
    def nsid(self) -> int:
        """Namespace ID."""
        return self._address.nsid

    @property
    def keep_alive_s(self) -> float:
        """Silence after which the target ends this host's connections, in seconds; 0: never."""
        return self._numbers["keepalive_ms"] / 1000

    @property
    def operation_timeout_ms(self) -> int:
        """Upper bound of one operation with its retries, in milliseconds."""
        return self._numbers["timeout_ms"] + self._numbers["reconnect_ms"]

    @property
    def reopener(self) -> Callable[[], BlockDevice] | None:
        """Function that opens the namespace again for reading."""
        return partial(SpdkDevice, self._address)
