"""SEMANTICS.md, the section on incoming, executed on a real mount."""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import random
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

import dlfs
from dlfs.errors import LockedError
from dlfs.mount.keeper import can_keep
from dlfs.mount.mountpoint import MOUNTINFO, find_mount, parse_mountinfo, unmount
from dlfs.mount.options import MountOptions
from dlfs.staging.protocol import SealStatus
from dlfs.units import KIB, MIB
from tests.fuse.mounting import (
    AS_NOBODY,
    Mount,
    Prepared,
    add_dataset,
    errno_of,
    mounted,
    run_cli,
    served_by,
    stopped,
    wait_for,
    wait_for_exit,
)
from tests.fuse.test_semantics import writes

pytestmark = pytest.mark.fuse

NOBODY = 65534
RENAMES = 2000
REPLACEMENTS = 500


@dataclass
class Writable:
    """A mount with incoming."""

    mount: Mount
    staging: Path

    def __truediv__(self, name: str | bytes) -> Path:
        return self.mount.directory / "incoming" / os.fsdecode(name)

    @property
    def root(self) -> Path:
        return self.mount.directory

    def begin(self, name: str, files: dict[str, bytes] | None = None) -> Path:
        """Write a dataset."""
        (self / name).mkdir()
        for path, data in (files or {}).items():
            file = self / name / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
        return self / name


REFUSED_NAMES = {
    "n" * 256: errno.ENAMETOOLONG,
    "n" * 245: errno.ENAMETOOLONG,
    "a@1": errno.EINVAL,
    "--help": errno.EINVAL,
    "a\nb": errno.EINVAL,
    " a": errno.EINVAL,
    "incoming": errno.EINVAL,
    "\udcff": errno.EINVAL,
}
"""Names that no new dataset may have, and what making one in ``incoming`` fails with."""


def make_volume(folder: Path, size_bytes: int = 64 * MIB) -> Path:
    volume = folder / "volume.img"
    dlfs.format_volume(str(volume), size_bytes=size_bytes)
    add_dataset(volume, "train", {b"large": b"sealed" * 1000, b"odd/x": b"x"})
    return volume


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Writable]:
    """A mount with incoming, for tests that use names of their own."""
    folder = tmp_path_factory.mktemp("incoming")
    with mounted(
        make_volume(folder), folder / "mnt", folder / "log", incoming=str(folder / "staging")
    ) as mount:
        yield Writable(mount, folder / "staging")


@pytest.fixture
def source(plain_volume: Prepared) -> Path:
    """A folder with all kinds of names and sizes."""
    return plain_volume.source


def status_of(directory: Path | int) -> SealStatus:
    return SealStatus.decode(os.getxattr(directory, "user.dlfs.seal"))


def seal(directory: Path, value: bytes = b"1") -> SealStatus:
    """Seal by the attribute, and wait for the end."""
    opened = os.open(directory, os.O_RDONLY)
    try:
        os.setxattr(opened, "user.dlfs.seal", value)
        wait_for(lambda: status_of(opened).state in ("open", "sealed"), "the seal")
        status = status_of(opened)
    finally:
        os.close(opened)
    if status.state == "sealed":
        root = directory.parents[1]
        wait_for(lambda: (root / f"{directory.name}@{status.version}").exists(), "the dataset")
        wait_for(lambda: not directory.exists(), "the end of the staged files")
    return status


def run(*command: str | Path, **options: object) -> None:
    subprocess.run([str(word) for word in command], check=True, **options)  # type: ignore[call-overload]


def same(one: Path, other: Path) -> bool:
    """Return True if two trees have the same names and bytes."""
    run("diff", "-r", one, other)
    return True


# ---- what it shows -------------------------------------------------------------------------------


def test_rule_33_incoming_holds_datasets(shared: Writable, plain_volume: Prepared) -> None:
    assert {"incoming", "train"} <= set(os.listdir(shared.root))
    directory = shared.begin("shown")
    assert "shown" in os.listdir(shared.root / "incoming")
    assert stat.S_ISDIR(directory.stat().st_mode)
    for call in (
        lambda: (shared / "file").touch(),
        lambda: (shared / "link").symlink_to("shown"),
        lambda: os.mkfifo(shared / "fifo"),
    ):
        assert errno_of(call) == errno.EPERM
    assert errno_of(lambda: (shared / "shown").mkdir()) == errno.EEXIST
    for name, code in REFUSED_NAMES.items():
        assert errno_of(lambda name=name: (shared / name).mkdir()) == code
        assert errno_of(lambda name=name: directory.rename(shared / name)) == code
    directory.rmdir()
    assert "shown" not in os.listdir(shared.root / "incoming")


def test_rule_34_the_sealed_stay_sealed(shared: Writable) -> None:
    found = {name: errno_of(call) for name, call in writes(shared.root / "train").items()}
    assert found == dict.fromkeys(found, errno.EROFS)
    assert errno_of((shared.root / "new").mkdir) == errno.EROFS
    assert (shared.root / "train/large").read_bytes() == b"sealed" * 1000
    record = find_mount(shared.root)
    assert record is not None
    assert {"ro", "nosuid", "nodev"} <= set(record.options.split(","))


# ---- writing -------------------------------------------------------------------------------------


def test_rule_35_files_as_everywhere(shared: Writable) -> None:
    top = shared.begin("files", {"a": b"0123456789", "d/e": b"deep"})
    with (top / "a").open("r+b", buffering=0) as file:
        assert os.pwrite(file.fileno(), b"xy", 4) == 2
        file.seek(3 * MIB)
        file.write(b"end")  # sparse
        os.fsync(file.fileno())
        assert os.fstat(file.fileno()).st_size == 3 * MIB + 3
        with mmap.mmap(file.fileno(), 4 * KIB) as mapped:
            mapped[8:10] = b"mm"
            mapped.flush()
    with (top / "a").open("ab") as file:
        file.write(b"+more")
    assert (top / "a").stat().st_blocks * 512 < MIB
    data = (top / "a").read_bytes()
    assert (data[:10], data[3 * MIB :], len(data)) == (b"0123xy67mm", b"end+more", 3 * MIB + 8)
    os.truncate(top / "a", 5)
    assert (top / "a").read_bytes() == b"0123x"
    (top / "a").write_bytes(b"overwritten")
    assert (top / "a").read_bytes() == b"overwritten"


def test_rule_35_names_and_links(shared: Writable) -> None:
    top = shared.begin("names", {"a": b"aa", "b": b"bb", "d/e": b"deep"})
    os.link(top / "a", top / "d/hard")
    assert (top / "a").stat().st_nlink == (top / "d/hard").stat().st_nlink == 2
    assert (top / "a").stat().st_ino == (top / "d/hard").stat().st_ino
    (top / "a").unlink()
    assert (top / "d/hard").read_bytes() == b"aa"
    (top / "soft").symlink_to("d/e")
    assert ((top / "soft").readlink(), (top / "soft").read_bytes()) == (Path("d/e"), b"deep")
    (top / "b").rename(top / "d/hard")  # over another
    assert (top / "d/hard").read_bytes() == b"bb"
    (top / "d").rename(top / "moved")
    assert sorted(os.listdir(top / "moved")) == ["e", "hard"]
    assert (top / "moved/e").read_bytes() == b"deep"
    assert errno_of((top / "moved").rmdir) == errno.ENOTEMPTY
    os.mkfifo(top / "fifo", 0o640)
    with socket.socket(socket.AF_UNIX) as listener:
        folder = os.open(top, os.O_RDONLY)
        listener.bind(f"/proc/self/fd/{folder}/socket")
        os.close(folder)
    kinds = {entry.name: stat.S_IFMT(entry.lstat().st_mode) for entry in top.iterdir()}
    assert kinds == {
        "soft": stat.S_IFLNK,
        "moved": stat.S_IFDIR,
        "fifo": stat.S_IFIFO,
        "socket": stat.S_IFSOCK,
    }
    with (top / "gone").open("w+b") as file:
        file.write(b"nameless")
        file.flush()
        (top / "gone").unlink()
        assert os.fstat(file.fileno()).st_nlink == 0
        os.ftruncate(file.fileno(), 4)
        assert os.pread(file.fileno(), 100, 0) == b"name"
    shutil.rmtree(top)
    assert not top.exists()


def test_rule_35_attributes(shared: Writable) -> None:
    top = shared.begin("attributes", {"a": b"aa"})
    (top / "soft").symlink_to("nowhere")
    (top / "a").chmod(0o4751)
    assert stat.S_IMODE((top / "a").stat().st_mode) == 0o4751
    os.utime(top / "a", ns=(10**18 + 1, 10**18 + 2))
    assert ((top / "a").stat().st_atime_ns, (top / "a").stat().st_mtime_ns) == (
        10**18 + 1,
        10**18 + 2,
    )
    os.utime(top / "soft", ns=(3, 4), follow_symlinks=False)
    assert (top / "soft").lstat().st_mtime_ns == 4
    top.chmod(0o700)
    os.utime(top, ns=(5, 6))
    assert (stat.S_IMODE(top.stat().st_mode), top.stat().st_mtime_ns) == (0o700, 6)
    if os.geteuid() == 0:
        os.chown(top / "a", 12, 34)
        os.chown(top / "soft", 56, 78, follow_symlinks=False)
        assert ((top / "a").stat().st_uid, (top / "a").stat().st_gid) == (12, 34)
        assert ((top / "soft").lstat().st_uid, (top / "soft").lstat().st_gid) == (56, 78)
    previous = os.umask(0o027)
    try:
        (top / "masked").touch(0o777)
        (top / "folder").mkdir(0o777)
    finally:
        os.umask(previous)
    assert stat.S_IMODE((top / "masked").stat().st_mode) == 0o750
    assert stat.S_IMODE((top / "folder").stat().st_mode) == 0o750


def test_rule_35_listings_while_things_change(shared: Writable) -> None:
    top = shared.begin("listed", {f"{i:04}": b"" for i in range(300)})
    with os.scandir(top) as entries:
        first = next(entries).name
        for name in os.listdir(top):
            if name != first and int(name) % 2:
                (top / name).unlink()
        others = {entry.name for entry in entries}
    assert {f"{i:04}" for i in range(0, 300, 2)} <= others | {first}
    assert {int(name) % 2 for name in os.listdir(top)} <= {0, int(first) % 2}


@pytest.mark.parametrize("looks", ["descriptor", "other name", "replaced name"])
def test_rule_35_a_file_is_found_while_it_is_renamed(shared: Writable, looks: str) -> None:
    top = shared.begin(f"renamed-{looks.partition(' ')[0]}", {"a": b"a"})
    os.link(top / "a", top / "other")

    def rename() -> None:
        for number in range(RENAMES):
            if looks == "replaced name":
                (top / "new").write_bytes(b"%d" % number)
                os.rename(top / "new", top / "always")
            else:
                os.rename(top / "ab"[number % 2], top / "ba"[number % 2])

    (top / "always").touch()
    with (top / "a").open("rb") as file, ThreadPoolExecutor(1) as pool:
        renaming = pool.submit(rename)
        look: dict[str, Callable[[], object]] = {
            "descriptor": lambda: os.fstat(file.fileno()),
            "other name": lambda: (os.stat(top / "other"), (top / "other").read_bytes()),
            "replaced name": lambda: os.stat(top / "always"),
        }
        failures = []
        while not renaming.done():
            failures.append(errno_of(look[looks]))
        renaming.result()
    found = {errno.errorcode.get(number, "none") for number in failures}
    assert found == {"none"}


@pytest.mark.parametrize("removes", [False, True], ids=["replaced", "removed"])
def test_rule_35_a_file_without_a_name_opens(shared: Writable, removes: bool) -> None:
    top = shared.begin(f"unlinked-{removes}", {"name": b"old", "new": b"another"})
    # A descriptor that is no open file, as in the kernel between the look-up and the open.
    found = os.open(top / "name", os.O_PATH)
    try:
        if removes:
            (top / "name").unlink()
        else:
            os.rename(top / "new", top / "name")
        file = Path(f"/proc/self/fd/{found}")
        assert file.read_bytes() == b"old"
        file.chmod(0o640)
        os.utime(file, ns=(3, 5))
        status = os.fstat(found)
        assert (stat.S_IMODE(status.st_mode), status.st_mtime_ns) == (0o640, 5)
        os.truncate(file, 2)
        with file.open("ab") as opened:
            opened.write(b" lines")
        assert file.read_bytes() == b"ol lines"
        assert seal(top).samples_done == 1
        assert file.read_bytes() == b"ol lines"
    finally:
        os.close(found)


@pytest.mark.parametrize("removes", [False, True], ids=["renames", "unlinks too"])
def test_rule_35_a_name_that_is_replaced_all_the_time_opens(
    shared: Writable, removes: bool
) -> None:
    """Programs that save checkpoints replace a file, or a symbolic link to the last one."""
    versions = {f"new/{number}": b"%d" % (number % 10) * KIB for number in range(REPLACEMENTS)}
    top = shared.begin(f"replaced-{removes}", {"name": b"0" * KIB, "0": b"0", "1": b"1"} | versions)
    (top / "link").symlink_to("0")
    for number in range(REPLACEMENTS):
        (top / "new" / f"link{number}").symlink_to(str(number % 2))
    replaced = threading.Event()

    def replace() -> None:
        try:
            for number in range(REPLACEMENTS):
                if removes:
                    (top / "name").unlink()
                os.rename(top / "new" / str(number), top / "name")
                os.rename(top / "new" / f"link{number}", top / "link")
        finally:
            replaced.set()

    def read(name: str) -> set[str]:
        """Read a file until the last replacement. Return the outcomes."""
        outcomes = set()
        while not replaced.is_set():
            try:
                data = (top / name).read_bytes()
            except OSError as error:
                outcomes.add(errno.errorcode[error.errno or 0])
            else:
                outcomes.add("whole" if data == data[:1] * len(data) else "torn")
        return outcomes

    with ThreadPoolExecutor(4) as pool:
        names = ["name", "name", "link"]
        readers = [pool.submit(read, name) for name in names]
        pool.submit(replace).result()
        for name, reader in zip(names, readers, strict=True):
            without_name = {"ENOENT"} if removes and name == "name" else set()
            assert {"whole"} <= reader.result() <= {"whole"} | without_name


def test_rule_36_files_that_cannot_be_samples(shared: Writable) -> None:
    top = shared.begin("refused", {"a": b""})
    if os.geteuid() == 0:
        device = os.makedev(1, 3)
        assert errno_of(lambda: os.mknod(top / "null", stat.S_IFCHR, device)) == errno.EPERM
    assert errno_of(lambda: os.setxattr(top / "a", "user.mine", b"1")) == errno.EOPNOTSUPP
    assert os.listxattr(top) == os.listxattr(top / "a") == []
    folder = os.open(top, os.O_RDONLY)
    for _ in range(15):  # 16 x 255 bytes and 15 slashes are 4095
        os.mkdir("n" * 255, dir_fd=folder)
        below = os.open("n" * 255, os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = below
    flags = os.O_WRONLY | os.O_CREAT
    os.close(os.open("m" * 255, flags, dir_fd=folder))
    os.mkdir("n", dir_fd=folder)
    for call in (
        lambda: os.open("n/" + "m" * 254, flags, dir_fd=folder),
        lambda: os.mkdir("n/" + "m" * 254, dir_fd=folder),
        lambda: os.symlink("x", "n/" + "m" * 254, dir_fd=folder),
        lambda: os.rename("n", "m" * 256, src_dir_fd=folder, dst_dir_fd=folder),
    ):
        assert errno_of(call) == errno.ENAMETOOLONG
    os.close(folder)
    status = seal(top)
    assert (status.samples_done, status.empty_directories) == (2, 1)


@pytest.mark.root
def test_rule_37_owners_and_modes(tmp_path: Path, open_folder: Path) -> None:
    volume, directory = make_volume(tmp_path), open_folder / "mnt"
    options = {"allow_other": True, "incoming": str(tmp_path / "staging")}
    with mounted(volume, directory, tmp_path / "log", **options) as mount:
        incoming = mount / "incoming"
        write = [*AS_NOBODY[:6], "sh", "-c", f"mkdir {incoming}/mine && echo x >{incoming}/mine/x"]
        assert subprocess.run(write, stderr=subprocess.DEVNULL).returncode
        incoming.chmod(0o1777)
        assert stat.S_IMODE(incoming.stat().st_mode) == 0o1777
        run(*write)
        run(*AS_NOBODY[:6], "ln", "-s", "x", incoming / "mine/link")
        run(*AS_NOBODY[:6], "mkfifo", incoming / "mine/fifo")
        for path in ("mine", "mine/x", "mine/link", "mine/fifo"):
            found = (incoming / path).lstat()
            assert (found.st_uid, found.st_gid) == (NOBODY, NOBODY)
        grouped = incoming / "grouped"
        grouped.mkdir()
        os.chown(grouped, 0, 4321)
        grouped.chmod(0o2777)
        run(*AS_NOBODY[:6], "sh", "-c", f"mkdir {grouped}/d && touch {grouped}/d/f")
        for path, mode in ((grouped / "d", 0o2755), (grouped / "d/f", 0o644)):
            assert (path.stat().st_uid, path.stat().st_gid) == (NOBODY, 4321)
            assert stat.S_IMODE(path.stat().st_mode) == mode
        (grouped / "secret").write_bytes(b"s")
        (grouped / "secret").chmod(0o600)
        reading = subprocess.run([*AS_NOBODY[:6], "cat", grouped / "secret"], capture_output=True)
        assert b"Permission denied" in reading.stderr
        grouped.chmod(0o755)  # who may not write may not seal
        command = [*AS_NOBODY[:6], "setfattr", "-n", "user.dlfs.seal", "-v", "1", grouped]
        assert b"Permission denied" in subprocess.run(command, capture_output=True).stderr


@pytest.mark.root
@pytest.mark.parametrize("passed", [True, False])
def test_rule_37_writes_of_others_clear_the_bits_that_set_ids(
    tmp_path: Path, open_folder: Path, passed: bool
) -> None:
    volume, directory = make_volume(tmp_path), open_folder / "mnt"
    options = {"allow_other": True, "incoming": str(tmp_path / "staging"), "pass_through": passed}
    with mounted(volume, directory, tmp_path / "log", **options) as mount:
        top = Writable(mount, tmp_path / "staging").begin("ids")
        for name, script in {
            "write": "echo y >>$0",
            "truncate": "truncate -s 1 $0",
            "open": ": >$0",
        }.items():
            file = top / name
            file.write_bytes(b"x")
            for mode, kept in ((0o6777, 0o777), (0o2767, 0o2767)):
                file.chmod(mode)
                run(*AS_NOBODY[:6], "sh", "-c", script, file)
                assert (name, oct(stat.S_IMODE(file.stat().st_mode))) == (name, oct(kept))


@pytest.mark.root
def test_rule_37_a_server_of_a_user(fuse_for_all: None, open_folder: Path) -> None:
    os.chown(open_folder, NOBODY, NOBODY)
    volume = make_volume(open_folder)
    os.chown(volume, NOBODY, NOBODY)
    (open_folder / "mnt").mkdir()
    os.chown(open_folder / "mnt", NOBODY, NOBODY)
    done = run_cli("mount", volume, open_folder / "mnt", "--incoming", open_folder / "staging",
                   "--log", open_folder / "log", prefix=AS_NOBODY)  # fmt: skip
    assert done.returncode == 0, done.stderr
    incoming = open_folder / "mnt/incoming"
    script = f"mkdir {incoming}/u && echo text >{incoming}/u/x"
    try:
        run(*AS_NOBODY[:6], "sh", "-c", script)
        sealed = run_cli("seal", open_folder / "mnt", "u", prefix=AS_NOBODY)
        assert sealed.returncode == 0, sealed.stderr
    finally:
        ended = run_cli("umount", open_folder / "mnt", prefix=AS_NOBODY)
    assert ended.returncode == 0, ended.stderr
    wait_for(
        lambda: find_mount(open_folder / "staging/mount") is None, "the end of the area's mount"
    )
    with dlfs.open(str(volume)) as opened, opened["u"] as dataset:
        assert dataset.get("x") == b"text\n"


# ---- tools ---------------------------------------------------------------------------------------


def test_rule_38_tools(shared: Writable, source: Path, tmp_path: Path) -> None:
    tools: dict[str, Callable[[Path], None]] = {
        "cp-r": lambda to: run("cp", "-r", source, to),
        "cp-a": lambda to: run("cp", "-a", source, to),
        "tar": lambda to: _untar(source, to),
        "rsync": lambda to: run("rsync", "-a", f"{source}/", f"{to}/"),
    }
    for name, write in tools.items():
        if name == "rsync" and not shutil.which("rsync"):
            pytest.skip("rsync is not installed")
        write(shared / name)
        assert same(source, shared / name)
        if name == "rsync":  # again, with a change: temporary files, renamed
            (shared / name / "large").write_bytes(b"differs")
            write(shared / name)
        assert seal(shared / name).samples_done == sum(f.is_file() for f in source.rglob("*"))
        assert same(source, shared.root / name)
    run("cp", "-r", shared.root / "tar", shared / "again")  # from what is sealed
    assert same(source, shared / "again")
    run("mv", shared / "again/odd", shared / "again/even")
    assert sorted(os.listdir(shared / "again/even")) == sorted(os.listdir(source / "odd"))


def _untar(source: Path, target: Path) -> None:
    target.mkdir()
    with subprocess.Popen(["tar", "c", "-C", source, "."], stdout=subprocess.PIPE) as archive:
        run("tar", "x", "-C", target, stdin=archive.stdout)


def test_rule_38_a_generator_with_threads(shared: Writable) -> None:
    top = shared.begin("generated")
    draw = random.Random(11)
    files = {f"{i % 8}/{i:04}": draw.randbytes(draw.randrange(3000)) for i in range(1000)}
    for number in range(8):
        (top / str(number)).mkdir()

    def write(path: str) -> None:
        data = files[path]
        target = top / path
        if len(data) % 3 == 0:  # beside, then renamed
            target = top / f"{path}.part"
        with target.open("wb") as file:
            file.write(data[: len(data) // 2])
        with target.open("ab") as file:
            file.write(data[len(data) // 2 :])
        if len(data) % 3 == 0:
            target.rename(top / path)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(write, files))
    assert seal(top, b"layout=path seed=9").samples_done == len(files)
    with dlfs.open(str(shared.mount.volume)) as volume, volume["generated"] as dataset:
        assert {p: dataset.get(p) for p in files} == files
        assert (dataset.info.layout, dataset.info.seed) == ("path", 9)


def test_rule_39_renames_of_datasets(shared: Writable) -> None:
    one = shared.begin("one", {"d/x": b"x"})
    two = shared.begin("two", {"y": b"y"})
    assert errno_of(lambda: one.rename(two)) == errno.ENOTEMPTY
    empty = shared.begin("empty")
    one.rename(empty)
    assert not one.exists()
    assert (empty / "d/x").read_bytes() == b"x"
    (empty / "d").rename(two / "d")  # between datasets
    assert (two / "d/x").read_bytes() == b"x"
    assert errno_of(lambda: (two / "d").rename(one)) == errno.EXDEV
    assert errno_of(lambda: empty.rename(two / "e")) == errno.EXDEV
    assert errno_of(two.rmdir) == errno.ENOTEMPTY
    empty.rmdir()
    large = shared.root / "train/large"
    assert errno_of(lambda: os.link(large, two / "linked")) == errno.EXDEV
    assert errno_of(lambda: large.rename(two / "moved")) == errno.EXDEV
    assert errno_of(lambda: (two / "y").rename(shared.root / "train/y")) == errno.EXDEV
    run("mv", two / "d", one)  # mv copies then
    assert (one / "x").read_bytes() == b"x"


def test_rule_39_no_file_lies_in_two_datasets(shared: Writable) -> None:
    """Else it could be written through one of them while the other is sealed."""
    one, two = shared.begin("names", {"a": b"a", "b": b"b"}), shared.begin("others")
    with (one / "a").open("ab"):
        assert errno_of(lambda: os.link(one / "a", two / "a")) == errno.EXDEV
        assert errno_of(lambda: os.setxattr(one, "user.dlfs.seal", b"1")) == errno.EBUSY
    os.link(one / "a", one / "twin")
    assert errno_of(lambda: (one / "twin").rename(two / "a")) == errno.EXDEV
    (one / "b").rename(two / "b")
    run("mv", one / "twin", two / "a")  # mv copies then
    assert sorted(os.listdir(two)) == ["a", "b"]
    assert ((two / "a").stat().st_nlink, (one / "a").stat().st_nlink) == (1, 1)


def test_rule_39_directories_with_hard_links_between_datasets(shared: Writable) -> None:
    files = {"a": b"a", "d/e/b": b"b", "d/c": b"c"}
    one, two = shared.begin("linked", files), shared.begin("target")
    os.link(one / "a", one / "d/e/a")
    assert errno_of(lambda: (one / "d").rename(two / "d")) == errno.EXDEV
    assert (one / "a").stat().st_nlink == 2
    run("mv", one / "d", two)  # mv copies then
    assert ((two / "d/e/a").read_bytes(), (two / "d/e/a").stat().st_nlink) == (b"a", 1)
    os.link(two / "d/e/a", two / "d/twin")
    before = (two / "d/twin").stat()
    (two / "d").rename(one / "all")  # with all names of the file
    assert (one / "all/twin").stat().st_ino == (one / "all/e/a").stat().st_ino == before.st_ino
    (one / "all/e/a").unlink()
    (one / "all/twin").write_bytes(b"written")
    wait_for(lambda: (one / "all/twin").stat().st_nlink == 1, "the link count")
    assert seal(one).samples_done == 4
    assert (shared.root / "linked/all/twin").read_bytes() == b"written"


# ---- sealing -------------------------------------------------------------------------------------


def test_rule_40_sealing(shared: Writable, source: Path) -> None:
    top = shared.begin("sealed", {"a": b"old"})
    run("setfattr", "-n", "user.dlfs.seal", "-v", "1", top)
    wait_for(lambda: (shared.root / "sealed").exists() and not top.exists(), "the dataset")
    assert (shared.root / "sealed/a").read_bytes() == b"old"
    top = shared.begin("sealed", {"a": b"new", "b/c": b"more"})
    done = run_cli("seal", shared.root, "sealed", "--layout", "path", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["version"], report["samples"], report["bytes"]) == (2, 2, 7)
    wait_for(lambda: (shared.root / "sealed/b/c").exists(), "the new version")
    assert (shared.root / "sealed/a").read_bytes() == b"new"
    assert (shared.root / "sealed@1/a").read_bytes() == b"old"
    assert run_cli("seal", shared.root, "sealed").returncode == 3  # there is none now


def test_rule_40_sealing_nothing(shared: Writable) -> None:
    top = shared.begin("nothing")
    (top / "folder").mkdir()
    done = run_cli("seal", shared.root, "nothing")
    assert done.returncode == 3
    assert "import nothing: expected at least one sample, got none: it holds 1 x dir" in done.stderr
    assert status_of(top).state == "open"
    assert seal(top, b"allow_empty=yes").state == "sealed"


def test_rule_41_options(shared: Writable) -> None:
    top = shared.begin("options", {"a": b"a", "d/b": b"b"})
    for value in (b"2", b"layout=fast", b"seed=-1", b"seed=" + b"9" * 30, b"links=follow",
                  b"{", b'{"links": 1}', b"other=1", b"x" * 2000, b"[" * 900):  # fmt: skip
        assert errno_of(lambda v=value: os.setxattr(top, "user.dlfs.seal", v)) == errno.EINVAL
    with pytest.raises(OSError, match="Invalid argument"):
        os.setxattr(top, "user.dlfs.seal", b"allow_empty=1")
    for place in (top / "d", top / "a", shared.root / "incoming"):
        assert errno_of(lambda p=place: os.setxattr(p, "user.dlfs.seal", b"1")) == errno.EINVAL
    assert seal(top, b'{"layout": "path", "seed": 3}').state == "sealed"
    with dlfs.open(str(shared.mount.volume)) as volume, volume["options"] as dataset:
        assert (dataset.info.layout, dataset.info.seed) == ("path", 3)
    for wrong in (["seal", shared.root.parent, "x"], ["seal", shared.root, "a/b"]):
        assert run_cli(*wrong).returncode == 2


def test_rule_42_status(shared: Writable) -> None:
    top = shared.begin("status", {"a": b"a" * 100})
    opened = os.open(top, os.O_RDONLY)
    try:
        assert status_of(opened).state == "open"
        assert json.loads(os.getxattr(opened, "user.dlfs.incoming"))["file_bytes"] == 100
        seal(top)
        status = status_of(opened)
        assert (status.state, status.version, status.bytes_done) == ("sealed", 1, 100)
        assert errno_of(lambda: os.listdir(opened)) == errno.ESTALE
    finally:
        os.close(opened)


def test_rule_43_open_files(shared: Writable) -> None:
    top = shared.begin("busy", {"a": b"a", "d/b": b"b"})
    with (top / "d/b").open("ab"), (top / "a").open("rb"):
        assert errno_of(lambda: os.setxattr(top, "user.dlfs.seal", b"1")) == errno.EBUSY
        assert "'busy/d/b' is open for writing" in (status_of(top).error or "")
        refused = run_cli("seal", shared.root, "busy")
        assert (refused.returncode, "'busy/d/b'" in refused.stderr) == (5, True)
        (top / "c").write_bytes(b"it goes on")
    with (top / "e").open("wb") as nameless:
        (top / "e").unlink()
        assert seal(top).samples_done == 3
        nameless.write(b"to nobody")


def test_rule_43_a_name_that_the_kernel_has_not_looked_up(shared: Writable) -> None:
    top = shared.begin("unknown", {"a": b"old", "b": b"b", "d/e": b"e"})
    (shared.staging / "datasets/unknown/files/d/other").hardlink_to(
        shared.staging / "datasets/unknown/files/a"
    )
    opened = os.open(top / "a", os.O_WRONLY)
    read = os.open(top / "b", os.O_RDONLY)
    try:
        (top / "a").unlink()
        assert os.fstat(opened).st_nlink == 1
        assert errno_of(lambda: os.setxattr(top, "user.dlfs.seal", b"1")) == errno.EBUSY
        assert "'unknown/d/other' is open for writing" in (status_of(top).error or "")
        assert errno_of(lambda: os.setxattr(top, "user.dlfs.discard", b"1")) == errno.EBUSY
        os.pwrite(opened, b"new", 0)
    finally:
        os.close(opened)
        os.close(read)
    assert seal(top).samples_done == 3
    assert (shared.root / "unknown/d/other").read_bytes() == b"new"


def test_rule_44_frozen(shared: Writable) -> None:
    top = shared.begin("frozen", {"d/a": b"a", "d/b": b"b"})
    calls = changes(top / "d")
    files = [(top / "d/a").open("r+b") for _ in range(2 * len(calls))]
    found = {}
    with ThreadPoolExecutor(1) as threads:
        request = threads.submit(errno_of, lambda: os.setxattr(top, "user.dlfs.seal", b"1"))
        wait_for(lambda: request.done() or status_of(top).state == "waiting", "the request")
        for name, call in calls.items():
            found[name] = errno_of(call)
            files.pop().close()  # or the server would give up waiting
        assert (top / "d/b").read_bytes() == b"b"
        while files:
            files.pop().close()
    assert request.result() == 0
    assert found == dict.fromkeys(found, errno.EBUSY)
    wait_for(lambda: (shared.root / "frozen/d/a").exists() and not top.exists(), "the dataset")
    assert sorted(os.listdir(shared.root / "frozen/d")) == ["a", "b"]


def changes(top: Path) -> dict[str, Callable[[], object]]:
    """Every way to change something below a dataset, and the dataset's name."""
    file, new = top / "a", top / "new"
    return {
        "open to write": lambda: os.open(file, os.O_WRONLY),
        "open to truncate": lambda: os.open(file, os.O_RDONLY | os.O_TRUNC),
        "create": lambda: os.open(new, os.O_WRONLY | os.O_CREAT),
        "truncate": lambda: os.truncate(file, 0),
        "mkdir": new.mkdir,
        "mkfifo": lambda: os.mkfifo(new),
        "unlink": file.unlink,
        "rename": lambda: file.rename(new),
        "link": lambda: os.link(file, new),
        "symlink": lambda: new.symlink_to("x"),
        "chmod": lambda: file.chmod(0o600),
        "utimes": lambda: os.utime(top),
        "rename all": lambda: top.parent.rename(top.parent.with_name("other")),
    }


def test_rule_45_files_that_are_left_out(shared: Writable, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    top = shared.begin("left", {"a": b"a", "d/b": b"b"})
    (top / "out").symlink_to(tmp_path / "secret")
    (top / "d/in").symlink_to("../a")
    (top / "folder").symlink_to("/etc")
    (top / "empty/er").mkdir(parents=True)
    os.mkfifo(top / "fifo")
    os.link(top / "a", top / "hard")
    status = seal(top)
    assert status.state == "open"
    assert "left/" in (status.error or "")
    assert "symbolic links" in (status.error or "")
    assert str(shared.staging) not in (status.error or "")
    done = run_cli("seal", shared.root, "left", "--skip-links")
    assert done.returncode == 0, done.stderr
    for line in ("3 x symbolic link", "1 x special file"):
        assert line in done.stderr
    with dlfs.open(str(shared.mount.volume)) as volume, volume["left"] as dataset:
        assert dict(zip(("a", "d/b", "hard"), dataset.read([0, 1, 2]), strict=True)) == {
            "a": b"a",
            "d/b": b"b",
            "hard": b"a",
        }


def test_rule_46_two_at_once(shared: Writable, source: Path) -> None:
    names = [f"both{number}" for number in range(3)]
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda name: run("cp", "-r", source, shared / name), names))
        statuses = list(threads.map(lambda name: seal(shared / name), names))
    assert [status.state for status in statuses] == ["sealed"] * 3
    for name in names:
        assert same(source, shared.root / name)


def test_rule_47_a_seal_that_fails(tmp_path: Path) -> None:
    volume = make_volume(tmp_path, 16 * MIB)
    options = {"incoming": str(tmp_path / "staging")}
    with mounted(volume, tmp_path / "mnt", tmp_path / "log", **options) as mount:
        here = Writable(mount, tmp_path / "staging")
        top = here.begin("big", {"a": bytes(20 * MIB)})
        before = dlfs.open(str(volume)).generation
        status = seal(top)
        assert (status.state, status.kind) == ("open", "SpaceError")
        assert "free space" in (status.error or "")
        assert run_cli("seal", mount.directory, "big").returncode == 6
        (top / "a").write_bytes(b"smaller")
        with dlfs.open(str(volume)) as opened:
            assert opened.generation == before
            with opened.writer("other") as writer:
                writer.add("x", b"")
                refused = run_cli("seal", mount.directory, "big")
                assert refused.returncode == 5
                assert f"pid {os.getpid()}" in refused.stderr
        assert seal(top).state == "sealed"
        assert (mount / "big/a").read_bytes() == b"smaller"


# ---- crashes -------------------------------------------------------------------------------------

_WRITER = """
import random, sys
from pathlib import Path
top, seed = Path(sys.argv[1]), int(sys.argv[2])
draw = random.Random(seed)
for number in range(100_000):
    data = draw.randbytes(draw.randrange(20_000))
    with (top / f"{number % 7}" / f"{number:05}").open("wb") as file:
        file.write(data)
    print(number, flush=True)
"""


@pytest.mark.parametrize("seed", range(2))
def test_rule_48_killed_while_writing(tmp_path: Path, seed: int) -> None:
    volume = make_volume(tmp_path)
    options = {"incoming": str(tmp_path / "staging"), "restart": False}
    draw = random.Random(seed)
    with mounted(volume, tmp_path / "mnt", tmp_path / "log", **options) as mount:
        top = Writable(mount, tmp_path / "staging").begin("train")
        for number in range(7):
            (top / str(number)).mkdir()
        command = [sys.executable, "-c", _WRITER, str(top), str(seed)]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as writer:
            assert writer.stdout is not None
            written = 0
            for _ in range(draw.randrange(20, 150)):
                written = int(writer.stdout.readline()) + 1
            os.kill(mount.pid, signal.SIGKILL)
            written = max([written, *(int(line) + 1 for line in writer.stdout)])
        wait_for_exit(mount.pid)
        with mounted(volume, tmp_path / "mnt", tmp_path / "log2", **options) as again:
            log = tmp_path / "log2"
            wait_for(lambda: "'train' is not sealed" in log.read_text(), "the report")
            count = sum(file.is_file() for file in (again / "incoming/train").rglob("*"))
            assert written <= count <= written + 1
            assert f"{count:,} files" in log.read_text()
            listed = run_cli("incoming", again.directory, "--json")
            (done,) = json.loads(listed.stdout)["incoming"]
            assert (done["name"], done["files"], done["state"]) == ("train", count, "open")
            assert f"{count:,}" in run_cli("incoming", again.directory).stdout
            data = random.Random(seed)
            for number in range(written):
                expected = data.randbytes(data.randrange(20_000))
                path = f"incoming/train/{number % 7}/{number:05}"
                assert (again / path).read_bytes() == expected
            assert seal(again / "incoming/train").version == 2


def test_rule_49_killed_while_sealing(tmp_path: Path, source: Path) -> None:
    volume = make_volume(tmp_path, 256 * MIB)
    options = {"incoming": str(tmp_path / "staging"), "restart": False}
    draw = random.Random(5)
    for number in range(4):
        name = f"round{number}"
        with mounted(volume, tmp_path / "mnt", tmp_path / f"log{number}", **options) as mount:
            top = Writable(mount, tmp_path / "staging").begin(name)
            run("cp", "-r", source, top / "all")
            (top / "zeros").write_bytes(bytes(16 * MIB))
            opened = os.open(top, os.O_RDONLY)
            os.setxattr(opened, "user.dlfs.seal", b"layout=path")
            share = draw.random()

            def far_enough(opened: int = opened, share: float = share) -> bool:
                status = status_of(opened)
                total = status.bytes_total or 1 << 62
                return status.state == "sealed" or status.bytes_done >= share * total

            wait_for(far_enough, "progress")
            os.kill(mount.pid, signal.SIGKILL)
            wait_for_exit(mount.pid)
            os.close(opened)
        again = tmp_path / f"again{number}"
        with mounted(volume, tmp_path / "mnt", again, **options) as mount:
            sealed = (mount / name).exists()
            assert (mount / "incoming" / name).exists() != sealed
            where = mount / name if sealed else mount / "incoming" / name
            assert same(source, where / "all")
            assert (where / "zeros").read_bytes() == bytes(16 * MIB)
            assert not (mount / f"{name}@2").exists()
            if not sealed:
                assert seal(where).version == 1
    assert os.listdir(tmp_path / "staging/datasets") == []


def test_rule_49_the_mount_of_a_killed_server_is_unmounted(tmp_path: Path) -> None:
    volume = make_volume(tmp_path)
    options = {"incoming": str(tmp_path / "staging"), "restart": False}
    with mounted(volume, tmp_path / "mnt", tmp_path / "log", **options) as mount:
        os.kill(mount.pid, signal.SIGKILL)
        wait_for_exit(mount.pid)
        unmount(mount.directory)
        assert find_mount(mount.directory) is None
        assert find_mount(mount.directory / "incoming") is None


def test_rule_50_discarding(shared: Writable) -> None:
    top = shared.begin("unwanted", {"a": b"a", "d/b": b"b"})
    with (top / "a").open("ab"):
        assert errno_of(lambda: os.setxattr(top, "user.dlfs.discard", b"1")) == errno.EBUSY
        assert run_cli("incoming", shared.root, "--discard", "unwanted").returncode == 5
    done = run_cli("incoming", shared.root, "--discard", "unwanted")
    assert done.returncode == 0, done.stderr
    wait_for(lambda: not top.exists(), "the end of it")
    shared.begin("unwanted").rmdir()
    assert run_cli("incoming", shared.root, "--discard", "unwanted").returncode == 3
    wait_for(lambda: os.listdir(shared.staging / "removed") == [], "the space")


def test_rule_51_staging_areas_are_not_shared(shared: Writable, tmp_path: Path) -> None:
    from dlfs.staging.area import StagingArea

    with dlfs.open(str(shared.mount.volume)) as volume:
        with pytest.raises(LockedError, match=rf"process {shared.mount.pid} uses it"):
            StagingArea(shared.staging, volume.uuid, wait_seconds=0)
        with StagingArea(tmp_path / "staging", volume.uuid):
            pass
    other = make_volume(tmp_path)
    (tmp_path / "mnt").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    for staging, reason in (("staging", "expected one of volume"), ("full", "other files in it")):
        refused = run_cli("mount", other, tmp_path / "mnt", "--incoming", tmp_path / staging)
        assert (refused.returncode, reason in refused.stderr) == (2, True)
    assert find_mount(tmp_path / "mnt") is None


@pytest.mark.root
def test_rule_52_a_full_staging_area(tmp_path: Path) -> None:
    volume, staging = make_volume(tmp_path), tmp_path / "staging"
    staging.mkdir()
    run("mount", "-t", "tmpfs", "-o", "size=1m", "none", staging)
    try:
        options = {"incoming": str(staging)}
        with mounted(volume, tmp_path / "mnt", tmp_path / "log", **options) as mount:
            top = Writable(mount, staging).begin("large")
            assert errno_of(lambda: (top / "a").write_bytes(bytes(2 * MIB))) == errno.ENOSPC
            (top / "a").unlink()
            (top / "a").write_bytes(b"small")
            assert seal(top).samples_done == 1
    finally:
        run("umount", staging)


def test_rule_53_a_volume_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    mountpoint, staging, folder = tmp_path / "mnt", tmp_path / "staging", tmp_path / "pair"
    mountpoint.mkdir()
    folder.mkdir()
    pair = [str(folder / "a.img"), str(folder / "b.img")]
    dlfs.format_volume(pair, size_bytes=16 * MIB, replicas=2)

    def refused(uri: str) -> str:
        done = run_cli("mount", uri, mountpoint, "--incoming", staging)
        assert done.returncode == 7
        assert "mount with --incoming, whose datasets are sealed into the volume" in done.stderr
        assert not os.path.ismount(mountpoint)
        assert not staging.exists()
        return done.stderr

    assert "expected all 2 members, but member 1" in refused(pair[0])
    run("mount", "--bind", folder, folder)
    try:
        run("mount", "-o", "remount,bind,ro", folder)
        assert "Read-only file system" in refused(",".join(pair))
    finally:
        run("umount", folder)
    with mounted(folder / "a.img", mountpoint, tmp_path / "log"):
        pass  # it can still be read


# ---- two file systems ----------------------------------------------------------------------------


def mounts_below(directory: Path) -> list[tuple[str, str]]:
    """Return the path and type of each mount at or below a directory."""
    top = os.fsencode(directory)
    found = [r for r in parse_mountinfo(MOUNTINFO.read_bytes()) if r.mountpoint.startswith(top)]
    return [(os.fsdecode(r.mountpoint), r.file_system_type) for r in found]


@pytest.mark.parametrize("end", ["umount", "fusermount3", "lazy", "SIGTERM"])
def test_rule_55_both_come_and_go(tmp_path: Path, server: str, end: str) -> None:
    volume, mnt, staging = make_volume(tmp_path), tmp_path / "mnt", tmp_path / "staging"
    options = {"incoming": str(staging), **served_by(server)}
    with mounted(volume, mnt, tmp_path / "log", **options) as mount:
        types = [(str(mnt), "fuse.dlfs"), (str(mnt / "incoming"), "fuse.dlfs-incoming")]
        assert mounts_below(mnt) == types
        Writable(mount, staging).begin("new", {"a": b"a"})
        assert os.statvfs(mnt / "incoming").f_blocks == os.statvfs(staging).f_blocks
        assert os.stat(mnt / "incoming").st_dev != os.stat(mnt).st_dev
        assert run_cli("umount", mnt / "incoming").returncode == 2
        if end == "umount":
            with (mnt / "incoming/new/a").open("rb"):
                assert run_cli("umount", mnt).returncode
            assert mounts_below(mnt) == types
            assert run_cli("umount", mnt).returncode == 0
        elif end == "fusermount3":
            run("fusermount3", "-u", mnt / "incoming")
            wait_for(lambda: "staging area was unmounted" in mount.log.read_text(), "the end")
            assert os.listdir(mnt / "incoming") == []
            assert errno_of((mnt / "incoming/new").mkdir) == errno.EROFS
            assert (mnt / "train/odd/x").read_bytes() == b"x"
            run("fusermount3", "-u", mnt)
        elif end == "lazy":
            with (mnt / "incoming/new/a").open("ab", buffering=0) as file:
                assert run_cli("umount", "--lazy", mnt).returncode == 0
                assert mounts_below(mnt) == []
                file.write(b"more")
            assert (staging / "datasets/new/files/a").read_bytes() == b"amore"
        else:
            os.kill(mount.pid, signal.SIGTERM)
        wait_for_exit(mount.pid)
        assert mounts_below(tmp_path) == []


@pytest.mark.root
@pytest.mark.parametrize(
    "passed",
    [
        pytest.param(
            True,
            marks=pytest.mark.skipif(
                not can_keep(MountOptions(uring=False)), reason="needs Linux 6.9"
            ),
        ),
        False,
    ],
)
def test_rule_56_reads_and_writes_pass_through(tmp_path: Path, passed: bool) -> None:
    volume, staging = make_volume(tmp_path), tmp_path / "staging"
    options = {"incoming": str(staging), "pass_through": passed}
    with mounted(volume, tmp_path / "mnt", tmp_path / "log", **options) as mount:
        top = Writable(mount, staging).begin("new", {"a": b"first"})
        with (top / "a").open("r+b", buffering=0) as file:
            assert (os.pread(file.fileno(), 9, 0), file.write(b"the")) == (b"first", 3)
            with stopped(mount) if passed else contextlib.nullcontext():
                assert (os.pread(file.fileno(), 9, 0), file.write(b"re")) == (b"thest", 2)
            with (top / "a").open("rb") as again:
                assert again.read() == b"there"
            os.ftruncate(file.fileno(), 3)
            assert (top / "a").read_bytes() == b"the"
            (top / "a").unlink()
            file.write(b"end")
            assert os.pread(file.fileno(), 20, 0) == b"the\0\0end"
