"""Lists the namespaces of a subsystem with Identify commands to one of its controllers.

Answers of a target are not trusted: everything is bounded, and a namespace with invalid data is an
error that names it.

Source: NVM Express Base Specification 2.0, section 5.17 (Identify: namespace, active namespace
list, namespace identification descriptors); NVM Command Set Specification 1.0, section 4.1.5.1.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import pairwise
from uuid import UUID

from dlfs.block.nvme import CommandRunner, NvmeCommand
from dlfs.errors import DeviceError, FormatError, LimitError

NAMESPACES_MAX = 1024
"""Most namespaces of one subsystem that are listed: one command returns so many."""
SIZE_BYTES_MAX = 1 << 63
IDENTIFY_BYTES = 4096

_IDENTIFY = 0x06
_NAMESPACE = 0x00
_ACTIVE_LIST = 0x02
_DESCRIPTORS = 0x03
_BLOCK_BITS = range(9, 17)
_FORMATS_OFFSET = 128
_EUI64, _NGUID, _UUID = 1, 2, 3
_LENGTHS = {_EUI64: 8, _NGUID: 16, _UUID: 16}


@dataclass(frozen=True, slots=True)
class NamespaceInfo:
    """One namespace of a subsystem.

    Attributes:
        nsid: namespace ID.
        size_bytes: size of the namespace.
        block_bytes: size of a logical block.
        identity: globally unique identifier: ``uuid:``, ``nguid:`` or ``eui64:`` and hexadecimal
            digits; empty if the namespace has none.
    """

    nsid: int
    size_bytes: int
    block_bytes: int
    identity: str


def list_namespaces(runner: CommandRunner, where: str) -> list[NamespaceInfo]:
    """List a subsystem's active namespaces.

    Args:
        runner: an association with one of its controllers.
        where: names the subsystem in error messages.

    Raises:
        DeviceError: the controller refused a command or was lost.
        LimitError: the subsystem has more than 1024 namespaces.
        FormatError: an answer is invalid.
    """
    found = decode_active_list(_identify(runner, _ACTIVE_LIST, 0, where), where)
    return [_describe(runner, nsid, where) for nsid in found]


def _describe(runner: CommandRunner, nsid: int, where: str) -> NamespaceInfo:
    page = _identify(runner, _NAMESPACE, nsid, where)
    size_bytes, block_bytes = decode_size(page, f"{where} namespace {nsid}")
    # Old targets have no descriptors; their Identify page has the identifiers.
    of_page = {_NGUID: page[104:120], _EUI64: page[120:128]}
    names = {kind: name for kind, name in of_page.items() if any(name)}
    result, descriptors = _try_identify(runner, _DESCRIPTORS, nsid)
    if result == 0:
        names |= decode_descriptors(descriptors)
    return NamespaceInfo(nsid, size_bytes, block_bytes, format_identity(names))


def decode_active_list(page: bytes, where: str) -> list[int]:
    """Decode an active namespace list.

    Raises:
        LimitError: the list is full, so there may be more namespaces.
        FormatError: the list does not ascend.
    """
    numbers = struct.unpack(f"<{IDENTIFY_BYTES // 4}I", page)
    if 0 not in numbers:
        raise LimitError(f"discover at {where}: expected fewer than {NAMESPACES_MAX} namespaces")
    found = list(numbers[: numbers.index(0)])
    if any(high <= low for low, high in pairwise(found)):
        raise FormatError(f"discover at {where}: expected an ascending list of namespaces")
    return found


def decode_size(page: bytes, where: str) -> tuple[int, int]:
    """Decode the size of a namespace and of its blocks, in bytes, from its Identify page.

    Raises:
        FormatError: the block format is invalid or has metadata.
    """
    (blocks,) = struct.unpack_from("<Q", page)
    chosen = page[26] & 0x0F | (page[26] & 0x60) >> 1
    metadata_bytes, bits = struct.unpack_from("<HB", page, _FORMATS_OFFSET + 4 * chosen)
    if bits not in _BLOCK_BITS or not 0 < blocks << bits < SIZE_BYTES_MAX:
        raise FormatError(
            f"discover at {where}: expected blocks of 512 to 65536 bytes, got {blocks} blocks of "
            f"2^{bits} bytes"
        )
    if metadata_bytes:
        raise FormatError(
            f"discover at {where}: expected blocks without metadata, got {metadata_bytes} bytes"
        )
    return blocks << bits, 1 << bits


def decode_descriptors(page: bytes) -> dict[int, bytes]:
    """Decode identification descriptors by type; leaves out unknown and malformed ones."""
    names = {}
    at = 0
    while at + 4 <= len(page) and page[at + 1]:
        kind, length = page[at], page[at + 1]
        name = page[at + 4 : at + 4 + length]
        if len(name) == _LENGTHS.get(kind) and any(name):
            names[kind] = name
        at += 4 + length
    return names


def format_identity(names: dict[int, bytes]) -> str:
    """Return the text of a namespace's highest-ranking identifier: UUID, NGUID, EUI64."""
    if _UUID in names:
        return f"uuid:{UUID(bytes=names[_UUID])}"
    if _NGUID in names:
        return f"nguid:{names[_NGUID].hex()}"
    return f"eui64:{names[_EUI64].hex()}" if _EUI64 in names else ""


def _try_identify(runner: CommandRunner, structure: int, nsid: int) -> tuple[int, bytes]:
    data = bytearray(IDENTIFY_BYTES)
    result = runner.run_admin(NvmeCommand(_IDENTIFY, nsid=nsid, cdw10=structure), data)
    return result.status, bytes(data)


def _identify(runner: CommandRunner, structure: int, nsid: int, where: str) -> bytes:
    status, page = _try_identify(runner, structure, nsid)
    if status:
        raise DeviceError(
            f"discover at {where}: identify (structure {structure:#x}, namespace {nsid}): the "
            f"controller answered with status {status:#x}"
        )
    return page
