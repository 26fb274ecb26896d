from __future__ import annotations

from pathlib import PurePosixPath

import pytest

from dlfs.errors import LimitError, UsageError
from dlfs.format.paths import PathLike, display, path_bytes, path_problem


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("a/b.png", b"a/b.png"),
        (b"a\xff/\n b", b"a\xff/\n b"),
        (PurePosixPath("x") / "y", b"x/y"),
        ("caf\u00e9", b"caf\xc3\xa9"),
        ("bad\udcff", b"bad\xff"),
        ("...", b"..."),
        ("/".join(["c" * 255] * 15 + ["d" * 255]), None),
    ],
)
def test_paths_become_bytes(path: PathLike, expected: bytes | None) -> None:
    got = path_bytes(path)
    assert got == (expected or str(path).encode())
    assert path_bytes(display(got)) == got


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("", r"1\.\.4095 bytes, got 0"),
        ("/a", "an empty component at byte 0"),
        ("a/", "an empty component at byte 2"),
        ("a//b", "an empty component at byte 2"),
        ("a/./b", r"'\.' at byte 2"),
        ("..", r"'\.\.' at byte 0"),
        ("a\0b", "NUL byte, got one at byte 1"),
        ("\ud800", "text that UTF-8 can hold"),
    ],
)
def test_wrong_paths_are_refused(path: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        path_bytes(path)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("a/" + "b" * 256, "at most 255 bytes, got 256 at byte 2"),
        ("/".join(["c" * 255] * 16) + "/", "at most 4095 bytes, got 4096"),
    ],
)
def test_long_paths_are_refused(path: str, message: str) -> None:
    with pytest.raises(LimitError, match=message):
        path_bytes(path)


LONGEST = b"/".join([b"c" * 255] * 16)
"""A path of 4095 bytes, with components of 255."""


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (LONGEST, None),
        (b"a", None),
        (LONGEST + b"/", "expected 1..4095 bytes, got 4096"),
        (LONGEST + b"/d", "expected 1..4095 bytes, got 4097"),
        (b"", "expected 1..4095 bytes, got 0"),
        (LONGEST[:-1] + b"\0", "expected no NUL byte, got one at byte 4094"),
        (LONGEST[:-2] + b"//", "got an empty component at byte 4094"),
        (b"c" * 255 + b"//", "got an empty component at byte 256"),
        (b"c" * 256 + b"//", "at most 255 bytes, got 256 at byte 0"),
    ],
)
def test_the_reason_is_named_at_the_limits(raw: bytes, problem: str | None) -> None:
    got = path_problem(raw)
    if problem is None:
        assert got is None
    else:
        assert got is not None
        assert problem in got
