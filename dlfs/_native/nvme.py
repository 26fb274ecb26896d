"""NVMe/TCP devices of libdlfs: open, single commands, write limits, status."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref, c_char_p, c_uint8, c_uint32, c_uint64, create_string_buffer
from dataclasses import dataclass, fields
from typing import Any
from uuid import UUID

from dlfs._native import abi
from dlfs._native.device import NativeDevice, device_handle
from dlfs._native.library import check, error_for, library

PATHS_MAX = abi.NVME_PATHS_MAX

_ID_NAMES = {abi.NVME_ID_EUI64: "eui64", abi.NVME_ID_NGUID: "nguid", abi.NVME_ID_UUID: "uuid"}
_ANA_NAMES = {
    abi.NVME_ANA_OPTIMIZED: "optimized",
    abi.NVME_ANA_NON_OPTIMIZED: "non-optimized",
    abi.NVME_ANA_INACCESSIBLE: "inaccessible",
    abi.NVME_ANA_PERSISTENT_LOSS: "persistent loss",
    abi.NVME_ANA_CHANGE: "change",
}
_EUI64_BYTES = 8


@dataclass(frozen=True, slots=True)
class NvmeStatus:
    """The properties of a device's target, and counters of its errors since the open."""

    connected: bool
    path: int
    """Index of the path in use, or used last."""
    reconnects: int
    """Number of reconnects to the controller."""
    retries: int
    """Number of commands that were sent again."""
    timeouts: int
    digest_errors: int
    protocol_errors: int
    transfer_bytes_max: int
    """Most data bytes of one command."""
    queue_count_max: int
    """Most queue pairs that the controller grants."""
    write_cache: bool
    """True if the controller has a volatile write cache: writes are durable after a flush only."""
    controller_id: int
    namespace_id: str | None
    """Globally unique identifier of the namespace, such as ``uuid:...``."""
    last_error: str
    """Message of the last error; empty if there was none."""
    path_moves: int
    """Number of reconnects that changed the path."""
    events: int
    """Number of asynchronous events of all kinds that the controller reported."""
    namespace_events: int
    """Number of events after a namespace was added, removed or changed."""
    ana_events: int
    """Number of events after an ANA state changed."""
    discovery_events: int
    """Number of events after the discovery log changed."""
    health_events: int
    """Number of critical warnings and firmware activations that the controller reported."""
    namespace_bytes: int
    """Present size of the namespace; the size of the open device does not change."""
    write_protected: bool
    """True if the namespace is read-only."""
    ana_state: str | None
    """ANA state of the namespace on the path in use, such as ``optimized``; None: not reported."""
    ana_group: int
    """ANA group of the namespace; 0: none."""
    health_warnings: int
    """Critical warnings of the last health event, as bits of the health log."""
    last_event: str
    """Description of the last event; empty if there was none."""


def open_nvme(
    *,
    uri: str,
    paths: Sequence[tuple[str, int]],
    subsystem_nqn: str,
    nsid: int,
    host_nqn: str,
    host_id: UUID,
    header_digest: bool,
    data_digest: bool,
    timeout_ms: int,
    connect_ms: int,
    keepalive_ms: int,
    reconnect_ms: int,
    busy_poll_us: int,
    writable: bool,
    dhchap_key: str | None = None,
    dhchap_ctrl_key: str | None = None,
    tls_psk: str | None = None,
    reauth_s: int = 0,
    concat: bool = False,
) -> NativeDevice:
    """Open a namespace over NVMe/TCP, or with ``nsid`` 0 a controller without a namespace.

    Args:
        uri: names the device in error messages.
        paths: 1 to 4 hosts and ports of one subsystem.
        subsystem_nqn: NQN of the subsystem, at most 223 bytes.
        nsid: namespace ID.
        host_nqn: NQN of this host, at most 223 bytes.
        host_id: ID of this host.
        header_digest: send and check CRC32C of headers.
        data_digest: send and check CRC32C of data.
        timeout_ms: time limit of one command, > 0.
        connect_ms: time limit of one attempt to connect on one path, > 0.
        keepalive_ms: keep-alive timeout of the target; 0: no keep-alive.
        reconnect_ms: time for attempts to reconnect to a lost target; 0: none are made.
        busy_poll_us: idle time after which a waiting thread stops busy-polling and sleeps.
        writable: True to open it for writing too.
        dhchap_key: name of this host's key; None: no authentication.
        dhchap_ctrl_key: name of the controller's key; None: it need not prove its identity.
        tls_psk: name of the pre-shared key for TLS; None: no TLS.
        reauth_s: period after which the admin queue is authenticated anew; 0: never.
        concat: secure channel concatenation: TLS with a key that authentication generates.

    Raises:
        AuthenticationError: a key was refused or not found.
        DeviceLostError: the connection is refused.
        DeviceTimeoutError: the target does not answer.
        NotFoundError: there is no such host, subsystem or namespace.
        DeviceError: the target refuses this host or violates the protocol.
        UsageError: a value is out of range.
    """
    config = abi.NvmeConfig(
        path_count=len(paths),
        nsid=nsid,
        subsystem_nqn=subsystem_nqn.encode("ascii"),
        host_nqn=host_nqn.encode("ascii"),
        host_id=(c_uint8 * 16)(*host_id.bytes),
        digests=(abi.NVME_HEADER_DIGEST if header_digest else 0)
        | (abi.NVME_DATA_DIGEST if data_digest else 0),
        timeout_ms=timeout_ms,
        connect_ms=connect_ms,
        keepalive_ms=keepalive_ms,
        reconnect_ms=reconnect_ms,
        busy_poll_us=busy_poll_us,
        flags=abi.OPEN_WRITE if writable else 0,
        reauth_s=reauth_s,
        concat=concat,
        dhchap_key=_key_name(dhchap_key),
        dhchap_ctrl_key=_key_name(dhchap_ctrl_key),
        tls_psk=_key_name(tls_psk),
    )
    for number, (host, port) in enumerate(paths[:PATHS_MAX]):
        config.hosts[number] = host.encode("ascii")
        config.ports[number] = port
    message = create_string_buffer(abi.NVME_TEXT_BYTES)
    handle = device_handle()
    code = library().dlfs_device_open_nvme(byref(config), message, len(message), byref(handle))
    if code < 0:
        reason = message.value.decode("utf-8", "replace")
        raise error_for(code, f"open {uri}", reason=reason)
    return NativeDevice(handle, uri, writable=writable)


def _key_name(name: str | None) -> bytes | None:
    return None if name is None else name.encode("ascii")


def authenticate(device: NativeDevice) -> None:
    """Authenticate a device's admin queue anew, with the present keys.

    Raises:
        AuthenticationError: a key was refused or not found.
        DeviceError: the device has no key, or lost its connection.
        ClosedError: the device is closed.
    """
    code = library().dlfs_nvme_authenticate(device.handle)
    check(code, f"authenticate {device.uri}")


def run_command(
    device: NativeDevice,
    words: Sequence[int],
    data: bytearray | None,
    *,
    io_queue: bool,
    to_device: bool,
) -> tuple[int, int]:
    """Run one command on a device from ``open_nvme``; see ``run_through``."""
    function = library().dlfs_nvme_run
    return run_through(
        function, device.handle, device.uri, words, data, io_queue=io_queue, to_device=to_device
    )


def run_through(
    function: Any,
    owner: object,
    uri: str,
    words: Sequence[int],
    data: bytearray | None,
    *,
    io_queue: bool,
    to_device: bool,
) -> tuple[int, int]:
    """Run one command by a function like ``dlfs_nvme_run``, and wait for its answer.

    Args:
        function: the function.
        owner: its first argument.
        uri: names the device in error messages.
        words: opcode, nsid, cdw10..cdw15.
        data: buffer of at most 64 KiB, which the controller fills, or reads if ``to_device``.
        io_queue: use an I/O queue instead of the admin queue.
        to_device: True if ``data`` goes to the controller.

    Returns:
        The status without DNR and More, and dwords 0 and 1 of the completion.

    Raises:
        DeviceLostError: the connection was lost.
        DeviceTimeoutError: the controller did not answer in time.
        UsageError: too much data, or a word out of range.
        ClosedError: the device is closed.
    """
    size = len(data) if data else 0
    buffer = (c_uint8 * size).from_buffer(data) if data else None
    direction = abi.NVME_DATA_OUT if to_device else abi.NVME_DATA_IN
    queue = abi.NVME_QUEUE_IO if io_queue else abi.NVME_QUEUE_ADMIN
    result = abi.NvmeResult()
    try:
        code = function(
            owner,
            queue,
            byref(abi.NvmeCommand(*words)),
            buffer,
            size,
            direction if size else abi.NVME_DATA_NONE,
            byref(result),
        )
    finally:
        del owner  # a traceback that refers to this frame does not keep the device open
    check(code, f"run command 0x{words[0]:02x} on {uri}")
    return result.status, result.value


def set_paths(device: NativeDevice, paths: Sequence[tuple[str, int]]) -> None:
    """Replace the paths of an open device. The path in use stays in use until it is lost.

    Args:
        device: from ``open_nvme``.
        paths: 1 to 4 hosts and ports of its subsystem.

    Raises:
        ClosedError: the device is closed.
        UsageError: a value is out of range.
    """
    hosts = (c_char_p * len(paths))(*(host.encode("ascii") for host, _ in paths))
    ports = (c_uint32 * len(paths))(*(port for _, port in paths))
    code = library().dlfs_nvme_set_paths(device.handle, hosts, ports, len(paths))
    check(code, f"set the paths of {device.uri}")


def get_incarnation(device: NativeDevice) -> int:
    """Return the incarnation of the controller in use, or of the next one while disconnected.

    Raises:
        ClosedError: the device is closed.
    """
    found = c_uint64()
    code = library().dlfs_device_incarnation(device.handle, byref(found))
    check(code, f"read the controller incarnation of {device.uri}")
    return found.value


def limit_writes(device: NativeDevice, incarnation: int, until_ns: int | None) -> None:
    """Permit writes only through one controller and only until a time.

    Args:
        device: from ``open_nvme``.
        incarnation: incarnation of the controller, from ``get_incarnation``.
        until_ns: end of the permission on CLOCK_BOOTTIME, in ns; None: writes are not limited.

    Raises:
        ClosedError: the device is closed.
    """
    until = abi.WRITES_FREE if until_ns is None else until_ns
    code = library().dlfs_device_limit_writes(device.handle, incarnation, until)
    check(code, f"limit the writes of {device.uri}")


def read_status(device: NativeDevice) -> NvmeStatus:
    """Return the properties and error counters of a device's target.

    Raises:
        ClosedError: the device is closed.
    """
    found = abi.NvmeStatus()
    code = library().dlfs_nvme_get_status(device.handle, byref(found))
    check(code, f"read the status of {device.uri}")
    values: dict[str, Any] = {
        field.name: getattr(found, field.name, None) for field in fields(NvmeStatus)
    }
    values |= {
        "connected": bool(found.connected),
        "write_cache": bool(found.write_cache),
        "namespace_id": format_namespace_id(found.id_kind, bytes(found.id)),
        "last_error": found.last_error.decode("utf-8", "replace"),
        "write_protected": bool(found.write_protected),
        "ana_state": _ANA_NAMES.get(found.ana_state),
        "last_event": found.last_event.decode("ascii", "replace"),
    }
    return NvmeStatus(**values)


def format_namespace_id(kind: int, value: bytes) -> str | None:
    """Return an identifier of a namespace as text; None for an unknown kind (``NVME_ID_*``)."""
    name = _ID_NAMES.get(kind)
    if name is None:
        return None
    if kind == abi.NVME_ID_UUID:
        return f"{name}:{UUID(bytes=value)}"
    return f"{name}:{(value[:_EUI64_BYTES] if kind == abi.NVME_ID_EUI64 else value).hex()}"
