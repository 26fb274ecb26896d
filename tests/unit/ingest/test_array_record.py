"""ArrayRecord files as their own package writes them, and damaged."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter
from tfrecord import example_pb2

from dlfs.base.extras import install_command
from dlfs.errors import DeviceError, FormatError, NotFoundError, UsageError
from dlfs.ingest.formats.array_record import ArrayRecordOptions, ArrayRecordSource
from dlfs.ingest.importer import open_source
from dlfs.volume.volume import Volume
from tests.support.files import cut, flip_bit
from tests.unit.ingest.taking import import_all, import_by_command, refused, take

RECORDS = [os.urandom(i * 97 % 4000) for i in range(120)]


def write(path: Path, records: Sequence[bytes] = RECORDS, options: str = "group_size:1") -> Path:
    writer = ArrayRecordWriter(str(path), options)
    for record in records:
        writer.write(record)
    writer.close()
    return path


def example(**features: Any) -> bytes:
    """A tf.train.Example of bytes, integers and floats."""
    made = example_pb2.Example()
    for name, value in features.items():
        feature = made.features.feature[name]
        if isinstance(value, bytes):
            feature.bytes_list.value.append(value)
        elif isinstance(value[0], int):
            feature.int64_list.value.extend(value)
        else:
            feature.float_list.value.extend(value)
    data: bytes = made.SerializeToString()
    return data


@pytest.mark.parametrize(
    "options",
    ["group_size:1", "group_size:7,zstd:9", "group_size:1000,uncompressed", "group_size:3,brotli:2",
     "group_size:5,snappy"],
)  # fmt: skip
def test_records_are_samples(volume: Volume, tmp_path: Path, options: str) -> None:
    path = write(tmp_path / "x.array_record", options=options)
    source = open_source(path)
    assert source.sample_count == len(RECORDS)
    want = {f"x/{i:08d}": record for i, record in enumerate(RECORDS)}
    got = take(source)
    assert list(got) == list(want)
    assert {name: data for name, (data, _) in got.items()} == want
    assert import_all(volume, path) == want


@pytest.mark.isolated
def test_in_a_process_of_its_own(tmp_path: Path) -> None:
    path = write(tmp_path / "x.arrayrecord")
    got = import_by_command(tmp_path, f"{path} V")
    assert got == {f"x/{i:08d}": record for i, record in enumerate(RECORDS)}
    cut(path, 1 << 16)
    with pytest.raises(FormatError, match=r"x\.arrayrecord: the file is damaged"):
        open_source(path)


def test_files_of_a_folder_and_of_a_pattern(tmp_path: Path) -> None:
    names = [f"x-train.array_record-0000{i}-of-00002" for i in range(2)]
    for i, name in enumerate(names):
        write(tmp_path / name, RECORDS[i : i + 2])
    want = [f"{name}/0000000{i}" for name in names for i in range(2)]
    assert list(take(open_source(tmp_path, format_name="arrayrecord"))) == want
    assert list(take(open_source(tmp_path / "x-train.array_record-*"))) == want
    shuffled = list(take(open_source([tmp_path / name for name in names]), layout="shuffled"))
    assert sorted(shuffled) == want


def test_examples_give_samples_fields_and_attributes(volume: Volume, tmp_path: Path) -> None:
    """As TFDS writes them."""
    path = write(
        tmp_path / "x.array_record",
        [example(image=b"%d" % i, label=[i], box=[0.5, i + 0.25]) for i in range(5)],
    )
    options = {"column": "image", "attributes": "label"}
    assert take(open_source(path, options=options)) == {
        f"x/{i:08d}": (b"%d" % i, {"label": i}) for i in range(5)
    }
    import_all(volume, path, options={"fields": "image,box:f4[2],label:i8[]"})
    with volume["n"] as dataset:
        assert dataset.fields == {"image": "bytes", "box": "<f4[2]", "label": "<i8[]"}
        samples = [dataset.sample(i) for i in range(5)]
        assert {(bytes(sample["image"]), int(sample["label"])) for sample in samples} == {
            (b"%d" % i, i) for i in range(5)
        }
    lacking = write(tmp_path / "y.array_record", [example(image=b"1"), example(label=[1])])
    with pytest.raises(FormatError, match=r"y\.array_record: record 1: expected feature image"):
        take(open_source(lacking, options={"column": "image"}))
    source = open_source(lacking, options={"column": "image", "nulls": "skip"})
    assert source.sample_count is None
    assert len(take(source)) == 1
    with pytest.raises(UsageError, match="expected a column or fields, got both"):
        ArrayRecordOptions(column="a", fields=("b",))


def test_an_empty_file_has_no_records(tmp_path: Path) -> None:
    assert take(open_source(write(tmp_path / "x.array_record", []))) == {}


def test_a_flipped_bit_is_an_error(tmp_path: Path) -> None:
    """In whatever place: the headers, the records, the index, the end; or it changes nothing."""
    path = write(tmp_path / "x.array_record", [b"record %d" % i * 9 for i in range(50)])
    whole = path.read_bytes()
    want = take(open_source(path))
    used = [at for at in range(len(whole)) if whole[at]]
    noticed = 0
    for number, at in enumerate(used[:: max(1, len(used) // 200)]):
        path.write_bytes(whole)
        flip_bit(path, at, number % 8)
        try:
            assert take(open_source(path)) == want
        except FormatError as error:
            assert "x.array_record" in str(error)  # noqa: PT017 - not every flip is one
            noticed += 1
    assert noticed > 100


@pytest.mark.parametrize("size", [0, 1, 40, 1 << 16, -1, -(1 << 16)])
def test_a_cut_file_is_an_error(volume: Volume, tmp_path: Path, size: int) -> None:
    path = write(tmp_path / "x.array_record", RECORDS * 3)
    cut(path, size)
    with refused(volume, FormatError, r"x\.array_record: the file is damaged"):
        import_all(volume, path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="there is no such file"):
        ArrayRecordSource([str(tmp_path / "x.array_record")], ArrayRecordOptions())
    (tmp_path / "x.array_record").write_bytes(os.urandom(1 << 17))
    with pytest.raises(FormatError, match="the file is damaged"):
        open_source(tmp_path / "x.array_record")
    (tmp_path / "none").mkdir()
    with pytest.raises(UsageError, match="expected an ArrayRecord file in the folder, got none"):
        open_source(tmp_path / "none", format_name="arrayrecord")


def test_a_file_that_changes_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "x.array_record")
    source = open_source(path)
    os.utime(path, ns=(5, 5))
    with pytest.raises(DeviceError, match="the file changed during the import"):
        take(source)


def test_files_are_closed_when_an_import_ends_early(tmp_path: Path) -> None:
    path = write(tmp_path / "x.array_record", RECORDS * 20)
    source = open_source(path)
    source.buffer_bytes = 100
    blocks = source.blocks(layout="path", seed=0)
    next(blocks)
    blocks.close()
    assert path not in {Path(os.path.realpath(one)) for one in Path("/proc/self/fd").iterdir()}


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "x.array_record")
    monkeypatch.setitem(sys.modules, "array_record.python.array_record_module", None)
    with pytest.raises(UsageError, match="expected array_record to be installed") as caught:
        open_source(path)
    assert install_command("arrayrecord") in str(caught.value)


def test_the_package_reads_what_it_wrote(tmp_path: Path) -> None:
    """The records of these tests are those of the package's own reader."""
    reader = ArrayRecordReader(str(write(tmp_path / "x.array_record")))
    assert reader.read_all() == RECORDS
    reader.close()
