"""Encodes and decodes the PDUs of NVMe/TCP, with digests and alignment.

A PDU is first laid out as a ``Frame``, which has every part that is sent (common header, specific
header, header digest, padding, data, data digest), so that a fault can change any of them. A
``Decoder`` accepts bytes in fragments of any size and checks every field.

All integers are little-endian.

Source: NVM Express TCP Transport Specification 1.0c, section 3.6 (PDUs) and 3.5 (errors).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, ClassVar

from dlfs._native.checksums import crc32c

if TYPE_CHECKING:
    from typing_extensions import Buffer

COMMON_HEADER_BYTES = 8
DIGEST_BYTES = 4
IC_BYTES = 128
TERM_DATA_BYTES_MAX = 128
ENTRY_BYTES = 64
COMPLETION_BYTES = 16
DATA_BYTES_MAX = 1 << 24

FLAG_HEADER_DIGEST = 1
FLAG_DATA_DIGEST = 2
FLAG_LAST = 4
FLAG_SUCCESS = 8

_COMMON = struct.Struct("<BBBBI")
_IC = struct.Struct("<HBBI")
_TERM = struct.Struct("<HI")
_DATA = struct.Struct("<HHIII")


class PduType(IntEnum):
    """PDU type in the common header."""

    IC_REQ = 0x00
    IC_RESP = 0x01
    H2C_TERM_REQ = 0x02
    C2H_TERM_REQ = 0x03
    CAPSULE_CMD = 0x04
    CAPSULE_RESP = 0x05
    H2C_DATA = 0x06
    C2H_DATA = 0x07
    R2T = 0x09


class FatalError(IntEnum):
    """Fatal error status (FES) of a TermReq."""

    INVALID_HEADER_FIELD = 1
    SEQUENCE = 2
    HEADER_DIGEST = 3
    OUT_OF_RANGE = 4
    LIMIT_EXCEEDED = 5
    UNSUPPORTED_PARAMETER = 6


class PduError(Exception):
    """The peer violated the protocol, which ends the connection.

    Attributes:
        fes: fatal error status for the TermReq.
        fei: offset of the wrong field in the header, or the wrong digest.
        header: the header as received.
    """

    def __init__(self, fes: FatalError, fei: int, header: bytes, message: str) -> None:
        super().__init__(message)
        self.fes = fes
        self.fei = fei
        self.header = header


@dataclass(frozen=True, slots=True)
class Initialize:
    """The fields that ICReq and ICResp have in common.

    Attributes:
        pfv: PDU format version, 0.
        alignment: HPDA or CPDA, in dwords, 0's based.
        digests: bit 0: header digests, bit 1: data digests.
        limit: MAXR2T (0's based) or MAXH2CDATA in bytes.
    """

    pfv: int = 0
    alignment: int = 0
    digests: int = 0
    limit: int = 0

    HEADER_BYTES: ClassVar[int] = IC_BYTES
    data: ClassVar[bytes] = b""
    flags: ClassVar[int] = 0

    def specific(self) -> bytes:
        """Encode the header after the common part."""
        head = _IC.pack(self.pfv, self.alignment, self.digests, self.limit)
        return head.ljust(IC_BYTES - COMMON_HEADER_BYTES, b"\0")


class ICReq(Initialize):
    """Initialize connection request, host to controller; ``limit`` is MAXR2T."""

    TYPE = PduType.IC_REQ


class ICResp(Initialize):
    """Initialize connection response; ``limit`` is MAXH2CDATA."""

    TYPE = PduType.IC_RESP


@dataclass(frozen=True, slots=True)
class Terminate:
    """The fields of both TermReqs: fatal error, its position, and the wrong header."""

    fes: int
    fei: int = 0
    data: bytes = b""

    HEADER_BYTES: ClassVar[int] = 24
    flags: ClassVar[int] = 0

    def specific(self) -> bytes:
        """Encode the header after the common part."""
        return _TERM.pack(self.fes, self.fei).ljust(16, b"\0")


class H2CTermReq(Terminate):
    """Termination request, host to controller."""

    TYPE = PduType.H2C_TERM_REQ


class C2HTermReq(Terminate):
    """Termination request, controller to host."""

    TYPE = PduType.C2H_TERM_REQ


@dataclass(frozen=True, slots=True)
class CapsuleCmd:
    """A command capsule.

    Attributes:
        entry: the submission queue entry.
        data: in-capsule data.
        damaged: True if it was received with a wrong data digest.
    """

    entry: bytes
    data: Buffer = b""
    damaged: bool = False

    TYPE: ClassVar[PduType] = PduType.CAPSULE_CMD
    HEADER_BYTES: ClassVar[int] = 72
    flags: ClassVar[int] = 0

    def specific(self) -> bytes:
        """Encode the header after the common part."""
        return self.entry


@dataclass(frozen=True, slots=True)
class CapsuleResp:
    """A response capsule: a completion queue entry."""

    entry: bytes

    TYPE: ClassVar[PduType] = PduType.CAPSULE_RESP
    HEADER_BYTES: ClassVar[int] = 24
    data: ClassVar[bytes] = b""
    flags: ClassVar[int] = 0

    def specific(self) -> bytes:
        """Encode the header after the common part."""
        return self.entry


@dataclass(frozen=True, slots=True)
class DataPdu:
    """The fields that H2CData and C2HData have in common.

    Attributes:
        cccid: command ID.
        tag: TTAG of the R2T; 0 in C2HData.
        offset: offset of the data within the command's data.
        data: a multiple of 4 bytes.
        length: wrong value for DATAL; None: the length of ``data``.
        last: True for the last PDU of the command (C2HData) or of the R2T (H2CData).
        success: C2HData: the command succeeded and no CapsuleResp follows.
        damaged: True if it was received with a wrong data digest.
    """

    cccid: int
    tag: int
    offset: int
    data: Buffer
    length: int | None = None
    last: bool = True
    success: bool = False
    damaged: bool = False

    HEADER_BYTES: ClassVar[int] = 24

    @property
    def flags(self) -> int:
        """Return the flags LAST_PDU and SUCCESS."""
        return FLAG_LAST * self.last | FLAG_SUCCESS * self.success

    def specific(self) -> bytes:
        """Encode the header after the common part."""
        length = len(memoryview(self.data)) if self.length is None else self.length
        return _DATA.pack(self.cccid, self.tag, self.offset, length, 0)


class H2CData(DataPdu):
    """Data of a command, host to controller."""

    TYPE = PduType.H2C_DATA


class C2HData(DataPdu):
    """Data of a command, controller to host."""

    TYPE = PduType.C2H_DATA


@dataclass(frozen=True, slots=True)
class R2T:
    """Ready to transfer: the controller requests a range of a command's data."""

    cccid: int
    tag: int
    offset: int
    length: int

    TYPE: ClassVar[PduType] = PduType.R2T
    HEADER_BYTES: ClassVar[int] = 24
    data: ClassVar[bytes] = b""
    flags: ClassVar[int] = 0

    def specific(self) -> bytes:
        """Encode the header after the common part."""
        return _DATA.pack(self.cccid, self.tag, self.offset, self.length, 0)


Pdu = ICReq | ICResp | H2CTermReq | C2HTermReq | CapsuleCmd | CapsuleResp | H2CData | C2HData | R2T

WITHOUT_DIGESTS = frozenset(
    (PduType.IC_REQ, PduType.IC_RESP, PduType.H2C_TERM_REQ, PduType.C2H_TERM_REQ)
)
TO_CONTROLLER = frozenset(
    (PduType.IC_REQ, PduType.H2C_TERM_REQ, PduType.CAPSULE_CMD, PduType.H2C_DATA)
)
TO_HOST = frozenset(
    (
        PduType.IC_RESP,
        PduType.C2H_TERM_REQ,
        PduType.CAPSULE_RESP,
        PduType.C2H_DATA,
        PduType.R2T,
    )
)


@dataclass(frozen=True, slots=True)
class Wire:
    """The parameters that ICReq and ICResp negotiated for one direction.

    Attributes:
        header_digest: every header but those of ``WITHOUT_DIGESTS`` is followed by its CRC32C.
        data_digest: all data is followed by its CRC32C.
        alignment_bytes: the offset of data within its PDU is a multiple of this.
    """

    header_digest: bool = False
    data_digest: bool = False
    alignment_bytes: int = 4


# ---- encoding ------------------------------------------------------------------------------------


@dataclass
class Frame:
    """The parts of a PDU as they are sent; a digest that is None is computed from the parts."""

    pdu_type: int
    flags: int
    header_bytes: int
    data_offset: int
    length_bytes: int
    specific: bytes
    header_digest: bytes = b""
    padding: bytes = b""
    data: Buffer = b""
    data_digest: bytes = b""

    def parts(self) -> list[Buffer]:
        """Return the parts as bytes, without copying data."""
        common = _COMMON.pack(
            self.pdu_type, self.flags, self.header_bytes, self.data_offset, self.length_bytes
        )
        head = common + self.specific + self.header_digest + self.padding
        return [head, self.data, self.data_digest]

    def encode(self) -> bytes:
        """Return all bytes of the frame."""
        return b"".join(self.parts())


def digest(*parts: Buffer) -> bytes:
    """Return the CRC32C of the parts in wire format."""
    crc = 0
    for part in parts:
        crc = crc32c(part, crc)
    return crc.to_bytes(4, "little")


def frame_of(pdu: Pdu, wire: Wire) -> Frame:
    """Lay out a PDU as a frame."""
    plain = pdu.TYPE in WITHOUT_DIGESTS
    header_digest = wire.header_digest and not plain
    data_bytes = memoryview(pdu.data).nbytes
    flags = pdu.flags | (FLAG_HEADER_DIGEST if header_digest else 0)
    specific = pdu.specific()
    at = pdu.HEADER_BYTES + DIGEST_BYTES * header_digest
    padding, data_offset, data_digest = b"", 0, b""
    if data_bytes and not plain:
        padding = bytes(-at % wire.alignment_bytes)
        at += len(padding)
        data_offset = at
        if wire.data_digest:
            flags |= FLAG_DATA_DIGEST
            data_digest = digest(pdu.data)
    frame = Frame(
        pdu.TYPE,
        flags,
        pdu.HEADER_BYTES,
        data_offset,
        at + data_bytes + len(data_digest),
        specific,
        padding=padding,
        data=pdu.data,
        data_digest=data_digest,
    )
    if header_digest:
        sign_header(frame)
    return frame


def sign_header(frame: Frame) -> None:
    """Compute a frame's header digest from its present header."""
    frame.header_digest = b""
    frame.header_digest = digest(
        bytes(frame.parts()[0])[: COMMON_HEADER_BYTES + len(frame.specific)]
    )


def encode(pdu: Pdu, wire: Wire | None = None) -> bytes:
    """Return the bytes of a PDU."""
    return frame_of(pdu, wire or Wire()).encode()


# ---- decoding ------------------------------------------------------------------------------------

_HEADER_BYTES = {
    PduType.IC_REQ: IC_BYTES,
    PduType.IC_RESP: IC_BYTES,
    PduType.H2C_TERM_REQ: 24,
    PduType.C2H_TERM_REQ: 24,
    PduType.CAPSULE_CMD: 72,
    PduType.CAPSULE_RESP: 24,
    PduType.H2C_DATA: 24,
    PduType.C2H_DATA: 24,
    PduType.R2T: 24,
}
_CARRIES_DATA = frozenset((PduType.CAPSULE_CMD, PduType.H2C_DATA, PduType.C2H_DATA))
_FLAGS = {
    PduType.H2C_DATA: FLAG_LAST,
    PduType.C2H_DATA: FLAG_LAST | FLAG_SUCCESS,
}


@dataclass
class Decoder:
    """Decodes a stream of bytes into PDUs.

    Attributes:
        accepted: types that may be received; others are a sequence error.
        wire: parameters of this direction.
        data_bytes_max: most data of one PDU; more is refused before it is received.
    """

    accepted: Iterable[PduType] = TO_CONTROLLER
    wire: Wire = field(default_factory=Wire)
    data_bytes_max: int = DATA_BYTES_MAX
    _buffer: bytearray = field(default_factory=bytearray)
    _start: int = 0

    def feed(self, data: Buffer) -> None:
        """Add received bytes."""
        if self._start:
            del self._buffer[: self._start]
            self._start = 0
        self._buffer += data

    @property
    def pending_bytes(self) -> int:
        """Number of received bytes that are not part of a returned PDU."""
        return len(self._buffer) - self._start

    def next(self) -> Pdu | None:
        """Return the next complete PDU.

        Returns:
            The PDU; None if more bytes are needed.

        Raises:
            PduError: the bytes are not a PDU that may be received now.
        """
        have = self.pending_bytes
        if have < COMMON_HEADER_BYTES:
            return None
        common = _COMMON.unpack_from(self._buffer, self._start)
        header = bytes(self._buffer[self._start : self._start + COMMON_HEADER_BYTES])
        self._check_common(header, *common)
        length_bytes = common[4]
        if have < length_bytes:
            return None
        whole = bytes(memoryview(self._buffer)[self._start : self._start + length_bytes])
        self._start += length_bytes
        return self._decode(whole, PduType(common[0]), common[1], common[3])

    def _digest_flags(self, pdu_type: PduType, length_bytes: int) -> int:
        if pdu_type in WITHOUT_DIGESTS:
            return 0
        flags = FLAG_HEADER_DIGEST if self.wire.header_digest else 0
        header_bytes = _HEADER_BYTES[pdu_type] + DIGEST_BYTES * self.wire.header_digest
        has_data = pdu_type in _CARRIES_DATA and length_bytes > header_bytes
        return flags | (FLAG_DATA_DIGEST if self.wire.data_digest and has_data else 0)

    def _check_common(
        self, header: bytes, kind: int, flags: int, header_bytes: int, data_at: int, length: int
    ) -> None:
        def refuse(at: int, what: str, got: int) -> PduError:
            message = f"PDU of type {kind:#04x}: unexpected {what} {got}"
            return PduError(FatalError.INVALID_HEADER_FIELD, at, header, message)

        if kind not in _HEADER_BYTES:
            raise refuse(0, "PDU-Type", kind)
        pdu_type = PduType(kind)
        if pdu_type not in self.accepted:
            raise PduError(FatalError.SEQUENCE, 0, header, f"unexpected {pdu_type.name}")
        if header_bytes != _HEADER_BYTES[pdu_type]:
            raise refuse(2, "HLEN", header_bytes)
        least = header_bytes + DIGEST_BYTES * (
            self.wire.header_digest and pdu_type not in WITHOUT_DIGESTS
        )
        if not least <= length <= self._length_max(pdu_type, least):
            raise refuse(4, "PLEN", length)
        may_have = _FLAGS.get(pdu_type, 0)
        if flags & ~may_have != self._digest_flags(pdu_type, length):
            raise refuse(1, "FLAGS", flags)
        if pdu_type in _CARRIES_DATA and length > least:
            tail = DIGEST_BYTES * self.wire.data_digest
            if data_at < least or data_at % self.wire.alignment_bytes or data_at + tail > length:
                raise refuse(3, "PDO", data_at)

    def _length_max(self, pdu_type: PduType, least: int) -> int:
        if pdu_type in (PduType.H2C_TERM_REQ, PduType.C2H_TERM_REQ):
            return least + TERM_DATA_BYTES_MAX
        if pdu_type in _CARRIES_DATA:
            return least + self.wire.alignment_bytes + self.data_bytes_max + DIGEST_BYTES
        return least

    def _decode(self, whole: bytes, pdu_type: PduType, flags: int, data_at: int) -> Pdu:
        header_bytes = _HEADER_BYTES[pdu_type]
        specific = whole[COMMON_HEADER_BYTES:header_bytes]
        if flags & FLAG_HEADER_DIGEST:
            got = whole[header_bytes : header_bytes + DIGEST_BYTES]
            if got != digest(whole[:header_bytes]):
                fei = int.from_bytes(got, "little")
                message = f"{pdu_type.name}: wrong header digest {fei:#010x}"
                raise PduError(FatalError.HEADER_DIGEST, fei, whole[:header_bytes], message)
        data, damaged = memoryview(b""), False
        if pdu_type in _CARRIES_DATA and len(whole) > header_bytes + DIGEST_BYTES * (flags & 1):
            end = len(whole) - DIGEST_BYTES * bool(flags & FLAG_DATA_DIGEST)
            data = memoryview(whole)[data_at:end]
            damaged = bool(flags & FLAG_DATA_DIGEST) and whole[end:] != digest(data)
        return _build(pdu_type, flags, specific, data, damaged, whole)


def _build(
    pdu_type: PduType, flags: int, specific: bytes, data: memoryview, damaged: bool, whole: bytes
) -> Pdu:
    if pdu_type in (PduType.IC_REQ, PduType.IC_RESP):
        kind = ICReq if pdu_type == PduType.IC_REQ else ICResp
        return kind(*_IC.unpack_from(specific))
    if pdu_type in (PduType.H2C_TERM_REQ, PduType.C2H_TERM_REQ):
        term = H2CTermReq if pdu_type == PduType.H2C_TERM_REQ else C2HTermReq
        fes, fei = _TERM.unpack_from(specific)
        return term(fes, fei, whole[24:])
    if pdu_type == PduType.CAPSULE_CMD:
        return CapsuleCmd(specific, data, damaged)
    if pdu_type == PduType.CAPSULE_RESP:
        return CapsuleResp(specific)
    cccid, tag, offset, length, _ = _DATA.unpack(specific)
    if pdu_type == PduType.R2T:
        return R2T(cccid, tag, offset, length)
    last, success = bool(flags & FLAG_LAST), bool(flags & FLAG_SUCCESS)
    if length != len(data):
        message = f"{pdu_type.name}: DATAL {length}, but {len(data)} bytes of data"
        raise PduError(FatalError.INVALID_HEADER_FIELD, 16, whole[:24], message)
    make = H2CData if pdu_type == PduType.H2C_DATA else C2HData
    return make(cccid, tag, offset, data, None, last, success, damaged)
