"""Tests the directory that processes share: the first publishes it, the last one removes it.

This holds when any of them is killed. Other processes run the script below on a file that holds the
segment, and report over pipes: no test waits for time to pass.
"""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import dlfs.directory.sharing as sharing
from dlfs.base.closing import LiveObjects
from dlfs.directory import (
    DirectoryBuilder,
    DirectoryIdentity,
    DirectorySizes,
    FrozenDirectory,
    load_directory,
)
from dlfs.errors import ChecksumError, ClosedError, DeviceError, FormatError, UsageError
from tests.support.files import flip_bit
from tests.support.scripts import hear, tell

CHUNK = 4096
PATHS = [b"d/%05d" % n for n in range(3000)]
VOLUME, DATASET = uuid.UUID(int=1), uuid.UUID(int=2)

SCRIPT = """
import os, resource, sys
from pathlib import Path
from uuid import UUID
from dlfs.directory import DirectoryIdentity, DirectorySizes, load_directory

source, root, entries, names, mode = sys.argv[1:]
file = os.open(source, os.O_RDONLY)
sizes = DirectorySizes(int(entries), int(names))

def say(word):
    print(word, flush=True)

def read_into(offset, memory):
    if mode == "stop" and len(memory) > 4096:
        os.preadv(file, [memory[: len(memory) // 2]], offset)
        say("half")
        sys.stdin.readline()
    if len(memory) > 4096:
        say("read")
    os.preadv(file, [memory], offset)

if mode == "small":
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
wait_s = 0.0 if mode == "impatient" else 60.0
identity = DirectoryIdentity(UUID(int=1), UUID(int=2), "t")
directory = load_directory(identity, sizes, read_into, root=Path(root), wait_s=wait_s)
assert directory.find([b"d/00077", b"x"]).tolist() == [77, -1]
if mode == "fork":
    inside, outside = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(inside, 1)
        assert directory.find([b"d/00078"]).tolist() == [78]
        say("child " + " ".join(sorted(p.name[-6:] for p in Path(root).glob("*/*.part"))))
        directory.close()
        say("gone" if not list(Path(root).glob("*/*")) else "left")
        os._exit(0)
    directory.close()
    os.write(outside, b"x")
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
say("open")
sys.stdin.readline()
directory.close()
say("closed")
"""


class Segment:
    """A segment in a file, and a count of what was read of it."""

    def __init__(self, path: Path, number: int = 2) -> None:
        builder = DirectoryBuilder()
        ones = np.ones(len(PATHS))
        builder.add_many(PATHS, np.arange(len(PATHS)), ones, ones)
        parts = builder.freeze(uuid.UUID(int=number), CHUNK, chunk_bytes=CHUNK)
        self.path = path
        self.path.write_bytes(parts.entries.tobytes() + parts.names.tobytes())
        self.sizes = DirectorySizes(parts.entries.nbytes, parts.names.nbytes)
        self.identity = DirectoryIdentity(VOLUME, uuid.UUID(int=number), "dataset t")
        self.reads: list[tuple[int, int]] = []

    def read_into(self, offset: int, memory: memoryview) -> None:
        self.reads.append((offset, len(memory)))
        with self.path.open("rb") as file:
            assert os.preadv(file.fileno(), [memory], offset) == len(memory)

    @property
    def large_reads(self) -> int:
        return sum(length > 4096 for _, length in self.reads)

    def open(self, root: Path | None) -> FrozenDirectory:
        return load_directory(self.identity, self.sizes, self.read_into, root=root)


class Process:
    """Another process with the directory open, or on its way there."""

    def __init__(self, segment: Segment, root: Path, mode: str = "plain") -> None:
        sizes = segment.sizes
        arguments = [str(segment.path), str(root), str(sizes.entries_bytes), str(sizes.names_bytes)]
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, *arguments, mode],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )

    def hear(self) -> str:
        return hear(self.process)

    def go_on(self) -> None:
        tell(self.process)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


@pytest.fixture
def segment(tmp_path: Path) -> Segment:
    return Segment(tmp_path / "segment")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = tmp_path / "shm"
    made.mkdir()
    return made


@pytest.fixture
def start(segment: Segment, root: Path) -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def run(mode: str = "plain") -> Process:
        started.append(Process(segment, root, mode))
        return started[-1]

    yield run
    for process in started:
        process.close()


def files(root: Path) -> list[str]:
    return sorted(path.name.rpartition("-")[2] for path in root.glob("dlfs-*/*"))


def works(directory: FrozenDirectory) -> bool:
    return bool(directory.find(PATHS[5:7]).tolist() == [5, 6])


def test_shared_in_one_process_and_removed_by_the_last(segment: Segment, root: Path) -> None:
    first = segment.open(root)
    assert files(root) == ["entries.lock", "entries.part"]
    assert works(first)
    second = segment.open(root)
    assert works(second)
    assert segment.large_reads == 2  # entries and names, once each
    first.close()
    assert files(root) == ["entries.lock", "entries.part", "names.lock", "names.part"]
    assert works(second)
    second.close()
    assert files(root) == []


def test_collected_without_close(segment: Segment, root: Path) -> None:
    directory = segment.open(root)
    locations = directory.locations
    del directory
    assert files(root) == []
    assert locations["address"][7] == 7  # a view outlives the file


def test_shared_between_processes(
    segment: Segment, root: Path, start: Callable[..., Process]
) -> None:
    other = start()
    assert [other.hear(), other.hear(), other.hear()] == ["read", "read", "open"]
    directory = segment.open(root)
    assert works(directory)
    assert segment.large_reads == 0
    other.go_on()
    assert other.hear() == "closed"
    assert works(directory)
    assert len(files(root)) == 4
    directory.close()
    assert files(root) == []


def test_loader_killed_in_the_middle(
    segment: Segment, root: Path, start: Callable[..., Process]
) -> None:
    other = start("stop")
    assert other.hear() == "half"
    assert "entries.load" in files(root)
    other.kill()
    with segment.open(root) as directory:
        assert works(directory)
        assert segment.large_reads == 2
        assert files(root) == ["entries.lock", "entries.part", "names.lock", "names.part"]
    assert files(root) == []


def test_published_by_a_killed_process_is_taken_over(
    segment: Segment, root: Path, start: Callable[..., Process]
) -> None:
    other = start()
    assert [other.hear(), other.hear(), other.hear()][-1] == "open"
    other.kill()
    assert len(files(root)) == 4
    with segment.open(root) as directory:
        assert works(directory)
        assert segment.large_reads == 0
    assert files(root) == []


@pytest.mark.parametrize("mode", ["plain", "stop"])
def test_a_process_that_loads_removes_the_files_of_a_killed_one(
    segment: Segment, root: Path, tmp_path: Path, start: Callable[..., Process], mode: str
) -> None:
    other = start(mode)
    while other.hear() not in ("open", "half"):
        pass
    other.kill()
    with Segment(tmp_path / "another", number=3).open(root):
        left = list(root.glob(f"dlfs-*/*{DATASET.hex}*"))
        assert left == []
    assert files(root) == []


def test_waits_for_a_loader(segment: Segment, root: Path, start: Callable[..., Process]) -> None:
    loader = start("stop")
    assert loader.hear() == "half"
    waiting = start("plain")
    impatient = start("impatient")  # loads for itself, while the other two are as they were
    assert [impatient.hear(), impatient.hear(), impatient.hear()] == ["read", "read", "open"]
    loader.go_on()
    assert [loader.hear(), loader.hear()] == ["read", "open"]  # the names are there already
    assert waiting.hear() == "open"  # without a read
    assert impatient.process.poll() is None


def test_loader_that_fails_leaves_nothing(segment: Segment, root: Path) -> None:
    def fail(offset: int, memory: memoryview) -> None:
        if len(memory) > 4096:
            raise DeviceError("read: gone")
        segment.read_into(offset, memory)

    with pytest.raises(DeviceError, match="gone"):
        load_directory(segment.identity, segment.sizes, fail, root=root)
    assert files(root) == []


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("part", ["entries", "names"])
def test_bad_bytes_are_never_published(
    segment: Segment, root: Path, part: str, shared: bool
) -> None:
    flip_bit(segment.path, -5000 if part == "names" else segment.sizes.entries_bytes - 5000)

    with pytest.raises(ChecksumError, match=f"{part} of dataset t at byte"):
        segment.open(root if shared else None).name(0)
    assert [name for name in files(root) if part in name] == []


def test_of_another_dataset(segment: Segment, root: Path) -> None:
    identity = DirectoryIdentity(VOLUME, uuid.UUID(int=9), "dataset t")
    with pytest.raises(FormatError, match="expected the dataset"):
        load_directory(identity, segment.sizes, segment.read_into, root=root)
    sizes = DirectorySizes(segment.sizes.entries_bytes, segment.sizes.names_bytes - 4096)
    with pytest.raises(FormatError, match="bytes of names"):
        load_directory(segment.identity, sizes, segment.read_into, root=root)
    assert files(root) == []


# ---- where sharing cannot be had -------------------------------------------------------------


def opens_privately(segment: Segment, root: Path | None) -> bool:
    with segment.open(root) as directory:
        return works(directory) and segment.large_reads == 2


def test_private_on_demand(segment: Segment) -> None:
    assert opens_privately(segment, None)


def test_private_without_shared_memory(segment: Segment, root: Path) -> None:
    assert opens_privately(segment, root / "missing")


def test_private_when_there_is_too_little(
    segment: Segment, root: Path, start: Callable[..., Process]
) -> None:
    other = start("small")
    assert [other.hear(), other.hear(), other.hear()] == ["read", "read", "open"]
    assert files(root) == []


@pytest.mark.root
def test_private_when_the_file_system_is_full(segment: Segment, root: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(root)], check=True)
    try:
        assert opens_privately(segment, root)
        assert files(root) == []
    finally:
        subprocess.run(["umount", str(root)], check=True)


@pytest.mark.parametrize("mode", [0o750, 0o701, 0o777])
def test_directory_open_to_others_is_not_used(segment: Segment, root: Path, mode: int) -> None:
    place = root / f"dlfs-{os.geteuid()}"
    place.mkdir()
    place.chmod(mode)
    assert opens_privately(segment, root)
    assert files(root) == []


def test_directory_that_is_a_link_is_not_used(segment: Segment, root: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (root / f"dlfs-{os.geteuid()}").symlink_to(tmp_path / "elsewhere")
    assert opens_privately(segment, root)
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.root
def test_directory_of_another_user_is_not_used(segment: Segment, root: Path) -> None:
    place = root / f"dlfs-{os.geteuid()}"
    place.mkdir(mode=0o700)
    os.chown(place, 12345, 12345)
    assert opens_privately(segment, root)
    assert files(root) == []


def plant(segment: Segment, root: Path, make: Callable[[Path], None]) -> None:
    """Put something where the entries part would be published."""
    with segment.open(root):
        (published,) = root.glob("dlfs-*/*-entries.part")
    segment.reads.clear()
    make(published)


def test_link_in_place_of_a_part_is_not_followed(
    segment: Segment, root: Path, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    target.write_bytes(segment.path.read_bytes()[: segment.sizes.entries_bytes])
    plant(segment, root, lambda path: path.symlink_to(target))
    assert opens_privately(segment, root)


def test_file_of_another_size_is_not_used(segment: Segment, root: Path) -> None:
    plant(segment, root, lambda path: path.write_bytes(b"short") and None)
    assert opens_privately(segment, root)


def test_pipe_in_place_of_a_part_does_not_hang(segment: Segment, root: Path) -> None:
    plant(segment, root, os.mkfifo)
    assert opens_privately(segment, root)


@pytest.mark.root
def test_file_of_another_user_is_not_used(segment: Segment, root: Path) -> None:
    def make(path: Path) -> None:
        path.write_bytes(segment.path.read_bytes()[: segment.sizes.entries_bytes])
        os.chown(path, 12345, 12345)

    plant(segment, root, make)
    assert opens_privately(segment, root)


def test_unwritable_memory(segment: Segment, root: Path) -> None:
    with segment.open(root) as directory, pytest.raises(ValueError, match="read-only"):
        directory.locations["address"] = 0


# ---- fork ------------------------------------------------------------------------------------


def test_forked_child_keeps_the_directory_and_may_be_the_last(
    root: Path, start: Callable[..., Process]
) -> None:
    other = start("fork")
    assert [other.hear(), other.hear()] == ["read", "read"]
    # The parent has closed; the child holds both parts, and removes them.
    assert other.hear() == "child s.part s.part"
    assert other.hear() == "gone"
    assert other.process.wait() == 0
    assert files(root) == []


# ---- descriptors to pass on ----------------------------------------------------------------------


def test_the_files_of_a_private_directory_can_be_mapped_and_not_changed(tmp_path: Path) -> None:
    segment = Segment(tmp_path / "segment")
    with segment.open(None) as directory:
        for descriptor, size in (
            (directory.entries_descriptor(), segment.sizes.entries_bytes),
            (directory.names_descriptor(), segment.sizes.names_bytes),
        ):
            assert os.fstat(descriptor).st_size == size
            with mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ) as memory:
                start = 0 if descriptor == directory.entries_descriptor() else -size
                source = segment.path.read_bytes()
                assert memory[:] == (source[:size] if start == 0 else source[start:])
            with pytest.raises(PermissionError):
                os.pwrite(descriptor, b"x", 0)
            with pytest.raises(PermissionError):
                os.ftruncate(descriptor, 0)
            with pytest.raises(PermissionError):
                mmap.mmap(descriptor, size)
        files = set(os.listdir("/proc/self/fd"))
    assert len(files - set(os.listdir("/proc/self/fd"))) >= 2


def test_plain_memory_has_no_descriptor() -> None:
    builder = DirectoryBuilder()
    builder.add_many([b"a"], np.zeros(1), np.ones(1), np.ones(1))
    parts = builder.freeze(uuid.UUID(int=1), CHUNK, chunk_bytes=CHUNK)
    directory = FrozenDirectory(parts.entries, lambda: parts.names)
    with directory, pytest.raises(UsageError, match="got plain memory"):
        directory.entries_descriptor()


@pytest.mark.parametrize("name", ["key", "other"])
def test_a_lock_ends_although_a_child_has_a_copy_of_its_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A thread may fork just when another one has opened the file, and not yet said so."""
    monkeypatch.setattr(sharing, "_locks", LiveObjects())  # what children close
    place = sharing._Place.open(tmp_path)
    assert place is not None
    (tmp_path / f"dlfs-{os.geteuid()}" / "key.load").touch()  # keeps the file of the lock
    inside, outside = os.pipe()
    with place.locked("key", 0.0) as locked:
        assert locked
        sharing._locks.clear()
        child = os.fork()
        if child == 0:
            os.close(outside)
            os.read(inside, 1)
            os._exit(0)
    with place.locked(name, 0.0) as locked:
        assert locked
    os.close(outside)
    os.close(inside)
    assert os.waitpid(child, 0)[1] == 0


def test_names_that_another_thread_closes_are_a_closed_directory(tmp_path: Path) -> None:
    """The thread that looks a path up has seen the names, and then they are gone."""
    directory = Segment(tmp_path / "segment").open(None)
    directory.load_names()
    directory.close()
    with pytest.raises(ClosedError, match="it is closed"):
        directory.find_one(PATHS[0])
