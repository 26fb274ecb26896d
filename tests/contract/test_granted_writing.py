"""The contract of granted writing, tested for each kind of device."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from dlfs.block import BlockDevice, Kind, aligned_buffer
from dlfs.block.lease import boot_clock
from dlfs.block.slots import COORDINATOR_SLOT, SLOTS_MAX
from dlfs.errors import ClosedError, DeviceError, LeaseLostError, LockedError, UsageError
from tests.contract.openers import FILE_KINDS, KINDS, Opener, opener_for
from tests.support.forked import run_forked
from tests.support.scripts import hear, running
from tests.support.waiting import wait_for

MEMORY_KINDS = ("memory", "fault", "recording")
DATA = b"\5" * 4096


def kinds(wanted: Callable[[str], bool]) -> list[object]:
    return [kind for kind in KINDS if wanted(str(kind.values[0]))]


GRANTING = kinds(lambda kind: kind not in MEMORY_KINDS)
FILES = kinds(lambda kind: kind in FILE_KINDS)
SHARED = kinds(lambda kind: kind not in (*MEMORY_KINDS, *FILE_KINDS))


@pytest.fixture(params=GRANTING)
def opener(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opener]:
    with opener_for(request, request.param, tmp_path) as made:
        yield made


def begin(device: BlockDevice, slot: int = 0, *, seconds: float = 600) -> None:
    """Begin granted writing, with a first grant of some seconds."""
    device.begin_granted(slot)
    extend(device, seconds)


def extend(device: BlockDevice, seconds: float) -> None:
    device.extend_grant(boot_clock() + seconds, incarnation=device.incarnation())


def try_queue(device: BlockDevice) -> None:
    """Write through a queue pair of the device."""
    buffer = aligned_buffer(4096, 4096)
    buffer[:] = np.frombuffer(DATA, np.uint8)
    with device.queue_pair(2) as queue:
        assert queue.submit(Kind.WRITE, buffer, 0, 1)
        while not (taken := queue.poll(-1)):
            pass
    if taken[0][1] < 0:
        raise DeviceError(f"write {device.uri}", -taken[0][1])


# ---- every kind ----------------------------------------------------------------------------------


def test_granted_writers_write_without_the_lock(opener: Opener) -> None:
    with opener(True) as one, opener(True) as other, opener(True) as coordinator:
        coordinator.lock_exclusive("a coordinator")
        coordinator.admit_writers()
        assert coordinator.writers_admitted
        coordinator.unlock()
        begin(one, 0)
        begin(other, 1)
        one.write(0, DATA)
        try_queue(one)
        other.write(4096, DATA)
        coordinator.lock_exclusive("a coordinator")  # to commit, while both may write
        assert coordinator.writers_admitted
        one.write(8192, DATA)
        coordinator.write(12288, DATA)
        one.flush()
        coordinator.unlock()
        other.write(16384, DATA)
        other.flush()
        one.end_granted()
        other.end_granted()
        coordinator.lock_exclusive("a coordinator")
        coordinator.dismiss_writers(fence=False)
        coordinator.unlock()
        assert coordinator.read(0, 5 * 4096) == 5 * DATA


def test_another_writer_commits_between(opener: Opener) -> None:
    with opener(True) as worker, opener(True) as other:
        begin(worker)
        other.lock_exclusive("another writer")
        worker.write(0, DATA)
        other.write(4096, DATA)
        other.unlock()
        worker.write(8192, DATA)
        assert other.read(0, 3 * 4096) == 3 * DATA


def test_a_handle_that_has_ended_writes_no_more(opener: Opener) -> None:
    with opener(True) as device, device.queue_pair(2) as queue:
        begin(device)
        device.write(0, DATA)
        device.end_granted()
        device.end_granted()
        buffer = aligned_buffer(4096, 4096)
        with pytest.raises(DeviceError, match="write"):
            device.write(0, bytes(4096))
        with pytest.raises(DeviceError, match="write"):
            try_queue(device)
        with contextlib.suppress(DeviceError):  # a queue pair of before the end
            queue.submit(Kind.WRITE, buffer, 0, 1)
        while queue.in_flight:
            assert all(result < 0 for _, result in queue.poll(-1))
        assert device.read(0, 4096) == DATA
        with pytest.raises(UsageError, match="has ended"):
            extend(device, 100)
        with pytest.raises(UsageError, match="already"):
            device.begin_granted(0)


def test_granted_writing_and_the_lock_exclude_each_other(opener: Opener) -> None:
    with opener(True) as device:
        with pytest.raises(UsageError, match="not begun"):
            extend(device, 100)
        device.lock_exclusive("a writer")
        with pytest.raises(UsageError, match="locked through this object"):
            device.begin_granted(0)
        device.unlock()
        begin(device)
        with pytest.raises(UsageError, match="under grants"):
            device.lock_exclusive("a writer")
        with pytest.raises(UsageError, match="already"):
            device.begin_granted(1)


def test_slots_are_numbers_of_a_range(opener: Opener) -> None:
    for slot in (-1, COORDINATOR_SLOT + 1):
        with opener(True) as device, pytest.raises(UsageError, match=rf"0\.\.1024, got {slot}"):
            device.begin_granted(slot)
    with opener(False) as device, pytest.raises(UsageError, match="read-only"):
        device.begin_granted(0)
    with opener(True) as device:
        begin(device, SLOTS_MAX - 1)
        device.write(0, DATA)


def test_only_the_holder_of_the_lock_admits_and_dismisses(opener: Opener) -> None:
    with opener(True) as device:
        for call in (device.admit_writers, lambda: device.dismiss_writers(fence=False)):
            with pytest.raises(UsageError, match="has the lock"):
                call()


def test_a_closed_device_grants_nothing(opener: Opener) -> None:
    device = opener(True)
    begin(device)
    device.close()
    with pytest.raises(UsageError):
        device.extend_grant(boot_clock() + 100, incarnation=0)
    with pytest.raises(ClosedError):
        device.write(0, DATA)
    device.end_granted()
    with opener(True) as again:
        begin(again)
        again.write(0, DATA)


# Python 3.12 warns of any fork of a process with threads; here such a fork is under test.
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_has_no_grant(opener: Opener) -> None:
    with opener(True) as device:
        device.write(0, DATA)
        begin(device)
        assert run_forked(use_in_child, device) == 0
        device.write(4096, DATA)
        assert device.read(0, 8192) == 2 * DATA
        assert not device.granted_writers_gone() or device.grants_expire


def use_in_child(device: BlockDevice) -> None:
    """Try to write by the grant of a parent process."""
    for write in (lambda: device.write(0, bytes(4096)), lambda: try_queue(device)):
        with pytest.raises((DeviceError, ClosedError)):
            write()
    with pytest.raises(UsageError):
        extend(device, 100)
    device.end_granted()
    device.close()


# ---- files and disks -----------------------------------------------------------------------------


WORKER = """
import os, sys
from dlfs.block import open_device
device = open_device(sys.argv[1], writable=True)
children = []
if "early" in sys.argv:
    children.append(os.fork())
if 0 not in children:
    device.begin_granted(int(sys.argv[2]))
    if "late" in sys.argv:
        children.append(os.fork())
if 0 in children:
    sys.stdin.read()
    os._exit(0)
print(*children, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("opener", FILES, indirect=True)
def test_a_slot_is_one_writers(opener: Opener) -> None:
    with opener(True) as one, opener(True) as other, opener(False) as reader:
        assert not one.grants_expire
        assert one.lease_times is None
        assert reader.granted_writers_gone()
        begin(one, 3)
        assert not reader.granted_writers_gone()
        assert not reader.granted_writers_gone(3)
        assert not one.granted_writers_gone(3)
        assert reader.granted_writers_gone(2)
        assert reader.granted_writers_gone(4)
        with pytest.raises(LockedError, match=r"still runs has slot 3"):
            other.begin_granted(3)
        one.end_granted()
        assert reader.granted_writers_gone()


@pytest.mark.parametrize("opener", FILES, indirect=True)
def test_a_slot_is_free_when_its_device_is_closed(opener: Opener) -> None:
    device = opener(True)
    queue = device.queue_pair(2)
    begin(device)
    device.close()
    with opener(False) as reader:
        assert reader.granted_writers_gone()
    queue.close()


@pytest.mark.parametrize("child", ["none", "early", "late"])
@pytest.mark.parametrize("opener", FILES, indirect=True)
def test_a_slot_ends_with_its_process(opener: Opener, child: str) -> None:
    """A child that the process forked before or after it took the slot does not prolong it."""
    with opener(True) as device, running(WORKER, device.uri, "5", child) as worker:
        hear(worker)
        assert not device.granted_writers_gone()
        with pytest.raises(LockedError, match="slot 5"):
            begin(device, 5)
        worker.kill()
        worker.wait()
        wait_for(device.granted_writers_gone, "the end of the slot")
    with opener(True) as device:
        begin(device, 5)
        device.write(0, DATA)


@pytest.mark.parametrize("opener", FILES, indirect=True)
def test_a_slot_lasts_as_long_as_writes_are_in_flight(opener: Opener) -> None:
    """Ended in the middle of many writes: whatever was free is free for good."""
    with opener(True) as device, opener(False) as reader:
        begin(device, 1)
        buffer = aligned_buffer(1 << 20, 4096)
        stop = threading.Event()

        def write() -> None:
            with device.queue_pair(8) as queue:
                while not stop.is_set():
                    buffer[:] += 1
                    if not queue.submit(Kind.WRITE, buffer, 0, 1) and any(
                        result < 0 for _, result in queue.poll(-1)
                    ):
                        return

        thread = threading.Thread(target=write)
        thread.start()
        try:
            device.end_granted()
            while not reader.granted_writers_gone():
                pass
            seen = reader.read(0, 1 << 20)
        finally:
            stop.set()
            thread.join()
        assert reader.read(0, 1 << 20) == seen


# ---- shared namespaces ---------------------------------------------------------------------------


@pytest.mark.parametrize("opener", SHARED, indirect=True)
def test_nothing_is_written_before_the_first_grant(opener: Opener) -> None:
    with opener(True) as device:
        device.begin_granted(0)
        assert device.grants_expire
        assert device.lease_times is not None
        assert device.granted_writers_gone()
        for write in (lambda: device.write(0, DATA), lambda: try_queue(device), device.flush):
            with pytest.raises(LeaseLostError, match="no grant was given"):
                write()
        assert device.read(0, 4096) == bytes(4096)
        extend(device, 600)
        device.write(0, DATA)
        device.flush()
        assert device.read(0, 4096) == DATA


@pytest.mark.parametrize("opener", SHARED, indirect=True)
def test_nothing_is_written_after_the_deadline(opener: Opener) -> None:
    with opener(True) as device:
        begin(device)
        extend(device, -2)
        text = rf"write to .*{device.uri.partition('?')[0]}.*grant ended 2\.\d\d\d s ago, at \d+"
        for write in (lambda: device.write(0, DATA), lambda: try_queue(device), device.flush):
            with pytest.raises(LeaseLostError, match=text):
                write()
        assert device.read(0, 4096) == bytes(4096)
        extend(device, 600)  # the coordinator still counts it among the living
        device.write(0, DATA)


@pytest.mark.parametrize("opener", SHARED, indirect=True)
def test_the_initiator_enforces_the_deadline_too(opener: Opener) -> None:
    """A write that Python let pass, as of a process that was stopped after its check."""
    with opener(True) as device:
        begin(device)
        device.extend_grant(boot_clock() - 1, incarnation=device.incarnation())
        buffer = aligned_buffer(4096, 4096)
        with (
            device.native.queue(2) as queue,
            pytest.raises(LeaseLostError, match="grant of this writer was over"),
        ):
            queue.transfer(Kind.WRITE, buffer, 0)
        assert device.read(0, 4096) == bytes(4096)


# ---- devices in memory ---------------------------------------------------------------------------


@pytest.mark.parametrize("opener", kinds(lambda kind: kind in MEMORY_KINDS), indirect=True)
def test_a_device_in_memory_is_refused(opener: Opener) -> None:
    with opener(True) as device:
        for call in (device.check_can_grant, lambda: device.begin_granted(0)):
            with pytest.raises(UsageError, match=r"grant writing to mem:.*other processes reach"):
                call()
        device.lock_exclusive("a writer")
        assert device.granted_writers_gone()
