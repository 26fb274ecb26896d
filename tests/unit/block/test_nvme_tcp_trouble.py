"""Devices over NVMe/TCP in trouble, where the order of events matters."""

from __future__ import annotations

import select
import time

import pytest

from dlfs._native.abi import E_TIMEOUT
from dlfs._native.library import library
from dlfs._native.nvme import NvmeStatus
from dlfs.block import NvmeTcpDevice, open_device
from dlfs.block.device import Kind, aligned_buffer
from dlfs.errors import DeviceError
from tests.support.forked import run_forked
from tests.support.nvme import Event, Fault, FaultScript, Fragments, ScriptedTarget
from tests.support.nvme.faults import Complete, Cut, Drip, Omit
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(60)

PAGE = 4096
TIMEOUT_S = 30


def wait_for(device: NvmeTcpDevice, *, connected: bool, **least: int) -> NvmeStatus:
    """Wait until the device's status has these values; counters may be higher."""

    def is_met(status: NvmeStatus) -> bool:
        counted = all(getattr(status, name) >= count for name, count in least.items())
        return status.connected == connected and counted

    return until(device, is_met)


def opened(target: ScriptedTarget, *, writable: bool = False, **options: object) -> NvmeTcpDevice:
    device = open_device(target.uri(**options), writable=writable)
    assert isinstance(device, NvmeTcpDevice)
    return device


def test_a_forked_child_connects_although_there_is_no_budget_for_a_loss() -> None:
    with ScriptedTarget() as target, opened(target, reconnect_ms=0) as device:
        expected = device.read(0, PAGE)

        def read() -> None:
            assert device.read(0, PAGE) == expected

        assert run_forked(read) == 0


def test_a_command_times_out_although_others_are_answered() -> None:
    script = FaultScript([Fault(Event.READ, Omit(), match={"cdw10": 0})])
    with (
        ScriptedTarget(script=script) as target,
        opened(target, timeout_ms=200, reconnect_ms=5000) as device,
        device.queue_pair(4) as queue,
    ):
        buffers = [aligned_buffer(PAGE, PAGE) for _ in range(4)]
        for number, buffer in enumerate(buffers):
            assert queue.submit(Kind.READ, buffer, number * PAGE, number)
        descriptor = library().dlfs_queue_descriptor(queue.handle)
        answered = set[int]()
        until = time.monotonic() + TIMEOUT_S
        while 0 not in answered:
            assert time.monotonic() < until, "the unanswered command was never noticed"
            # Waits for an event, so that every poll finds a completion: the timeout must work then.
            select.select([descriptor], [], [], 1)
            answered = set()
            for number, result in queue.poll(0):
                assert result == PAGE
                answered.add(number)
                if number:
                    assert queue.submit(Kind.READ, buffers[number], number * PAGE, number)
        assert device.status().timeouts >= 1  # on a slow machine other commands time out too


@pytest.mark.parametrize("busy_poll_us", [50, 1_000_000])
def test_a_busy_poll_receives_fragments(busy_poll_us: int) -> None:
    """The pauses between fragments are longer or shorter than the busy poll."""
    data = bytes(range(256)) * (8 * PAGE // 256)
    script = FaultScript([Fault(Event.READ, Drip(Fragments((5000,), pause_ms=2)))])
    with (
        ScriptedTarget() as target,
        opened(target, writable=True, busy_poll_us=busy_poll_us) as device,
    ):
        device.write(0, data)
        target.play(script)
        assert device.read(0, len(data)) == data


def test_a_busy_poll_keeps_time_limits() -> None:
    """Both time limits end a busy poll: that of the call and that of an unanswered command."""
    script = FaultScript([Fault(Event.READ, Omit())])
    with (
        ScriptedTarget(script=script) as target,
        opened(target, timeout_ms=300, reconnect_ms=0, busy_poll_us=1_000_000) as device,
        device.queue_pair(1) as queue,
    ):
        buffer = aligned_buffer(PAGE, PAGE)
        assert queue.submit(Kind.READ, buffer, 0, 7)
        assert queue.poll(20) == []
        assert queue.poll(TIMEOUT_S * 1000) == [(7, E_TIMEOUT)]


def test_a_reissued_command_has_the_full_timeout() -> None:
    """The first attempt finds no target, the second is disconnected, the third is not answered."""
    script = FaultScript([Fault(Event.READ, Cut(0)), Fault(Event.READ, Omit(), nth=2)])
    with (
        ScriptedTarget(script=script) as target,
        opened(target, timeout_ms=300, reconnect_ms=4000) as device,
        device.queue_pair(1) as queue,
    ):
        target.play(None)
        target.kill()
        wait_for(device, connected=False)
        target.play(script)
        buffer = aligned_buffer(PAGE, PAGE)
        assert queue.submit(Kind.READ, buffer, 0, 7)
        assert queue.poll(700) == []
        target.restart()
        assert queue.poll(TIMEOUT_S * 1000) == [(7, PAGE)]


def test_a_write_that_met_silence_is_not_repeated_after_a_later_reset() -> None:
    script = FaultScript([Fault(Event.WRITE, Omit()), Fault(Event.READ, Omit())])
    with (
        ScriptedTarget(script=script) as target,
        opened(target, writable=True, timeout_ms=300) as device,
        device.queue_pair(1) as unwatched,
    ):
        assert unwatched.submit(Kind.WRITE, aligned_buffer(PAGE, PAGE), 0, 7)
        device.read(PAGE, PAGE)
        before = wait_for(device, connected=True, timeouts=1, reconnects=1)
        target.drop_connections()
        wait_for(device, connected=True, reconnects=before.reconnects + 1)
        [(tag, result)] = unwatched.poll(TIMEOUT_S * 1000)
        assert (tag, result) == (7, E_TIMEOUT)
        assert target.counters.commands[Event.WRITE] == 1


def test_a_queue_pair_is_made_while_its_target_is_away() -> None:
    with ScriptedTarget() as target, opened(target) as device:
        expected = device.read(0, PAGE)
        target.kill()
        wait_for(device, connected=False)
        buffer = aligned_buffer(PAGE, PAGE)
        with device.queue_pair(1) as queue:
            assert queue.submit(Kind.READ, buffer, 0, 7)
            assert queue.poll(0) == []
            target.restart()
            assert queue.poll(TIMEOUT_S * 1000) == [(7, PAGE)]
        assert buffer.tobytes() == expected


def test_a_queue_number_that_is_still_taken_is_asked_for_again() -> None:
    script = FaultScript([Fault(Event.CONNECT_IO, Complete(0x400C))])
    with ScriptedTarget(script=script) as target, opened(target) as device:
        assert len(device.read(0, PAGE)) == PAGE
        assert target.counters.commands[Event.CONNECT_IO] == 2


def test_a_queue_pair_that_is_refused_is_not() -> None:
    script = FaultScript([Fault(Event.CONNECT_IO, Complete(0x4181))])
    with ScriptedTarget(script=script) as target, opened(target) as device:
        with pytest.raises(DeviceError):
            device.queue_pair(1)
        assert target.counters.commands[Event.CONNECT_IO] == 1
