"""What tests rely on the scripted target for: it refuses, limits, notes violations and loses data.

That it follows the specification otherwise is checked by the kernel's initiator (``tests/nvmet``).
"""

from __future__ import annotations

import gc
import os
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from dlfs.base.units import KIB, MIB
from tests.support.nvme import (
    DEFAULT_NQN,
    Namespace,
    ScriptedTarget,
    Status,
    Subsystem,
    Transport,
)
from tests.support.nvme.command import Admin, Nvm
from tests.support.nvme.pdu import R2T, C2HData, C2HTermReq, CapsuleCmd, H2CData
from tests.unit.support.nvme.host import HOST_NQN, NOTHING, Host, Pair

DATA = bytes(range(256)) * 16


@pytest.fixture
def target() -> Iterator[ScriptedTarget]:
    with ScriptedTarget() as made:
        yield made


# ---- initialization and Connect ------------------------------------------------------------------


def test_connect_refuses_invalid_requests() -> None:
    space = Namespace(MIB)
    subsystems = [
        Subsystem(DEFAULT_NQN, [space]),
        Subsystem("nqn.2026-11.org.dlfs:closed", [space], hosts=[HOST_NQN]),
    ]
    with ScriptedTarget(subsystems) as target:

        def status(nqn: str = DEFAULT_NQN, **options: int | str | bytes) -> int:
            with Host(target.port) as host:
                return host.connect(nqn, **options)  # type: ignore[arg-type]

        assert status() == 0
        assert status("nqn.2026-11.org.dlfs:nothing") == Status.CONNECT_PARAMETERS
        assert status("nqn.2026-11.org.dlfs:closed") == 0
        assert status("nqn.2026-11.org.dlfs:closed", host_nqn="nqn.x") == Status.CONNECT_HOST
        assert status(number=1) == Status.CONNECT_PARAMETERS
        assert status(entries=1) == Status.CONNECT_PARAMETERS
        assert status(queue=1, number=77) == Status.CONNECT_PARAMETERS
        with Pair(target.port, DEFAULT_NQN) as pair:
            good = {"queue": 2, "number": pair.number}
            assert status(**good) == 0
            for bad in ({"queue": 1}, {"queue": 9}, {"entries": 129}, {"host_id": bytes(16)}):
                assert status(**good | bad) == Status.CONNECT_PARAMETERS


def test_commands_wait_for_connect_and_enable(target: ScriptedTarget) -> None:
    with Host(target.port) as host:
        assert host.admin(Admin.KEEP_ALIVE)[0] == Status.SEQUENCE_ERROR
        assert host.connect(DEFAULT_NQN) == 0
        assert host.connect(DEFAULT_NQN) == Status.SEQUENCE_ERROR
        assert host.property_get(0x1C) == 0
        assert host.admin(Admin.KEEP_ALIVE)[0] == Status.SEQUENCE_ERROR
        with Host(target.port) as other:
            refused = other.connect(DEFAULT_NQN, queue=1, number=host.value or 1)
            assert refused in (Status.CONTROLLER_BUSY, Status.CONNECT_PARAMETERS)
        host.enable()
        assert host.property_get(0, wide=True) & 0xFFFF == 127
        assert host.property_get(0x14) == 0x460001
        assert host.property_set(0x14, 0x464001) == 0
        assert host.property_get(0x1C) == 9  # shutdown complete
        assert host.property_set(0x1C, 0) == Status.INVALID_FIELD
        assert host.property_set(0x14, 1) == Status.INVALID_FIELD


def test_asynchronous_event_requests_are_limited(target: ScriptedTarget) -> None:
    with Pair(target.port, DEFAULT_NQN) as pair:
        for cid in range(900, 904):
            command = replace(NOTHING, opcode=Admin.ASYNC_EVENT, cid=cid)
            pair.admin.send(CapsuleCmd(command.encode()))
        assert pair.admin.admin(Admin.ASYNC_EVENT)[0] == Status.ASYNC_LIMIT


def test_a_missed_keep_alive_ends_the_association(target: ScriptedTarget) -> None:
    with Host(target.port) as host:
        assert host.connect(DEFAULT_NQN, keep_alive_ms=200) == 0
        host.enable()
        with pytest.raises((EOFError, ConnectionResetError)):
            host.receive()
    assert target.counters.keep_alives_missed == 1


# ---- reads and writes ----------------------------------------------------------------------------


def test_data_is_split_as_configured() -> None:
    with (
        ScriptedTarget(transport=Transport(c2h_bytes=1024)) as target,
        Pair(target.port, DEFAULT_NQN) as pair,
    ):
        target.namespace.contents[:4096] = DATA
        assert pair.io.read(0, 8) == (0, DATA)
        data = [pdu for pdu in pair.io.pdus if isinstance(pdu, C2HData)]
        assert [(pdu.offset, pdu.last) for pdu in data] == [
            (0, False),
            (1024, False),
            (2048, False),
            (3072, True),
        ]


def test_success_stands_for_the_completion_where_asked(target: ScriptedTarget) -> None:
    with Pair(target.port, DEFAULT_NQN, attributes=4) as pair:
        assert pair.io.read(0, 8)[0] == 0
        assert pair.io.head == -1
        assert pair.io.write(0, DATA) == 0
        assert pair.io.head == 0
    with Pair(target.port, DEFAULT_NQN) as pair:
        heads = []
        for _ in range(64):
            assert pair.io.read(0, 1)[0] == 0
            heads.append(pair.io.head)
        assert heads == [*range(2, 64), 0, 1]


@pytest.mark.parametrize(("r2ts", "most"), [(1, 1), (2, 2), (8, 3)])
def test_writes_are_asked_for_within_all_limits(r2ts: int, most: int) -> None:
    transport = Transport(h2c_bytes_max=4096, r2t_bytes=8192, r2ts=3)
    data = os.urandom(64 * KIB)
    with (
        ScriptedTarget(transport=transport) as target,
        Pair(target.port, DEFAULT_NQN, r2ts=r2ts, digests=3) as pair,
    ):
        assert pair.io.write(0, data, in_capsule=False) == 0
        asked = [pdu for pdu in pair.io.pdus if isinstance(pdu, R2T)]
        assert [pdu.offset for pdu in asked] == list(range(0, 64 * KIB, 8192))
        assert target.namespace.contents[: 64 * KIB] == data
        first = replace(NOTHING, opcode=Nvm.WRITE, nsid=1, cid=600, length=65536, cdw12=127)
        pair.io.send(CapsuleCmd(first.encode()))
        tags = {pdu.tag for pdu in (pair.io.receive() for _ in range(most)) if isinstance(pdu, R2T)}
        assert len(tags) == most
        assert target.violations == []


def test_commands_out_of_bounds_are_refused(target: ScriptedTarget) -> None:
    with Pair(target.port, DEFAULT_NQN) as pair:
        io = pair.io
        last = target.namespace.blocks - 1
        assert io.read(last, 1)[0] == 0
        assert io.read(last, 2)[0] == Status.LBA_OUT_OF_RANGE
        assert io.write(last, DATA, in_capsule=False) == Status.LBA_OUT_OF_RANGE
        assert io.read(0, 257)[0] == Status.INVALID_FIELD  # MDTS
        assert io.write(0, bytes(8704)) == Status.SGL_OFFSET_INVALID
        assert io.io(Nvm.READ, length=512, cdw12=1)[0] == Status.SGL_LENGTH_INVALID
        bad = replace(NOTHING, opcode=Nvm.READ, nsid=2, length=512)
        assert io.run(bad)[0] == Status.INVALID_NAMESPACE
        assert io.run(replace(NOTHING, opcode=0x99, nsid=1))[0] == Status.INVALID_OPCODE
        assert io.io(Nvm.FLUSH)[0] == 0
        assert io.run(replace(NOTHING, opcode=Nvm.FLUSH, nsid=0xFFFFFFFF))[0] == 0


def test_a_violation_by_the_host_ends_the_connection_and_is_noted(target: ScriptedTarget) -> None:
    write = replace(NOTHING, opcode=Nvm.WRITE, nsid=1, cid=600, length=4096, cdw12=7)
    wrongs = {
        "nobody's": lambda ask: H2CData(ask.cccid, ask.tag ^ 1, 0, DATA),
        "out of order": lambda ask: H2CData(ask.cccid, ask.tag, 4, DATA[:-4]),
        "too much": lambda ask: H2CData(ask.cccid, ask.tag, 0, DATA + DATA),
        "no LAST": lambda ask: H2CData(ask.cccid, ask.tag, 0, DATA, last=False),
        "early LAST": lambda ask: H2CData(ask.cccid, ask.tag, 0, DATA[:512]),
        "not for a host": lambda ask: ask,
    }
    for number, (name, make) in enumerate(wrongs.items(), 1):
        with Pair(target.port, DEFAULT_NQN) as pair:
            pair.io.send(CapsuleCmd(write.encode()))
            ask = pair.io.receive()
            pair.io.send(make(ask))
            assert isinstance(pair.io.receive(), C2HTermReq), name
            with pytest.raises((EOFError, ConnectionResetError)):
                pair.io.receive()
        assert len(target.violations) == number, name


def test_a_wrong_data_digest_is_a_transient_error(target: ScriptedTarget) -> None:
    with Pair(target.port, DEFAULT_NQN, digests=2) as pair:
        pair.io.wire = replace(pair.io.wire, data_digest=False)
        write = replace(NOTHING, opcode=Nvm.WRITE, nsid=1, cid=600, length=4096, cdw12=7)
        pair.io.send(CapsuleCmd(write.encode()))
        ask = pair.io.receive()
        assert isinstance(ask, R2T)
        frame = bytearray(bytes.fromhex("060618181c100000"))
        frame += struct.pack("<HHIII", 600, ask.tag, 0, 4096, 0) + DATA + bytes(4)
        pair.io.socket.sendall(frame)
        assert pair.io.finish(replace(write, length=0), b"")[0] == Status.TRANSIENT_TRANSPORT
        assert target.namespace.contents[:4096] == bytes(4096)


# ---- what a test does to it ----------------------------------------------------------------------


def test_a_restart_keeps_port_and_contents(target: ScriptedTarget) -> None:
    with Pair(target.port, DEFAULT_NQN) as pair:
        assert pair.io.write(0, DATA) == 0
        target.kill()
        with pytest.raises(ConnectionResetError):
            pair.io.receive()
        with pytest.raises(ConnectionRefusedError):
            Pair(target.port, DEFAULT_NQN)
        assert target.connections == 0
    target.restart()
    with Pair(target.port, DEFAULT_NQN) as pair:
        assert pair.io.read(0, 8) == (0, DATA)


def test_a_power_cut_loses_what_was_not_flushed(target: ScriptedTarget) -> None:
    with Pair(target.port, DEFAULT_NQN) as pair:
        assert pair.io.write(0, DATA) == 0
        assert pair.io.io(Nvm.FLUSH)[0] == 0
        assert pair.io.write(0, bytes(4096)) == 0
        assert pair.io.write(0, DATA[::-1]) == 0
    target.restart(lose_cache=True)
    assert target.namespace.contents[:4096] == DATA


def test_pausing_delays_and_loses_nothing(target: ScriptedTarget) -> None:
    with Pair(target.port, DEFAULT_NQN) as pair:
        target.pause()
        read = replace(NOTHING, opcode=Nvm.READ, nsid=1, cid=600, length=4096, cdw12=7)
        pair.io.send(CapsuleCmd(read.encode()))
        with socket.create_connection(("127.0.0.1", target.port), timeout=20):
            pair.io.socket.settimeout(0.05)
            with pytest.raises(TimeoutError):
                pair.io.receive()
        target.resume()
        pair.io.socket.settimeout(20)
        assert pair.io.finish(read, b"") == (0, bytes(4096))


@pytest.mark.parametrize("reset", [True, False])
def test_connections_can_be_dropped(target: ScriptedTarget, reset: bool) -> None:
    with Pair(target.port, DEFAULT_NQN) as pair:
        target.drop_connections(reset=reset)
        with pytest.raises(ConnectionResetError if reset else EOFError):
            pair.io.receive()
    with Pair(target.port, DEFAULT_NQN) as pair:
        assert pair.io.read(0, 1)[0] == 0


def test_one_subsystem_on_two_targets_is_two_paths() -> None:
    subsystem = Subsystem(DEFAULT_NQN, [Namespace(MIB)])
    with (
        ScriptedTarget([subsystem]) as one,
        ScriptedTarget([subsystem]) as other,
        Pair(one.port, DEFAULT_NQN) as first,
        Pair(other.port, DEFAULT_NQN) as second,
        Host(other.port) as stranger,
    ):
        assert first.number != second.number
        refused = stranger.connect(DEFAULT_NQN, queue=2, number=first.number)
        assert refused == Status.CONNECT_PARAMETERS
        assert first.io.write(0, DATA) == 0
        one.kill()
        assert second.io.read(0, 8) == (0, DATA)


def test_nothing_is_left_behind() -> None:
    """There may be fewer threads at the end: those of earlier tests end."""

    def left() -> tuple[int, set[threading.Thread]]:
        gc.collect()
        return len(os.listdir("/proc/self/fd")), set(threading.enumerate())

    with ScriptedTarget():
        pass
    before = left()
    for _ in range(3):
        with ScriptedTarget(ipv6=True) as target, Pair(target.port, DEFAULT_NQN):
            target.restart()
    descriptors, threads = left()
    assert descriptors <= before[0]
    assert threads <= before[1]
