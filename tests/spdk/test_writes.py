"""Writes through SPDK's initiator: flushes report losses; no write is sent after the lease ends.

The target is the scripted one, in this process, so that a test sees what reaches the media.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dlfs.base.units import KIB, MIB
from dlfs.block import Kind, SpdkDevice, aligned_buffer, open_device, operation_error
from dlfs.block.lease import LeaseTimes, boot_clock
from dlfs.block.shared import SharedNamespaceDevice
from dlfs.errors import DeviceError, DeviceTimeoutError, LeaseLostError
from tests.spdk.target import spdk_uri
from tests.support.nvme import DEFAULT_NQN, Fault, FaultScript, Namespace, ScriptedTarget, Subsystem
from tests.support.nvme.command import Event
from tests.support.nvme.faults import Complete, Cut, Delay
from tests.support.waiting import wait_for

pytestmark = pytest.mark.spdk

BY_R2T = 64 * KIB
FAILS = 0x280  # Write Fault
QUICK = LeaseTimes(renew_s=0.05, valid_s=20, drain_s=20, claim_s=0.25, poll_s=0.02)


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedTarget]:
    monkeypatch.setattr(SharedNamespaceDevice, "lease_times", QUICK)
    with ScriptedTarget([Subsystem(DEFAULT_NQN, [Namespace(2 * MIB)])]) as made:
        yield made


def open_spdk(target: ScriptedTarget, **options: object) -> SpdkDevice:
    device = open_device(spdk_uri(target.port, DEFAULT_NQN, **options), writable=True)
    assert isinstance(device, SpdkDevice)
    return device


def flush_fails_once(device: SpdkDevice) -> None:
    with pytest.raises(DeviceError, match="flush spdk:"):
        device.flush()
    device.flush()


def writes_of(target: ScriptedTarget) -> int:
    return target.counters.commands[Event.WRITE]


# ---- flush ---------------------------------------------------------------------------------------


def test_a_flush_that_failed_has_made_nothing_durable(target: ScriptedTarget) -> None:
    with open_spdk(target) as device:
        device.write(0, b"\1" * 512)
        target.play(FaultScript([Fault(Event.FLUSH, Complete(status=FAILS))]))
        with pytest.raises(DeviceError, match="flush spdk:"):
            device.flush()
        target.play(None)
        target.restart(lose_cache=True)
        flush_fails_once(device)


def test_a_write_that_ends_after_a_flush_is_not_covered_by_it(target: ScriptedTarget) -> None:
    buffer = aligned_buffer(BY_R2T, 4096)
    buffer[:] = 1
    with open_spdk(target) as device, device.queue_pair(1) as queue:
        device.flush()  # the device has its own queue pair from now on
        target.play(FaultScript([Fault(Event.WRITE, Delay(0.2))]))
        assert queue.submit(Kind.WRITE, buffer, 0, 1)
        device.flush()
        assert queue.poll(-1) == [(1, BY_R2T)]
        target.restart(lose_cache=True)
        flush_fails_once(device)


def test_a_flush_covers_a_write_of_the_same_controller(target: ScriptedTarget) -> None:
    with open_spdk(target) as device:
        device.write(0, b"\1" * 512)
        device.flush()
        target.restart(lose_cache=True)
        device.flush()
        assert device.read(0, 512) == b"\1" * 512


# ---- leases --------------------------------------------------------------------------------------


def test_no_write_is_sent_when_the_lease_is_over(target: ScriptedTarget) -> None:
    with open_spdk(target) as device:
        device.limit_writes(device.incarnation(), boot_clock())
        with pytest.raises(LeaseLostError, match="was over before it was sent"):
            device.write(0, b"\1" * 512)
        assert writes_of(target) == 0
        device.limit_writes(device.incarnation(), boot_clock() + 3600)
        device.write(0, b"\1" * 512)
        device.limit_writes(device.incarnation(), None)
        device.write(512, b"\1" * 512)


def test_the_data_of_a_write_is_not_sent_when_the_lease_is_over(target: ScriptedTarget) -> None:
    """The target requests the data after the lease has expired."""
    buffer = aligned_buffer(BY_R2T, 4096)
    buffer[:] = 1
    target.play(FaultScript([Fault(Event.WRITE, Delay(0.1))]))
    with open_spdk(target) as device, device.queue_pair(1) as queue:
        device.limit_writes(device.incarnation(), boot_clock() + 3600)
        assert queue.submit(Kind.WRITE, buffer, 0, 1)
        wait_for(lambda: writes_of(target), "a write")
        device.limit_writes(device.incarnation(), boot_clock())
        ((_, code),) = queue.poll(-1)
        error = operation_error(device.uri, Kind.WRITE, 0, BY_R2T, code)
        assert isinstance(error, LeaseLostError)
        assert writes_of(target) == 1
        assert device.read(0, BY_R2T) == bytes(BY_R2T)


def wait_for_another_controller(device: SpdkDevice, before: int) -> None:
    wait_for(lambda: device.incarnation() != before, "another controller")


def test_no_write_is_sent_after_a_reconnect_before_the_lease_is_confirmed(
    target: ScriptedTarget,
) -> None:
    with open_spdk(target, timeout_ms=300, reconnect_ms=300) as device:
        before = device.incarnation()
        device.limit_writes(before, boot_clock() + 3600)
        device.write(0, b"\1" * 512)
        target.drop_connections()
        wait_for_another_controller(device, before)
        with pytest.raises(DeviceTimeoutError):
            device.write(0, b"\2" * 512)
        assert writes_of(target) == 1
        device.limit_writes(device.incarnation(), boot_clock() + 3600)
        device.write(0, b"\3" * 512)
        assert device.read(0, 512) == b"\3" * 512


def test_a_writer_goes_on_after_a_reconnect(target: ScriptedTarget) -> None:
    with open_spdk(target) as device:
        device.lock_exclusive("a writer")
        device.write(0, b"\1" * 512)
        before = device.incarnation()
        target.drop_connections()
        wait_for_another_controller(device, before)
        device.write(0, b"\2" * 512)
        assert device.read(0, 512) == b"\2" * 512


def test_a_write_that_was_lost_takes_the_controller_with_it(target: ScriptedTarget) -> None:
    """The time until a target has quiesced counts from the end of all connections."""
    with open_spdk(target) as device, device.queue_pair(1):
        before = device.incarnation()
        target.play(FaultScript([Fault(Event.WRITE, Complete(cid=0xFFFF))]))
        device.write(0, b"\1" * 512)
        assert device.incarnation() > before
        assert target.counters.commands[Event.CONNECT_ADMIN] == 2


@pytest.mark.parametrize("nth", range(1, 4))
def test_a_reconnect_that_is_cut_off_costs_no_queue_pair(target: ScriptedTarget, nth: int) -> None:
    """One of those commands asks for I/O queues."""
    buffer = aligned_buffer(512, 4096)
    with open_spdk(target) as device, device.queue_pair(1) as one, device.queue_pair(1) as other:
        script = FaultScript([Fault(Event.FEATURES, Cut(0, reset=True), nth=nth)])
        target.play(script)
        target.drop_connections()
        for queue in (one, other):
            assert queue.submit(Kind.READ, buffer, 0, 1)
            assert queue.poll(-1) == [(1, 512)]
        assert script.played == 1
