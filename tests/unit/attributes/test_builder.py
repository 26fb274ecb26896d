"""Columns as they are collected and encoded: types, defaults, dictionaries, what is refused."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import numpy as np
import pytest

from dlfs.attributes import AttributesBuilder, AttributeTable
from dlfs.attributes import builder as building
from dlfs.errors import LimitError, UsageError
from dlfs.format.attributes import DICTIONARY, TEXT

UUID_ = UUID(int=7)


def add(builder: AttributesBuilder, count: int, before: int, **columns: Any) -> None:
    builder.append(builder.prepare(columns, count), before)


def frozen(builder: AttributesBuilder, rows: list[int]) -> AttributeTable:
    parts = builder.freeze(UUID_, np.array(rows, np.int64))
    return AttributeTable.over(np.concatenate(parts), parts[0].nbytes)


def test_columns_come_back_in_the_order_of_the_rows() -> None:
    builder = AttributesBuilder()
    add(builder, 2, 0, label=np.array([5, 6], np.int16), word=["a", "b"])
    add(builder, 1, 2, label=[7], word=np.array(["c"]))
    table = frozen(builder, [2, 0, 1])
    assert table.column("label").tolist() == [7, 5, 6]
    assert table.column("label").dtype == np.int16
    assert table.column("word").tolist() == ["c", "a", "b"]
    assert table.column("word", [2, 2, 0]).tolist() == ["b", "b", "c"]
    assert len(builder) == 0


def test_samples_without_a_value_have_the_default_of_the_type() -> None:
    builder = AttributesBuilder()
    add(builder, 1, 2, i=[1], f=np.ones(1, np.float16), b=[True], s=["x"])
    table = frozen(builder, [0, 1, 2, 3])
    assert table.column("i").tolist() == [0, 0, 1, 0]
    assert table.column("b").tolist() == [False, False, True, False]
    assert table.column("s").tolist() == ["", "", "x", ""]
    np.testing.assert_array_equal(table.column("f"), np.array([np.nan, np.nan, 1, np.nan], "f2"))


def test_numbers_take_the_type_of_the_column_when_nothing_is_lost() -> None:
    builder = AttributesBuilder()
    add(builder, 1, 0, i=np.array([1], np.int16), f=np.array([0.5], np.float32))
    add(builder, 1, 1, i=[300], f=[2])
    add(builder, 1, 2, i=[2.0], f=[float("nan")])
    table = frozen(builder, [0, 1, 2])
    assert table.column("i").dtype == np.int16
    assert table.column("i").tolist() == [1, 300, 2]
    assert table.column("f").tolist()[:2] == [0.5, 2]
    assert np.isnan(table.column("f")[2])


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (np.int8(1), 300),
        (np.uint64(1), -1),
        (np.int64(1), np.uint64(1 << 63)),
        (np.int64(1), 0.5),
        (np.int64(1), float("nan")),
        (np.int64(1), 2.0**63),
        (np.float64(1), (1 << 53) + 1),
        (np.float32(1), 0.1),
        (1, True),
        (True, 1),
        (1, "1"),
        ("1", 1),
    ],
)
def test_values_of_another_type_are_refused(first: Any, then: Any) -> None:
    builder = AttributesBuilder()
    add(builder, 1, 0, x=np.asarray([first]))
    with pytest.raises(UsageError, match="add attribute 'x': expected "):
        builder.prepare({"x": np.asarray([then])}, 1)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.zeros((2, 1, 1)), "expected 2 values or vectors"),
        (np.zeros((3, 2)), "expected 2 values, or vectors of .* got float64 of shape"),
        (np.zeros((2, 0)), "expected 2 values, or vectors"),
        ([["a", "b"], ["c", "d"]], "vectors of bools or numbers"),
        ([1, 2, 3], "expected 2 values"),
        (5, "expected 2 values"),
        ([None, None], "got NoneType"),
        (["a", 1], "got int"),
        (["a", float("nan")], "got float"),
        (["a", 1 << 70], "got int"),
        (np.array([1j, 2j]), "got complex128"),
        (np.array([b"a", b"b"]), r"got \|S1"),
        (["\udc80", "a"], "expected strings for UTF-8"),
        (np.zeros(2, np.longdouble), "got float128|got longdouble"),
    ],
)
def test_values_that_no_column_can_have_are_refused(values: Any, message: str) -> None:
    if isinstance(values, list) and values[-1] == 1 << 70:
        values = np.array(values, object)
    with pytest.raises(UsageError, match=message):
        AttributesBuilder().prepare({"x": values}, 2)


@pytest.mark.parametrize("name", ["", "a\0b", "é" * 128, "\udcff", "dlfs:other"])
def test_names_that_no_column_can_have_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="add attribute"):
        AttributesBuilder().prepare({name: [1]}, 1)


def test_reserved_columns_hold_strings() -> None:
    builder = AttributesBuilder()
    with pytest.raises(UsageError, match="dlfs:shape': expected strings"):
        builder.prepare({"dlfs:shape": [1]}, 1)
    add(builder, 1, 0, **{"dlfs:shape": ["2,3"]})
    assert frozen(builder, [0]).column("dlfs:shape").tolist() == ["2,3"]


def test_there_are_at_most_1024_columns() -> None:
    builder = AttributesBuilder()
    add(builder, 1, 0, **{f"c{i}": [i] for i in range(1024)})
    with pytest.raises(LimitError, match="expected at most 1024 columns, got 1025"):
        builder.prepare({"one more": [1]}, 1)
    table = frozen(builder, [0])
    assert [int(table.column(f"c{i}")[0]) for i in range(1024)] == list(range(1024))


def test_what_is_refused_changes_nothing() -> None:
    builder = AttributesBuilder()
    add(builder, 1, 0, x=[1])
    with pytest.raises(UsageError):
        builder.prepare({"new": [1], "x": ["no number"]}, 1)
    assert list(frozen(builder, [0]).dtypes) == ["x"]


def test_few_different_strings_are_a_dictionary_and_many_are_text() -> None:
    builder = AttributesBuilder()
    count = 400
    few = [f"class {i % 3}" for i in range(count)]
    some = [f"class {i % 300}, a longer word" for i in range(count)]
    many = [f"caption {i}" for i in range(count)]
    add(builder, count, 0, few=few, some=some, many=many)
    rows = list(range(count - 1, -1, -1))
    table = frozen(builder, rows)
    assert (table.form("few").kind, table.form("few").index_bytes) == (DICTIONARY, 1)
    assert (table.form("some").kind, table.form("some").index_bytes) == (DICTIONARY, 2)
    assert table.form("many").kind == TEXT
    for name, values in (("few", few), ("some", some), ("many", many)):
        assert table.column(name).tolist() == values[::-1]
    codes, values = table.values("few").codes, table.values("few").strings
    assert codes is not None
    assert values is not None
    assert bytes(values.text) == b"class 0class 1class 2"


def test_a_dictionary_that_grows_too_large_becomes_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "DICTIONARY_VALUES_MAX", 10)
    monkeypatch.setattr(building, "_ROWS_AT_ONCE", 7)
    builder = AttributesBuilder()
    values = [f"ä{i % 4 if i < 20 else i}" for i in range(50)]
    for first in range(0, 50, 5):
        add(builder, 5, first, s=values[first : first + 5])
    add(builder, 1, 55, s=["last"])
    size = builder.size_bytes
    table = frozen(builder, list(range(56)))
    assert table.form("s").kind == TEXT
    assert table.column("s").tolist() == [*values, "", "", "", "", "", "last"]
    assert table.head.segment_bytes <= size


def test_size_bytes_is_at_least_that_of_the_segment() -> None:
    for count in (0, 1, 2000):
        builder = AttributesBuilder()
        assert builder.size_bytes == 0
        add(
            builder, count, 0, i=np.arange(count), s=[str(i) for i in range(count)], b=["x"] * count
        )
        size = builder.size_bytes
        assert frozen(builder, list(range(count))).head.segment_bytes <= size
