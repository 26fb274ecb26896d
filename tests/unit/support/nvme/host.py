"""A minimal host for tests of the scripted target: one socket, one command at a time."""

from __future__ import annotations

import socket
import struct
from dataclasses import replace
from typing import Self

from tests.support.nvme.command import (
    FABRICS,
    SGL_IN_CAPSULE,
    SGL_TRANSPORT,
    Admin,
    Command,
    Fabrics,
    Nvm,
)
from tests.support.nvme.pdu import (
    R2T,
    TO_HOST,
    C2HData,
    CapsuleCmd,
    CapsuleResp,
    Decoder,
    H2CData,
    ICReq,
    ICResp,
    Pdu,
    Wire,
    encode,
)

HOST_NQN = "nqn.2026-11.org.dlfs:host"
HOST_ID = bytes(range(16))
NOTHING = Command(0, 0x40, 0, 0, 0, 0, SGL_TRANSPORT, 0, 0, 0, 0, 0, 0)


class Host:
    """A connection to a target, initialized.

    Attributes:
        value: dwords 0 and 1 of the last completion.
        head: SQHD of the last completion; -1 if there was none (SUCCESS).
    """

    def __init__(
        self,
        port: int,
        *,
        digests: int = 0,
        address: str = "127.0.0.1",
        r2ts: int = 1,
        alignment: int = 0,
    ) -> None:
        self.socket = socket.create_connection((address, port), timeout=20)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.decoder = Decoder(TO_HOST)
        self.wire = Wire()
        self.cid = 0
        self.value = 0
        self.head = 0
        self.pdus: list[Pdu] = []
        try:
            self.send(ICReq(0, alignment, digests, r2ts - 1))
            response = self.receive()
        except BaseException:
            self.socket.close()
            raise
        assert isinstance(response, ICResp)
        self.response = response
        self.decoder.wire = Wire(
            bool(response.digests & 1), bool(response.digests & 2), 4 * (alignment + 1)
        )
        self.wire = replace(self.decoder.wire, alignment_bytes=4 * (response.alignment + 1))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.socket.close()

    def send(self, pdu: Pdu) -> None:
        self.socket.sendall(encode(pdu, self.wire))

    def receive(self) -> Pdu:
        """Receive the next PDU; EOFError if the target closed the connection."""
        while (pdu := self.decoder.next()) is None:
            data = self.socket.recv(1 << 16)
            if not data:
                raise EOFError
            self.decoder.feed(data)
        return pdu

    def run(
        self, command: Command, data: bytes = b"", *, in_capsule: bool = True
    ) -> tuple[int, bytes]:
        """Run a command; returns status and data. It may read ``command.length`` bytes."""
        self.cid = (self.cid + 1) & 0xFFFF
        command = replace(command, cid=self.cid)
        if data:
            kind = SGL_IN_CAPSULE if in_capsule else SGL_TRANSPORT
            command = replace(command, length=len(data), sgl=kind)
        self.send(CapsuleCmd(command.encode(), data if in_capsule else b""))
        return self.finish(command, data)

    def finish(self, command: Command, data: bytes) -> tuple[int, bytes]:
        got = bytearray(command.length if not data else 0)
        self.pdus = []
        while True:
            pdu = self.receive()
            self.pdus.append(pdu)
            if isinstance(pdu, C2HData):
                assert pdu.cccid == command.cid
                got[pdu.offset : pdu.offset + len(pdu.data)] = pdu.data
                if pdu.success:
                    self.value, self.head = 0, -1
                    return 0, bytes(got)
            elif isinstance(pdu, R2T):
                assert pdu.cccid == command.cid
                self.give(pdu, data)
            else:
                assert isinstance(pdu, CapsuleResp)
                self.value, self.head, _, cid, status = struct.unpack("<QHHHH", pdu.entry)
                assert cid == command.cid
                return status >> 1 & 0x7FF, bytes(got)

    def give(self, ask: R2T, data: bytes) -> None:
        most = self.response.limit
        end = ask.offset + ask.length
        for at in range(ask.offset, end, most):
            part = data[at : min(at + most, end)]
            self.send(H2CData(ask.cccid, ask.tag, at, part, last=at + len(part) == end))

    # ---- commands --------------------------------------------------------------------------------

    def connect(
        self,
        nqn: str,
        *,
        queue: int = 0,
        entries: int = 32,
        number: int = 0xFFFF,
        attributes: int = 0,
        keep_alive_ms: int = 0,
        host_nqn: str = HOST_NQN,
        host_id: bytes = HOST_ID,
    ) -> int:
        command = replace(
            NOTHING,
            opcode=FABRICS,
            nsid=Fabrics.CONNECT,
            cdw10=queue << 16,
            cdw11=attributes << 16 | entries - 1,
            cdw12=keep_alive_ms,
        )
        data = bytearray(1024)
        struct.pack_into("<16sH", data, 0, host_id, number)
        data[256 : 256 + len(nqn)] = nqn.encode()
        data[512 : 512 + len(host_nqn)] = host_nqn.encode()
        return self.run(command, bytes(data))[0]

    def property_get(self, offset: int, *, wide: bool = False) -> int:
        command = replace(
            NOTHING, opcode=FABRICS, nsid=Fabrics.PROPERTY_GET, cdw10=int(wide), cdw11=offset
        )
        assert self.run(command)[0] == 0
        return self.value

    def property_set(self, offset: int, value: int) -> int:
        command = replace(
            NOTHING, opcode=FABRICS, nsid=Fabrics.PROPERTY_SET, cdw11=offset, cdw12=value
        )
        return self.run(command)[0]

    def admin(self, opcode: Admin, *, length: int = 0, **fields: int) -> tuple[int, bytes]:
        return self.run(replace(NOTHING, opcode=opcode, length=length, **fields))

    def enable(self) -> None:
        assert self.property_set(0x14, 0x460001) == 0
        assert self.property_get(0x1C) == 1

    def read(self, start: int, blocks: int, block_bytes: int = 512) -> tuple[int, bytes]:
        command = replace(
            NOTHING,
            opcode=Nvm.READ,
            nsid=1,
            cdw10=start,
            cdw12=blocks - 1,
            length=blocks * block_bytes,
        )
        return self.run(command)

    def write(
        self, start: int, data: bytes, block_bytes: int = 512, *, in_capsule: bool = True
    ) -> int:
        blocks = len(data) // block_bytes
        command = replace(NOTHING, opcode=Nvm.WRITE, nsid=1, cdw10=start, cdw12=blocks - 1)
        return self.run(command, data, in_capsule=in_capsule)[0]

    def io(self, opcode: Nvm, data: bytes = b"", **fields: int) -> tuple[int, bytes]:
        return self.run(replace(NOTHING, opcode=opcode, nsid=1, **fields), data)


class Pair:
    """An admin queue, enabled, and one I/O queue."""

    def __init__(
        self,
        port: int,
        nqn: str,
        *,
        digests: int = 0,
        host_id: bytes = HOST_ID,
        attributes: int = 0,
        r2ts: int = 1,
        alignment: int = 0,
    ) -> None:
        self.admin = Host(port, digests=digests)
        assert self.admin.connect(nqn, host_id=host_id) == 0
        self.number = self.admin.value
        self.admin.enable()
        assert self.admin.admin(Admin.SET_FEATURES, cdw10=7, cdw11=0x30003)[0] == 0
        self.io = Host(port, digests=digests, r2ts=r2ts, alignment=alignment)
        status = self.io.connect(
            nqn, queue=1, entries=64, number=self.number, attributes=attributes, host_id=host_id
        )
        assert status == 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.io.socket.close()
        self.admin.socket.close()
