"""Leases, first step by step under a simulated clock, then over a shared file in real time."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dlfs.base.units import MIB
from dlfs.block import RECORD_BYTES, RECORD_OFFSET_BYTES, Kind, aligned_buffer
from dlfs.block.lease import CLAIM_ROUNDS_MAX, Lease, LeaseTimes
from dlfs.block.lock import EXPIRY_MS_MAX, HolderRecord, LeaseMark
from dlfs.errors import DeviceError, DeviceTimeoutError, LeaseLostError, LockedError, UsageError
from tests.support.forked import run_forked
from tests.support.scripts import hear, running
from tests.support.shared import SharedFileDevice
from tests.support.writers import format_times

TIMES = LeaseTimes()


class FakeBlock:
    """A record in memory with a shared clock, and actions at given times."""

    uri = "fake:"

    def __init__(self) -> None:
        self.content = bytes(RECORD_BYTES)
        self.time = 1000.0
        self.write_s = 0.0
        self.failures: list[DeviceError] = []
        self.flushes = 0
        self.ways: list[bool] = []
        self.limits: list[float | None] = []
        self.moments: list[tuple[float, Callable[[], None]]] = []

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        until = self.time + seconds
        while due := [moment for moment in self.moments if moment[0] <= until]:
            moment = min(due, key=lambda m: m[0])
            self.moments.remove(moment)
            self.time = max(self.time, moment[0])
            moment[1]()
        self.time = max(self.time, until)

    def read_record(self) -> bytes:
        return self.content

    def write_record(self, content: bytes) -> None:
        if self.failures:
            raise self.failures.pop()
        self.time += self.write_s
        self.content = content

    def flush_record(self) -> None:
        self.flushes += 1

    def preempt_reservation(self, *, expired: bool) -> None:
        self.ways.append(expired)

    def limit_writes(self, until_s: float | None) -> None:
        self.limits.append(until_s)

    def lease(self, holder: str, notices: list[tuple[bytes, float]] | None = None) -> Lease:
        record = HolderRecord.of_this_process(holder)
        waiting = (lambda *what: None) if notices is None else (lambda *what: notices.append(what))
        return Lease(self, record, times=TIMES, notify=waiting, now=self.now, sleep=self.sleep)

    def keep_alive(self, lease: Lease, seconds: float) -> None:
        """Renew a lease at its interval for some seconds."""
        steps = itertools.takewhile(
            lambda at: at <= self.time + seconds,
            itertools.count(self.time + TIMES.renew_s, TIMES.renew_s),
        )
        self.moments += [(at, lease.renew) for at in steps]


@pytest.fixture
def block() -> FakeBlock:
    return FakeBlock()


def test_a_free_lease_is_taken_after_one_wait_and_released(block: FakeBlock) -> None:
    lease = block.lease("a writer")
    lease.acquire()
    assert TIMES.claim_s <= block.time - 1000 < 2 * TIMES.claim_s
    assert block.ways == [False]
    assert block.flushes == 1
    assert "a writer on host" in str(HolderRecord.decode(block.content))
    lease.check()
    lease.release()
    assert block.content == bytes(RECORD_BYTES)


def test_a_living_holder_is_named_soon(block: FakeBlock) -> None:
    first, notices = block.lease("the first"), list[tuple[bytes, float]]()
    first.acquire()
    block.keep_alive(first, 60)
    began = block.time
    with pytest.raises(LockedError, match=r"lock fake:: held by the first on host .* pid"):
        block.lease("the second", notices).acquire()
    assert block.time - began <= TIMES.renew_s + 2 * TIMES.poll_s
    assert not notices
    first.check()


def test_a_dead_holders_lease_expires_and_the_wait_is_logged_once(block: FakeBlock) -> None:
    dead, notices = block.lease("the dead"), list[tuple[bytes, float]]()
    dead.acquire()
    began = block.time
    second = block.lease("the second", notices)
    second.acquire()
    assert TIMES.expiry_s <= block.time - began <= TIMES.expiry_s + 3
    assert block.ways == [False, True]
    assert [seconds for _, seconds in notices] == [TIMES.expiry_s]
    assert "the dead" in str(HolderRecord.decode(notices[0][0]))
    with pytest.raises(LeaseLostError, match="could not be renewed for 20 s"):
        dead.check()
    second.check()


def test_a_record_may_ask_for_a_longer_wait_but_not_for_ever(block: FakeBlock) -> None:
    for asked, expected in ((100_000, 100), (500_000, 500), (999_999, EXPIRY_MS_MAX / 1000)):
        mark = LeaseMark("0" * 32, 7, asked)
        block.content = replace(HolderRecord.of_this_process("slow"), lease=mark).encode()
        began = block.time
        lease = block.lease("the next")
        lease.acquire()
        assert expected <= block.time - began <= expected + 3
        lease.release()


@pytest.mark.parametrize(
    "content",
    [
        b"\xff" * RECORD_BYTES,
        HolderRecord.of_this_process("a local writer, long gone").encode(),
        b'DLFS-LOCK 1\n{"lease": "0123", "counter": 1, "expiry_ms": 1, '.ljust(RECORD_BYTES, b"\0"),
    ],
    ids=["noise", "a record without a mark", "a malformed mark"],
)
def test_a_record_without_a_lease_excludes_no_writer(block: FakeBlock, content: bytes) -> None:
    block.content = content
    block.lease("a writer").acquire()
    assert block.time - 1000 < 2 * TIMES.claim_s


def test_a_claim_that_was_overwritten_is_none(block: FakeBlock) -> None:
    first, second = block.lease("the first"), block.lease("the second")
    overtaking = first.claiming()
    next(overtaking)
    overtaking.send(b"")  # both read a free record; the first writes late, during the other's wait
    overtaking.send(block.content)
    write = overtaking.send(b"")
    content = write.content  # type: ignore[union-attr]
    block.moments.append((block.time + 0.5, lambda: block.write_record(content)))
    mark = LeaseMark.decode(content)
    assert mark is not None
    later = replace(HolderRecord.of_this_process("the first"), lease=replace(mark, counter=1))
    block.moments.append((block.time + 3, lambda: block.write_record(later.encode())))
    with pytest.raises(LockedError, match="the first"):
        second.acquire()


def test_a_device_too_slow_for_a_claim_is_an_error_and_its_record_stays(block: FakeBlock) -> None:
    block.write_s = TIMES.claim_s
    with pytest.raises(DeviceTimeoutError, match=rf"within 1 s, got {CLAIM_ROUNDS_MAX} that"):
        block.lease("a writer").acquire()
    assert LeaseMark.decode(block.content) is not None  # it may have overwritten another's record


def test_a_claim_that_took_too_long_is_void_and_starts_again(block: FakeBlock) -> None:
    def recover() -> None:
        block.write_s = 0.0

    lease = block.lease("a writer")
    block.write_s = 1.5 * TIMES.claim_s
    block.moments.append((block.time + 2 * TIMES.claim_s, recover))
    lease.acquire()
    assert block.ways == [False, True]  # the void claim's record expired like that of a dead holder
    assert block.time - 1000 >= TIMES.expiry_s
    assert block.flushes == 1
    lease.check()
    lease.release()
    assert block.content == bytes(RECORD_BYTES)


def test_a_claim_that_is_complete_after_its_deadline_starts_again(block: FakeBlock) -> None:
    def stop() -> None:
        block.time += TIMES.valid_s

    lease = block.lease("a writer")
    block.moments.append((block.time + TIMES.claim_s / 2, stop))  # in the wait after its write
    lease.acquire()
    assert block.ways == [False, True]
    lease.check()


def test_the_wait_for_a_dead_holder_is_logged_as_soon_as_a_living_one_would_be_known(
    block: FakeBlock,
) -> None:
    block.lease("the dead").acquire()
    began, logged = block.time, list[float]()
    record = HolderRecord.of_this_process("the next")
    Lease(
        block,
        record,
        times=TIMES,
        notify=lambda *_: logged.append(block.time - began),
        now=block.now,
        sleep=block.sleep,
    ).acquire()
    assert len(logged) == 1
    assert TIMES.renew_s < logged[0] <= 1.5 * TIMES.renew_s


def test_after_a_reconnect_writes_are_permitted_until_the_deadline(block: FakeBlock) -> None:
    lease = block.lease("a writer")
    lease.confirm()  # there is nothing to confirm yet
    assert block.limits == []
    lease.acquire()
    deadline = block.limits[-1]
    assert deadline is not None
    block.limits.clear()
    lease.confirm()
    assert block.limits == [deadline]


def test_after_a_reconnect_a_stolen_lease_permits_no_write(block: FakeBlock) -> None:
    lease = block.lease("a writer")
    lease.acquire()
    block.content = bytes(RECORD_BYTES)
    block.lease("the thief").acquire()
    block.limits.clear()
    with pytest.raises(LeaseLostError, match="its record is now that of the thief"):
        lease.confirm()
    assert block.limits == [0]
    with pytest.raises(LeaseLostError, match="the thief"):
        lease.check()


def test_a_release_never_erases_the_record_of_another_writer(block: FakeBlock) -> None:
    lease, thief = block.lease("a writer"), block.lease("the thief")
    lease.acquire()
    block.content = bytes(RECORD_BYTES)
    thief.acquire()
    before = block.content
    assert lease.releasable  # it has not read the record since
    lease.release()
    assert block.content == before
    thief.check()


def test_after_its_release_nothing_is_written(block: FakeBlock) -> None:
    lease = block.lease("a writer")
    lease.acquire()
    lease.release()
    assert block.limits[-1] is None
    with pytest.raises(LeaseLostError, match="the lease of this writer is lost: it was released"):
        lease.check()


def test_without_renewal_it_is_lost_at_its_deadline(block: FakeBlock) -> None:
    lease = block.lease("a writer")
    lease.acquire()
    block.keep_alive(lease, 30)
    block.sleep(30)
    lease.check()
    block.sleep(TIMES.valid_s)
    before = block.content
    for use in (lease.check, lease.renew):
        with pytest.raises(LeaseLostError, match="lost"):
            use()
    assert not lease.releasable
    lease.release()
    assert block.content == before


def test_a_renewal_counts_from_its_start(block: FakeBlock) -> None:
    lease = block.lease("a writer")
    lease.acquire()
    block.write_s = 5.0
    lease.renew()
    block.sleep(TIMES.valid_s - 5.5)
    lease.check()
    block.sleep(0.5)
    assert lease.lost


def test_a_lease_taken_by_another_writer_names_it_and_stays_lost(block: FakeBlock) -> None:
    lease, thief = block.lease("a writer"), block.lease("the thief")
    lease.acquire()
    own = block.content
    block.content = bytes(RECORD_BYTES)
    thief.acquire()
    with pytest.raises(LeaseLostError, match="its record is now that of the thief on host"):
        lease.renew()
    block.content = own
    with pytest.raises(LeaseLostError, match="the thief"):
        lease.renew()
    lease.release()
    assert block.content == own


def test_a_renewal_may_fail_and_a_later_one_never_repeats_it(block: FakeBlock) -> None:
    lease = block.lease("a writer")
    lease.acquire()
    block.failures.append(DeviceError("the network"))
    with pytest.raises(DeviceError, match="the network"):
        lease.renew()
    lease.renew()
    mark = LeaseMark.decode(block.content)
    assert mark is not None
    assert mark.counter == 2


def test_after_a_failed_write_it_is_left_to_expire(block: FakeBlock) -> None:
    lease = block.lease("a writer")
    lease.acquire()
    before = block.content
    lease.note_failed_write()
    lease.check()
    lease.release()
    assert block.content == before


def test_an_interrupted_claim_is_withdrawn(block: FakeBlock) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    block.moments.append((block.time + 0.5, interrupt))
    with pytest.raises(KeyboardInterrupt):
        block.lease("a writer").acquire()
    assert block.content == bytes(RECORD_BYTES)


def test_an_interrupted_takeover_leaves_a_record(block: FakeBlock) -> None:
    """The record stays, so that the next writer also preempts the dead holder's reservation."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    block.lease("the dead").acquire()
    block.moments.append((block.time + TIMES.expiry_s + 0.8, interrupt))
    with pytest.raises(KeyboardInterrupt):
        block.lease("an impatient one").acquire()
    assert block.ways == [False, True]
    assert "an impatient one" in str(HolderRecord.decode(block.content))
    block.lease("the next").acquire()
    assert block.ways == [False, True, True]


def test_a_claim_that_fails_is_logged_and_its_record_stays(block: FakeBlock) -> None:
    block.failures.append(DeviceError("the network"))
    with pytest.raises(DeviceError, match="the network"):
        block.lease("a writer").acquire()
    block.failures.append(LeaseLostError("fenced"))
    with pytest.raises(LockedError, match="lock fake:: fenced"):
        block.lease("a writer").acquire()


# ---- devices -------------------------------------------------------------------------------------

QUICK = LeaseTimes(renew_s=0.05, valid_s=20, drain_s=20, claim_s=0.5, poll_s=0.02)
"""Lease times of holders that live, on a machine that may be slow."""

MORTAL = LeaseTimes(renew_s=0.05, valid_s=2, drain_s=0.5, claim_s=0.5, poll_s=0.02)
"""Lease times for holders that die."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "shared.img"
    path.write_bytes(bytes(2 * MIB))
    return path


@pytest.fixture
def opener(path: Path) -> Iterator[Callable[[LeaseTimes], SharedFileDevice]]:
    opened = []

    def open_with(times: LeaseTimes) -> SharedFileDevice:
        device = SharedFileDevice(path, writable=True)
        device.lease_times = times
        opened.append(device)
        return device

    yield open_with
    for device in opened:
        device.close()


Opener = Callable[[LeaseTimes], SharedFileDevice]


def test_one_writer_at_a_time_on_a_shared_device(opener: Opener) -> None:
    first, second = opener(QUICK), opener(QUICK)
    first.lock_exclusive("the first writer")
    with pytest.raises(LockedError, match=rf"the first writer on host .* pid {os.getpid()} "):
        second.lock_exclusive("the second writer")
    with pytest.raises(UsageError, match="already"):
        first.lock_exclusive("again")
    first.write(0, bytes(4096))
    first.flush()
    first.close()
    second.lock_exclusive("the second writer")
    second.unlock()
    assert second.read(RECORD_OFFSET_BYTES, RECORD_BYTES) == bytes(RECORD_BYTES)


def test_a_lost_lease_stops_every_write(opener: Opener) -> None:
    device, thief = opener(QUICK), opener(QUICK)
    device.lock_exclusive("a writer")
    with device.queue_pair(2) as queue:
        buffer = aligned_buffer(4096, 4096)
        buffer[:] = 7
        assert queue.submit(Kind.WRITE, buffer, 4096, 1)
        assert queue.poll(-1) == [(1, 4096)]
        thief.write(RECORD_OFFSET_BYTES, bytes(RECORD_BYTES))
        thief.lock_exclusive("the thief")
        renewer = device._renewer
        assert renewer is not None
        renewer.join()
        # It may have read the record before the thief wrote its own.
        whose = "that of (the thief|another writer, which left no record)"
        for use in (
            lambda: device.write(0, bytes(4096)),
            lambda: queue.submit(Kind.WRITE, buffer, 0, 2),
            device.flush,
        ):
            with pytest.raises(LeaseLostError, match=whose):
                use()
        assert queue.submit(Kind.READ, buffer, 0, 3)
        assert queue.poll(-1) == [(3, 4096)]
        assert not buffer.any()
    device.close()
    thief.write(0, bytes(4096))


def test_a_write_under_way_does_not_go_on_without_the_lease(opener: Opener) -> None:
    device = opener(QUICK)
    device.lock_exclusive("a writer")
    with device.queue_pair(2) as queue:
        assert queue.submit(Kind.WRITE, aligned_buffer(4096, 4096), 4096, 1)
        lease = device._guard.lease
        assert lease is not None
        lease._loss = "a test"
        with pytest.raises(LeaseLostError, match="a test"):
            queue.poll(-1)


HOLDER = """
import sys
from dlfs.block.lease import LeaseTimes
from tests.support.shared import SharedFileDevice
device = SharedFileDevice(sys.argv[1], writable=True)
device.lease_times = LeaseTimes(*map(float, sys.argv[2].split(",")))
device.lock_exclusive("a dying writer")
print("locked", flush=True)
sys.stdin.read()
"""


def test_a_killed_writers_lease_expires(
    path: Path, opener: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    device = opener(MORTAL)
    with running(HOLDER, str(path), format_times(MORTAL)) as writer:
        assert hear(writer) == "locked"
        with pytest.raises(LockedError, match=rf"a dying writer on host .* pid {writer.pid} "):
            device.lock_exclusive("the next")
        writer.kill()
    caplog.clear()  # while it lived, a slow machine may have made it look dead for a moment
    caplog.set_level(logging.WARNING, logger="dlfs.block")
    device.lock_exclusive("the next")
    waits = [record.getMessage() for record in caplog.records if "dying" in record.getMessage()]
    assert len(waits) == 1
    assert "waiting up to 3 s to learn whether its last writer still lives" in waits[0]
    device.write(0, bytes(4096))


# Python 3.12 warns of any fork of a process with threads; here such a fork is under test.
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_neither_renews_nor_holds(opener: Opener) -> None:
    device = opener(QUICK)
    device.lock_exclusive("the parent")

    def use() -> None:
        with pytest.raises(LeaseLostError, match="parent"):
            device.write(0, bytes(4096))
        device.unlock()
        device.close()

    assert run_forked(use) == 0
    device.write(0, bytes(4096))
    with pytest.raises(LockedError, match="the parent"):
        opener(QUICK).lock_exclusive("another")


def test_a_failed_write_leaves_the_lease_to_expire(
    opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = opener(MORTAL)
    device.lock_exclusive("a writer")
    with pytest.raises(UsageError):
        device.write(512, bytes(100))
    with device.queue_pair(1) as queue:
        monkeypatch.setattr("dlfs._native.device.NativeQueue.poll", lambda *_: [(1, -5)])
        assert queue.poll() == [(1, -5)]
        monkeypatch.undo()
    device.unlock()
    assert b"a writer" in device.read(RECORD_OFFSET_BYTES, RECORD_BYTES)


def test_time_outs_longer_than_the_lease_allows_are_refused(
    opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SharedFileDevice, "write_drain_s", 21.0)
    with pytest.raises(UsageError, match="end within 20 s, got time-outs of 21 s"):
        opener(QUICK).lock_exclusive("a writer")


def test_a_device_too_small_for_a_lease_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "small.img"
    path.write_bytes(bytes(65536))
    with (
        SharedFileDevice(path, writable=True) as device,
        pytest.raises(UsageError, match="too small"),
    ):
        device.lock_exclusive("a writer")
