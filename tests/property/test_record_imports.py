"""Values of records are those of the format's own reader, also where some records lack one.

Hypothesis draws the members of WebDataset keys, the columns of MDS samples, and the features of
TFRecords, with absent ones. WebDataset is compared with the package webdataset; MDS, whose package
needs PyTorch, with values encoded after its specification; TFRecord with the package tfrecord.
``DLFS_TEST_EXAMPLES`` is the number of examples of each test, 15 by default.
"""

from __future__ import annotations

import io
import json
import math
import os
import struct
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tfrecord import TFRecordWriter, tfrecord_loader

from dlfs.errors import DlfsError
from dlfs.fields import FieldType, fields_of_json
from dlfs.ingest.registry import find_format, make_options
from tests.support.files import tar
from tests.support.shards import write_mds

EXAMPLES = int(os.environ.get("DLFS_TEST_EXAMPLES", "15"))
examples = settings(max_examples=EXAMPLES, deadline=None)

Row = dict[str, Any]
INT64 = st.one_of(st.sampled_from([-(2**63), 2**63 - 1, 0]), st.integers(-(2**63), 2**63 - 1))
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)


@contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def attempt(path: Path, format_name: str, **options: Any) -> tuple[list[tuple[str, Row]], str]:
    """Path and values of every sample, its fields and attributes; or the text of an error."""
    found = []
    try:
        source = make_options(find_format(format_name), options).open([str(path)])
        for block in source.blocks(layout="path", seed=0):
            for i, name in enumerate(block.paths):
                start, length = int(block.offsets[i]), int(block.lengths[i])
                data = block.data[start : start + length].tobytes()
                row = {key: values[i] for key, values in block.attributes.items()}
                found.append((name.decode(), {**plain(row), **fields(data, row)}))
        source.close()
    except DlfsError as error:
        return [], str(error)
    return found, ""


def plain(row: Row) -> Row:
    values = {name: value for name, value in row.items() if not name.startswith("dlfs:")}
    return {
        name: value.item() if isinstance(value, np.generic) else value
        for name, value in values.items()
    }


def fields(data: bytes, row: Row) -> Row:
    """The fields of a sample, one after the other, as the format of volumes has them."""
    if "dlfs:fields" not in row:
        return {"": data}
    found: Row = {}
    at = 0
    types = fields_of_json(str(row["dlfs:fields"]))
    for number, (name, kind) in enumerate(types.items()):
        at = -(-at // kind.alignment_bytes) * kind.alignment_bytes
        size, shape = size_of(kind, name, row, len(data) - at, number == len(types) - 1)
        found[name] = kind.decode(memoryview(data[at : at + size]), shape)
        if isinstance(found[name], memoryview):
            found[name] = bytes(found[name])
        at += size
    assert at == len(data)
    return found


def size_of(
    kind: FieldType, name: str, row: Row, left: int, is_last: bool
) -> tuple[int, tuple[int, ...]]:
    if kind.kind != "array":
        return (left if is_last else int(row[f"dlfs:field:{name}:bytes"])), ()
    shape = tuple(length or 0 for length in kind.shape)
    if kind.varies:
        shape = kind.parse_shape(str(row[f"dlfs:field:{name}:shape"]))
    return math.prod(shape) * kind.dtype.itemsize, shape


def same(one: Any, other: Any) -> bool:
    """Compare values; NaN equals NaN, and arrays are of one type and shape."""
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        one, other = np.asarray(one), np.asarray(other)
        return one.shape == other.shape and one.tobytes() == other.astype(one.dtype).tobytes()
    if isinstance(one, float) and isinstance(other, float):
        return struct.pack("<d", one) == struct.pack("<d", other) or (one != one and other != other)
    return type(one) is type(other) and bool(one == other)


def is_nothing(value: Any) -> bool:
    """Return True for 0 and for an array without elements."""
    array = np.asarray(value)
    return not array.any() and (array.ndim == 0 or not array.size)


# ---- WebDataset ----------------------------------------------------------------------------------

ARRAYS = hnp.arrays(
    st.sampled_from([np.dtype(kind) for kind in ("<f4", ">i2", "|u1", "<f2")]),
    hnp.array_shapes(min_dims=2, max_dims=2, min_side=0, max_side=3),
)
JSON = st.one_of(st.none(), TEXT, st.lists(INT64, max_size=2), st.dictionaries(TEXT, INT64))
KEYS = st.lists(
    st.fixed_dictionaries(
        {"bin": st.binary(max_size=9)},
        optional={
            "cls": INT64.filter(lambda value: value >= 0),
            "txt": TEXT,
            "json": JSON,
            "npy": ARRAYS,
            "jpg": st.binary(max_size=9),
        },
    ),
    min_size=1,
    max_size=5,
)


def member(name: str, value: Any) -> bytes:
    if name == "npy":
        file = io.BytesIO()
        np.save(file, value)
        return file.getvalue()
    if name == "json":
        return json.dumps(value, ensure_ascii=False).encode()
    return value if isinstance(value, bytes) else str(value).encode()


def write_shard(path: Path, keys: list[Row]) -> Path:
    rows = [(number, name, key[name]) for number, key in enumerate(keys) for name in key]
    members = [(f"{number:04}.{name}", member(name, value)) for number, name, value in rows]
    path.write_bytes(tar(*members, layout=tarfile.PAX_FORMAT))
    return path


@examples
@given(KEYS, st.sampled_from(["error", "default", "skip"]))
def test_keys_are_what_webdataset_reads(keys: list[Row], nulls: str) -> None:
    webdataset = pytest.importorskip("webdataset")
    names = ["bin", "cls", "txt", "json", "npy", "jpg"]
    with folder() as place:
        path = write_shard(place / "x.tar", keys)
        decode = webdataset.autodecode.Decoder([webdataset.autodecode.basichandlers])
        theirs = [decode({name: member(name, key[name]) for name in key}) for key in keys]
        got, error = attempt(path, "webdataset", fields=tuple(names), nulls=nulls)
        lacking = [i for i, key in enumerate(keys) if len(key) < len(names)]
        types = {key["npy"].dtype.str for key in keys if "npy" in key}
        if error:
            assert f"import {path}: key 0" in error
            assert lacking or len(types) > 1
            return
        chosen = [i for i in range(len(keys)) if nulls != "skip" or i not in lacking]
        assert [name for name, _ in got] == [f"{i:04}" for i in chosen]
        for i, (_, row) in zip(chosen, got, strict=True):
            for name in names:
                if name not in keys[i]:
                    empty = {"txt": "", "json": "", "jpg": b""}.get(name)
                    assert row[name] == empty if name in "txt json jpg" else is_nothing(row[name])
                elif name == "json":
                    own = theirs[i][name]  # it leaves what decodes to None as it is
                    assert json.loads(row[name]) == (None if own == b"null" else own)
                else:
                    assert same(row[name], theirs[i][name]), name


@examples
@given(st.lists(st.one_of(st.none(), INT64, st.booleans(), TEXT, st.floats()), min_size=1))
def test_fields_of_json_are_attributes_of_one_type(values: list[Any]) -> None:
    with folder() as place:
        keys = [{"bin": b"%d" % i, "json": {"a": value}} for i, value in enumerate(values)]
        path = write_shard(place / "x.tar", keys)
        got, error = attempt(path, "webdataset", attributes=("json.a",), nulls="skip")
        present = [value for value in values if value is not None]
        kinds = {type(value) for value in present}
        if error:
            assert str(path) in error
            assert len(kinds) > 1
            return
        wanted = [float(value) if float in kinds else value for value in present]
        assert all(same(row["json.a"], value) for (_, row), value in zip(got, wanted, strict=True))


# ---- MDS -----------------------------------------------------------------------------------------

WIDTHS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")


def numbers(kind: str) -> st.SearchStrategy[Any]:
    return hnp.from_dtype(np.dtype(kind).newbyteorder("<"), allow_nan=True)


def packed(kind: str) -> Callable[[Any], bytes]:
    return lambda value: np.array(value, np.dtype(kind).newbyteorder("<")).tobytes()


ENCODINGS: dict[str, tuple[st.SearchStrategy[Any], Callable[[Any], bytes], int | None]] = {
    **{
        kind: (numbers(kind), packed(kind), np.dtype(kind).itemsize)
        for kind in (*WIDTHS, "float16", "float32", "float64")
    },
    "int": (INT64.map(np.int64), packed("int64"), 8),
    "str": (TEXT, str.encode, None),
    "bytes": (st.binary(max_size=9), bytes, None),
    "json": (JSON.map(json.dumps), str.encode, None),
    "str_int": (INT64, lambda value: str(value).encode(), None),
    "ndarray:int16:2,3": (
        hnp.arrays("<i2", (2, 3)),
        lambda value: bytes(value.tobytes()),
        12,
    ),
    "ndarray:float32": (
        hnp.arrays("<f4", hnp.array_shapes(max_dims=2, max_side=3)),
        lambda value: bytes([value.ndim << 2, *value.shape]) + value.tobytes(),
        None,
    ),
}
"""Values, encoder and fixed size of each encoding. Source: MosaicML's dataset format."""


@examples
@given(st.data())
def test_mds_columns_are_their_encoding(data: st.DataObject) -> None:
    kinds = data.draw(st.lists(st.sampled_from([*ENCODINGS]), min_size=1, max_size=4))
    row = st.tuples(*(ENCODINGS[kind][0] for kind in kinds)).map(list)
    rows = data.draw(st.lists(row, min_size=1, max_size=5))
    with folder() as place:
        columns = {f"c{i}": (kind, ENCODINGS[kind][2]) for i, kind in enumerate(kinds)}
        encoders = [ENCODINGS[kind][1] for kind in kinds]
        encoded = [[f(value) for f, value in zip(encoders, row, strict=True)] for row in rows]
        write_mds(place, columns, encoded)
        got, error = attempt(place, "mds", fields=("*",), attributes=())
        dimensions = [
            {value[i].ndim for value in rows} for i, k in enumerate(kinds) if k == "ndarray:float32"
        ]
        if error:
            assert str(place) in error
            assert any(len(found) > 1 for found in dimensions), error
            return
        for values, (_, found) in zip(rows, got, strict=True):
            for i, value in enumerate(values):
                assert same(found[f"c{i}"], value), (kinds[i], value, found[f"c{i}"])


# ---- TFRecord ------------------------------------------------------------------------------------

FLOATS = st.floats(width=32, allow_nan=False)
RECORDS = st.lists(
    st.fixed_dictionaries(
        {"b": st.binary(min_size=1, max_size=9)},
        optional={
            "i": INT64,
            "f": FLOATS,
            "v": st.lists(INT64, min_size=1, max_size=3),
            "t": st.binary(max_size=4),
        },
    ),
    min_size=1,
    max_size=6,
)
KINDS = {"b": "byte", "t": "byte", "i": "int", "v": "int", "f": "float"}


@examples
@given(RECORDS, st.sampled_from(["error", "default", "skip"]))
def test_records_that_lack_features(records: list[Row], nulls: str) -> None:
    used = ["b", "t", "v", "i", "f"]
    with folder() as place:
        path = place / "x.tfrecord"
        writer = TFRecordWriter(str(path))
        for record in records:
            writer.write({name: (value, KINDS[name]) for name, value in record.items()})
        writer.close()
        theirs = list(tfrecord_loader(str(path), None))
        options = {"fields": ("b", "t", "v"), "attributes": ("i", "f"), "nulls": nulls}
        got, error = attempt(path, "tfrecord", **options)
        lacking = [i for i, record in enumerate(records) if len(record) < len(used)]
        if error:
            never = [name for name in used if all(name not in record for record in records)]
            assert f"import {path}: record " in error
            assert lacking
            assert nulls == "error" or (nulls == "default" and never)
            return
        chosen = [i for i in range(len(records)) if nulls != "skip" or i not in lacking]
        assert nulls != "error" or not lacking
        assert [name for name, _ in got] == [f"x/{i:08d}" for i in chosen]
        for i, (_, row) in zip(chosen, got, strict=True):
            for name in used:
                if name not in records[i]:
                    assert is_default(row[name]), name
                    continue
                own = theirs[i][name]
                wanted = own if isinstance(own, bytes) else np.asarray(own).reshape(-1)
                value = row[name] if name in "btv" else np.asarray([row[name]])
                assert same(wanted, value), name


def is_default(value: Any) -> bool:
    if isinstance(value, float):
        return math.isnan(value)
    return not value if not isinstance(value, np.ndarray) else value.size == 0
