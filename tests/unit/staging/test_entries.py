"""System calls on one entry: never outside the directory, never on another file."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dlfs.staging import entries
from dlfs.staging.entries import Change, Owner, identity_of
from tests.support import descriptors

ME = Owner(os.geteuid(), os.getegid())
SOMEBODY = Owner(4321, 4321)


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[int]:
    descriptor = os.open(tmp_path, os.O_PATH | os.O_DIRECTORY)
    yield descriptor
    os.close(descriptor)


def errno_of(call: Callable[[], object]) -> int:
    with pytest.raises(OSError) as caught:
        call()
    return caught.value.errno or 0


def test_another_file_of_that_name_is_stale(directory: int, tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    (tmp_path / "b").touch()
    (tmp_path / "d").mkdir()
    other = identity_of((tmp_path / "b").stat())
    for call in (
        lambda: entries.stat_expected(directory, b"a", other),
        lambda: entries.open_file(directory, b"a", other, os.O_RDWR | os.O_TRUNC),
        lambda: entries.change(directory, b"a", other, Change(mode=0)),
        lambda: entries.hard_link(directory, b"a", other, directory, b"c"),
        lambda: entries.open_below(directory, [b"d"], other),
    ):
        before = descriptors.count_below(tmp_path)
        assert errno_of(call) == errno.ESTALE
        assert descriptors.count_below(tmp_path) == before
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "d"]


def test_no_link_is_followed(
    directory: int, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    outside = tmp_path_factory.mktemp("outside")
    (outside / "secret").write_bytes(b"secret")
    (outside / "secret").chmod(0o644)
    (tmp_path / "file").symlink_to(outside / "secret")
    (tmp_path / "folder").symlink_to(outside)
    (tmp_path / "dangling").symlink_to(outside / "new")
    link = identity_of((tmp_path / "file").lstat())
    secret = identity_of((outside / "secret").stat())
    for identity in (link, secret):
        code = errno_of(
            lambda same=identity: entries.open_file(directory, b"file", same, os.O_RDWR)
        )
        assert code in (errno.ELOOP, errno.ESTALE)
    folder = identity_of(outside.stat())
    with pytest.raises(NotADirectoryError):
        entries.open_below(directory, [b"folder"], folder)
    for name in (b"file", b"dangling"):
        code = errno_of(lambda path=name: entries.create(directory, path, os.O_WRONLY, 0o600, ME))
        assert code == errno.ELOOP
    assert errno_of(lambda: entries.change(directory, b"file", link, Change(mode=0))) == (
        errno.EOPNOTSUPP
    )
    entries.change(directory, b"file", link, Change(modify_ns=5))
    assert (tmp_path / "file").lstat().st_mtime_ns == 5
    entries.hard_link(directory, b"file", link, directory, b"hard")
    assert (tmp_path / "hard").is_symlink()
    assert entries.read_link(directory, b"hard", link) == os.fsencode(outside / "secret")
    assert errno_of(lambda: entries.read_link(directory, b"hard", secret)) == errno.ESTALE
    assert (outside / "secret").read_bytes() == b"secret"
    assert stat.S_IMODE((outside / "secret").stat().st_mode) == 0o644
    assert os.listdir(outside) == ["secret"]


def test_creating(directory: int, tmp_path: Path) -> None:
    flags = os.O_RDWR | os.O_APPEND | os.O_DIRECT
    descriptor, status = entries.create(directory, b"a", flags, 0o6640, ME)
    assert stat.S_IMODE(status.st_mode) == 0o6640
    assert entries.write_all(descriptor, b"12345", 3) == 5
    assert entries.write_all(descriptor, b"0", 0) == 1  # at the given offset, not at the end
    os.close(descriptor)
    assert (tmp_path / "a").read_bytes() == b"0\0\x0012345"
    assert errno_of(lambda: entries.create(directory, b"a", flags | os.O_EXCL, 0, ME)) == (
        errno.EEXIST
    )
    again, _ = entries.create(directory, b"a", flags | os.O_TRUNC, 0o600, ME)
    os.close(again)
    assert (tmp_path / "a").stat().st_size == 0
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o6640


@pytest.mark.root
def test_what_cannot_be_given_away_is_not_left(
    directory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "chown", refuse)
    for call in (
        lambda: entries.create(directory, b"a", os.O_WRONLY, 0o600, SOMEBODY),
        lambda: entries.make_directory(directory, b"a", 0o700, SOMEBODY),
        lambda: entries.make_node(directory, b"a", stat.S_IFIFO | 0o600, SOMEBODY),
        lambda: entries.make_symlink(directory, b"a", b"x", SOMEBODY),
    ):
        before = descriptors.count_below(tmp_path)
        assert errno_of(call) == errno.EPERM
        assert os.listdir(tmp_path) == []
        assert descriptors.count_below(tmp_path) == before
    group = Owner(ME.uid, 4321)  # a group that is not ours to give is no reason to refuse
    os.close(entries.create(directory, b"a", os.O_WRONLY, 0o600, group)[0])
    entries.make_symlink(directory, b"b", b"x", group)
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_removed_files_stay_open(directory: int, tmp_path: Path) -> None:
    """No other file can get the identity, and the link count shows whether a name is left."""
    (tmp_path / "a").write_bytes(b"a")
    os.link(tmp_path / "a", tmp_path / "b")
    os.link(tmp_path / "a", tmp_path / "c")
    (tmp_path / "d").mkdir()
    (tmp_path / "new").write_bytes(b"new")
    before = descriptors.count_below(tmp_path)
    first, second = (entries.unlink(directory, name) for name in (b"a", b"b"))
    moved, replaced = entries.rename(directory, b"new", directory, b"c", replace=True)
    folder = entries.remove_directory(directory, b"d")
    assert replaced is not None
    assert [os.fstat(removed).st_nlink for removed in (first, second, replaced, folder)] == [0] * 4
    assert identity_of(os.fstat(first)) == identity_of(os.fstat(replaced)) != identity_of(moved)
    for removed in (first, second, replaced, folder):
        os.close(removed)
    (tmp_path / "d/e").mkdir(parents=True)
    assert errno_of(lambda: entries.remove_directory(directory, b"d")) == errno.ENOTEMPTY
    assert errno_of(lambda: entries.unlink(directory, b"d")) == errno.EISDIR
    assert errno_of(lambda: entries.unlink(directory, b"a")) == errno.ENOENT
    assert (
        errno_of(lambda: entries.rename(directory, b"c", directory, b"d", replace=True))
        == errno.EISDIR
    )
    assert descriptors.count_below(tmp_path) == before


def test_renaming_without_replacing(directory: int, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a")
    (tmp_path / "b").write_bytes(b"b")
    refused = errno_of(lambda: entries.rename(directory, b"a", directory, b"b", replace=False))
    assert refused == errno.EEXIST
    moved, replaced = entries.rename(directory, b"a", directory, b"c", replace=False)
    assert (moved.st_size, replaced) == (1, None)
    entries.sync_directory(directory)
    assert sorted(os.listdir(tmp_path)) == ["b", "c"]


def test_a_write_to_a_full_disk_returns_the_bytes_written(
    directory: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    descriptor, _ = entries.create(directory, b"a", os.O_WRONLY, 0o600, ME)
    pwrite, room = os.pwrite, [7]

    def small(fd: int, data: bytes, offset: int) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        took = pwrite(fd, data[: min(4, room[0])], offset)
        room[0] -= took
        return took

    monkeypatch.setattr(os, "pwrite", small)
    assert entries.write_all(descriptor, b"0123456789", 0) == 7
    assert errno_of(lambda: entries.write_all(descriptor, b"789", 7)) == errno.ENOSPC
    os.close(descriptor)
    assert (tmp_path / "a").read_bytes() == b"0123456"


def test_walking(directory: int, tmp_path: Path) -> None:
    for path in ("a", "d/b", "d/e/c", "f/g"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    (tmp_path / os.fsdecode(b"d/\xff")).symlink_to("..")
    (tmp_path / "twin").hardlink_to(tmp_path / "d/e/c")
    before = descriptors.count_below(tmp_path)
    found = dict(entries.walk_files(directory))
    assert sorted(found) == [b"a", b"d/b", b"d/e/c", b"d/\xff", b"f/g", b"twin"]
    assert found[b"twin"].st_nlink == 2
    wanted = identity_of(found[b"twin"])
    assert entries.find_files(directory, {wanted}).keys() == {wanted}
    walk = entries.walk_files(directory)
    for path, _ in walk:
        if b"/" in path:
            break
    walk.close()
    assert descriptors.count_below(tmp_path) == before


def test_walking_while_entries_are_removed(directory: int, tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    (tmp_path / "b").touch()
    (tmp_path / "d").mkdir()
    (tmp_path / "e").mkdir()
    walk = entries.walk_files(directory)
    path, _ = next(walk)
    for name in {b"a", b"b"} - {path}:
        (tmp_path / os.fsdecode(name)).unlink()
    (tmp_path / "d").rmdir()
    (tmp_path / "e").rmdir()
    assert list(walk) == []
