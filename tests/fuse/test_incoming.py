"""SEMANTICS.md, the section on incoming, executed on a real mount."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import stat
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

import dlfs
from dlfs.base.units import MIB
from dlfs.errors import LockedError
from dlfs.mount.mountpoint import find_mount
from dlfs.staging.area import StagingArea
from tests.fuse.mounting import (
    AS_NOBODY,
    Mount,
    Prepared,
    add_dataset,
    errno_of,
    mounted,
    parent_of,
    run_cli,
    served_by,
    wait_for_exit,
)
from tests.fuse.test_semantics import writes
from tests.support.files import write_files
from tests.support.waiting import retried, wait_for

pytestmark = pytest.mark.fuse

NOBODY = 65534
TO_NOBODY = AS_NOBODY[:6]
"""Command prefix for programs without the rights of root, which ``AS_NOBODY`` leaves to Python."""


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
        return write_files(self / name, files or {})

    def seal(self, name: str, *options: str, alone: bool = False) -> dict[str, object]:
        """Seal a dataset, and return the report."""
        done = run_cli("seal", self.root, name, "--json", *options, alone=alone)
        assert done.returncode == 0, done.stderr
        report: dict[str, object] = json.loads(done.stdout)
        return report


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


def run(*command: str | Path, **options: object) -> None:
    subprocess.run([str(word) for word in command], check=True, **options)  # type: ignore[call-overload]


def same(one: Path, other: Path) -> bool:
    """Return True if two trees have the same names and bytes."""
    run("diff", "-r", one, other)
    return True


# ---- what it shows -------------------------------------------------------------------------------


def test_rule_33_incoming_is_a_link(tmp_path: Path, server: str) -> None:
    volume, staging = make_volume(tmp_path), tmp_path / "staging"
    options = {"incoming": str(staging), **served_by(server)}
    with mounted(volume, tmp_path / "mnt", tmp_path / "log", **options) as mount:
        link = mount / "incoming"
        assert sorted(os.listdir(mount.directory)) == ["incoming", "train"]
        with os.scandir(mount.directory) as entries:
            assert {e.name for e in entries if e.is_symlink()} == {"incoming"}
        assert os.readlink(link) == str(staging)
        found = link.lstat()
        assert (stat.S_ISLNK(found.st_mode), found.st_size) == (True, len(str(staging)))
        assert link.stat().st_ino == staging.stat().st_ino
        assert stat.S_IMODE(staging.stat().st_mode) == 0o700
        assert errno_of(link.unlink) == errno.EROFS
        Writable(mount, staging).begin("new", {"a": b"a"})
        assert (staging / "new/a").read_bytes() == b"a"
        assert os.statvfs(mount / "incoming/new").f_blocks == os.statvfs(staging).f_blocks
        assert Writable(mount, staging).seal("new")["version"] == 1
        assert (mount / "new/a").read_bytes() == b"a"
    with mounted(volume, tmp_path / "mnt", tmp_path / "log", **served_by(server)) as mount:
        assert os.listdir(mount.directory) == ["new", "train"]
        assert errno_of((mount / "incoming").lstat) == errno.ENOENT
        refused = run_cli("seal", mount.directory, "new")
        assert (refused.returncode, "mount it with --incoming" in refused.stderr) == (2, True)


def test_rule_34_the_sealed_stay_sealed(shared: Writable) -> None:
    found = {name: errno_of(call) for name, call in writes(shared.root / "train").items()}
    assert found == dict.fromkeys(found, errno.EROFS)
    assert errno_of((shared.root / "new").mkdir) == errno.EROFS
    assert (shared.root / "train/large").read_bytes() == b"sealed" * 1000
    record = find_mount(shared.root)
    assert record is not None
    assert {"ro", "nosuid", "nodev"} <= set(record.options.split(","))


# ---- users ---------------------------------------------------------------------------------------


@pytest.mark.root
def test_rule_37_who_may_seal(tmp_path: Path, open_folder: Path) -> None:
    volume, staging = make_volume(tmp_path), open_folder / "staging"
    staging.mkdir()
    staging.chmod(0o1777)
    options = {"allow_other": True, "incoming": str(staging)}
    with mounted(volume, open_folder / "mnt", tmp_path / "log", **options) as mount:
        here = Writable(mount, staging)

        def cli_of_nobody(*words: str | Path) -> tuple[int, str]:
            done = run_cli(*words, prefix=AS_NOBODY)
            return done.returncode, done.stderr + done.stdout

        run(*TO_NOBODY, "sh", "-c", f"mkdir {here / 'theirs'} && echo x >{here / 'theirs/x'}")
        here.begin("ours", {"a": b"a"})
        for words in (["seal", here.root, "ours"], ["incoming", here.root, "--discard", "ours"]):
            code, said = cli_of_nobody(*words)
            assert (code, "belongs to user 0, not to user 65534" in said) == (7, True)
        assert (here / "ours/a").read_bytes() == b"a"
        listed = json.loads(cli_of_nobody("incoming", here.root, "--json")[1])["incoming"]
        assert [each["name"] for each in listed] == ["theirs"]
        os.link(here / "ours/a", here / "theirs/a")  # root's file must not become a sample
        code, said = cli_of_nobody("seal", here.root, "theirs")
        assert (code, "import theirs/a: it belongs to user 0" in said) == (7, True)
        (here / "theirs/a").unlink()
        assert cli_of_nobody("seal", here.root, "theirs")[0] == 0
        assert (mount / "theirs/x").read_bytes() == b"x\n"
        run(*TO_NOBODY, "sh", "-c", f"mkdir {here / 'theirs'} && echo y >{here / 'theirs/x'}")
        assert here.seal("theirs")["version"] == 2  # root may seal all


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
        run(*TO_NOBODY, "sh", "-c", script)
        sealed = run_cli("seal", open_folder / "mnt", "u", prefix=AS_NOBODY)
        assert sealed.returncode == 0, sealed.stderr
    finally:
        ended = run_cli("umount", open_folder / "mnt", prefix=AS_NOBODY)
    assert ended.returncode == 0, ended.stderr
    with dlfs.open(str(volume)) as opened, opened["u"] as dataset:
        assert dataset.get("x") == b"text\n"


# ---- tools ---------------------------------------------------------------------------------------


def test_rule_38_tools(shared: Writable, source: Path) -> None:
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
        if name == "rsync":  # again, with a change: temporary files, renamed
            (shared / name / "large").write_bytes(b"differs")
            write(shared / name)
        assert shared.seal(name)["samples"] == sum(f.is_file() for f in source.rglob("*"))
        assert not (shared / name).exists()
        assert same(source, shared.root / name)
    run("cp", "-r", shared.root / "tar", shared / "again")  # from what is sealed
    assert same(source, shared / "again")


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
    assert shared.seal("generated", "--layout", "path", "--seed", "9")["samples"] == len(files)
    with dlfs.open(str(shared.mount.volume)) as volume, volume["generated"] as dataset:
        assert {p: dataset.get(p) for p in files} == files
        assert (dataset.info.layout, dataset.info.seed) == ("path", 9)


# ---- sealing -------------------------------------------------------------------------------------


def test_rule_40_sealing(shared: Writable) -> None:
    shared.begin("sealed", {"a": b"old"})
    done = run_cli("seal", shared.root, "sealed")
    assert done.returncode == 0, done.stderr
    assert (shared.root / "sealed/a").read_bytes() == b"old"
    shared.begin("sealed", {"a": b"new", "b/c": b"more"})
    report = shared.seal("sealed", "--layout", "path")
    assert (report["version"], report["samples"], report["bytes"]) == (2, 2, 7)
    assert (shared.root / "sealed/b/c").read_bytes() == b"more"
    assert (shared.root / "sealed@1/a").read_bytes() == b"old"
    for wrong in (["seal", shared.root.parent, "x"], ["seal", shared.root, "a/b"]):
        assert run_cli(*wrong).returncode == 2
    assert run_cli("seal", shared.root, "sealed").returncode == 3  # there is none now


def test_rule_40_names_and_limits(shared: Writable) -> None:
    codes = {"a@1": 2, "a\nb": 2, " a": 2, "incoming": 2, "\udcff": 2, "n" * 245: 1}
    for name, code in codes.items():
        top = shared.begin(name, {"a": b"a"})
        done = run_cli("seal", "--", shared.root, name)
        assert (name, done.returncode) == (name, code)
        assert "a dataset's name is 1 to 244 bytes of UTF-8" in done.stderr
        assert (top / "a").read_bytes() == b"a"
        shutil.rmtree(top)
    top = shared.begin("deep")
    folder = os.open(top, os.O_RDONLY)
    for _ in range(17):
        os.mkdir("n" * 250, dir_fd=folder)
        below = os.open("n" * 250, os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = below
    os.close(folder)
    refused = run_cli("seal", shared.root, "deep")
    assert "4095 bytes" in refused.stderr
    assert top.exists()


def test_rule_40_sealing_nothing(shared: Writable) -> None:
    top = shared.begin("nothing")
    (top / "folder").mkdir()
    done = run_cli("seal", shared.root, "nothing")
    assert done.returncode == 3
    assert "import nothing: expected at least one sample, got none: it holds 1 x dir" in done.stderr
    assert (top / "folder").is_dir()
    assert shared.seal("nothing", "--allow-empty")["empty_directories"] == 1
    assert os.listdir(shared.root / "nothing") == ["folder"]


def test_rule_43_open_files(shared: Writable, tmp_path: Path) -> None:
    top = shared.begin("busy", {"a": b"a", "d/b": b"b"})
    with (top / "d/b").open("ab"), (top / "a").open("rb"):
        refused = run_cli("seal", shared.root, "busy")
        assert refused.returncode == 5
        assert "import busy/d/b: the file is open for writing" in refused.stderr
        assert "import busy/d/b" in run_cli("incoming", shared.root, "--json").stdout
        (top / "c").write_bytes(b"it goes on")
        (top / "d/b").rename(top / "d/e")
        assert run_cli("incoming", shared.root, "--discard", "busy").returncode == 5
    os.link(top / "a", shared.staging / "another name")
    with (shared.staging / "another name").open("ab"):
        refused = run_cli("seal", shared.root, "busy")
        assert (refused.returncode, "busy/a" in refused.stderr) == (5, True)
    (shared.staging / "another name").unlink()
    with (top / "f").open("wb") as nameless:
        (top / "f").unlink()
        assert shared.seal("busy")["samples"] == 3
        nameless.write(b"to nobody")


def test_rule_44_a_program_that_writes_on(shared: Writable) -> None:
    """It has the directory open, and does all it can until the seal fails; nothing gets lost."""
    top = shared.begin("written", {f"d/{i:04}": b"%d" % i * 100 for i in range(2000)})
    folder = os.open(top / "d", os.O_RDONLY)
    with ThreadPoolExecutor(1) as pool:
        request = pool.submit(run_cli, "seal", shared.root, "written")
        number = 0
        while not request.done():
            number += 1
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            opened = os.open(f"new{number % 10}", flags, dir_fd=folder)
            os.write(opened, b"new")
            os.close(opened)
        done = request.result()
    os.close(folder)
    assert done.returncode != 0
    assert "import written/d" in done.stderr
    assert sum(file.stat().st_size for file in (top / "d").glob("new*")) == 3 * number
    assert shared.seal("written")["samples"] == 2000 + min(number, 10)


def test_rule_45_files_that_are_left_out(shared: Writable, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    top = shared.begin("left", {"a": b"a", "d/b": b"b"})
    (top / "out").symlink_to(tmp_path / "secret")
    (top / "d/in").symlink_to("../a")
    (top / "folder").symlink_to("/etc")
    (top / "empty/er").mkdir(parents=True)
    os.mkfifo(top / "fifo")
    os.link(top / "a", top / "hard")
    refused = run_cli("seal", shared.root, "left")
    assert refused.returncode == 2
    assert "import left/" in refused.stderr
    assert "symbolic links" in refused.stderr
    assert str(shared.staging) not in refused.stderr
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
        assert dataset.empty_directories() == [b"empty/er"]


def test_rule_46_two_at_once(shared: Writable, source: Path) -> None:
    names = [f"both{number}" for number in range(3)]
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda name: run("cp", "-r", source, shared / name), names))
        seal = partial(shared.seal, alone=True)
        assert [each["version"] for each in threads.map(seal, names)] == [1, 1, 1]
    for name in names:
        assert same(source, shared.root / name)


def test_rule_47_a_seal_that_fails(tmp_path: Path) -> None:
    volume = make_volume(tmp_path, 16 * MIB)
    options = {"incoming": str(tmp_path / "staging")}
    with mounted(volume, tmp_path / "mnt", tmp_path / "log", **options) as mount:
        here = Writable(mount, tmp_path / "staging")
        top = here.begin("big", {"a": bytes(20 * MIB)})
        before = dlfs.open(str(volume)).generation
        refused = run_cli("seal", mount.directory, "big")
        assert (refused.returncode, "free space" in refused.stderr) == (6, True)
        (top / "a").write_bytes(b"smaller")
        with dlfs.open(str(volume)) as opened:
            assert opened.generation == before
            with opened.writer("other") as writer:
                writer.add("x", b"")
                refused = run_cli("seal", mount.directory, "big")
                assert refused.returncode == 5
                assert f"pid {os.getpid()}" in refused.stderr
        assert here.seal("big")["version"] == 1
        assert (mount / "big/a").read_bytes() == b"smaller"


# ---- crashes -------------------------------------------------------------------------------------


def test_rule_48_what_was_written_is_reported(tmp_path: Path) -> None:
    volume = make_volume(tmp_path)
    options = {"incoming": str(tmp_path / "staging"), "restart": False}
    with mounted(volume, tmp_path / "mnt", tmp_path / "log", **options) as mount:
        top = Writable(mount, tmp_path / "staging").begin("train", {"a": b"a", "d/b": b"bb"})
        with (top / "c").open("wb") as file:
            os.kill(mount.pid, signal.SIGKILL)
            wait_for_exit(mount.pid)
            file.write(b"it goes on")
    assert (tmp_path / "staging/train/c").read_bytes() == b"it goes on"
    log = tmp_path / "log2"
    with mounted(volume, tmp_path / "mnt", log, **options) as mount:
        wait_for(lambda: "'train' is not sealed: 3 files" in log.read_text(), "the report")
        (found,) = json.loads(run_cli("incoming", mount.directory, "--json").stdout)["incoming"]
        assert (found["name"], found["files"], found["bytes"], found["state"]) == (
            "train",
            3,
            13,
            "open",
        )
        assert Writable(mount, tmp_path / "staging").seal("train")["version"] == 2


@pytest.mark.parametrize("restart", [False, True])
def test_rule_49_killed_while_sealing(tmp_path: Path, source: Path, restart: bool) -> None:
    """See ``tests/fault/test_sealing_killed.py`` for kills at many moments."""
    volume, staging = make_volume(tmp_path, 256 * MIB), tmp_path / "staging"
    options = {"incoming": str(staging), "restart": restart, "fuse": "native"}
    for number in range(3):
        name = f"round{number}"
        with mounted(volume, tmp_path / "mnt", tmp_path / f"log{number}", **options) as mount:
            top = Writable(mount, staging).begin(name)
            run("cp", "-r", source, top / "all")
            (top / "zeros").write_bytes(bytes(16 * MIB))
            keeper = parent_of(mount.pid)
            with ThreadPoolExecutor(1) as pool:
                sealing = pool.submit(run_cli, "seal", mount.directory, name, alone=True)
                wait_for(lambda top=top: not (staging / top.name).exists(), "the seal")
                os.kill(mount.pid, signal.SIGKILL)
            assert sealing.result().returncode in (0, 7)
            wait_for_exit(mount.pid)
        if keeper != 1:  # the server that it has started may be putting the dataset back
            wait_for_exit(keeper)
        again = tmp_path / f"again{number}"
        with mounted(volume, tmp_path / "mnt", again, **options) as mount:
            sealed = (mount / name).exists()
            assert (mount / "incoming" / name).exists() != sealed
            where = mount / name if sealed else mount / "incoming" / name
            assert same(source, where / "all")
            assert (where / "zeros").read_bytes() == bytes(16 * MIB)
            assert not (mount / f"{name}@2").exists()
            if not sealed:
                assert Writable(mount, staging).seal(name)["version"] == 1
    assert os.listdir(staging) == [".dlfs"]


def test_rule_49_the_end_of_the_mount_during_a_seal(tmp_path: Path) -> None:
    volume, staging = make_volume(tmp_path, 256 * MIB), tmp_path / "staging"
    options = {"incoming": str(staging)}
    with mounted(volume, tmp_path / "mnt", tmp_path / "log", **options) as mount:
        Writable(mount, staging).begin("new", {f"{i}": bytes(MIB) for i in range(100)})
        with ThreadPoolExecutor(1) as pool:
            sealing = pool.submit(run_cli, "seal", mount.directory, "new")
            wait_for(lambda: not (staging / "new").exists(), "the seal")
            os.kill(mount.pid, signal.SIGTERM)
            refused = sealing.result()
        wait_for_exit(mount.pid)
    assert refused.returncode, refused.stderr
    assert "the mount" in refused.stderr
    assert len(os.listdir(staging / "new")) == 100


def test_rule_50_discarding(shared: Writable) -> None:
    top = shared.begin("unwanted", {"a": b"a", "d/b": b"b"})
    done = run_cli("incoming", shared.root, "--discard", "unwanted")
    assert done.returncode == 0, done.stderr
    assert not top.exists()
    assert run_cli("incoming", shared.root, "--discard", "unwanted").returncode == 3
    wait_for(lambda: os.listdir(shared.staging / ".dlfs/removed") == [], "the space")
    assert not (shared.root / "unwanted").exists()


def test_rule_51_staging_areas_are_not_shared(shared: Writable, tmp_path: Path) -> None:
    with dlfs.open(str(shared.mount.volume)) as volume:
        with pytest.raises(LockedError, match=rf"process {shared.mount.pid} uses it"):
            StagingArea(shared.staging, volume.uuid, wait_seconds=0)
        with StagingArea(tmp_path / "staging", volume.uuid):
            pass
    other = make_volume(tmp_path)
    (tmp_path / "mnt").mkdir()
    (tmp_path / "file").touch()
    for staging, code, reason in (("staging", 2, "one of volume"), ("file", 7, "Not a directory")):
        refused = run_cli("mount", other, tmp_path / "mnt", "--incoming", tmp_path / staging)
        assert (refused.returncode, reason in refused.stderr) == (code, True)
    assert find_mount(tmp_path / "mnt") is None


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
        # What the server had open may be closed a moment after its output, whose end is seen.
        retried(lambda: run("umount", folder), subprocess.CalledProcessError)
    with mounted(folder / "a.img", mountpoint, tmp_path / "log"):
        pass  # it can still be read
