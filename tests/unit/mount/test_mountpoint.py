from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlfs.errors import DeviceError, NotFoundError, UsageError
from dlfs.mount import mountpoint
from dlfs.mount.mountpoint import (
    absolute,
    detach,
    device_of,
    find_mount,
    parse_mountinfo,
    prepare,
    unmount,
)

LINE = rb"39 28 0:33 / /mnt/a\040b\134c\012d rw,ro shared:5 - fuse.dlfs dlfs ro,user_id=0"


def test_parse_mountinfo() -> None:
    (record,) = parse_mountinfo(LINE + b"\n")
    assert record.mountpoint == b"/mnt/a b\\c\nd"
    assert record.file_system_type == "fuse.dlfs"
    assert record.options == "rw,ro"
    assert record.device == "0:33"
    without_tags = LINE.replace(b" shared:5", b"")
    assert parse_mountinfo(without_tags) == [record]


@given(st.binary())
def test_parse_anything(text: bytes) -> None:
    parse_mountinfo(text)
    parse_mountinfo(LINE + text)


def test_find_mount() -> None:
    record = find_mount("/proc")
    assert record is not None
    assert record.file_system_type == "proc"
    assert find_mount("/proc/self") is None
    about = os.stat("/proc")
    assert device_of("/proc") == f"{os.major(about.st_dev)}:{os.minor(about.st_dev)}"
    assert device_of("/proc/self") is None


def test_absolute_resolves_what_leads_there(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert absolute(tmp_path / "link" / "x") == os.path.realpath(tmp_path / "real" / "x")
    assert absolute("/") == "/"


def test_prepare_follows_a_link_to_the_directory(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert prepare(tmp_path / "link") == os.path.realpath(tmp_path / "real")


def test_prepare_refuses(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="empty directory"):
        prepare(tmp_path)
    with pytest.raises(UsageError, match="expected a directory"):
        prepare(tmp_path / "file")
    with pytest.raises(NotFoundError, match=r"'mkdir -p .*' makes it"):
        prepare(tmp_path / "missing")


def test_unmount_refuses_what_is_not_ours(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="got nothing mounted there"):
        unmount(tmp_path)
    with pytest.raises(UsageError, match="got proc mounted there"):
        unmount("/proc")


def test_an_unmount_that_does_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    helper = tmp_path / "fusermount3"
    helper.write_text("#!/bin/sh\nexec sleep 100\n")
    helper.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(mountpoint, "_UNMOUNT_TIMEOUT_S", 0.1)
    with pytest.raises(DeviceError, match="its server does not answer; use --lazy"):
        detach("/mnt")


def test_without_proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mountpoint, "MOUNTINFO", tmp_path / "missing")
    for call in (prepare, unmount, find_mount):
        with pytest.raises(DeviceError, match="a mount needs /proc"):
            call(tmp_path)
