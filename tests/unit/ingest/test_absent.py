"""Records that lack a feature or a member: an error that names them, a default, or left out."""

from __future__ import annotations

import gzip
import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlfs.errors import FormatError
from dlfs.ingest.importer import import_dataset, open_source
from dlfs.volume.volume import Volume
from tests.support.files import tar
from tests.support.shards import write_examples
from tests.unit.ingest.taking import take

KINDS = {"b": "byte", "t": "byte", "i": "int", "f": "float", "v": "float"}


def write_records(path: Path, *records: dict[str, Any]) -> Path:
    kinds = [{name: (value, KINDS[name]) for name, value in each.items()} for each in records]
    write_examples(path, kinds)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(path.read_bytes()))
    return path


WHOLE = {"b": b"bytes", "t": b"text", "i": 7, "f": 0.5, "v": [1.0, 2.0]}
USED: dict[str, dict[str, Any]] = {
    "column": {"column": "b", "attributes": "t,i,f"},
    "fields": {"fields": "b,v", "attributes": "t,i,f"},
}


@pytest.mark.parametrize(
    ("suffix", "at"), [(".tfrecord", 2), (".tfrecord.gz", 2), (".tfrecord", 0)]
)
@pytest.mark.parametrize("how", USED)
@pytest.mark.parametrize("lacks", ["b", "t", "i", "f", "v"])
def test_tfrecords_that_lack_a_feature(
    tmp_path: Path, suffix: str, how: str, lacks: str, at: int
) -> None:
    if lacks == "v" and how == "column":
        return
    records = [dict(WHOLE) for _ in range(4)]
    del records[at][lacks]
    path = write_records(tmp_path / f"x{suffix}", *records)
    with pytest.raises(FormatError, match=rf"x\..*: record {at}: expected feature {lacks}, got"):
        take(open_source(path, options=USED[how]))
    source = open_source(path, options={**USED[how], "nulls": "skip"})
    assert [*take(source)] == [f"x/{i:08d}" for i in range(4) if i != at]
    assert source.skipped["record that lacks a feature"] == 1
    got = take(open_source(path, options={**USED[how], "nulls": "default"}))
    for number, (data, attributes) in enumerate(got.values()):
        want = WHOLE if number != at else {**WHOLE, lacks: {"t": b"", "i": 0}.get(lacks, b"")}
        assert attributes["t"] == bytes(want["t"]).decode()
        assert attributes["i"] == want["i"]
        if number == at and lacks == "f":
            assert math.isnan(attributes["f"])
        else:
            assert attributes["f"] == want["f"]
        vector = b"" if want["v"] == b"" else np.array(want["v"], "f4").tobytes()
        start = bytes(want["b"])
        if how == "column":
            assert data == start
        else:
            assert data.startswith(start)
            assert data.endswith(vector)
            assert data.strip(b"\0")[len(start) :].strip(b"\0") == vector.strip(b"\0")


def test_tfrecords_with_empty_features_and_declared_types(tmp_path: Path, volume: Volume) -> None:
    records = [{**WHOLE, "i": [], "v": []}, {**WHOLE, "i": [5], "v": [1.0, 2.0]}, {"b": []}]
    path = write_records(tmp_path / "x.tfrecord", *records)
    options = {"fields": "b,t:text,i:i8[],v:f4[2]", "nulls": "default"}
    with pytest.raises(FormatError, match=r"record 0: expected <i8\[\] in feature i, got no value"):
        take(open_source(path, options={**options, "nulls": "error"}))
    source = open_source(path, options=options)
    import_dataset(volume, source, "n")
    source.close()
    with volume["n"] as dataset:
        batch = dataset.read([0, 1, 2])
        values = {name: batch[name] for name in ("b", "t", "i", "v")}
        assert [bytes(one) for one in values["b"]] == [b"bytes", b"bytes", b""]
        assert list(values["t"]) == ["text", "text", ""]
        assert np.asarray(values["i"]).tolist() == [0, 5, 0]
        assert str(np.asarray(values["v"]).tolist()) == "[[nan, nan], [1.0, 2.0], [nan, nan]]"
    nothing = write_records(tmp_path / "y.tfrecord", {"b": b"1"}, {"b": b"2"})
    with pytest.raises(FormatError, match="record 0: expected feature t in a record, got none in"):
        take(open_source(nothing, options={"fields": "b,t", "nulls": "default"}))
    source = open_source(nothing, options={"fields": "b,t", "nulls": "skip"})
    assert take(source) == {}
    assert source.skipped == {"record that lacks a feature": 2}


def write_shard(path: Path, *keys: dict[str, bytes]) -> Path:
    numbered = [(f"{number}.{name}", key[name]) for number, key in enumerate(keys) for name in key]
    path.write_bytes(tar(*numbered))
    return path


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


KEY = {
    "jpg": b"image",
    "cls": b"3",
    "txt": b"words",
    "json": json.dumps({"a": {"n": 4, "f": 0.5, "t": "x", "b": True}}).encode(),
    "npy": npy(np.ones((2, 3), "f4")),
}
TAKEN = {"attributes": "cls,txt,json.a.n,json.a.f,json.a.t,json.a.b"}


@pytest.mark.parametrize("lacks", ["cls", "txt", "json"])
def test_webdataset_keys_that_lack_an_attribute(tmp_path: Path, lacks: str) -> None:
    keys = [dict(KEY) for _ in range(3)]
    del keys[1][lacks]
    path = write_shard(tmp_path / "x.tar", *keys)
    options = {**TAKEN, "column": "jpg"}
    with pytest.raises(FormatError, match=rf"x\.tar: key 1: .* extension '{lacks}'.*nulls=skip"):
        take(open_source(path, format_name="webdataset", options=options))
    source = open_source(path, format_name="webdataset", options={**options, "nulls": "skip"})
    assert [*take(source)] == ["0.jpg", "2.jpg"]
    assert source.skipped["key that lacks a member"] == 1
    options["nulls"] = "default"
    got = take(open_source(path, format_name="webdataset", options=options))["1.jpg"][1]
    assert got["cls"] == (0 if lacks == "cls" else 3)
    assert got["txt"] == ("" if lacks == "txt" else "words")
    if lacks == "json":
        assert math.isnan(got.pop("json.a.f"))
        assert [got[f"json.a.{name}"] for name in "ntb"] == [0, "", False]


@pytest.mark.parametrize("null", [None, "absent"])
def test_webdataset_nulls_in_json(tmp_path: Path, null: str | None) -> None:
    lacking = json.dumps({"n": None} if null is None else {}).encode()
    whole = json.dumps({"n": 4}).encode()
    path = write_shard(tmp_path / "x.tar", {"a": b"1", "json": whole}, {"a": b"2", "json": lacking})
    options = {"attributes": "json.n"}
    with pytest.raises(FormatError, match=r"key 1: attribute json\.n: expected a field of JSON"):
        take(open_source(path, format_name="webdataset", options=options))
    options["nulls"] = "default"
    got = take(open_source(path, format_name="webdataset", options=options))
    assert [attributes["json.n"] for _, attributes in got.values()] == [4, 0]
    path = write_shard(tmp_path / "y.tar", {"a": b"2", "json": lacking}, {"a": b"1", "json": whole})
    with pytest.raises(FormatError, match=r"key 0: .*; no key before it has one"):
        take(open_source(path, format_name="webdataset", options=options))
