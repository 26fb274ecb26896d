"""The bytes that each fault sends, as a plain socket receives them."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.support.nvme import DEFAULT_NQN, Event, Fault, FaultScript, ScriptedTarget
from tests.support.nvme.command import Nvm
from tests.support.nvme.faults import (
    Change,
    ChangeHeader,
    Complete,
    Cut,
    Delay,
    Finish,
    Insert,
    Omit,
    Patch,
    Plus,
    Recut,
    Repeat,
    SpoilDataDigest,
    SpoilHeaderDigest,
)
from tests.support.nvme.pdu import C2HData, C2HTermReq, CapsuleCmd, CapsuleResp, Pdu, PduError
from tests.support.nvme.script import Action
from tests.unit.support.nvme.host import NOTHING, Pair

DATA = bytes(range(256)) * 16


def read_command(cid: int, start: int = 0) -> CapsuleCmd:
    command = replace(NOTHING, opcode=Nvm.READ, nsid=1, cid=cid, cdw10=start, length=4096, cdw12=7)
    return CapsuleCmd(command.encode())


def answer_to_read(do: Action, *, digests: int = 0, attributes: int = 0) -> list[Pdu]:
    """Receive all PDUs up to the answer of a second read, which has no fault."""
    with (
        ScriptedTarget(script=FaultScript([Fault(Event.READ, do)])) as target,
        Pair(target.port, DEFAULT_NQN, digests=digests, attributes=attributes) as pair,
    ):
        target.namespace.contents[:4096] = DATA
        pair.io.send(read_command(500))
        pair.io.send(read_command(501))
        found = []
        while True:
            pdu = pair.io.receive()
            if isinstance(pdu, C2HData | CapsuleResp) and cid_of(pdu) == 501:
                return found
            found.append(pdu)


def cid_of(pdu: C2HData | CapsuleResp) -> int:
    if isinstance(pdu, C2HData):
        return pdu.cccid
    return int(struct.unpack_from("<12xH", pdu.entry)[0])


def kinds(pdus: list[Pdu]) -> list[type[Pdu]]:
    return [type(pdu) for pdu in pdus]


def status(pdu: Pdu) -> int:
    assert isinstance(pdu, CapsuleResp)
    return int(struct.unpack_from("<14xH", pdu.entry)[0])


def test_answers_lose_gain_and_repeat_pdus() -> None:
    assert kinds(answer_to_read(Omit(CapsuleResp))) == [C2HData]
    assert answer_to_read(Omit()) == []
    assert kinds(answer_to_read(Repeat(CapsuleResp))) == [C2HData, CapsuleResp, CapsuleResp]
    term = C2HTermReq(2)
    assert answer_to_read(Insert(term))[-1] == term
    assert answer_to_read(Insert(term, before=True))[0] == term
    assert kinds(answer_to_read(Delay(0.01))) == [C2HData, CapsuleResp]


def test_commands_finish_without_their_data() -> None:
    (done,) = answer_to_read(Finish(status=0x281))
    assert (cid_of(done), status(done)) == (500, 0x281 << 1)  # type: ignore[arg-type]


def test_fields_change() -> None:
    (data, _) = answer_to_read(Change(C2HData, {"cccid": Plus(7), "last": False}))
    assert isinstance(data, C2HData)
    assert (data.cccid, data.last) == (507, False)
    (data, _) = answer_to_read(Patch(4, b"spoil"), digests=2)
    assert isinstance(data, C2HData)
    assert bytes(data.data) == DATA[:4] + b"spoil" + DATA[9:]
    assert not data.damaged


def test_completions_change() -> None:
    (_, done) = answer_to_read(Complete(status=0x4281, head=Plus(-1), value=7, phase=1))
    assert status(done) == 0x4281 << 1 | 1
    (done,) = answer_to_read(Complete(status=0x82, with_data=False))
    assert status(done) == 0x82 << 1
    (data, done) = answer_to_read(Complete(status=0x82), attributes=4)
    assert isinstance(data, C2HData)
    assert not data.success
    assert cid_of(done) == 500  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("do", "message"),
    [
        (ChangeHeader(C2HData, {"length_bytes": 1 << 31}), "PLEN"),
        (ChangeHeader(C2HData, {"header_bytes": Plus(-1, 8)}), "HLEN"),
        (ChangeHeader(C2HData, {"data_offset": 3}), "PDO"),
        (ChangeHeader(C2HData, {"pdu_type": 0x0A}), "PDU-Type"),
        (ChangeHeader(CapsuleResp, {"flags": 0x80}), "FLAGS"),
        (SpoilHeaderDigest(C2HData), "header digest"),
        (SpoilHeaderDigest(CapsuleResp), "header digest"),
    ],
)
def test_headers_are_spoiled(do: Action, message: str) -> None:
    with pytest.raises(PduError, match=message):
        answer_to_read(do, digests=3)


@pytest.mark.parametrize("do", [SpoilDataDigest(), SpoilDataDigest(data=True)])
def test_data_digests_are_spoiled(do: Action) -> None:
    (data, _) = answer_to_read(do, digests=3)
    assert isinstance(data, C2HData)
    assert data.damaged


@pytest.mark.parametrize(
    ("way", "parts"),
    [
        ("halves", [(0, 2048, False), (2048, 2048, True)]),
        ("reversed", [(2048, 2048, False), (0, 2048, True)]),
        ("overlapping", [(0, 2048, False), (2044, 2052, True)]),
        ("twice", [(0, 2048, False), (0, 2048, False), (2048, 2048, True)]),
        ("gap", [(0, 2048, False), (2052, 2044, True)]),
        ("short", [(0, 2048, True)]),
        ("excess", [(0, 4608, True)]),
        ("beyond", [(0, 2048, False), (4096, 2048, True)]),
        ("no last", [(0, 2048, False), (2048, 2048, False)]),
        ("early last", [(0, 2048, True), (2048, 2048, True)]),
        ("success early", [(0, 2048, True), (2048, 2048, True)]),
    ],
)
def test_data_is_recut(way: str, parts: list[tuple[int, int, bool]]) -> None:
    found = answer_to_read(Recut(way))  # type: ignore[arg-type]
    data = [pdu for pdu in found if isinstance(pdu, C2HData)]
    assert [(pdu.offset, len(memoryview(pdu.data)), pdu.last) for pdu in data] == parts
    assert [pdu.success for pdu in data] == [way == "success early", False, False][: len(data)]


@pytest.mark.parametrize(
    ("do", "count"), [(Cut(100), 100), (Cut(0), 0), (Cut(-24), 4120), (Cut(24, reset=True), None)]
)
def test_connections_end_in_the_middle(do: Action, count: int | None) -> None:
    script = FaultScript([Fault(Event.READ, do)])
    with ScriptedTarget(script=script) as target, Pair(target.port, DEFAULT_NQN) as pair:
        pair.io.send(read_command(1))
        found = received(pair.io.socket)
        assert found == count
        assert script.wait(timeout_s=20)
        assert not script.wait(2, timeout_s=0)
        assert "read" in script.log[0]


def received(peer: socket.socket) -> int | None:
    """Return the number of bytes before the end of a connection; None if that is a reset."""
    count = 0
    try:
        while data := peer.recv(1 << 16):
            count += len(data)
    except ConnectionResetError:
        return None
    return count


@pytest.mark.parametrize(
    ("make", "good"),
    [
        (lambda: Fault(Event.READ, Omit(), nth=2), [1, 0, 1, 1]),
        (lambda: Fault(Event.READ, Omit(), nth=2, times=2), [1, 0, 0, 1]),
        (lambda: Fault(Event.READ, Omit(), nth=3, times=None), [1, 1, 0, 0]),
        (lambda: Fault(Event.READ, Omit(), times=None, match={"cdw10": 1}), [1, 0, 1, 1]),
        (lambda: Fault(Event.READ, Omit(), times=None, chance=0.5), [0, 1, 1, 0]),
        (lambda: Fault(Event.WRITE, Omit(), times=None), [1, 1, 1, 1]),
    ],
)
def test_faults_happen_when_they_should(make: Callable[[], Fault], good: list[int]) -> None:
    script = FaultScript([make()], seed=1)
    with ScriptedTarget(script=script) as target, Pair(target.port, DEFAULT_NQN) as pair:
        for cid in range(4):
            pair.io.send(read_command(cid, start=cid))
        last = replace(NOTHING, opcode=Nvm.FLUSH, nsid=1, cid=99)
        pair.io.send(CapsuleCmd(last.encode()))
        seen = set()
        while 99 not in seen:
            pdu = pair.io.receive()
            if isinstance(pdu, CapsuleResp):
                seen.add(cid_of(pdu))
        assert [int(cid in seen) for cid in range(4)] == good
        assert script.played == 4 - sum(good)
        assert "seed 1" in repr(script)
