"""Columns as they are read: views, strings, Arrow, and segments that are wrong."""

from __future__ import annotations

import struct
from typing import Any
from uuid import UUID

import numpy as np
import pytest

from dlfs._native.checksums import crc32c, crc32c_blocks
from dlfs.attributes import AttributesBuilder, AttributeTable
from dlfs.errors import ChecksumError, FormatError, NotFoundError, UsageError, VersionError

COLUMNS: dict[str, Any] = {
    "bool": np.array([True, False, True]),
    "half": np.array([1.5, np.nan, -2], np.float16),
    "long": np.array([1, 2, 3]),
    "class": ["cat", "cat", "dog" * 20],
    "text": ["ä", "", "文字"],
}


def segment(columns: dict[str, Any] = COLUMNS, count: int = 3) -> tuple[np.ndarray, int]:
    builder = AttributesBuilder()
    builder.append(builder.prepare(columns, count), 0)
    parts = builder.freeze(UUID(int=7), np.arange(count))
    return np.concatenate(parts), parts[0].nbytes


def resigned(raw: np.ndarray, head_bytes: int) -> np.ndarray:
    """A segment that was changed, with the right checksums."""
    changed = raw.copy()
    forms = struct.unpack_from("<I", changed, 56)[0]
    names = sum(struct.unpack_from("<H", changed, 64 + 24 * i + 2)[0] for i in range(forms))
    table = -(-(64 + 24 * forms + names) // 8) * 8
    sums = crc32c_blocks(changed[head_bytes:].data, 4096).view(np.uint8)
    changed[table : table + sums.size] = sums
    struct.pack_into("<I", changed, 8, crc32c(changed[12:head_bytes].data))
    return changed


def test_columns_of_fixed_width_are_views() -> None:
    raw, head_bytes = segment()
    table = AttributeTable.over(raw, head_bytes)
    long = table.column("long")
    assert np.shares_memory(long, raw)
    assert not long.flags.writeable
    assert not table.column("long", [0]).flags.writeable
    assert not table.column("class").flags.writeable
    assert len(table) == 3
    assert "long" in table
    assert "short" not in table
    assert table.dtypes == {
        "bool": np.dtype(bool), "half": np.dtype("f2"), "long": np.dtype("i8"),
        "class": np.dtype(object), "text": np.dtype(object),
    }  # fmt: skip


def test_some_values_by_index() -> None:
    table = AttributeTable.over(*segment())
    assert table.column("long", [2, 0, 2]).tolist() == [3, 1, 3]
    assert table.column("text", np.array([2, 0], np.uint64)).tolist() == ["文字", "ä"]
    assert table.column("class", [1]).tolist() == ["cat"]
    assert table.column("class", []).tolist() == []
    for wrong in ([3], [-1], [0.5], ["a"]):
        with pytest.raises(UsageError, match="expected i"):
            table.column("long", wrong)
    with pytest.raises(NotFoundError, match=r"'short'.*no such column; there are: 'bool',"):
        table.column("short")


def test_the_empty_table() -> None:
    table = AttributeTable.empty(UUID(int=7), 5)
    assert (len(table), table.dtypes) == (5, {})
    with pytest.raises(NotFoundError, match="there are: none"):
        table.column("x")
    assert table.to_arrow().num_columns == 0


def test_no_samples() -> None:
    table = AttributeTable.over(*segment({"i": np.empty(0, int), "s": np.empty(0, "U1")}, 0))
    assert table.column("i").tolist() == []
    assert table.column("s").tolist() == []


def test_arrow() -> None:
    arrow = pytest.importorskip("pyarrow")
    raw, head_bytes = segment()
    found = AttributeTable.over(raw, head_bytes).to_arrow()
    assert found.column_names == list(COLUMNS)
    assert [str(field.type) for field in found.schema] == [
        "bool", "halffloat", "int64",
        "dictionary<values=large_string, indices=uint8, ordered=0>", "large_string",
    ]  # fmt: skip
    for name in ("bool", "long", "class", "text"):
        assert found[name].to_pylist() == list(COLUMNS[name])
    address = found["long"].chunk(0).buffers()[1].address
    assert raw.ctypes.data <= address < raw.ctypes.data + raw.size
    assert arrow.total_allocated_bytes() < 1 << 20


def test_arrow_refuses_what_is_not_utf8() -> None:
    pytest.importorskip("pyarrow")
    raw, head_bytes = segment({"s": ["abc"]}, 1)
    changed = resigned(_patched(raw, head_bytes + 17, b"\xff"), head_bytes)
    with pytest.raises(FormatError, match="UTF"):
        AttributeTable.over(changed, head_bytes).to_arrow()


def _patched(raw: np.ndarray, at: int, data: bytes) -> np.ndarray:
    changed = raw.copy()
    changed[at : at + len(data)] = np.frombuffer(data, np.uint8)
    return changed


def column_at(name: str) -> int:
    raw, head_bytes = segment()
    table = AttributeTable.over(raw, head_bytes)
    return table.head.extent(list(COLUMNS).index(name))[0]


@pytest.mark.parametrize(
    ("name", "at", "data", "message"),
    [
        ("bool", 1, b"\2", "expected 0 or 1 in a bool"),
        ("class", 0, b"\2", "expected indices below 2, got 2"),
        ("class", 8, b"\1", "expected offsets rising"),
        ("class", 16, b"\xff", "expected offsets rising"),
        ("text", 24, b"\1", "expected offsets rising"),
        ("text", 32, b"\xff", "column 'text'.*can't decode"),
    ],
)
def test_values_that_are_wrong(name: str, at: int, data: bytes, message: str) -> None:
    raw, head_bytes = segment()
    changed = resigned(_patched(raw, column_at(name) + at, data), head_bytes)
    table = AttributeTable.over(changed, head_bytes, where="here")
    with pytest.raises(FormatError, match=f"here: read column '{name}'.*{message}|{message}"):
        table.column(name)
    assert table.column("long").tolist() == [1, 2, 3]  # others are read all the same


def test_a_flipped_bit_is_told_by_its_block() -> None:
    raw, head_bytes = segment()
    at = column_at("long")
    changed = _patched(raw, at + 3, b"\1")
    table = AttributeTable.over(changed, head_bytes, where="here")
    with pytest.raises(ChecksumError, match=f"column 'long'.*block at byte {at} of the segment"):
        table.column("long")
    with pytest.raises(ChecksumError):
        table.verify()


def test_every_wrong_block_of_a_column_is_found() -> None:
    raw, head_bytes = segment({"first": np.arange(1024), "long": np.arange(1024)}, 1024)
    head = AttributeTable.over(raw, head_bytes).head
    for number in range(2):
        offset, length = head.extent(number)
        for block in range(length // 4096):
            for at in range(0, 4096, 512):  # some of these checksums are too high, some too low
                changed = _patched(raw, offset + block * 4096 + at, b"\xa5")
                memory = changed[offset : offset + length]
                assert head.wrong_blocks(number, memory).tolist() == [block]
                with pytest.raises(ChecksumError, match=f"byte {offset + block * 4096} of"):
                    head.verify(number, memory, "here")
        assert not head.wrong_blocks(number, raw[offset : offset + length]).size


HEADS = [
    ("magic", 0, b"X", FormatError, "expected 'DLFSATT1'"),
    ("version", 12, b"\2", VersionError, "expected version 1, got 2"),
    ("samples", 32, b"\xff\xff\xff\xff\xff\xff\xff\xff", FormatError, "by its columns"),
    ("samples", 33, b"\xff", FormatError, "by its columns"),
    ("segment bytes", 40, b"\1", FormatError, "by its columns"),
    ("head bytes", 49, b"\1", FormatError, "in a segment of"),
    ("columns", 56, b"\xff\xff", FormatError, "expected at most 1024 columns"),
    ("columns", 56, b"\0\4", FormatError, "expected at most 1024 columns in a head of 4096"),
    ("kind", 64, b"\0", FormatError, "expected a kind"),
    ("kind", 64, b"\x0f", FormatError, "column 0"),
    ("name bytes", 66, b"\0", FormatError, "expected 1 to 255 bytes"),
    ("name bytes", 66, b"\xff\xff", FormatError, "column 0"),
    ("index bytes", 68, b"\1", FormatError, "bytes of an index"),
    ("values", 72, b"\1", FormatError, "values of a dictionary"),
    ("text", 80, b"\1", FormatError, "bytes of text"),
    ("dictionary's index", 64 + 3 * 24 + 4, b"\3", FormatError, "bytes of an index"),
    ("dictionary's values", 64 + 3 * 24 + 8, b"\1\1", FormatError, "values of a dictionary"),
    ("text's bytes", 64 + 4 * 24 + 16, b"\xff" * 8, FormatError, "bytes of text"),
    ("a name that is not UTF-8", 64 + 5 * 24, b"\xff", FormatError, "column 0"),
    ("two of one name", 64 + 5 * 24, b"longhalflong", FormatError, "different names"),
]


@pytest.mark.parametrize(
    ("at", "data", "error", "message"), [row[1:] for row in HEADS], ids=[row[0] for row in HEADS]
)
def test_heads_that_are_wrong(at: int, data: bytes, error: type[Exception], message: str) -> None:
    raw, head_bytes = segment()
    changed = _patched(raw, at, data)
    if at >= 12:
        with pytest.raises(ChecksumError):
            AttributeTable.over(changed, head_bytes)
    struct.pack_into("<I", changed, 8, crc32c(changed[12:head_bytes].data))
    with pytest.raises(error, match=message):
        AttributeTable.over(changed, head_bytes, where="here")


def test_a_segment_that_ends_early() -> None:
    raw, head_bytes = segment()
    with pytest.raises(FormatError, match=f"expected {raw.size} bytes, got {raw.size - 1}"):
        AttributeTable.over(raw[:-1], head_bytes)
    with pytest.raises(FormatError, match="expected a head of at least 64 bytes, got 60"):
        AttributeTable.over(raw, 60)
