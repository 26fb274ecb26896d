"""JSON Lines as sources and as attributes: types, missing and nested values, damaged files."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import zstandard

from dlfs.errors import DeviceError, FormatError, LimitError, TruncatedError, UsageError
from dlfs.ingest.attributes import AttributedSource, TableRule
from dlfs.ingest.importer import import_dataset, open_source
from dlfs.ingest.tables import json_lines
from dlfs.volume.volume import Volume
from tests.support.files import cut
from tests.unit.ingest.taking import import_all, import_by_command, refused, take

ROWS = [{"text": f"number {i} é", "label": i % 3, "score": i / 4} for i in range(50)]


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes lines: objects, or text as it is."""

    def write(*rows: Any, name: str = "x.jsonl") -> Path:
        texts = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path = tmp_path / name
        path.write_bytes("".join(text + "\n" for text in texts).encode())
        return path

    return write


@pytest.fixture(params=[4 << 20, 100])
def chunk_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole files at a time, and few lines at a time."""
    monkeypatch.setattr(json_lines, "_CHUNK_BYTES", request.param)


def fields(volume: Volume, path: Path, **options: str) -> tuple[Any, list[dict[str, Any]]]:
    """The types of the fields of a dataset, and the fields of all samples in the order of rows."""
    source = open_source(path, options=options)
    import_dataset(volume, source, "n", layout="path")
    source.close()
    with volume["n"] as dataset:
        return dataset.fields, [dataset.sample(i) for i in range(len(dataset))]


def column(path: Path, **options: str) -> list[Any]:
    """The values of the attribute ``x``, in the order of the rows."""
    return [found["x"] for _, found in take(open_source(path, options=options)).values()]


@pytest.mark.usefixtures("chunk_bytes")
@pytest.mark.parametrize("ending", ["jsonl", "ndjson", "jsonl.gz", "ndjson.zst", "JSONL"])
def test_one_text_is_the_sample_and_others_attributes(
    write: Callable[..., Path], volume: Volume, tmp_path: Path, ending: str
) -> None:
    path = write(*ROWS, name=f"x.{ending}")
    compress = {"gz": gzip.compress, "zst": zstandard.compress}.get(ending[-3:].lstrip("."))
    if compress is not None:
        path.write_bytes(compress(path.read_bytes()))
    source = open_source(path)
    assert source.sample_count == len(ROWS)
    assert take(source) == {
        f"x/{i:08d}": (row["text"].encode(), {"label": row["label"], "score": row["score"]})
        for i, row in enumerate(ROWS)
    }
    want = {f"x/{i:08d}": row["text"].encode() for i, row in enumerate(ROWS)}
    assert import_all(volume, path) == want
    assert import_by_command(tmp_path, f"{path} V") == want


def test_files_of_pandas(tmp_path: Path) -> None:
    frame = pandas.DataFrame(ROWS)
    frame.to_json(tmp_path / "x.jsonl", orient="records", lines=True)
    assert [data.decode() for data, _ in take(open_source(tmp_path / "x.jsonl")).values()] == [
        row["text"] for row in ROWS
    ]


@pytest.mark.isolated
def test_in_a_process_of_its_own(write: Callable[..., Path]) -> None:
    source = open_source(write(*ROWS))
    assert len(take(source)) == len(ROWS)
    with pytest.raises(FormatError, match="row 0: expected a JSON object in a line"):
        open_source(write("{'a': 1}"))


@pytest.mark.usefixtures("chunk_bytes")
def test_columns_are_chosen(write: Callable[..., Path]) -> None:
    rows = [{"id": f"d/{i}.txt", "text": "x" * i, "n": {"deep": i}, "more": [i]} for i in range(9)]
    options = {"column": "text", "path": "id", "attributes": "n.deep"}
    assert take(open_source(write(*rows), options=options)) == {
        f"d/{i}.txt": (b"x" * i, {"n.deep": i}) for i in range(9)
    }


@pytest.mark.usefixtures("chunk_bytes")
def test_several_texts_and_lists_are_fields(write: Callable[..., Path], volume: Volume) -> None:
    rows = [{"a": f"a{i}", "b": f"b{i}", "v": [i, 0.5][: i % 3], "n": i} for i in range(20)]
    types, got = fields(volume, write(*rows))
    assert types == {"a": "text", "b": "text", "v": "<f8[?]"}
    for row, sample in zip(rows, got, strict=True):
        assert (sample["a"], sample["b"]) == (row["a"], row["b"])
        assert sample["v"].tolist() == row["v"]


@pytest.mark.usefixtures("chunk_bytes")
def test_nested_values_are_fields(write: Callable[..., Path], volume: Volume) -> None:
    rows = [
        {
            "objects": {"bbox": [[i, 0.5, 2, 3]] * (i % 3), "id": i},
            "tags": ["x", None, "y"][: i % 4],
            "turns": [{"role": "user", "n": i}],
        }
        for i in range(12)
    ]
    wanted = "objects.bbox:f4[?,4],tags:text,turns:text"
    types, got = fields(volume, write(*rows), fields=wanted, attributes="objects.id")
    assert types == {"objects.bbox": "<f4[?,4]", "tags": "text", "turns": "text"}
    for row, sample in zip(rows, got, strict=True):
        assert np.array_equal(sample["objects.bbox"], np.reshape(row["objects"]["bbox"], (-1, 4)))
        assert json.loads(sample["tags"]) == row["tags"]
        assert json.loads(sample["turns"]) == row["turns"]


# ---- types ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("chunk_bytes")
@pytest.mark.parametrize(
    "values",
    [
        [1, 2**62 + 1, -(2**63), 2**63 - 1] * 9,
        [True, False] * 30,
        ["2024-01-01T00:00:00Z", "2024-01-01", "", "1", "\U0001f408", "a\nb"] * 9,
        [0.1, 1e300, -0.0, 1e-320] * 20,
    ],
    ids=["integers", "bools", "texts", "floats"],
)
def test_values_come_back_as_they_are(write: Callable[..., Path], values: list[Any]) -> None:
    """Also texts that Arrow's own reader of JSON takes for times."""
    got = column(write(*({"s": "x", "x": value} for value in values)), column="s")
    assert got == values
    assert [type(value) for value in got] == [type(value) for value in values]


@pytest.mark.usefixtures("chunk_bytes")
def test_whole_numbers_among_floats_are_floats(write: Callable[..., Path], tmp_path: Path) -> None:
    rows = [{"s": "x", "x": i if i < 30 else i + 0.5} for i in range(60)]
    got = column(write(*rows), column="s")
    assert got == [row["x"] for row in rows]
    assert {type(value) for value in got} == {float}
    paths = [write(*rows[:30], name="a.jsonl"), write(*rows[30:], name="b.jsonl")]
    found = take(open_source(paths, options={"column": "s"}))
    assert [values["x"] for _, values in found.values()] == [row["x"] for row in rows]
    wrong = write({"s": "x", "x": 2**60 + 1}, *rows)
    with pytest.raises(FormatError, match=r"row \d+: column x: expected (double|int64)"):
        take(open_source(wrong, options={"column": "s", "attributes": "x"}))


def test_nan_and_infinities_are_floats(write: Callable[..., Path]) -> None:
    path = write('{"s": "", "x": NaN}', '{"s": "", "x": -Infinity}', '{"s": "", "x": null}')
    assert [str(value) for value in column(path)] == ["nan", "-inf", "nan"]


@pytest.mark.usefixtures("chunk_bytes")
def test_missing_keys_and_nulls(write: Callable[..., Path]) -> None:
    path = write({"s": "a", "x": 1}, {"s": "b"}, {"s": "c", "x": None}, {"x": 4, "s": "d"})
    with pytest.raises(FormatError, match="row 1: column x: expected a value of int64, got null"):
        take(open_source(path))
    assert column(path, nulls="default") == [1, 0, 0, 4]
    source = open_source(path, options={"nulls": "skip"})
    assert [data for data, _ in take(source).values()] == [b"a", b"d"]
    assert source.skipped == {"row with a null": 2}
    assert column(write({"s": "a"}, {"s": "b", "x": 0.5}))[1] == 0.5


@pytest.mark.usefixtures("chunk_bytes")
@pytest.mark.parametrize(
    ("first", "second", "got"),
    [(1, "one", "'one'"), ("a", 5, "5"), (True, 1, "1"), ([1], {"a": 1}, "{'a': 1}"),
     ({"a": 1}, {"a": "x"}, "{'a': 'x'}"), ([1], ["x"], r"\['x'\]")],
)  # fmt: skip
def test_a_column_of_several_types_is_an_error_if_it_is_used(
    write: Callable[..., Path], first: Any, second: Any, got: str
) -> None:
    rows = [{"s": "x", "x": first, "y": i} for i in range(40)]
    path = write(*rows, {"s": "x", "x": second, "y": 40}, {"s": "x", "x": first, "y": 41})
    message = rf"row 40: column x: expected .* as in the rows before, got {got}; the options"
    with pytest.raises(FormatError, match=message):
        open_source(path, options={"fields": "s,x:text"})
    options = {"column": "s", "attributes": "y"}
    found = take(open_source(path, options=options))
    assert [values["y"] for _, values in found.values()] == list(range(42))


@pytest.mark.parametrize("value", [2**63, 10**30])
def test_integers_beyond_64_bits_are_refused(write: Callable[..., Path], value: int) -> None:
    with pytest.raises(FormatError, match="row 0: column x: expected integers of 64 bits"):
        open_source(write({"s": "a", "x": value}))


@pytest.mark.parametrize("depth", [64, 65, 900])
def test_values_are_nested_to_a_bound(write: Callable[..., Path], depth: int) -> None:
    path = write('{"s": "a", "x": ' + "[" * depth + "1" + "]" * depth + "}")
    if depth == 64:
        assert len(take(open_source(path))) == 1
        return
    with pytest.raises(FormatError, match=r"row 0: column x: expected .* objects 64 deep at"):
        open_source(path)


def test_half_a_surrogate_pair_is_refused(write: Callable[..., Path]) -> None:
    with pytest.raises(FormatError, match=r"row 1: column s: expected .* got '.ud800'"):
        open_source(write({"s": "a"}, '{"s": "\\ud800"}'))


# ---- lines ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("chunk_bytes")
def test_blank_lines_marks_and_ends_of_windows(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    lines = [b'\xef\xbb\xbf{"s": "a"}\r', b"", b"  \t\r", b'{"s": "b"}', b' {"s": "c"} ']
    path.write_bytes(b"\n".join(lines))  # and no newline at the end
    assert [data for data, _ in take(open_source(path)).values()] == [b"a", b"b", b"c"]
    assert open_source(path).sample_count == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "expected a JSON object in each line, got .1."),
        ("5", "expected a JSON object in each line, got 5"),
        ("{'a': 1}", "expected a JSON object in a line: "),
        ('{"a": 1} {"a": 2}', "Extra data"),
        ('{"a": 1, "b": 2, "a": 3}', "the key 'a' is there twice"),
        ('{"a": {"b": 1, "b": 1}}', "the key 'b' is there twice"),
        ("[" * 100_000, "expected a JSON object in a line"),
        ('{"a": ' + "1" * 5000 + "}", "expected a JSON object in a line"),
    ],
)
def test_other_lines_are_refused(write: Callable[..., Path], text: str, message: str) -> None:
    with pytest.raises(FormatError, match=rf"x\.jsonl: row 1: .*{message}"):
        open_source(write({"a": 1}, text, {"a": 1}))


def test_text_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(b'{"a": "\xff"}\n')
    with pytest.raises(FormatError, match=r"row 0: .*'utf-8' codec can't decode byte 0xff"):
        open_source(tmp_path / "x.jsonl")
    (tmp_path / "y.jsonl").write_text('{"a": 1}\n', encoding="utf-16")
    with pytest.raises(FormatError, match="row 0: "):
        open_source(tmp_path / "y.jsonl")


@pytest.mark.usefixtures("chunk_bytes")
@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "jsonl.zst"])
def test_cut_files(write: Callable[..., Path], volume: Volume, ending: str) -> None:
    path = write(*ROWS, name=f"x.{ending}")
    data = path.read_bytes()
    compress = {"jsonl.gz": gzip.compress, "jsonl.zst": zstandard.compress}.get(ending, bytes)
    path.write_bytes(compress(data))
    cut(path, -8)
    with refused(volume, TruncatedError, rf"x\.{ending}"):
        import_all(volume, path)


@pytest.mark.parametrize("ending", ["gz", "zst"])
def test_damaged_compression(write: Callable[..., Path], ending: str) -> None:
    with pytest.raises(FormatError, match="stream is damaged"):
        open_source(write(*ROWS, name=f"x.jsonl.{ending}"))


@pytest.mark.usefixtures("chunk_bytes")
def test_long_lines(write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    long = "x" * 1000
    path = write({"s": long}, {"s": "y"})
    assert [data for data, _ in take(open_source(path)).values()] == [long.encode(), b"y"]
    monkeypatch.setattr(json_lines, "_CHUNK_BYTES", 100)
    monkeypatch.setattr(json_lines, "LINE_BYTES_MAX", 500)
    with pytest.raises(LimitError, match=r"x\.jsonl: expected lines of at most 500 bytes"):
        open_source(path)


@pytest.mark.usefixtures("chunk_bytes")
def test_rows_with_keys_of_their_own(
    write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most values are nulls, of which few are made at a time."""
    monkeypatch.setattr(json_lines, "_BATCH_VALUES_MAX", 100)
    path = write(*({"s": f"{i}", f"k{i}": i} for i in range(60)))
    got = take(open_source(path, options={"column": "s", "nulls": "default"}))
    assert [data for data, _ in got.values()] == [b"%d" % i for i in range(60)]
    assert got["x/00000007"][1] == {f"k{i}": 7 if i == 7 else 0 for i in range(60)}
    monkeypatch.setattr(json_lines, "COLUMNS_MAX", 60)
    with pytest.raises(LimitError, match="expected at most 60 keys in all rows, got 61"):
        open_source(path)


def test_a_file_that_changes_is_an_error(write: Callable[..., Path]) -> None:
    source = open_source(write(*ROWS))
    write(*ROWS, {"text": "more", "label": 5, "score": 0.5})
    with pytest.raises(DeviceError, match="the file changed during the import"):
        take(source)


def test_empty_files_and_missing_columns(write: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        open_source(write())
    with pytest.raises(UsageError, match="expected column z, got s"):
        open_source(write({"s": "a"}), options={"column": "z"})
    (tmp_path / "none").mkdir()
    with pytest.raises(UsageError, match="expected a file of JSON Lines in the folder, got none"):
        open_source(tmp_path / "none", format_name="jsonl")


# ---- as attributes -------------------------------------------------------------------------------


def test_attributes_of_files(tmp_path: Path, write: Callable[..., Path]) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    for name in "ab":
        (folder / f"{name}.png").write_bytes(name.encode())
    table = write(
        *({"file_name": f"{name}.png", "text": f"a {name}", "n": i} for i, name in enumerate("abc"))
    )
    source = AttributedSource(open_source(folder), [TableRule(str(table))])
    got = take(source)
    assert got == {
        "a.png": (b"a", {"text": "a a", "n": 0}),
        "b.png": (b"b", {"text": "a b", "n": 1}),
    }
    assert source.skipped == {"row of attributes without a sample": 1}
    mixed = write({"file_name": "a.png", "x": 1}, {"file_name": "b.png", "x": "y"})
    with pytest.raises(FormatError, match="row 1: column x: expected int64"):
        TableRule(str(mixed))
