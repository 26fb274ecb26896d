"""Reservations of the scripted target, over the wire and through the state machine."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.support.nvme import DEFAULT_NQN, ReservationType, ScriptedTarget, Status
from tests.support.nvme.command import Nvm
from tests.support.nvme.reservation import Reservations
from tests.unit.support.nvme.host import Pair

A, B, C = (bytes([number]) * 16 for number in (1, 2, 3))
KEY_A, KEY_B, KEY_C = 0xA, 0xB, 0xC
CONFLICT = Status.RESERVATION_CONFLICT
WRITE_EXCLUSIVE = ReservationType.WRITE_EXCLUSIVE
EXCLUSIVE_ACCESS = ReservationType.EXCLUSIVE_ACCESS
ALL = ReservationType.EXCLUSIVE_ACCESS_ALL


def keys(current: int, new: int = 0) -> bytes:
    return struct.pack("<QQ", current, new)


def registered(*hosts: tuple[bytes, int]) -> Reservations:
    made = Reservations()
    for host, key in hosts:
        assert made.register(host, 0, keys(0, key)) == 0
    return made


def acquire(found: Reservations, host: bytes, key: int, kind: int, *, preempt: int = 0) -> int:
    return found.acquire(host, kind << 8 | bool(preempt), keys(key, preempt))


# ---- over the wire -------------------------------------------------------------------------------


@pytest.fixture
def pairs() -> Iterator[tuple[Pair, Pair]]:
    with ExitStack() as stack:
        target = stack.enter_context(ScriptedTarget())
        first, second = (
            stack.enter_context(Pair(target.port, DEFAULT_NQN, host_id=host)) for host in (A, B)
        )
        yield first, second


def test_a_reservation_keeps_other_hosts_out(pairs: tuple[Pair, Pair]) -> None:
    first, second = pairs
    assert first.io.io(Nvm.RESERVATION_REGISTER, keys(0, KEY_A))[0] == 0
    acquired = first.io.io(Nvm.RESERVATION_ACQUIRE, keys(KEY_A), cdw10=WRITE_EXCLUSIVE << 8)
    assert acquired[0] == 0
    assert second.io.read(0, 1)[0] == 0
    assert second.io.write(0, bytes(512)) == CONFLICT
    assert second.io.write(0, bytes(512), in_capsule=False) == CONFLICT
    assert second.io.io(Nvm.FLUSH)[0] == CONFLICT
    assert first.io.write(0, bytes(512)) == 0
    released = first.io.io(
        Nvm.RESERVATION_RELEASE, struct.pack("<Q", KEY_A), cdw10=WRITE_EXCLUSIVE << 8
    )
    assert released[0] == 0
    assert second.io.write(0, bytes(512)) == 0


def test_the_report_names_hosts_keys_and_holder(pairs: tuple[Pair, Pair]) -> None:
    first, second = pairs
    for pair, key in ((first, KEY_A), (second, KEY_B)):
        assert pair.io.io(Nvm.RESERVATION_REGISTER, keys(0, key))[0] == 0
    kind = EXCLUSIVE_ACCESS << 8
    assert second.io.io(Nvm.RESERVATION_ACQUIRE, keys(KEY_B), cdw10=kind)[0] == 0
    status, page = first.io.io(Nvm.RESERVATION_REPORT, length=4096, cdw10=1023, cdw11=1)
    assert status == 0
    assert struct.unpack_from("<IBH", page) == (2, EXCLUSIVE_ACCESS, 2)
    for at, pair, host, key, holds in ((64, first, A, KEY_A, 0), (128, second, B, KEY_B, 1)):
        assert struct.unpack_from("<HB5xQ16s", page, at) == (pair.number, holds, key, host)
    refused = first.io.io(Nvm.RESERVATION_REPORT, length=4096, cdw10=1023)
    assert refused[0] == Status.HOST_ID_FORMAT
    short = first.io.io(Nvm.RESERVATION_REPORT, length=64, cdw10=1023, cdw11=1)
    assert short[0] == Status.SGL_LENGTH_INVALID
    assert first.io.io(Nvm.RESERVATION_REGISTER, bytes(8))[0] == Status.SGL_LENGTH_INVALID


def test_registrations_outlive_the_association_and_end_with_power() -> None:
    with ScriptedTarget() as target:
        with Pair(target.port, DEFAULT_NQN, host_id=A) as pair:
            assert pair.io.io(Nvm.RESERVATION_REGISTER, keys(0, KEY_A))[0] == 0
        target.restart()
        assert target.namespace.reservations.keys == {A: KEY_A}
        with Pair(target.port, DEFAULT_NQN, host_id=B) as pair:
            page = pair.io.io(Nvm.RESERVATION_REPORT, length=128, cdw10=31, cdw11=1)[1]
            assert struct.unpack_from("<H", page, 64) == (0xFFFF,)
        target.restart(lose_reservations=True)
        assert target.namespace.reservations.keys == {}


# ---- the state machine ---------------------------------------------------------------------------


def test_registering() -> None:
    found = registered((A, KEY_A))
    assert found.register(A, 0, keys(0, KEY_A)) == 0
    assert found.register(A, 0, keys(0, KEY_B)) == CONFLICT
    assert found.register(B, 2, keys(0, KEY_B)) == CONFLICT
    assert found.register(A, 2, keys(KEY_B, KEY_C)) == CONFLICT
    assert found.register(A, 2 | 8, keys(KEY_B, KEY_C)) == 0
    assert found.keys == {A: KEY_C}
    assert found.register(A, 1, keys(KEY_A)) == CONFLICT
    assert found.register(A, 1, keys(KEY_C)) == 0
    assert found.keys == {}
    assert found.register(A, 3, keys(0)) == Status.INVALID_FIELD


def test_persistence_is_the_hosts_choice() -> None:
    found = Reservations()
    assert found.register(A, 3 << 30, keys(0, KEY_A)) == 0
    found.lose_power()
    assert found.keys == {A: KEY_A}
    assert found.register(A, 2 | 2 << 30, keys(KEY_A, KEY_B)) == 0
    found.lose_power()
    assert found.keys == {}


def test_acquiring_and_releasing() -> None:
    found = registered((A, KEY_A), (B, KEY_B))
    assert acquire(found, C, KEY_C, WRITE_EXCLUSIVE) == CONFLICT
    assert acquire(found, A, KEY_B, WRITE_EXCLUSIVE) == CONFLICT
    assert acquire(found, A, KEY_A, 7) == Status.INVALID_FIELD
    assert acquire(found, A, KEY_A, WRITE_EXCLUSIVE) == 0
    assert acquire(found, A, KEY_A, WRITE_EXCLUSIVE) == 0
    assert acquire(found, A, KEY_A, EXCLUSIVE_ACCESS) == CONFLICT
    assert acquire(found, B, KEY_B, WRITE_EXCLUSIVE) == CONFLICT
    release = WRITE_EXCLUSIVE << 8
    assert found.release(B, release, keys(KEY_B)) == 0
    assert found.kind == WRITE_EXCLUSIVE
    assert found.release(A, EXCLUSIVE_ACCESS << 8, keys(KEY_A)) == Status.INVALID_FIELD
    assert found.release(A, release, keys(KEY_B)) == CONFLICT
    assert found.release(A, 2, keys(KEY_A)) == Status.INVALID_FIELD
    assert found.release(A, release, keys(KEY_A)) == 0
    assert found.kind == ReservationType.NONE
    assert found.release(B, 1, keys(KEY_B)) == 0  # clear
    assert found.keys == {}


def test_unregistering_gives_the_reservation_up() -> None:
    found = registered((A, KEY_A), (B, KEY_B))
    assert acquire(found, A, KEY_A, WRITE_EXCLUSIVE) == 0
    assert found.register(A, 1, keys(KEY_A)) == 0
    assert found.allows(B, write=True)


def test_preempting_takes_the_reservation_and_unregisters() -> None:
    found = registered((A, KEY_A), (B, KEY_B), (C, KEY_C))
    assert acquire(found, A, KEY_A, WRITE_EXCLUSIVE) == 0
    assert acquire(found, B, KEY_B, EXCLUSIVE_ACCESS, preempt=0xDEAD) == CONFLICT
    assert acquire(found, B, KEY_B, EXCLUSIVE_ACCESS, preempt=KEY_C) == 0
    assert (found.holder, found.keys) == (A, {A: KEY_A, B: KEY_B})
    generation = found.generation
    assert acquire(found, B, KEY_B, EXCLUSIVE_ACCESS, preempt=KEY_A) == 0
    assert (found.holder, found.kind, found.keys) == (B, EXCLUSIVE_ACCESS, {B: KEY_B})
    assert found.generation == generation + 1
    assert found.acquire(B, EXCLUSIVE_ACCESS << 8 | 1, keys(KEY_B, 0)) == Status.INVALID_FIELD


def test_preempting_all_registrants() -> None:
    found = registered((A, KEY_A), (B, KEY_B))
    assert acquire(found, A, KEY_A, ALL) == 0
    assert found.allows(B, write=True)
    assert found.holds(B)
    assert not found.allows(C, write=False)
    assert found.acquire(B, EXCLUSIVE_ACCESS << 8 | 1, keys(KEY_B, 0)) == 0
    assert (found.holder, found.keys) == (B, {B: KEY_B})
    found = registered((A, KEY_A))
    assert acquire(found, A, KEY_A, ALL) == 0
    assert found.register(A, 1, keys(KEY_A)) == 0
    assert found.kind == ReservationType.NONE


@pytest.mark.parametrize("kind", list(ReservationType)[1:])
def test_who_may_read_and_write(kind: ReservationType) -> None:
    found = registered((A, KEY_A), (B, KEY_B))
    assert acquire(found, A, KEY_A, kind) == 0
    exclusive_reads = "EXCLUSIVE_ACCESS" in kind.name
    registrants = kind > EXCLUSIVE_ACCESS
    allowed = {(host, write): found.allows(host, write=write) for host in (A, B, C)
               for write in (False, True)}  # fmt: skip
    assert allowed == {
        (A, False): True,
        (A, True): True,
        (B, False): registrants or not exclusive_reads,
        (B, True): registrants,
        (C, False): not exclusive_reads,
        (C, True): False,
    }
