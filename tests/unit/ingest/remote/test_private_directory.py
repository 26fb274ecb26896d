"""Directories of one user alone: made, taken, or refused."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from dlfs.errors import DlfsError, UsageError
from dlfs.ingest.remote.private_directory import open_private_directory

NOBODY = 65534


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def take(path: Path) -> None:
    open_private_directory(str(path), "spool x").close()


def test_directories_are_made_for_the_user_alone(tmp_path: Path) -> None:
    take(tmp_path / "a" / "b")
    assert (mode(tmp_path / "a"), mode(tmp_path / "a" / "b")) == (0o700, 0o700)
    (tmp_path / "readable").mkdir()
    (tmp_path / "readable").chmod(0o755)
    take(tmp_path / "readable")
    assert mode(tmp_path / "readable") == 0o700


@pytest.mark.parametrize("bits", [0o770, 0o777, 0o1777])
def test_one_to_which_others_may_write_is_refused(tmp_path: Path, bits: int) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(bits)
    with pytest.raises(UsageError, match=r"spool x: expected a directory of mode 0700, got"):
        take(tmp_path / "open")
    assert mode(tmp_path / "open") == bits & 0o1777


def test_links_and_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(0o700)
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "file").write_bytes(b"")
    for name in ("link", "dangling", "file"):
        with pytest.raises(UsageError, match="got a link or a file"):
            take(tmp_path / name)
    assert not (tmp_path / "nowhere").exists()


def test_a_parent_in_which_everyone_may_rename_is_refused(tmp_path: Path) -> None:
    above = tmp_path / "above"
    above.mkdir()
    above.chmod(0o777)
    with pytest.raises(UsageError, match="to which not everyone may write"):
        take(above / "own")
    above.chmod(0o1777)
    take(above / "own")
    with pytest.raises(DlfsError, match="make the directory"):
        take(Path("/proc/self/own"))


@pytest.mark.root
def test_directories_of_other_users_are_refused(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir(0o700)
    os.chown(tmp_path / "other", NOBODY, NOBODY)
    with pytest.raises(UsageError, match=f"got one of user {NOBODY}"):
        take(tmp_path / "other")
    with pytest.raises(UsageError, match="or root, got one of user"):
        take(tmp_path / "other" / "own")
