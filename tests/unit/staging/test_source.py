"""The files of a directory that is sealed: what a program can do to them meanwhile."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from dlfs.errors import DeviceError, LimitError, LockedError, UsageError
from dlfs.ingest import files
from dlfs.ingest.files import Directories
from dlfs.ingest.source import SampleBlock
from dlfs.staging import source as sources
from dlfs.staging.source import StagedSource
from tests.support.files import write_files

FILES = {
    "a": b"aa",
    "a-b": b"",
    "d/e/f": b"deep" * 1000,
    "d/x": b"xx",
    "d.x/y": b"y",
    **{f"many/{i % 7}/{i:03}": b"%d" % i for i in range(300)},
}


@pytest.fixture
def top(tmp_path: Path) -> Path:
    write_files(tmp_path / "top", FILES)
    (tmp_path / "top/empty/er").mkdir(parents=True)
    return tmp_path / "top"


@pytest.fixture
def directory(top: Path) -> Iterator[int]:
    descriptor = os.open(top, os.O_RDONLY | os.O_DIRECTORY)
    yield descriptor
    os.close(descriptor)


def read_all(
    source: StagedSource, meanwhile: Callable[[], object] = lambda: None
) -> dict[str, bytes]:
    found = {}
    with closing(source):
        meanwhile()
        for block in source.blocks(layout="shuffled", seed=3):
            for path, offset, length in zip(block.paths, block.offsets, block.lengths, strict=True):
                found[path.decode()] = block.data[offset : offset + length].tobytes()
    return found


def test_it_reads_what_is_there(directory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "DIRECTORIES_MAX", 2)
    source = StagedSource("top", directory)
    assert (source.sample_count, source.sample_bytes) == (
        len(FILES),
        sum(map(len, FILES.values())),
    )
    assert list(source.empty_directories) == [b"empty/er", b"empty"]
    assert list(source.file_paths()) == sorted(path.encode() for path in FILES)
    assert read_all(source) == FILES


def test_directories_are_opened_again(top: Path, directory: int) -> None:
    opened = Directories(directory)
    for path in (b"many/1", b"", b"d/e", b"many/1", b"d"):
        inode = os.fstat(opened.open(path)).st_ino
        assert inode == os.stat(os.path.join(os.fsencode(top), path)).st_ino
    before = len(os.listdir("/proc/self/fd"))
    opened.close()
    assert len(os.listdir("/proc/self/fd")) == before - 4


def test_a_file_open_for_writing(top: Path, directory: int) -> None:
    with (
        (top / "d/x").open("ab"),
        (top / "a").open("rb"),
        pytest.raises(LockedError, match="import top/d/x: the file is open for writing"),
    ):
        StagedSource("top", directory)
    assert read_all(StagedSource("top", directory)) == FILES


def test_by_another_name_of_it(top: Path, directory: int) -> None:
    os.link(top / "d/x", top.parent / "elsewhere")
    with (
        (top.parent / "elsewhere").open("ab"),
        pytest.raises(LockedError, match=r"import top/d/x"),
    ):
        StagedSource("top", directory)


def test_a_mapping_that_outlives_its_descriptor(top: Path, directory: int) -> None:
    with (top / "d/x").open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), 0)
    with pytest.raises(LockedError, match=r"import top/d/x"):
        StagedSource("top", directory)
    mapped.close()
    assert read_all(StagedSource("top", directory)) == FILES


def test_a_file_without_a_name_does_not_count(top: Path, directory: int) -> None:
    with (top / "gone").open("wb"):
        (top / "gone").unlink()
        assert read_all(StagedSource("top", directory)) == FILES


def test_no_lease_stays_behind(top: Path, directory: int) -> None:
    with closing(StagedSource("top", directory)):
        descriptor = os.open(top / "a", os.O_WRONLY | os.O_NONBLOCK)  # EAGAIN breaks a lease
        os.close(descriptor)


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "written": (lambda top: (top / "d/x").write_bytes(b"yy"), "d/x"),
    "longer": (lambda top: (top / "d/x").write_bytes(b"longer"), "d/x"),
    "mode": (lambda top: (top / "d/x").chmod(0o640), "d/x"),
    "linked": (lambda top: os.link(top / "d/x", top.parent / "link"), "d/x"),
    "old times": (
        lambda top: os.utime(top / "d/x", ns=(1, (top / "d/x").stat().st_mtime_ns)),
        "d/x",
    ),
    "removed": (lambda top: (top / "d/x").unlink(), "d"),
    "added": (lambda top: (top / "d/new").touch(), "d"),
    "renamed": (lambda top: (top / "d/x").rename(top / "d/z"), "d"),
    "directory": (lambda top: (top / "d/new").mkdir(), "d"),
    "moved": (lambda top: (top / "d").rename(top / "moved"), ""),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("leases", [True, False])
def test_a_change_is_an_error_that_names_it(
    top: Path, directory: int, monkeypatch: pytest.MonkeyPatch, change: str, leases: bool
) -> None:
    if not leases:
        refuse_leases(monkeypatch, errno.EINVAL)
    act, path = CHANGES[change]
    with pytest.raises(DeviceError, match="changed during the import") as caught:
        read_all(StagedSource("top", directory), lambda: act(top))
    assert f"import top/{path}" in str(caught.value)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_after_the_last_file_was_read(
    top: Path, directory: int, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    check = StagedSource._check_unchanged

    def change_first(source: StagedSource) -> None:
        CHANGES[change][0](top)
        check(source)

    monkeypatch.setattr(StagedSource, "_check_unchanged", change_first)
    with pytest.raises(DeviceError, match=r"import top/.* changed during the import"):
        read_all(StagedSource("top", directory))


def test_a_file_that_is_opened_for_writing_meanwhile(top: Path, directory: int) -> None:
    source = StagedSource("top", directory)
    with (top / "d/x").open("ab"), pytest.raises(LockedError, match=r"import top/d/x"):
        read_all(source)


@pytest.mark.parametrize("code", sources._NO_LEASES)
def test_without_leases(
    top: Path, directory: int, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    refuse_leases(monkeypatch, code)
    with (top / "d/x").open("ab") as file:
        source = StagedSource("top", directory)
        file.write(b"more")
        file.flush()
        with pytest.raises(DeviceError, match=r"import top/d/x: .* changed during the import"):
            read_all(source)
    assert read_all(StagedSource("top", directory))["d/x"] == b"xxmore"


def refuse_leases(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    plain = fcntl.fcntl

    def refuse(descriptor: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_SETLEASE:
            raise OSError(code, os.strerror(code))
        return plain(descriptor, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", refuse)


# ---- links ---------------------------------------------------------------------------------------


def test_links_are_refused_or_left_out(top: Path, directory: int) -> None:
    (top / "d/link").symlink_to("/etc/passwd")
    (top / "folder").symlink_to("/etc")
    os.mkfifo(top / "fifo")
    with pytest.raises(UsageError, match=r"import top/\S+: expected no symbolic links"):
        StagedSource("top", directory)
    source = StagedSource("top", directory, links="skip")
    assert read_all(source) == FILES
    assert source.skipped == {"symbolic link": 2, "special file": 1}


def secret_like(top: Path, inside: str) -> Path:
    """Make a directory outside with a file of the size and times of one inside."""
    outside = top.parent / "outside"
    outside.mkdir()
    found = (top / inside).stat()
    secret = outside / Path(inside).name
    secret.write_bytes(b"s" * found.st_size)
    os.utime(secret, ns=(found.st_atime_ns, found.st_mtime_ns))
    return secret


def swap(top: Path, name: str, target: Path) -> None:
    """Replace a file or directory by a link."""
    (top / name).rename(top / f"{name}.before")
    (top / name).symlink_to(target)


def swap_back(top: Path, name: str) -> None:
    (top / name).unlink()
    (top / f"{name}.before").rename(top / name)


@pytest.mark.parametrize("name", ["d/x", "d"])
def test_a_link_that_is_swapped_in_leads_nowhere(top: Path, directory: int, name: str) -> None:
    secret = secret_like(top, "d/x")
    source = StagedSource("top", directory)
    target = secret if name == "d/x" else secret.parent
    with pytest.raises((DeviceError, UsageError), match="import top/d"):
        read_all(source, lambda: swap(top, name, target))


@pytest.mark.parametrize("name", ["d/x", "d"])
def test_nothing_of_it_is_read_while_it_is_there(
    top: Path, directory: int, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Even if a program swaps the link in and out again in the right moments."""
    secret = secret_like(top, "d/x")
    target = secret if name == "d/x" else secret.parent
    read = StagedSource._read

    def read_swapped(source: StagedSource, *arguments: Any) -> SampleBlock:
        swap(top, name, target)
        try:
            block = read(source, *arguments)
        finally:
            swap_back(top, name)
        assert block.paths[block.lengths.argmax()] == b"d/e/f"
        assert b"ss" not in block.data[: block.lengths.sum()].tobytes()  # only what was in the tree
        return block

    monkeypatch.setattr(StagedSource, "_read", read_swapped)
    with pytest.raises(DeviceError, match=r"import top.* changed during the import"):
        read_all(StagedSource("top", directory))


def test_a_link_in_place_of_a_directory_that_is_listed(
    top: Path, directory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered = StagedSource._open_directory

    def open_swapped(source: StagedSource, path: bytes) -> int:
        if path == b"d":
            swap(top, "d", Path("/etc"))
        return entered(source, path)

    monkeypatch.setattr(StagedSource, "_open_directory", open_swapped)
    with pytest.raises(DeviceError, match=r"import top/d"):
        StagedSource("top", directory)


# ---- owners and limits ---------------------------------------------------------------------------


@pytest.mark.root
def test_files_of_another_user(top: Path, directory: int) -> None:
    os.chown(top / "d/x", 65534, 65534)
    with pytest.raises(DeviceError, match=r"import top/d/x: it belongs to user 65534") as caught:
        StagedSource("top", directory, owner=0)
    assert caught.value.errno == errno.EACCES
    assert read_all(StagedSource("top", directory)) == FILES


def test_paths_that_are_too_long_for_a_sample(top: Path, directory: int) -> None:
    folder = os.open(top, os.O_RDONLY)
    for _ in range(17):
        os.mkdir("n" * 250, dir_fd=folder)
        below = os.open("n" * 250, os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = below
    os.close(os.open("leaf", os.O_CREAT | os.O_WRONLY, dir_fd=folder))
    os.close(folder)
    with pytest.raises(LimitError, match=r"import top"):
        StagedSource("top", directory)
