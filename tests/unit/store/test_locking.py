"""Tests the lock of a volume: it locks all members, and one locked member refuses writers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from uuid import UUID

import pytest

import dlfs
from dlfs.base.units import MIB
from dlfs.block import RECORD_BYTES, RECORD_OFFSET_BYTES, BlockDevice, FileDevice
from dlfs.block.lease import LeaseTimes
from dlfs.connection.connection import LocalConnection, OpenOptions
from dlfs.errors import (
    ClosedError,
    DeviceError,
    ExistsError,
    LeaseLostError,
    LockedError,
    UsageError,
)
from dlfs.store import locking
from dlfs.store.locking import lock_members, unlock_members
from dlfs.store.transaction import Generation, check_volume
from dlfs.volume.volume import Volume
from tests.support.shared import SharedFileDevice

MEMBERS = 3
TIMES = LeaseTimes(renew_s=0.05, valid_s=20, drain_s=20, claim_s=0.25, poll_s=0.02)


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    return [tmp_path / f"member{i}" for i in range(MEMBERS)]


@pytest.fixture
def volume(paths: list[Path]) -> Iterator[Volume]:
    dlfs.format_volume([str(path) for path in paths], size_bytes=2 * MIB, chunk_bytes=4096)
    with dlfs.open([str(path) for path in paths]) as opened:
        yield opened


def record_of(path: Path) -> bytes:
    return path.read_bytes()[RECORD_OFFSET_BYTES : RECORD_OFFSET_BYTES + RECORD_BYTES]


def test_a_writer_that_waits_says_for_whom(
    volume: Volume, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(locking, "NOTE_S", 0.0)
    attempts: list[int] = []
    with volume.writer("x"):

        def change() -> str:
            attempts.append(1)
            if len(attempts) == 4:
                return "done"
            with dlfs.open(volume.uri) as other, other.writer("y"):
                raise AssertionError

        assert locking.when_unlocked(change, 60) == "done"
    (message,) = caplog.messages
    assert "held by dlfs writing dataset 'x'" in message
    assert message.endswith("; waiting for it")


def test_a_writer_holds_every_member(volume: Volume, paths: list[Path]) -> None:
    with volume.writer("x") as writer:
        for path in paths:
            assert b"writing dataset 'x'" in record_of(path)
            with (
                FileDevice(path, writable=True) as device,
                pytest.raises(LockedError, match=rf"lock {path}: held by dlfs writing dataset 'x'"),
            ):
                device.lock_exclusive("another")
        writer.add("a", b"1")
    assert all(record_of(path) == bytes(RECORD_BYTES) for path in paths)


@pytest.mark.parametrize("held", range(MEMBERS))
def test_one_locked_member_refuses_writers_and_the_others_are_unlocked(
    volume: Volume, paths: list[Path], held: int
) -> None:
    with FileDevice(paths[held], writable=True) as device:
        device.lock_exclusive("somebody")
        with pytest.raises(LockedError, match=rf"lock {paths[held]}: held by somebody on host"):
            volume.writer("x")
        with pytest.raises(LockedError, match="this process has it open"):
            dlfs.format_volume([str(path) for path in paths], force=True)
        for i, path in enumerate(paths):
            assert (record_of(path) == bytes(RECORD_BYTES)) == (i != held)
        assert b"somebody" in record_of(paths[held])
    with volume.writer("x") as writer:
        writer.add("a", b"1")


class Noted:
    """A device whose locking is noted."""

    def __init__(self, number: int, log: list[tuple[str, int]], *, fails: bool = False) -> None:
        self.number, self.log, self.fails = number, log, fails

    def lock_exclusive(self, holder: str, *, record: bool = True) -> None:
        self.log.append(("lock", self.number))

    def unlock(self) -> None:
        self.log.append(("unlock", self.number))
        if self.fails:
            raise DeviceError(f"unlock {self.number}")


def test_the_first_member_is_locked_first_and_unlocked_last() -> None:
    log: list[tuple[str, int]] = []
    devices: list[BlockDevice] = [Noted(i, log, fails=i > 0) for i in range(3)]  # type: ignore[misc]
    lock_members(devices, "a writer")
    assert log[0] == ("lock", 0)
    assert sorted(log) == [("lock", i) for i in range(3)]
    log.clear()
    with pytest.raises(DeviceError, match="unlock 2"):
        unlock_members(devices)
    assert log == [("unlock", i) for i in (2, 1, 0)]


# ---- formatting ----------------------------------------------------------------------------------


def test_the_record_of_a_dead_writer_is_no_data(tmp_path: Path) -> None:
    path = tmp_path / "disk"
    with FileDevice.create(path, 2 * MIB) as device:
        device.lock_exclusive("dlfs format")
        record = record_of(path)
    with FileDevice(path, writable=True) as device:
        device.write(RECORD_OFFSET_BYTES, record)
    dlfs.format_volume(str(path), chunk_bytes=4096)
    assert record_of(path) == bytes(RECORD_BYTES)


def test_other_data_at_the_records_place_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "disk"
    content = bytearray(2 * MIB)
    content[RECORD_OFFSET_BYTES + 10] = 1
    path.write_bytes(content)
    with pytest.raises(ExistsError, match="empty device"):
        dlfs.format_volume(str(path), chunk_bytes=4096)
    assert path.read_bytes() == content


# ---- shared devices ------------------------------------------------------------------------------


def open_shared(uri: str, *, writable: bool) -> BlockDevice:
    device = SharedFileDevice(uri, writable=writable)
    device.lease_times = TIMES
    return device


@pytest.fixture
def shared(volume: Volume, paths: list[Path]) -> Iterator[Volume]:
    with Volume(LocalConnection(tuple(map(str, paths)), OpenOptions(opener=open_shared))) as opened:
        yield opened


def test_a_volume_on_shared_devices_is_written(shared: Volume, paths: list[Path]) -> None:
    with shared.writer("x") as writer:
        writer.add("a", b"1")
    with shared.writer("x") as writer:
        writer.add("a", b"2")
    assert [info.version for info in shared.datasets()] == [1, 2]
    assert all(record_of(path) == bytes(RECORD_BYTES) for path in paths)


def steal(thief: SharedFileDevice) -> None:
    """Take a lease that is held: again where its holder renewed it in between."""
    while True:
        thief.write(RECORD_OFFSET_BYTES, bytes(RECORD_BYTES))
        with contextlib.suppress(LockedError):
            return thief.lock_exclusive("a thief")


@pytest.mark.parametrize("member", range(MEMBERS))
def test_a_writer_whose_lease_was_stolen_commits_nothing(
    shared: Volume, paths: list[Path], member: int
) -> None:
    writer = shared.writer("x")
    writer.add("a", b"1")
    with SharedFileDevice(paths[member], writable=True) as thief:
        thief.lease_times = TIMES
        steal(thief)
        device = writer._transaction.devices[member]
        assert isinstance(device, SharedFileDevice)
        assert device._renewer is not None
        device._renewer.join()  # it has seen the thief
        before = [path.read_bytes() for path in paths]
        with pytest.raises(LeaseLostError, match="its record is now that of"):
            writer.seal()
        assert paths[member].read_bytes()[:65536] == before[member][:65536]
        thief.flush()
    shared.refresh()
    assert shared.datasets() == []


def test_one_error_ends_the_wait_for_the_other_members(shared: Volume, paths: list[Path]) -> None:
    """Member 1 is held and member 2's writer died: the answer comes before the long wait ends."""
    dead, living = (SharedFileDevice(path, writable=True) for path in (paths[2], paths[1]))
    with dead, living:
        for device in (dead, living):
            device.lease_times = TIMES
        dead.lock_exclusive("a dead writer")
        record = record_of(paths[2])
        dead.unlock()
        dead.write(RECORD_OFFSET_BYTES, record)
        living.lock_exclusive("a living writer")
        with pytest.raises(LockedError, match=rf"{paths[1]}: held by a living writer"):
            shared.writer("x")
        assert record_of(paths[0]) == bytes(RECORD_BYTES)
        assert record_of(paths[2]) == record


def test_the_wait_for_a_dead_writer_can_be_cancelled(shared: Volume, paths: list[Path]) -> None:
    with SharedFileDevice(paths[1], writable=True) as dead:
        dead.lease_times = TIMES
        dead.lock_exclusive("a dead writer")
        record = record_of(paths[1])
    with SharedFileDevice(paths[1], writable=True) as device:
        device.lease_times = TIMES
        device.write(RECORD_OFFSET_BYTES, record)
        logged = threading.Event()
        device._log_wait = lambda *_: logged.set()  # type: ignore[method-assign]
        errors: list[BaseException] = []

        def wait() -> None:
            try:
                device.lock_exclusive("the next")
            except ClosedError as error:
                errors.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        assert logged.wait(60)
        device.cancel_lock_wait()
        waiting.join(60)
        assert "cancelled while waiting" in str(errors[0])
        assert record_of(paths[1]) == record


@pytest.mark.parametrize("expected", [1, 3])
def test_a_writer_refuses_the_devices_of_another_volume(expected: int) -> None:
    superblock = SimpleNamespace(volume_uuid=UUID(int=2), writable=True)
    generation = cast(Generation, SimpleNamespace(superblock=superblock))
    check_volume(generation, UUID(int=2))
    with pytest.raises(UsageError, match=f"now hold volume {UUID(int=2)}; open it again"):
        check_volume(generation, UUID(int=expected))
