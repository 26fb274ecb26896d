"""Reserved columns that do not fit their samples are refused, whoever gives them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import numpy as np
import pytest

import dlfs
from dlfs.errors import UsageError
from dlfs.ingest.source import array_attributes
from tests.support.volumes import new_volume


@pytest.fixture
def volume() -> Iterator[dlfs.Volume]:
    with dlfs.open(new_volume(f"mem:{uuid4().hex}?size=16MiB")) as opened:
        yield opened


FORM = {"dlfs:dtype": "<f4", "dlfs:shape": "2"}
FIELDS = {"dlfs:fields": '{"a":"bytes","b":"<i4[?]"}', "dlfs:field:a:bytes": 4}
GOOD = {**FIELDS, "dlfs:field:b:shape": "1"}


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({**FORM, "dlfs:shape": "3"}, "sample 0: expected 12 bytes of an array '<f4' of shape '3'"),
        ({"dlfs:dtype": "<f4"}, "expected 'dlfs:dtype' and 'dlfs:shape', got only 'dlfs:dtype'"),
        ({"dlfs:shape": "8"}, "expected 'dlfs:dtype' and 'dlfs:shape', got only 'dlfs:shape'"),
        ({**FORM, "dlfs:dtype": "a lie"}, "expected a numpy dtype"),
        ({"dlfs:fields": "a lie"}, "expected a JSON object of fields"),
        ({"dlfs:fields": "{}"}, "expected 1 to"),
        (FIELDS, "field 'b': expected the column 'dlfs:field:b:shape', got none"),
        ({**GOOD, "dlfs:field:b:shape": "2"}, "sample 0: expected an end in 8 bytes, got byte 12"),
        ({"dlfs:field:a:bytes": 8}, "expected 'dlfs:fields' with 'dlfs:field:a:bytes'"),
        ({"dlfs:other": 8}, "expected one of dlfs:dtype, dlfs:shape, dlfs:fields"),
        ({"dlfs:vector:x:0": 8}, "expected one of dlfs:dtype, dlfs:shape, dlfs:fields"),
    ],
)
def test_columns_that_do_not_fit_are_refused(
    volume: dlfs.Volume, columns: dict[str, Any], message: str
) -> None:
    places = np.zeros(1, np.int64), np.full(1, 8, np.int64)
    batch = {name: [value] for name, value in columns.items()}
    with volume.writer("n") as writer:
        with pytest.raises(UsageError, match=message):
            writer.add_batch([b"x"], bytes(8), *places, attributes=batch)
        writer.abort()
    if "dlfs:fields" not in columns:
        with volume.writer("n") as writer:
            with pytest.raises(UsageError, match=message):
                writer.add("x", bytes(8), attributes=columns)
            writer.abort()
    assert not volume.datasets()


def test_columns_that_fit_are_taken(volume: dlfs.Volume) -> None:
    with volume.writer("arrays") as writer:
        writer.add("a", bytes(8), attributes=FORM)
        writer.add("b", bytes(3), attributes={"dlfs:dtype": "", "dlfs:shape": ""})
        columns = array_attributes("f4", (2,), 1)
        writer.add_batch([b"c"], bytes(8), np.zeros(1), np.full(1, 8), attributes=columns)
    with volume["arrays"] as dataset:
        assert dataset.array(0).shape == (2,)
    with volume.writer("fields") as writer:
        batch = {name: [value] for name, value in GOOD.items()}
        writer.add_batch([b"x"], bytes(8), np.zeros(1), np.full(1, 8), attributes=batch)
    with volume["fields"] as dataset:
        assert dataset.sample(0)["a"] == bytes(4)


def test_samples_with_fields_take_no_reserved_attributes(volume: dlfs.Volume) -> None:
    with volume.writer("n") as writer:
        with pytest.raises(UsageError, match="no attributes with reserved names next to fields"):
            writer.add("x", {"a": b"1"}, attributes={"dlfs:field:a:bytes": 1})
        writer.abort()
