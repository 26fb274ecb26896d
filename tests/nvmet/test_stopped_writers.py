"""Writers that are stopped and continue, on the kernel's target; see tests/fault/stopped.py.

This kernel has no reservations. Writes are stopped by the deadline of the lease and by the target,
which ends the connections of a silent host. The kernel counts keep-alive timeouts in seconds and
ends connections after two. A round takes six seconds: only one kind of rounds runs unless
``DLFS_STOPPED_ROUNDS`` is set.
"""

from __future__ import annotations

import os
import uuid

import pytest

from dlfs.block import SharedNamespaceDevice
from dlfs.block.lease import LeaseTimes
from tests.fault.stopped import FIRST_BYTE, HERE, LAST_BYTE, THERE, Scene, play
from tests.nvmet.shared import OPEN
from tests.nvmet.target import KernelTarget

pytestmark = pytest.mark.qemu

TIMES = LeaseTimes(renew_s=0.1, valid_s=1, drain_s=2, claim_s=0.4, poll_s=0.05)
OPTIONS = {"timeout_ms": 1200, "reconnect_ms": 800, "keepalive_ms": 1000}
KINDS = [(HERE, "stands still"), (THERE, "goes on")]


@pytest.mark.parametrize(
    ("host", "clock"), KINDS if "DLFS_STOPPED_ROUNDS" in os.environ else KINDS[:1]
)
def test_a_stopped_writer_writes_nothing_when_it_goes_on(
    kernel_target: KernelTarget, monkeypatch: pytest.MonkeyPatch, host: uuid.UUID, clock: str
) -> None:
    monkeypatch.setattr(SharedNamespaceDevice, "lease_times", TIMES)
    kernel_target.wipe(OPEN)

    def contents() -> bytes:
        with kernel_target.disk(OPEN).open("rb") as file:
            file.seek(FIRST_BYTE)
            return file.read(LAST_BYTE - FIRST_BYTE)

    scene = Scene(
        TIMES,
        kernel_target.uri(OPEN, hostid=HERE, **OPTIONS),
        kernel_target.uri(OPEN, hostid=host, **OPTIONS),
        contents,
    )
    play(scene, clock=clock, host="same host" if host == HERE else "another host")
