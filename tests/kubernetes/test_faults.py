"""What surrounds the driver fails: devices, disks, records, paths, another driver, servers."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlfs.mount.mountpoint import mount_file_system
from dlfs.mount.options import MountOptions
from dlfs.mount.supervise.holder import list_held
from dlfs_csi.mounts import layers, show
from tests.kubernetes.driving import Plant, Refused, error_of
from tests.support.waiting import retried, wait_for

pytestmark = [pytest.mark.root, pytest.mark.fuse]

ANIMALS = {"attributes": {"dataset": "animals"}}


@pytest.fixture
def own(user: str) -> Iterator[Plant]:
    """A driver of one test."""
    plant = Plant(user)
    yield plant
    plant.close()


def test_a_dead_mount_whose_volume_is_away_stays_dead_and_comes_back(
    own: Plant, volume: Path
) -> None:
    copy = Path(shutil.copy(volume, own.folder / "volume.img"))
    target = own.targets / "target"
    own.publish(target, str(copy), **ANIMALS)
    copy.rename(own.folder / "away.img")
    own.holder.kill()
    own.holder.wait()
    for pid in own.servers():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_for(lambda: error_of(target) == errno.ENOTCONN, "the end of the mount")
    own.start_holder()
    wait_for(lambda: "no such file" in own.log.read_text(), "an attempt to mount it anew")
    assert error_of(target) == errno.ENOTCONN, "not an empty directory"
    (own.folder / "away.img").rename(copy)
    assert retried(lambda: (target / "cat/0.txt").read_text(), OSError) == "first"
    retried(lambda: own.unpublish(target), Refused)  # the driver may not have ended with it
    assert own.left() == []


def test_a_second_driver_waits_for_the_end_of_the_first(own: Plant, volume: Path) -> None:
    target = own.targets / "target"
    own.holder.send_signal(signal.SIGSTOP)
    call = threading.Thread(target=own.publish, args=(target, str(volume)))
    call.start()
    records = own.folder / "state/records"
    wait_for(lambda: any(records.iterdir()), "a call under way")
    first = own.driver
    own.socket.rename(own.folder / "first.sock")
    own.start_process()
    wait_for(lambda: "waiting for the end of another" in own.log.read_text(), "the second driver")
    own.holder.send_signal(signal.SIGCONT)
    call.join()
    assert (target / "animals/cat/0.txt").read_text() == "first"
    assert not own.socket.exists()
    first.terminate()
    first.wait()
    wait_for(own.socket.exists, "the socket of the second driver")
    own.unpublish(target)
    assert own.left() == []


@pytest.fixture
def full_disk(own: Plant) -> Iterator[Path]:
    """The driver's directory of records, whose file system has no space."""
    own.kill()
    state = own.folder / "state"
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32k", "none", state], check=True)
    own.start()
    yield state
    own.kill()
    subprocess.run(["umount", "-l", state], check=True)


def test_volumes_are_taken_away_when_the_disk_is_full(
    own: Plant, volume: Path, full_disk: Path
) -> None:
    target, other = own.targets / "target", own.targets / "other"
    own.publish(target, str(volume))
    filling = os.open(full_disk / "filling", os.O_WRONLY | os.O_CREAT)
    with contextlib.suppress(OSError):
        while True:
            os.write(filling, bytes(4096))
    os.close(filling)
    with pytest.raises(Refused, match=r"RESOURCE_EXHAUSTED: .*No space left"):
        own.publish(other, str(volume))
    own.unpublish(target)
    assert own.left() == [str(full_disk)], "its own mount"


def test_paths_that_cannot_be_targets_leave_nothing(plant: Plant, volume: Path) -> None:
    (plant.folder / "elsewhere").mkdir()
    link, file, full = (plant.targets / name for name in ("link", "file", "full"))
    link.symlink_to(plant.folder / "elsewhere")
    file.write_text("kept")
    full.mkdir()
    (full / "file").write_text("kept")
    for target, reason in ((link / "t", "symbolic link"), (file, "File exists"), (full, "files")):
        with pytest.raises(Refused, match=f"FAILED_PRECONDITION: .*{reason}"):
            plant.publish(target, str(volume))
        plant.unpublish(target)
    assert file.read_text() == (full / "file").read_text() == "kept"
    assert not any((plant.folder / "elsewhere").iterdir())
    link.unlink()
    file.unlink()
    shutil.rmtree(full)
    assert plant.left() == []


def test_a_mount_whose_record_is_damaged_goes_on(own: Plant, volume: Path) -> None:
    target = own.targets / ("é" * 100)
    own.publish(target, str(volume))
    (record,) = (own.folder / "state/records").iterdir()
    own.kill()
    record.write_text("{}")
    own.start()
    assert "is no record" in own.log.read_text()
    assert [held.server_pid is not None for held in list_held(own.holder_folder)] == [True]
    assert (target / "animals/cat/0.txt").read_text() == "first"
    own.unpublish(target)
    assert own.left() == []


def test_programs_see_the_dead_mount_or_the_new_one(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (tmp_path / "stage/animals/cat").mkdir(parents=True)
    os.close(mount_file_system(str(target), MountOptions().for_kernel()))
    seen: set[int] = set()
    ended = threading.Event()

    def look() -> None:
        while not ended.is_set():
            seen.add(error_of(target / "cat"))

    program = threading.Thread(target=look)
    program.start()
    try:
        wait_for(lambda: errno.ENOTCONN in seen, "a look at the dead mount")
        show(str(tmp_path / "stage"), "animals", str(target))
        wait_for(lambda: 0 in seen, "a look at the new one")
    finally:
        ended.set()
        program.join()
        found = layers(str(target))
        subprocess.run(["umount", "--recursive", target], check=True)
    assert (seen, len(found)) == ({errno.ENOTCONN, 0}, 1)


def test_a_server_cannot_have_another_directory_shown(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (tmp_path / "animals").symlink_to("/etc")
    with pytest.raises(NotADirectoryError):
        show(str(tmp_path), "animals", str(target))
    assert not any(target.iterdir())


SILENT_FILE = """
import os, struct, sys
from dlfs._native.mounting import mount
kernel = os.open("/dev/fuse", os.O_RDWR)
mount("evil", sys.argv[1], "fuse", 0, f"fd={kernel},rootmode=40000,user_id=0,group_id=0")
print("mounted", flush=True)
attributes = struct.pack("=6Q10I", 5, *[0] * 8, 0o100644, 1, *[0] * 5)
answers = {
    26: struct.pack("=4I2H2I2HI", 7, 31, *[0] * 4, 1 << 16, *[0] * 4).ljust(64, bytes(1)),
    1: struct.pack("=4Q2I", 5, *[0] * 5) + attributes,
    14: struct.pack("=Q2I", 1, 0, 0),
}
while True:
    _, operation, unique, _ = struct.unpack_from("=2I2Q", os.read(kernel, 1 << 17))
    if operation in answers:
        found = answers[operation]
        os.write(kernel, struct.pack("=IiQ", 16 + len(found), 0, unique) + found)
"""
"""A program that mounts a file system whose files can be opened, and not looked at or closed."""


def test_a_server_cannot_stop_the_holder_by_a_file_that_does_not_answer(
    own: Plant, volume: Path, tmp_path: Path
) -> None:
    target = own.targets / "target"
    own.publish(target, str(volume))
    command = [sys.executable, "-c", SILENT_FILE, tmp_path]
    with contextlib.ExitStack() as stack:
        program = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        stack.callback(subprocess.run, ["umount", "-l", tmp_path], check=False)
        stack.callback(program.kill)
        assert program.stdout is not None
        assert program.stdout.readline() == "mounted\n"
        file = os.open(tmp_path / "file", os.O_RDONLY | os.O_CLOEXEC)
        link = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        link.connect(f"{own.holder_folder}/mounts/{own.held(target).name}/server.sock")
        for words in (b"{}", b'{"op":"serve","device":"0:1","answers":true,"init":""}'):
            socket.send_fds(link, [words], [file, file])
        assert own.held(target).answers
    with contextlib.suppress(OSError):
        os.close(file)
    own.unpublish(target)
    assert own.left() == []
