"""TFRecord files: written by another library, damaged, indexed, compressed, and of Examples."""

from __future__ import annotations

import gzip
import os
import struct
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tfrecord import tfrecord_loader

from dlfs.errors import (
    ChecksumError,
    DeviceError,
    DlfsError,
    FormatError,
    LimitError,
    NotFoundError,
    TruncatedError,
    UsageError,
)
from dlfs.ingest.formats.tfrecord import source as tfrecord
from dlfs.ingest.formats.tfrecord.example import ExampleError, ExampleReader, scalar
from dlfs.ingest.formats.tfrecord.source import (
    TfRecordOptions,
    TfRecordSource,
    masked_crc32c,
)
from dlfs.ingest.importer import import_dataset, open_source
from dlfs.volume.volume import Volume
from tests.support.files import cut, flip_bit
from tests.support.shards import write_examples
from tests.unit.ingest.taking import (
    contents,
    import_all,
    import_by_command,
    refused,
    take,
)

IMAGES = [bytes([i]) * (i * 37) for i in range(60)]

GOLDEN = bytes.fromhex(
    "0500000000000000" "eab2043e" "6461746131" "9e4ef0e8"  # data1
    "0500000000000000" "eab2043e" "6461746132" "3f300844"  # data2
)  # fmt: skip


def frame(data: bytes) -> bytes:
    """A record as the format has it."""
    length = struct.pack("<Q", len(data))
    return (
        length
        + struct.pack("<I", masked_crc32c(length))
        + data
        + struct.pack("<I", masked_crc32c(data))
    )


def write_images(path: Path, first: int = 0, count: int = 60) -> Path:
    """Examples, by the package ``tfrecord``."""
    features = [
        {
            "image/encoded": (IMAGES[i], "byte"),
            "image/name": (f"n{i % 3}/{i}.jpg".encode(), "byte"),
            "label": (i - 30, "int"),
            "weight": (i / 4, "float"),
            "boxes": ([1.0, 2.0], "float"),
        }
        for i in range(first, first + count)
    ]
    return write_examples(path, features)


def examples(prefix: str = "x") -> dict[str, Any]:
    return {
        f"{prefix}/{i:08d}": (
            IMAGES[i],
            {"label": i - 30, "weight": i / 4, "image/name": f"n{i % 3}/{i}.jpg"},
        )
        for i in range(60)
    }


EXAMPLES = ExampleReader("test")

EXAMPLE = {"column": "image/encoded", "attributes": ("label", "weight", "image/name")}


def test_the_checksums_are_those_of_the_specification() -> None:
    assert b"".join(map(frame, (b"data1", b"data2"))) == GOLDEN


def test_records_are_samples(volume: Volume, tmp_path: Path) -> None:
    path = tmp_path / "x.tfrecord"
    path.write_bytes(b"".join(map(frame, IMAGES)))
    source = open_source(path)
    assert source.gives_shuffled
    assert (source.sample_count, source.sample_bytes) == (60, sum(map(len, IMAGES)))
    want = {f"x/{i:08d}": data for i, data in enumerate(IMAGES)}
    report = import_dataset(volume, source, "n")
    assert (report.sample_count, contents(volume, "n")) == (60, want)
    assert import_by_command(tmp_path, f"{path} V") == want


def test_shuffled_is_a_shuffle_of_all_records(tmp_path: Path) -> None:
    path = tmp_path / "x.tfrecord"
    path.write_bytes(b"".join(map(frame, IMAGES)))
    options = TfRecordOptions()
    orders = []
    for layout, seed in (("path", 0), ("shuffled", 1), ("shuffled", 2)):
        source = TfRecordSource([str(path)], options)
        source.buffer_bytes = 3000
        orders.append(list(take(source, layout=layout, seed=seed)))
    assert orders[0] == sorted(orders[0])
    assert len({tuple(order) for order in orders}) == 3
    assert sorted(orders[1]) == orders[0]


@pytest.mark.parametrize("suffix", [".tfrecord", ".tfrecord.gz", ".tfrecord.zlib"])
def test_features_are_samples_and_attributes(volume: Volume, tmp_path: Path, suffix: str) -> None:
    plain = write_images(tmp_path / "x.tfrecord")
    path = tmp_path / f"x{suffix}"
    if path != plain:
        pack = gzip.compress if suffix.endswith("gz") else zlib.compress
        path.write_bytes(pack(plain.read_bytes()))
    got = take(open_source(path, options=EXAMPLE))
    assert got == examples()
    assert import_all(volume, path, options=EXAMPLE) == {
        name: data for name, (data, _) in examples().items()
    }


def test_the_command_takes_features(tmp_path: Path) -> None:
    path = write_images(tmp_path / "x.tfrecord")
    got = import_by_command(
        tmp_path, f"{path} V -o column=image/encoded -o attributes=label,weight -o path=image/name"
    )
    assert got == {f"n{i % 3}/{i}.jpg": data for i, data in enumerate(IMAGES)}


def test_shards_come_by_pattern_and_by_folder(tmp_path: Path) -> None:
    for part in range(3):
        write_images(tmp_path / f"x-{part:05d}-of-00003.tfrecord", part * 20, 20)
    (tmp_path / "notes.txt").touch()
    by_pattern = take(open_source(f"{tmp_path}/x-*.tfrecord", options=EXAMPLE))
    by_folder = take(open_source(tmp_path, format_name="tfrecord", options=EXAMPLE))
    assert by_pattern == by_folder
    assert [data for data, _ in by_pattern.values()] == IMAGES
    assert list(by_pattern)[20] == "x-00001-of-00003/00000000"


@pytest.mark.parametrize("name", ["x.tfrecord.index", "x.tfrecord.idx", "x.idx", "x.tfindex"])
def test_an_index_file_is_used(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_images(tmp_path / "x.tfrecord")
    make = pytest.importorskip("tfrecord.tools.tfrecord2idx").create_index
    make(str(path), str(tmp_path / name))
    monkeypatch.setattr(tfrecord, "_scan", None)
    assert take(open_source(path, options=EXAMPLE)) == examples()
    (tmp_path / "indices").mkdir()
    (tmp_path / name).rename(tmp_path / "indices" / name)
    elsewhere = EXAMPLE | {"index": str(tmp_path / "indices")}
    assert take(open_source(path, options=elsewhere)) == examples()


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("0 27\n", "to have 27 bytes, got 42"),
        ("0 21\n22 20\n", "line 2: expected a record at byte 21"),
        ("0 21\n21 5\n21 16\n", "line 2: expected a record"),
        ("0 18446744073709551615\n", "line 1: expected a record"),
        ("zero 21\n21 21\n", "expected lines of an offset and a length"),
        ("0 21 3\n21 21\n", "expected lines of an offset and a length"),
        ("0 18\n18 24\n", "record 0: expected 2 bytes as the index says, got a record of 5"),
    ],
)
def test_an_index_that_does_not_fit_is_reported(
    volume: Volume, tmp_path: Path, index: str, message: str
) -> None:
    (tmp_path / "x.tfrecord").write_bytes(GOLDEN)
    (tmp_path / "x.tfrecord.index").write_text(index)
    with refused(volume, FormatError, f"x.tfrecord.*{message}"):
        import_dataset(volume, open_source(tmp_path / "x.tfrecord"), "n", layout="path")
    got = import_all(volume, tmp_path / "x.tfrecord", options={"index": "none"})
    assert list(got.values()) == [b"data1", b"data2"]


def test_an_index_that_is_asked_for_has_to_be_there(tmp_path: Path) -> None:
    (tmp_path / "x.tfrecord").write_bytes(GOLDEN)
    with pytest.raises(NotFoundError, match="expected its index in"):
        open_source(tmp_path / "x.tfrecord", options={"index": str(tmp_path)})


# ---- damage --------------------------------------------------------------------------------------


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize(
    ("offset", "message"),
    [
        (21, "record 1: expected .* as the checksum of its length"),
        (30, "record 1: expected .* as the checksum of its length"),
        (35, "record 1: expected .* as the checksum of its 5 bytes"),
        (41, "record 1: expected .* as the checksum of its 5 bytes"),
    ],
)
def test_a_flipped_bit_names_file_and_record(
    volume: Volume, tmp_path: Path, offset: int, message: str, compressed: bool
) -> None:
    path = tmp_path / "x.tfrecord"
    path.write_bytes(GOLDEN)
    flip_bit(path, offset)
    if compressed:
        path = tmp_path / "x.tfrecord.gz"
        path.write_bytes(gzip.compress((tmp_path / "x.tfrecord").read_bytes()))
    with refused(volume, ChecksumError, f"{path}: {message}"):
        import_all(volume, path)


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zlib.compress])
@pytest.mark.parametrize("size", [22, 32, 33, 35, 41])
def test_a_cut_file_names_file_and_record(
    volume: Volume, tmp_path: Path, size: int, pack: Any
) -> None:
    ending = {bytes: "", gzip.compress: ".gz", zlib.compress: ".zlib"}[pack]
    path = tmp_path / f"x.tfrecord{ending}"
    path.write_bytes(pack(GOLDEN[:size]))
    with refused(volume, TruncatedError, f"{path}: record 1: at byte 21: the file ends"):
        import_all(volume, path)


@pytest.mark.parametrize("pack", [gzip.compress, zlib.compress])
def test_a_damaged_stream_names_its_file(volume: Volume, tmp_path: Path, pack: Any) -> None:
    path = tmp_path / ("x.tfrecord.gz" if pack is gzip.compress else "x.tfrecord.zlib")
    data = pack(b"".join(map(frame, IMAGES)))
    path.write_bytes(data[:-3])
    with refused(volume, TruncatedError, f"{path}: record \\d+: .* the file ends"):
        import_all(volume, path)
    path.write_bytes(data)
    flip_bit(path, -6 if pack is gzip.compress else -1)
    with refused(volume, FormatError, f"{path}: record .* stream is damaged"):
        import_all(volume, path)


def test_a_file_that_changes_is_reported(volume: Volume, tmp_path: Path) -> None:
    path = tmp_path / "x.tfrecord"
    path.write_bytes(GOLDEN)
    source = open_source(path)
    path.write_bytes(GOLDEN + frame(b"more"))
    with refused(volume, DeviceError, "changed during the import"):
        import_dataset(volume, source, "n")
    cut(path, 30)
    with refused(volume, TruncatedError, "has become shorter"):
        import_dataset(volume, source, "n")


def test_a_compressed_length_is_not_believed_without_bound(tmp_path: Path) -> None:
    path = tmp_path / "x.tfrecord.gz"
    length = struct.pack("<Q", 1 << 40)
    path.write_bytes(gzip.compress(length + struct.pack("<I", masked_crc32c(length))))
    with pytest.raises(LimitError, match=f"record 0: expected at most {1 << 30} bytes"):
        take(open_source(path))


# ---- Examples ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"column": "image"}, "expected feature image, got boxes, image/encoded"),
        ({"column": "label"}, "expected bytes in feature label, got int64"),
        (
            {"column": "image/encoded", "attributes": "boxes"},
            "expected one value in feature boxes, got 2",
        ),
        (
            {"column": "image/encoded", "attributes": "image/encoded"},
            "expected text in feature image/encoded",
        ),
    ],
)
def test_features_that_do_not_fit_name_file_and_record(
    volume: Volume, tmp_path: Path, options: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "IMAGES", [bytes([255 - i]) for i in range(60)])
    path = write_images(tmp_path / "x.tfrecord")
    with refused(volume, FormatError, rf"{path}: record \d+: {message}"):
        import_all(volume, path, options=options)


def test_a_record_that_is_no_example_is_reported(volume: Volume, tmp_path: Path) -> None:
    path = tmp_path / "x.tfrecord"
    path.write_bytes(GOLDEN)
    with refused(volume, FormatError, "x.tfrecord: record [01]: expected"):
        import_all(volume, path, options={"column": "image"})


@pytest.mark.parametrize("text", ["/etc/passwd", "a/../../b", ""])
def test_paths_from_features_may_not_lead_out(volume: Volume, tmp_path: Path, text: str) -> None:
    features = {"image": (b"data", "byte"), "name": (text.encode(), "byte")}
    path = write_examples(tmp_path / "x.tfrecord", [features])
    with refused(volume, FormatError, "x.tfrecord: record 0: expected"):
        import_all(volume, path, options={"column": "image", "path": "name"})


def test_features_need_a_column() -> None:
    with pytest.raises(
        UsageError, match="expected a column or fields along with attributes or path"
    ):
        open_source([__file__], format_name="tfrecord", options={"path": "name"})


def test_features_need_protobuf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.tfrecord").write_bytes(GOLDEN)
    monkeypatch.setitem(sys.modules, "google.protobuf.descriptor_pb2", None)
    with pytest.raises(UsageError, match="expected protobuf to be installed"):
        open_source(tmp_path / "x.tfrecord", options={"column": "image"})
    assert len(take(open_source(tmp_path / "x.tfrecord"))) == 2


def test_unpacked_lists_are_read() -> None:
    for values, want in ((b"\x08\xff\xff\xff\xff\x0f", 0xFFFFFFFF), (b"\x0d\0\0\x80\x3f", 1.0)):
        kind = 3 if isinstance(want, int) else 2
        entry = field(1, b"a") + field(2, field(kind, values))
        record = memoryview(field(1, field(1, entry)))
        assert scalar(EXAMPLES.features(record)["a"], "a") == want


def field(number: int, data: bytes) -> bytes:
    """A field with a length, of a protocol buffer."""
    return bytes([number << 3 | 2, len(data)]) + data


@given(st.binary(max_size=60))
def test_any_bytes_are_features_or_an_error(data: bytes) -> None:
    record = memoryview(b"\x0a" + bytes([len(data)]) + data)
    try:
        for name, feature in EXAMPLES.features(record).items():
            scalar(feature, name)
    except ExampleError:
        pass


# ---- what is refused -----------------------------------------------------------------------------


def test_shards_of_one_name_are_refused(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.tfrecord").write_bytes(GOLDEN)
    with pytest.raises(UsageError, match="expected shards of different names"):
        open_source([tmp_path / "a" / "x.tfrecord", tmp_path / "b" / "x.tfrecord"])


def test_a_folder_without_shards_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="expected a TFRecord file in the folder"):
        open_source(tmp_path, format_name="tfrecord")


def test_an_empty_file_gives_nothing(tmp_path: Path) -> None:
    for name in ("x.tfrecord", "y.tfrecord.gz"):
        (tmp_path / name).write_bytes(gzip.compress(b"") if name.endswith("gz") else b"")
        assert take(open_source(tmp_path / name)) == {}


def test_a_file_that_cannot_be_read_is_reported(tmp_path: Path) -> None:
    (tmp_path / "x.tfrecord").mkdir()
    with pytest.raises(DlfsError, match="import"):
        TfRecordSource([str(tmp_path / "x.tfrecord")], TfRecordOptions())
    with pytest.raises(NotFoundError, match="no such file"):
        TfRecordSource([str(tmp_path / "nothing.tfrecord")], TfRecordOptions())
    assert os.listdir(tmp_path) == ["x.tfrecord"]


def test_records_larger_than_a_buffer_come_alone(tmp_path: Path) -> None:
    big = np.random.default_rng(5).bytes(100_000)
    data = b"".join(map(frame, [b"a", big, b"b"]))
    for name in ("x.tfrecord", "x.tfrecord.gz"):
        (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
        source = TfRecordSource([str(tmp_path / name)], TfRecordOptions())
        source.buffer_bytes = 1000
        assert [got for got, _ in take(source).values()] == [b"a", big, b"b"]


# ---- SequenceExamples, and features of only some records -----------------------------------------


def write_sequences(path: Path, *records: tuple[dict[str, Any], dict[str, Any]]) -> Path:
    return write_examples(path, *zip(*records, strict=True))


def fields_of(volume: Volume, path: Path, fields: str) -> list[dict[str, Any]]:
    source = open_source(path, options={"fields": fields})
    import_dataset(volume, source, "n", layout="path")
    with volume["n"] as dataset:
        found = [dataset.sample(i) for i in range(len(dataset))]
    volume.remove("n")
    return found


def test_lists_of_steps_are_fields(volume: Volume, tmp_path: Path) -> None:
    path = write_sequences(
        tmp_path / "x.tfrecord",
        ({"id": (1, "int")}, {"a": ([[1, 2], [3, 4]], "int"), "b": ([[0.5]], "float")}),
        ({"id": (2, "int")}, {"a": ([[5, 6]], "int"), "b": ([[1.5], [2.5]], "float")}),
    )
    theirs = tfrecord_loader(str(path), None, sequence_description={"a": "int", "b": "float"})
    want = [steps for _, steps in theirs]
    got = fields_of(volume, path, "*")
    for one, other in zip(got, want, strict=True):
        assert one["a"].tolist() == [list(map(int, step)) for step in other["a"]]
        assert one["b"].tolist() == [list(map(float, step)) for step in other["b"]]
        assert (one["a"].dtype, one["b"].dtype) == (np.int64, np.float32)
    assert [one["id"].tolist() for one in got] == [[1], [2]]
    got = fields_of(volume, path, "a:i4[?,2],b:f4[?]")
    assert [one["b"].tolist() for one in got] == [[0.5], [1.5, 2.5]]
    assert [one["a"] for one in fields_of(volume, path, "a:text")] == [
        "[[1, 2], [3, 4]]",
        "[[5, 6]]",
    ]


def test_steps_that_are_no_array_are_named(volume: Volume, tmp_path: Path) -> None:
    path = write_sequences(
        tmp_path / "x.tfrecord",
        ({"id": (1, "int")}, {"w": ([[b"one"], [b"two"]], "byte"), "r": ([[1], [2, 3]], "int")}),
    )
    for fields, message in (
        ("*", "record 0: expected"),
        ("w", "expected steps of int64_list or of float_list in feature list w, got bytes_list"),
        ("r", "expected one number of values in each step of feature list r, got 1 and 2"),
    ):
        with refused(volume, FormatError, message):
            import_all(volume, path, options={"fields": fields})
    got = fields_of(volume, path, "w:text,r:text")
    assert got == [{"w": '[["one"], ["two"]]', "r": "[[1], [2, 3]]"}]
    with refused(volume, FormatError, "expected one value in feature r, got a list of steps"):
        import_all(volume, path, options={"fields": "id", "attributes": "r"})


def test_features_of_only_some_records_are_not_dropped(volume: Volume, tmp_path: Path) -> None:
    features = [{"a": (1, "int")}, {"a": (2, "int"), "b": (3, "int")}]
    path = write_examples(tmp_path / "x.tfrecord", features)
    with pytest.raises(FormatError, match="record 1: expected the features of the first record, a"):
        take(open_source(path, options={"fields": "*"}))
    with refused(volume, FormatError, "record [01]: expected"):
        import_all(volume, path, options={"fields": "*"})
    source = open_source(path, options={"fields": "a"})
    assert len(take(source)) == 2
    assert source.skipped == {"feature that is not used: b": 1}
    with refused(volume, UsageError, "'dlfs:fields': expected a name that does not begin"):
        import_all(volume, path, options={"fields": "a", "attributes": "dlfs:fields"})
