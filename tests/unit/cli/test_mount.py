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
    assert "expected VOLUME and DIR, or --replace DIR" in run("mount", "v.img").err
