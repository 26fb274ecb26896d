"""Sizes, read and written."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlfs.base.units import GIB, KIB, MIB, TIB, format_bytes, parse_bytes
from dlfs.errors import UsageError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        ("4096B", 4096),
        ("64MiB", 64 * MIB),
        ("64 mib", 64 * MIB),
        (" 1.5 GiB ", 3 * GIB // 2),
        ("2GB", 2 * 10**9),
        ("2g", 2 * 10**9),
        ("3Ki", 3 * KIB),
        ("1TiB", TIB),
        ("0.5k", 500),
    ],
)
def test_parse(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text", ["", "x", "-1", "1 PiB", "1..5", "MiB", "1e3", "1 2", "nan", "9" * 400]
)
def test_parse_refuses(text: str) -> None:
    with pytest.raises(UsageError, match="read a size"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (64 * MIB, "64.0 MiB"),
        (3 * GIB, "3.0 GiB"),
        (5000 * TIB, "5000.0 TiB"),
    ],
)
def test_format(size: int, text: str) -> None:
    assert format_bytes(size) == text


@given(st.integers(0, 1 << 62))
def test_a_formatted_size_can_be_parsed(size: int) -> None:
    assert parse_bytes(format_bytes(size)) == pytest.approx(size, rel=0.06, abs=1)
