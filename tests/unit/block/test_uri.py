"""Device URIs: accepted ones, refused ones, and arbitrary text, which never crashes the parser."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlfs.block.uri import FileUri, format_path, parse_uri, split_members
from dlfs.block.uri_help import describe_schemes
from dlfs.errors import UsageError
from tests.unit.block.uris import ACCEPTED, REFUSED, SECRETS


@pytest.mark.parametrize(("text", "expected"), ACCEPTED)
def test_accepts(text: str, expected: object) -> None:
    parsed = parse_uri(text)
    assert parsed == expected
    assert parse_uri(str(parsed)) == parsed


@pytest.mark.parametrize(("text", "says"), REFUSED)
def test_refuses(text: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_uri(text)
    assert says in str(caught.value)
    assert str(caught.value).isascii()
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(("text", "secret"), SECRETS)
def test_no_error_contains_a_key(text: str, secret: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_uri(text)
    assert secret[:8] not in str(caught.value)


@given(st.text(max_size=200))
def test_any_text_parses_or_is_refused(text: str) -> None:
    for prefix in ("", "file:", "mem:", "nvme-tcp://", "nvme-tcp+discover://", "spdk:"):
        try:
            parsed = parse_uri(prefix + text)
        except UsageError:
            continue
        assert parse_uri(str(parsed)) == parsed


@given(st.binary(min_size=1, max_size=60).filter(lambda path: b"\0" not in path))
def test_any_file_name_has_a_uri(path: bytes) -> None:
    text = os.fsdecode(path)
    (member,) = split_members(format_path(text))
    assert parse_uri(member) == FileUri(text)


def test_members_are_split_at_commas() -> None:
    assert split_members("a.img") == ("a.img",)
    assert split_members("a.img, mem:1MiB,b") == ("a.img", "mem:1MiB", "b")
    for bad in ("", ",", "a,,b", "a,", " "):
        with pytest.raises(UsageError, match="single commas"):
            split_members(bad)
    assert len(split_members(",".join(["x"] * 64))) == 64
    with pytest.raises(UsageError, match="64"):
        split_members(",".join(["x"] * 65))


def test_every_scheme_is_described_by_an_example_that_parses() -> None:
    schemes = describe_schemes()
    assert len({type(parse_uri(scheme.example)) for scheme in schemes}) == len(schemes) == 5
