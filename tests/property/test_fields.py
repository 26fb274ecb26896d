"""Samples with any fields come back from their bytes and columns as they were."""

from __future__ import annotations

import json
from typing import Any
from uuid import UUID

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from dlfs.attributes import AttributesBuilder, AttributeTable
from dlfs.errors import FormatError, UsageError
from dlfs.fields import FieldEncoder, FieldType, fields_of_json, fields_to_json, parse_fields
from dlfs.fields.batch_fields import PartMemory
from dlfs.reader import Batch

ELEMENTS = ("|b1", "|i1", "<u2", ">i4", "<i8", "<f2", "<f4", ">f8", "<c8", "<c16", "|S3", "<U2")
NAMES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)


@st.composite
def array_types(draw: st.DrawFn) -> str:
    lengths = draw(st.lists(st.one_of(st.just("?"), st.integers(0, 3).map(str)), max_size=3))
    return f"{draw(st.sampled_from(ELEMENTS))}[{','.join(lengths)}]"


TYPES = st.one_of(st.sampled_from(["bytes", "text"]), array_types())
FIELDS = st.dictionaries(NAMES.filter(bool), TYPES, min_size=1, max_size=5)


def values(kind: FieldType) -> st.SearchStrategy[Any]:
    if kind.kind == "bytes":
        return st.binary(max_size=40)
    if kind.kind == "text":
        return st.text(st.characters(exclude_categories=["Cs"]), max_size=10)
    shape = st.tuples(*(st.integers(0, 3) if n is None else st.just(n) for n in kind.shape))
    return shape.flatmap(lambda one: arrays.arrays(kind.dtype, one))


def same(kind: FieldType, got: Any, expected: Any) -> bool:
    if kind.kind != "array":
        return bool(got == expected)
    whole = np.asarray(expected)
    got = np.asarray(got, kind.dtype)  # an element of an array is in the byte order of the machine
    return bool(got.dtype == kind.dtype and got.shape == whole.shape) and (
        got.tobytes() == whole.tobytes()
    )


def make_batch(encoder: FieldEncoder, samples: list[dict[str, Any]]) -> Batch:
    """Encode samples and return a batch of them, with gaps between the samples."""
    builder = AttributesBuilder()
    memory = bytearray(b"?")
    offsets, lengths = [], []
    for row, sample in enumerate(samples):
        data, columns = encoder.encode(sample, "add")
        builder.append(builder.prepare({k: [v] for k, v in columns.items()}, 1), row)
        offsets.append(len(memory))
        lengths.append(data.size)
        memory += data.tobytes() + b"?"
    parts = builder.freeze(UUID(int=1), np.arange(len(samples)))
    table = AttributeTable.over(np.concatenate(parts), parts[0].size)
    places = np.array(offsets, np.int64), np.array(lengths, np.int64)
    indices = np.arange(len(samples), dtype=np.uint64)
    native = PartMemory(memoryview(bytes(memory)), *places, indices)
    return Batch(native, attributes=lambda: table, dataset="model")


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_fields_come_back(data: st.DataObject) -> None:
    encoder = FieldEncoder(data.draw(FIELDS))
    kinds = encoder.fields
    one = st.fixed_dictionaries({name: values(kind) for name, kind in kinds.items()})
    samples = data.draw(st.lists(one, min_size=1, max_size=5))
    batch = make_batch(encoder, samples)
    assert batch.fields == {name: str(kind) for name, kind in kinds.items()}
    for at, sample in enumerate(samples):
        got = batch.sample(at)
        assert list(got) == list(kinds)
        assert all(same(kind, got[name], sample[name]) for name, kind in kinds.items())
    for name, kind in kinds.items():
        assert len(batch[name]) == len(samples)
        for got, sample in zip(batch[name], samples, strict=True):
            assert same(kind, got, sample[name])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=5), st.sampled_from(["<i4[?,2]", "<i4[?]"]))
def test_ragged_is_the_arrays_one_after_the_other(lengths: list[int], kind: str) -> None:
    row = (2,) if "2" in kind.partition("[")[2] else ()
    made = [np.full((n, *row), n, "<i4") for n in lengths]
    batch = make_batch(FieldEncoder({"x": kind}), [{"x": one} for one in made])
    joined, offsets = batch.ragged("x")
    assert offsets.tolist() == [0, *np.cumsum(lengths)]
    assert np.array_equal(joined, np.concatenate(made))


@settings(max_examples=100)
@given(FIELDS)
def test_types_are_the_same_after_their_text(fields: dict[str, str]) -> None:
    parsed = parse_fields(fields)
    again = fields_of_json(fields_to_json(parsed))
    assert list(again.items()) == list(parsed.items())


TYPE_TEXTS = st.one_of(TYPES, st.text("<>|=[]?,0123456789fiubSUMV", max_size=12))
JSON_TEXTS = st.one_of(
    st.text(max_size=20),
    st.dictionaries(st.text(max_size=3), TYPE_TEXTS, max_size=3).map(json.dumps),
)
SHAPE_TEXTS = st.one_of(st.text("0123456789,-? ;", max_size=8), st.text(max_size=5))


@settings(max_examples=200, deadline=None)
@given(JSON_TEXTS, st.lists(SHAPE_TEXTS, min_size=3, max_size=3), st.integers(-2, 1 << 62))
def test_any_columns_are_fields_or_a_format_error(text: str, shapes: list[str], size: int) -> None:
    try:
        names = list(fields_of_json(text))
    except UsageError:
        names = ["a"]
    columns: dict[str, Any] = {"dlfs:fields": [text]}
    for name, shape in zip(names, shapes, strict=False):
        columns[f"dlfs:field:{name}:bytes"] = [size]
        columns[f"dlfs:field:{name}:shape"] = [shape]
    builder = AttributesBuilder()
    builder.append(builder.prepare(columns, 1), 0)
    parts = builder.freeze(UUID(int=1), np.arange(1))
    table = AttributeTable.over(np.concatenate(parts), parts[0].size)
    one = np.zeros(1, np.int64), np.full(1, 8, np.int64), np.zeros(1, np.uint64)
    batch = Batch(PartMemory(memoryview(bytes(8)), *one), attributes=lambda: table, dataset="model")
    try:
        fields = batch.fields
    except FormatError:
        return
    for name in fields:
        assert len(batch[name]) == 1
