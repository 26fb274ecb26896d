"""Attributes given at import: from paths, from tables, of arrays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlfs.errors import FormatError, NotFoundError, UsageError
from dlfs.ingest.attributes import ArrayRule, AttributedSource, PathRule, TableRule, label_rule
from dlfs.ingest.formats.folder import FolderSource
from dlfs.ingest.importer import ImportReport, import_dataset
from dlfs.ingest.source import SampleBlock
from dlfs.volume.volume import Volume
from tests.support.files import write_files

PATHS = [f"{split}/{label}/{i:02}.bin" for split in ("test", "train") for label in ("cat", "dog")
         for i in range(3)]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_files(tmp_path / "data", {path: path.encode() for path in PATHS})


def run(volume: Volume, folder: Path, *rules: Any) -> ImportReport:
    return import_dataset(volume, AttributedSource(FolderSource(folder), rules), "ds")


def column(volume: Volume, name: str) -> list[Any]:
    with volume["ds"] as dataset:
        assert [path.decode() for path in dataset.paths()] == PATHS
        return list(dataset.column(name).tolist())


def block(*paths: str, size: int = 0) -> SampleBlock:
    lengths = np.full(len(paths), size)
    offsets = np.cumsum(lengths) - lengths
    encoded = [path.encode("utf-8", "surrogateescape") for path in paths]
    return SampleBlock(encoded, np.zeros(int(lengths.sum()), np.uint8), offsets, lengths)


# ---- paths ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x=0", "train"),
        ("x=-2", "cat"),
        ("x=-1", "07.bin"),
        ("x=/([a-z]+)/", "cat"),
        ("x=(?P<y>train)/(?P<x>c.t)", "cat"),
        ("x=c.t", "cat"),
        (r"x:int=(\d+)\.bin", 7),
        (r"x:float=(\d+)\.bin", 7.0),
        (r"a:b=c.t", "cat"),
    ],
)
def test_parts_of_paths(text: str, expected: object) -> None:
    rule = PathRule.parse(text)
    (values,) = rule.columns(block("train/cat/07.bin")).values()
    assert values.tolist() == [expected]


def test_labels_are_the_folders(volume: Volume, folder: Path) -> None:
    run(volume, folder, label_rule(), PathRule("split", "0"))
    assert column(volume, "label") == (["cat"] * 3 + ["dog"] * 3) * 2
    assert column(volume, "split") == ["test"] * 6 + ["train"] * 6


def test_a_path_without_the_pattern_is_named(volume: Volume, folder: Path) -> None:
    (folder / "alone").write_bytes(b"")
    with pytest.raises(UsageError, match="'label' from paths: expected '-2' in every path, got al"):
        run(volume, folder, label_rule())
    assert volume.datasets() == []
    with pytest.raises(UsageError, match="sample a: invalid literal"):
        PathRule.parse("x:int=0").columns(block("a"))


@pytest.mark.parametrize("text", ["", "x", "=1", "x=", "x:int"])
def test_malformed_patterns(text: str) -> None:
    with pytest.raises(UsageError, match="expected an attribute as NAME=PATTERN"):
        PathRule.parse(text)
    with pytest.raises(UsageError, match="expected a component's number or a regular"):
        PathRule("x", "(")
    with pytest.raises(UsageError, match="expected int, float, str"):
        PathRule("x", "1", "complex")


# ---- tables --------------------------------------------------------------------------------------


def write_csv(folder: Path, text: str, name: str = "table.csv") -> str:
    path = folder.parent / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_csv_file(volume: Volume, folder: Path) -> None:
    rows = [f"{path},{i},{i / 2},{i}_,\"a,{i}\",{'' if i % 2 else i}" for i, path in
            enumerate(reversed(PATHS))]  # fmt: skip
    text = "\n".join(["path,int,float,under,text,gaps", *rows, "nowhere,1,1,1,1,1", ""])
    report = run(volume, folder, TableRule(write_csv(folder, text)))
    assert report.skipped == {"row of attributes without a sample": 1}
    order = list(range(len(PATHS)))[::-1]
    assert column(volume, "int") == order
    assert column(volume, "float") == [i / 2 for i in order]
    assert column(volume, "under") == [f"{i}_" if i >= 0 else "1" for i in order]
    assert column(volume, "text") == [f"a,{i}" for i in order]
    gaps = np.array(column(volume, "gaps"))
    np.testing.assert_array_equal(gaps, [np.nan if i % 2 else i for i in order])


def test_tables_of_arrow_and_parquet(volume: Volume, folder: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = arrow.table(
        {
            "file_name": PATHS,
            "label": arrow.array(np.arange(12), arrow.int8()),
            "name": arrow.array([f"n{i % 2}" for i in range(12)]).dictionary_encode(),
            "good": [i % 2 == 0 for i in range(12)],
            "score": arrow.array([None if i % 2 else float(i) for i in range(12)]),
        }
    )
    paths = [str(folder.parent / f"table{suffix}") for suffix in (".parquet", ".arrow", ".feather")]
    parquet.write_table(table, paths[0])
    for path, opener in zip(paths[1:], (arrow.ipc.new_stream, arrow.ipc.new_file), strict=True):
        with opener(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=5)
    for path in paths:
        run(volume, folder, TableRule(path))
        with volume["ds"] as dataset:
            assert dataset.columns["label"] == np.int8
        assert column(volume, "label") == list(range(12))
        assert column(volume, "name") == [f"n{i % 2}" for i in range(12)]
        assert column(volume, "good") == [i % 2 == 0 for i in range(12)]
        scores = np.array(column(volume, "score"))
        np.testing.assert_array_equal(scores, [np.nan if i % 2 else i for i in range(12)])


def test_a_sample_without_a_row_is_named(volume: Volume, folder: Path) -> None:
    rows = "\n".join(f"{path}\t1" for path in PATHS[:-1])
    table = TableRule(write_csv(folder, f"file_name\tx\n{rows}\n", "table.tsv"))
    with pytest.raises(UsageError, match="a row for every sample, got none: train"):
        run(volume, folder, table)
    assert volume.datasets() == []


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("", UsageError, "expected a column path or file_name or filename"),
        ("a,b\n1,2\n", UsageError, "got a, b"),
        ("path,x\na,1\nb\n", FormatError, "line 3: expected 2 values, got 1"),
        ("path,path\na,1\n", FormatError, "columns of different names"),
        ("path,x\na,1\nb,1\na,2\n", FormatError, "one row for each path, got two: a"),
        ('path,x\na,"1\n', FormatError, "line 2: unexpected end"),
    ],
)
def test_tables_that_are_wrong(
    tmp_path: Path, text: str, error: type[Exception], message: str
) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(error, match=message):
        TableRule(str(path))


def test_other_tables_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no such file"):
        TableRule(str(tmp_path / "t.csv"))
    with pytest.raises(UsageError, match=r"expected a file \.csv"):
        TableRule(str(tmp_path / "t.xlsx"))
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"path": ["a"], "x": [[1, 2]]}), tmp_path / "t.parquet")
    with pytest.raises(
        UsageError, match="expected numbers, bools or text in every column, got list"
    ):
        TableRule(str(tmp_path / "t.parquet"))
    (tmp_path / "u.parquet").write_bytes(b"PAR1 no more")
    with pytest.raises(FormatError, match="without its footer"):
        TableRule(str(tmp_path / "u.parquet"))


def test_the_column_of_paths_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("id,path,x\n1,a,5\n2,b,6\n")
    rule = TableRule(str(path), "id")
    assert rule.columns(block("2"))["x"].tolist() == [6]
    assert rule.columns(block("1"))["path"].tolist() == ["a"]
    assert rule.skipped == {}
    assert TableRule(str(path)).columns(block("b"))["id"].tolist() == [2]


# ---- arrays --------------------------------------------------------------------------------------


def test_samples_as_arrays(volume: Volume, tmp_path: Path) -> None:
    arrays = np.arange(4 * 6, dtype=">i2").reshape(4, 2, 3)
    (tmp_path / "data").mkdir()
    for number, array in enumerate(arrays):
        (tmp_path / "data" / str(number)).write_bytes(array.tobytes())
    run(volume, tmp_path / "data", ArrayRule(">i2", "2,3"))
    with volume["ds"] as dataset:
        np.testing.assert_array_equal(dataset.read_arrays(range(4)), arrays)
    with pytest.raises(UsageError, match=r"sample b: expected 12 bytes, .*, got 11"):
        ArrayRule(">i2", "2,3").columns(block("b", size=11))
    with pytest.raises(UsageError, match="expected lengths with commas"):
        ArrayRule("f4", "2 x 3")
