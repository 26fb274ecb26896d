"""Types of fields: what their text may be, their alignment, the type of a value."""

from __future__ import annotations

import numpy as np
import pytest

from dlfs.errors import UsageError
from dlfs.fields import FIELDS_MAX, FieldType, fields_of_json, parse_fields


@pytest.mark.parametrize(
    ("text", "canonical", "alignment"),
    [
        ("bytes", "bytes", 1),
        ("text", "text", 1),
        ("<f4[?,128,3]", "<f4[?,128,3]", 4),
        ("<i8[]", "<i8[]", 8),
        ("float32[2]", "<f4[2]", 4),
        ("bool[]", "|b1[]", 1),
        ("<c16[3]", "<c16[3]", 16),
        ("bfloat16[?]", "bfloat16[?]", 2),
        ("<U3[]", "<U3[]", 4),
        ("|S5[]", "|S5[]", 1),
        ("<M8[ns][?]", "<M8[ns][?]", 8),
    ],
)
def test_a_type_has_one_text_and_an_alignment(text: str, canonical: str, alignment: int) -> None:
    kind = FieldType.parse(text)
    assert str(kind) == canonical
    assert kind.alignment_bytes == alignment
    assert FieldType.parse(canonical) == kind


@pytest.mark.parametrize(
    "text",
    [
        "", "byte", "<f4", "<f4[", "<f4[-1]", "<f4[1,]", "<f4[x]", "O[]", "V4[]", "S[]", "i4,i4[]",
        "(2,)i4[]", "<f4[" + "1," * 32 + "1]", "<f8[9999999999999]", "<f4[" + "9" * 600 + "]", 3,
        None, "<q9[]",
    ],
)  # fmt: skip
def test_other_texts_are_no_types(text: object) -> None:
    with pytest.raises(UsageError, match="expected"):
        FieldType.parse(text)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (b"x", "bytes"),
        (bytearray(2), "bytes"),
        (memoryview(b"x"), "bytes"),
        ("x", "text"),
        (3, "<i8[]"),
        (True, "|b1[]"),
        (0.5, "<f8[]"),
        (1j, "<c16[]"),
        (np.float32(1), "<f4[]"),
        ([1, 2], "<i8[?]"),
        (np.zeros((2, 3), ">u2"), ">u2[?,?]"),
    ],
)
def test_a_value_has_a_type(value: object, text: str) -> None:
    assert str(FieldType.of_value(value)) == text


@pytest.mark.parametrize("value", [None, object(), {"a": 1}, [1, "x", None], np.zeros(2, "V3")])
def test_other_values_have_no_type(value: object) -> None:
    with pytest.raises(UsageError, match="expected bytes, text"):
        FieldType.of_value(value)


@pytest.mark.parametrize(
    "text",
    [
        "x", "[]", "{}", "3", '{"a":1}', '{"a":"bytes","a":"text"}', '{"":"text"}', '{"a":"O[]"}',
        "[" * 100_000, '{"a\\u0000":"text"}', '{"' + "a" * 201 + '":"text"}', '{"\\ud800":"text"}',
        " " * (1 << 19),
    ],
)  # fmt: skip
def test_other_texts_are_no_fields(text: str) -> None:
    with pytest.raises(UsageError, match="expected"):
        fields_of_json(text)


def test_the_number_of_fields_has_a_limit() -> None:
    with pytest.raises(UsageError, match=f"1 to {FIELDS_MAX} fields"):
        parse_fields({str(number): "text" for number in range(FIELDS_MAX + 1)})
