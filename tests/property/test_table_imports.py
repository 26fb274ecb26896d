"""What an import of tables and records gives is what the format's own reader gives, or an error.

Hypothesis draws types, nulls, nesting, extremes, batches, row groups and files. A value that is
refused has an error that names the file, and the column or record. Damaged files are errors of
ours, or give as many samples as before. ``DLFS_TEST_EXAMPLES`` is the number of examples of each
test, 15 by default.
"""

from __future__ import annotations

import csv
import decimal
import io
import json
import math
import os
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tfrecord import TFRecordWriter, tfrecord_loader

from dlfs.errors import DlfsError, FormatError
from dlfs.fields import FieldType, fields_of_json
from dlfs.ingest.importer import open_source
from dlfs.ingest.registry import find_format, make_options
from dlfs.ingest.source import Source
from tests.support.files import tar
from tests.unit.ingest.taking import COMPRESSORS

EXAMPLES = int(os.environ.get("DLFS_TEST_EXAMPLES", "15"))
examples = settings(max_examples=EXAMPLES, deadline=None)

Row = tuple[str, bytes, dict[str, Any]]


@contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def rows_of(source: Source) -> list[Row]:
    """Path, bytes and attributes of every sample, in its order."""
    found: list[Row] = []
    for block in source.blocks(layout="path", seed=0):
        columns = {name: list(values) for name, values in block.attributes.items()}
        for i, path in enumerate(block.paths):
            start, length = int(block.offsets[i]), int(block.lengths[i])
            data = block.data[start : start + length].tobytes()
            found.append((path.decode(), data, {name: v[i] for name, v in columns.items()}))
    source.close()
    return found


def take(paths: list[Path], format_name: str, **options: Any) -> list[Row]:
    """Import some files in this process, which starts none for each example."""
    row = find_format(format_name)
    return rows_of(make_options(row, options).open([str(path) for path in paths]))


def attempt(call: Callable[[], list[Row]]) -> tuple[list[Row], str]:
    """The rows of an import, or the text of its error; any other exception is a failure."""
    try:
        return call(), ""
    except DlfsError as error:
        return [], str(error)


def same(one: Any, other: Any) -> bool:
    """Compare two values; NaN equals NaN, and 0.0 does not equal -0.0."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isnan(one) == math.isnan(other) and (
            math.isnan(one) or (one == other and math.copysign(1, one) == math.copysign(1, other))
        )
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


# ---- Arrow, Parquet, Hugging Face ----------------------------------------------------------------

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
WIDTHS = [(pa.int8(), 8), (pa.int16(), 16), (pa.int32(), 32), (pa.int64(), 64)]
UNSIGNED = [(pa.uint8(), 8), (pa.uint16(), 16), (pa.uint32(), 32), (pa.uint64(), 64)]
FAR = {"s": 9 * 10**11, "ms": 9 * 10**14, "us": 9 * 10**17, "ns": 2**63 - 1}
"""Largest time that is drawn, in each unit."""


def integers(low: int, high: int) -> st.SearchStrategy[int]:
    return st.one_of(st.sampled_from([low, high, 0]), st.integers(low, high))


def scalar_types() -> st.SearchStrategy[tuple[Any, st.SearchStrategy[Any], Callable[[Any], Any]]]:
    """A type, its stored values, and the attribute that a stored value becomes."""
    found: list[tuple[Any, st.SearchStrategy[Any], Callable[[Any], Any]]] = [
        *((kind, integers(-(2 ** (n - 1)), 2 ** (n - 1) - 1), int) for kind, n in WIDTHS),
        *((kind, integers(0, 2**n - 1), int) for kind, n in UNSIGNED),
        (pa.bool_(), st.booleans(), bool),
        (pa.float32(), st.floats(width=32), float),
        (pa.float64(), st.floats(), float),
        (pa.float16(), st.floats(width=16).map(np.float16), float),
        (pa.string(), TEXT, str),
        (pa.large_string(), TEXT, str),
        (pa.string_view(), TEXT, str),
    ]
    for unit, far in FAR.items():
        found.append((pa.timestamp(unit), integers(-far, far), time_text(unit)))
        found.append((pa.timestamp(unit, "UTC"), integers(-far, far), time_text(unit, "Z")))
        found.append((pa.duration(unit), integers(-far, far), ("{}" + unit).format))
    days = lambda n: str(np.datetime64(n, "D"))  # noqa: E731
    found.append((pa.date32(), integers(-700_000, 2_900_000), days))
    moneys = st.decimals("-9999999.99", "9999999.99", places=2)
    found.append((pa.decimal128(9, 2), moneys, lambda value: f"{value:.2f}"))
    return st.sampled_from(found)


def time_text(unit: str, end: str = "") -> Callable[[int], str]:
    def text(number: int) -> str:
        return str(np.array(number, f"M8[{unit}]")).replace("T", " ").lstrip("+") + end

    return text


def make_array(kind: Any, values: list[Any]) -> Any:
    """An array of stored values, of which None is a null."""
    if pa.types.is_temporal(kind):
        stored = pa.int32() if kind.bit_width == 32 else pa.int64()
        return pa.array(values, stored).view(kind)
    return pa.array(values, kind)


@st.composite
def columns(draw: st.DrawFn) -> tuple[Any, list[Any], list[Any]]:
    """An array, perhaps encoded; its stored values; and the attributes that they become."""
    kind, values, attribute = draw(scalar_types())
    stored = draw(st.lists(st.one_of(values, st.none()), min_size=1, max_size=12))
    array = make_array(kind, stored)
    encoding = draw(st.sampled_from(["plain", "dictionary", "runs", "sliced"]))
    can_encode = not pa.types.is_string_view(kind) and not pa.types.is_float16(kind)
    if encoding == "dictionary" and can_encode:
        array = array.dictionary_encode(null_encoding=draw(st.sampled_from(["mask", "encode"])))
    elif encoding == "runs" and can_encode:
        array = pa.RunEndEncodedArray.from_arrays(np.arange(1, len(array) + 1), array)
    elif encoding == "sliced":
        array = pa.concat_arrays([array, array]).slice(len(array))
    return array, stored, [None if one is None else attribute(one) for one in stored]


def write(table: Any, path: Path, rows: int) -> Path:
    """Write a table as the suffix says, in batches or row groups of some rows."""
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=rows)
        return path
    make = pa.ipc.new_stream if path.suffix == ".arrows" else pa.ipc.new_file
    with pa.OSFile(str(path), "wb") as file, make(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    return path


def with_samples(array: Any) -> Any:
    samples = [b"%d" % i for i in range(len(array))]
    return pa.table({"s": pa.array(samples, pa.binary()), "x": array})


@examples
@given(
    columns(), st.sampled_from([".arrow", ".arrows", ".parquet"]),
    st.sampled_from(["error", "default", "skip"]), st.integers(1, 5),
)  # fmt: skip
def test_columns_are_what_arrow_reads(
    column: tuple[Any, list[Any], list[Any]], suffix: str, nulls: str, rows: int
) -> None:
    array, stored, want = column
    with folder() as place:
        try:
            path = write(with_samples(array), place / f"x{suffix}", rows)
        except (pa.ArrowNotImplementedError, pa.ArrowInvalid):
            assume(False)
        kind = getattr(array.type, "value_type", array.type)
        is_float = pa.types.is_floating(kind)
        if suffix == ".parquet" and ("timestamp[s" in str(array.type)):
            assume(False)  # Parquet has no seconds
        if suffix == ".parquet" and "dictionary<values=duration" in str(array.type):
            assume(False)  # Arrow itself reads such a column of Parquet as numbers
        nulls_at = [] if is_float else [i for i, one in enumerate(stored) if one is None]
        name = {".arrow": "arrow", ".arrows": "arrow", ".parquet": "parquet"}[suffix]
        if nulls == "error" and nulls_at:
            with pytest.raises(FormatError) as caught:
                take([path], name, nulls=nulls)
            assert f"import {path}: row {nulls_at[0]}: column x: expected" in str(caught.value)
            return
        got = take([path], name, nulls=nulls)
        kept = [i for i in range(len(want)) if not (nulls == "skip" and i in nulls_at)]
        assert [row[0] for row in got] == [f"x/{i:08d}" for i in kept]
        assert [row[1] for row in got] == [b"%d" % i for i in kept]
        for i, (_, _, attributes) in zip(kept, got, strict=True):
            value = attributes["x"].item() if hasattr(attributes["x"], "item") else attributes["x"]
            expected = want[i]
            if expected is None:
                expected = math.nan if is_float else type(value)()
            assert same(value, expected), (value, expected)


@st.composite
def nested(draw: st.DrawFn) -> tuple[Any, list[Any]]:
    """Lists of numbers, of any kind of list and depth, with nulls and ragged lengths."""
    kind, values = draw(
        st.sampled_from(
            [(pa.int16(), integers(-(2**15), 2**15 - 1)), (pa.float32(), st.floats(width=32))]
        )
    )
    holes = draw(st.booleans())
    for _ in range(draw(st.integers(1, 3))):
        make = draw(st.sampled_from([pa.list_, pa.large_list, pa.list_view, "fixed"]))
        size = draw(st.integers(1, 2))
        item = st.one_of(values, st.none()) if holes and draw(st.integers(0, 3)) == 0 else values
        if make == "fixed":
            kind, values = pa.list_(kind, size), st.lists(item, min_size=size, max_size=size)
        else:
            kind, values = make(kind), st.lists(item, max_size=3)
    return kind, draw(st.lists(values, min_size=1, max_size=6))


@examples
@given(nested(), st.sampled_from([".arrow", ".parquet"]), st.integers(1, 4))
def test_lists_are_what_arrow_reads(drawn: tuple[Any, list[Any]], suffix: str, rows: int) -> None:
    kind, values = drawn
    with folder() as place:
        try:
            path = write(with_samples(pa.array(values, kind)), place / f"x{suffix}", rows)
            table = (
                pq.read_table(path) if suffix == ".parquet" else pa.ipc.open_file(path).read_all()
            )
        except (pa.ArrowNotImplementedError, pa.ArrowInvalid):
            assume(False)
        expected = table["x"].to_pylist()
        got, error = attempt(lambda: take([path], suffix[1:], fields=("s", "x")))
        if error:
            assert f"import {path}: row " in error
            assert "column x: " in error or "field 'x': " in error
            assert any(has_null(one, kind) or is_ragged(one) for one in expected), error
            return
        for (_, data, attributes), want in zip(got, expected, strict=True):
            array = field_of(data, attributes, "x")
            assert same(array.tolist(), as_floats(want, array)), (array, want)


def has_null(value: Any, kind: Any) -> bool:
    """True for a null that is no float."""
    if value is None:
        return not pa.types.is_floating(kind)
    return isinstance(value, list) and any(has_null(one, kind.value_type) for one in value)


def is_ragged(value: Any) -> bool:
    try:
        return np.asarray(value, float).dtype == object
    except (ValueError, TypeError):
        return True


def as_floats(value: Any, array: Any) -> Any:
    if value is None:
        return math.nan
    if isinstance(value, list):
        return [as_floats(one, array) for one in value]
    return value


def field_of(data: bytes, attributes: dict[str, Any], name: str) -> Any:
    """Return the last field of a sample from its bytes."""
    kind: FieldType = fields_of_json(str(attributes["dlfs:fields"]))[name]
    shape = tuple(length or 0 for length in kind.shape)
    if kind.varies:
        shape = kind.parse_shape(str(attributes[f"dlfs:field:{name}:shape"]))
    size = math.prod(shape) * kind.dtype.itemsize
    return np.frombuffer(data[len(data) - size :] if size else b"", kind.dtype).reshape(shape)


@examples
@given(st.lists(columns(), min_size=2, max_size=3), st.permutations(range(3)))
def test_files_are_joined_or_named(
    drawn: list[tuple[Any, list[Any], list[Any]]], order: list[int]
) -> None:
    with folder() as place:
        paths, want = [], []
        for number, (array, _, values) in zip(order, drawn, strict=False):
            path = place / f"{number}.arrow"
            paths.append(write(with_samples(array), path, 3))
            want.append(values)
        kinds = [array.type for array, _, _ in drawn]
        got, error = attempt(lambda: take(paths, "arrow", nulls="default"))
        if error:
            assert "column x: expected" in error
            assert len(set(map(str, kinds))) > 1
            assert str(place) in error
            return
        flat = [one for values in want for one in values]
        for (_, _, attributes), expected in zip(got, flat, strict=True):
            value = attributes["x"].item() if hasattr(attributes["x"], "item") else attributes["x"]
            if expected is not None:
                assert value == expected or (value != value and expected != expected)


@examples
@given(st.lists(st.tuples(TEXT, integers(-(2**63), 2**63 - 1)), min_size=1, max_size=8))
def test_saved_datasets_are_what_hugging_face_reads(rows: list[tuple[str, int]]) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    with folder() as place:
        given_rows = {"t": [text for text, _ in rows], "n": [number for _, number in rows]}
        datasets.Dataset.from_dict(given_rows).save_to_disk(str(place / "d"))
        theirs = datasets.load_from_disk(str(place / "d"))
        got = take([place / "d"], "huggingface")
        assert [data.decode() for _, data, _ in got] == list(theirs["t"])
        assert [int(attributes["n"]) for _, _, attributes in got] == list(theirs["n"])


# ---- records -------------------------------------------------------------------------------------

NAMES = st.text("abcdefgh0123_", min_size=1, max_size=5)


@examples
@given(
    st.lists(
        st.fixed_dictionaries({
            "b": st.binary(max_size=20),
            "i": st.lists(integers(-(2**63), 2**63 - 1), min_size=1, max_size=3),
            "f": st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=3),
        }),
        min_size=1, max_size=5,
    )
)  # fmt: skip
def test_examples_are_what_tfrecord_reads(records: list[dict[str, Any]]) -> None:
    with folder() as place:
        path = place / "x.tfrecord"
        writer = TFRecordWriter(str(path))
        for one in records:
            kinds = {"b": "byte", "i": "int", "f": "float"}
            writer.write({name: (one[name], kind) for name, kind in kinds.items()})
        writer.close()
        for name, dtype, kind in (("i", np.int64, "int"), ("f", np.float32, "float")):
            theirs = tfrecord_loader(str(path), None, {name: kind, "b": "byte"})
            got = take([path], "tfrecord", fields=("b", name))
            for (_, data, attributes), record, other in zip(got, records, theirs, strict=True):
                array = field_of(data, attributes, name)
                assert array.dtype == dtype
                assert array.tolist() == np.asarray(record[name], dtype).tolist()
                assert array.tolist() == np.asarray(other[name], dtype).tolist()
                assert data.startswith(record["b"])


@examples
@given(st.dictionaries(NAMES, st.binary(max_size=2000), min_size=1, max_size=6))
def test_archives_and_environments_are_what_their_readers_read(files: dict[str, bytes]) -> None:
    with folder() as place:
        for suffix, form in ((".tar", tarfile.PAX_FORMAT), (".tar.gz", tarfile.GNU_FORMAT)):
            packed = COMPRESSORS[suffix](tar(*files.items(), layout=form))
            (place / f"x{suffix}").write_bytes(packed)
            got = take([place / f"x{suffix}"], "tar")
            assert {path: data for path, data, _ in got} == files
        with lmdb.open(str(place / "e")) as environment:
            with environment.begin(write=True) as transaction:
                for name, data in files.items():
                    transaction.put(name.encode(), data)
            with environment.begin() as transaction:
                theirs = [
                    (bytes(key).decode(), bytes(value)) for key, value in transaction.cursor()
                ]
        assert [(path, data) for path, data, _ in take([place / "e"], "lmdb")] == theirs


CELLS = st.one_of(
    TEXT,
    st.integers().map(str),
    st.floats().map(str),
    st.sampled_from(["", "007", "1e400", "-0", "1_000", "True", "0x10", " 5", "+5", "１"]),
)


@examples
@given(st.lists(CELLS, min_size=1, max_size=6), st.booleans(), st.sampled_from(["\r\n", "\n"]))
def test_csv_columns_are_their_text_or_exact_numbers(
    cells: list[str], has_mark: bool, end: str
) -> None:
    with folder() as place:
        for i in range(len(cells)):
            (place / str(i)).write_bytes(b"1")
        text = io.StringIO()
        writer = csv.writer(text, lineterminator=end, quoting=csv.QUOTE_ALL)
        writer.writerows([("path", "x"), *((str(i), cell) for i, cell in enumerate(cells))])
        encoded = ("\ufeff" if has_mark else "") + text.getvalue()
        (place / "x.csv").write_bytes(encoded.encode())
        with (place / "x.csv").open(encoding="utf-8-sig", newline="") as file:
            theirs = {row["path"]: row["x"] for row in csv.DictReader(file)}
        for path, _, attributes in take([place / "x.csv"], "list"):
            value, cell = attributes["x"], theirs[path]
            if isinstance(value, str):
                assert value == cell
            elif isinstance(value, np.integer):
                assert str(value) == cell
            elif cell:
                assert same(float(value), float(cell))
                if cell.lstrip("+-").isdigit():
                    assert decimal.Decimal(float(value)) == decimal.Decimal(cell)
            else:
                assert math.isnan(value)


# ---- damage --------------------------------------------------------------------------------------


def damage(data: bytes, kind: str, at: float, size: int) -> bytes:
    """A damaged copy of a file."""
    where = int(at * max(0, len(data) - 1))
    if kind == "cut":
        return data[:where]
    if kind == "flip":
        return data[:where] + bytes([data[where] ^ (1 << size % 8)]) + data[where + 1 :]
    if kind == "zeros":
        return data[:where] + bytes(len(data[where : where + size])) + data[where + size :]
    if kind == "twice":
        return data[: where + size] + data[where:]
    return data[:where] + data[where + size :]


def make_files(place: Path) -> dict[str, Path]:
    """A small file of each kind that is read in this process."""
    files = {f"{i}.{name}": b"%d" % i * 50 for i in range(4) for name in ("jpg", "cls")}
    for suffix in (".tar", ".tar.gz"):
        (place / f"x{suffix}").write_bytes(COMPRESSORS[suffix](tar(*files.items())))
    writer = TFRecordWriter(str(place / "x.tfrecord"))
    for i in range(4):
        writer.write({"b": (b"%d" % i, "byte"), "i": (i, "int")}, {"s": ([[i], [i]], "int")})
    writer.close()
    with (
        lmdb.open(str(place / "e"), map_size=1 << 20) as environment,
        environment.begin(write=True) as transaction,
    ):
        for name, data in files.items():
            transaction.put(name.encode(), data * 100)
    os.truncate(place / "e" / "data.mdb", 1 << 16)
    (place / "x.csv").write_text("path,n\n" + "".join(f"{i},{i}\n" for i in range(4)))
    for i in range(4):
        (place / str(i)).write_bytes(b"1")
    return {
        "tar": place / "x.tar", "tar.gz": place / "x.tar.gz", "tfrecord": place / "x.tfrecord",
        "lmdb": place / "e" / "data.mdb", "list": place / "x.csv",
    }  # fmt: skip


KINDS = st.sampled_from(["cut", "flip", "zeros", "twice", "less"])


@settings(max_examples=10 * EXAMPLES, deadline=None)
@given(
    st.sampled_from(["tar", "tar.gz", "webdataset", "tfrecord", "fields", "lmdb", "list"]), KINDS,
    st.floats(0, 1), st.integers(1, 700),
)  # fmt: skip
def test_damaged_records_are_errors_of_ours(name: str, kind: str, at: float, size: int) -> None:
    with folder() as place:
        files = make_files(place)
        path = files.get({"webdataset": "tar", "fields": "tfrecord"}.get(name, name), files["tar"])
        path.write_bytes(damage(path.read_bytes(), kind, at, size))
        options = {"fields": ("*",)} if name == "fields" else {}
        formats = {"tar.gz": "tar", "fields": "tfrecord"}
        got, error = attempt(lambda: take([path], formats.get(name, name), **options))
        assert not error or str(place) in error
        assert len({row[0] for row in got}) == len(got)


@settings(max_examples=max(3, EXAMPLES // 3), deadline=None)
@given(
    st.sampled_from([".arrow", ".arrows", ".parquet"]), KINDS, st.floats(0, 1), st.integers(1, 700)
)
def test_damaged_tables_are_errors_of_ours(suffix: str, kind: str, at: float, size: int) -> None:
    with folder() as place:
        table = with_samples(pa.array([f"text {i}" * 5 for i in range(20)]))
        path = write(table, place / f"x{suffix}", 7)
        path.write_bytes(damage(path.read_bytes(), kind, at, size))
        name = "parquet" if suffix == ".parquet" else "arrow"
        _, error = attempt(lambda: rows_of(open_source(path, format_name=name)))
        assert not error or str(path) in error


def test_json_of_nested_values_is_what_arrow_reads() -> None:
    kind = pa.list_(pa.struct({"a": pa.int64(), "t": pa.list_(pa.string())}))
    values = [[{"a": 1, "t": ["x", None]}], [], None]
    with folder() as place:
        path = write(with_samples(pa.array(values, kind)), place / "x.parquet", 2)
        got = take([path], "parquet", fields=("x:text",))
        assert [json.loads(data) for _, data, _ in got] == pq.read_table(path)["x"].to_pylist()
