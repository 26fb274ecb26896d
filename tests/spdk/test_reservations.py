"""Leases and reservations on SPDK's target, which has them: two hosts, through both initiators."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator

import pytest

from dlfs.block import SharedNamespaceDevice, open_device
from dlfs.block.host import host_id
from dlfs.block.lease import LeaseTimes
from dlfs.block.reservation import WRITE_EXCLUSIVE, Registrant, Reservation, reservation_key
from dlfs.errors import LeaseLostError, LockedError
from tests.spdk.target import SpdkTarget

pytestmark = pytest.mark.spdk

NQN = "nqn.2024-01.org.dlfs.test:reservations"
HERE, THERE = uuid.UUID(int=0x1111), uuid.UUID(int=0x2222)
MORTAL = LeaseTimes(renew_s=0.1, valid_s=2, drain_s=1, claim_s=0.25, poll_s=0.02)
SHORT = {"timeout_ms": 600, "reconnect_ms": 400, "keepalive_ms": 500}

Opener = Callable[[uuid.UUID], SharedNamespaceDevice]


@pytest.fixture
def opener(spdk_target: SpdkTarget, monkeypatch: pytest.MonkeyPatch) -> Iterator[Opener]:
    monkeypatch.setattr(SharedNamespaceDevice, "lease_times", MORTAL)

    def open_as(host: uuid.UUID) -> SharedNamespaceDevice:
        device = open_device(spdk_target.tcp_uri(NQN, hostid=host, **SHORT), writable=True)
        assert isinstance(device, SharedNamespaceDevice)
        return device

    with spdk_target.subsystem(NQN):
        yield open_as


def holder(device: SharedNamespaceDevice) -> Registrant | None:
    reservation = Reservation.probe(device.runner, device.nsid, device.uri)
    assert reservation is not None
    found = reservation.report()
    assert found.kind in (0, WRITE_EXCLUSIVE)
    return found.holder


def test_the_reservation_lives_as_long_as_the_lease(opener: Opener) -> None:
    with opener(HERE) as device, opener(THERE) as other:
        assert holder(other) is None
        device.lock_exclusive("a writer")
        found = holder(other)
        assert found is not None
        assert (found.host_identifier, found.key) == (HERE.bytes, reservation_key(HERE.bytes))
        device.write(0, b"\1" * 512)
        device.flush()
        with pytest.raises(LockedError, match="a writer on host"):
            other.lock_exclusive("another")
        with pytest.raises(LeaseLostError, match="another host has reserved the namespace"):
            other.write(0, b"\2" * 512)
        assert other.read(0, 512) == b"\1" * 512
        device.unlock()
        assert holder(other) is None
        other.lock_exclusive("another")
        other.write(0, b"\2" * 512)


def test_a_stalled_writer_is_fenced_by_who_takes_over(opener: Opener) -> None:
    with opener(HERE) as stalled, opener(THERE) as next_one:
        stalled.lock_exclusive("a stalled writer")
        assert stalled._renewer is not None
        stalled._renewer.stop()
        lease, stalled._lease = stalled._lease, None  # it has checked its lease and is stopped now
        stalled.limit_writes(stalled.generation(), None)  # it knows of no deadline
        next_one.lock_exclusive("the next")
        found = holder(stalled)
        assert found is not None
        assert found.host_identifier == THERE.bytes
        with pytest.raises(LeaseLostError, match="another host has reserved the namespace"):
            stalled.write(0, b"\1" * 512)
        assert next_one.read(0, 512) == bytes(512)
        stalled._lease = lease


def test_a_writer_through_spdk_keeps_another_host_out(
    opener: Opener, spdk_target: SpdkTarget
) -> None:
    uri = spdk_target.spdk_uri(NQN, **SHORT)
    with open_device(uri, writable=True) as device, opener(THERE) as other:
        device.lock_exclusive("a writer through SPDK")
        found = holder(other)
        assert found is not None
        assert found.host_identifier == host_id().bytes
        with pytest.raises(LockedError, match="a writer through SPDK on host"):
            other.lock_exclusive("another")
        with pytest.raises(LeaseLostError, match="another host has reserved the namespace"):
            other.write(0, b"\2" * 512)
        device.write(0, b"\1" * 512)
        device.flush()
        device.unlock()
        other.lock_exclusive("another")
        with pytest.raises(LeaseLostError, match="another host has reserved the namespace"):
            device.write(0, b"\3" * 512)
        assert device.read(0, 512) == b"\1" * 512
