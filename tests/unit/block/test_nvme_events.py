"""Devices over NVMe/TCP whose namespace changes while they are open."""

from __future__ import annotations

import errno
import time

import pytest

from dlfs.base.units import MIB
from dlfs.block import Kind, NvmeTcpAssociation, NvmeTcpDevice, aligned_buffer, open_device
from dlfs.block.nvme import NvmeCommand
from dlfs.errors import DeviceError, DeviceLostError
from tests.support.nvme import (
    DEFAULT_NQN,
    DISCOVERY_NQN,
    DiscoveryRecord,
    Event,
    Fault,
    FaultScript,
    Fragments,
    Namespace,
    ScriptedTarget,
    Settings,
    Subsystem,
)
from tests.support.nvme.command import Answer, completion
from tests.support.nvme.faults import Complete, Cut
from tests.support.nvme.pdu import CapsuleResp
from tests.support.waiting import retried, until, wait_for

pytestmark = pytest.mark.timeout(60)

PAGE = 4096
TIMEOUT_S = 20


def opened(target: ScriptedTarget, *, writable: bool = False, **options: object) -> NvmeTcpDevice:
    device = open_device(target.uri(**options), writable=writable)
    assert isinstance(device, NvmeTcpDevice)
    return device


def read_when_back(device: NvmeTcpDevice) -> bytes:
    """Read a page; a lost device is looked for again after a second."""
    return retried(lambda: device.read(0, PAGE), DeviceLostError)


def test_a_namespace_that_grows_is_seen_and_the_device_stays_as_it_is() -> None:
    space = Namespace(2 * MIB)
    space.size_bytes = MIB
    with ScriptedTarget([Subsystem(DEFAULT_NQN, [space])]) as target, opened(target) as device:
        assert device.status().namespace_bytes == device.size_bytes == MIB
        space.size_bytes = 2 * MIB
        target.notify_of_namespaces(1)
        status = until(device, lambda status: status.namespace_bytes == 2 * MIB)
        assert device.size_bytes == MIB
        assert (status.events, status.namespace_events, status.reconnects) == (1, 1, 0)
        assert status.last_event == "namespace attribute changed (0x040002)"
        for count in range(2, 6):  # a request is outstanding again after every event
            target.notify_of_namespaces(1)
            until(device, lambda status, count=count: status.events == count)
        assert len(device.read(0, PAGE)) == PAGE
        assert target.violations == []


def test_other_namespaces_are_not_looked_at() -> None:
    with ScriptedTarget() as target, opened(target) as device:
        before = target.counters.commands[Event.IDENTIFY]
        target.notify_of_namespaces(2, 3)
        until(device, lambda status: status.namespace_events == 1)
        target.notify_of_namespaces(0xFFFFFFFF)  # more than the list holds
        until(device, lambda status: status.namespace_events == 2)
        device.runner.run_admin(NvmeCommand(0x06, cdw10=1), bytearray(PAGE))  # behind both
        assert target.counters.commands[Event.IDENTIFY] == before + 3


def test_a_namespace_that_goes_away_ends_reads_at_once_and_may_return() -> None:
    subsystem = Subsystem(DEFAULT_NQN, [Namespace(2 * MIB)])
    with (
        ScriptedTarget([subsystem]) as target,
        opened(target, timeout_ms=30000, reconnect_ms=60000) as device,
        device.queue_pair(4) as queue,
    ):
        space = subsystem.namespaces.pop(1)
        target.notify_of_namespaces(1)
        until(device, lambda status: not status.connected)
        began = time.monotonic()
        with pytest.raises(DeviceLostError, match="there is no such namespace"):
            device.read(0, PAGE)
        buffer = aligned_buffer(PAGE, PAGE)
        assert queue.submit(Kind.READ, buffer, 0, 1)
        ((_, result),) = queue.poll(TIMEOUT_S * 1000)
        assert result < 0
        assert time.monotonic() - began < 10  # not the time-out of a command
        subsystem.namespaces[1] = space
        assert read_when_back(device) == bytes(PAGE)
        assert device.status().reconnects == 1


@pytest.mark.parametrize("change", ["shrinks", "replaced"])
def test_a_namespace_that_is_not_the_same_any_more_is_lost(change: str) -> None:
    space = Namespace(2 * MIB)
    subsystem = Subsystem(DEFAULT_NQN, [space])
    with ScriptedTarget([subsystem]) as target, opened(target) as device:
        if change == "shrinks":
            space.size_bytes = MIB
            reason = f"namespace 1 shrank from {2 * MIB} to {MIB} bytes"
        else:
            subsystem.namespaces[1] = Namespace(2 * MIB)
            reason = "namespace 1 is another one now"
        target.notify_of_namespaces(1)
        until(device, lambda status: not status.connected)
        with pytest.raises(DeviceLostError, match=reason):
            device.read(0, PAGE)
        space.size_bytes = 2 * MIB
        subsystem.namespaces[1] = space
        assert read_when_back(device) == bytes(PAGE)


def test_writes_to_a_namespace_that_became_read_only_end_with_erofs() -> None:
    with ScriptedTarget() as target, opened(target, writable=True) as device:
        device.write(0, bytes(PAGE))
        sent = target.counters.commands[Event.WRITE]
        target.namespace.read_only = True
        target.notify_of_namespaces(1)
        until(device, lambda status: status.write_protected)
        target.drop_connections()  # a new connection is no error either
        assert device.read(0, PAGE) == bytes(PAGE)
        with pytest.raises(DeviceError) as caught:
            device.write(0, bytes(PAGE))
        assert caught.value.errno == errno.EROFS
        assert target.counters.commands[Event.WRITE] == sent
        target.namespace.read_only = False
        target.notify_of_namespaces(1)
        until(device, lambda status: not status.write_protected)
        device.write(0, bytes(PAGE))
        target.namespace.read_only = True
        with pytest.raises(DeviceError, match="write-protected"):
            opened(target, writable=True)


def test_a_target_without_events_is_asked_for_none() -> None:
    subsystem = Subsystem(DEFAULT_NQN, [Namespace(MIB)], settings=Settings(notices=False))
    with ScriptedTarget([subsystem]) as target, opened(target) as device:
        device.read(0, PAGE)
        assert target.counters.commands[Event.ASYNC_EVENT] == 0
        assert target.counters.commands[Event.FEATURES] == 1  # the number of queues


@pytest.mark.parametrize("status", [0x002, 0x105])
def test_a_target_that_refuses_events_is_used_without(status: int) -> None:
    refused = Event.FEATURES if status == 0x002 else Event.ASYNC_EVENT
    match = {"cdw10": 0x0B} if status == 0x002 else {}
    script = FaultScript([Fault(refused, Complete(status), match=match)])
    with ScriptedTarget(script=script) as target, opened(target) as device:
        assert device.read(0, PAGE) == bytes(PAGE)
        target.notify_of_namespaces(1)
        device.runner.run_admin(NvmeCommand(0x06, cdw10=1), bytearray(PAGE))
        assert device.status().events == 0


def test_events_that_arrive_in_pieces_and_with_other_answers() -> None:
    script = FaultScript(fragments=Fragments((3, 11), pause_ms=1, pieces_max=4))
    with ScriptedTarget(script=script) as target, opened(target) as device:
        for count in range(1, 8):
            target.notify_of_namespaces(1)
            device.runner.run_admin(NvmeCommand(0x06, cdw10=1), bytearray(PAGE))
            until(device, lambda status, count=count: status.events >= count)
        assert device.status().protocol_errors == device.status().reconnects == 0


def test_a_connection_that_ends_while_a_log_is_read_is_opened_again() -> None:
    script = FaultScript([Fault(Event.LOG_PAGE, Cut(0))])
    with ScriptedTarget(script=script) as target, opened(target) as device:
        target.notify_of_namespaces(1)
        until(device, lambda status: status.reconnects == 1 and status.connected)
        target.notify_of_namespaces(1)
        until(device, lambda status: status.namespace_events == 2)
        assert device.read(0, PAGE) == bytes(PAGE)


def test_an_event_that_nothing_asked_for_is_a_protocol_error() -> None:
    subsystem = Subsystem(DEFAULT_NQN, [Namespace(MIB)], settings=Settings(notices=False))
    with ScriptedTarget([subsystem]) as target, opened(target) as device:

        def speak() -> None:
            for connection in target.server.connections:
                entry = completion(0x8000, Answer(value=0x040002), 0)
                connection.post([CapsuleResp(entry)])
                connection.post_later(0, list)

        target._call(speak)
        until(device, lambda status: status.protocol_errors == 1)
        assert device.read(0, PAGE) == bytes(PAGE)


def test_health_warnings_are_counted() -> None:
    with ScriptedTarget() as target, opened(target) as device:
        target._call(lambda: target._notify(1 << 1, 0x020101))
        status = until(device, lambda status: status.health_events == 1)
        assert status.last_event == "health warning (0x020101)"
        assert status.health_warnings == 0  # the scripted log has none
        assert device.read(0, PAGE) == bytes(PAGE)


def test_a_discovery_controller_reports_that_its_log_changed() -> None:
    with (
        ScriptedTarget() as target,
        NvmeTcpAssociation([("127.0.0.1", target.port)], DISCOVERY_NQN) as association,
    ):
        for count in range(1, 4):
            target.list_also([DiscoveryRecord("nqn.2026-11.org.dlfs:more", "127.0.0.1", 4420)])
            wait_for(lambda count=count: association.status().discovery_events >= count, "an event")
        assert association.status().reconnects == 0
