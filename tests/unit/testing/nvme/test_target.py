"""The scripted target when it is honest: what the specification asks of it."""

from __future__ import annotations

import pytest

from dlfs.testing.nvme import DEFAULT_NQN, Event, ScriptedTarget
from tests.unit.testing.nvme.host import Pair

DATA = bytes(range(256)) * 16


@pytest.mark.parametrize("digests", [0, 1, 2, 3])
def test_reads_what_was_written(digests: int) -> None:
    with ScriptedTarget() as target, Pair(target.port, DEFAULT_NQN, digests=digests) as pair:
        assert pair.io.write(8, DATA) == 0
        assert pair.io.write(16, DATA, in_capsule=False) == 0
        assert pair.io.read(0, 24) == (0, bytes(4096) + DATA + DATA)
        assert target.counters.commands[Event.WRITE] == 2
        assert target.violations == []


def test_a_restart_keeps_port_and_contents() -> None:
    with ScriptedTarget() as target:
        with Pair(target.port, DEFAULT_NQN) as pair:
            assert pair.io.write(0, DATA) == 0
            target.kill()
            with pytest.raises(ConnectionResetError):
                pair.io.receive()
            with pytest.raises(ConnectionRefusedError):
                Pair(target.port, DEFAULT_NQN)
        target.restart()
        with Pair(target.port, DEFAULT_NQN) as pair:
            assert pair.io.read(0, 8) == (0, DATA)
