r"""Reads the discovery log page of a discovery controller.

A page has a header of 1024 bytes and a record of 1024 bytes for each path to a subsystem. It may
change while it is read. The header counts changes: it is read before and after the records, and
everything is read again until both headers agree. No bytes beyond the length in the header are
read, since Linux's target returns unrelated memory there.

Bytes from a target are not trusted: counts are bounded, and bytes other than printable ASCII become
``\xNN`` in text, so that it can be printed on a terminal.

Source: NVM Express Base Specification 2.0, section 5.16.1.23 (Discovery, log page 70h), and 5.16
(Get Log Page).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import StrEnum

from dlfs.block.nvme import CommandRunner, NvmeCommand
from dlfs.errors import DeviceError, FormatError, LimitError

HEADER_BYTES = 1024
RECORD_BYTES = 1024
RECORDS_MAX = 1024
PAGE_BYTES = 4096
"""Most bytes that one command reads."""
ATTEMPTS = 8
"""Attempts to read a log that changes meanwhile."""

_GET_LOG_PAGE = 0x02
_DISCOVERY = 0x70
_HEADER = struct.Struct("<QQH")
_RECORD = struct.Struct("<BBBBH26x32s192x256s256s256x")
_SECURE_CHANNEL = 0x03
_REQUIRED = 0x01

_TRANSPORTS = {1: "rdma", 2: "fc", 3: "tcp", 254: "loop"}
_FAMILIES = {1: "ipv4", 2: "ipv6", 3: "ib", 4: "fc", 254: "loop"}


class RecordKind(StrEnum):
    """Kind of the subsystem that a record describes."""

    REFERRAL = "referral"
    """Another discovery controller."""
    SUBSYSTEM = "subsystem"
    """A subsystem with namespaces."""
    ITSELF = "itself"
    """The discovery controller whose log this is."""
    UNKNOWN = "unknown"


_KINDS = {1: RecordKind.REFERRAL, 2: RecordKind.SUBSYSTEM, 3: RecordKind.ITSELF}


@dataclass(frozen=True, slots=True)
class DiscoveryRecord:
    """One path to one subsystem.

    Attributes:
        kind: kind of the subsystem.
        transport: ``tcp``, ``rdma``, ``fc``, ``loop``, or the number of another transport.
        address_family: ``ipv4``, ``ipv6``, ``ib``, ``fc``, ``loop``, or a number.
        address: address in the transport's form.
        service_id: service in the transport's form; for TCP the port in digits.
        subsystem_nqn: NQN of the subsystem.
        port_id: the target's number of the address.
        secure_channel: True if connections must be encrypted.
    """

    kind: RecordKind
    transport: str
    address_family: str
    address: str
    service_id: str
    subsystem_nqn: str
    port_id: int
    secure_channel: bool


@dataclass(frozen=True, slots=True)
class LogHeader:
    """The header of a discovery log page.

    Attributes:
        generation: counter of changes.
        record_count: number of records.
    """

    generation: int
    record_count: int


def _clean(field: bytes) -> str:
    """Return the text of a field up to its NUL, without padding, as printable ASCII."""
    text = field.split(b"\0", 1)[0].rstrip(b" ")
    return "".join(chr(byte) if 0x20 <= byte < 0x7F else f"\\x{byte:02x}" for byte in text)


def decode_header(data: bytes, where: str) -> LogHeader:
    """Decode the header of a page.

    Args:
        data: 1024 bytes.
        where: names the controller in error messages.

    Raises:
        FormatError: the records have an unknown format.
        LimitError: the log has more than 1024 records.
    """
    generation, count, record_format = _HEADER.unpack_from(data)
    if record_format != 0:
        raise FormatError(f"discover at {where}: expected records of format 0, got {record_format}")
    if count > RECORDS_MAX:
        raise LimitError(
            f"discover at {where}: expected at most {RECORDS_MAX} records, got {count}"
        )
    return LogHeader(generation, count)


def decode_record(data: bytes) -> DiscoveryRecord:
    """Decode one record. Accepts any bytes.

    Args:
        data: 1024 bytes.
    """
    transport, family, kind, requirements, port_id, service, nqn, address = _RECORD.unpack(data)
    return DiscoveryRecord(
        kind=_KINDS.get(kind, RecordKind.UNKNOWN),
        transport=_TRANSPORTS.get(transport, str(transport)),
        address_family=_FAMILIES.get(family, str(family)),
        address=_clean(address),
        service_id=_clean(service),
        subsystem_nqn=_clean(nqn),
        port_id=port_id,
        secure_channel=requirements & _SECURE_CHANNEL == _REQUIRED,
    )


def read_log(runner: CommandRunner, where: str) -> list[DiscoveryRecord]:
    """Read a controller's whole discovery log page.

    Args:
        runner: an association with a discovery controller.
        where: what errors call it.

    Raises:
        DeviceError: the controller refused, was lost, or its log does not stop changing.
        FormatError: the log has a form that this code does not know.
        LimitError: it has more than 1024 records.
    """
    header = _read_header(runner, where)
    for _ in range(ATTEMPTS):
        records, refusal = _read_records(runner, header.record_count, where)
        again = _read_header(runner, where)
        if again == header:
            if refusal is not None:
                raise refusal
            return records
        header = again
    raise DeviceError(
        f"discover at {where}: expected the log page to stay as it is while it is read, "
        f"got {ATTEMPTS} changes"
    )


def _read_header(runner: CommandRunner, where: str) -> LogHeader:
    data, refusal = _read(runner, 0, HEADER_BYTES, where)
    if refusal is not None:
        raise refusal
    return decode_header(data, where)


def _read_records(
    runner: CommandRunner, count: int, where: str
) -> tuple[list[DiscoveryRecord], DeviceError | None]:
    """Read the records; or return why a command was refused, as after the log became shorter."""
    records: list[DiscoveryRecord] = []
    end = HEADER_BYTES + count * RECORD_BYTES
    for offset in range(HEADER_BYTES, end, PAGE_BYTES):
        page, refusal = _read(runner, offset, min(PAGE_BYTES, end - offset), where)
        if refusal is not None:
            return [], refusal
        records += [
            decode_record(page[start : start + RECORD_BYTES])
            for start in range(0, len(page), RECORD_BYTES)
        ]
    return records, None


def _read(
    runner: CommandRunner, offset_bytes: int, length_bytes: int, where: str
) -> tuple[bytes, DeviceError | None]:
    data = bytearray(length_bytes)
    command = NvmeCommand(
        _GET_LOG_PAGE,
        cdw10=_DISCOVERY | (length_bytes // 4 - 1) << 16,
        cdw12=offset_bytes,
    )
    result = runner.run_admin(command, data)
    if result.status == 0:
        return bytes(data), None
    return b"", DeviceError(
        f"discover at {where}: read {length_bytes} bytes of the log page at byte {offset_bytes}: "
        f"the controller answered with status {result.status:#x}"
    )
