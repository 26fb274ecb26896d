"""Granted writers that are stopped and continue, on a scripted target."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest

from dlfs.base.units import MIB
from dlfs.block import SharedNamespaceDevice
from dlfs.block.lease import LeaseTimes
from tests.fault.stopped import FIRST_BYTE, HERE, LAST_BYTE, THERE, Scene
from tests.fault.stopped_workers import play
from tests.support.nvme import Namespace, ScriptedTarget, Subsystem

TIMES = LeaseTimes(renew_s=0.05, valid_s=0.4, drain_s=0.6, claim_s=0.2, poll_s=0.01)
OPTIONS: dict[str, Any] = {"timeout_ms": 400, "reconnect_ms": 200, "keepalive_ms": 250}
LONG_TIMES = LeaseTimes(renew_s=0.05, valid_s=8, drain_s=16, claim_s=0.2, poll_s=0.01)
"""Those of a test that waits for none of them: a busy machine stays within them."""
LONG_OPTIONS: dict[str, Any] = {name: 10 * value for name, value in OPTIONS.items()}


def scene_of(
    target: ScriptedTarget,
    host: uuid.UUID,
    cut: Callable[[bool], None] | None,
    times: LeaseTimes = TIMES,
    options: dict[str, Any] = OPTIONS,
) -> Scene:
    return Scene(
        times,
        target.uri(hostid=HERE, **options),
        target.uri(hostid=host, **options),
        contents=lambda: bytes(target.namespace.contents[FIRST_BYTE:LAST_BYTE]),
        cut=cut,
    )


@pytest.mark.parametrize("clock", ["goes on", "stands still"])
@pytest.mark.parametrize("host", [HERE, THERE], ids=["same host", "another host"])
def test_a_stopped_worker_writes_nothing_when_it_goes_on(
    monkeypatch: pytest.MonkeyPatch, clock: str, host: uuid.UUID
) -> None:
    monkeypatch.setattr(SharedNamespaceDevice, "lease_times", TIMES)
    subsystem = Subsystem("nqn.2026-11.org.dlfs:a", [Namespace(2 * MIB)])
    with ScriptedTarget([subsystem]) as target:
        scene = scene_of(target, host, lambda reset: target.drop_connections(reset=reset))
        play(scene, clock=clock, host="same host" if host == HERE else "another host")


@pytest.mark.parametrize("clock", ["goes on", "stands still"])
def test_the_target_refuses_a_stopped_workers_host(
    monkeypatch: pytest.MonkeyPatch, clock: str
) -> None:
    monkeypatch.setattr(SharedNamespaceDevice, "lease_times", LONG_TIMES)
    subsystem = Subsystem("nqn.2026-11.org.dlfs:a", [Namespace(2 * MIB)])
    with ScriptedTarget([subsystem]) as target:
        scene = scene_of(target, THERE, None, LONG_TIMES, LONG_OPTIONS)
        play(scene, clock=clock, host="another host", reserved=True)
