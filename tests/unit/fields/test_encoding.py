"""Encoding: the bytes and columns of a sample, and which values a type takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dlfs._native.checksums import crc32c
from dlfs.errors import UsageError
from dlfs.fields import FieldEncoder


def test_fields_lie_in_order_at_multiples_of_their_alignment() -> None:
    encoder = FieldEncoder({"text": "text", "number": "<u4[]", "wide": "<c16[?]", "end": "bytes"})
    values = {"end": b"e", "wide": np.array([1j]), "number": 7, "text": "ab"}
    data, columns = encoder.encode(values, "add")
    wide = np.array([1j]).tobytes()
    assert data.tobytes() == b"ab\0\0" + b"\7\0\0\0" + bytes(8) + wide + b"e"
    assert columns == {
        "dlfs:fields": '{"text":"text","number":"<u4[]","wide":"<c16[?]","end":"bytes"}',
        "dlfs:field:text:bytes": 2,
        "dlfs:field:text:crc32c": crc32c(b"ab"),
        "dlfs:field:number:crc32c": crc32c(b"\7\0\0\0"),
        "dlfs:field:wide:shape": "1",
        "dlfs:field:wide:crc32c": crc32c(wide),
        "dlfs:field:end:bytes": 1,
        "dlfs:field:end:crc32c": crc32c(b"e"),
    }


@pytest.mark.parametrize(
    ("kind", "value", "stored"),
    [
        ("<u2[]", 3, np.array(3, "<u2")),
        ("<f4[]", 0.1, np.array(0.1, "<f4")),
        ("<f8[2]", [1, 2], np.array([1.0, 2.0])),
        ("<c8[]", 2, np.array(2, "<c8")),
        ("|u1[?]", [True, 2], np.array([1, 2], "|u1")),
        (">i4[?]", np.array([1, 2], "<i4"), np.array([1, 2], ">i4")),
        ("<i4[?,2]", np.arange(6, dtype="<i4").reshape(2, 3).T, np.array([[0, 3], [1, 4], [2, 5]])),
        ("bfloat16[2]", np.array([16256, 0], "<u2"), np.array([16256, 0], "<u2")),
        ("|S3[?]", np.array([b"abc"]), np.array([b"abc"])),
    ],
)
def test_a_type_takes_values(kind: str, value: Any, stored: Any) -> None:
    data, _ = FieldEncoder({"x": kind}).encode({"x": value}, "add")
    dtype = FieldEncoder({"x": kind}).fields["x"].dtype
    assert data.tobytes() == np.ascontiguousarray(stored.astype(dtype)).tobytes()


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("<u1[]", 300),
        ("<u8[]", -1),
        ("<i4[]", 0.5),
        ("<i4[]", np.int64(3)),
        ("<f4[2]", np.zeros(2)),
        ("<f4[2]", [1, 2, 3]),
        ("<f4[]", b"abcd"),
        ("<f4[]", None),
        ("|b1[]", 1),
        ("bfloat16[]", 1.0),
        ("text", b"x"),
        ("text", "\ud800"),
        ("bytes", "x"),
        ("bytes", 3),
        ("bytes", np.zeros((4, 4))[:, 1]),
        ("<U2[]", np.array("abc")),
    ],
)
def test_other_values_are_refused(kind: str, value: Any) -> None:
    with pytest.raises(UsageError, match=r"^add s: field 'x': .*expected"):
        FieldEncoder({"x": kind}).encode({"x": value}, "add s")


@pytest.mark.parametrize("values", [{}, {"a": 1}, {"a": 1, "b": 2, "c": 3}])
def test_all_fields_must_be_given(values: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="add s: expected the fields a, b, got"):
        FieldEncoder({"a": "<i8[]", "b": "<i8[]"}).encode(values, "add s")
