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
from collections.abc import Mapping, Sequence
from ctypes import (
    Structure,
    byref,
    c_char,
    c_char_p,
    c_int32,
    c_uint8,
    c_uint32,
    c_void_p,
)
from pathlib import Path
from uuid import UUID

from dlfs._native import abi
from dlfs._native.abi import fields, prototypes
from dlfs._native.device import NativeDevice, device_handle
from dlfs._native.library import bind, error_for, library
from dlfs._native.nvme import format_namespace_id, run_through
from dlfs.errors import NativeError, UsageError

_FILE_NAME = "libdlfs_spdk.so"
_SIGACTION_BYTES = 256  # more than any struct sigaction has
_MESSAGE_BYTES = 1024

VERSION = 2
WRITE, BOUNCE = 1, 2
UNSET = -1

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
        ("max_transfer_bytes", c_uint32),
        ("nguid", c_uint8 * 16),
        ("uuid", c_uint8 * 16),
        ("eui64", c_uint8 * 8),
        ("serial", c_char * 21),
        ("subsystem_nqn", c_char * 224),
        ("reserved", c_uint8 * 3),
    )


PROTOTYPES = prototypes(
    {
        "dlfs_spdk_version": "u32:",
        "dlfs_spdk_open": "int: Config* text u64 Info* ptr out",
        "dlfs_spdk_run": "int: ptr u32 NvmeCommand* ptr u32 u32 NvmeResult*",
    },
    vars(abi) | globals(),
)


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


def open_namespace(
    uri: str,
    *,
    transport_id: str,
    nsid: int,
    host_nqn: str,
    host_id: UUID,
    writable: bool,
    cores: str | None,
    numbers: Mapping[str, int],
) -> tuple[NativeDevice, Info]:
    """Open a namespace.

    Args:
        uri: names the device in error messages.
        transport_id: SPDK's transport ID, as text.
        nsid: namespace ID.
        host_nqn: NQN of this host.
        host_id: ID of this host.
        writable: True to open it for writing too.
        cores: CPUs of the environment, as ``0-3,8``; None: all that the process may use.
        numbers: the other options, by their names in a URI (``dlfs.block.spdk``): the time limits
            and ``memory_mib``; without ``huge``, huge pages are used if the transport needs them,
            and without ``shm_id`` memory is private.

    Raises:
        NativeError: there is no libdlfs_spdk.
        NotFoundError: the controller has no such namespace.
        UsageError: the transport ID is malformed, or the namespace's blocks do not fit.
        DeviceError: no connection, or SPDK cannot start; the message contains SPDK's.
        ClosedError: this process is a fork of one that uses SPDK.
    """
    config = Config(
        transport_id=transport_id.encode(),
        host_nqn=host_nqn.encode(),
        host_id=(c_uint8 * 16)(*host_id.bytes),
        cores=None if cores is None else cores.encode(),
        nsid=nsid,
        flags=(WRITE if writable else 0) | (BOUNCE if numbers.get("bounce") else 0),
        huge=UNSET,
        shm_id=UNSET,
    )
    for name in numbers.keys() - {"bounce"}:
        setattr(config, name, numbers[name])
    shim = spdk_library()
    message = ctypes.create_string_buffer(_MESSAGE_BYTES)
    info = Info()
    handle = device_handle()
    create = ctypes.cast(library().dlfs_device_create_external, c_void_p)
    code = shim.dlfs_spdk_open(
        byref(config), message, _MESSAGE_BYTES, byref(info), create, byref(handle)
    )
    if code < 0:
        said = message.value.decode("utf-8", "replace")
        raise error_for(code, f"open {uri}: {said}" if said else f"open {uri}")
    return NativeDevice(handle, uri, writable=writable), info


def namespace_id(info: Info) -> str | None:
    """Return a namespace's globally unique identifier, as in ``NvmeStatus``; None: it has none."""
    for kind, value in (
        (abi.NVME_ID_UUID, info.uuid),
        (abi.NVME_ID_NGUID, info.nguid),
        (abi.NVME_ID_EUI64, info.eui64),
    ):
        if any(value):
            return format_namespace_id(kind, bytes(value))
    return None


def run_command(
    device: NativeDevice,
    words: Sequence[int],
    data: bytearray | None,
    *,
    io_queue: bool,
    to_device: bool,
) -> tuple[int, int]:
    """Run one command on a device from ``open_namespace``; see ``dlfs._native.nvme.run_through``.

    Raises:
        UsageError: the data is no multiple of 4 bytes, or too long.
    """
    if data is not None and (len(data) > abi.NVME_DATA_BYTES_MAX or len(data) % 4):
        raise UsageError(
            f"run an NVMe command: expected a multiple of 4 bytes of data, at most "
            f"{abi.NVME_DATA_BYTES_MAX}, got {len(data)}"
        )
    run = spdk_library().dlfs_spdk_run
    return run_through(
        run, device.handle, device.uri, words, data, io_queue=io_queue, to_device=to_device
    )
