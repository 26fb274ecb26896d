"""SEMANTICS.md, executed: every rule by its number, on a real mount."""

from __future__ import annotations

import concurrent.futures
import ctypes
import errno
import itertools
import mmap
import os
import re
import select
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import pytest

import dlfs
from dlfs.base.units import KIB, MIB
from dlfs.errors import DeviceError, ExistsError, NotFoundError, UsageError
from dlfs.mount import mountpoint
from dlfs.mount.mountpoint import find_mount, parse_mountinfo, unmount
from dlfs.mount.supervise import background
from dlfs.mount.supervise.background import mount_volume
from tests.fuse.mounting import (
    ALIKE_OVER_URING,
    AS_NOBODY,
    EMPTY_DIRECTORIES,
    SECONDS_MAX,
    Mount,
    Prepared,
    World,
    add_dataset,
    errno_of,
    mounted,
    parent_of,
    run_cli,
    served_by,
    stopped,
    wait_for_exit,
)
from tests.support.files import flip_bit
from tests.support.waiting import wait_for

pytestmark = pytest.mark.fuse

RULES = Path(mountpoint.__file__).with_name("SEMANTICS.md")
NOBODY = 65534


def walk(top: Path) -> Iterator[tuple[bytes, os.stat_result]]:
    """Every path below a directory, relative, and its lstat."""
    for folder, directories, files in os.walk(os.fsencode(top)):
        for name in directories + files:
            path = os.path.join(folder, name)
            yield os.path.relpath(path, os.fsencode(top)), os.lstat(path)


def test_every_rule_has_a_test() -> None:
    numbers = [int(n) for n in re.findall(r"^(\d+)\. ", RULES.read_text(), re.MULTILINE)]
    rules = set(numbers)
    assert len(numbers) == len(rules)
    files = "\n".join(file.read_text() for file in Path(__file__).parent.glob("test_*.py"))
    tests = {int(number) for number in re.findall(r"^def test_rule_(\d+)_", files, re.MULTILINE)}
    assert rules == tests == set(range(1, len(rules) + 1))


# ---- names ---------------------------------------------------------------------------------------


def test_rule_01_root_lists_datasets(world: World, own_volume: Path, own_mount: Mount) -> None:
    assert os.listdir(world.mount.directory) == ["train"]
    add_dataset(own_volume, "train", {b"newer": b""})
    add_dataset(own_volume, "test", {b"other": b""})
    wait_for(lambda: os.listdir(own_mount.directory) == ["test", "train"], "the new dataset")
    wait_for(lambda: os.listdir(own_mount / "train") == ["newer"], "the new version")


def test_rule_02_versions_by_name(own_volume: Path, own_mount: Mount) -> None:
    add_dataset(own_volume, "train", {b"newer": b""})
    add_dataset(own_volume, "train@1", {b"decoy": b""})
    add_dataset(own_volume, "train@1", {b"decoy2": b""})
    wait_for(lambda: (own_mount / "train@2").exists(), "the new version")
    assert os.listdir(own_mount / "train@2") == ["newer"]
    wait_for(lambda: os.listdir(own_mount / "train@1") == ["decoy2"], "the decoy")
    assert os.listdir(own_mount / "train@1") == ["decoy2"]
    assert os.listdir(own_mount / "train@1@1") == ["decoy"]
    assert os.listdir(own_mount.directory) == ["train", "train@1"]
    for name in ("train@3", "train@0", "train@01", "train@", "@1", "train@-1", "train@9999999999"):
        assert errno_of(lambda name=name: os.stat(own_mount / name)) == errno.ENOENT


def test_rule_03_tree_of_paths(world: World) -> None:
    directories = set()
    for path in [*world.files, *(name.encode() + b"/" for name in EMPTY_DIRECTORIES)]:
        parts = path.split(b"/")
        directories |= {b"/".join(parts[:depth]) for depth in range(1, len(parts))}
    found = dict(walk(world.dataset))
    assert {path for path, status in found.items() if stat.S_ISDIR(status.st_mode)} == directories
    assert {p for p, status in found.items() if stat.S_ISREG(status.st_mode)} == set(world.files)
    assert len(found) == len(directories) + len(world.files)


def test_rule_04_names_are_bytes(world: World) -> None:
    odd = {path.removeprefix(b"odd/") for path in world.files if path.startswith(b"odd/")}
    assert {b"new\nline", b"\xff\xfe\x80", b"n" * 255} <= odd
    assert set(os.listdir(os.fsencode(world.dataset / "odd"))) == odd
    for name in odd:
        path = os.path.join(os.fsencode(world.dataset), b"odd", name)
        assert Path(os.fsdecode(path)).read_bytes() == world.files[b"odd/" + name]


def test_rule_05_listings_are_complete_and_resumable(own_volume: Path, own_mount: Mount) -> None:
    names = [b"%05d" % i for i in range(2000)] + [b"d%d" % i for i in range(9)]
    add_dataset(own_volume, "many", {n if n[0] != ord("d") else n + b"/x": b"" for n in names})
    wait_for(lambda: (own_mount / "many").exists(), "the dataset")
    positions = _read_directory(own_mount / "many", None)
    assert [name for _, name in positions if name not in (b".", b"..")] == sorted(names)
    for number in (0, 1, 7, 500, 1999, len(positions) - 1):
        position, _ = positions[number]
        assert _read_directory(own_mount / "many", position) == positions[number:]
    with os.scandir(own_mount / "many") as entries:  # given up half way
        next(entries)


def _read_directory(path: Path, position: int | None) -> list[tuple[int, bytes]]:
    """All entries from a position on, each with its own position (telldir)."""

    class Entry(ctypes.Structure):
        _fields_ = (
            ("d_ino", ctypes.c_uint64),
            ("d_off", ctypes.c_int64),
            ("d_reclen", ctypes.c_uint16),
            ("d_type", ctypes.c_uint8),
            ("d_name", ctypes.c_char * 256),
        )

    libc = ctypes.CDLL(None, use_errno=True)
    libc.opendir.restype = ctypes.c_void_p
    libc.opendir.argtypes = [ctypes.c_char_p]
    libc.readdir.restype = ctypes.POINTER(Entry)
    libc.readdir.argtypes = libc.closedir.argtypes = [ctypes.c_void_p]
    libc.telldir.restype = ctypes.c_long
    libc.telldir.argtypes = [ctypes.c_void_p]
    libc.seekdir.argtypes = [ctypes.c_void_p, ctypes.c_long]
    stream = libc.opendir(os.fsencode(path))
    assert stream
    try:
        if position is not None:
            for _ in range(3):  # somewhere else first
                libc.readdir(stream)
            libc.seekdir(stream, position)
        found = []
        while True:
            here = libc.telldir(stream)
            entry = libc.readdir(stream)
            if not entry:
                return found
            found.append((here, entry.contents.d_name))
    finally:
        libc.closedir(stream)


def test_rule_06_errors_of_names(world: World) -> None:
    top = world.dataset
    for name in ("nothing", "class0/nothing", "class", "class0/0000.bi", "odd/" + "m" * 255):
        assert errno_of(lambda name=name: os.stat(top / name)) == errno.ENOENT
        assert errno_of(lambda name=name: os.stat(top / name)) == errno.ENOENT  # from the cache
    assert errno_of(lambda: os.stat(top / "class0/0000.bin/x")) == errno.ENOTDIR
    assert errno_of(lambda: os.listdir(top / "large")) == errno.ENOTDIR
    for folder in (world.mount.directory, top, top / "odd"):
        assert errno_of(lambda folder=folder: os.stat(folder / ("n" * 256))) == errno.ENAMETOOLONG
    assert errno_of(lambda: os.open(top, os.O_WRONLY)) in (errno.EISDIR, errno.EROFS)
    assert errno_of(lambda: Path(top / "class0").read_bytes()) == errno.EISDIR


# ---- attributes ----------------------------------------------------------------------------------


def test_rule_07_sizes_and_links(world: World) -> None:
    for path, status in walk(world.dataset):
        size = len(world.files.get(path, b""))
        assert (status.st_size, status.st_nlink) == (size, 1)
        assert status.st_blocks == -(-size // 512)


@ALIKE_OVER_URING
def test_rule_08_owner_and_mode(server: str, plain_volume: Prepared, tmp_path: Path) -> None:
    directory = tmp_path / "mnt"
    options = {"uid": 1234, "gid": 4321, "file_mode": 0o440}
    with mounted(plain_volume.volume, directory, tmp_path / "log", **options, **served_by(server)):
        for path in (directory, directory / "train", directory / "train/odd"):
            status = path.stat()
            assert stat.S_IMODE(status.st_mode) == 0o550
            assert (status.st_uid, status.st_gid) == (1234, 4321)
        status = (directory / "train/large").stat()
        assert stat.S_IMODE(status.st_mode) == 0o440
        assert (status.st_uid, status.st_gid) == (1234, 4321)
        if os.geteuid():
            assert errno_of(lambda: (directory / "train/large").read_bytes()) == errno.EACCES
        assert not os.access(directory / "train/large", os.X_OK)


def test_rule_09_times(world: World) -> None:
    with dlfs.open(str(world.mount.volume)) as volume:
        made = volume.datasets()[0].created.timestamp()
    for path in (world.mount.directory, world.dataset, world.dataset / "large"):
        status = path.stat()
        for when in (status.st_mtime, status.st_atime, status.st_ctime):
            assert when == pytest.approx(made, abs=1e-5)


def test_rule_10_inode_numbers(world: World) -> None:
    first = {path: status.st_ino for path, status in walk(world.dataset)}
    assert len(set(first.values())) == len(first)
    if os.geteuid() == 0:
        Path("/proc/sys/vm/drop_caches").write_text("2")
    assert {path: status.st_ino for path, status in walk(world.dataset)} == first
    with os.scandir(world.dataset / "class0") as entries:
        assert all(e.inode() == first[b"class0/" + os.fsencode(e.name)] for e in entries)


def test_rule_11_statfs(world: World) -> None:
    found = os.statvfs(world.dataset / "large")
    with dlfs.open(str(world.mount.volume)) as volume:
        assert found.f_blocks * found.f_frsize == volume.capacity_bytes
        assert found.f_bavail * found.f_frsize == volume.free_bytes
    assert (found.f_files, found.f_namemax) == (len(world.files), 255)


# ---- contents ------------------------------------------------------------------------------------


def test_rule_12_bytes(world: World, tmp_path: Path) -> None:
    for path, data in world.files.items():
        assert (world.dataset / os.fsdecode(path)).read_bytes() == data
    data = world.files[b"large"]
    path = world.dataset / "large"
    descriptor = os.open(path, os.O_RDONLY)
    try:
        for offset, size in ((0, 1), (1, 4096), (4095, 2), (MIB - 1, MIB + 2), (len(data) - 3, 99)):
            assert os.pread(descriptor, size, offset) == data[offset : offset + size]
        assert os.pread(descriptor, 10, len(data)) == b""
        assert os.pread(descriptor, 10, len(data) + MIB) == b""
        with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as mapped:
            assert mapped[:] == data
        with open(tmp_path / "copy", "wb") as copy:
            sent = 0
            while more := os.sendfile(copy.fileno(), descriptor, sent, MIB):
                sent += more
        assert (tmp_path / "copy").read_bytes() == data
    finally:
        os.close(descriptor)
    _check_direct(path, data)


def _check_direct(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        with mmap.mmap(-1, 8192) as aligned:
            assert os.preadv(descriptor, [aligned], 4096) == 8192
            assert aligned[:] == data[4096 : 4096 + 8192]
    finally:
        os.close(descriptor)


def damage(volume_path: Path, dataset: str, path: bytes) -> None:
    """Flip one bit in the middle of a sample's bytes on the volume."""
    with dlfs.open(str(volume_path)) as volume, volume.dataset(dataset) as found:
        where = found.stat(found.index(path))
    flip_bit(volume_path, where.offset_bytes + where.length_bytes // 2, 2)


def test_rule_13_damage_is_an_error(own_volume: Path, own_mount: Mount) -> None:
    damage(own_volume, "train", b"b/c")
    path = own_mount / "train/b/c"
    descriptor = os.open(path, os.O_RDONLY)
    try:
        for offset in (0, 1, 500):
            assert errno_of(lambda offset=offset: os.pread(descriptor, 10, offset)) == errno.EIO
    finally:
        os.close(descriptor)
    with dlfs.open(str(own_volume)) as volume, volume.dataset("train") as dataset:
        where = dataset.stat(dataset.index(b"b/c"))
    said = own_mount.log.read_text()
    for word in ("EIO", "'train'", "'b/c'", where.member, str(where.offset_bytes)):
        assert word in said


def test_rule_14_neighbours_of_damage(own_volume: Path, own_mount: Mount) -> None:
    files = {b"%03d" % i: bytes([i]) * 3000 for i in range(100)}
    add_dataset(own_volume, "many", files)
    damage(own_volume, "many", b"050")
    wait_for(lambda: (own_mount / "many").exists(), "the dataset")

    def read(name: bytes) -> bytes:
        return (own_mount / "many" / os.fsdecode(name)).read_bytes()

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        results = {name: pool.submit(read, name) for name in files}
    for name, result in results.items():
        if name == b"050":
            assert errno_of(result.result) == errno.EIO
        else:
            assert result.result() == files[name]


def test_rule_15_larger_than_memory(server: str, plain_volume: Prepared, tmp_path: Path) -> None:
    volume, _, files = plain_volume
    with mounted(
        volume, tmp_path / "mnt", tmp_path / "log", cache_bytes=64 * KIB, **served_by(server)
    ) as mount:
        names = [b"large", b"sizes/300000", b"sizes/70000", b"class0/0000.bin"]
        handles = [os.open(mount / "train" / os.fsdecode(name), os.O_RDONLY) for name in names]
        for offset in range(0, 4 * MIB, MIB):
            for handle, name in zip(handles, names, strict=True):
                assert os.pread(handle, 5000, offset) == files[name][offset : offset + 5000]
        for handle in handles:
            os.close(handle)
        everything = {p: (mount / "train" / os.fsdecode(p)).read_bytes() for p in files}
        assert everything == files


def test_rule_16_many_readers(server: str, plain_volume: Prepared, tmp_path: Path) -> None:
    volume, _, files = plain_volume
    with mounted(volume, tmp_path / "mnt", tmp_path / "log", **served_by(server)) as mount:

        def read_all(first: int) -> dict[bytes, bytes]:
            paths = [*files][first:] + [*files][:first]
            return {path: (mount / "train" / os.fsdecode(path)).read_bytes() for path in paths}

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            assert all(found == files for found in pool.map(read_all, (0, 17, 34, 51)))


# ---- writing -------------------------------------------------------------------------------------


def writes(top: Path) -> dict[str, Callable[[], object]]:
    """Every way to change something."""
    file, new = top / "large", top / "new"
    return {
        "open to write": lambda: os.open(file, os.O_WRONLY),
        "open to read and write": lambda: os.open(file, os.O_RDWR),
        "open to append": lambda: os.open(file, os.O_WRONLY | os.O_APPEND),
        "open to truncate": lambda: os.open(file, os.O_RDONLY | os.O_TRUNC),
        "create": lambda: os.open(new, os.O_WRONLY | os.O_CREAT),
        "create to read": lambda: os.open(new, os.O_RDONLY | os.O_CREAT),
        "truncate": lambda: os.truncate(file, 0),
        "mkdir": lambda: new.mkdir(),
        "mknod": lambda: os.mkfifo(new),
        "unlink": lambda: file.unlink(),
        "rmdir": lambda: os.rmdir(top / "odd"),
        "rename": lambda: file.rename(new),
        "link": lambda: os.link(file, new),
        "symlink": lambda: new.symlink_to("large"),
        "chmod": lambda: file.chmod(0o600),
        "chown": lambda: os.chown(file, 1, 1),
        "utimes": lambda: os.utime(file),
        "setxattr": lambda: os.setxattr(file, "user.mine", b"1"),
        "setxattr of ours": lambda: os.setxattr(file, "user.dlfs.index", b"1"),
        "removexattr": lambda: os.removexattr(file, "user.dlfs.index"),
    }


def test_rule_17_writing_fails(world: World) -> None:
    found = {name: errno_of(call) for name, call in writes(world.dataset).items()}
    assert found == dict.fromkeys(found, errno.EROFS)
    for name in ("mkdir", "create", "rmdir"):
        top = world.mount.directory
        call = {
            "mkdir": (top / "x").mkdir,
            "create": (top / "x").touch,
            "rmdir": (top / "train").rmdir,
        }
        assert errno_of(call[name]) == errno.EROFS
    assert (world.dataset / "large").read_bytes() == world.files[b"large"]


@pytest.mark.root
def test_rule_18_remounted_for_writing(server: str, plain_volume: Prepared, tmp_path: Path) -> None:
    with mounted(
        plain_volume.volume, tmp_path / "mnt", tmp_path / "log", **served_by(server)
    ) as mount:
        subprocess.run(["mount", "-i", "-o", "remount,rw", mount.directory], check=True)
        record = find_mount(mount.directory)
        assert record is not None
        assert "rw" in record.options.split(",")
        assert (mount / "train/large").read_bytes()  # a kernel that opens without asking knows now
        calls = writes(mount / "train")
        if server != "pyfuse3":
            file = mount / "train/large"
            calls["open to write"] = lambda: write_through(file, os.O_WRONLY)
            calls["open to read and write"] = lambda: write_through(file, os.O_RDWR)
            calls["open to append"] = lambda: write_through(file, os.O_WRONLY | os.O_APPEND)
        found = {name: errno_of(call) for name, call in calls.items()}
        assert found == dict.fromkeys(found, errno.EROFS)
        assert (mount / "train/large").read_bytes() == plain_volume.files[b"large"]


def write_through(path: Path, flags: int) -> None:
    """Open a file, which may or may not succeed, and write to it."""
    descriptor = os.open(path, flags)
    try:
        os.write(descriptor, b"x")
    finally:
        os.close(descriptor)


# ---- extended attributes -------------------------------------------------------------------------


def test_rule_19_xattrs_of_files(world: World) -> None:
    with dlfs.open(str(world.mount.volume)) as volume, volume.dataset("train") as dataset:
        for path in world.files:
            info = dataset.stat(dataset.index(path))
            file = world.dataset / os.fsdecode(path)
            assert {name: os.getxattr(file, name) for name in os.listxattr(file)} == {
                "user.dlfs.index": b"%d" % info.index,
                "user.dlfs.crc32c": b"%08x" % info.crc32c,
                "user.dlfs.version": b"1",
            }


def test_rule_20_xattrs_of_directories(world: World) -> None:
    assert os.listxattr(world.dataset) == ["user.dlfs.version"]
    assert os.getxattr(world.dataset, "user.dlfs.version") == b"1"
    for path in (world.mount.directory, world.dataset / "odd"):
        assert os.listxattr(path) == []
    for path in (
        world.mount.directory,
        world.dataset,
        world.dataset / "odd",
        world.dataset / "large",
    ):
        for name in ("user.other", "user.dlfs.", "security.capability"):
            assert errno_of(lambda p=path, n=name: os.getxattr(p, n)) == errno.ENODATA


# ---- caches and change ---------------------------------------------------------------------------


def test_rule_21_the_kernel_caches(own_mount: Mount) -> None:
    path = own_mount / "train/b/c"
    good = path.read_bytes()
    descriptor = os.open(path, os.O_RDONLY)  # a later open, which keeps what is cached
    try:
        with stopped(own_mount):
            assert os.pread(descriptor, len(good), 0) == good
            assert os.fstat(descriptor).st_size == len(good)
            with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as mapped:
                assert mapped[:] == good
    finally:
        os.close(descriptor)


def test_rule_22_imports_appear(own_volume: Path, own_mount: Mount) -> None:
    assert not (own_mount / "later").exists()
    add_dataset(own_volume, "later", {b"x": b"later"})
    wait_for(lambda: (own_mount / "later").exists(), "the dataset")
    assert (own_mount / "later/x").read_bytes() == b"later"


def test_rule_23_new_versions(own_volume: Path, own_mount: Mount) -> None:
    with open(own_mount / "train/a", "rb", buffering=0) as before:
        add_dataset(own_volume, "train", {b"a": b"second version"})
        wait_for(
            lambda: (own_mount / "train/a").read_bytes() == b"second version", "the new version"
        )
        assert os.listdir(own_mount / "train") == ["a"]
        assert os.getxattr(own_mount / "train", "user.dlfs.version") == b"2"
        assert before.read() == b"first" * 100
        assert (own_mount / "train@1/a").read_bytes() == b"first" * 100


def test_rule_23_new_names(own_volume: Path, own_mount: Mount) -> None:
    with open(own_mount / "train/a", "rb", buffering=0) as before:
        with dlfs.open(str(own_volume)) as volume:
            volume.rename("train", "trained")
        wait_for(lambda: (own_mount / "trained").exists(), "the new name")
        wait_for(lambda: not (own_mount / "train").exists(), "the end of the old name")
        assert os.listdir(own_mount.directory) == ["trained"]
        assert before.read() == b"first" * 100
        assert (own_mount / "trained@1/b/c").read_bytes() == b"second" * 100


def test_rule_24_removed_datasets(own_volume: Path, own_mount: Mount) -> None:
    seen = os.open(own_mount / "train/a", os.O_RDONLY)
    unseen = os.open(own_mount / "train/b/c", os.O_RDONLY)
    folder = os.open(own_mount / "train", os.O_RDONLY | os.O_DIRECTORY)
    names = (f"never-asked-for-{number}" for number in itertools.count())

    def ask_folder() -> object:
        return os.stat(next(names), dir_fd=folder)

    # The kernel keeps mapped pages, even if a program has it drop its caches.
    mapping = mmap.mmap(seen, 500, prot=mmap.PROT_READ)
    try:
        assert mapping[:5] == b"first"
        with dlfs.open(str(own_volume)) as volume:
            volume.remove("train")
        add_dataset(own_volume, "other", {b"%d" % i: bytes([i]) * 50_000 for i in range(200)})
        wait_for(lambda: not (own_mount / "train").exists(), "the removal")
        assert os.listdir(own_mount.directory) == ["other"]
        for descriptor in (seen, unseen):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        assert os.pread(seen, 500, 0) == b"first" * 100
        code = errno_of(lambda: os.pread(unseen, 10, 0))
        assert code == errno.ESTALE or os.pread(unseen, 600, 0) == b"second" * 100
        # The name disappears first; the dataset is closed after the requests under way in it.
        wait_for(lambda: errno_of(ask_folder) == errno.ESTALE, "the folder to be stale")
    finally:
        mapping.close()
        for descriptor in (seen, unseen, folder):
            os.close(descriptor)
    assert (own_mount / "other/7").read_bytes() == bytes([7]) * 50_000


# ---- the mount itself ----------------------------------------------------------------------------


@ALIKE_OVER_URING
def test_rule_25_mounting_answers_or_says_why(
    server: str, own_volume: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "mnt"
    directory.mkdir()
    done = run_cli(
        "mount", "--fuse", server, own_volume, directory, "--log", tmp_path / "log", "--mode", "400"
    )
    assert done.returncode == 0, done.stderr
    assert str(directory) in done.stderr
    assert (directory / "train/a").read_bytes() == b"first" * 100
    assert run_cli("umount", directory).returncode == 0
    no_volume = tmp_path / "none.img"
    no_volume.write_bytes(bytes(4 * MIB))
    for volume in (no_volume, tmp_path / "missing.img"):
        done = run_cli("mount", "--fuse", server, volume, directory, "--log", tmp_path / "log")
        assert done.returncode
        assert volume.name in done.stderr
        assert find_mount(directory) is None
    for option in (["--mode", "644"], ["--mode", "x"], ["--uid", "-2"]):
        assert run_cli("mount", "--fuse", server, own_volume, directory, *option).returncode == 2
        assert find_mount(directory) is None


@ALIKE_OVER_URING
@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT", "unmount"])
def test_rule_26_ends(server: str, own_volume: Path, tmp_path: Path, how: str) -> None:
    with mounted(own_volume, tmp_path / "mnt", tmp_path / "log", **served_by(server)) as mount:
        assert (mount / "train/a").read_bytes()
        if how == "unmount":
            unmount(mount.directory)
        else:
            os.kill(mount.pid, signal.Signals[how])
        wait_for_exit(mount.pid)
        assert find_mount(mount.directory) is None
        assert os.listdir(mount.directory) == []


@ALIKE_OVER_URING
@pytest.mark.parametrize("restart", [True, False])
def test_rule_26_ends_where_it_has_moved(
    server: str, own_volume: Path, tmp_path: Path, restart: bool
) -> None:
    above, moved = tmp_path / "above", tmp_path / "moved"
    above.mkdir()
    options = {**served_by(server), "restart": restart}
    with mounted(own_volume, above / "mnt", tmp_path / "log", **options) as mount:
        above.rename(moved)
        os.kill(mount.pid, signal.SIGTERM)
        wait_for_exit(mount.pid)
        wait_for(lambda: find_mount(moved / "mnt") is None, "the end of the mount")
        assert os.listdir(moved / "mnt") == []


@ALIKE_OVER_URING
def test_rule_26_ends_in_the_foreground(server: str, own_volume: Path, tmp_path: Path) -> None:
    directory = tmp_path / "mnt"
    directory.mkdir()
    command = [
        sys.executable,
        "-m",
        "dlfs.cli",
        "mount",
        "--fuse",
        server,
        "-f",
        own_volume,
        directory,
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            assert any("mounted on" in line for line in server.stderr)  # the memory comes first
            assert (directory / "train/a").read_bytes() == b"first" * 100
        finally:
            server.send_signal(signal.SIGINT)
        assert server.wait(SECONDS_MAX) == 0
    assert find_mount(directory) is None


def test_rule_27_killed_servers(server: str, own_volume: Path, tmp_path: Path) -> None:
    with mounted(own_volume, tmp_path / "mnt", tmp_path / "log", **served_by(server)) as first:
        if (keeper := parent_of(first.pid)) != 1:
            os.kill(keeper, signal.SIGKILL)
            wait_for_exit(keeper)
        os.kill(first.pid, signal.SIGKILL)
        wait_for_exit(first.pid)
        # Requests at the very end fail with what the kernel aborts them with.
        passing = {"uring": {errno.ECANCELED, errno.ECONNABORTED}, "native": {errno.ECONNABORTED}}
        while (failed := errno_of(lambda: os.listdir(first.directory))) != errno.ENOTCONN:
            assert failed in passing.get(server, ())
        with mounted(own_volume, first.directory, tmp_path / "log", **served_by(server)) as second:
            assert (second / "train/a").read_bytes() == b"first" * 100
        records = parse_mountinfo(mountpoint.MOUNTINFO.read_bytes())
        assert os.fsencode(first.directory) not in [record.mountpoint for record in records]


@ALIKE_OVER_URING
def test_rule_28_unsuitable_directories(
    server: str, own_volume: Path, own_mount: Mount, tmp_path: Path
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    missing, full, mounted = tmp_path / "missing", tmp_path / "full", own_mount.directory
    refusals: list[tuple[Path, type[Exception], str]] = [
        (missing, NotFoundError, f"no such directory; 'mkdir -p {missing}' makes it"),
        (full, UsageError, "got files in it; move them away, or mount elsewhere"),
        (full / "file", UsageError, "expected a directory, got a file"),
        (mounted, ExistsError, f"mounted there already; 'dlfs umount {mounted}' ends that mount"),
    ]
    from dlfs.mount.options import MountOptions
    from dlfs.mount.supervise.background import mount_volume

    options = MountOptions(fuse=server)
    for directory, error, message in refusals:
        with pytest.raises(error, match=re.escape(f"mount on {directory}: ") + ".*" + message):
            mount_volume(str(own_volume), directory, options, log=tmp_path / "log")
    assert (own_mount / "train/a").read_bytes() == b"first" * 100


def test_rule_29_unmounting(own_mount: Mount, tmp_path: Path) -> None:
    for directory in (tmp_path, Path("/proc"), tmp_path / "missing"):
        with pytest.raises(UsageError, match="expected a mount of DLFS"):
            unmount(directory)
    assert run_cli("umount", tmp_path).returncode == 2
    with open(own_mount / "train/a", "rb") as file:
        with pytest.raises(DeviceError, match="--lazy") as caught:
            unmount(own_mount.directory)
        assert caught.value.errno == errno.EBUSY
        assert run_cli("umount", "--lazy", own_mount.directory).returncode == 0
        assert find_mount(own_mount.directory) is None
        assert file.read() == b"first" * 100
    wait_for_exit(own_mount.pid)


@pytest.mark.root
def test_rule_29_unmounting_says_who_else_has_the_mount(own_mount: Mount) -> None:
    command = ["unshare", "--mount", "sh", "-c", "echo ready; exec sleep 60"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == b"ready\n"
            done = run_cli("umount", own_mount.directory)
            assert done.returncode == 0
            assert "its server serves on" in done.stderr
            assert f"process {other.pid} (s" in done.stderr
            seen = f"/proc/{other.pid}/root{own_mount.directory}/train/a"
            assert Path(seen).read_bytes() == b"first" * 100
        finally:
            other.kill()
    wait_for_exit(own_mount.pid)


@pytest.mark.root
@ALIKE_OVER_URING
def test_rule_30_other_users(server: str, own_volume: Path, open_folder: Path) -> None:
    def read_as_nobody() -> bytes:
        command = ["cat", open_folder / "mnt/train/a"]
        return subprocess.run(
            command, user=NOBODY, group=NOBODY, extra_groups=[], capture_output=True, check=False
        ).stdout

    with mounted(own_volume, open_folder / "mnt", open_folder / "log", **served_by(server)):
        assert read_as_nobody() == b""
    with mounted(
        own_volume, open_folder / "mnt", open_folder / "log", allow_other=True, **served_by(server)
    ):
        assert read_as_nobody() == b"first" * 100
    options = {"allow_other": True, "file_mode": 0o400}
    with mounted(
        own_volume, open_folder / "mnt", open_folder / "log", **options, **served_by(server)
    ):
        assert read_as_nobody() == b""


def test_rule_31_the_mount_table(world: World) -> None:
    line = next(
        line
        for line in mountpoint.MOUNTINFO.read_text().splitlines()
        if line.split(" ")[4] == str(world.mount.directory)
    )
    options, (kind, source) = line.split(" ")[5].split(","), line.split(" - ")[1].split(" ")[:2]
    assert (kind, source) == ("fuse.dlfs", "dlfs")
    assert {"ro", "nosuid", "nodev"} <= set(options)


@pytest.mark.root
@pytest.mark.usefixtures("fuse_for_all")
@ALIKE_OVER_URING
def test_rule_32_without_root(server: str, own_volume: Path, open_folder: Path) -> None:
    directory = open_folder / "own"
    directory.mkdir()
    os.chown(directory, NOBODY, NOBODY)
    volume = open_folder / "volume.img"
    volume.write_bytes(own_volume.read_bytes())
    os.chown(volume, NOBODY, NOBODY)
    (open_folder / "log").touch()
    os.chown(open_folder / "log", NOBODY, NOBODY)
    done = run_cli(
        "mount", "--fuse", server, volume, directory, "--log", open_folder / "log", prefix=AS_NOBODY
    )
    assert done.returncode == 0, done.stderr
    try:
        command = ["cat", directory / "train/a"]
        read = subprocess.run(
            command, user=NOBODY, group=NOBODY, extra_groups=[], capture_output=True, check=True
        )
        assert read.stdout == b"first" * 100
        done = run_cli(
            "mount", "--fuse", server, volume, directory, "--allow-other", prefix=AS_NOBODY
        )
        assert done.returncode
    finally:
        done = run_cli("umount", directory, prefix=AS_NOBODY)
    assert done.returncode == 0, done.stderr
    assert find_mount(directory) is None


def never_confirm(*_: object) -> None:
    """Wait for ever in place of a caller that has its mount, and would confirm it next.

    So that a caller is interrupted before it confirms, however late the interrupt is.
    """
    while True:
        select.select([], [], [], 0.05)


def test_rule_25_a_mount_whose_caller_was_killed_is_taken_back(
    own_volume: Path, tmp_path: Path
) -> None:
    directory, log = tmp_path / "mnt", tmp_path / "log"
    directory.mkdir()
    os.mkfifo(log)
    code = "import sys; from tests.fuse.test_semantics import never_confirm; "
    code += "from dlfs.mount.supervise import background; background.outcome = never_confirm; "
    code += "background.mount_volume(sys.argv[1], sys.argv[2], log=sys.argv[3])"
    command = [sys.executable, "-c", code, own_volume, directory, log]
    caller = subprocess.Popen(command, cwd=Path(__file__).parents[2])
    with log.open("rb") as said:  # the server begins
        caller.kill()
        caller.wait()
        assert b"was interrupted" in said.read()  # until it ends
    assert find_mount(directory) is None


def test_rule_25_an_interrupted_mount_is_taken_back(
    own_volume: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "outcome", never_confirm)
    directory, log = tmp_path / "mnt", tmp_path / "log"
    directory.mkdir()
    os.mkfifo(log)
    over, words = threading.Event(), list[bytes]()

    def interrupt() -> None:
        with log.open("rb") as said:  # the server begins
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            over.wait()
            words.append(said.read())  # until it ends

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            mount_volume(str(own_volume), directory, log=log)
        assert find_mount(directory) is None
    finally:
        over.set()
        thread.join()
    assert find_mount(directory) is None
    assert b"Broken pipe" not in words[0]  # it was not left to find out by itself


def test_rule_25_a_mount_is_taken_back_although_it_was_confirmed(
    own_volume: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    close, closings = background._close, list[object]()

    def interrupted(stream: IO[str]) -> None:
        closings.append(stream)
        if len(closings) == 1:
            raise KeyboardInterrupt
        close(stream)

    monkeypatch.setattr(background, "_close", interrupted)
    (tmp_path / "mnt").mkdir()
    with pytest.raises(KeyboardInterrupt):
        mount_volume(str(own_volume), tmp_path / "mnt", log=tmp_path / "log")
    assert find_mount(tmp_path / "mnt") is None
