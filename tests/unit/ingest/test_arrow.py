"""Parquet, Arrow, saved Hugging Face datasets: as their own libraries write them, and damaged."""

from __future__ import annotations

import datetime
import decimal
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest

from dlfs.base.extras import install_command
from dlfs.errors import DlfsError, FormatError, NotFoundError, TruncatedError, UsageError
from dlfs.ingest.formats.arrow import ArrowOptions
from dlfs.ingest.importer import import_dataset, open_source
from dlfs.ingest.registry import recognise
from dlfs.ingest.tables import files as tables
from dlfs.volume.volume import Volume
from tests.support.files import cut, flip_bit
from tests.unit.ingest.taking import import_all, import_by_command, refused, take

COUNT = 300
IMAGES = [bytes([i % 251]) * (i * 13 % 997) for i in range(COUNT)]


def table(**more: Any) -> pa.Table:
    """Rows of each type that can be an attribute, and one that cannot."""
    rows = range(COUNT)
    columns: dict[str, Any] = {
        "image": pa.array(IMAGES, pa.binary()),
        "label": pa.array([i % 10 for i in rows], pa.int32()),
        "weight": pa.array([None if i == 7 else i / 8 for i in rows], pa.float32()),
        "good": pa.array([i % 3 == 0 for i in rows]),
        "text": pa.array([f"text {i}" for i in rows]),
        "kind": pa.array([f"kind {i % 2}" for i in rows]).dictionary_encode(),
        "day": pa.array([datetime.date(2024, 1, 1 + i % 28) for i in rows]),
        "price": pa.array([decimal.Decimal(i) / 4 for i in rows], pa.decimal128(9, 2)),
        "boxes": pa.array([[1.0] * (i % 3) for i in rows]),
        **more,
    }
    return pa.table(columns)


def attributes(i: int) -> dict[str, Any]:
    return {
        "label": i % 10,
        "weight": i / 8,
        "good": i % 3 == 0,
        "text": f"text {i}",
        "kind": f"kind {i % 2}",
        "day": f"2024-01-{1 + i % 28:02d}",
        "price": f"{i / 4:.2f}",
    }


def write_file(data: pa.Table, path: Path, **options: Any) -> None:
    with (
        pa.OSFile(str(path), "wb") as file,
        pa.ipc.new_file(file, data.schema, **options) as writer,
    ):
        writer.write_table(data, max_chunksize=70)


def write_stream(data: pa.Table, path: Path) -> None:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, data.schema) as writer:
        writer.write_table(data, max_chunksize=70)


def write_parquet(data: pa.Table, path: Path, **options: Any) -> None:
    pa.parquet.write_table(data, path, row_group_size=110, write_page_checksum=True, **options)


WRITERS = {
    "x.parquet": write_parquet,
    "x.arrow": write_file,
    "x.arrows": write_stream,
    "x.feather": pa.feather.write_feather,
}


@pytest.mark.parametrize("name", WRITERS)
def test_rows_are_samples_and_columns_attributes(volume: Volume, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    WRITERS[name](table(), path)
    source = open_source(path)
    assert not source.gives_shuffled
    assert source.sample_count == (COUNT if name == "x.parquet" else None)
    assert source.skipped == {"column that is not used: boxes": 1}
    got = take(source)
    assert [data for data, _ in got.values()] == IMAGES
    assert list(got) == [f"x/{i:08d}" for i in range(COUNT)]
    for i, (_, values) in enumerate(got.values()):
        weight = values["weight"]
        assert np.isnan(weight) if i == 7 else weight == i / 8
        assert values | {"weight": i / 8} == attributes(i)
    want = {f"x/{i:08d}": data for i, data in enumerate(IMAGES)}
    assert import_all(volume, path) == want
    assert import_by_command(tmp_path, f"{path} V") == want


@pytest.mark.parametrize(
    "kind",
    ["binary", "large_binary", "binary_view", "string", "large_string", "string_view", "fixed"],
)
def test_every_kind_of_bytes_is_a_sample(tmp_path: Path, kind: str) -> None:
    texts = [f"{i:05d}" * (1 if kind == "fixed" else i % 4) for i in range(100)]
    values = texts if "string" in kind else [text.encode() for text in texts]
    array = pa.array(values, pa.binary(5) if kind == "fixed" else getattr(pa, kind)())
    write_file(pa.table({"only": array[10:90]}), tmp_path / "x.arrow")
    got = [data.decode() for data, _ in take(open_source(tmp_path / "x.arrow")).values()]
    assert got == texts[10:90]


def test_paths_and_attributes_are_chosen(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    write_parquet(table(name=pa.array([f"d{i % 3}/{i}" for i in range(COUNT)])), path)
    options = {"column": "image", "path": "name", "attributes": "good,label"}
    got = take(open_source(path, options=options))
    assert got["d1/7"] == (IMAGES[7], {"good": False, "label": 7})
    assert len(got) == COUNT


def test_a_child_of_a_struct_is_a_sample(tmp_path: Path) -> None:
    structs = [{"bytes": data, "path": f"p/{i}.jpg"} for i, data in enumerate(IMAGES)]
    for write, name in ((write_file, "x.arrow"), (write_parquet, "x.parquet")):
        write(pa.table({"image": structs, "label": range(COUNT)}), tmp_path / name)
        source = open_source(tmp_path / name, options={"path": "image.path"})
        assert take(source) == {f"p/{i}.jpg": (data, {"label": i}) for i, data in enumerate(IMAGES)}


def test_shards_come_by_pattern_and_by_folder(tmp_path: Path) -> None:
    for part in range(3):
        write_parquet(table().slice(part * 100, 100), tmp_path / f"part-{part}.parquet")
    (tmp_path / "README.md").touch()
    by_pattern = take(open_source(f"{tmp_path}/part-*.parquet"))
    by_folder = take(open_source(tmp_path, format_name="parquet"))
    assert [data for data, _ in by_pattern.values()] == IMAGES
    assert list(by_folder) == list(by_pattern)
    shuffled = list(take(open_source(tmp_path, format_name="parquet"), layout="shuffled", seed=1))
    assert shuffled != list(by_pattern)
    assert sorted(shuffled) == sorted(by_pattern)


def test_files_are_recognised_by_what_is_in_them(tmp_path: Path) -> None:
    for name, write in (("x.parquet", write_parquet), ("x.arrow", write_file)):
        write(table(), tmp_path / name)
        (tmp_path / name).rename(tmp_path / "no suffix")
        assert recognise([str(tmp_path / "no suffix")]).name == Path(name).suffix[1:]
        assert len(take(open_source(tmp_path / "no suffix"))) == len(IMAGES)


def test_large_row_groups_are_read_by_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.parquet"
    pa.parquet.write_table(table(), path)
    monkeypatch.setattr(tables, "BUFFER_BYTES", 10_000)
    blocks = list(open_source(path).blocks(layout="path", seed=0))
    assert len(blocks) > 10
    assert sum(len(block.paths) for block in blocks) == COUNT


def test_an_empty_table_gives_nothing(tmp_path: Path) -> None:
    for name, write in WRITERS.items():
        write(table().slice(0, 0), tmp_path / name)
        assert take(open_source(tmp_path / name)) == {}


# ---- saved datasets ------------------------------------------------------------------------------


def saved(folder: Path) -> Path:
    """Two splits of images with labels, one of them in shards, as ``datasets`` saves them."""
    hugging = pytest.importorskip("datasets")
    hugging.disable_progress_bars()
    features = hugging.Features(
        {"image": hugging.Image(), "label": hugging.ClassLabel(names=["cat", "dog"])}
    )
    rows = [{"image": {"bytes": d, "path": None}, "label": i % 2} for i, d in enumerate(IMAGES)]
    splits = {"train": rows[:200], "test": rows[200:]}
    made = hugging.DatasetDict(
        {name: hugging.Dataset.from_list(part, features) for name, part in splits.items()}
    )
    made.save_to_disk(str(folder), num_shards={"train": 2, "test": 1})
    return folder


def test_a_saved_dataset_comes_with_its_splits(volume: Volume, tmp_path: Path) -> None:
    folder = saved(tmp_path / "saved")
    got = take(open_source(folder))
    assert [data for data, _ in got.values()] == IMAGES
    assert got["train/data-00001-of-00002/00000003"][1] == {"split": "train", "label": 1}
    assert got["test/data-00000-of-00001/00000000"][1] == {"split": "test", "label": 0}
    want = {path: data for path, (data, _) in got.items()}
    assert import_all(volume, folder) == want
    assert import_by_command(tmp_path, f"{folder} V --format huggingface") == want


def test_one_split_comes_alone(tmp_path: Path) -> None:
    folder = saved(tmp_path / "saved") / "train"
    got = take(open_source(folder))
    assert [data for data, _ in got.values()] == IMAGES[:200]
    assert got["data-00000-of-00002/00000001"][1] == {"label": 1}


def test_attributes_of_a_saved_dataset_are_chosen(tmp_path: Path) -> None:
    folder = saved(tmp_path / "saved")
    for wanted in (("split",), ("label",)):
        got = take(open_source(folder, options={"attributes": wanted}))
        assert {tuple(values) for _, values in got.values()} == {wanted}


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        ("{", FormatError, "state.json: expected JSON"),
        ("[]", FormatError, "state.json: expected a JSON object"),
        ("{}", FormatError, "expected names in _data_files, got None"),
        ('{"_data_files": [{"filename": "../x.arrow"}]}', FormatError, "got '../x"),
        ('{"_data_files": [{"filename": "gone.arrow"}]}', NotFoundError, "gone.arrow: there is no"),
        ('{"_data_files": []}', UsageError, "expected a file, got none"),
        ('{"_data_files": [], "_indices_data_files": [1]}', UsageError, "without indices"),
    ],
)
def test_a_state_that_makes_no_sense_is_reported(
    volume: Volume, tmp_path: Path, state: str, error: type[DlfsError], message: str
) -> None:
    (tmp_path / "dataset_info.json").touch()
    (tmp_path / "state.json").write_text(state)
    with refused(volume, error, message):
        import_all(volume, tmp_path)


def test_one_saved_dataset_at_a_time(tmp_path: Path) -> None:
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["gone"]}))
    with pytest.raises(NotFoundError, match=r"gone/state.json: there is no such file"):
        open_source(tmp_path)
    (tmp_path / "none").mkdir()
    with pytest.raises(UsageError, match=r"none: expected the folder of a dataset, saved"):
        open_source(tmp_path / "none", format_name="huggingface")
    with pytest.raises(UsageError, match="expected one saved or cached dataset, got 2"):
        open_source([tmp_path, tmp_path])


# ---- cached datasets -----------------------------------------------------------------------------


@pytest.fixture
def cached(tmp_path: Path) -> Path:
    """A folder of the cache: a split in two files, one in one file, and a result of ``map``."""
    hugging_face = pytest.importorskip("datasets")
    hugging_face.disable_progress_bars()
    files = {"train": tmp_path / "train.jsonl", "test": tmp_path / "test.jsonl"}
    for split, numbers in (("train", range(40)), ("test", range(40, 60))):
        lines = [json.dumps({"text": f"number {i}", "n": i}) for i in numbers]
        files[split].write_text("\n".join(lines))
    builder = hugging_face.load_dataset_builder(
        "json",
        cache_dir=str(tmp_path / "cache"),
        data_files={split: str(path) for split, path in files.items()},
        chunksize=200,
    )
    builder.download_and_prepare(max_shard_size=400)
    builder.as_dataset("train").map(lambda row: {"n": row["n"] + 1})
    return Path(builder.cache_dir)


def test_a_cached_dataset_comes_with_its_splits(
    volume: Volume, tmp_path: Path, cached: Path
) -> None:
    files = sorted(path.stem for path in cached.glob("json-*.arrow"))
    assert files[0] == "json-test"
    assert len(files) > 2
    source = open_source(cached)
    assert source.sample_count == 60
    got = take(source)
    assert {path.rpartition("/")[0] for path in got} == {
        f"{'test' if file == 'json-test' else 'train'}/{file}" for file in files
    }
    assert sorted((data, values["n"], values["split"]) for data, values in got.values()) == sorted(
        (f"number {i}".encode(), i, "train" if i < 40 else "test") for i in range(60)
    )
    (reason,) = source.skipped
    assert re.fullmatch(r"file of map or filter that is not used: cache-\w+\.arrow", reason)
    want = {path: data for path, (data, _) in got.items()}
    assert import_all(volume, cached) == want
    assert import_by_command(tmp_path, f"{cached} V") == want


def test_a_cached_dataset_that_is_not_whole_is_refused(volume: Volume, cached: Path) -> None:
    info = cached / "dataset_info.json"
    whole = json.loads(info.read_text())

    def write(change: Any) -> None:
        listed = json.loads(json.dumps(whole))
        change(listed)
        info.write_text(json.dumps(listed))

    for change, message in [
        (lambda info: info.pop("splits"), "expected splits with numbers of rows, got None"),
        (lambda info: info.update(splits={"a": 5}), r"split 'a': expected numbers of rows"),
        (lambda info: info["splits"]["test"].update(num_examples="x"), "expected numbers of rows"),
        (lambda info: info["splits"]["test"].update(shard_lengths="x"), "expected numbers of rows"),
        (lambda info: info["splits"]["test"].update(dataset_name="../x"), "name of a file, got"),
        (lambda info: info["splits"].update({"../x": {"num_examples": 1}}), "name, got '../x'"),
        (lambda info: info["splits"]["test"].update(num_examples=21), "expected 21 rows as its"),
    ]:
        write(change)
        with refused(volume, FormatError, message):
            import_all(volume, cached)
    write(lambda info: None)
    (cached / "json-test.arrow").unlink()
    with refused(volume, NotFoundError, r"json-test\.arrow: there is no such file"):
        import_all(volume, cached)


# ---- damage --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WRITERS)
def test_a_cut_file_is_reported(volume: Volume, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    WRITERS[name](table(), path)
    whole = path.read_bytes()
    for size in (len(whole) - 1, len(whole) // 2, 20):
        path.write_bytes(whole[:size])
        with refused(volume, TruncatedError, f"{path}: .*(without|ends)"):
            import_all(volume, path)


def test_a_stream_cut_between_batches_is_reported(volume: Volume, tmp_path: Path) -> None:
    path = tmp_path / "x.arrows"
    write_stream(table(), path)
    cut(path, -8)
    with refused(volume, TruncatedError, "ends without its end-of-stream mark"):
        import_all(volume, path)


def test_a_flipped_bit_in_a_parquet_page_is_reported(volume: Volume, tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    write_parquet(table().select(["image"]), path, compression="none", use_dictionary=False)
    group = pa.parquet.ParquetFile(path).metadata.row_group(1).column(0)
    flip_bit(path, group.data_page_offset + group.total_compressed_size - 5)
    with refused(volume, FormatError, f"{path}: row 110: the file is damaged: .*CRC"):
        import_all(volume, path)


@pytest.mark.parametrize("name", ["x.arrow", "x.arrows"])
def test_a_flipped_offset_in_a_batch_is_reported(volume: Volume, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    WRITERS[name](table().select(["image"]), path)
    offsets = np.cumsum([0, *map(len, IMAGES[70:140])]).astype(np.int32)
    at = path.read_bytes().index(offsets.tobytes())
    flip_bit(path, at + 4 * 35 + 3)
    with refused(volume, FormatError, f"{path}: row 70: the file is damaged"):
        import_all(volume, path)


@pytest.mark.parametrize("name", WRITERS)
def test_no_flipped_bit_ends_otherwise_than_in_a_typed_error(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    WRITERS[name](table().slice(0, 20), path)
    whole = path.read_bytes()
    messages = []
    for offset in range(0, len(whole), max(1, len(whole) // 150)):
        flip_bit(path, offset)
        try:
            take(open_source(path, format_name="parquet" if name == "x.parquet" else "arrow"))
        except DlfsError as error:
            messages.append(str(error))
        path.write_bytes(whole)
    assert len(messages) > 10
    assert all(str(path) in message for message in messages)


def test_nulls_name_file_and_row(volume: Volume, tmp_path: Path) -> None:
    path = tmp_path / "x.arrow"
    holes: list[Any] = [None if i == 123 else i for i in range(COUNT)]
    write_file(table(holes=pa.array(holes)), path)
    with refused(volume, FormatError, "row 123: column holes: expected a value of int64, got null"):
        import_all(volume, path)
    assert len(take(open_source(path, options={"attributes": "label"}))) == COUNT
    write_file(pa.table({"image": [b"", None]}), path)
    with refused(volume, FormatError, "row 1: column image: expected a value of binary"):
        import_all(volume, path)


def test_paths_may_not_lead_out(volume: Volume, tmp_path: Path) -> None:
    path = tmp_path / "x.arrow"
    for text in ("../x", "/x", ""):
        write_file(pa.table({"image": [b"1", b"2"], "path": ["good", text]}), path)
        with refused(volume, FormatError, f"{path}: row 1: expected"):
            import_all(volume, path, options={"path": "path"})


def test_files_of_other_columns_are_reported(volume: Volume, tmp_path: Path) -> None:
    write_file(pa.table({"image": [b"1"], "label": [1]}), tmp_path / "a.arrow")
    for other, message in (
        ({"image": [b"1"]}, "b.arrow: expected column label of int64 as in .*a.arrow, got none"),
        (
            {"image": [b"1"], "label": ["one"]},
            "b.arrow: column label: expected int64 as in .*a.arrow, got string",
        ),
    ):
        write_file(pa.table(other), tmp_path / "b.arrow")
        with refused(volume, FormatError, message):
            import_all(volume, tmp_path, format_name="arrow")


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"column": "pixels"}, "expected column pixels, got image, label"),
        ({"column": "label"}, "expected bytes or text in column label, got int32"),
        ({"column": "image.bytes"}, "expected column image.bytes"),
        ({"attributes": "boxes"}, "expected numbers, bools or text in column boxes, got list"),
        ({"path": "boxes"}, "expected text in column boxes"),
    ],
)
def test_columns_that_do_not_fit_are_reported(
    tmp_path: Path, options: dict[str, str], message: str
) -> None:
    write_file(table(), tmp_path / "x.arrow")
    with pytest.raises(UsageError, match=message):
        open_source(tmp_path / "x.arrow", options=options)


def test_several_possible_samples_are_the_fields_of_one(volume: Volume, tmp_path: Path) -> None:
    for columns, fields, attributes in (
        ({"a": [b""], "b": [b""], "c": [""]}, {"a": "bytes", "b": "bytes"}, {"c"}),
        ({"a": [""], "b": [""], "n": [1]}, {"a": "text", "b": "text"}, {"n"}),
        ({"ids": [[1, 2]], "n": [1]}, {"ids": "<i8[?]"}, {"n"}),
        ({"a": [b""], "b": [""], "ids": [[1]]}, {}, {"b"}),
    ):
        write_file(pa.table(columns), tmp_path / "x.arrow")
        source = open_source(tmp_path / "x.arrow")
        assert source.skipped == ({} if fields else {"column that is not used: ids": 1})
        import_dataset(volume, source, "n")
        with volume["n"] as dataset:
            assert dataset.fields == fields
            assert {name for name in columns if name in dataset.attributes} == attributes
    write_file(pa.table({"a": [""], "b": [""], "c": ["p"]}), tmp_path / "x.arrow")
    for options in ({"path": "c"}, {"attributes": "c"}):
        source = open_source(tmp_path / "x.arrow", options=options)
        import_dataset(volume, source, "n")
        with volume["n"] as dataset:
            assert dataset.fields == {"a": "text", "b": "text"}
    with pytest.raises(UsageError, match="expected option column to name one of a, b, c"):
        open_source(tmp_path / "x.arrow", options={"attributes": "b,c"})


def test_a_table_of_numbers_is_imported_as_fields(tmp_path: Path, volume: Volume) -> None:
    path = tmp_path / "x.arrow"
    write_file(pa.table({}), path)
    with pytest.raises(UsageError, match=r"expected option column to name one of no columns$"):
        open_source(path)
    write_file(pa.table({"a": [1, 2], "b": [0.5, 1]}), path)
    hint = r"as the samples, got the columns a, b; option fields=\* makes all columns the fields"
    with pytest.raises(UsageError, match=hint):
        open_source(path)
    import_dataset(volume, open_source(path, options={"fields": "*"}), "n")
    with volume["n"] as dataset:
        assert [dataset.sample(at)["b"].tolist() for at in range(2)] == [0.5, 1]


def test_feather_of_version_1_is_reported(tmp_path: Path) -> None:
    (tmp_path / "x.feather").write_bytes(b"FEA1....FEA1")
    with pytest.raises(FormatError, match="expected Feather of version 2, got version 1"):
        open_source(tmp_path / "x.feather")


def test_without_pyarrow_the_error_says_what_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_file(table(), tmp_path / "x.arrow")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(UsageError, match=re.escape(install_command("arrow"))):
        open_source(tmp_path / "x.arrow")


def test_a_file_that_is_gone_is_reported(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no such file"):
        ArrowOptions().open([str(tmp_path / "gone.arrow")])
