"""Folders of containers, hidden files in folders of classes, and names of our own in sources."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dlfs.errors import FormatError, UsageError
from dlfs.ingest.attributes import PathRule, TableRule
from dlfs.ingest.importer import open_source
from dlfs.volume.volume import Volume
from tests.support.files import write_files
from tests.unit.ingest.taking import import_all, refused, take


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["a.parquet", "train/b.parquet"], "format parquet, such as a.parquet"),
        (["s/0.tar", "s/1.tar"], "--format tar imports what is in them"),
        (["a.npy", "b.npy", "README.md"], "2 of 3 files look like format npy"),
        (["x-train.tfrecord-00000-of-00001", "features.json"], "format tfrecord"),
        (["d.lance/data/0.lance", "d.lance/_versions/1.manifest"], "Lance is imported as Parquet"),
        (["shard.00000.mds"], "index.json, which is missing"),
        (["x.zarr/.zarray", "x.zarr/0", "x.zarr/1", "x.zarr/2"], "format zarr"),
        (["env/data.mdb", "env/lock.mdb"], "format lmdb"),
        (["a.h5", "b.hdf5"], "format hdf5"),
        (["cat/1.jpg", "cat/2.jpg", "labels.parquet"], None),
        (["a.txt", "b.csv"], None),
    ],
)
def test_containers_in_a_folder_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, names: list[str], expected: str | None
) -> None:
    write_files(tmp_path, dict.fromkeys(names, b"data"))
    with caplog.at_level(logging.WARNING):
        source = open_source(tmp_path)
    assert set(take(source)) == set(names)
    assert (expected in caplog.text) if expected else not caplog.records
    caplog.clear()
    open_source(tmp_path, format_name="folder").close()
    assert not caplog.records


def test_hidden_files_make_no_class(volume: Volume, tmp_path: Path) -> None:
    files = [".git/config", ".git/x/y", ".DS_Store", "b/1", "b/._1", "b/.x/2", "a/2", "a/.DS_Store"]
    write_files(tmp_path, {name: name.encode() for name in files})
    (tmp_path / "b" / ".broken").symlink_to("nothing")
    source = open_source(tmp_path, format_name="imagefolder")
    assert take(source) == {
        "a/2": (b"a/2", {"label": 0, "class": "a"}),
        "b/1": (b"b/1", {"label": 1, "class": "b"}),
    }
    (reason,) = source.skipped
    assert reason.startswith("hidden file or folder: ")
    assert set(reason.partition(": ")[2].split(", ")) == {
        ".git",
        ".DS_Store",
        "._1",
        ".x",
        ".broken",
    }
    assert source.skipped[reason] == 6
    assert set(import_all(volume, tmp_path, format_name="imagefolder")) == {"a/2", "b/1"}


# ---- names of our own ----------------------------------------------------------------------------

NAMES = ["dlfs:fields", "dlfs:dtype", "dlfs:field:x:bytes", "dlfs:vector:x:0", "dlfs:other"]


@pytest.mark.parametrize("name", NAMES)
def test_names_of_our_own_are_refused_in_sources(volume: Volume, tmp_path: Path, name: str) -> None:
    message = f"attribute '{name}': expected a name that does not begin with 'dlfs:'"
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"s": [b"1"], name: ["<u1"], "y": [1]}), path)
    with refused(volume, UsageError, message):
        import_all(volume, path)
    assert take(open_source(path, options={"attributes": "y"})) == {"x/00000000": (b"1", {"y": 1})}
    (tmp_path / "a").write_bytes(b"1")
    table = tmp_path / "x.csv"
    table.write_text(f"path,{name}\na,1\n")
    with refused(volume, UsageError, message):
        import_all(volume, table)
    with pytest.raises(UsageError, match=message):
        TableRule(str(table))
    with pytest.raises(UsageError, match=message):
        PathRule(name, "0")


def test_a_table_that_claims_to_be_exported_is_checked(volume: Volume, tmp_path: Path) -> None:
    columns: dict[str, Any] = {"path": ["a"], "bytes": [b"123"], "dlfs:fields": ['{"x":"<i4[]"}']}
    schema = pa.table(columns).schema.with_metadata({b"dlfs:dataset": b"n@1"})
    path = tmp_path / "x.arrow"
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, schema) as writer:
        writer.write_table(pa.table(columns, schema=schema))
    with refused(volume, UsageError, "expected 4 bytes up to the end of field 'x', got 3|end in 3"):
        import_all(volume, path)


# ---- CSV -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "want"),
    [
        (["12345678901234567890", "1"], str),
        (["9007199254740993", ""], str),
        (["9007199254740992", ""], float),
        (["123456789012345678901234567890", "1.5"], str),
        (["1e400", "1"], str),
        (["1e-400", "1"], str),
        (["-0", "1"], float),
        (["9223372036854775807", "-9223372036854775808"], int),
        (["9223372036854775808", "1"], str),
        (["007", "1"], str),
        (["True", "False"], str),
        (["1", ""], float),
        (["nan", "inf"], float),
        (["0.1", "1e3"], float),
        (["", ""], str),
    ],
)
def test_no_number_of_a_csv_file_changes(tmp_path: Path, values: list[str], want: type) -> None:
    for name in "ab":
        (tmp_path / name).write_bytes(b"1")
    table = tmp_path / "x.csv"
    table.write_bytes(f"\ufeffpath,x\r\na,{values[0]}\r\nb,{values[1]}\r\n".encode())
    got = [attributes["x"] for _, attributes in take(open_source(table)).values()]
    assert list(map(type, got)) == [want, want]
    if want is not float:
        assert got == list(map(want, values))


def test_a_csv_file_without_paths_is_called_so(volume: Volume, tmp_path: Path) -> None:
    table = tmp_path / "x.csv"
    table.write_text("text,label\nhello,1\n")
    message = "expected the paths of files in the column path or file_name or filename, got none"
    with refused(volume, UsageError, message):
        import_all(volume, table)
    (tmp_path / "a").write_bytes(b"1")
    table.write_text("label,file_name\n1,a\n")
    assert take(open_source(table)) == {"a": (b"1", {"label": 1})}


def test_other_columns_in_a_csv_row_are_named(volume: Volume, tmp_path: Path) -> None:
    table = tmp_path / "x.csv"
    for text, message in (
        ("path,x\na\n", "line 2: expected 2 values, got 1"),
        ("path,x\na,1,2\n", "line 2: expected 2 values, got 3"),
        ("path,x,x\na,1,2\n", "expected columns of different names"),
        ("path\na\0b\n", "x.csv: line 2"),
    ):
        table.write_text(text)
        with refused(volume, FormatError, message):
            import_all(volume, table)
