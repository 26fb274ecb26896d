"""What tests rely on the scripted target for: it refuses, notes violations and loses data.

That it follows the specification otherwise is checked by the kernel's initiator (``tests/nvmet``),
and by libdlfs's own in every test that restarts, pauses or drops a target.
"""

from __future__ import annotations

import gc
import os
import struct
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from dlfs.base.units import MIB
from tests.support.nvme import (
    DEFAULT_NQN,
    Namespace,
    ScriptedTarget,
    Status,
    Subsystem,
)
from tests.support.nvme.command import Nvm
from tests.support.nvme.pdu import R2T, C2HTermReq, CapsuleCmd, H2CData
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


def test_a_missed_keep_alive_ends_the_association(target: ScriptedTarget) -> None:
    with Host(target.port) as host:
        assert host.connect(DEFAULT_NQN, keep_alive_ms=200) == 0
        host.enable()
        with pytest.raises((EOFError, ConnectionResetError)):
            host.receive()
    assert target.counters.keep_alives_missed == 1


# ---- reads and writes ----------------------------------------------------------------------------


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


def test_a_power_cut_loses_what_was_not_flushed(target: ScriptedTarget) -> None:
    with Pair(target.port, DEFAULT_NQN) as pair:
        assert pair.io.write(0, DATA) == 0
        assert pair.io.io(Nvm.FLUSH)[0] == 0
        assert pair.io.write(0, bytes(4096)) == 0
        assert pair.io.write(0, DATA[::-1]) == 0
    target.restart(lose_cache=True)
    assert target.namespace.contents[:4096] == DATA


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
