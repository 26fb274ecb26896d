from __future__ import annotations

import pytest

from dlfs.errors import LimitError, UsageError
from dlfs.format.names import (
    DatasetName,
    dataset_name_bytes,
    new_dataset_name,
    parse_dataset,
)


@pytest.mark.parametrize("name", ["train", b"\xff\n", "a b", "n" * 255])
def test_names_of_datasets(name: str | bytes) -> None:
    raw = dataset_name_bytes(name)
    assert raw == (name if isinstance(name, bytes) else name.encode())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", r"1\.\.255 bytes"),
        (".", r"another name, got '\.'"),
        ("..", "another name"),
        ("a/b", "no slash, got one at byte 1"),
        (b"a\0", "no NUL byte"),
    ],
)
def test_wrong_names_of_datasets(name: str | bytes, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        dataset_name_bytes(name)


def test_a_long_name_of_a_dataset() -> None:
    with pytest.raises(LimitError, match="at most 255 bytes, got 256"):
        dataset_name_bytes("n" * 256)


@pytest.mark.parametrize(
    "name", ["train", "a b", "été", "字", "a.b", "p-1", "n" * 244, b"x\xc3\xa9"]
)
def test_names_of_new_datasets(name: str | bytes) -> None:
    assert new_dataset_name(name) == (name if isinstance(name, bytes) else name.encode())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "got 0 bytes"),
        ("a@1", "got '@' at character 1"),
        ("a@b", "got '@' at character 1"),
        ("--help", "got '-' at character 0"),
        ("-", "got '-' at character 0"),
        ("a\nb", r"got '\\n' at character 1"),
        ("a\x1b[0m", r"got '\\x1b' at character 1"),
        ("a\x7f", r"got '\\x7f' at character 1"),
        ("é\u2028", r"got '\\u2028' at character 1"),
        ("a\0", r"got '\\x00' at character 1"),
        ("a/b", "got '/' at character 1"),
        (" a", "got ' ' at its beginning"),
        ("a\u00a0", r"got '\\xa0' at its end"),
        (".", "reserved"),
        ("..", "reserved"),
        ("incoming", "reserved"),
        (b"a\xff", "got byte 0xff at byte 1, which is not UTF-8"),
        ("a\udcff", "got byte 0xff at byte 1, which is not UTF-8"),
    ],
)
def test_wrong_names_of_new_datasets(name: str | bytes, message: str) -> None:
    with pytest.raises(
        UsageError, match=f"name a new dataset .*: .*{message}.*; a dataset's name is"
    ):
        new_dataset_name(name)


def test_a_long_name_of_a_new_dataset() -> None:
    with pytest.raises(LimitError, match="got 245 bytes; a dataset's name is 1 to 244 bytes"):
        new_dataset_name("n" * 245)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("p", (b"p", None)),
        ("p@1", (b"p", 1)),
        (b"p@4294967295", (b"p", 4294967295)),
        ("p@q@2", (b"p@q", 2)),
        ("old@7", (b"old@7", None)),
        ("old@7@3", (b"old@7", 3)),
        ("p@0", (b"p@0", None)),
        ("p@01", (b"p@01", None)),
        ("p@-1", (b"p@-1", None)),
        ("p@\u0663", ("p@\u0663".encode(), None)),
        ("@1", (b"@1", None)),
        ("p@", (b"p@", None)),
        ("a\nb@2", (b"a\nb", 2)),
    ],
)
def test_a_name_is_read_with_its_version(
    text: str | bytes, expected: tuple[bytes, int | None]
) -> None:
    assert parse_dataset(text, {b"p", b"old@7"}) == DatasetName(*expected)


def test_a_name_is_shown_with_its_version() -> None:
    assert [str(DatasetName(b"p\xff")), str(DatasetName(b"p", 3))] == ["p\udcff", "p@3"]
