"""Reservations and leases on SPDK's target, which has reservations: two hosts, both initiators."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator

import pytest

from dlfs.block import SharedNamespaceDevice, open_device
from dlfs.block.host import host_identity
from dlfs.block.lease import LeaseTimes
from dlfs.block.reservation import WRITE_EXCLUSIVE, Registrant, Reservation, reservation_key
from dlfs.errors import LeaseLostError, LockedError
from tests.spdk.target import SpdkTarget
from tests.support.reservations import (
    FOREIGN_KEY,
    IMPORT_CHECKS,
    ReservedNamespace,
    check_acquire_and_release,
    check_foreign_registration,
    check_foreign_reservation,
    check_preemption,
)
from tests.support.writers import locked_writer

pytestmark = pytest.mark.spdk

NQN = "nqn.2024-01.org.dlfs.test:reservations"
HERE, THERE = uuid.UUID(int=0x1111), uuid.UUID(int=0x2222)
MORTAL = LeaseTimes(renew_s=0.1, valid_s=2, drain_s=1, claim_s=0.25, poll_s=0.02)
SHORT = {"timeout_ms": 600, "reconnect_ms": 400, "keepalive_ms": 500}
LONG = {"timeout_ms": 10000, "reconnect_ms": 20000}

FENCED = "another host has reserved the namespace"

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


@pytest.fixture(params=["nvme-tcp", "spdk"])
def namespace(
    spdk_target: SpdkTarget, request: pytest.FixtureRequest
) -> Iterator[ReservedNamespace]:
    """The first host uses the initiator of the parameter; the second one always libdlfs's."""
    through_spdk = request.param == "spdk"
    first_id = host_identity(None, None)[1] if through_spdk else HERE
    with spdk_target.subsystem(NQN):
        if through_spdk:
            uri = spdk_target.spdk_uri(NQN, **LONG)
        else:
            uri = spdk_target.tcp_uri(NQN, hostid=first_id, **LONG)
        with (
            open_device(uri, writable=True) as first,
            open_device(spdk_target.tcp_uri(NQN, hostid=THERE, **LONG), writable=True) as second,
        ):
            assert isinstance(first, SharedNamespaceDevice)
            assert isinstance(second, SharedNamespaceDevice)
            yield ReservedNamespace(1, first.runner, second.runner, first_id.bytes, THERE.bytes)


# ---- the same checks as on the model of tests/unit/block/test_reservation.py ---------------------


def test_a_reservation_is_acquired_and_released(namespace: ReservedNamespace) -> None:
    check_acquire_and_release(namespace)


@pytest.mark.parametrize("expired", [True, False], ids=["of a dead writer", "a fence"])
def test_a_reservation_of_dlfs_is_preempted_and_the_new_one_stays(
    namespace: ReservedNamespace, expired: bool
) -> None:
    check_preemption(namespace, expired=expired)


@pytest.mark.parametrize("expired", [True, False], ids=["of a dead writer", "without a lease"])
def test_a_reservation_of_other_software_is_left_alone(
    namespace: ReservedNamespace, expired: bool
) -> None:
    check_foreign_reservation(namespace, expired=expired)


def test_a_registration_of_other_software_is_left_alone(namespace: ReservedNamespace) -> None:
    check_foreign_registration(namespace)


@pytest.mark.parametrize("check", IMPORT_CHECKS)
def test_a_reservation_of_an_import_with_workers(namespace: ReservedNamespace, check: str) -> None:
    IMPORT_CHECKS[check](namespace)


# ---- with the lease ------------------------------------------------------------------------------


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
        with pytest.raises(LeaseLostError, match=FENCED):
            other.write(0, b"\2" * 512)
        assert other.read(0, 512) == b"\1" * 512
        device.unlock()
        assert holder(other) is None
        other.lock_exclusive("another")
        other.write(0, b"\2" * 512)


def test_only_a_dead_writers_reservation_is_preempted(
    opener: Opener, spdk_target: SpdkTarget
) -> None:
    uri = spdk_target.tcp_uri(NQN, hostid=THERE, **SHORT)
    with opener(HERE) as device, locked_writer(uri, MORTAL) as writer:
        with pytest.raises(LockedError, match=rf"a dying writer on host .* pid {writer.pid} "):
            device.lock_exclusive("the next")
        found = holder(device)
        assert found is not None
        assert found.host_identifier == THERE.bytes  # the writer lives: it was not preempted
        writer.kill()
        writer.wait()
        device.lock_exclusive("the next")
        found = holder(device)
        assert found is not None
        assert found.host_identifier == HERE.bytes
        device.write(0, b"\1" * 512)
        device.unlock()
        with opener(THERE) as other:
            found = holder(other)
            assert found is not None
            assert found.host_identifier == HERE.bytes  # the fence stays with a free lease
            with pytest.raises(LeaseLostError, match=FENCED):
                other.write(0, b"\2" * 512)
            other.lock_exclusive("the dead writer's host")
            other.write(0, b"\3" * 512)
        assert device.read(0, 512) == b"\3" * 512


def test_a_reservation_of_other_software_refuses_the_lease(opener: Opener) -> None:
    with opener(HERE) as device, opener(THERE) as other:
        foreign = ReservedNamespace(1, device.runner, other.runner, HERE.bytes, THERE.bytes)
        foreign.reserve_with_foreign_key(other.runner)
        with pytest.raises(LockedError, match="by other software than DLFS"):
            device.lock_exclusive("a writer")
        assert foreign.state() == ({THERE.bytes: FOREIGN_KEY}, THERE.bytes)
        with pytest.raises(LeaseLostError, match=FENCED):
            device.write(0, b"\1" * 512)
        other.write(0, b"\2" * 512)
        assert device.read(0, 512) == b"\2" * 512


def test_a_stalled_writer_is_fenced_by_its_successor(opener: Opener) -> None:
    with opener(HERE) as stalled, opener(THERE) as next_one:
        stalled.lock_exclusive("a stalled writer")
        assert stalled._renewer is not None
        stalled._renewer.stop()
        lease, stalled._guard.lease = (
            stalled._guard.lease,
            None,
        )  # as if stopped after it checked its lease
        stalled.limit_writes(stalled.incarnation(), None)  # it knows of no deadline
        next_one.lock_exclusive("the next")
        found = holder(stalled)
        assert found is not None
        assert found.host_identifier == THERE.bytes
        with pytest.raises(LeaseLostError, match=FENCED):
            stalled.write(0, b"\1" * 512)
        assert next_one.read(0, 512) == bytes(512)
        stalled._guard.lease = lease


def test_a_writer_through_spdk_keeps_another_host_out(
    opener: Opener, spdk_target: SpdkTarget
) -> None:
    uri = spdk_target.spdk_uri(NQN, **SHORT)
    with open_device(uri, writable=True) as device, opener(THERE) as other:
        device.lock_exclusive("a writer through SPDK")
        found = holder(other)
        assert found is not None
        assert found.host_identifier == host_identity(None, None)[1].bytes
        with pytest.raises(LockedError, match="a writer through SPDK on host"):
            other.lock_exclusive("another")
        with pytest.raises(LeaseLostError, match=FENCED):
            other.write(0, b"\2" * 512)
        device.write(0, b"\1" * 512)
        device.flush()
        device.unlock()
        other.lock_exclusive("another")
        with pytest.raises(LeaseLostError, match=FENCED):
            device.write(0, b"\3" * 512)
        assert device.read(0, 512) == b"\1" * 512
