"""Files as devices: their creation, and the paths that are refused."""

from __future__ import annotations

import errno
import os
import resource
import signal
from pathlib import Path

import numpy as np
import pytest

from dlfs.base.units import MIB
from dlfs.block import FileDevice, Kind, aligned_buffer
from dlfs.errors import (
    ClosedError,
    DeviceError,
    DlfsError,
    ExistsError,
    NotFoundError,
    SpaceError,
    TruncatedError,
    UsageError,
)
from tests.support.descriptors import count_below


def test_create_reserves_the_space(tmp_path: Path) -> None:
    path = tmp_path / "a.img"
    with FileDevice.create(path, MIB + 100) as device:
        assert device.size_bytes == MIB
        assert device.writable
    status = path.stat()
    assert status.st_size == MIB
    assert status.st_blocks * 512 >= MIB


def test_create_overwrites_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.img"
    path.write_bytes(b"precious")
    with pytest.raises(ExistsError, match=r"a\.img"):
        FileDevice.create(path, MIB)
    assert path.read_bytes() == b"precious"


def test_create_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="4096"):
        FileDevice.create(tmp_path / "a.img", 4095)
    with pytest.raises(NotFoundError, match="nowhere"):
        FileDevice.create(tmp_path / "nowhere" / "a.img", MIB)
    assert list(tmp_path.iterdir()) == []


def test_create_leaves_nothing_behind_that_it_cannot_open(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="expected engine"):
        FileDevice.create(tmp_path / "a", 1 << 20, engine="warp")
    assert list(tmp_path.iterdir()) == []


def test_create_leaves_nothing_behind_when_the_space_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not even try: that would take all that is free from other programs for a moment."""
    monkeypatch.delattr(os, "posix_fallocate")
    status = os.statvfs(tmp_path)
    too_much = status.f_blocks * status.f_frsize * 2
    with pytest.raises((SpaceError, DeviceError), match=r"a\.img.*\d+ bytes are free"):
        FileDevice.create(tmp_path / "a.img", too_much)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_reservation_is_a_device_error(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB // 2, before[1]))
    try:
        with pytest.raises(DeviceError) as caught:
            FileDevice.create(tmp_path / "a.img", MIB)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert caught.value.errno == errno.EFBIG
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", ["/dev/null", "/"])
def test_only_files_and_disks_are_devices(path: str) -> None:
    with pytest.raises(UsageError, match="regular file or a block device"):
        FileDevice(path, writable=True)


def test_engines_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.img"
    FileDevice.create(path, MIB).close()
    with pytest.raises(UsageError, match="'warp'"):
        FileDevice(path, engine="warp")
    with FileDevice(path, engine="threads") as device:
        assert device.native.kind == "threads"
    with FileDevice(path, buffered=True) as device:
        assert device.block_bytes == 512


def test_a_shrunken_file_is_truncated(tmp_path: Path) -> None:
    path = tmp_path / "a.img"
    with FileDevice.create(path, MIB) as device:
        os.truncate(path, MIB // 2)
        with pytest.raises(TruncatedError, match=rf"read {path} at byte {MIB // 2}, 4096 bytes"):
            device.read(MIB // 2, 4096)
        assert device.read(0, 4096) == bytes(4096)


def test_a_copy_of_the_lock_in_a_child_that_has_not_run_yet_keeps_no_writer_out(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a"
    with FileDevice.create(path, 8 * MIB) as device:
        device.lock_exclusive("one")
        with open(os.dup(device._lock_file.value), "rb"):  # as a child has after fork and vfork
            device.unlock()
            device.lock_exclusive("another")


def test_a_replaced_file_is_not_locked(tmp_path: Path) -> None:
    path = tmp_path / "a.img"
    with FileDevice.create(path, MIB) as device:
        path.rename(tmp_path / "moved.img")
        with pytest.raises(NotFoundError):
            device.lock_exclusive("a writer")
        path.write_bytes(bytes(MIB))
        with pytest.raises(UsageError, match="replaced"):
            device.lock_exclusive("a writer")


def test_a_member_too_small_for_the_record_is_locked_without(tmp_path: Path) -> None:
    with FileDevice.create(tmp_path / "a.img", 65536) as device:
        device.lock_exclusive("a writer")
        with (
            FileDevice(tmp_path / "a.img", writable=True) as other,
            pytest.raises(DlfsError, match="left no record"),
        ):
            other.lock_exclusive("another")


def test_a_closed_device_is_freed_after_its_queue_pairs(tmp_path: Path) -> None:
    device = FileDevice.create(tmp_path / "a.img", MIB)
    device.write(0, b"y" * 4096)
    before = len(os.listdir("/proc/self/fd"))
    queue = device.queue_pair(1)
    device.close()
    assert "closed" in repr(device)
    buffer = aligned_buffer(4096, 4096)
    queue.transfer(Kind.READ, buffer, 0)
    assert buffer.tobytes() == b"y" * 4096
    queue.close()
    assert len(os.listdir("/proc/self/fd")) < before


def test_a_queue_pair_keeps_buffers_and_device_alive(tmp_path: Path) -> None:
    device = FileDevice.create(tmp_path / "a.img", MIB)
    device.write(0, b"y" * 4096)
    queue = device.queue_pair(64)
    for tag in range(64):
        assert queue.submit(Kind.READ, aligned_buffer(4096, 4096), 0, tag)
    assert queue.in_flight == 64
    done = 0
    while queue.in_flight:
        done += len(queue.poll(50))
    assert done == 64
    queue.register(np.zeros(1, np.uint8))
    queue.register(None)
    queue.close()
    with pytest.raises(ClosedError):
        queue.register(None)
    device.close()


def test_a_file_that_is_opened_several_times_has_one_descriptor(tmp_path: Path) -> None:
    FileDevice.create(tmp_path / "a.img", MIB).close()
    devices = [FileDevice(tmp_path / "a.img") for _ in range(5)]
    for number, device in enumerate(devices):
        assert device.read(0, 4096) == bytes(4096)
        assert count_below(tmp_path) == 1, number
    for left, device in enumerate(reversed(devices)):
        device.close()
        assert count_below(tmp_path) == (left < 4)


def test_a_file_that_was_changed_since_is_opened_anew(tmp_path: Path) -> None:
    path = tmp_path / "a.img"
    FileDevice.create(path, MIB).close()
    with FileDevice(path) as before:
        os.truncate(path, 2 * MIB)
        with FileDevice(path) as longer:
            assert (before.size_bytes, longer.size_bytes) == (MIB, 2 * MIB)
        FileDevice.create(tmp_path / "b.img", 2 * MIB).close()
        with FileDevice(tmp_path / "b.img", writable=True) as other:
            other.write(0, b"b" * 4096)
        os.rename(tmp_path / "b.img", path)
        with FileDevice(path) as replaced:
            assert replaced.identity != before.identity
            assert replaced.read(0, 4096) == b"b" * 4096
        assert before.read(0, 4096) == bytes(4096)
