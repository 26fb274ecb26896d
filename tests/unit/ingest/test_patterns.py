"""Braces and globs."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlfs.errors import LimitError, NotFoundError, UsageError
from dlfs.ingest.patterns import expand, expand_braces


def test_ranges_keep_their_zeros() -> None:
    assert expand_braces("t-{098..101}.tar") == ["t-098.tar", "t-099.tar", "t-100.tar", "t-101.tar"]


def test_lists_and_ranges_multiply() -> None:
    assert expand_braces("{a,b}/{0..1}") == ["a/0", "a/1", "b/0", "b/1"]


@pytest.mark.parametrize("pattern", ["{3..1}", "{a..c}", "{}", "{x}"])
def test_braces_without_sense_are_refused(pattern: str) -> None:
    with pytest.raises(UsageError):
        expand_braces(pattern)


@pytest.mark.parametrize("pattern", ["{0..99999999999}", "{0..9999}{0..9999}"])
def test_too_many_names_are_refused(pattern: str) -> None:
    with pytest.raises(LimitError):
        expand_braces(pattern)


def test_globs_match_in_order(tmp_path: Path) -> None:
    for name in ("b.tar", "a.tar", "c.zip"):
        (tmp_path / name).touch()
    assert expand(f"{tmp_path}/*.tar") == [f"{tmp_path}/a.tar", f"{tmp_path}/b.tar"]
    with pytest.raises(NotFoundError):
        expand(f"{tmp_path}/*.tgz")


def test_a_path_that_exists_names_itself(tmp_path: Path) -> None:
    (tmp_path / "{1..2}[a]*").touch()
    assert expand(f"{tmp_path}/{{1..2}}[a]*") == [f"{tmp_path}/{{1..2}}[a]*"]
