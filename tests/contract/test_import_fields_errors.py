"""Fields that do not fit: one error with file, record and field; the volume stays as it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlfs.base.arguments import Layout
from dlfs.errors import DeviceError, FormatError, UsageError
from dlfs.ingest.importer import import_dataset, open_source
from dlfs.volume.volume import Volume
from tests.contract.importing import example_messages, frame
from tests.support.shards import write_mds


def write_examples(folder: Path, *records: dict[str, Any]) -> Path:
    """A TFRecord file of Examples, whose features are lists."""
    pb = example_messages()
    frames = []
    for record in records:
        example = pb.Example()
        for name, values in record.items():
            feature = example.features.feature[name]
            lists = {bytes: feature.bytes_list, int: feature.int64_list, float: feature.float_list}
            lists[type(values[0])].value.extend(values)
        frames.append(frame(example.SerializeToString()))
    (folder / "x.tfrecord").write_bytes(b"".join(frames))
    return folder / "x.tfrecord"


def write_tables(folder: Path, *tables: dict[str, Any]) -> Path:
    pq = pytest.importorskip("pyarrow.parquet")
    for number, columns in enumerate(tables):
        pq.write_table(pytest.importorskip("pyarrow").table(columns), folder / f"{number}.parquet")
    return folder


def write_archives(folder: Path, *archives: dict[str, Any]) -> Path:
    for number, arrays in enumerate(archives):
        np.savez(folder / f"{number}.npz", **arrays)
    return folder / "*.npz"


def write_hdf5(folder: Path, **arrays: Any) -> Path:
    with pytest.importorskip("h5py").File(folder / "x.h5", "w") as file:
        for name, values in arrays.items():
            file[name.replace("__", "/")] = values
    return folder / "x.h5"


def write_column(folder: Path, encoding: str, *values: bytes) -> Path:
    return write_mds(folder, {"x": (encoding, None)}, [[value] for value in values])


GOOD = {"a": [1, 2], "b": [b"abcd"]}
ARRAY = np.zeros((3, 2), np.float32)

DAMAGED: list[tuple[Callable[[Path], Path], dict[str, str], type[Exception], str]] = [
    # A missing member.
    (
        lambda at: write_examples(at, GOOD, {"a": [3]}),
        {"fields": "a,b"},
        FormatError,
        r"x\.tfrecord: record 1: expected feature b, got a",
    ),
    (
        lambda at: write_archives(at, {"a": ARRAY, "b": ARRAY}, {"a": ARRAY}),
        {"fields": "a,b"},
        UsageError,
        r"1\.npz: /: field 'b': expected an array 'b', got none",
    ),
    (
        lambda at: write_archives(at, {"a": ARRAY, "b": ARRAY}, {"a": ARRAY}),
        {"fields": "*"},
        FormatError,
        r"1\.npz: /: expected the fields a, b as in the first file or group, got a",
    ),
    (
        lambda at: write_hdf5(at, g__a=ARRAY),
        {"fields": "a,c"},
        UsageError,
        r"x\.h5: g: field 'c': expected an array 'c', got none",
    ),
    (
        lambda at: write_tables(at, {"a": [1], "b": [b""]}, {"b": [b""]}),
        {"fields": "a,b"},
        FormatError,
        r"1\.parquet: expected column a of int64 as in .*0\.parquet, got none",
    ),
    # Another type.
    (
        lambda at: write_examples(at, GOOD, {"a": [0.5], "b": [b""]}),
        {"fields": "*"},
        FormatError,
        r"x\.tfrecord: record 1: field 'a': expected <i8\[\?\], got float32 of shape \(1,\)",
    ),
    (
        lambda at: write_examples(at, GOOD, {"a": [1], "b": [b"", b""]}),
        {"fields": "b"},
        FormatError,
        r"x\.tfrecord: record 1: expected one value in feature b, got 2",
    ),
    (
        lambda at: write_archives(at, {"a": ARRAY}, {"a": ARRAY.astype(np.int8)}),
        {"fields": "a"},
        FormatError,
        r"1\.npz: /: field 'a': expected <f4\[2\], got \|i1\[2\]",
    ),
    (
        lambda at: write_tables(at, {"a": [b"\xff"]}),
        {"fields": "a:text"},
        FormatError,
        r"0\.parquet: row 0: field 'a': 'utf-8' codec can't decode",
    ),
    (
        lambda at: write_tables(at, {"a": [b"abc"], "b": [["x"]]}),
        {"fields": "a,b"},
        UsageError,
        r"0\.parquet: expected bytes, .* in field b, got list<.*string>; b:text stores",
    ),
    (
        lambda at: write_column(at, "str", b"a", b"\xff"),
        {"fields": "x"},
        FormatError,
        "mds: sample 1: f",
    ),
    (
        lambda at: write_column(at, "str_int", b"1", b"9" * 30),
        {"fields": "x"},
        FormatError,
        r"shard\.mds: sample 1: field 'x': expected str_int: Python int too large",
    ),
    # Another shape.
    (
        lambda at: write_examples(at, GOOD, {"a": [1], "b": [b"abc"]}),
        {"fields": "b:u2[2]"},
        FormatError,
        r"record 1: field 'b': expected <u2\[2\], of 2 bytes each element, got 3 bytes",
    ),
    (
        lambda at: write_examples(at, GOOD, {"a": [1], "b": [b"abcdef"]}),
        {"fields": "b:u2[?,2]"},
        FormatError,
        r"record 1: field 'b': expected <u2\[\?,2\], got 3 elements without a shape",
    ),
    (
        lambda at: write_examples(at, GOOD),
        {"fields": "a:i8[]"},
        FormatError,
        r"record 0: field 'a': expected <i8\[\], got 2 elements without a shape",
    ),
    (
        lambda at: write_examples(at, {"a": [300]}),
        {"fields": "a:u1[?]"},
        FormatError,
        r"record 0: field 'a': expected \|u1\[\?\], got int64 of shape \(1,\)",
    ),
    (
        lambda at: write_archives(at, {"a": ARRAY}, {"a": ARRAY[None]}),
        {"fields": "a", "samples": "groups"},
        FormatError,
        r"1\.npz: /: field 'a': expected <f4\[3,2\], got <f4\[1,3,2\]",
    ),
    (
        lambda at: write_hdf5(at, a=ARRAY, b=ARRAY[1:]),
        {"fields": "a,b"},
        UsageError,
        r"x\.h5: /: field 'b': expected 3 rows as in a, got 2",
    ),
    (
        lambda at: write_hdf5(at, a=ARRAY, b=3),
        {"fields": "a,b"},
        UsageError,
        r"x\.h5: /: field 'b': expected rows of numbers, times or text, got b \(int64, scalar\)",
    ),
    (
        lambda at: write_tables(at, {"a": [[[1], [2]], [[1], [2, 3]]]}),
        {"fields": "a"},
        FormatError,
        r"0\.parquet: row 1: field 'a': expected lists of one length, got 1 and 2",
    ),
    (
        lambda at: write_column(at, "ndarray:int32", b"\x04\1abcd", b"\x04\1abcde"),
        {"fields": "x"},
        FormatError,
        r"shard\.mds: sample 1: field 'x': expected ndarray:int32: buffer size must be a multiple",
    ),
    (
        lambda at: write_column(at, "ndarray", b"\x01", b""),
        {"fields": "x"},
        FormatError,
        r"shard\.mds: sample 0: field 'x': expected ndarray: expected the number of a type",
    ),
    # Nulls.
    (
        lambda at: write_tables(at, {"a": [1, None]}),
        {"fields": "a"},
        FormatError,
        r"0\.parquet: row 1: column a: expected a value of int64, got null",
    ),
    (
        lambda at: write_tables(at, {"a": [[[1]], [[1], [None]]]}),
        {"fields": "a"},
        FormatError,
        r"0\.parquet: row 1: column a: expected a value of list<.*>, got null",
    ),
    (
        lambda at: write_tables(at, {"a": [[[1]], [], [None]]}),
        {"fields": "a"},
        FormatError,
        r"0\.parquet: row 2: column a: expected a value of list<.*>, got null",
    ),
]


def import_all(volume: Volume, path: Path, name: str, options: dict[str, str]) -> None:
    source = open_source(path, format_name=name, options=options)
    try:
        import_dataset(volume, source, "n", layout="path")
    finally:
        source.close()


@pytest.mark.parametrize(("write", "options", "error", "message"), DAMAGED)
def test_values_that_do_not_fit_are_one_error(
    volume: Volume,
    tmp_path: Path,
    write: Callable[[Path], Path],
    options: dict[str, str],
    error: type[Exception],
    message: str,
) -> None:
    path = write(tmp_path)
    before = volume.free_bytes, volume.generation, volume.datasets()
    name = "parquet" if path.is_dir() and [*path.glob("*.parquet")] else "auto"
    with pytest.raises(error, match=message) as caught:
        import_all(volume, path, name, options)
    assert type(caught.value) is error
    assert (volume.free_bytes, volume.generation, volume.datasets()) == before


@pytest.mark.parametrize(
    ("write", "options", "message"),
    [
        (
            lambda at: write_examples(at, GOOD),
            {"fields": "a,a"},
            "fields of different names, got a",
        ),
        (lambda at: write_examples(at, GOOD), {"fields": "a:q9[]"}, "field 'a': expected elements"),
        (
            lambda at: write_examples(at, GOOD),
            {"fields": "a", "column": "b"},
            "expected a column or fields, got both",
        ),
        (
            lambda at: write_column(at, "str", b"a"),
            {"fields": "x", "column": "x"},
            "expected a column or fields, got both",
        ),
        (lambda at: write_column(at, "str", b"a"), {"fields": "y"}, "expected column y, got x"),
        (lambda at: write_column(at, "str", b"a"), {"fields": "y*"}, "expected column y\\*, got x"),
        (
            lambda at: write_archives(at, {"a": ARRAY}),
            {"fields": "a", "samples": "arrays"},
            "expected samples of rows or groups for fields, got arrays",
        ),
        (
            lambda at: write_archives(at, {"a": ARRAY}),
            {"fields": "x,y*"},
            r"expected arrays for the fields x, y\*, got a \(float32, 3x2\)",
        ),
        (lambda at: write_archives(at, {"a": ARRAY}), {"fields": "x="}, "a field NAME=ARRAY, got"),
    ],
)
def test_choices_that_make_no_sense_are_refused(
    tmp_path: Path, write: Callable[[Path], Path], options: dict[str, str], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        open_source(write(tmp_path), options=options)


# ---- what is chosen ------------------------------------------------------------------------------


def test_attributes_and_paths_stay_beside_fields(volume: Volume, tmp_path: Path) -> None:
    folder = write_tables(
        tmp_path,
        {"a": [b"1", b"2"], "b": [[1, 2], [3]], "n": [5, 6], "s": ["x", "y"], "l": [["p"], ["q"]]},
    )
    options = {"fields": "a,b,l:text", "path": "s"}
    import_all(volume, folder, "parquet", options)
    with volume["n"] as dataset:
        assert dataset.fields == {"a": "bytes", "b": "<i8[?]", "l": "text"}
        assert dataset.paths() == [b"x", b"y"]
        assert dataset.column("n").tolist() == [5, 6]
        assert dataset.sample(1)["l"] == '["q"]'


def test_arrays_that_are_no_fields_are_counted_or_attributes(
    volume: Volume, tmp_path: Path
) -> None:
    path = write_hdf5(
        tmp_path,
        train__x=np.ones((4, 2), ">f4"),
        train__y=np.arange(4),
        train__pair=np.zeros(4, "i4,f4"),
        test__x=np.zeros((3, 5), ">f4"),
        test__y=np.arange(3),
        names=np.array([b"a", b"b"]),
        run=7,
    )
    options = {"fields": "x", "attributes": "label=y,run=/run"}
    source = open_source(path, options=options)
    report = import_dataset(volume, source, "n")
    source.close()
    # Each member of a compound type could be a field.
    assert report.skipped == {"array that is no field": 3}
    with volume["n"] as dataset:
        assert dataset.fields == {"x": ">f4[?]"}
        assert sorted(dataset.paths())[2:4] == [b"test/00000002", b"train/00000000"]
        assert sorted(dataset.column("label").tolist()) == [0, 0, 1, 1, 2, 2, 3]
        assert set(dataset.column("run").tolist()) == {7}
    options = {"fields": "y,x,all=/names", "select": "t*/*"}
    with pytest.raises(UsageError, match=r"test: field 'all': expected 3 rows as in test/y, got 2"):
        open_source(path, options=options)


@pytest.mark.parametrize("layout", ["path", "shuffled"])
def test_rows_of_arrays_come_in_windows_of_a_buffer(
    volume: Volume, tmp_path: Path, layout: Layout
) -> None:
    values = np.arange(300 * 5, dtype=np.int16).reshape(300, 5)
    with pytest.importorskip("h5py").File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", data=values, chunks=(7, 5))
        file.create_dataset("y", data=values[:, 0], chunks=(32,))
        file["text"] = [f"row {row}" for row in range(300)]
    for fields in ("x,y", "x,y,text"):
        source = open_source(tmp_path / "x.h5", options={"fields": fields})
        source.buffer_bytes = 500
        assert len(list(source.blocks(layout=layout, seed=1))) > 4
        import_dataset(volume, source, "n", layout=layout)
        with volume["n"] as dataset:
            order = np.argsort(dataset.paths())
            assert dataset.paths()[order[299]] == b"x/00000299"
            batch = dataset.read(order)
            assert np.array_equal(batch["x"], values)
            assert np.array_equal(batch["y"], values[:, 0])
            if "text" in fields:
                assert batch["text"] == [f"row {row}" for row in range(300)]


def test_a_file_that_changes_is_one_error(volume: Volume, tmp_path: Path) -> None:
    write_archives(tmp_path, {"a": ARRAY, "b": ARRAY})
    source = open_source(tmp_path / "0.npz", options={"fields": "*"})
    write_archives(tmp_path, {"a": ARRAY, "b": ARRAY[1:]})
    with pytest.raises(DeviceError, match=r"0\.npz: b changed during the import"):
        import_dataset(volume, source, "n")
    assert volume.datasets() == []
