"""Writes that are pending in a target's back end when their connection ends, and land later.

The tests run with both initiators.
"""

from __future__ import annotations

import pytest

from dlfs.base.units import MIB
from dlfs.block import open_device
from dlfs.errors import DeviceLostError
from tests.fault.nvme_world import INITIATORS, check_honest, uri_through
from tests.support.nvme import (
    DEFAULT_NQN,
    Fault,
    FaultScript,
    ScriptedTarget,
    Settings,
    SlowNamespace,
    Subsystem,
)
from tests.support.nvme.command import Event
from tests.support.nvme.faults import Cut

QUIESCE_MS = 250
FIRST, SECOND = b"\1" * 512, b"\2" * 512


def slow_target(*, late_s: float, quiesce_ms: int) -> tuple[ScriptedTarget, SlowNamespace]:
    """Make a target that closes the connection of the first write, which lands ``late_s`` later."""
    namespace = SlowNamespace(MIB, late_s=late_s)
    namespace.delays_next = True
    settings = Settings(quiesce_ms=quiesce_ms)
    subsystem = Subsystem(DEFAULT_NQN, [namespace], settings=settings)
    script = FaultScript([Fault(Event.WRITE, Cut(0, reset=True))])
    return ScriptedTarget([subsystem], script=script), namespace


@pytest.mark.parametrize("initiator", INITIATORS)
@pytest.mark.parametrize("length_bytes", [512, 64 * 1024], ids=["in capsule", "by R2T"])
def test_a_repeated_write_does_not_undo_a_later_one(initiator: str, length_bytes: int) -> None:
    target, namespace = slow_target(late_s=0.8 * QUIESCE_MS / 1000, quiesce_ms=QUIESCE_MS)
    repeats = length_bytes // 512
    with target, open_device(uri_through(initiator, target), writable=True) as device:
        device.write(0, FIRST * repeats)
        device.write(0, SECOND * repeats)
        device.flush()
        assert namespace.landed.wait(20)
        assert device.read(0, length_bytes) == SECOND * repeats
        assert target.counters.commands[Event.WRITE] == 3
        check_honest(initiator, target)


@pytest.mark.parametrize("initiator", INITIATORS)
@pytest.mark.parametrize(
    ("quiesce_ms", "options"),
    [
        pytest.param(0, {"keepalive_ms": 0}, id="no time is known"),
        pytest.param(0, {"timeout_ms": 2000, "reconnect_ms": 2000}, id="the keep-alive is longer"),
        pytest.param(60_000, {}, id="the controller takes longer"),
    ],
)
def test_a_write_is_not_repeated_before_the_controller_has_quiesced(
    initiator: str, quiesce_ms: int, options: dict[str, int]
) -> None:
    target, namespace = slow_target(late_s=0.01, quiesce_ms=quiesce_ms)
    with target, open_device(uri_through(initiator, target, **options), writable=True) as device:
        with pytest.raises(DeviceLostError):
            device.write(0, FIRST)
        assert namespace.landed.wait(20)
        assert target.counters.commands[Event.WRITE] == 1
        device.write(0, SECOND)
        assert device.read(0, 512) == SECOND


@pytest.mark.slow
@pytest.mark.parametrize("initiator", INITIATORS)
def test_without_a_quiesce_time_a_write_is_repeated_after_the_keep_alive_timeout(
    initiator: str,
) -> None:
    target, namespace = slow_target(late_s=0.5, quiesce_ms=0)
    with (
        target,
        open_device(uri_through(initiator, target, keepalive_ms=500), writable=True) as device,
    ):
        device.write(0, FIRST)
        assert namespace.landed.is_set()
        device.write(0, SECOND)
        assert device.read(0, 512) == SECOND
