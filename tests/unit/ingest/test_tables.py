"""Tables: values of every Arrow type, nulls, and files whose columns differ."""

from __future__ import annotations

import datetime
import decimal
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dlfs.errors import DlfsError, FormatError, UsageError
from dlfs.ingest.importer import import_dataset, open_source
from dlfs.volume.volume import Volume
from tests.unit.ingest.taking import refused, take

DATE = datetime.date(2024, 2, 29)


def write_arrow(columns: Any, path: Path) -> Path:
    data = columns if isinstance(columns, pa.Table) else pa.table(columns)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, data.schema) as writer:
        writer.write_table(data)
    return path


def write_parquet(columns: Any, path: Path, **options: Any) -> Path:
    pq.write_table(columns if isinstance(columns, pa.Table) else pa.table(columns), path, **options)
    return path


def column(path: Path, name: str = "x", **options: Any) -> list[Any]:
    """The values of an attribute, in the order of the rows."""
    return [values[name] for _, values in take(open_source(path, options=options)).values()]


def fields(volume: Volume, path: Path, wanted: str, **options: Any) -> list[dict[str, Any]]:
    """The fields of all samples, in the order of the rows."""
    source = open_source(path, options={"fields": wanted, **options})
    import_dataset(volume, source, "n", layout="path")
    source.close()
    with volume["n"] as dataset:
        return [dataset.sample(i) for i in range(len(dataset))]


# ---- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("unit", ["ns", "us"])
def test_int96_times_of_any_year_keep_every_digit(tmp_path: Path, unit: str) -> None:
    moments = [
        datetime.datetime(1000, 1, 1),
        datetime.datetime(1677, 9, 20),
        datetime.datetime(1969, 12, 31, 23, 59, 59, 999999),
        datetime.datetime(2262, 4, 13, 1, 2, 3, 4),
        datetime.datetime(9999, 12, 31, 23, 59, 59, 999999),
    ]
    if unit == "ns":
        numbers = [-(2**63) + 1, -1, 0, 1, 2**63 - 1]
        want = [f"{np.datetime64(n, 'ns')}".replace("T", " ") for n in numbers]
        times = pa.array(numbers).view(pa.timestamp("ns"))
    else:
        want = [f"{moment.isoformat(' ', 'microseconds')}000" for moment in moments]
        times = pa.array(moments, pa.timestamp("us"))
    table = pa.table({"s": [b"%d" % i for i in range(5)], "x": times})
    path = write_parquet(table, tmp_path / "x.parquet", use_deprecated_int96_timestamps=True)
    assert pq.ParquetFile(path).schema.column(1).physical_type == "INT96"
    assert column(path) == want
    assert column(path, attributes="x", column="s") == want


def test_int96_times_in_lists_are_refused(tmp_path: Path) -> None:
    table = pa.table({"s": [b"1"], "x": pa.array([[0]], pa.list_(pa.timestamp("us")))})
    path = write_parquet(table, tmp_path / "x.parquet", use_deprecated_int96_timestamps=True)
    with pytest.raises(UsageError, match=r"column x.list.element: expected times of type INT96"):
        open_source(path)


@pytest.mark.parametrize("write", [write_arrow, write_parquet])
def test_zoned_times_keep_their_offset(tmp_path: Path, write: Any) -> None:
    for unit, digits in (("ms", 3), ("us", 6), ("ns", 9)):
        far = 2**63 - 1 if unit == "ns" else 253402214400 * 10**digits
        numbers = pa.array([-3_000_000_000 * 10**digits, 1, far])
        for zone in ("Europe/Berlin", "+05:30", "UTC"):
            times = numbers.view(pa.timestamp(unit, zone))
            path = write(
                {"s": [b"1", b"2", b"3"], "x": times}, tmp_path / f"x.{write.__name__[6:]}"
            )
            for text, number in zip(column(path), numbers.to_pylist(), strict=True):
                got = datetime.datetime.fromisoformat(text.replace("Z", "+00:00"))
                seconds = datetime.timedelta(seconds=number // 10**digits)
                epoch = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
                assert got.replace(microsecond=0) == epoch + seconds
                assert text[19:].startswith(f".{number % 10**digits:0{digits}d}")


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (
            pa.array([0, 1]).view(pa.timestamp("s", "Mars/Base")),
            "row 0: column x: expected a known",
        ),
        (
            pa.array([0, 2**62]).view(pa.timestamp("s")),
            "row 1: column x: expected a value of timest",
        ),
        (pa.array([0, -1]).view(pa.time64("ns")), "row 1: column x: expected a value of time64"),
        (pa.array([b"a", b"\xff"]).view(pa.string()), "row 1: column x: expected text in UTF-8"),
    ],
)
def test_values_without_a_text_name_their_row(tmp_path: Path, array: Any, message: str) -> None:
    table = pa.table({"s": [b"1", b"2"], "x": array})
    path = tmp_path / "x.parquet"
    if pa.types.is_timestamp(array.type) and array.type.tz is None:  # Parquet has no seconds
        path = write_arrow(table, tmp_path / "x.arrow")
    else:
        write_parquet(table, path)
    with pytest.raises(FormatError, match=message):
        take(open_source(path))


def test_intervals_are_left_out_by_name_or_taken_as_json(volume: Volume, tmp_path: Path) -> None:
    data = {"s": [b"1"], "x": pa.array([pa.MonthDayNano([1, 2, 3])])}
    path = write_arrow(data, tmp_path / "x.arrow")
    assert open_source(path).skipped == {"column that is not used: x": 1}
    assert fields(volume, path, "s,x:text") == [{"s": b"1", "x": "[1, 2, 3]"}]


@pytest.mark.parametrize(
    ("array", "want"),
    [
        (pa.DictionaryArray.from_arrays([1, 0], [7, -8]), [-8, 7]),
        (pa.DictionaryArray.from_arrays([1, 0], [0.5, 1.5]), [1.5, 0.5]),
        (pa.DictionaryArray.from_arrays([1, 0], pa.array([True, False])), [False, True]),
        (pa.RunEndEncodedArray.from_arrays([2], ["x"]), ["x", "x"]),
        (pa.RunEndEncodedArray.from_arrays([1, 2], pa.array([2**63, 1], pa.uint64())), [2**63, 1]),
        (pa.array([2**64 - 1, 0], pa.uint64()), [2**64 - 1, 0]),
        (pa.array([1500, -1]).view(pa.duration("ms")), ["1500ms", "-1ms"]),
        (pa.ExtensionArray.from_storage(pa.bool8(), pa.array([1, 0], pa.int8())), [True, False]),
        (pa.array([decimal.Decimal("0.10"), decimal.Decimal(-2)]), ["0.10", "-2.00"]),
    ],
)
def test_attributes_have_the_type_of_their_values(tmp_path: Path, array: Any, want: Any) -> None:
    path = write_arrow({"s": [b"1", b"2"], "x": array}, tmp_path / "x.arrow")
    assert column(path) == want
    assert list(map(type, column(path))) == list(map(type, want))


def test_any_value_is_text_if_the_caller_says_so(volume: Volume, tmp_path: Path) -> None:
    for kind, value, text in (
        (pa.list_(pa.string()), ["a", None], '["a", null]'),
        (pa.list_(pa.date32()), [DATE, None], '["2024-02-29", null]'),
        (pa.struct({"t": pa.timestamp("ns")}), {"t": 1}, '{"t": "1970-01-01 00:00:00.000000001"}'),
        (pa.map_(pa.string(), pa.int8()), [("a", 1)], '[["a", 1]]'),
        (pa.list_(pa.dictionary(pa.int8(), pa.string())), ["a"], '["a"]'),
        (pa.int64(), 5, "5"),
        (pa.bool_(), True, "true"),
        (pa.date32(), DATE, "2024-02-29"),
    ):
        data = {"s": [b"1", b"2"], "x": pa.array([value, None], kind)}
        path = write_parquet(data, tmp_path / "x.parquet")
        got = [sample["x"] for sample in fields(volume, path, "s,x:text")]
        assert got == [text, "null"], kind
        json.loads(got[1])
    path = write_parquet({"s": [b"1"], "x": [[b"\xff"]]}, tmp_path / "x.parquet")
    with refused(volume, FormatError, "row 0: field 'x': expected a value that JSON has"):
        fields(volume, path, "s,x:text")


# ---- nulls ---------------------------------------------------------------------------------------

NULLS = {
    "text": pa.array(["a", None, "c"]),
    "int": pa.array([1, None, 3], pa.int16()),
    "bool": pa.array([True, None, False]),
    "date": pa.array([DATE, None, DATE]),
    "values": pa.DictionaryArray.from_arrays([0, 1, 0], ["a", None]),
    "runs": pa.RunEndEncodedArray.from_arrays([1, 2, 3], pa.array([5, None, 6])),
}
DEFAULTS = {"text": "", "int": 0, "bool": False, "date": "", "values": "", "runs": 0}


@pytest.mark.parametrize("name", NULLS)
def test_a_null_is_an_error_a_default_or_skips_its_row(
    volume: Volume, tmp_path: Path, name: str
) -> None:
    data = {"s": [b"1", b"2", b"3"], "x": NULLS[name], "f": [0.5, None, 1.5]}
    path = write_arrow(data, tmp_path / "x.arrow")
    with pytest.raises(FormatError, match=r"x.arrow: row 1: column x: expected a value of .* null"):
        take(open_source(path))
    full = column(path, nulls="default")
    assert full[1] == DEFAULTS[name]
    assert type(full[1]) is type(full[0])
    source = open_source(path, options={"nulls": "skip"})
    got = take(source)
    assert list(got) == ["x/00000000", "x/00000002"]
    assert [values["x"] for _, values in got.values()] == [full[0], full[2]]
    assert source.skipped == {"row with a null": 1}
    assert np.isnan(column(path, "f", attributes="f")[1])  # a null float is NaN
    fixed = fields(volume, path, "s,x", nulls="default", attributes="f")
    assert fixed[1]["x"] == DEFAULTS[name]


def test_nulls_in_samples_and_lists(volume: Volume, tmp_path: Path) -> None:
    lists = pa.array([[1, 2], [3, None], None], pa.list_(pa.int32()))
    pairs = pa.array([[1, 2], None, [None, 5]], pa.list_(pa.int32(), 2))
    data = {"s": [b"1", b"2", None], "x": lists, "y": pairs}
    path = write_parquet(data, tmp_path / "x.parquet")
    for wanted, message in (
        ("x", "row 1: column x: expected a value of list<"),
        ("y", "row 1: column y: expected a value of fixed_size_list"),
        ("s", "row 2: column s: expected a value of binary"),
    ):
        with refused(volume, FormatError, message):
            fields(volume, path, wanted)
    got = fields(volume, path, "s,x,y", nulls="default")
    assert [(one["s"], one["x"].tolist(), one["y"].tolist()) for one in got] == [
        (b"1", [1, 2], [1, 2]), (b"2", [3, 0], [0, 0]), (b"", [], [0, 5]),
    ]  # fmt: skip
    volume.remove("n")
    assert len(fields(volume, path, "s,x,y", nulls="skip")) == 1
    source = open_source(path, options={"nulls": "default", "column": "s", "attributes": "y"})
    assert [data for data, _ in take(source).values()] == [b"1", b"2", b""]
    with pytest.raises(FormatError, match="row 2: column s: expected a value"):
        take(open_source(path, options={"path": "s", "nulls": "default", "fields": "x"}))


# ---- files whose columns differ ------------------------------------------------------------------


def two(folder: Path, first: Any, second: Any) -> list[Path]:
    return [write_parquet(first, folder / "a.parquet"), write_parquet(second, folder / "b.parquet")]


def both(paths: list[Path], **options: Any) -> list[Any]:
    source = open_source(paths, options=options)
    return [values.get("x") for _, values in take(source).values()]


def test_a_column_of_nulls_takes_the_type_of_other_files(tmp_path: Path) -> None:
    empty = {"s": [b"1"], "x": pa.nulls(1)}
    for kind, value in ((pa.string(), "a"), (pa.int8(), 1), (pa.date32(), DATE)):
        files = two(tmp_path, empty, {"s": [b"2"], "x": pa.array([value], kind)})
        with pytest.raises(FormatError, match=r"a.parquet: row 0: column x: .*, got null"):
            both(files)
        assert both(files, nulls="skip")[-1] == both(files, nulls="default")[-1]
        assert len(both(files, nulls="skip")) == 1
        assert both(files[::-1], nulls="default") == both(files, nulls="default")[::-1]
    files = two(tmp_path, empty, {"s": [b"2"], "x": [0.5]})
    assert np.isnan(both(files)[0])


def test_a_column_of_some_files_is_not_dropped(tmp_path: Path) -> None:
    files = two(tmp_path, {"s": [b"1"]}, {"s": [b"2"], "x": ["a"]})
    for order in (files, files[::-1]):
        with pytest.raises(
            FormatError, match=r"a.parquet: expected column x of string as in .*b.p"
        ):
            both(order)
        assert sorted(both(order, nulls="default")) == ["", "a"]
    assert both(files, nulls="skip") == ["a"]
    assert both(files, attributes=(), column="s") == [None, None]


@pytest.mark.parametrize(
    ("one", "other", "want"),
    [
        (pa.array([1], pa.int8()), pa.array([2**40]), [1, 2**40]),
        (pa.array([1], pa.uint32()), pa.array([-1], pa.int8()), [1, -1]),
        (pa.array([0.5], pa.float32()), pa.array([0.1]), [0.5, 0.1]),
        (pa.array(["a"]), pa.array(["b"]).dictionary_encode(), ["a", "b"]),
        (pa.array(["a"], pa.large_string()), pa.array(["b"], pa.string_view()), ["a", "b"]),
    ],
)
def test_types_that_go_together_are_joined(
    tmp_path: Path, one: Any, other: Any, want: list[Any]
) -> None:
    files = two(tmp_path, {"s": [b"1"], "x": one}, {"s": [b"2"], "x": other})
    assert both(files) == want
    assert both(files[::-1]) == want[::-1]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (pa.array([1]), pa.array(["1"])),
        (pa.array([1]), pa.array([1.5])),
        (pa.array([1], pa.uint64()), pa.array([-1])),
        (pa.array([True]), pa.array([1])),
        (pa.array([DATE]), pa.array(["x"])),
        (pa.array([[1]]), pa.array([1])),
    ],
)
def test_types_that_do_not_go_together_are_named(tmp_path: Path, one: Any, other: Any) -> None:
    files = two(tmp_path, {"s": [b"1"], "x": one}, {"s": [b"2"], "x": other})
    first, second = (pq.read_schema(file).field("x").type for file in files)
    with pytest.raises(FormatError) as caught:
        both(files, fields="s,x")
    assert str(caught.value) == (
        f"import {files[1]}: column x: expected {first} as in {files[0]}, got {second}"
    )
    assert both(files, column="s", attributes=()) == [None, None]  # x is not used


def test_lists_and_structs_of_several_files_are_joined(volume: Volume, tmp_path: Path) -> None:
    one = {"s": [b"1"], "x": pa.array([[1]], pa.list_(pa.int8())), "y": [{"a": 1}]}
    other = {"s": [b"2"], "x": pa.array([[300, 2]], pa.large_list(pa.int16())), "y": [{"a": 2}]}
    paths = two(tmp_path, one, other)
    source = open_source(paths, options={"fields": "s,x,y.a"})
    import_dataset(volume, source, "n", layout="path")
    with volume["n"] as dataset:
        assert dataset.fields == {"s": "bytes", "x": "<i2[?]", "y.a": "<i8[]"}
        assert [dataset.sample(i)["x"].tolist() for i in range(2)] == [[1], [300, 2]]
    two(tmp_path, one, {**other, "y": [{"a": 2, "b": 3}]})
    with pytest.raises(
        FormatError, match=r"a.parquet: expected column y.b of int64 as in .*b.parq"
    ):
        open_source(paths, options={"fields": "*"})


@pytest.mark.parametrize("write", [write_arrow, write_parquet])
def test_columns_of_equal_names_are_not_dropped(tmp_path: Path, write: Any) -> None:
    table = pa.table([[b"1"], [1], ["one"]], names=["s", "x", "x"])
    path = write(table, tmp_path / f"x.{write.__name__[6:]}")
    message = "column x: expected one column of this name, got 2, of int64 and of string"
    for options in ({}, {"fields": "s,*"}, {"fields": "x"}, {"column": "s"}, {"path": "x"}):
        with pytest.raises(FormatError, match=message):
            open_source(path, options=options)
    source = open_source(path, options={"column": "s", "attributes": ()})
    assert source.skipped == {"column that is not used: x, x": 2}
    assert [data for data, _ in take(source).values()] == [b"1"]


def test_what_is_left_out_is_named(tmp_path: Path) -> None:
    struct = pa.array([{"bytes": b"1", "path": "p"}])
    path = write_arrow({"image": struct, "y": [[1]], "z": [1]}, tmp_path / "x.arrow")
    assert open_source(path).skipped == {"column that is not used: image.path, y": 2}
    source = open_source(path, options={"attributes": ()})
    assert source.skipped == {"column that is not used: image.path, y, z": 3}


# ---- damage --------------------------------------------------------------------------------------


def test_an_encrypted_file_is_called_so(tmp_path: Path) -> None:
    path = write_parquet({"s": [b"1"]}, tmp_path / "x.parquet")
    data = path.read_bytes()
    path.write_bytes(b"PARE" + data[4:-4] + b"PARE")
    with pytest.raises(
        FormatError, match=r"x.parquet: expected a Parquet file that is not encrypted"
    ):
        open_source(path)


def test_an_encrypted_column_is_called_so(tmp_path: Path) -> None:
    encryption = pytest.importorskip("pyarrow.parquet.encryption")

    class Kms(encryption.KmsClient):  # type: ignore[misc, name-defined]
        def wrap_key(self, key: bytes, _name: str) -> bytes:
            return key

        def unwrap_key(self, key: bytes, _name: str) -> bytes:
            return key

    for plain_footer in (True, False):
        config = encryption.EncryptionConfiguration(
            footer_key="f", column_keys={"k": ["s"]}, plaintext_footer=plain_footer,
        )  # fmt: skip
        properties = encryption.CryptoFactory(lambda _: Kms()).file_encryption_properties(
            encryption.KmsConnectionConfig(), config
        )
        path = tmp_path / "x.parquet"
        write_parquet({"s": [b"1"], "x": [1]}, path, encryption_properties=properties)
        with pytest.raises(DlfsError, match="is not encrypted, got an encrypted one"):
            take(open_source(path))
