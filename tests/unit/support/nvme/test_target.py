"""The scripted target without faults follows the specification."""

from __future__ import annotations

import gc
import os
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import pytest

from dlfs.base.units import KIB, MIB
from dlfs.errors import DeviceError, UsageError
from tests.support.nvme import (
    DEFAULT_NQN,
    DISCOVERY_NQN,
    DiscoveryRecord,
    Event,
    Namespace,
    ScriptedTarget,
    Settings,
    Status,
    Subsystem,
    Transport,
)
from tests.support.nvme.command import Admin, Nvm
from tests.support.nvme.pdu import R2T, C2HData, C2HTermReq, CapsuleCmd, CapsuleResp, H2CData
from tests.unit.support.nvme.host import HOST_ID, HOST_NQN, NOTHING, Host, Pair

DATA = bytes(range(256)) * 16


@pytest.fixture
def target() -> Iterator[ScriptedTarget]:
    with ScriptedTarget() as made:
        yield made


# ---- bytes, written from the specification -------------------------------------------------------


def test_a_first_exchange_byte_by_byte(target: ScriptedTarget) -> None:
    """Exchange ICReq, Connect and Property Get of VS, without any code of the target."""
    nqn, host = DEFAULT_NQN.encode(), b"nqn.2014-08.org.nvmexpress:uuid:1"
    with socket.create_connection(("127.0.0.1", target.port), timeout=20) as peer:
        stream = peer.makefile("rb")
        peer.sendall(bytes.fromhex("0000800080000000") + bytes(120))
        response = stream.read(128)
        assert response[:8] == bytes.fromhex("0100800080000000")
        assert response[8:12] == bytes(4)
        assert int.from_bytes(response[12:16], "little") == 128 * KIB
        connect = bytes.fromhex("7f40ff0001000000") + bytes(16)  # opcode, PSDT, CID 0xff, FCTYPE
        connect += struct.pack("<16sHHHBBI", sgl(1024, 0x01), 0, 0, 31, 0, 0, 0)
        data = bytes(16) + b"\xff\xff" + bytes(238) + nqn.ljust(256, b"\0") + host.ljust(512, b"\0")
        peer.sendall(bytes.fromhex("0400484848040000") + connect.ljust(64, b"\0") + data)
        answer = stream.read(24)
        assert answer[:8] == bytes.fromhex("0500180018000000")
        assert answer[16:18] == b"\x01\0"  # SQHD
        assert answer[20:24] == bytes.fromhex("ff000000")  # CID, status
        get = bytes.fromhex("7f40010004000000") + bytes(16) + sgl(0, 0x5A)
        get += struct.pack("<II", 0, 8)
        peer.sendall(bytes.fromhex("0400480048000000") + get.ljust(64, b"\0"))
        answer = stream.read(24)
        assert answer[8:12] == bytes.fromhex("00000200")  # version 2.0
        stream.close()
    assert target.violations == []


def sgl(length: int, kind: int) -> bytes:
    return bytes(8) + struct.pack("<I3xB", length, kind)


# ---- initialization and Connect ------------------------------------------------------------------


@pytest.mark.parametrize("digests", [0, 1, 2, 3])
def test_reads_what_was_written(target: ScriptedTarget, digests: int) -> None:
    with Pair(target.port, DEFAULT_NQN, digests=digests) as pair:
        assert pair.io.response.digests == digests
        assert pair.io.write(8, DATA) == 0
        assert pair.io.write(16, DATA, in_capsule=False) == 0
        assert pair.io.read(0, 24) == (0, bytes(4096) + DATA + DATA)
        assert target.counters.commands[Event.WRITE] == 2
        assert target.violations == []


def test_alignments_of_both_sides_are_obeyed() -> None:
    with (
        ScriptedTarget(transport=Transport(host_alignment=31)) as target,
        Pair(target.port, DEFAULT_NQN, digests=3, alignment=15) as pair,
    ):
        assert pair.io.write(0, DATA) == 0
        assert pair.io.read(0, 8) == (0, DATA)
        assert target.violations == []


def test_digests_that_the_target_does_not_speak_are_not_agreed_to() -> None:
    transport = Transport(header_digest=False, data_digest=False)
    with ScriptedTarget(transport=transport) as target, Host(target.port, digests=3) as host:
        assert host.response.digests == 0


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


# ---- Identify, features, log pages ---------------------------------------------------------------


def test_identify_reports_the_settings() -> None:
    spaces = [
        Namespace(2 * MIB, block_bytes=4096, identity=UUID(int=5)),
        Namespace(MIB, nsid=3, volatile_cache=False),
    ]
    settings = Settings(mdts=7, in_capsule_bytes=4096, max_commands=64)
    subsystem = Subsystem(DEFAULT_NQN, spaces, settings=settings)
    with ScriptedTarget([subsystem]) as target, Pair(target.port, DEFAULT_NQN) as pair:

        def identify(structure: int, nsid: int = 0) -> tuple[int, bytes]:
            return pair.admin.admin(Admin.IDENTIFY, length=4096, nsid=nsid, cdw10=structure)

        status, page = identify(1)
        assert status == 0
        assert page[77] == 7
        assert struct.unpack_from("<H", page, 78) == (pair.number,)
        assert struct.unpack_from("<H", page, 514) == (64,)
        assert struct.unpack_from("<I", page, 516) == (3,)
        assert page[525] & 1
        assert page[768:1024].rstrip(b"\0").decode() == DEFAULT_NQN
        assert struct.unpack_from("<II", page, 1792) == (4160 // 16, 1)
        status, page = identify(0, 1)
        assert struct.unpack_from("<Q", page) == (512,)
        assert page[130] == 12
        assert page[104:120] == UUID(int=5).bytes
        assert identify(2)[1][:12] == struct.pack("<III", 1, 3, 0)
        assert identify(2, 1)[1][:8] == struct.pack("<II", 3, 0)
        assert UUID(int=5).bytes in identify(3, 1)[1]
        assert identify(0, 2) == (0, bytes(4096))
        assert identify(0, 4)[0] == Status.INVALID_NAMESPACE
        assert identify(9)[0] == Status.INVALID_FIELD


def test_features() -> None:
    subsystem = Subsystem(DEFAULT_NQN, [Namespace(MIB)], settings=Settings(io_queues=2))
    with ScriptedTarget([subsystem]) as target, Pair(target.port, DEFAULT_NQN) as pair:
        admin = pair.admin
        assert admin.admin(Admin.SET_FEATURES, cdw10=7, cdw11=0x70007)[0] == 0
        assert admin.value == 0x10001
        assert admin.admin(Admin.GET_FEATURES, cdw10=7)[0] == 0
        assert admin.value == 0x10001
        assert admin.admin(Admin.SET_FEATURES, cdw10=0xF, cdw11=60000)[0] == 0
        assert admin.admin(Admin.GET_FEATURES, cdw10=0xF)[0] == 0
        assert admin.value == 60000
        assert admin.admin(Admin.KEEP_ALIVE)[0] == 0
        assert admin.admin(Admin.GET_FEATURES, length=16, cdw10=0x81) == (0, HOST_ID)
        assert admin.admin(Admin.SET_FEATURES, cdw10=0x70)[0] == Status.INVALID_FIELD
        assert admin.admin(Admin.ABORT) == (0, b"")
        assert admin.admin(Admin(0x02), length=512, cdw10=2 | 127 << 16) == (0, bytes(512))


def test_discovery_lists_every_subsystem_in_pages() -> None:
    subsystems = [Subsystem(f"nqn.2026-11.org.dlfs:{n}", [Namespace(MIB)]) for n in range(3)]
    with ScriptedTarget(subsystems, ipv6=True) as target, Host(target.port) as host:
        assert host.connect(DISCOVERY_NQN) == 0
        host.enable()

        def log(offset: int, length: int) -> bytes:
            fields = {"cdw10": 0x70 | (length // 4 - 1) << 16, "cdw12": offset}
            status, page = host.admin(Admin.GET_LOG_PAGE, length=length, **fields)
            assert status == 0
            return page

        generation, count, version = struct.unpack_from("<QQH", log(0, 1024))
        assert (generation, count, version) == (1, 6, 0)
        found = set()
        for number in range(count):
            record = log(1024 * (number + 1), 1024)
            kind, family = record[:2]
            assert kind == 3
            port = int(record[32:64])
            nqn = record[256:512].rstrip(b"\0").decode()
            address = record[512:768].rstrip(b" ").decode()
            assert family == (2 if ":" in address else 1)
            found.add((nqn, address, port))
        assert found == {
            (each.nqn, at, target.port) for each in subsystems for at in ("127.0.0.1", "::1")
        }
        pending = replace(NOTHING, opcode=Admin.ASYNC_EVENT, cid=500)
        host.send(CapsuleCmd(pending.encode()))
        target.list_also([DiscoveryRecord("nqn.2026-11.org.dlfs:far", "192.0.2.1", 4420)])
        event = host.receive()
        assert isinstance(event, CapsuleResp)
        assert struct.unpack_from("<Q4xH", event.entry) == (0x70F002, 500)
        assert struct.unpack_from("<QQ", log(0, 16)) == (2, 7)
        identify = host.admin(Admin.IDENTIFY, length=4096, cdw10=1)
        assert identify[1][111] == 2
        assert host.admin(Admin.IDENTIFY, length=4096, cdw10=2)[0] == Status.INVALID_FIELD
        with Host(target.port, address="::1") as other:
            assert other.connect(subsystems[0].nqn) == 0


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


def test_a_file_holds_a_namespace(tmp_path: Path) -> None:
    path = tmp_path / "namespace"
    space = Namespace(MIB, path=path)
    with (
        ScriptedTarget([Subsystem(DEFAULT_NQN, [space])]) as target,
        Pair(target.port, DEFAULT_NQN) as pair,
    ):
        assert pair.io.write(0, DATA) == 0
    space.close()
    space.close()
    assert path.read_bytes()[:4096] == DATA
    assert path.stat().st_size == MIB


def test_impossible_namespaces_and_taken_ports_are_refused(target: ScriptedTarget) -> None:
    with pytest.raises(UsageError, match="4096"):
        Namespace(512, block_bytes=4096)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(DeviceError, match=str(port)):
            ScriptedTarget(port=port).start()
    with pytest.raises(UsageError, match="not running"):
        ScriptedTarget().kill()
    with pytest.raises(UsageError, match="never started"):
        _ = ScriptedTarget().counters


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
