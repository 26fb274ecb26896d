"""Writers of a shared namespace over NVMe/TCP exclude each other when one dies or stalls.

The target is the scripted one, in this process, so that a test sees every write to the media.
"""

from __future__ import annotations

import functools
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

import dlfs
from dlfs.base.units import KIB, MIB
from dlfs.block import (
    RECORD_BYTES,
    RECORD_OFFSET_BYTES,
    MemoryDevice,
    NvmeTcpDevice,
    open_device,
)
from dlfs.block import SharedNamespaceDevice as Shared
from dlfs.block.lease import LeaseTimes
from dlfs.block.reservation import reservation_key
from dlfs.errors import DeviceError, ExistsError, LeaseLostError, LockedError
from tests.support.nvme import Namespace, ScriptedTarget, Subsystem
from tests.support.nvme.command import Event
from tests.support.nvme.faults import Complete, Cut
from tests.support.nvme.reservation import ReservationType
from tests.support.nvme.script import Fault, FaultScript
from tests.support.volumes import new_volume, read_datasets, write_dataset
from tests.support.writers import format_times, locked_writer

MEMBER_BYTES = 2 * MIB
SEED = 20190923

QUICK = LeaseTimes(renew_s=0.05, valid_s=20, drain_s=20, claim_s=0.5, poll_s=0.02)
"""Lease times of writers that live, on a machine that may be slow."""

MORTAL = LeaseTimes(renew_s=0.05, valid_s=2, drain_s=1, claim_s=0.5, poll_s=0.02)
"""Lease times of writers that die; the timeouts of ``SHORT`` are shorter."""

SHORT = {"timeout_ms": 600, "reconnect_ms": 400, "keepalive_ms": 500}

HERE, THERE = uuid.UUID(int=0x1111), uuid.UUID(int=0x2222)


@pytest.fixture
def target() -> Iterator[ScriptedTarget]:
    with ScriptedTarget([Subsystem("nqn.2026-11.org.dlfs:a", [Namespace(MEMBER_BYTES)])]) as made:
        yield made
        assert made.violations == []


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shared, "lease_times", QUICK)


@pytest.fixture
def mortal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shared, "lease_times", MORTAL)


def open_nvme(target: ScriptedTarget, host: uuid.UUID, **options: object) -> NvmeTcpDevice:
    device = open_device(target.uri(hostid=host, **options), writable=True)
    assert isinstance(device, NvmeTcpDevice)
    return device


def record_of(namespace: Namespace) -> bytes:
    return bytes(namespace.contents[RECORD_OFFSET_BYTES : RECORD_OFFSET_BYTES + RECORD_BYTES])


def forget_writer(namespace: Namespace) -> None:
    """Remove the lease and reservation of a dead writer, without waiting for their expiry."""
    namespace.contents[RECORD_OFFSET_BYTES : RECORD_OFFSET_BYTES + RECORD_BYTES] = bytes(
        RECORD_BYTES
    )
    namespace.reservations.lose_power()


# ---- leases and reservations ---------------------------------------------------------------------


@pytest.mark.usefixtures("quick")
def test_the_reservation_lives_as_long_as_the_lease(target: ScriptedTarget) -> None:
    reservations = target.namespace.reservations
    with open_nvme(target, HERE) as device, open_nvme(target, HERE) as neighbour:
        device.lock_exclusive("a writer")
        assert reservations.kind == ReservationType.WRITE_EXCLUSIVE
        assert reservations.holder == HERE.bytes
        assert reservations.keys == {HERE.bytes: reservation_key(HERE.bytes)}
        assert not reservations.persistent
        with pytest.raises(LockedError, match="a writer on host"):
            neighbour.lock_exclusive("another process of this host")
        device.write(0, bytes(512))
        device.flush()
        device.unlock()
        assert reservations.kind == ReservationType.NONE
        assert reservations.keys == {}
        assert record_of(target.namespace) == bytes(RECORD_BYTES)
        neighbour.lock_exclusive("another process of this host")


@pytest.mark.usefixtures("quick")
def test_another_host_reads_and_writes_nothing(target: ScriptedTarget) -> None:
    with open_nvme(target, HERE) as device, open_nvme(target, THERE) as other:
        device.lock_exclusive("a writer")
        device.write(0, b"\1" * 512)
        with pytest.raises(LockedError, match="a writer on host"):
            other.lock_exclusive("another")
        with pytest.raises(LeaseLostError, match="another host has reserved the namespace"):
            other.write(0, b"\2" * 512)
        with pytest.raises(LeaseLostError, match=r"flush .* fenced this one off"):
            other.flush()
        assert other.read(0, 512) == b"\1" * 512


@pytest.mark.usefixtures("quick")
def test_a_reservation_of_other_software_refuses_the_lease(target: ScriptedTarget) -> None:
    reservations = target.namespace.reservations
    reservations.keys = {THERE.bytes: 77}
    reservations.holder, reservations.kind = THERE.bytes, ReservationType.WRITE_EXCLUSIVE
    with (
        open_nvme(target, HERE) as device,
        pytest.raises(LockedError, match=rf"reserved by the host with identifier {THERE.hex}"),
    ):
        device.lock_exclusive("a writer")


@pytest.mark.usefixtures("mortal")
def test_a_stalled_writer_is_fenced_by_its_successor(target: ScriptedTarget) -> None:
    with open_nvme(target, HERE, **SHORT) as stalled, open_nvme(target, THERE, **SHORT) as next_one:
        stalled.lock_exclusive("a stalled writer")
        assert stalled._renewer is not None
        stalled._renewer.stop()
        lease, stalled._guard.lease = (
            stalled._guard.lease,
            None,
        )  # as if stopped after it checked its lease
        next_one.lock_exclusive("the next")
        assert target.namespace.reservations.holder == THERE.bytes
        writes = target.counters.commands[Event.WRITE]
        with pytest.raises(LeaseLostError, match="was over before it was sent"):
            stalled.write(0, b"\1" * 512)
        assert target.counters.commands[Event.WRITE] - writes < 2  # the successor's renewal
        stalled.limit_writes(stalled.incarnation(), None)
        with pytest.raises(LeaseLostError, match="another host has reserved the namespace"):
            stalled.write(0, b"\1" * 512)
        assert not any(target.namespace.contents[:512])
        stalled._guard.lease = lease
        with pytest.raises(LeaseLostError, match="could not be renewed for 2 s"):
            stalled.write(0, b"\1" * 512)
        stalled.close()
        assert target.namespace.reservations.holder == THERE.bytes
        next_one.write(0, b"\2" * 512)


@pytest.mark.usefixtures("mortal")
def test_a_host_that_was_preempted_stays_fenced_when_the_lease_is_released(
    target: ScriptedTarget,
) -> None:
    reservations = target.namespace.reservations
    with open_nvme(target, HERE, **SHORT) as stalled, open_nvme(target, THERE, **SHORT) as next_one:
        stalled.lock_exclusive("a stalled writer")
        assert stalled._renewer is not None
        stalled._renewer.stop()
        stalled._guard.lease = None
        next_one.lock_exclusive("the next")
        next_one.unlock()
        assert record_of(target.namespace) == bytes(RECORD_BYTES)
        stalled.limit_writes(stalled.incarnation(), None)  # it knows of no deadline
        with pytest.raises(LeaseLostError, match="another host has reserved the namespace"):
            stalled.write(0, b"\1" * 512)
        stalled._locked_by = None
        stalled.lock_exclusive("the same host, again")  # a fence of DLFS is preempted
        assert reservations.holder == HERE.bytes
        stalled.write(0, b"\3" * 512)
        stalled.unlock()
        assert reservations.holder == HERE.bytes
        with pytest.raises(LeaseLostError, match="another host has reserved the namespace"):
            next_one.write(0, b"\2" * 512)


@pytest.mark.usefixtures("mortal")
def test_a_writer_cut_off_from_a_silent_target_stops_by_itself(target: ScriptedTarget) -> None:
    with open_nvme(target, HERE, **SHORT) as device:
        device.lock_exclusive("a writer")
        assert device._renewer is not None
        target.pause()
        device._renewer.join()
        target.resume()
        writes = target.counters.commands[Event.WRITE]
        with pytest.raises(LeaseLostError, match="could not be renewed"):
            device.write(0, b"\1" * 512)
        with pytest.raises(LeaseLostError, match="could not be renewed"):
            device.flush()
        assert target.counters.commands[Event.WRITE] == writes
        assert not any(target.namespace.contents[:512])


@pytest.mark.usefixtures("mortal")
@pytest.mark.parametrize("host", [HERE, THERE], ids=["same host", "another host"])
def test_a_killed_writer_is_named_until_its_lease_expires(
    target: ScriptedTarget, host: uuid.UUID
) -> None:
    uri = target.uri(hostid=THERE, **SHORT)
    with open_nvme(target, host, **SHORT) as device, locked_writer(uri, MORTAL) as writer:
        with pytest.raises(LockedError, match=rf"a dying writer on host .* pid {writer.pid} "):
            device.lock_exclusive("the next")
        writer.kill()
        writer.wait()
        died_at = time.monotonic()
        device.lock_exclusive("the next")
        assert time.monotonic() - died_at >= MORTAL.valid_s  # its deadline
        assert target.namespace.reservations.holder == host.bytes
        device.write(0, bytes(512))


@pytest.mark.usefixtures("quick")
def test_a_lease_that_cannot_be_released_is_left_to_expire(
    target: ScriptedTarget, caplog: pytest.LogCaptureFixture
) -> None:
    device = open_nvme(target, HERE, **SHORT)
    device.lock_exclusive("a writer")
    target.kill()
    device.close()
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1
    assert "the writer's lock is left to expire" in messages[0]
    assert b"a writer" in record_of(target.namespace)


# ---- volumes -------------------------------------------------------------------------------------


def contents(uri: str) -> dict[tuple[str, int], dict[bytes, bytes]]:
    """Verify the volume and return all samples.

    Superblock copies may lag until the next writer brings them up to date.
    """
    with dlfs.open(uri) as volume:
        assert [finding for finding in volume.verify() if finding.kind != "superblock"] == []
        return read_datasets(volume)


FIRST = {f"a/{i}".encode(): bytes([i + 1]) * (700 + 90 * i) for i in range(8)}
SECOND = {b"b": random.Random(1).randbytes(90_000), b"c/d": random.Random(2).randbytes(50_000)}
OLD = {("first", 1): FIRST}
NEW = {("first", 1): FIRST, ("second", 1): SECOND}


@functools.cache
def volume_with_first() -> bytes:
    """Return the media of a member whose volume holds ``FIRST``."""
    name = uuid.uuid4().hex
    uri = new_volume(f"mem:{name}?size={MEMBER_BYTES}", chunk_bytes=4 * KIB)
    with dlfs.open(uri) as volume:
        write_dataset(volume, "first", FIRST)
    with open_device(uri) as device:
        content = device.read(0, MEMBER_BYTES)
    MemoryDevice.forget(name)
    return content


@pytest.mark.usefixtures("quick")
def test_format_is_refused_while_another_writes(target: ScriptedTarget) -> None:
    uri = new_volume(target.uri(), chunk_bytes=4 * KIB)
    assert record_of(target.namespace) == bytes(RECORD_BYTES)
    with dlfs.open(uri) as volume:
        writer = volume.writer("first")
        with pytest.raises(LockedError, match="held by dlfs writing dataset 'first'"):
            dlfs.format_volume(uri, chunk_bytes=4 * KIB, force=True)
        with pytest.raises(ExistsError, match="it is a member of volume"):
            dlfs.format_volume(uri, chunk_bytes=4 * KIB)
        for path, data in FIRST.items():
            writer.add(path, data)
        writer.seal()
    assert contents(uri) == OLD


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("nth", range(1, 8))
def test_a_flush_that_fails_leaves_one_generation_or_the_other(
    target: ScriptedTarget, nth: int
) -> None:
    """Fail each flush of a transaction in turn: of the claim, of recovery, of each commit step."""
    target.namespace.contents[:] = volume_with_first()
    uri = target.uri()
    with dlfs.open(uri) as volume:
        script = FaultScript([Fault(Event.FLUSH, Complete(status=0x280), nth=nth)], seed=nth)
        target.play(script)
        with pytest.raises(DeviceError):
            write_dataset(volume, "second", SECOND)
        target.play(None)
        assert script.played == 1
    assert contents(uri) in (OLD, NEW)
    assert (record_of(target.namespace) == bytes(RECORD_BYTES)) == (nth > 1)  # 1: the claim's flush
    forget_writer(target.namespace)
    with dlfs.open(uri) as volume:
        write_dataset(volume, "third", SECOND)
    assert contents(uri)["third", 1] == SECOND


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("event", [Event.WRITE, Event.FLUSH], ids=["write", "flush"])
def test_connections_lost_in_a_commit_are_reestablished(
    target: ScriptedTarget, event: Event
) -> None:
    target.namespace.contents[:] = volume_with_first()
    uri = target.uri()
    with dlfs.open(uri) as volume:
        chance = random.Random(SEED)
        faults = [
            Fault(event, Cut(0, reset=True), nth=nth)
            for nth in sorted(chance.sample(range(2, 9), 3))
        ]
        script = FaultScript(faults, seed=SEED)
        target.play(script)
        try:
            write_dataset(volume, "second", SECOND)
        except DeviceError:  # a flush does not cover writes through a controller that is lost
            expected = [OLD, NEW]
        else:
            expected = [NEW]
        target.play(None)
        assert script.played > 0
    assert contents(uri) in expected, script


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("step", range(2, 8))
def test_a_target_that_loses_its_cache_between_write_and_flush(
    target: ScriptedTarget, step: int
) -> None:
    """Cut the power just before flush number ``step`` of a transaction, and restore it at once."""
    namespace = target.namespace
    target.namespace.contents[:] = volume_with_first()
    uri = target.uri()
    with dlfs.open(uri) as volume:

        class PowerCut(FaultScript):
            def play(self, event, steps, connection, command=None):  # type: ignore[no-untyped-def]
                played = list(super().play(event, steps, connection, command))
                if event == Event.FLUSH and len(self.log) == 1:
                    namespace.lose_cache()
                return played

        script = PowerCut([Fault(Event.FLUSH, Cut(0, reset=True), nth=step)])
        target.play(script)
        try:
            write_dataset(volume, "second", SECOND)
        except DeviceError:
            expected = [OLD, NEW]
        else:
            expected = [NEW]
        target.play(None)
    assert contents(uri) in expected
    forget_writer(namespace)
    with dlfs.open(uri) as volume:
        write_dataset(volume, "third", SECOND)
    assert contents(uri)["third", 1] == SECOND


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("event", [Event.WRITE, Event.FLUSH], ids=["write", "flush"])
def test_one_member_lost_in_a_commit_leaves_one_generation_or_the_other(event: Event) -> None:
    """Lose member 1 at some point of a transaction, until the transaction has ended."""
    chance = random.Random(SEED)
    subsystem = Subsystem("nqn.2026-11.org.dlfs:b", [Namespace(MEMBER_BYTES)])
    with ScriptedTarget() as first, ScriptedTarget([subsystem]) as second:
        uri = ",".join(target.uri(**SHORT) for target in (first, second))
        dlfs.format_volume(uri, chunk_bytes=4 * KIB)
        expected = {}
        for i in range(2):
            nth = chance.randrange(2, 8)
            second.play(FaultScript([Fault(event, Cut(0, reset=True), nth=nth, times=None)]))
            with dlfs.open(uri) as volume, pytest.raises(DeviceError):
                write_dataset(volume, f"lost{i}", SECOND)
            second.play(None)
            with_new = {**expected, (f"lost{i}", 1): SECOND}
            expected = contents(uri)
            assert expected in (with_new, {k: v for k, v in with_new.items() if k[0] != f"lost{i}"})
            for target in (first, second):
                forget_writer(target.namespace)
            with dlfs.open(uri) as volume:
                write_dataset(volume, f"kept{i}", FIRST)
            expected[f"kept{i}", 1] = FIRST
            assert contents(uri) == expected


# ---- dlfs import, waiting and killed -------------------------------------------------------------

COMMAND = """
import sys
from dlfs.block import SharedNamespaceDevice
from dlfs.block.lease import LeaseTimes
SharedNamespaceDevice.lease_times = LeaseTimes(*map(float, sys.argv.pop(1).split(",")))
from dlfs.cli import main
main()
"""


class DeadlyNamespace(Namespace):
    """Kills a process at the n-th write to any of the members."""

    victim: subprocess.Popen[bytes] | None = None
    left = -1
    seen = 0

    def write(self, block: int, data: bytes | bytearray | memoryview) -> None:
        kind = type(self)
        kind.seen += 1
        if kind.left > 0 and kind.victim is not None:
            kind.left -= 1
            if kind.left == 0:
                kind.victim.send_signal(signal.SIGKILL)
        super().write(block, data)


@pytest.fixture
def deadly() -> Iterator[ScriptedTarget]:
    subsystems = [
        Subsystem(f"nqn.2026-11.org.dlfs:{name}", [DeadlyNamespace(MEMBER_BYTES)]) for name in "ab"
    ]
    with ScriptedTarget(subsystems) as made:
        yield made
        assert made.violations == []


def run_import(uri: str, folder: Path, name: str, times: LeaseTimes) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, format_times(times), "import", folder, uri, "--name", name],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


@pytest.mark.usefixtures("mortal")
def test_an_import_logs_that_it_waits_for_a_dead_writer(
    target: ScriptedTarget, tmp_path: Path
) -> None:
    (tmp_path / "a").write_bytes(b"1")
    uri = new_volume(target.uri(**SHORT), chunk_bytes=4 * KIB)
    with locked_writer(uri, MORTAL) as writer:
        writer.kill()
    with run_import(uri, tmp_path, "next", MORTAL) as command:
        output, _ = command.communicate(timeout=120)
    assert command.returncode == 0
    assert b"waiting up to 3 s to learn whether its last writer still lives: a dying" in output
    assert contents(uri) == {("next", 1): {b"a": b"1"}}


@pytest.mark.usefixtures("quick")
def test_an_import_killed_at_any_write_is_complete_or_absent(
    deadly: ScriptedTarget, tmp_path: Path
) -> None:
    uri = ",".join(deadly.uri(subsystem.nqn) for subsystem in deadly.subsystems)
    namespaces = [subsystem.namespaces[1] for subsystem in deadly.subsystems]
    samples = {f"{i}".encode(): random.Random(i).randbytes(20_000) for i in range(8)}
    for path, data in samples.items():
        (tmp_path / path.decode()).write_bytes(data)
    dlfs.format_volume(uri, chunk_bytes=4 * KIB)

    def import_one(name: str, kill_at: int) -> tuple[int, str]:
        DeadlyNamespace.left, DeadlyNamespace.seen = kill_at, 0
        with run_import(uri, tmp_path, name, QUICK) as command:
            DeadlyNamespace.victim = command
            output, _ = command.communicate(timeout=120)
        DeadlyNamespace.victim = None
        for namespace in namespaces:
            forget_writer(namespace)
        return command.returncode, output.decode()

    DeadlyNamespace.seen = 0
    with dlfs.open(uri) as volume:
        write_dataset(volume, "whole", samples)
    total = DeadlyNamespace.seen
    expected: dict[tuple[str, int], dict[bytes, bytes]] = {("whole", 1): samples}
    assert contents(uri) == expected
    chance = random.Random(SEED)
    for i in range(3):
        kill_at = chance.randrange(1, total)
        status, output = import_one(f"try{i}", kill_at)
        with_new = {**expected, (f"try{i}", 1): samples}
        found = contents(uri)
        assert found in (expected, with_new), f"seed {SEED}, killed at write {kill_at}: {output}"
        assert status in (0, -signal.SIGKILL)
        expected = found
    with dlfs.open(uri) as volume:
        write_dataset(volume, "last", samples)
        assert list(volume.verify()) == []
    assert contents(uri) == {**expected, ("last", 1): samples}
