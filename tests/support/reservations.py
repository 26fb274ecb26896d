"""Checks of ``dlfs.block.reservation`` that hold on every target: a model, or a real one.

A test gives a ``ReservedNamespace``: two hosts that reach one namespace without reservations.
Each ``check_`` function lets both hosts act and compares what the target reports.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from dlfs.block.nvme import CommandRunner
from dlfs.block.reservation import (
    REGISTRANTS_ONLY,
    WRITE_EXCLUSIVE,
    Reservation,
    acquire,
    register,
    reservation_key,
)
from dlfs.errors import LeaseLostError, LockedError

URI = "nvme:"
"""URI of the namespace in error messages."""

FOREIGN_KEY = 0x1122334455667788
"""Key of software other than DLFS."""


@dataclass(frozen=True)
class ReservedNamespace:
    """A namespace that two hosts reach.

    Attributes:
        nsid: namespace ID.
        host: runner of commands on a controller of the first host.
        other: runner of commands on a controller of the second host.
        host_id: host identifier of the first host, 16 bytes.
        other_id: host identifier of the second host, 16 bytes.
    """

    nsid: int
    host: CommandRunner
    other: CommandRunner
    host_id: bytes
    other_id: bytes

    def probe(self, runner: CommandRunner) -> Reservation:
        """Return the reservation of one host's next writer."""
        found = Reservation.probe(runner, self.nsid, URI)
        assert found is not None
        return found

    def state(self) -> tuple[dict[bytes, int], bytes | None]:
        """Return the key of each registered host, and the holder, as the target reports them."""
        found = self.probe(self.host).report()
        keys = {registrant.host_identifier: registrant.key for registrant in found.registrants}
        assert len(keys) == len(found.registrants)
        return keys, found.holder.host_identifier if found.holder else None

    def kind(self) -> int:
        """Return the type of the reservation, as the target reports it; 0: there is none."""
        return self.probe(self.host).report().kind

    def register_foreign_key(self, runner: CommandRunner) -> None:
        """Register a host as software other than DLFS does."""
        command, data = register(self.nsid, FOREIGN_KEY)
        assert runner.run_io(command, data, to_device=True).status == 0

    def reserve_with_foreign_key(self, runner: CommandRunner) -> None:
        """Register and reserve as software other than DLFS does."""
        self.register_foreign_key(runner)
        command, data = acquire(self.nsid, FOREIGN_KEY)
        assert runner.run_io(command, data, to_device=True).status == 0


def check_acquire_and_release(namespace: ReservedNamespace) -> None:
    """Check that a reservation locks the other host out, and that its holder can release it."""
    mine, other = namespace.probe(namespace.host), namespace.probe(namespace.other)
    host_key, other_key = map(reservation_key, (namespace.host_id, namespace.other_id))
    mine.preempt_reservation(expired=False)
    mine.acquire()
    assert namespace.state() == ({namespace.host_id: host_key}, namespace.host_id)
    mine.acquire()  # another process of this host
    with pytest.raises(
        LockedError, match=rf"lock nvme:: reserved by .* {namespace.host_id.hex()} "
    ):
        other.acquire()
    mine.release()
    assert namespace.state() == ({namespace.other_id: other_key}, None)


def check_release_after_power_loss(
    namespace: ReservedNamespace, lose_power: Callable[[], object]
) -> None:
    """Check that a release succeeds after the target lost power, and with it the reservation.

    Args:
        namespace: the namespace under test.
        lose_power: makes the target forget reservations.
    """
    mine = namespace.probe(namespace.host)
    mine.acquire()
    lose_power()
    mine.release()
    assert namespace.state() == ({}, None)


def check_preemption(namespace: ReservedNamespace, *, expired: bool) -> None:
    """Check that a reservation of DLFS is preempted and that the new one stays as a fence.

    Args:
        namespace: the namespace under test.
        expired: True if the reservation is that of a dead writer, False if it is a fence.
    """
    mine, other = namespace.probe(namespace.host), namespace.probe(namespace.other)
    mine.acquire()
    other.preempt_reservation(expired=expired)
    preempted = {namespace.other_id: reservation_key(namespace.other_id)}, namespace.other_id
    assert namespace.state() == preempted
    with pytest.raises(LeaseLostError, match="fenced"):
        mine.release()
    other.acquire()
    other.release()
    assert namespace.state() == preempted
    again = namespace.probe(namespace.other)  # the next writer of that host keeps the fence, too
    again.preempt_reservation(expired=False)
    again.acquire()
    again.release()
    assert namespace.state() == preempted


def check_foreign_reservation(namespace: ReservedNamespace, *, expired: bool) -> None:
    """Check that DLFS does not preempt a reservation of other software.

    Args:
        namespace: the namespace under test.
        expired: True if the last holder of the lease died.
    """
    namespace.reserve_with_foreign_key(namespace.other)
    foreign = {namespace.other_id: FOREIGN_KEY}, namespace.other_id
    assert namespace.state() == foreign
    mine = namespace.probe(namespace.host)
    with pytest.raises(LockedError, match="by other software than DLFS"):
        mine.preempt_reservation(expired=expired)
    assert namespace.state() == foreign
    with pytest.raises(LockedError, match=rf"reserved by .* {namespace.other_id.hex()} "):
        mine.acquire()
    assert namespace.state()[1] == namespace.other_id


def check_foreign_registration(namespace: ReservedNamespace) -> None:
    """Check that DLFS does not replace a key that other software registered for its host."""
    namespace.register_foreign_key(namespace.host)
    with pytest.raises(LockedError, match="registered already, with another key"):
        namespace.probe(namespace.host).acquire()
    assert namespace.state() == ({namespace.host_id: FOREIGN_KEY}, None)


# ---- imports with workers ------------------------------------------------------------------------


def _admit(namespace: ReservedNamespace) -> tuple[int, int]:
    """Let the first host's coordinator admit a worker on the second host; return both keys."""
    coordinator = namespace.probe(namespace.host)
    coordinator.preempt_reservation(expired=False)
    coordinator.acquire()
    coordinator.admit()
    assert coordinator.admits_writers
    coordinator.release()
    namespace.probe(namespace.other).join()
    keys = reservation_key(namespace.host_id), reservation_key(namespace.other_id)
    _check_admitted(namespace)
    return keys


def _check_admitted(namespace: ReservedNamespace) -> None:
    """Check that both hosts may write, by a reservation of the first one."""
    keys = {host: reservation_key(host) for host in (namespace.host_id, namespace.other_id)}
    assert namespace.state() == (keys, namespace.host_id)
    assert namespace.kind() == REGISTRANTS_ONLY


def check_other_writers_leave_an_import_alone(namespace: ReservedNamespace) -> None:
    """Check that writers of both hosts can lock between, and that the last one ends the import."""
    host_key, _ = _admit(namespace)
    for runner in (namespace.other, namespace.host, namespace.other):
        writer = namespace.probe(runner)
        writer.preempt_reservation(expired=False)
        writer.acquire()
        assert writer.admits_writers
        writer.check_not_taken()
        writer.release()
        _check_admitted(namespace)
    coordinator = namespace.probe(namespace.host)
    coordinator.preempt_reservation(expired=False)
    coordinator.acquire()
    coordinator.dismiss(fence=False)
    assert not coordinator.admits_writers
    assert namespace.state() == ({namespace.host_id: host_key}, namespace.host_id)
    assert namespace.kind() == WRITE_EXCLUSIVE
    coordinator.release()
    assert namespace.state() == ({}, None)


def check_a_lost_writer_is_expelled(namespace: ReservedNamespace) -> None:
    """Check that a worker's host loses its registration, and cannot rejoin unseen by itself."""
    host_key, other_key = _admit(namespace)
    coordinator = namespace.probe(namespace.host)
    assert coordinator.expel(other_key)
    expected = {namespace.host_id: host_key}, namespace.host_id
    assert namespace.state() == expected
    assert namespace.kind() == REGISTRANTS_ONLY
    assert coordinator.expel(other_key)  # it is gone already
    with pytest.raises(LeaseLostError, match="fenced"):
        namespace.probe(namespace.other).expel(host_key)
    assert namespace.state() == expected
    namespace.probe(namespace.other).join()  # a new worker there
    _check_admitted(namespace)
    writer = namespace.probe(namespace.host)
    writer.preempt_reservation(expired=False)
    writer.acquire()
    writer.dismiss(fence=True)
    writer.release()
    assert namespace.state() == expected  # as a fence
    assert namespace.kind() == WRITE_EXCLUSIVE


def check_a_successor_removes_the_workers(namespace: ReservedNamespace) -> None:
    """Check that a coordinator on the other host takes the reservation over."""
    _, other_key = _admit(namespace)
    successor = namespace.probe(namespace.other)
    successor.preempt_reservation(expired=False)
    successor.acquire()
    assert successor.admit()
    expected = {namespace.other_id: other_key}, namespace.other_id
    assert namespace.state() == expected
    assert namespace.kind() == REGISTRANTS_ONLY
    assert not successor.admit()
    successor.release()
    assert namespace.state() == expected
    worker = namespace.probe(namespace.host)
    worker.join()
    assert set(namespace.state()[0]) == {namespace.host_id, namespace.other_id}


def check_an_import_is_abandoned_from_another_host(namespace: ReservedNamespace) -> None:
    """Check that its reservation becomes a fence: its coordinator may only be stopped."""
    _, other_key = _admit(namespace)
    writer = namespace.probe(namespace.other)
    writer.preempt_reservation(expired=False)
    writer.acquire()
    writer.dismiss(fence=False)
    writer.release()
    assert namespace.state() == ({namespace.other_id: other_key}, namespace.other_id)
    assert namespace.kind() == WRITE_EXCLUSIVE


def check_a_dead_writer_ends_an_import(namespace: ReservedNamespace, *, here: bool) -> None:
    """Check that the next writer after a dead one preempts all other hosts.

    Args:
        namespace: the namespace under test.
        here: True if the next writer is on the host of the coordinator.
    """
    _admit(namespace)
    runner = namespace.host if here else namespace.other
    host = namespace.host_id if here else namespace.other_id
    writer = namespace.probe(runner)
    writer.preempt_reservation(expired=True)
    writer.acquire()
    assert not writer.admits_writers
    expected = {host: reservation_key(host)}, host
    assert namespace.state() == expected
    assert namespace.kind() == WRITE_EXCLUSIVE
    writer.release()
    assert namespace.state() == expected
    refused = namespace.probe(namespace.other if here else namespace.host)
    with pytest.raises(LockedError, match="under grants: reserved by"):
        refused.join()
    assert not writer.expel(reservation_key(namespace.host_id))


def check_not_taken_after_an_expulsion(namespace: ReservedNamespace) -> None:
    """Check that a writer next to an import learns that its host was preempted."""
    _admit(namespace)
    writer = namespace.probe(namespace.other)
    writer.preempt_reservation(expired=False)
    writer.acquire()
    writer.check_not_taken()
    assert namespace.probe(namespace.host).expel(writer.key)
    with pytest.raises(LeaseLostError, match="reserved by"):
        writer.check_not_taken()


IMPORT_CHECKS: dict[str, Callable[[ReservedNamespace], None]] = {
    "other writers": check_other_writers_leave_an_import_alone,
    "a lost writer": check_a_lost_writer_is_expelled,
    "a successor": check_a_successor_removes_the_workers,
    "abandoned": check_an_import_is_abandoned_from_another_host,
    "a dead writer, here": lambda namespace: check_a_dead_writer_ends_an_import(
        namespace, here=True
    ),
    "a dead writer, there": lambda namespace: check_a_dead_writer_ends_an_import(
        namespace, here=False
    ),
    "expelled": check_not_taken_after_an_expulsion,
}
"""Checks of imports with workers, by what happens to the import."""
