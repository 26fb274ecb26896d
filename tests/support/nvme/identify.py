"""Encodes Identify data structures and the discovery log page of a controller.

Source: NVM Express Base Specification 2.0, sections 5.17 (Identify) and 5.16.1.23 (discovery log).
"""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

from tests.support.nvme.namespace import Namespace
from tests.support.nvme.reservation import CAPABILITIES

IDENTIFY_BYTES = 4096
VERSION = 0x00020000
DISCOVERY_NQN = "nqn.2014-08.org.nvmexpress.discovery"
RECORD_BYTES = 1024
NOTICE_NAMESPACE = 1 << 8
NOTICE_ANA = 1 << 11
NOTICE_DISCOVERY = 1 << 31


@dataclass(frozen=True)
class Settings:
    """The properties of a subsystem's controllers.

    Attributes:
        queue_entries: entries of an I/O queue, at most 65536 (MQES is one less).
        io_queues: most I/O queues that are granted.
        mdts: a transfer has at most 4 KiB << mdts; 0: no limit.
        in_capsule_bytes: most data of a write in its capsule, a multiple of 16.
        max_commands: MAXCMD; 0: not reported.
        traffic_keeps_alive: TBKAS: any admin command counts as a Keep Alive.
        async_events: most outstanding Asynchronous Event Requests.
        notices: True if the controllers report changes by asynchronous events.
        ana: True if the controllers report asymmetric namespace access.
        transition_s: ANATT, the longest time of a change between two ANA states, in seconds.
        quiesce_ms: CQT, the time after which no command of a lost connection takes effect any
            more; 0: not reported.
        serial: serial number of the subsystem.
    """

    queue_entries: int = 128
    io_queues: int = 64
    mdts: int = 5
    in_capsule_bytes: int = 8192
    max_commands: int = 0
    traffic_keeps_alive: bool = False
    async_events: int = 4
    notices: bool = True
    ana: bool = False
    transition_s: int = 10
    quiesce_ms: int = 1
    serial: str = "DLFS0000000000000001"

    @property
    def transfer_bytes_max(self) -> int:
        """Most data bytes of one command."""
        return 4096 << self.mdts if self.mdts else 1 << 32


def _put(page: bytearray, at: int, layout: str, *values: int | bytes) -> None:
    struct.pack_into("<" + layout, page, at, *values)


def controller_page(
    settings: Settings, number: int, subsystem_nqn: str, namespaces: list[Namespace]
) -> bytes:
    """Encode Identify Controller (CNS 01h); without I/O fields for the discovery subsystem."""
    discovery = subsystem_nqn == DISCOVERY_NQN
    page = bytearray(IDENTIFY_BYTES)
    page[4:24] = settings.serial.encode().ljust(20)[:20]
    page[24:64] = b"DLFS scripted target".ljust(40)
    page[64:72] = b"1".ljust(8)
    page[76] = 0b10 | settings.ana << 3  # CMIC: several controllers
    page[77] = settings.mdts
    _put(page, 78, "HI", number, VERSION)
    _put(page, 96, "I", 1 | settings.traffic_keeps_alive << 6)  # CTRATT: 128-bit host identifiers
    if settings.notices:
        offered = NOTICE_DISCOVERY if discovery else NOTICE_NAMESPACE | NOTICE_ANA * settings.ana
        _put(page, 92, "I", offered)  # OAES
    page[111] = 2 if discovery else 1
    page[259] = settings.async_events - 1
    page[261] = 0b100  # LPA: extended data, so log pages have offsets
    _put(page, 320, "H", 1)  # KAS: 100 ms
    _put(page, 514, "H", settings.max_commands or settings.queue_entries)
    _put(page, 536, "I", 1 | 1 << 20 | 1 << 21)  # SGLS: offsets in capsules, transport SGLs
    page[768:1024] = subsystem_nqn.encode().ljust(256, b"\0")
    if discovery:
        return bytes(page)
    page[342], page[343] = settings.transition_s, 0b11111  # ANATT, ANACAP
    _put(page, 344, "II", *(max((space.ana_group for space in namespaces), default=0),) * 2)
    page[512], page[513] = 0x66, 0x44
    _put(page, 516, "IH", max((space.nsid for space in namespaces), default=0), 1 << 5)
    _put(page, 386, "H", settings.quiesce_ms)
    page[525] = any(space.volatile_cache for space in namespaces) | 0b110
    _put(page, 1792, "IIHBB", (64 + settings.in_capsule_bytes) // 16, 1, 0, 0, 1)
    return bytes(page)


def namespace_page(namespace: Namespace) -> bytes:
    """Encode Identify Namespace (CNS 00h)."""
    page = bytearray(IDENTIFY_BYTES)
    _put(page, 0, "QQQ", *(namespace.blocks,) * 3)
    page[30], page[31] = 1, CAPABILITIES  # shared
    _put(page, 92, "I", namespace.ana_group)
    page[99] = namespace.read_only
    page[104:120] = namespace.uuid.bytes
    page[130] = namespace.block_bytes.bit_length() - 1
    return bytes(page)


def active_list_page(namespaces: list[Namespace], above: int) -> bytes:
    """Encode the active namespace IDs (CNS 02h) greater than ``above``."""
    found = sorted(space.nsid for space in namespaces if space.nsid > above)[:1024]
    return struct.pack(f"<{len(found)}I", *found).ljust(IDENTIFY_BYTES, b"\0")


def descriptors_page(namespace: Namespace) -> bytes:
    """Encode the identification descriptors (CNS 03h): NGUID, UUID, command set."""
    identity = namespace.uuid.bytes
    found = b"\x02\x10\0\0" + identity + b"\x03\x10\0\0" + identity + b"\x04\x01\0\0\0"
    return found.ljust(IDENTIFY_BYTES, b"\0")


# ---- ANA -----------------------------------------------------------------------------------------


class AnaState(IntEnum):
    """States of a group of namespaces on a controller."""

    OPTIMIZED = 1
    NON_OPTIMIZED = 2
    INACCESSIBLE = 3
    PERSISTENT_LOSS = 4
    CHANGE = 15


def ana_page(namespaces: list[Namespace], states: Mapping[int, AnaState], *, lists: bool) -> bytes:
    """Encode the ANA log page (LID 0Ch).

    Args:
        namespaces: the namespaces of the subsystem.
        states: state of each group that is not optimized.
        lists: list the namespaces of each group.
    """
    groups = sorted({space.ana_group for space in namespaces})
    page = struct.pack("<QH6x", 1, len(groups))
    for group in groups:
        found = [space.nsid for space in namespaces if space.ana_group == group and lists]
        state = states.get(group, AnaState.OPTIMIZED)
        page += struct.pack("<IIQB15x", group, len(found), 1, state)
        page += struct.pack(f"<{len(found)}I", *found)
    return page


# ---- discovery -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class DiscoveryRecord:
    """One path to one subsystem.

    Attributes:
        nqn: NQN of the subsystem.
        address: IPv4 or IPv6 address.
        port: TCP port.
        port_id: ID of the subsystem's port.
        referral: True for another discovery controller.
        secure_channel: True if connections must be encrypted.
    """

    nqn: str
    address: str
    port: int
    port_id: int = 1
    referral: bool = False
    secure_channel: bool = False

    def encode(self) -> bytes:
        """Encode a record of the discovery log page."""
        page = bytearray(RECORD_BYTES)
        family = 1 if ipaddress.ip_address(self.address).version == 4 else 2
        _put(page, 0, "BBBB", 3, family, 1 if self.referral else 2, int(self.secure_channel))
        _put(page, 4, "HHH", self.port_id, 0xFFFF, 32)
        page[32:64] = str(self.port).encode().ljust(32)
        page[256:512] = self.nqn.encode().ljust(256, b"\0")
        page[512:768] = self.address.encode().ljust(256)
        return bytes(page)


def discovery_page(records: list[DiscoveryRecord], generation: int) -> bytes:
    """Encode the discovery log page (LID 70h)."""
    head = struct.pack("<QQH", generation, len(records), 0).ljust(RECORD_BYTES, b"\0")
    return head + b"".join(record.encode() for record in records)
