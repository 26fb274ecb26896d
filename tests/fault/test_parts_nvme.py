"""An import by workers over NVMe/TCP, where grants have deadlines.

The target is the scripted one, with reservations and without them.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

import dlfs
from dlfs.base.units import KIB, MIB
from dlfs.block import SharedNamespaceDevice, open_device
from dlfs.block.lease import LeaseTimes, boot_clock
from dlfs.dataset import committed_steps
from dlfs.errors import DeviceError, LeaseLostError, LockedError, StaleError
from dlfs.format.journal import find_term
from tests.support.nvme import Namespace, ScriptedTarget, Subsystem
from tests.support.parts import (
    COUNTS,
    Worker,
    check_no_leak,
    everything,
    import_plainly,
    open_parts,
)
from tests.support.volumes import new_volume

QUICK = LeaseTimes(renew_s=0.05, valid_s=20, drain_s=20, claim_s=0.2, poll_s=0.02)
MORTAL = LeaseTimes(renew_s=0.05, valid_s=2, drain_s=1, claim_s=0.5, poll_s=0.02)
"""Lease times for a test that waits for the end of grants."""
SHORT = {"timeout_ms": 600, "reconnect_ms": 400, "keepalive_ms": 500}
"""Timeouts of a device that are shorter than those."""
COORDINATOR, WORKER, OTHER = (uuid.UUID(int=number) for number in (0x1111, 0x2222, 0x3333))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(committed_steps, "PAUSE_S", 0.0)
    monkeypatch.setattr(SharedNamespaceDevice, "lease_times", QUICK)


@pytest.fixture
def target() -> Iterator[ScriptedTarget]:
    with ScriptedTarget([Subsystem("nqn.2026-11.org.dlfs:a", [Namespace(8 * MIB)])]) as made:
        yield made
        assert made.violations == []


@pytest.fixture
def volume(target: ScriptedTarget) -> Iterator[dlfs.Volume]:
    uri = target.uri(hostid=COORDINATOR)
    dlfs.format_volume(uri, chunk_bytes=16 * KIB)
    with dlfs.open(uri) as made:
        yield made


def open_on(target: ScriptedTarget, host: uuid.UUID, _uri: str, *, writable: bool) -> object:
    """Open the namespace as another host does."""
    return open_device(target.uri(hostid=host), writable=writable)


@pytest.mark.parametrize("host", [COORDINATOR, WORKER])
def test_the_dataset_is_that_of_a_plain_import(
    tmp_path: Path, target: ScriptedTarget, volume: dlfs.Volume, host: uuid.UUID
) -> None:
    with dlfs.open(
        new_volume(tmp_path / "v.img", size_bytes=8 * MIB, chunk_bytes=16 * KIB)
    ) as plain:
        import_plainly(plain, one_pass=True)
        expected = everything(plain)
    parts = open_parts(volume, one_pass=True)
    parts.commit(reserve=60)
    worker = Worker(volume, parts, "a", opener=partial(open_on, target, host))  # type: ignore[arg-type]
    for part in (2, 0, 3, 1):
        parts.commit(worker.write(part).reports(), reserve=5)
    worker.end()
    parts.seal()
    assert everything(volume) == expected
    check_no_leak(volume)


def test_writers_of_other_hosts_commit_meanwhile(
    target: ScriptedTarget, volume: dlfs.Volume
) -> None:
    parts = open_parts(volume)
    parts.commit(reserve=60)
    worker = Worker(volume, parts, "a", opener=partial(open_on, target, WORKER))  # type: ignore[arg-type]
    reports = worker.write(0).reports()
    with dlfs.open(target.uri(hostid=OTHER)) as elsewhere:
        for number in range(2):
            with elsewhere.writer(f"checkpoint{number}") as writer:
                writer.add("state", b"state")
            parts.commit(reports if number == 0 else worker.write(1).reports())
        assert elsewhere.dataset("checkpoint1").get("state") == b"state"
    for part in (2, 3):
        parts.commit(worker.write(part).reports())
    worker.end()
    parts.seal()
    check_no_leak(volume)


def test_formatting_anew_is_refused_while_workers_may_write(
    target: ScriptedTarget, volume: dlfs.Volume
) -> None:
    parts = open_parts(volume)
    parts.commit(reserve=60)
    uri = target.uri(hostid=OTHER)
    with pytest.raises(LockedError, match="workers of an import"):
        dlfs.format_volume(uri, chunk_bytes=16 * KIB, force=True)
    parts.abort()
    dlfs.format_volume(uri, chunk_bytes=16 * KIB, force=True)


def test_who_takes_over_waits_until_grants_have_expired(
    target: ScriptedTarget, volume: dlfs.Volume
) -> None:
    parts = open_parts(volume)
    parts.commit(reserve=60)
    volume.refresh()
    (record,) = volume.session.catalog.unfinished
    term = find_term(record.tags)
    assert term is not None
    assert term.expiry_ms == 42_000
    worker = Worker(volume, parts, "a", opener=partial(open_on, target, WORKER))  # type: ignore[arg-type]
    parts.commit(worker.write(2).reports())
    late = worker.write(0).reports()
    waits: list[float] = []

    def wait(seconds: float) -> None:
        """Stand for the wait, behind which no granted write is permitted any more."""
        waits.append(seconds)
        with pytest.raises(StaleError):
            parts.confirm()  # so the coordinator does not extend the grant
        for device in worker.devices:
            device.extend_grant(boot_clock() - 1, incarnation=device.incarnation())

    again = open_parts(volume, wait=wait)
    assert waits == [42.0]
    again.commit(reserve=60)
    run = late[0].content.runs[0]
    member, offset = worker.geometry.locate(run.first_chunk, 0)
    with pytest.raises(DeviceError):
        worker.devices[member].write(offset, b"\xee" * 16 * KIB)
    with pytest.raises(StaleError):
        parts.commit(late)
    worker.close()
    other = Worker(volume, again, "b", opener=partial(open_on, target, OTHER))  # type: ignore[arg-type]
    for part in (0, 1, 3):
        again.commit(other.write(part).reports())
    other.end()
    assert again.seal().sample_count == sum(COUNTS)
    everything(volume)
    check_no_leak(volume)


def test_an_abandoned_import_frees_chunks_when_grants_have_expired(
    target: ScriptedTarget, volume: dlfs.Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SharedNamespaceDevice, "lease_times", MORTAL)
    with dlfs.open(target.uri(hostid=COORDINATOR, **SHORT)) as quick_one:
        parts = open_parts(quick_one)
        parts.commit(reserve=60)
        quick_one.refresh()
        begin_s = boot_clock()
        quick_one.abandon("x")
        assert boot_clock() - begin_s >= MORTAL.expiry_s
        with pytest.raises(StaleError):
            parts.confirm()
    check_no_leak(volume)


def test_the_host_of_a_lost_worker_is_fenced_off_for_good(
    target: ScriptedTarget, volume: dlfs.Volume
) -> None:
    """By the target alone: the worker's own grant goes on, as by a clock that stands still."""
    parts = open_parts(volume)
    parts.commit(reserve=200)
    lost = Worker(volume, parts, "a", opener=partial(open_on, target, WORKER))  # type: ignore[arg-type]
    run = lost.take(1)
    member, offset = lost.geometry.locate(run.first_chunk, 0)
    device = lost.devices[member]
    device.write(offset, b"\xee" * 16 * KIB)
    with open_device(target.uri(hostid=COORDINATOR), writable=True) as own:
        assert own.expel_writer(device.writer_key)
    parts.grants.lose("a", boot_clock())
    with pytest.raises(LeaseLostError, match="fenced this one off"):
        device.write(offset, b"\xee" * 16 * KIB)
    other = Worker(volume, parts, "b", opener=partial(open_on, target, COORDINATOR))  # type: ignore[arg-type]
    for part in range(len(COUNTS)):
        parts.commit(other.write(part).reports(), reserve=10)
    other.end()
    parts.seal()
    expected = everything(volume)
    with pytest.raises(LeaseLostError, match="fenced this one off"):
        device.write(offset, b"\xee" * 16 * KIB)
    lost.close()
    assert everything(volume) == expected
    check_no_leak(volume)
