"""Fields that an import declares: entries, patterns, and values made to fit a type."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dlfs.errors import FormatError, UsageError
from dlfs.fields import FieldType
from dlfs.ingest.fields import FieldRecords, choose_fields, fit_value, parse_choices
from dlfs.ingest.tables.plain import field_type, field_values, plain_array


def test_entries_are_names_or_names_with_types() -> None:
    entries = ["image/encoded", "a:b", "c:text", "d:e:<f4[?,3]", "f:M8[ns][]", "*"]
    choices = parse_choices(entries, "import x")
    assert list(choices) == ["image/encoded", "a:b", "c", "d:e", "f", "*"]
    types = [None if kind is None else str(kind) for kind in choices.values()]
    assert types == [None, None, "text", "<f4[?,3]", "<M8[ns][]", None]


def test_patterns_take_the_names_that_no_entry_has() -> None:
    choices = parse_choices(["b*:bytes", "c", "*", "x*"], "import x")
    found = choose_fields(choices, ["a", "b1", "b2", "c", "d"])
    assert {name: str(kind) for name, kind in found.items()} == {
        "b1": "bytes",
        "b2": "bytes",
        "c": "None",
        "a": "None",
        "d": "None",
        "x*": "None",
    }
    assert list(choose_fields(parse_choices(["a[0]"], ""), ["a[0]", "a0"])) == ["a[0]"]


@pytest.mark.parametrize(
    ("kind", "value", "want"),
    [
        ("text", "größer".encode(), "größer"),
        ("bytes", "größer", "größer".encode()),
        ("<f4[2]", np.ones(2, "<f4").tobytes(), np.ones(2, "<f4")),
        (">u2[?,2]", b"\0\1\0\2\0\3\0\4", np.array([[1, 2], [3, 4]], ">u2")),
        ("bfloat16[?]", b"\x80\x3f", np.array([0x3F80], "<u2")),
        ("<c8[]", np.array(1j, "<c8").tobytes(), np.array(1j, "<c8")),
        ("|S3[2]", b"abcdef", np.array([b"abc", b"def"])),
        ("<i4[]", np.array([-5]), np.array(-5, "<i4")),
        ("<i4[]", np.int64(7), np.array(7, "<i4")),
        ("<f2[2,1]", np.array([0.5, 1]), np.array([[0.5], [1]], "<f2")),
        ("<f4[2]", np.array([1, np.inf]), np.array([1, np.inf], "<f4")),
        ("<f4[?,4]", np.zeros(0, "<f4"), np.zeros((0, 4), "<f4")),
        ("<f4[?,4]", np.zeros((0, 0), "<f4"), np.zeros((0, 4), "<f4")),
        ("<f4[?,?]", np.zeros((2, 3), "<f4"), np.zeros((2, 3), "<f4")),
    ],
)
def test_values_are_made_to_fit(kind: str, value: Any, want: Any) -> None:
    got = fit_value(FieldType.parse(kind), value)
    if isinstance(want, np.ndarray):
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
    assert np.array_equal(got, want)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("<u1[]", np.array([300])),
        ("<u8[]", np.array([-1])),
        ("<i8[]", np.array([1 << 63], np.uint64)),
        ("<i4[]", np.array([0.5])),
        ("<f4[2]", np.array([1, 2])),
        ("<f4[]", np.array(1e39)),
        ("<f2[2]", np.array([70000, np.inf], "<f4")),
        ("<f4[2]", bytes(12)),
        ("<f4[?,?]", bytes(12)),
        ("<f4[?,0]", bytes(12)),
        ("<f4[2,2]", np.zeros((4, 1), np.float32)),
        ("text", 5),
        ("bytes", 5),
    ],
)
def test_values_that_do_not_fit_name_sample_and_field(kind: str, value: Any) -> None:
    maker = FieldRecords({"x": FieldType.parse(kind)})
    with pytest.raises(FormatError, match=r"^import f: s: field 'x': expected"):
        maker.make(b"s", {"x": value}, "import f: s")


def test_types_are_declared_known_or_those_of_the_first_sample() -> None:
    maker = FieldRecords({"a": FieldType.parse("<i4[]")}, {"b": FieldType.parse("<f4[2]")})
    pair = np.zeros(2, "<f4")
    record = maker.make(b"s", {"c": "t", "b": pair, "a": np.int64(3)}, "import f: s")
    fields = record.attributes["dlfs:fields"]
    assert fields == '{"c":"text","b":"<f4[2]","a":"<i4[]"}'
    with pytest.raises(FormatError, match=r"^import f: t: field 'c': expected text, got 5"):
        maker.make(b"t", {"c": 5, "b": pair, "a": np.int64(3)}, "import f: t")
    with pytest.raises(UsageError, match="expected fields of different names, got a, a:text"):
        parse_choices(["a", "a:text"], "import f")


# ---- Arrow ---------------------------------------------------------------------------------------


def read(array: Any) -> list[Any]:
    kind = field_type(array.type)
    assert kind is not None
    return list(field_values(plain_array(array), kind, lambda row: f"row {row}"))


def test_lists_of_sliced_arrays_are_their_own() -> None:
    rows = [[[1, 2], [3, 4]], [], [[5, 6]], [[]], [[7], [8], [9]]]
    for inner in (pa.list_(pa.int16()), pa.large_list(pa.int16())):
        array = pa.array(rows, pa.list_(inner))
        for first in range(len(rows)):
            for got, want in zip(read(array.slice(first)), rows[first:], strict=True):
                assert got.tolist() == want
                assert got.dtype == np.int16
    tensors = pa.array(range(24)).cast(pa.int32())
    fixed = pa.FixedSizeListArray.from_arrays(tensors, 6)
    assert [got.tolist() for got in read(fixed.slice(2))] == fixed.slice(2).to_pylist()
    kind = pa.fixed_shape_tensor(pa.int32(), [2, 3])
    shaped = pa.ExtensionArray.from_storage(kind, fixed)
    assert str(field_type(kind)) == "<i4[2,3]"
    assert np.array_equal(read(shaped.slice(1)), shaped.slice(1).to_numpy_ndarray())
    assert field_type(pa.fixed_shape_tensor(pa.int32(), [2, 3], permutation=[1, 0])) is None


@pytest.mark.parametrize(
    "kind",
    [
        pa.list_(pa.string()),
        pa.map_(pa.string(), pa.int32()),
        pa.null(),
        pa.month_day_nano_interval(),
        pa.list_(pa.list_(pa.int64(), 1 << 30), 1 << 30),
        pa.struct({"a": pa.int32()}),
    ],
)
def test_other_types_are_no_fields(kind: Any) -> None:
    assert field_type(kind) is None


def test_text_that_is_not_utf_8_names_its_row() -> None:
    data = pa.array([b"a", b"\xff"]).view(pa.string())
    with pytest.raises(FormatError, match="row 1: expected text in UTF-8, got other bytes"):
        read(data)
