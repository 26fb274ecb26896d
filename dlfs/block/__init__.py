"""Block devices, which read and write whole blocks, and the URIs that name them.

``open_device`` opens the ``BlockDevice`` that a URI names: a file, a disk, memory, or an NVMe
namespace, over TCP by libdlfs's own initiator or through SPDK.
"""

from __future__ import annotations

import logging

from dlfs.base.arguments import Engine
from dlfs.base.units import format_bytes
from dlfs.block.device import BlockDevice, Kind, QueuePair, aligned_buffer, leave, operation_error
from dlfs.block.file import FileDevice
from dlfs.block.lease import boot_clock
from dlfs.block.lock import RECORD_BYTES, RECORD_OFFSET_BYTES, is_lock_record
from dlfs.block.memory import MemoryDevice
from dlfs.block.missing import MissingDevice
from dlfs.block.nvme_tcp import NvmeTcpAssociation, NvmeTcpDevice, open_nvme_devices
from dlfs.block.shared import SharedNamespaceDevice
from dlfs.block.silence import check_answers, is_silent, note_unanswered, timeout_error
from dlfs.block.slots import SLOTS_MAX
from dlfs.block.spdk import SpdkDevice
from dlfs.block.uri import (
    FileUri,
    MemoryUri,
    NvmeTcpDiscoverUri,
    NvmeTcpUri,
    SpdkUri,
    format_path,
    parse_uri,
    split_members,
)
from dlfs.block.uri_help import describe_schemes
from dlfs.errors import UsageError

__all__ = [
    "RECORD_BYTES",
    "RECORD_OFFSET_BYTES",
    "SLOTS_MAX",
    "BlockDevice",
    "FileDevice",
    "FileUri",
    "Kind",
    "MemoryDevice",
    "MemoryUri",
    "MissingDevice",
    "NvmeTcpAssociation",
    "NvmeTcpDevice",
    "NvmeTcpDiscoverUri",
    "NvmeTcpUri",
    "QueuePair",
    "SharedNamespaceDevice",
    "SpdkDevice",
    "SpdkUri",
    "aligned_buffer",
    "boot_clock",
    "check_answers",
    "describe_schemes",
    "format_path",
    "is_lock_record",
    "is_silent",
    "leave",
    "note_unanswered",
    "open_device",
    "open_nvme_devices",
    "operation_error",
    "parse_uri",
    "split_members",
    "timeout_error",
]


_log = logging.getLogger("dlfs.block")


def open_device(uri: str, *, writable: bool = False, engine: Engine = "auto") -> BlockDevice:
    """Open the block device that a URI names.

    Args:
        uri: names one device, as ``dlfs.block.uri`` describes.
        writable: True to open it for writing too.
        engine: for files: ``auto`` (io_uring where the kernel allows it), ``uring`` or ``threads``.

    Raises:
        UsageError: the URI is malformed, or names many devices.
        NotFoundError: there is no such device.
        NativeError: it is an SPDK device, and dlfs was built without SPDK.
        DeviceError: the device cannot be opened.
    """
    device = _open(uri, writable=writable, engine=engine)
    _log.debug(
        "opened %s for %s by %s, %s in blocks of %s",
        device.uri,
        "writing" if writable else "reading",
        device.native.kind,
        format_bytes(device.size_bytes),
        format_bytes(device.block_bytes),
    )
    return device


def _open(uri: str, *, writable: bool, engine: Engine) -> BlockDevice:
    parsed = parse_uri(uri)
    if isinstance(parsed, FileUri):
        return FileDevice(parsed.path, writable=writable, engine=engine)
    if isinstance(parsed, MemoryUri):
        return MemoryDevice(
            parsed.name, parsed.size_bytes, block_bytes=parsed.block_bytes, writable=writable
        )
    if isinstance(parsed, NvmeTcpUri):
        return NvmeTcpDevice(parsed, writable=writable)
    if isinstance(parsed, SpdkUri):
        return SpdkDevice(parsed, writable=writable)
    raise UsageError(
        f"open {parsed}: it names many devices; a volume can be opened by it, a single device not"
    )
