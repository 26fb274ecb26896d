"""Submission and completion queue entries, opcodes and statuses that this target knows.

An ``Event`` is a kind of command or PDU, for the conditions of fault scripts and for the counters.

Source: NVM Express Base Specification 2.0, sections 3.3.3 and 4.1.1; for Fabrics commands
section 6.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Buffer

_ENTRY = struct.Struct("<BBHIIIQQIBBBBIIIIII")
_COMPLETION = struct.Struct("<QHHHH")

SGL_IN_CAPSULE = 0x01
SGL_TRANSPORT = 0x5A
NSID_ALL = 0xFFFFFFFF
FABRICS = 0x7F


class Event(Enum):
    """A kind of command or PDU, which is counted and to which faults may happen."""

    ACCEPT = "accept"
    INITIALIZE = "initialize"
    CONNECT_ADMIN = "connect admin"
    CONNECT_IO = "connect I/O"
    PROPERTY_GET = "property get"
    PROPERTY_SET = "property set"
    DISCONNECT = "disconnect"
    AUTHENTICATION_SEND = "authentication send"
    AUTHENTICATION_RECEIVE = "authentication receive"
    IDENTIFY = "identify"
    FEATURES = "features"
    LOG_PAGE = "log page"
    KEEP_ALIVE = "keep alive"
    ASYNC_EVENT = "asynchronous event request"
    READ = "read"
    WRITE = "write"
    R2T = "ready to transfer"
    WRITE_DATA = "write data"
    FLUSH = "flush"
    RESERVATION = "reservation"
    OTHER = "other"


class Admin(IntEnum):
    """Admin opcodes."""

    GET_LOG_PAGE = 0x02
    IDENTIFY = 0x06
    ABORT = 0x08
    SET_FEATURES = 0x09
    GET_FEATURES = 0x0A
    ASYNC_EVENT = 0x0C
    KEEP_ALIVE = 0x18


class Nvm(IntEnum):
    """I/O opcodes."""

    FLUSH = 0x00
    WRITE = 0x01
    READ = 0x02
    RESERVATION_REGISTER = 0x0D
    RESERVATION_REPORT = 0x0E
    RESERVATION_ACQUIRE = 0x11
    RESERVATION_RELEASE = 0x15


class Fabrics(IntEnum):
    """Fabrics command types."""

    PROPERTY_SET = 0x00
    CONNECT = 0x01
    PROPERTY_GET = 0x04
    AUTHENTICATION_SEND = 0x05
    AUTHENTICATION_RECEIVE = 0x06
    DISCONNECT = 0x08


class Status(IntEnum):
    """Status code type << 8 | status code."""

    SUCCESS = 0x000
    INVALID_OPCODE = 0x001
    INVALID_FIELD = 0x002
    CID_CONFLICT = 0x003
    ABORTED = 0x007
    INVALID_NAMESPACE = 0x00B
    SEQUENCE_ERROR = 0x00C
    SGL_LENGTH_INVALID = 0x00F
    SGL_TYPE_INVALID = 0x011
    SGL_OFFSET_INVALID = 0x016
    HOST_ID_FORMAT = 0x018
    KEEP_ALIVE_INVALID = 0x01A
    WRITE_PROTECTED = 0x020
    TRANSIENT_TRANSPORT = 0x022
    LBA_OUT_OF_RANGE = 0x080
    RESERVATION_CONFLICT = 0x083
    ASYNC_LIMIT = 0x105
    INVALID_LOG_PAGE = 0x109
    CONNECT_FORMAT = 0x180
    CONTROLLER_BUSY = 0x181
    CONNECT_PARAMETERS = 0x182
    CONNECT_HOST = 0x184
    ANA_PERSISTENT_LOSS = 0x301
    ANA_INACCESSIBLE = 0x302
    ANA_TRANSITION = 0x303
    AUTHENTICATION_REQUIRED = 0x191


# Statuses with DNR: the command would fail again.
FINAL = frozenset(Status) - {
    Status.SUCCESS,
    Status.TRANSIENT_TRANSPORT,
    Status.CONTROLLER_BUSY,
    Status.RESERVATION_CONFLICT,
    Status.ANA_PERSISTENT_LOSS,
    Status.ANA_INACCESSIBLE,
    Status.ANA_TRANSITION,
}


@dataclass(frozen=True, slots=True)
class Command:
    """The fields of a submission queue entry that this target uses."""

    opcode: int
    flags: int
    cid: int
    nsid: int
    address: int
    length: int
    sgl: int
    cdw10: int
    cdw11: int
    cdw12: int
    cdw13: int
    cdw14: int
    cdw15: int

    @classmethod
    def decode(cls, entry: bytes) -> Command:
        """Decode an entry of 64 bytes."""
        fields = _ENTRY.unpack(entry)
        opcode, flags, cid, nsid = fields[:4]
        return cls(opcode, flags, cid, nsid, fields[7], fields[8], fields[12], *fields[13:])

    def encode(self) -> bytes:
        """Encode the entry, 64 bytes."""
        return _ENTRY.pack(
            self.opcode,
            self.flags,
            self.cid,
            self.nsid,
            *(0, 0, 0, self.address, self.length, 0, 0, 0, self.sgl),
            *(self.cdw10, self.cdw11, self.cdw12, self.cdw13, self.cdw14, self.cdw15),
        )

    @property
    def fabrics_type(self) -> int:
        """FCTYPE, which lies in the first byte of the field that is the NSID of other commands."""
        return self.nsid & 0xFF

    @property
    def to_controller(self) -> bool:
        """True if the command's data goes from host to controller."""
        kind = self.fabrics_type if self.opcode == FABRICS else self.opcode
        return kind & 3 == 1

    @property
    def to_host(self) -> bool:
        """True if the command's data goes from controller to host."""
        kind = self.fabrics_type if self.opcode == FABRICS else self.opcode
        return kind & 3 == 2


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a command.

    Attributes:
        status: ``Status``, or any other status code type << 8 | status code.
        value: dwords 0 and 1 of the completion.
        data: data for the host.
        deferred: True if no completion is sent now; one may follow later.
    """

    status: int = Status.SUCCESS
    value: int = 0
    data: Buffer = b""
    deferred: bool = False


def completion(cid: int, answer: Answer, head: int) -> bytes:
    """Encode a completion queue entry; ``head`` is the head of the submission queue."""
    final = answer.status in FINAL
    status = (answer.status | 0x4000 * final) << 1
    return _COMPLETION.pack(answer.value, head, 0, cid, status)


_FABRICS_EVENTS: dict[int, Event] = {
    Fabrics.PROPERTY_GET: Event.PROPERTY_GET,
    Fabrics.PROPERTY_SET: Event.PROPERTY_SET,
    Fabrics.DISCONNECT: Event.DISCONNECT,
    Fabrics.AUTHENTICATION_SEND: Event.AUTHENTICATION_SEND,
    Fabrics.AUTHENTICATION_RECEIVE: Event.AUTHENTICATION_RECEIVE,
}
_ADMIN_EVENTS: dict[int, Event] = {
    Admin.GET_LOG_PAGE: Event.LOG_PAGE,
    Admin.IDENTIFY: Event.IDENTIFY,
    Admin.SET_FEATURES: Event.FEATURES,
    Admin.GET_FEATURES: Event.FEATURES,
    Admin.ASYNC_EVENT: Event.ASYNC_EVENT,
    Admin.KEEP_ALIVE: Event.KEEP_ALIVE,
}
_IO_EVENTS: dict[int, Event] = {
    Nvm.FLUSH: Event.FLUSH,
    Nvm.WRITE: Event.WRITE,
    Nvm.READ: Event.READ,
    Nvm.RESERVATION_REGISTER: Event.RESERVATION,
    Nvm.RESERVATION_REPORT: Event.RESERVATION,
    Nvm.RESERVATION_ACQUIRE: Event.RESERVATION,
    Nvm.RESERVATION_RELEASE: Event.RESERVATION,
}


def event_of(command: Command, *, admin: bool) -> Event:
    """Return the kind of a command; ``admin`` is True for one of an admin queue."""
    if command.opcode != FABRICS:
        return (_ADMIN_EVENTS if admin else _IO_EVENTS).get(command.opcode, Event.OTHER)
    if command.fabrics_type == Fabrics.CONNECT:
        return Event.CONNECT_IO if command.cdw10 >> 16 else Event.CONNECT_ADMIN
    return _FABRICS_EVENTS.get(command.fabrics_type, Event.OTHER)
