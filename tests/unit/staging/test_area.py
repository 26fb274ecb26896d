"""The spool: what is on disk, and what a crash leaves of it."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from uuid import UUID

import pytest

from dlfs.errors import DeviceError, FormatError, LockedError, UsageError
from dlfs.staging.area import Spool

VOLUME, OTHER, SEALED = UUID(int=1), UUID(int=2), UUID(int=3)


def begin(spool: Spool, name: bytes, **files: bytes) -> Path:
    spool.make(name, mode=0o750, uid=os.geteuid(), gid=os.getegid())
    for file, data in files.items():
        (Path(spool.path(name)) / file).write_bytes(data)
    return Path(spool.path(name))


def test_a_spool_whose_making_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "the disk went away")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fail)
        with pytest.raises(DeviceError, match="the disk went away"):
            Spool(tmp_path / "spool", VOLUME)
    assert sorted(os.listdir(tmp_path / "spool")) == ["lock", "volume.new"]
    with Spool(tmp_path / "spool", VOLUME) as spool:
        assert spool.names() == []


@pytest.mark.root
def test_a_directory_of_somebody_else_is_no_spool(tmp_path: Path) -> None:
    with Spool(tmp_path / "spool", VOLUME):
        os.chown(tmp_path / "spool", 65534, 65534)
    with pytest.raises(UsageError, match="expected a directory of user 0, got one of user 65534"):
        Spool(tmp_path / "spool", VOLUME)


def test_datasets_are_made_renamed_and_removed(tmp_path: Path) -> None:
    with Spool(tmp_path / "spool", VOLUME) as spool:
        odd = "odd ü name".encode()
        folder = begin(spool, odd, a=b"12345")
        assert stat.S_IMODE(folder.stat().st_mode) == 0o750
        begin(spool, b"empty")
        assert spool.names() == [b"empty", odd]
        with pytest.raises(FileExistsError):
            begin(spool, odd)
        with pytest.raises(OSError, match="not empty"):
            spool.rename(b"empty", odd)
        with pytest.raises(OSError, match="not empty"):
            spool.remove_empty(odd)
        spool.rename(odd, odd)
        spool.rename(odd, b"empty")
        assert spool.names() == [b"empty"]
        found = spool.contents(b"empty")
        assert (found.files, found.file_bytes) == (1, 5)
        assert found.since == pytest.approx((tmp_path / "spool/volume").stat().st_mtime, abs=60)
        with pytest.raises(FileNotFoundError):
            spool.contents(odd)
        for bad in (b"a@1", b"odd\n", b"\xff"):
            with pytest.raises(UsageError, match="a dataset's name is"):
                begin(spool, bad)
            with pytest.raises(UsageError, match="a dataset's name is"):
                spool.rename(b"empty", bad)
        with pytest.raises(OSError, match="245 bytes"):
            begin(spool, b"n" * 245)
        assert spool.names() == [b"empty"]
    with Spool(tmp_path / "spool", VOLUME) as spool:
        assert spool.names() == [b"empty"]


def test_contents_count_what_would_be_samples(tmp_path: Path) -> None:
    with Spool(tmp_path / "spool", VOLUME) as spool:
        top = begin(spool, b"x", a=b"123", b=b"")
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
        found = spool.contents(b"x")
        assert (found.files, found.file_bytes) == (4, 6)
        spool.let_go(b"x")
        spool.empty_removed()
        assert os.listdir(tmp_path / "spool/removed") == []


def test_deleting_is_not_stopped_by_modes_and_follows_no_links(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/file").touch()
    with Spool(tmp_path / "spool", VOLUME) as spool:
        top = begin(spool, b"x", a=b"")
        (top / "d/e").mkdir(parents=True)
        (top / "d/e/f").touch()
        (top / "d/link").symlink_to(tmp_path / "precious")
        for folder in (top / "d/e", top / "d", top):
            folder.chmod(0)
        spool.let_go(b"x")
        spool.empty_removed()
        assert os.listdir(tmp_path / "spool/removed") == []
    assert os.listdir(tmp_path / "precious") == ["file"]


def test_one_server_and_one_volume(tmp_path: Path) -> None:
    folder = tmp_path / "spool"
    with Spool(folder, VOLUME):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        with pytest.raises(LockedError, match=f"process {os.getpid()} uses it"):
            Spool(folder, VOLUME, wait_seconds=0.1)
    with pytest.raises(UsageError, match=f"expected one of volume {OTHER}"):
        Spool(folder, OTHER)
    (folder / "volume").write_text('{"format": 2}')
    with pytest.raises(UsageError, match="expected format 1, got 2"):
        Spool(folder, VOLUME)
    for text in ("nothing", "[]"):
        (folder / "volume").write_text(text)
        with pytest.raises(FormatError, match="'volume' of the spool"):
            Spool(folder, VOLUME)


def test_what_is_no_spool_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="other files in it"):
        Spool(tmp_path, VOLUME)
    assert os.listdir(tmp_path) == ["file"]
    with pytest.raises(DeviceError) as caught:
        Spool(tmp_path / "file", VOLUME)
    assert caught.value.errno in (errno.EEXIST, errno.ENOTDIR)


def test_recovery(tmp_path: Path) -> None:
    with Spool(tmp_path / "spool", VOLUME) as spool:
        begin(spool, b"open", a=b"1")
        begin(spool, b"interrupted", a=b"2")
        spool.begin_seal(b"interrupted", OTHER)
        begin(spool, b"sealed", a=b"3")
        spool.begin_seal(b"sealed", SEALED)
        begin(spool, b"removed").rmdir()
        (tmp_path / "spool/making/half").mkdir()
    for _ in range(2):  # the second time there is nothing left to do
        with Spool(tmp_path / "spool", VOLUME) as spool:
            assert spool.recover({SEALED, VOLUME}) in ([b"sealed"], [])
            assert spool.names() == [b"interrupted", b"open"]
            assert not (tmp_path / "spool/datasets/interrupted/seal").exists()
            spool.empty_removed()
            assert os.listdir(tmp_path / "spool/removed") == []
            assert os.listdir(tmp_path / "spool/making") == []


@pytest.mark.parametrize("record", ["{}", '{"uuid": "x"}', '{"uuid"', "[1]"])
def test_damaged_records(tmp_path: Path, record: str) -> None:
    with Spool(tmp_path / "spool", VOLUME) as spool:
        begin(spool, b"x", a=b"1")
        (tmp_path / "spool/datasets/x/seal").write_text(record)
        with pytest.raises(FormatError, match="dataset 'x'"):
            spool.recover({SEALED})
        assert spool.names() == [b"x"]
