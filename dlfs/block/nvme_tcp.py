"""NVMe/TCP: namespaces of other machines as block devices, through libdlfs's own initiator.

It needs no kernel driver, no privileges and no huge pages. ``dlfs/nvme.h`` describes lost
connections, targets that do not answer, and several paths.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING
from weakref import ref

from dlfs._native.device import Kind, NativeDevice, NativeQueue
from dlfs._native.nvme import (
    NvmeStatus,
    authenticate,
    open_nvme,
    read_status,
    run_command,
    set_paths,
)
from dlfs.base.closing import Closing
from dlfs.base.forks import Lock
from dlfs.block.host import host_identity
from dlfs.block.nvme import CommandRunner, NativeRunner, NvmeCommand, NvmeResult
from dlfs.block.shared import SharedNamespaceDevice
from dlfs.block.uri import PATHS_MAX, NvmeTcpOptions, NvmeTcpUri
from dlfs.errors import (
    AuthenticationError,
    ClosedError,
    DeviceError,
    DeviceLostError,
    DeviceTimeoutError,
    LimitError,
)

if TYPE_CHECKING:
    from dlfs._native.device import BytesLike
    from dlfs.block.device import BlockDevice

# Errors to which the last error of the association is added. Their subclasses name their cause.
_EXPLAINED = (DeviceError, DeviceLostError, DeviceTimeoutError, AuthenticationError)
_TARGET_ERRNOS = (
    errno.ENODEV,
    errno.ETIMEDOUT,
    errno.EPROTO,
    errno.EBADMSG,
    errno.EREMOTEIO,
    errno.EACCES,
)

QUEUE_PAIRS_OF_READER = 1
"""Queue pairs of one process that reads a volume: for its metadata and samples, in turn."""
QUEUE_PAIRS_OF_WRITER = 3
"""Queue pairs of a writer: for data and metadata, for its lease, and for flushes and commands."""

__all__ = ["NvmeStatus", "NvmeTcpAssociation", "NvmeTcpDevice", "open_nvme_devices"]

_open_devices: dict[int, ref[NvmeTcpDevice]] = {}
"""The devices that were not freed yet, by their ``id``. Any threads at once: each use is atomic."""


def open_nvme_devices() -> list[NvmeTcpDevice]:
    """Return the devices of this process that are open over NVMe/TCP."""
    found = [reference() for reference in list(_open_devices.values())]
    return [device for device in found if device is not None and device._native is not None]


def _open(
    uri: str,
    paths: Sequence[tuple[str, int]],
    subsystem_nqn: str,
    nsid: int,
    options: NvmeTcpOptions,
    *,
    writable: bool,
) -> NativeDevice:
    host_nqn, host_id = host_identity(options.host_nqn, options.host_id)
    known = replace(options, host_nqn=host_nqn, host_id=host_id)
    return open_nvme(
        uri=uri,
        paths=paths,
        subsystem_nqn=subsystem_nqn,
        nsid=nsid,
        writable=writable,
        **vars(known),
    )


def _too_few(native: NativeDevice, error: LimitError) -> LimitError:
    """Return the error of a refused queue pair with the numbers that the target allows."""
    return LimitError(
        f"{error}: the target allows this host {read_status(native).queue_count_max}, of "
        f"which the device has none left; a reader needs {QUEUE_PAIRS_OF_READER}, a writer "
        f"{QUEUE_PAIRS_OF_WRITER}"
    )


class _Runner(NativeRunner):
    """Runs single commands through an open native device."""

    def __init__(self, native: NativeDevice) -> None:
        super().__init__(partial(run_command, native))
        self._native = native

    def _run(
        self, command: NvmeCommand, data: bytearray | None, *, io_queue: bool, to_device: bool
    ) -> NvmeResult:
        try:
            return super()._run(command, data, io_queue=io_queue, to_device=to_device)
        except LimitError as error:
            raise _too_few(self._native, error) from error


class NvmeTcpAssociation(_Runner, Closing):
    """A connection to a controller without a namespace, for single commands such as discovery.

    Args:
        paths: 1 to 4 hosts and ports of one subsystem.
        subsystem_nqn: NQN of the subsystem.
        options: options of the connection.

    Raises:
        DeviceLostError: the connection is refused.
        DeviceTimeoutError: the target does not answer.
        NotFoundError: there is no such host or subsystem.
        DeviceError: the target refuses this host or violates the protocol.

    Threads: any at once, except ``close``.
    """

    def __init__(
        self,
        paths: Sequence[tuple[str, int]],
        subsystem_nqn: str,
        options: NvmeTcpOptions | None = None,
    ) -> None:
        host, port = paths[0]
        where = f"[{host}]" if ":" in host else host
        self.uri = f"nvme-tcp://{where}:{port}/{subsystem_nqn}"
        super().__init__(
            _open(self.uri, paths, subsystem_nqn, 0, options or NvmeTcpOptions(), writable=False)
        )

    def status(self) -> NvmeStatus:
        """Return the target's properties and the counters of its errors.

        Raises:
            ClosedError: the association is closed.
        """
        return read_status(self._native)

    def close(self) -> None:
        """Disconnect from the controller. Does nothing the second time."""
        self._native.close()


class NvmeTcpDevice(SharedNamespaceDevice):
    """A namespace over NVMe/TCP.

    Args:
        address: names the namespace.
        writable: True to open it for writing too.

    Raises:
        DeviceLostError: the connection is refused.
        DeviceTimeoutError: the target does not answer.
        NotFoundError: there is no such host, subsystem or namespace.
        DeviceError: the target refuses this host or violates the protocol.
    """

    drops_reads = True

    def __init__(self, address: NvmeTcpUri, *, writable: bool = False) -> None:
        self.address = address
        uri = str(address)
        native = _open(
            uri,
            address.paths,
            address.subsystem_nqn,
            address.nsid,
            address.options,
            writable=writable,
        )
        self._runner = _Runner(native)
        try:
            name = read_status(native).namespace_id
        except BaseException:
            native.close()
            raise
        identity = name or f"{address.subsystem_nqn}:{address.nsid}"
        super().__init__(native, uri=uri, identity=f"nvme:{identity}", writable=writable)
        self.discovery: tuple[str, ...] = ()
        """Discovery controllers that listed it when the volume was opened; none if it was given."""
        self._paths = address.paths
        self._closing = Lock()
        key = id(self)
        _open_devices[key] = ref(self, lambda _reference: _open_devices.pop(key, None))

    @property
    def nsid(self) -> int:
        """Namespace ID."""
        return self.address.nsid

    @property
    def runner(self) -> CommandRunner:
        """Runner of single commands on the namespace's controller.

        Raises:
            ClosedError: the device is closed.
        """
        if self._native is None:
            raise ClosedError(f"use {self.uri}: the device is closed")
        return self._runner

    @property
    def reopener(self) -> Callable[[], BlockDevice] | None:
        """Function that opens the namespace again for reading."""
        (host, port), *others = self._paths
        return partial(
            NvmeTcpDevice, replace(self.address, host=host, port=port, alternatives=tuple(others))
        )

    @property
    def operation_timeout_ms(self) -> int:
        """Upper bound of one operation with its retries, in milliseconds."""
        return self.address.options.timeout_ms + self.address.options.reconnect_ms

    @property
    def queue_pairs_max(self) -> int:
        """Most queue pairs that its target grants this process."""
        return self.status().queue_count_max

    @property
    def keep_alive_s(self) -> float:
        """Silence after which the target ends this host's connections, in seconds; 0: never."""
        return self.address.options.keepalive_ms / 1000

    def status(self) -> NvmeStatus:
        """Return the target's properties and the counters of its errors.

        Raises:
            ClosedError: the device is closed.
        """
        return read_status(self.native)

    def offer_paths(self, paths: Sequence[tuple[str, int]]) -> NvmeStatus:
        """Use these hosts and ports of the subsystem too, when the path in use is lost.

        A device has at most four paths. These come first; others that it had fill the remainder.

        Args:
            paths: hosts and ports; without any, the paths stay.

        Returns:
            The same as ``status``.

        Raises:
            ClosedError: the device is closed.

        Threads: any, also while another one closes the device.
        """
        with self._closing:
            if paths:
                self._add_paths(paths)
            return self.status()

    def _add_paths(self, paths: Sequence[tuple[str, int]]) -> None:
        present = [path for path in self._paths if path in paths]
        others = [path for path in self._paths if path not in paths]
        chosen = tuple(dict.fromkeys((*present, *paths, *others)))[:PATHS_MAX]
        if chosen != self._paths:
            set_paths(self.native, chosen)
            self._paths = chosen

    def authenticate(self) -> None:
        """Authenticate the connected controller anew, with the present keys.

        Raises:
            AuthenticationError: a key was refused or not found; the device then reconnects.
            DeviceError: the URI names no key, or the connection was lost.
            ClosedError: the device is closed.
        """
        authenticate(self.native)

    def _close_native(self, native: NativeDevice) -> None:
        with self._closing:
            super()._close_native(native)

    # ---- errors with their causes --------------------------------------------------------------

    @contextmanager
    def _explained(self, *errnos: int) -> Iterator[None]:
        """Add the association's last error to errors of these errnos and of the target."""
        try:
            yield
        except DeviceError as error:
            explains = type(error) in _EXPLAINED and error.errno in (*_TARGET_ERRNOS, *errnos)
            why = self.status().last_error if explains else ""
            if not why or why in str(error):
                raise
            raise type(error)(f"{error}; {why}", error.errno or 0) from error

    def _transfer(self, kind: Kind, buffer: BytesLike, offset_bytes: int) -> None:
        with self._explained():
            super()._transfer(kind, buffer, offset_bytes)

    def queue_pair(self, depth: int) -> NativeQueue:
        """Create a queue pair with its own connection; see ``BlockDevice.queue_pair``."""
        try:
            with self._explained():
                return super().queue_pair(depth)
        except LimitError as error:
            raise _too_few(self.native, error) from error

    def flush(self) -> None:
        """Make every completed write durable; see ``BlockDevice.flush``."""
        try:
            with self._explained(errno.EIO):
                super().flush()
        except LimitError as error:
            raise _too_few(self.native, error) from error
