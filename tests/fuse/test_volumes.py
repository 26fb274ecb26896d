"""SEMANTICS.md, executed: mounts of several volumes."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import dlfs
from bench.serving import uring_offered
from dlfs.base.units import KIB, MIB
from dlfs.errors import DeviceError
from dlfs.mount.mountpoint import MOUNTINFO, find_mount, parse_mountinfo, unmount
from dlfs.mount.options import MountOptions
from dlfs.mount.supervise.keeper import can_keep
from dlfs.service.client import attach, detach
from tests.fuse.mounting import (
    ALIKE_OVER_URING,
    SECONDS_MAX,
    Mount,
    add_dataset,
    errno_of,
    mounted,
    run_cli,
    served_by,
)
from tests.service.serving import Service
from tests.support.nvme import DEFAULT_NQN, Namespace, ScriptedTarget, Subsystem
from tests.support.scripts import hear, running
from tests.support.volumes import write_dataset
from tests.support.waiting import wait_for

pytestmark = pytest.mark.fuse

CATS = {b"a": b"meow" * 500, b"b/c": b"purr" * 600}
DOGS = {b"a": b"woof" * 700, b"b/c": b"yelp" * 800}
OTHERS = {b"a": b"moo" * 900}


@pytest.fixture
def volumes(tmp_path: Path) -> list[Path]:
    """Volumes with the labels `cats`, `dogs`, `dogs` again, and none, each with `train`."""
    made = []
    contents = (("cats", CATS), ("dogs", DOGS), ("dogs", OTHERS), ("", OTHERS))
    for number, (label, files) in enumerate(contents):
        made.append(tmp_path / f"{number}.img")
        dlfs.format_volume(str(made[-1]), size_bytes=(16 + number) * MIB, label=label)
        add_dataset(made[-1], "train", files)
    return made


def uuid_of(volume: Path) -> str:
    with dlfs.open(str(volume)) as found:
        return str(found.uuid)


@pytest.fixture
def both(volumes: list[Path], server: str, tmp_path: Path) -> Iterator[Mount]:
    """The first two volumes, on one mount."""
    first, second, *_ = volumes
    options = served_by(server)
    with mounted(
        first, tmp_path / "mnt", tmp_path / "log", more=[second], nested=True, **options
    ) as mount:
        yield mount


def test_rule_39_each_volume_has_a_directory(
    volumes: list[Path], server: str, tmp_path: Path
) -> None:
    first, *more = volumes
    options = served_by(server)
    with mounted(
        first, tmp_path / "mnt", tmp_path / "log", more=more, nested=True, **options
    ) as mount:
        expected = ["cats", "dogs", uuid_of(volumes[2]), uuid_of(volumes[3])]
        contents = (CATS, DOGS, OTHERS, OTHERS)
        assert sorted(os.listdir(mount.directory)) == sorted(expected)
        inodes = set()
        for name, files in zip(expected, contents, strict=True):
            assert os.listdir(mount / name) == ["train"]
            assert os.listxattr(mount / name) == []
            assert (mount / name / "train@1/a").read_bytes() == files[b"a"]
            for path, data in files.items():
                assert (mount / name / "train" / os.fsdecode(path)).read_bytes() == data
            for path in (".", "train", "train/a"):
                status = os.stat(mount / name / path)
                assert status.st_nlink == 1
                assert status.st_mtime_ns == os.stat(mount / name / "train").st_mtime_ns
                inodes.add(status.st_ino)
            assert os.stat(mount / name / "..") == os.stat(mount.directory)
        assert len(inodes) == 3 * len(expected)
        for absent in ("train", "cats@1", "incoming", "cats/none", "cats/train@2"):
            assert errno_of(lambda name=absent: os.stat(mount / name)) == errno.ENOENT
        code = errno_of(lambda: os.getxattr(mount / "cats", "user.dlfs.version"))
        assert code == errno.ENODATA
        assert errno_of(lambda: os.mkdir(mount / "cats/new")) == errno.EROFS


@ALIKE_OVER_URING
def test_rule_39_one_volume_nested(server: str, volumes: list[Path], tmp_path: Path) -> None:
    directory = tmp_path / "mnt"
    directory.mkdir()
    words = [volumes[0], directory, "--nested", "--log", tmp_path / "log"]
    words += ["--fuse", "pyfuse3"] if server == "pyfuse3" else ["--fuse", "native"]
    with uring_offered() if server == "uring" else contextlib.nullcontext():
        done = run_cli("mount", *words)
    assert done.returncode == 0, done.stderr
    try:
        assert os.listdir(directory) == ["cats"]
        assert (directory / "cats/train/a").read_bytes() == CATS[b"a"]
    finally:
        assert run_cli("umount", directory).returncode == 0


def test_rule_39_datasets_come_and_go_below(volumes: list[Path], both: Mount) -> None:
    before = os.stat(both / "cats").st_mtime_ns
    assert os.listdir(both / "cats") == ["train"]
    add_dataset(volumes[0], "later", OTHERS)
    wait_for(lambda: os.listdir(both / "cats") == ["later", "train"], "the dataset")
    assert (both / "cats/later/a").read_bytes() == OTHERS[b"a"]
    wait_for(lambda: os.stat(both / "cats").st_mtime_ns > before, "the time of the directory")
    assert os.listdir(both / "dogs") == ["train"]
    with open(both / "cats/train/a", "rb", buffering=0) as file:
        add_dataset(volumes[0], "train", {b"a": b"second"})
        wait_for(lambda: (both / "cats/train/a").read_bytes() == b"second", "the version")
        assert file.read() == CATS[b"a"]
    with dlfs.open(str(volumes[0])) as volume:
        volume.remove("later")
    wait_for(lambda: os.listdir(both / "cats") == ["train"], "the end of the dataset")
    assert (both / "dogs/train/a").read_bytes() == DOGS[b"a"]


def test_rule_39_listings_are_resumable(volumes: list[Path], both: Mount) -> None:
    names = [f"{number:02}-{'x' * 240}" for number in range(40)]  # more than one request lists
    with dlfs.open(str(volumes[1])) as volume:
        for name in names:
            with volume.writer(name) as writer:
                writer.add("x", b"")
    wait_for(lambda: len(os.listdir(both / "dogs")) == 41, "the datasets")
    with os.scandir(both / "dogs") as one, os.scandir(both / "cats") as other:
        found = [next(one).name for _ in range(10)]
        assert [entry.name for entry in other] == ["train"]
        assert found + [entry.name for entry in one] == [*names, "train"]


def test_rule_41_space(volumes: list[Path], both: Mount, server: str) -> None:
    expected = []
    for path in volumes[:2]:
        with dlfs.open(str(path)) as volume:
            expected.append((volume.capacity_bytes, volume.free_bytes, 2))
    total = tuple(map(sum, zip(*expected, strict=True)))

    def space(path: Path) -> tuple[int, int, int]:
        found = os.statvfs(path)
        return found.f_blocks * 4096, found.f_bfree * 4096, found.f_files

    assert space(both.directory) == total
    for name, alone in zip(("cats", "dogs"), expected, strict=True):
        for path in (both / name, both / name / "train", both / name / "train/a"):
            assert space(path) == (total if server == "pyfuse3" else alone)
    youngest = max(os.stat(both / name).st_mtime_ns for name in ("cats", "dogs"))
    assert os.stat(both.directory).st_mtime_ns == youngest
    add_dataset(volumes[0], "later", OTHERS)
    wait_for(lambda: os.stat(both.directory).st_mtime_ns > youngest, "the time of the root")
    wait_for(lambda: os.statvfs(both.directory).f_files == 5, "the samples of the root")


def test_rule_42_a_volume_that_hangs_delays_no_other(
    volumes: list[Path], server: str, tmp_path: Path
) -> None:
    subsystem = Subsystem(DEFAULT_NQN, [Namespace(24 * MIB, block_bytes=4096)])
    with ScriptedTarget([subsystem]) as target:
        dlfs.format_volume(target.uri(), chunk_bytes=4 * KIB, label="far")
        write_dataset(target.uri(), "train", DOGS)
        limit_ms = 2000 * SECONDS_MAX  # longer than any wait of this test
        uri = target.uri(timeout_ms=limit_ms, reconnect_ms=limit_ms)
        options = served_by(server)
        with (
            mounted(
                uri, tmp_path / "mnt", tmp_path / "log", more=volumes[:1], nested=True, **options
            ) as mount,
            ThreadPoolExecutor(6) as pool,
        ):
            assert (mount / "far/train/a").read_bytes() == DOGS[b"a"]
            folder = os.open(mount / "far/train", os.O_RDONLY | os.O_DIRECTORY)
            target.kill()
            opened = os.open("b/c", os.O_RDONLY, dir_fd=folder)
            try:
                reading = [pool.submit(os.pread, opened, 6000, 0) for _ in range(4)]
                pool.submit(os.listdir, mount / "far")
                add_dataset(volumes[0], "later", OTHERS)
                wait_for(lambda: os.listdir(mount / "cats") == ["later", "train"], "the dataset")
                assert (mount / "cats/train/a").read_bytes() == CATS[b"a"]
                assert sorted(os.listdir(mount.directory)) == ["cats", "far"]
                assert os.stat(mount / "far").st_mtime_ns
                assert os.statvfs(mount.directory).f_files > 0
                assert not any(request.done() for request in reading)
            finally:
                target.restart()
                for request in reading:
                    assert request.exception() is None or isinstance(request.exception(), OSError)
                for descriptor in (opened, folder):
                    os.close(descriptor)


# ---- volumes that come and go --------------------------------------------------------------------


@contextlib.contextmanager
def served_mount(folder: Path, volume: Path, server: str, *options: str) -> Iterator[Service]:
    """Run a service of a volume, mounted on ``mnt`` in a new folder."""
    (folder / "mnt").mkdir(parents=True)
    fuse = "pyfuse3" if server == "pyfuse3" else "native"
    words = ("--mount", str(folder / "mnt"), *options, "--fuse", fuse)
    with uring_offered() if server == "uring" else contextlib.nullcontext():
        made = Service([str(volume)], volume.parent / "s.sock", *words).wait_ready()
    try:
        yield made
        made.stop()
    finally:
        made.close()
        for left in parse_mountinfo(MOUNTINFO.read_bytes()):  # by a test that failed
            if left.mountpoint.startswith(os.fsencode(volume.parent)):
                unmount(os.fsdecode(left.mountpoint), lazy=True)


@contextlib.contextmanager
def other_mount(folder: Path, volume: Path) -> Iterator[Mount]:
    """Mount a volume on ``mnt`` in a new folder."""
    folder.mkdir()
    with mounted(volume, folder / "mnt", folder / "log", fuse="native", restart=False) as mount:
        yield mount


@contextlib.contextmanager
def working_in(directory: Path) -> Iterator[int]:
    """Run a process whose working directory is a directory of a mount; yield its ID."""
    code = "import sys; print(1, flush=True); sys.stdin.read()"
    with running(code, cwd=directory) as process:
        hear(process)
        yield process.pid


@pytest.fixture
def service(volumes: list[Path], server: str, tmp_path: Path) -> Iterator[Service]:
    """A service of the first volume, with a nested mount."""
    with served_mount(tmp_path, volumes[0], server, "--nested") as made:
        yield made
    assert find_mount(tmp_path / "mnt") is None
    assert os.listdir(tmp_path / "mnt") == []


@ALIKE_OVER_URING
def test_rule_52_volumes_come_and_go(service: Service, volumes: list[Path], tmp_path: Path) -> None:
    top = tmp_path / "mnt"
    descriptor = os.open(top / "cats/train/b/c", os.O_RDONLY)
    inodes = set()
    for _ in range(5):
        assert errno_of(lambda: os.stat(top / "dogs")) == errno.ENOENT
        assert os.listdir(top) == ["cats"]
        done = attach(service.uri, str(volumes[1]))
        assert done.mount == str(top / "dogs")
        assert (top / "dogs/train/a").read_bytes() == DOGS[b"a"]
        assert sorted(os.listdir(top)) == ["cats", "dogs"]
        inodes.add(os.stat(top / "dogs/train/a").st_ino)
        detach(service.uri, "dogs")
    assert len(inodes) == 5
    assert os.pread(descriptor, 5000, 0) == CATS[b"b/c"]
    os.close(descriptor)
    detach(service.uri, "cats")
    assert os.listdir(top) == []
    attach(service.uri, str(volumes[2]))
    done = attach(service.uri, str(volumes[1]))  # its label is taken
    assert sorted(os.listdir(top)) == sorted(["dogs", uuid_of(volumes[1])])
    assert (top / "dogs/train/a").read_bytes() == OTHERS[b"a"]
    assert (top / uuid_of(volumes[1]) / "train/a").read_bytes() == DOGS[b"a"]


@contextlib.contextmanager
def using(top: Path, use: str) -> Iterator[int]:
    """Use a volume in some way; yield the ID of the process that does."""
    if use == "work":
        with working_in(top / "train") as pid:
            yield pid
        return
    path = {"directory": top / "train/b", "top": top}.get(use, top / "train/a")
    descriptor = os.open(path, os.O_RDONLY)
    if use == "mapping":
        mapping = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
        os.close(descriptor)
        yield os.getpid()
        mapping.close()
    else:
        yield os.getpid()
        os.close(descriptor)


def check_busy(service: Service, top: Path, *uses: str) -> None:
    """Check that a volume cannot be detached while it is used, and then can."""
    for use in uses:
        with using(top, use) as pid:
            with pytest.raises(DeviceError, match=f"processes use {top}: {pid}; close") as caught:
                detach(service.uri, "dogs")
            assert caught.value.errno == errno.EBUSY
            assert (top / "train/b/c").read_bytes() == DOGS[b"b/c"]
    detach(service.uri, "dogs")
    assert not top.exists()


@ALIKE_OVER_URING
def test_rule_52_a_volume_in_use_is_busy(
    service: Service, volumes: list[Path], tmp_path: Path
) -> None:
    attach(service.uri, str(volumes[1]))
    check_busy(service, tmp_path / "mnt/dogs", "file", "directory", "top", "mapping", "work")


@ALIKE_OVER_URING
def test_rule_52_a_volume_is_busy_after_a_rename_above_the_mount(
    volumes: list[Path], server: str, tmp_path: Path
) -> None:
    with served_mount(tmp_path / "before", volumes[0], server, "--nested") as service:
        (tmp_path / "before").rename(tmp_path / "after")
        top = tmp_path / "after/mnt/dogs"
        assert attach(service.uri, str(volumes[1])).mount == str(top)
        with other_mount(tmp_path / "before", volumes[2]):
            check_busy(service, top, "file", "work")


@ALIKE_OVER_URING
def test_rule_52_only_the_mount_of_the_service_ends(
    volumes: list[Path], server: str, tmp_path: Path
) -> None:
    with served_mount(tmp_path / "before", volumes[0], server) as service:
        (tmp_path / "before").rename(tmp_path / "after")
        with other_mount(tmp_path / "before", volumes[2]) as other:
            detach(service.uri, "cats")
            assert find_mount(tmp_path / "after/mnt") is None
            assert (other / "train/a").read_bytes() == OTHERS[b"a"]
        attach(service.uri, str(volumes[0]))


def test_rule_52_a_volume_taken_by_force_is_stale(
    service: Service, volumes: list[Path], tmp_path: Path
) -> None:
    attach(service.uri, str(volumes[1]))
    top = tmp_path / "mnt/dogs"
    seen = os.open(top / "train/a", os.O_RDONLY)
    unseen = os.open(top / "train/b/c", os.O_RDONLY)
    folders = [os.open(path, os.O_RDONLY | os.O_DIRECTORY) for path in (top, top / "train")]
    try:
        assert os.pread(seen, 10, 0) == DOGS[b"a"][:10]
        detach(service.uri, "dogs", force=True)
        assert not top.exists()
        assert errno_of(lambda: os.pread(unseen, 10, 0)) == errno.ESTALE
        code = errno_of(lambda: os.pread(seen, 10, 0))
        assert code == errno.ESTALE or os.pread(seen, 10, 0) == DOGS[b"a"][:10]
        for folder in folders:
            assert errno_of(lambda at=folder: os.stat("none", dir_fd=at)) == errno.ESTALE
        attach(service.uri, str(volumes[1]))
        assert errno_of(lambda: os.pread(unseen, 10, 0)) == errno.ESTALE
        assert (top / "train/b/c").read_bytes() == DOGS[b"b/c"]
        assert (tmp_path / "mnt/cats/train/a").read_bytes() == CATS[b"a"]
    finally:
        for descriptor in (seen, unseen, *folders):
            os.close(descriptor)


# ---- servers that follow each other --------------------------------------------------------------


@pytest.mark.skipif(not can_keep(MountOptions(uring=False)), reason="needs Linux 6.9")
def test_rule_27_a_mount_of_several_volumes(volumes: list[Path], tmp_path: Path) -> None:
    first, *more = volumes
    options = served_by("native")
    with mounted(
        first, tmp_path / "mnt", tmp_path / "log", more=more, nested=True, **options
    ) as mount:
        paths = [mount / "cats/train/a", mount / "dogs", mount / "dogs/train/b"]
        before = [os.stat(path).st_ino for path in paths]
        descriptor = os.open(mount / "dogs/train/b/c", os.O_RDONLY)
        os.kill(mount.pid, signal.SIGKILL)
        assert os.pread(descriptor, 5000, 0) == DOGS[b"b/c"]
        assert [os.stat(path).st_ino for path in paths] == before
        replaced = run_cli("mount", "--replace", mount.directory, "--json")
        assert replaced.returncode == 0, replaced.stderr
        assert os.pread(descriptor, 5000, 0) == DOGS[b"b/c"]
        assert [os.stat(path).st_ino for path in paths] == before
        os.close(descriptor)
