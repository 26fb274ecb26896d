"""``dlfs mount --replace`` on the command line; tests/fuse replaces servers."""

from __future__ import annotations

from pathlib import Path

import pytest

from .conftest import Run


@pytest.mark.parametrize(
    ("words", "left_out"),
    [
        (["--mode", "400"], "--mode"),
        (["-f"], "--foreground"),
        (["--no-uring", "--memory", "1GiB"], "--no-uring"),
        (["v.img"], "VOLUME"),
    ],
)
def test_the_volume_and_options_stay(
    run: Run, tmp_path: Path, words: list[str], left_out: str
) -> None:
    done = run("mount", "--replace", tmp_path, *words)
    assert done.code == 2
    assert f"leave {left_out} out" in done.err


def test_a_volume_of_the_environment_is_not_given(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DLFS_VOLUME", "/v.img")
    done = run("mount", "--replace", tmp_path, "--busy-poll-us", "0")
    assert "got nothing mounted there" in done.err
    assert "no such directory" in run("mount", tmp_path / "nothing").err


def test_a_mount_needs_a_volume_and_a_directory(run: Run) -> None:
    assert "expected VOLUME and DIR, --holder FOLDER and VOLUME, or" in run("mount", "v.img").err


def test_writing_is_for_one_volume(run: Run, tmp_path: Path) -> None:
    for words in (["a.img", "b.img"], ["a.img", "--nested"]):
        done = run("mount", *words, tmp_path, "--incoming", "staging")
        assert done.code == 2
        assert "what programs write goes to one volume; mount that without others" in done.err


def test_each_volume_is_given_once(run: Run, volume: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mnt"
    folder.mkdir()
    for word in ("--foreground", "--quiet"):
        done = run("mount", volume, volume, folder, word)
        assert done.code == 2
        assert "a volume is given twice" in done.err
