"""The staging area: its files on disk, and recovery after a crash."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from uuid import UUID

import pytest

from dlfs.errors import DeviceError, FormatError, LockedError, UsageError
from dlfs.staging.area import StagingArea

VOLUME, OTHER, SEALED = UUID(int=1), UUID(int=2), UUID(int=3)


def begin(area: StagingArea, name: bytes, **files: bytes) -> Path:
    area.create(name, mode=0o750, uid=os.geteuid(), gid=os.getegid())
    for file, data in files.items():
        (Path(area.path(name)) / file).write_bytes(data)
    return Path(area.path(name))


def test_creation_that_was_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "the disk went away")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fail)
        with pytest.raises(DeviceError, match="the disk went away"):
            StagingArea(tmp_path / "area", VOLUME)
    assert sorted(os.listdir(tmp_path / "area")) == ["lock", "volume.new"]
    with StagingArea(tmp_path / "area", VOLUME) as area:
        assert area.names() == []


@pytest.mark.root
def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    with StagingArea(tmp_path / "area", VOLUME):
        os.chown(tmp_path / "area", 65534, 65534)
    with pytest.raises(UsageError, match="expected a directory of user 0, got one of user 65534"):
        StagingArea(tmp_path / "area", VOLUME)


def test_datasets_are_made_renamed_and_removed(tmp_path: Path) -> None:
    with StagingArea(tmp_path / "area", VOLUME) as area:
        odd = "odd ü name".encode()
        folder = begin(area, odd, a=b"12345")
        assert stat.S_IMODE(folder.stat().st_mode) == 0o750
        begin(area, b"empty")
        assert area.names() == [b"empty", odd]
        with pytest.raises(FileExistsError):
            begin(area, odd)
        with pytest.raises(OSError, match="not empty"):
            area.rename(b"empty", odd)
        with pytest.raises(OSError, match="not empty"):
            area.remove_empty(odd)
        area.rename(odd, odd)
        area.rename(odd, b"empty")
        assert area.names() == [b"empty"]
        found = area.contents(b"empty")
        assert (found.files, found.file_bytes) == (1, 5)
        assert found.since == pytest.approx((tmp_path / "area/volume").stat().st_mtime, abs=60)
        with pytest.raises(FileNotFoundError):
            area.contents(odd)
        for bad in (b"a@1", b"odd\n", b"\xff"):
            with pytest.raises(UsageError, match="a dataset's name is"):
                begin(area, bad)
            with pytest.raises(UsageError, match="a dataset's name is"):
                area.rename(b"empty", bad)
        with pytest.raises(OSError, match="245 bytes"):
            begin(area, b"n" * 245)
        assert area.names() == [b"empty"]
    with StagingArea(tmp_path / "area", VOLUME) as area:
        assert area.names() == [b"empty"]


def test_contents_count_the_files_that_become_samples(tmp_path: Path) -> None:
    with StagingArea(tmp_path / "area", VOLUME) as area:
        top = begin(area, b"x", a=b"123", b=b"")
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
        area.take_out(b"x")
        area.delete_removed()
        assert os.listdir(tmp_path / "area/removed") == []


def test_deleting_is_not_stopped_by_modes_and_follows_no_links(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/file").touch()
    with StagingArea(tmp_path / "area", VOLUME) as area:
        top = begin(area, b"x", a=b"")
        (top / "d/e").mkdir(parents=True)
        (top / "d/e/f").touch()
        (top / "d/link").symlink_to(tmp_path / "precious")
        for folder in (top / "d/e", top / "d", top):
            folder.chmod(0)
        area.take_out(b"x")
        area.delete_removed()
        assert os.listdir(tmp_path / "area/removed") == []
    assert os.listdir(tmp_path / "precious") == ["file"]


def test_one_server_and_one_volume(tmp_path: Path) -> None:
    folder = tmp_path / "area"
    with StagingArea(folder, VOLUME):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        with pytest.raises(LockedError, match=f"process {os.getpid()} uses it"):
            StagingArea(folder, VOLUME, wait_seconds=0.1)
    with pytest.raises(UsageError, match=f"expected one of volume {OTHER}"):
        StagingArea(folder, OTHER)
    (folder / "volume").write_text('{"format": 2}')
    with pytest.raises(UsageError, match="expected format 1, got 2"):
        StagingArea(folder, VOLUME)
    for text in ("nothing", "[]"):
        (folder / "volume").write_text(text)
        with pytest.raises(FormatError, match="'volume' of the staging area"):
            StagingArea(folder, VOLUME)


def test_other_directories_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="other files in it"):
        StagingArea(tmp_path, VOLUME)
    assert os.listdir(tmp_path) == ["file"]
    with pytest.raises(DeviceError) as caught:
        StagingArea(tmp_path / "file", VOLUME)
    assert caught.value.errno in (errno.EEXIST, errno.ENOTDIR)


def test_recovery(tmp_path: Path) -> None:
    with StagingArea(tmp_path / "area", VOLUME) as area:
        begin(area, b"open", a=b"1")
        begin(area, b"interrupted", a=b"2")
        area.begin_seal(b"interrupted", OTHER)
        begin(area, b"sealed", a=b"3")
        area.begin_seal(b"sealed", SEALED)
        begin(area, b"removed").rmdir()
        (tmp_path / "area/making/half").mkdir()
    for _ in range(2):  # the second time there is nothing left to do
        with StagingArea(tmp_path / "area", VOLUME) as area:
            assert area.recover({SEALED, VOLUME}) in ([b"sealed"], [])
            assert area.names() == [b"interrupted", b"open"]
            assert not (tmp_path / "area/datasets/interrupted/seal").exists()
            area.delete_removed()
            assert os.listdir(tmp_path / "area/removed") == []
            assert os.listdir(tmp_path / "area/making") == []


@pytest.mark.parametrize("record", ["{}", '{"uuid": "x"}', '{"uuid"', "[1]"])
def test_damaged_records(tmp_path: Path, record: str) -> None:
    with StagingArea(tmp_path / "area", VOLUME) as area:
        begin(area, b"x", a=b"1")
        (tmp_path / "area/datasets/x/seal").write_text(record)
        with pytest.raises(FormatError, match="dataset 'x'"):
            area.recover({SEALED})
        assert area.names() == [b"x"]
