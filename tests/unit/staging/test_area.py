"""The staging area: its files on disk, and moving datasets out of sight and back."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from uuid import UUID

import pytest

from dlfs.errors import (
    DeviceError,
    ExistsError,
    FormatError,
    LockedError,
    NotFoundError,
    UsageError,
)
from dlfs.staging.area import StagingArea
from tests.support.files import write_files

VOLUME, OTHER, SEALED = UUID(int=1), UUID(int=2), UUID(int=3)


def begin(folder: Path, **files: bytes) -> Path:
    folder.mkdir()
    return write_files(folder, files)


def take(area: StagingArea, name: bytes, uuid: UUID = SEALED, owner: int | None = None) -> None:
    os.close(area.take(name, uuid, owner))


def test_creation_that_was_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "the disk went away")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fail)
        with pytest.raises(DeviceError, match="the disk went away"):
            StagingArea(tmp_path / "area", VOLUME)
    with StagingArea(tmp_path / "area", VOLUME) as area:
        assert area.names() == []


@pytest.mark.root
@pytest.mark.parametrize("part", ["area", "area/.dlfs", "area/.dlfs/sealing"])
def test_a_directory_of_another_user_is_refused(tmp_path: Path, part: str) -> None:
    with StagingArea(tmp_path / "area", VOLUME):
        os.chown(tmp_path / part, 65534, 65534)
    with pytest.raises(UsageError, match=r"expected a directory of user 0, got .* of user 65534"):
        StagingArea(tmp_path / "area", VOLUME)


def test_its_own_directory_is_no_link(tmp_path: Path) -> None:
    (tmp_path / "area").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "area/.dlfs").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DeviceError):
        StagingArea(tmp_path / "area", VOLUME)
    assert os.listdir(tmp_path / "elsewhere") == []


def test_any_directory_can_be_one(tmp_path: Path) -> None:
    begin(tmp_path / "data", a=b"1")
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("data")
    tmp_path.chmod(0o751)
    with StagingArea(tmp_path, VOLUME) as area:
        assert area.names() == [b"data"]
        assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o751
    with pytest.raises(DeviceError) as caught:
        StagingArea(tmp_path / "file", VOLUME)
    assert caught.value.errno == errno.ENOTDIR


def test_one_server_and_one_volume(tmp_path: Path) -> None:
    folder = tmp_path / "area"
    with StagingArea(folder, VOLUME):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        with pytest.raises(LockedError, match=f"process {os.getpid()} uses it"):
            StagingArea(folder, VOLUME, wait_seconds=0.1)
    with pytest.raises(UsageError, match=f"expected one of volume {OTHER}"):
        StagingArea(folder, OTHER)
    (folder / ".dlfs/volume").write_text('{"format": 1}')
    with pytest.raises(UsageError, match="expected format 2, got 1"):
        StagingArea(folder, VOLUME)
    for text in ("nothing", "[]"):
        (folder / ".dlfs/volume").write_text(text)
        with pytest.raises(FormatError, match="'volume' of the staging area"):
            StagingArea(folder, VOLUME)


def test_contents_count_the_files_that_become_samples(tmp_path: Path) -> None:
    with StagingArea(tmp_path / "area", VOLUME) as area:
        top = begin(tmp_path / "area/x", a=b"123", b=b"")
        (top / "d/e").mkdir(parents=True)
        os.link(top / "a", top / "d/e/hard")
        (top / "link").symlink_to("/")
        os.mkfifo(top / "fifo")
        deep = os.open(top, os.O_RDONLY)
        for _ in range(30):  # longer than any path may be
            os.mkdir("n" * 250, dir_fd=deep)
            below = os.open("n" * 250, os.O_RDONLY, dir_fd=deep)
            os.close(deep)
            deep = below
        os.close(os.open("leaf", os.O_CREAT | os.O_WRONLY, dir_fd=deep))
        os.close(deep)
        found = area.contents(b"x")
        assert (found.files, found.file_bytes) == (4, 6)
        assert found.since <= (top / "b").stat().st_ctime
        take(area, b"x")
        area.remove(SEALED)
        area.delete_removed()
        assert os.listdir(tmp_path / "area/.dlfs/removed") == []


@pytest.mark.parametrize("ends", [True, False])
def test_deleting_is_not_stopped_by_modes_and_follows_no_links(tmp_path: Path, ends: bool) -> None:
    begin(tmp_path / "precious", file=b"")
    with StagingArea(tmp_path / "area", VOLUME) as area:
        top = begin(tmp_path / "area/x", a=b"")
        (top / "d/e").mkdir(parents=True)
        (top / "d/e/f").touch()
        (top / "d/link").symlink_to(tmp_path / "precious")
        for folder in (top / "d/e", top / "d"):
            folder.chmod(0)
        take(area, b"x")
        area.remove(SEALED)
        if ends:
            calls = iter([False, False, True])
            area.delete_removed(lambda: next(calls, True))
            assert os.listdir(tmp_path / "area/.dlfs/removed") != []
        area.delete_removed()
        assert os.listdir(tmp_path / "area/.dlfs/removed") == []
    assert os.listdir(tmp_path / "precious") == ["file"]


def test_taking_and_putting_back(tmp_path: Path) -> None:
    with StagingArea(tmp_path / "area", VOLUME) as area:
        odd = "odd ü name".encode()
        top = begin(tmp_path / "area" / odd.decode(), a=b"1")
        before = top.stat().st_ino
        take(area, odd)
        assert (area.names(), area.taken()) == ([], [SEALED])
        assert area.put_back(SEALED) == odd
        assert (area.names(), area.taken(), top.stat().st_ino) == ([odd], [], before)
        for name in (b"none", b"file", b"link"):
            (tmp_path / "area/file").touch()
            if not (tmp_path / "area/link").is_symlink():
                (tmp_path / "area/link").symlink_to(top)
            with pytest.raises(NotFoundError, match="is no directory"):
                take(area, name)
        with pytest.raises(UsageError, match="the server's directory"):
            take(area, b".dlfs")
        assert area.taken() == []


def test_a_name_that_was_made_again(tmp_path: Path) -> None:
    with StagingArea(tmp_path / "area", VOLUME) as area:
        begin(tmp_path / "area/x", a=b"old")
        take(area, b"x")
        begin(tmp_path / "area/x", b=b"new")
        with pytest.raises(ExistsError, match=rf"{SEALED}/x back.*{tmp_path}/area/x was made"):
            area.put_back(SEALED)
        assert (tmp_path / f"area/.dlfs/sealing/{SEALED}/x/a").read_bytes() == b"old"
        assert (tmp_path / "area/x/b").read_bytes() == b"new"
        (tmp_path / "area/x").rename(tmp_path / "area/y")
        (tmp_path / "area/x").touch()
        with pytest.raises(ExistsError):
            area.put_back(SEALED)
        (tmp_path / "area/x").unlink()
        (tmp_path / "area/x").mkdir()  # empty: nothing is lost
        area.put_back(SEALED)
        assert (tmp_path / "area/x/a").read_bytes() == b"old"


def test_a_name_that_is_replaced_in_the_moment_of_taking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(tmp_path / "secret", s=b"s")
    with StagingArea(tmp_path / "area", VOLUME) as area:
        begin(tmp_path / "area/x", a=b"1")
        rename = os.rename

        def replace_first(*arguments: str, **options: int) -> None:
            monkeypatch.undo()
            rename(tmp_path / "area/x", tmp_path / "area/mine")
            (tmp_path / "area/x").symlink_to(tmp_path / "secret")
            rename(*arguments, **options)

        monkeypatch.setattr(os, "rename", replace_first)
        with pytest.raises(LockedError, match="was replaced in this moment"):
            take(area, b"x")
        assert (tmp_path / "area/x").is_symlink()
        assert (area.names(), area.taken()) == ([b"mine"], [])


@pytest.mark.root
def test_what_is_not_theirs(tmp_path: Path) -> None:
    with StagingArea(tmp_path / "area", VOLUME) as area:
        begin(tmp_path / "area/x", a=b"1")
        with pytest.raises(DeviceError, match="belongs to user 0, not to user 65534") as caught:
            take(area, b"x", owner=65534)
        assert caught.value.errno == errno.EACCES
        assert (area.names(), area.taken()) == ([b"x"], [])
        os.chown(tmp_path / "area/x", 65534, 65534)
        take(area, b"x", owner=65534)
        area.put_back(SEALED)
        take(area, b"x")


def test_a_crash_between_two_steps(tmp_path: Path) -> None:
    with StagingArea(tmp_path / "area", VOLUME) as area:
        (tmp_path / f"area/.dlfs/sealing/{OTHER}").mkdir()  # before the rename, or behind one back
        assert area.taken() == [OTHER]
        assert area.put_back(OTHER) == b""
        assert area.taken() == []


def test_mount_points_and_full_paths_are_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with StagingArea(tmp_path / "area", VOLUME) as area:
        begin(tmp_path / "area/x", a=b"1")

        def fail(*_: object, **__: object) -> None:
            raise OSError(errno.EBUSY, "Device or resource busy")

        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", fail)
            with pytest.raises(DeviceError, match="out of sight: Device or resource busy"):
                take(area, b"x")
        assert (area.names(), area.taken()) == ([b"x"], [])
