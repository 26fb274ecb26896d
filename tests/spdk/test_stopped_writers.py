"""Writers that are stopped and continue, on SPDK's target; see tests/fault/stopped.py.

The target has reservations. Here it counts keep-alive timeouts in steps of 100 ms, instead of its
default of 10 s.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dlfs.block import SharedNamespaceDevice, open_device
from dlfs.block.host import host_identity
from dlfs.block.lease import LeaseTimes
from tests.fault.stopped import FIRST_BYTE, LAST_BYTE, THERE, Scene, play
from tests.spdk.target import SpdkTarget

pytestmark = pytest.mark.spdk

NQN = "nqn.2024-01.org.dlfs.test:stopped"
TIMES = LeaseTimes(renew_s=0.1, valid_s=0.8, drain_s=1.2, claim_s=0.3, poll_s=0.02)
OPTIONS = {"timeout_ms": 800, "reconnect_ms": 400, "keepalive_ms": 500}


@pytest.fixture(scope="module")
def quick_target() -> Iterator[SpdkTarget]:
    with SpdkTarget(kas=1, min_kato=100) as target:
        yield target


@pytest.mark.parametrize("initiator", ["nvme-tcp", "spdk"])
@pytest.mark.parametrize("clock", ["goes on", "stands still"])
@pytest.mark.parametrize("host", ["same host", "another host"])
def test_a_stopped_writer_writes_nothing_when_it_goes_on(
    quick_target: SpdkTarget,
    monkeypatch: pytest.MonkeyPatch,
    initiator: str,
    host: str,
    clock: str,
) -> None:
    monkeypatch.setattr(SharedNamespaceDevice, "lease_times", TIMES)
    target = quick_target

    def contents() -> bytes:
        with open_device(target.tcp_uri(NQN)) as device:
            return device.read(FIRST_BYTE, LAST_BYTE - FIRST_BYTE)

    with target.subsystem(NQN):
        here = host_identity(None, None)[1]
        uri_of = target.spdk_uri if initiator == "spdk" else target.tcp_uri
        scene = Scene(
            TIMES,
            uri_of(NQN, **OPTIONS),
            target.tcp_uri(NQN, hostid=here if host == "same host" else THERE, **OPTIONS),
            contents,
        )
        play(scene, clock=clock, host=host)
