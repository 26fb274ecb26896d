"""libdlfs_spdk: NVMe namespaces through SPDK, as native devices.

The library exists if dlfs was built with SPDK, and is loaded on first use. A process has one SPDK
environment: the first device starts it with its options. It does not survive fork.

SPDK installs a handler for SIGBUS when it is loaded. That handler returns from every SIGBUS, so
that a faulting instruction would run again without end; the handler from before is restored.
"""

from __future__ import annotations

import ctypes
import functools
import os
import signal
from ctypes import (
    POINTER,
    Structure,
    byref,
    c_char,
    c_char_p,
    c_int,
    c_int32,
    c_size_t,
    c_uint8,
    c_uint32,
    c_uint64,
    c_void_p,
)
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

from dlfs._native.abi import fields
from dlfs._native.device import NativeDevice, device_handle
from dlfs._native.handle import Handle
from dlfs._native.library import bind, check, error_for, library
from dlfs.errors import ClosedError, NativeError

_FILE_NAME = "libdlfs_spdk.so"
_SIGACTION_BYTES = 256  # more than any struct sigaction has
_MESSAGE_BYTES = 1024

VERSION = 1
WRITE, BOUNCE = 1, 2
UNSET = -1
COMMAND_BYTES_MAX = 4096
ADMIN, IO = 0, 1

GUIDE = (
    "install SPDK as the Getting Started guide of its documentation says, so that pkg-config finds "
    "spdk_nvme, then build dlfs from a checkout with `make build`"
)


class Config(Structure):
    """``dlfs_spdk_config``."""

    _fields_ = fields(
        (c_char_p, "transport_id host_nqn cores"),
        (c_uint32, "nsid flags timeout_ms connect_ms reconnect_ms keepalive_ms memory_mib"),
        (c_int32, "huge shm_id"),
        (c_uint8 * 16, "host_id"),
        (c_uint32, "reserved"),
    )


class Info(Structure):
    """``dlfs_spdk_info``."""

    _fields_ = (
        ("size_bytes", c_uint64),
        ("block_bytes", c_uint32),
        ("max_transfer_bytes", c_uint32),
        ("nguid", c_uint8 * 16),
        ("uuid", c_uint8 * 16),
        ("eui64", c_uint8 * 8),
        ("model", c_char * 41),
        ("serial", c_char * 21),
        ("firmware", c_char * 9),
        ("subsystem_nqn", c_char * 224),
        ("reserved", c_uint8 * 1),
    )


class Command(Structure):
    """``dlfs_spdk_command``."""

    _fields_ = (
        ("opcode", c_uint32),
        ("nsid", c_uint32),
        ("cdw", c_uint32 * 6),
        ("to_device", c_uint32),
        ("status", c_uint32),
        ("value", c_uint64),
    )


PROTOTYPES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "dlfs_spdk_version": (c_uint32, ()),
    "dlfs_spdk_build": (c_char_p, ()),
    "dlfs_spdk_open": (c_int, (POINTER(Config), c_char_p, c_size_t, POINTER(c_void_p))),
    "dlfs_spdk_close": (None, (c_void_p,)),
    "dlfs_spdk_describe": (None, (c_void_p, POINTER(Info))),
    "dlfs_spdk_run": (c_int, (c_void_p, c_uint32, POINTER(Command), c_void_p, c_uint32)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SpdkOptions:
    """Options of opening a namespace.

    Attributes:
        transport_id: SPDK's transport ID, as text.
        nsid: namespace ID.
        host_nqn: NQN of this host.
        host_id: ID of this host.
        writable: True to open it for writing too.
        bounce: copy all data through SPDK's memory.
        timeout_ms: time limit of one command.
        connect_ms: time limit of one attempt to connect.
        reconnect_ms: time without a connection after which a controller is lost.
        keepalive_ms: keep-alive timeout of the target; 0: no keep-alive.
        memory_mib: memory of the environment, in MiB.
        huge: use huge pages; None: if the transport needs them.
        cores: CPUs of the environment, as ``0-3,8``; None: all that the process may use.
        shm_id: ID by which SPDK processes share memory; None: private memory.
    """

    transport_id: str
    nsid: int
    host_nqn: str
    host_id: UUID
    writable: bool
    bounce: bool
    timeout_ms: int
    connect_ms: int
    reconnect_ms: int
    keepalive_ms: int
    memory_mib: int
    huge: bool | None
    cores: str | None
    shm_id: int | None


@dataclass(frozen=True, slots=True)
class SpdkInfo:
    """The properties of a namespace; an identifier that it lacks is empty."""

    max_transfer_bytes: int
    nguid: bytes
    uuid: bytes
    eui64: bytes
    model: str
    serial: str
    firmware: str
    subsystem_nqn: str


def _load(path: Path) -> ctypes.CDLL:
    """Load the library without its dependencies' handler for SIGBUS."""
    libc = ctypes.CDLL(None)
    before = ctypes.create_string_buffer(_SIGACTION_BYTES)
    libc.sigaction(int(signal.SIGBUS), None, before)
    try:
        return ctypes.CDLL(str(path), use_errno=False)
    finally:
        libc.sigaction(int(signal.SIGBUS), before, None)


@functools.cache
def spdk_library() -> ctypes.CDLL:
    """Load libdlfs_spdk, once.

    Raises:
        NativeError: it is missing, cannot be loaded, or is of another version.
    """
    named = os.environ.get("DLFS_SPDK_LIBRARY")
    path = Path(named) if named else Path(__file__).with_name(_FILE_NAME)
    if not path.exists():
        raise NativeError(f"load {path}: this dlfs was built without SPDK; {GUIDE}")
    try:
        loaded = _load(path)
    except OSError as error:
        raise NativeError(f"load {path}: {error}; {GUIDE}") from error
    bind(loaded, PROTOTYPES, path)
    got = loaded.dlfs_spdk_version()
    if got != VERSION:
        raise NativeError(f"load {path}: expected version {VERSION}, got {got}")
    return loaded


def _config(options: SpdkOptions) -> Config:
    flags = {WRITE: options.writable, BOUNCE: options.bounce}
    return Config(
        transport_id=options.transport_id.encode(),
        host_nqn=options.host_nqn.encode(),
        host_id=(c_uint8 * 16)(*options.host_id.bytes),
        cores=None if options.cores is None else options.cores.encode(),
        nsid=options.nsid,
        flags=sum(flag for flag, wanted in flags.items() if wanted),
        timeout_ms=options.timeout_ms,
        connect_ms=options.connect_ms,
        reconnect_ms=options.reconnect_ms,
        keepalive_ms=options.keepalive_ms,
        memory_mib=options.memory_mib,
        huge=UNSET if options.huge is None else int(options.huge),
        shm_id=UNSET if options.shm_id is None else options.shm_id,
    )


def open_namespace(options: SpdkOptions, *, uri: str) -> tuple[NativeDevice, SpdkNamespace]:
    """Open a namespace as a native device and as a runner of single commands.

    Raises:
        NativeError: there is no libdlfs_spdk.
        NotFoundError: the controller has no such namespace.
        UsageError: the transport ID is malformed, or the namespace's blocks do not fit.
        DeviceError: no connection, or SPDK cannot start; the message contains SPDK's.
        ClosedError: this process is a fork of one that uses SPDK.
    """
    shim = spdk_library()
    message = ctypes.create_string_buffer(_MESSAGE_BYTES)
    external = Handle(shim.dlfs_spdk_close)
    config = _config(options)
    code = shim.dlfs_spdk_open(byref(config), message, _MESSAGE_BYTES, byref(external))
    if code < 0:
        said = message.value.decode("utf-8", "replace")
        raise error_for(code, f"open {uri}: {said}" if said else f"open {uri}")
    info = Info()
    shim.dlfs_spdk_describe(external, byref(info))
    namespace = c_void_p(external.value)
    handle = device_handle()
    code = library().dlfs_handle_adopt_external(byref(external), byref(handle))
    if code < 0:
        raise error_for(code, f"open {uri}")
    device = NativeDevice(handle, uri, writable=options.writable)
    return device, SpdkNamespace(namespace, device, _info(info))


def _info(info: Info) -> SpdkInfo:
    def identifier(field: Any) -> bytes:
        return bytes(field) if any(field) else b""

    return SpdkInfo(
        info.max_transfer_bytes,
        identifier(info.nguid),
        identifier(info.uuid),
        identifier(info.eui64),
        info.model.decode(),
        info.serial.decode(),
        info.firmware.decode(),
        info.subsystem_nqn.decode(),
    )


class SpdkNamespace:
    """An open namespace: its properties, and single commands to its controller.

    Threads: any at once, except the closing of its device.
    """

    def __init__(self, external: c_void_p, device: NativeDevice, info: SpdkInfo) -> None:
        self._external = external
        self._device = device  # owns the external
        self.info = info

    def run(
        self, queue: int, command: Command, data: bytearray | None, *, to_device: bool
    ) -> Command:
        """Run one command and return it with its completion.

        Args:
            queue: ``ADMIN`` or ``IO``.
            command: the command.
            data: buffer that the controller fills, or reads if ``to_device``; at most 4096 bytes, a
                multiple of 4.
            to_device: True if ``data`` goes to the controller.

        Raises:
            DeviceLostError: the controller cannot be reached.
            DeviceTimeoutError: the controller did not answer in time.
            ClosedError: the device is closed, or the process forked.
        """
        uri = self._device.uri
        if self._device.closed:
            raise ClosedError(f"run a command on {uri}: the device is closed")
        owner = self._device.handle  # another thread may close the device meanwhile
        size = 0 if data is None else len(data)
        memory = (c_uint8 * size).from_buffer(data) if data else None
        command.to_device = int(to_device)
        code = spdk_library().dlfs_spdk_run(self._external, queue, byref(command), memory, size)
        del owner
        check(code, f"run NVMe command {command.opcode:#04x} on {uri}")
        return command
