"""Sources with bad records: what is imported, left out, reported and refused, in every format."""

from __future__ import annotations

import errno
import gzip
import io
import json
import re
import struct
import tarfile
import zipfile
from collections.abc import Callable, Collection
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import lmdb
import numpy as np
import pyarrow as pa
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import feather, parquet

from dlfs.base.arguments import Layout
from dlfs.errors import DlfsError, FormatError, NotFoundError, TruncatedError, UsageError
from dlfs.format.bad_records import BadRecord, BadReport
from dlfs.ingest import bad_records
from dlfs.ingest.archives import ranges
from dlfs.ingest.attributes import AttributedSource, PathRule, TableRule
from dlfs.ingest.bad_records import BadRecords, SkipBad, TooManyBadError
from dlfs.ingest.copying import copy_dataset
from dlfs.ingest.importer import ImportReport, import_dataset, open_source
from dlfs.volume.volume import Volume
from tests.support.files import cut, flip_bit, tar
from tests.support.shards import write_mds as write_mds_shards
from tests.unit.ingest import array_writers
from tests.unit.ingest.taking import contents, refused
from tests.unit.ingest.test_tfrecord import frame

COUNT = 9
DATA = [b"%d" % i * 20 for i in range(COUNT)]

Bad = Collection[int]


class Written(NamedTuple):
    """A source, the options of its import, and the path of each of its samples."""

    path: Path
    options: dict[str, Any]
    names: list[str]


def write_folder(folder: Path, bad: Bad) -> Written:
    """A folder with links that lead to nothing."""
    folder.mkdir()
    for i, data in enumerate(DATA):
        if i in bad:
            (folder / f"{i}.bin").symlink_to("nothing")
        else:
            (folder / f"{i}.bin").write_bytes(data)
    return Written(folder, {}, [f"{i}.bin" for i in range(COUNT)])


def write_image_folder(folder: Path, bad: Bad) -> Written:
    """A folder of classes, with files outside of them."""
    for i, data in enumerate(DATA):
        path = folder / ("" if i in bad else f"c{i % 2}") / f"{i}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    names = [f"{i}.bin" if i in bad else f"c{i % 2}/{i}.bin" for i in range(COUNT)]
    return Written(folder, {"format_name": "imagefolder"}, names)


def write_list(folder: Path, bad: Bad) -> Written:
    """A list with lines that name no file, lead out of the folder, or are there twice."""
    folder.mkdir()
    lines = []
    for i, data in enumerate(DATA):
        (folder / f"{i}.bin").write_bytes(data)
        lines.append(["none.bin", "../out", "a/../../b"][i % 3] if i in bad else f"{i}.bin")
    (folder / "list.txt").write_text("\n".join(lines))
    return Written(folder / "list.txt", {}, [f"{i}.bin" for i in range(COUNT)])


def write_csv(folder: Path, bad: Bad) -> Written:
    """A table of files, with lines of too many fields, and of bytes that are no text."""
    folder.mkdir()
    lines = [b"path,label,text"]
    for i, data in enumerate(DATA):
        (folder / f"{i}.bin").write_bytes(data)
        broken = [b"%d.bin,%d,x,y", b"%d.bin,%d,\xff", b'%d.bin,%d,"x"y'][i % 3]
        lines.append((broken if i in bad else b"%d.bin,%d,x") % (i, i))
    (folder / "list.csv").write_bytes(b"\n".join(lines))
    return Written(folder / "list.csv", {}, [f"{i}.bin" for i in range(COUNT)])


def write_tar(folder: Path, bad: Bad, suffix: str = ".tar") -> Written:
    """An archive with names that lead out of it."""
    folder.mkdir()
    raw = tar(*[(f"../{i}" if i in bad else f"{i}.bin", data) for i, data in enumerate(DATA)])
    path = folder / f"x{suffix}"
    path.write_bytes(gzip.compress(raw) if suffix == ".tar.gz" else raw)
    return Written(path, {}, [f"{i}.bin" for i in range(COUNT)])


def write_packed_tar(folder: Path, bad: Bad) -> Written:
    """The same, compressed, so that it is streamed."""
    return write_tar(folder, bad, ".tar.gz")


def write_zip(folder: Path, bad: Bad) -> Written:
    """An archive with names that lead out of it, and members with a wrong CRC."""
    folder.mkdir()
    path = folder / "x.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for i, data in enumerate(DATA):
            archive.writestr(f"../{i}" if i in bad and i % 2 else f"{i}.bin", data)
        places = [entry.header_offset for entry in archive.infolist()]
    for i in bad:
        if not i % 2:
            flip_bit(path, places[i] + 40)
    return Written(path, {}, [f"{i}.bin" for i in range(COUNT)])


def write_webdataset(folder: Path, bad: Bad) -> Written:
    """Keys that lack a member, have two of one extension, or one that is no number."""
    folder.mkdir()
    members = []
    for i, data in enumerate(DATA):
        members.append((f"{i}.bin", data))
        if i not in bad:
            members.append((f"{i}.cls", b"%d" % i))
        elif i % 3:
            members += [(f"{i}.cls", b"\xff"), (f"{i}.CLS", b"2")][: i % 3]
    (folder / "x.tar").write_bytes(tar(*members))
    options = {"format_name": "webdataset", "options": {"attributes": "cls"}}
    return Written(folder / "x.tar", options, [f"{i}.bin" for i in range(COUNT)])


def write_tfrecord(folder: Path, bad: Bad, suffix: str = "tfrecord") -> Written:
    """Records whose data has a wrong checksum."""
    folder.mkdir()
    records = [frame(data) for data in DATA]
    for i in bad:
        records[i] = records[i][:-5] + b"\xff" + records[i][-4:]
    raw = b"".join(records)
    path = folder / f"x.{suffix}"
    path.write_bytes(gzip.compress(raw) if suffix.endswith("gz") else raw)
    return Written(path, {}, [f"x/{i:08d}" for i in range(COUNT)])


def write_packed_tfrecord(folder: Path, bad: Bad) -> Written:
    """The same, compressed, so that it is streamed."""
    return write_tfrecord(folder, bad, "tfrecord.gz")


def write_examples(folder: Path, bad: Bad) -> Written:
    """Records without the feature that is the sample, or that are no Examples."""
    folder.mkdir()

    def field(number: int, data: bytes) -> bytes:
        return bytes([number << 3 | 2, len(data)]) + data

    records = []
    for i, data in enumerate(DATA):
        name = b"other" if i in bad else b"image"
        entry = field(1, name) + field(2, field(1, field(1, data)))
        example = field(1, field(1, entry))
        records.append(frame(b"\xff\xff" if i in bad and i % 2 else example))
    (folder / "x.tfrecord").write_bytes(b"".join(records))
    names = [f"x/{i:08d}" for i in range(COUNT)]
    return Written(folder / "x.tfrecord", {"options": {"column": "image"}}, names)


def table(bad: Bad) -> pa.Table:
    return pa.table(
        {
            "image": pa.array(
                [None if i in bad else data for i, data in enumerate(DATA)], pa.binary()
            ),
            "label": pa.array(range(COUNT)),
        }
    )


def write_parquet(folder: Path, bad: Bad) -> Written:
    """Rows in which the sample is null."""
    folder.mkdir()
    parquet.write_table(table(bad), folder / "x.parquet", row_group_size=4)
    return Written(folder / "x.parquet", {}, [f"x/{i:08d}" for i in range(COUNT)])


def write_arrow(folder: Path, bad: Bad) -> Written:
    """The same as fields, one of which is null."""
    folder.mkdir()
    feather.write_feather(table(bad), folder / "x.arrow", compression="uncompressed")
    options = {"options": {"fields": "image,label"}}
    return Written(folder / "x.arrow", options, [f"x/{i:08d}" for i in range(COUNT)])


def write_mds(folder: Path, bad: Bad, fields: str = "") -> Written:
    """A shard whose samples have paths that lead out of it."""
    folder.mkdir()
    samples = []
    for i, data in enumerate(DATA):
        path = b"../x" if i in bad else b"%d" % i
        samples.append(struct.pack("<II", len(path), len(data)) + path + data)
    ends = np.cumsum([0, *map(len, samples)]) + 4 * (COUNT + 2)
    raw = np.array([COUNT, *ends], "<u4").tobytes() + b"".join(samples)
    (folder / "shard.00000.mds").write_bytes(raw)
    shard = {
        "column_encodings": ["str", "bytes"],
        "column_names": ["name", "image"],
        "column_sizes": [None, None],
        "compression": None,
        "format": "mds",
        "samples": COUNT,
        "version": 2,
        "zip_data": None,
        "raw_data": {"basename": "shard.00000.mds", "bytes": len(raw), "hashes": {}},
    }
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": [shard]}))
    options = {"path": "name"} | ({"fields": fields} if fields else {})
    return Written(folder, {"options": options}, [f"{i}" for i in range(COUNT)])


def write_mds_fields(folder: Path, bad: Bad) -> Written:
    """The same, with a field."""
    return write_mds(folder, bad, "image")


def write_lmdb(folder: Path, bad: Bad) -> Written:
    """Keys that are too long for a path, and large values whose page has another number."""
    keys = [f"{i}" + "x" * 300 * (i in bad and i % 2) for i in range(COUNT)]
    values = [data + bytes(5000) * (i % 2 == 0) for i, data in enumerate(DATA)]
    with lmdb.open(str(folder), 1 << 20) as environment, environment.begin(write=True) as writing:
        for key, data in zip(keys, values, strict=True):
            writing.put(key.encode(), data)
    file = folder / "data.mdb"
    for i in bad:
        if not i % 2:
            flip_bit(file, file.read_bytes().index(values[i]) - 16)
    return Written(folder, {}, keys)


def write_npz(folder: Path, bad: Bad) -> Written:
    """Members with a wrong CRC, and members that are no array."""
    folder.mkdir()
    path = folder / "x.npz"
    with zipfile.ZipFile(path, "w") as archive:
        for i, data in enumerate(DATA):
            raw = io.BytesIO()
            np.save(raw, np.frombuffer(data, np.uint8))
            broken = i in bad and i % 2
            archive.writestr(f"{i}.npy", b"no array" if broken else raw.getvalue())
        places = [entry.header_offset for entry in archive.infolist()]
    for i in bad:
        if not i % 2:
            flip_bit(path, [*places, path.read_bytes().index(b"PK\1\2")][i + 1] - 3)
    return Written(path, {"options": {"samples": "arrays"}}, [f"{i}" for i in range(COUNT)])


def write_hdf5(folder: Path, bad: Bad) -> Written:
    """Rows in chunks with a wrong checksum."""
    h5py = pytest.importorskip("h5py")
    folder.mkdir()
    path = folder / "x.h5"
    rows = np.frombuffer(b"".join(DATA), np.uint8).reshape(COUNT, -1)
    with h5py.File(path, "w") as file:
        made = file.create_dataset("x", data=rows, chunks=(1, rows.shape[1]), fletcher32=True)
        places = [made.id.get_chunk_info(i).byte_offset for i in range(COUNT)]
    for i in bad:
        flip_bit(path, places[i])
    return Written(path, {}, [f"x/{i:08d}" for i in range(COUNT)])


def write_zarr(folder: Path, bad: Bad) -> Written:
    """Rows in chunks that are cut, or no chunks."""
    rows = np.frombuffer(b"".join(DATA), np.uint8).reshape(COUNT, -1)
    array_writers.write_zarr(folder, {"x": rows}, chunks=(1, rows.shape[1]))
    for i in bad:
        chunk = folder / "x" / "c" / f"{i}" / "0"
        chunk.write_bytes(b"no chunk" if i % 2 else chunk.read_bytes()[:-3])
    return Written(folder, {}, [f"x/{i:08d}" for i in range(COUNT)])


def write_array_record(folder: Path, bad: Bad) -> Written:
    """Records whose data has another hash."""
    module = pytest.importorskip("array_record.python.array_record_module")
    folder.mkdir()
    path = folder / "x.arrayrecord"
    writer = module.ArrayRecordWriter(str(path), "group_size:1,uncompressed")
    for data in DATA:
        writer.write(data)
    writer.close()
    for i in bad:
        flip_bit(path, path.read_bytes().index(DATA[i]) + 1)
    return Written(path, {}, [f"x/{i:08d}" for i in range(COUNT)])


def write_json_lines(folder: Path, bad: Bad, suffix: str = "jsonl") -> Written:
    """Lines that are cut, no objects, or no UTF-8."""
    folder.mkdir()
    lines = [json.dumps({"text": data.decode()}).encode() for data in DATA]
    for i in bad:
        lines[i] = [lines[i][:-2], b"[1]", b'{"text": "\xff"}'][i % 3]
    raw = b"\n".join([*lines, b""])
    path = folder / f"x.{suffix}"
    path.write_bytes(gzip.compress(raw) if suffix.endswith("gz") else raw)
    return Written(path, {}, [f"x/{i:08d}" for i in range(COUNT)])


def write_packed_json_lines(folder: Path, bad: Bad) -> Written:
    """The same, compressed."""
    return write_json_lines(folder, bad, "jsonl.gz")


Write = Callable[[Path, Bad], Written]
WRITERS: list[Write] = [
    write_folder, write_image_folder, write_list, write_csv, write_tar, write_packed_tar, write_zip,
    write_webdataset, write_tfrecord, write_packed_tfrecord, write_examples, write_parquet,
    write_arrow, write_mds, write_mds_fields, write_lmdb, write_npz, write_hdf5,
    write_zarr, write_array_record, write_json_lines, write_packed_json_lines,
]  # fmt: skip

each_format = pytest.mark.parametrize(
    "write", WRITERS, ids=[write.__name__.removeprefix("write_") for write in WRITERS]
)


def import_some(
    volume: Volume,
    written: Written,
    skip_bad: int | str | None,
    *,
    name: str = "n",
    layout: Layout | None = "path",
    **options: Any,
) -> ImportReport:
    source = open_source(written.path, skip_bad=skip_bad, **written.options)
    with closing(source):
        return import_dataset(volume, source, name, layout=layout, **options)


def samples_of(volume: Volume, name: str = "n") -> dict[str, bytes]:
    """The samples of a dataset, without the bytes of further fields."""
    return {path: data[: len(DATA[0])] for path, data in contents(volume, name).items()}


@each_format
@pytest.mark.parametrize("bad", [{4}, {0, 3, 4, 8}, set()], ids=str)
def test_bad_records_are_left_out_and_reported(
    volume: Volume, tmp_path: Path, write: Write, bad: set[int]
) -> None:
    written = write(tmp_path / "source", bad)
    if bad:
        with refused_somehow(volume, re.escape(str(tmp_path / "source"))):
            import_some(volume, written, None)
        with refused_somehow(volume, rf"expected at most {len(bad) - 1} bad records"):
            import_some(volume, written, len(bad) - 1)
    report = import_some(volume, written, len(bad))
    assert samples_of(volume) == {written.names[i]: DATA[i] for i in range(COUNT) if i not in bad}
    assert report.bad.count == sum(report.bad.reasons.values()) == len(report.bad.records)
    assert report.bad.count == len(bad)
    assert all(str(tmp_path) in one.source for one in report.bad.records)
    assert all(one.record and one.reason for one in report.bad.records)
    assert len({one.record for one in report.bad.records}) == len(bad)
    with volume["n"] as dataset:
        assert dataset.bad_records() == report.bad
        assert dataset.info.bad_count == len(bad)
    assert volume.datasets()[0].bad_count == len(bad)


@each_format
def test_shares_are_of_all_records(volume: Volume, tmp_path: Path, write: Write) -> None:
    written = write(tmp_path / "source", {1, 5, 6})
    with refused_somehow(volume, r"at most 33 % bad records, got 3 of 9 records"):
        import_some(volume, written, "33%")
    assert import_some(volume, written, "33.4%", layout="shuffled").bad.count == 3
    assert len(samples_of(volume)) == 6


@each_format
def test_a_source_of_bad_records_alone_is_refused(
    volume: Volume, tmp_path: Path, write: Write
) -> None:
    written = write(tmp_path / "source", range(COUNT))
    with refused_somehow(
        volume, "expected at most 99 % bad records|expected at least one|arrays|column"
    ):
        import_some(volume, written, "99%")
    if write not in (
        write_npz,
        write_json_lines,
        write_packed_json_lines,
    ):  # without arrays or columns there is no source
        with refused(volume, NotFoundError, "9 x bad record"):
            import_some(volume, written, COUNT)


class refused_somehow:  # noqa: N801 - used as a function
    """An import that fails with any error of ours and leaves the volume as it was."""

    def __init__(self, volume: Volume, match: str = ".") -> None:
        self._volume, self._raises = volume, pytest.raises(DlfsError, match=match)
        self._before = volume.generation, volume.datasets()

    def __enter__(self) -> None:
        self._raises.__enter__()

    def __exit__(self, *caught: Any) -> bool:
        passed = self._raises.__exit__(*caught)
        assert (self._volume.generation, self._volume.datasets()) == self._before
        return bool(passed)


# ---- files that end too early --------------------------------------------------------------------


@pytest.mark.parametrize(
    "write",
    [write_tar, write_packed_tar, write_tfrecord, write_packed_tfrecord, write_webdataset],
)
def test_what_is_before_the_end_of_a_cut_file_is_imported(
    volume: Volume, tmp_path: Path, write: Write
) -> None:
    written = write(tmp_path / "source", ())
    other = write(tmp_path / "other", ())
    suffix = written.path.name.partition(".")[2]
    second = other.path.rename(other.path.with_name(f"y.{suffix}"))
    if suffix.endswith("gz"):
        raw = gzip.decompress(written.path.read_bytes())
        packer = gzip.compress(raw[: len(raw) // 2] if "tfrecord" in suffix else raw[:3100])
        written.path.write_bytes(packer)
    else:
        cut(written.path, len(written.path.read_bytes()) // 2 if "tf" in suffix else 3100)
    options = written.options.get("options", {})
    if "tar" in suffix:
        options |= {"prefix_shards": "yes"}
    names = {key: value for key, value in written.options.items() if key != "options"}
    source = open_source([written.path, second], skip_bad=1, options=options, **names)
    report = import_dataset(volume, source, "n", layout="path")
    source.close()
    samples = samples_of(volume)
    assert sum(name.startswith("y/") for name in samples) == COUNT
    assert 0 < sum(name.startswith("x/") for name in samples) < COUNT
    assert set(samples.values()) <= set(DATA)
    (one,) = report.bad.records
    assert (one.source, one.record) == (str(written.path), bad_records.REST)
    assert report.bad.reasons == {"cut short": 1}


def save(path: Path, rows: int = COUNT) -> list[bytes]:
    """Write an array of rows that differ; return them."""
    values = np.repeat(np.arange(rows, dtype=np.uint16)[:, None], 400, axis=1)
    np.save(path, values)
    return [row.tobytes() for row in values]


def test_rows_before_the_end_of_a_cut_array_are_imported(volume: Volume, tmp_path: Path) -> None:
    rows = save(tmp_path / "x.npy")
    cut(tmp_path / "x.npy", 128 + 6 * 800 + 7)
    written = Written(tmp_path / "x.npy", {}, [])
    with refused(volume, TruncatedError, "expected 7328 bytes, got 4935"):
        import_some(volume, written, None)
    with refused_somehow(volume, "expected at most 2 bad records, got 3"):
        import_some(volume, written, 2)
    report = import_some(volume, written, 3)
    assert list(contents(volume, "n").values()) == rows[:6]
    assert [one.record for one in report.bad.records] == ["rows 6..8"]


def test_values_behind_the_end_of_a_cut_environment_are_left_out(
    volume: Volume, tmp_path: Path
) -> None:
    values = {b"%03d" % i: bytes([i]) * 9000 for i in range(100)}
    with (
        lmdb.open(str(tmp_path / "x.lmdb"), 8 << 20, subdir=False) as environment,
        environment.begin(write=True) as writing,
    ):
        for key, data in values.items():
            writing.put(key, data)
    path = tmp_path / "x.lmdb"
    written = Written(path, {}, [])
    ends = [path.read_bytes().index(data) + 9000 for data in values.values()]
    size = sorted(ends)[89]
    cut(path, size)
    with refused(volume, TruncatedError, r"x\.lmdb: expected [0-9]+ bytes in [0-9]+ pages"):
        import_some(volume, written, None)
    report = import_some(volume, written, 20)
    found = {key.encode(): data for key, data in contents(volume, "n").items()}
    assert found.items() <= values.items()
    assert len(found) + report.bad.count == 100
    assert report.bad.reasons.keys() == {"cut short"}


def test_a_damaged_page_of_keys_costs_its_keys(volume: Volume, tmp_path: Path) -> None:
    values = {b"%03d" % i: bytes([i]) * 500 for i in range(100)}
    path = tmp_path / "x.lmdb"
    with (
        lmdb.open(str(path), 8 << 20, subdir=False) as environment,
        environment.begin(write=True) as writing,
    ):
        for key, data in values.items():
            writing.put(key, data)
    page = path.read_bytes().index(values[b"050"]) // 4096
    flip_bit(path, page * 4096)
    report = import_some(volume, Written(path, {}, []), 10)
    found = {key.encode(): data for key, data in contents(volume, "n").items()}
    assert found.items() <= values.items()
    assert b"050" not in found
    assert report.bad.count == 100 - len(found)
    others = "further keys of these pages"
    assert [one.record for one in report.bad.records] == [f"page {page}", others]


def write_parts(folder: Path, kind: str) -> tuple[list[Path], dict[str, Any]]:
    """Write two files whose samples are compressed three at a time, 12 in each."""
    folder.mkdir()
    values = [np.random.default_rng(i).bytes(2000) for i in range(24)]
    paths = [folder / f"{name}.{kind}" for name in "ab"]
    for number, path in enumerate(paths):
        part = values[12 * number : 12 * number + 12]
        if kind == "parquet":
            parquet.write_table(
                pa.table({"x": part}), path, row_group_size=3, write_page_checksum=True
            )
        elif kind == "arrow":
            options = pa.ipc.IpcWriteOptions(compression="zstd")
            with pa.ipc.new_file(str(path), pa.schema({"x": pa.binary()}), options=options) as out:
                out.write_table(pa.table({"x": part}), max_chunksize=3)
        elif kind == "arrayrecord":
            module = pytest.importorskip("array_record.python.array_record_module")
            writer = module.ArrayRecordWriter(str(path), "group_size:3,zstd:3")
            for data in part:
                writer.write(data)
            writer.close()
        elif kind == "zip":
            with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
                for i, data in enumerate(part):
                    archive.writestr(f"{path.stem}/{i:08d}", data)
        else:
            rows = np.frombuffer(b"".join(part), np.uint8).reshape(12, 2000)
            h5py = pytest.importorskip("h5py")
            with h5py.File(path, "w") as file:
                file.create_dataset("x", data=rows, chunks=(3, 2000), compression="gzip")
    return paths, {"format_name": {"h5": "hdf5"}.get(kind, kind)}


@pytest.mark.parametrize(
    ("kind", "lost"), [("parquet", 3), ("arrow", 3), ("arrayrecord", 3), ("h5", 3), ("zip", 1)]
)
def test_a_damaged_compressed_part_costs_its_own_samples(
    volume: Volume, tmp_path: Path, kind: str, lost: int
) -> None:
    paths, options = write_parts(tmp_path / "source", kind)
    with closing(open_source(paths, **options)) as source:
        import_dataset(volume, source, "whole", layout="path")
    whole = contents(volume, "whole")
    raw = paths[0].read_bytes()
    at = raw.index(whole[sorted(whole)[7]][100:130])  # random bytes are stored as they are
    if kind == "arrow":  # has no checksums
        at = raw.rindex(b"\x28\xb5\x2f\xfd", 0, at)
    paths[0].write_bytes(raw[:at] + bytes(200) + raw[at + 200 :])
    for skip_bad, match in (
        (None, rf"{paths[0].name}.*(00000007|row|record [678])"),
        (lost - 1, "at most"),
    ):
        with (
            refused_somehow(volume, match),
            closing(open_source(paths, skip_bad=skip_bad, **options)) as source,
        ):
            import_dataset(volume, source, "n", layout="path")
    for layout in ("path", "shuffled"):
        with closing(open_source(paths, skip_bad=lost, **options)) as source:
            report = import_dataset(volume, source, layout, layout=layout)
        found = contents(volume, layout)
        assert found.items() < whole.items()
        assert report.bad.count == lost == len(whole) - len(found)
        assert {one.source for one in report.bad.records} == {str(paths[0])}


@pytest.mark.parametrize("kind", ["parquet", "arrow", "arrayrecord", "h5", "zip"])
@pytest.mark.parametrize("share", [0, 2 / 3])
def test_a_cut_file_costs_no_other(volume: Volume, tmp_path: Path, kind: str, share: float) -> None:
    paths, options = write_parts(tmp_path / "source", kind)
    cut(paths[0], int(paths[0].stat().st_size * share))
    with refused_somehow(volume, paths[0].name), closing(open_source(paths, **options)) as source:
        import_dataset(volume, source, "n")
    with closing(open_source(paths, skip_bad=1, **options)) as source:
        report = import_dataset(volume, source, "n")
    assert len(contents(volume, "n")) == 12
    assert [(one.source, one.record) for one in report.bad.records] == [
        (str(paths[0]), bad_records.REST)
    ]


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.ZstdCompressor().compress])
def test_lines_before_the_end_of_a_cut_file_are_imported(
    volume: Volume, tmp_path: Path, pack: Callable[[bytes], bytes]
) -> None:
    suffix = ".gz" if pack is gzip.compress else ".zst"
    texts = [np.random.default_rng(i).bytes(3000).hex() for i in range(100)]
    raw = pack("".join(json.dumps({"text": text}) + "\n" for text in texts).encode())
    path = tmp_path / f"x.jsonl{suffix}"
    path.write_bytes(raw[: len(raw) // 2])
    written = Written(path, {}, [])
    with refused(volume, TruncatedError, r"x\.jsonl\S+ the \w+ stream is damaged"):
        import_some(volume, written, None)
    report = import_some(volume, written, 1)
    found = list(contents(volume, "n").values())
    assert found == [text.encode() for text in texts[: len(found)]]
    assert len(found) > 30
    assert [one.record for one in report.bad.records] == [bad_records.REST]
    if suffix == ".gz":  # whose checksum is that of all lines
        path.write_bytes(raw[:200] + bytes(20) + raw[220:])
        with refused_somehow(volume, "expected a readable file, got none"):
            import_some(volume, written, 1)


@pytest.mark.parametrize("damage", ["cut", "compressed"])
def test_a_damaged_shard_costs_no_other(volume: Volume, tmp_path: Path, damage: str) -> None:
    rows = [[np.random.default_rng(i).bytes(500)] for i in range(12)]
    folder = write_mds_shards(tmp_path, {"x": ("bytes", None)}, rows, shard_rows=4)
    damaged = tmp_path / "shard.00004.mds"
    if damage == "cut":
        cut(damaged, 700)
    else:
        packed = gzip.compress(damaged.read_bytes())
        damaged.unlink()
        (tmp_path / "packed.gz").write_bytes(packed[:60] + bytes(20) + packed[80:])
        index = json.loads((tmp_path / "index.json").read_text())
        zipped = {"basename": "packed.gz", "bytes": len(packed), "hashes": {}}
        index["shards"][1] |= {"zip_data": zipped, "compression": "gz"}
        (tmp_path / "index.json").write_text(json.dumps(index))
    written = Written(folder, {}, [])
    with refused_somehow(volume, r"shard\.00004\.mds"):
        import_some(volume, written, None)
    report = import_some(volume, written, 1)
    assert sorted(contents(volume, "n").values()) == sorted(
        row for i, (row,) in enumerate(rows) if not 4 <= i < 8
    )
    assert [one.record for one in report.bad.records] == [bad_records.REST]


def test_a_damaged_compressed_archive_is_refused(volume: Volume, tmp_path: Path) -> None:
    """Its checksum is that of members before, too."""
    written = write_packed_tar(tmp_path / "source", ())
    flip_bit(written.path, -6)
    with refused(volume, FormatError, "the archive is damaged: CRC check failed"):
        import_some(volume, written, 5)


def test_files_that_cannot_be_opened_are_left_out(volume: Volume, tmp_path: Path) -> None:
    written = write_parquet(tmp_path / "source", ())
    broken = written.path.with_name("a.parquet")
    broken.write_bytes(written.path.read_bytes()[:-10])
    folder = Written(written.path.parent, {"format_name": "parquet"}, [])
    report = import_some(volume, folder, 1)
    assert [one.source for one in report.bad.records] == [str(broken)]
    assert len(samples_of(volume)) == COUNT
    broken.rename(broken.with_name("x.parquet"))
    with refused(volume, FormatError, "expected a readable file, got none"):
        import_some(volume, written, 1)


def test_a_damaged_row_group_is_lost(volume: Volume, tmp_path: Path) -> None:
    written = write_parquet(tmp_path / "source", ())
    raw = written.path.read_bytes()
    at = raw.index(DATA[4])
    written.path.write_bytes(raw[: at - 30] + bytes(40) + raw[at + 10 :])
    report = import_some(volume, written, 4)
    assert [one.record for one in report.bad.records] == ["rows 4..7"]
    assert report.bad.count == 4
    assert samples_of(volume) == {f"x/{i:08d}": DATA[i] for i in (0, 1, 2, 3, 8)}


@pytest.mark.parametrize("write", [write_tar, write_tfrecord, write_lmdb])
def test_a_sector_that_cannot_be_read_costs_what_lies_in_it(
    volume: Volume, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Write
) -> None:
    written = write(tmp_path / "source", ())
    file = written.path / "data.mdb" if written.path.is_dir() else written.path
    at, read = file.read_bytes().index(DATA[3]) + 5, ranges.read_ranges

    def faulty(places: Any, buffer: Any, **options: Any) -> int:
        read(places, buffer, **options)
        starts, ends = places["position"], places["position"] + places["length_bytes"]
        places["code"][(starts <= at) & (at < ends)] = -errno.EIO
        return int(np.count_nonzero(places["code"]))

    monkeypatch.setattr(ranges, "read_ranges", faulty)
    with refused_somehow(volume, re.escape(str(written.path))):
        import_some(volume, written, None)
    report = import_some(volume, written, 1)
    assert samples_of(volume) == {written.names[i]: DATA[i] for i in range(COUNT) if i != 3}
    (one,) = report.bad.records
    assert one.source == str(written.path)
    assert one.record in (written.names[3], "record 3")
    assert report.bad.reasons == {"cannot be read": 1}


# ---- what only the writer finds ------------------------------------------------------------------


def test_one_of_two_samples_of_one_path_is_left_out(volume: Volume, tmp_path: Path) -> None:
    names = ["a", "b/c", "a", "b", "a/d", "e"]
    rows = {"image": [name.encode() for name in names], "path": names}
    parquet.write_table(pa.table(rows), tmp_path / "x.parquet")
    written = Written(tmp_path / "x.parquet", {"options": {"path": "path"}}, names)
    report = import_some(volume, written, 3)
    assert contents(volume, "n") == {"a": b"a", "b/c": b"b/c", "e": b"e"}
    assert report.bad.reasons == {"path of another sample": 3}
    assert [one.record for one in report.bad.records] == ["a", "b", "a/d"]
    with refused_somehow(volume):
        import_some(volume, written, 2)


def test_samples_of_two_archives_are_left_out(volume: Volume, tmp_path: Path) -> None:
    for name in "xy":
        (tmp_path / f"{name}.tar").write_bytes(tar(("a", name.encode()), (name, b"1")))
    source = open_source([tmp_path / "x.tar", tmp_path / "y.tar"], skip_bad=1)
    report = import_dataset(volume, source, "n")
    assert contents(volume, "n") == {"a": b"x", "x": b"1", "y": b"1"}
    assert [(Path(one.source).name, one.record) for one in report.bad.records] == [("y.tar", "a")]


def test_a_value_of_another_type_is_left_out(volume: Volume, tmp_path: Path) -> None:
    members = []
    for i, value in enumerate([b'{"n": 1}', b'{"n": "x"}', b'{"n": 3}']):
        members += [(f"{i}.bin", b"%d" % i), (f"{i}.json", value)]
    (tmp_path / "x.tar").write_bytes(tar(*members))
    (tmp_path / "y.tar").write_bytes(tar(("y.bin", b"1"), ("y.json", b'{"n": "y"}')))
    options = {"format_name": "webdataset", "options": {"attributes": "json.n"}}
    report = import_some(volume, Written(tmp_path, options, []), 2)
    assert contents(volume, "n") == {"0.bin": b"0", "2.bin": b"2"}
    assert report.bad.reasons == {"malformed": 1, "does not fit the dataset": 1}
    assert [one.record for one in report.bad.records] == ["1.bin", "y.bin"]


def test_samples_without_an_attribute_are_left_out(volume: Volume, tmp_path: Path) -> None:
    written = write_folder(tmp_path / "source", ())
    (tmp_path / "a.csv").write_text("path,x\n" + "".join(f"{i}.bin,{i}\n" for i in range(1, 9)))
    rules = [TableRule(str(tmp_path / "a.csv")), PathRule.parse("y:int=([0-7])[.]")]
    source = AttributedSource(open_source(written.path, skip_bad=2), rules)
    report = import_dataset(volume, source, "n")
    assert [*contents(volume, "n")] == [f"{i}.bin" for i in range(1, 8)]
    assert {one.record for one in report.bad.records} == {"0.bin", "8.bin"}
    assert report.skipped == {}
    source.close()


def test_links_to_what_was_left_out_are_reported(volume: Volume, tmp_path: Path) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("good"), io.BytesIO())
        for name, kind, target in (
            ("hard", tarfile.LNKTYPE, "nothing"),
            ("soft", tarfile.SYMTYPE, "nothing"),
            ("fine", tarfile.SYMTYPE, "good"),
        ):
            header = tarfile.TarInfo(name)
            header.type, header.linkname = kind, target
            archive.addfile(header)
    for name, raw in ("x.tar", out.getvalue()), ("x.tar.gz", gzip.compress(out.getvalue())):
        (tmp_path / name).write_bytes(raw)
        report = import_some(volume, Written(tmp_path / name, {}, []), 2, name=name)
        assert contents(volume, name) == {"good": b"", "fine": b""}
        assert [one.record for one in report.bad.records] == ["hard", "soft"]


def test_a_file_that_changes_is_left_out(volume: Volume, tmp_path: Path) -> None:
    written = write_folder(tmp_path / "source", ())
    source = open_source(written.path, skip_bad=2)
    (written.path / "3.bin").write_bytes(b"other")
    (written.path / "5.bin").unlink()
    report = import_dataset(volume, source, "n")
    source.close()
    assert {one.record for one in report.bad.records} == {"3.bin", "5.bin"}
    assert report.bad.reasons == {"cannot be read": 2}
    assert len(contents(volume, "n")) == COUNT - 2


# ---- the report ----------------------------------------------------------------------------------


def test_an_appended_version_has_the_report_of_the_earlier_one(
    volume: Volume, tmp_path: Path
) -> None:
    import_some(volume, write_folder(tmp_path / "a", {0}), 1)
    written = write_tar(tmp_path / "b", {1, 2})
    report = import_some(volume, written, 2, append=True, skip_existing=True, layout=None)
    assert report.bad.count == 2
    assert report.sample_count == 1  # the first one has 0.bin
    with volume["n@2"] as dataset:
        found = dataset.bad_records()
        assert [(one.record, one.version) for one in found.records] == [
            ("0.bin", 1), ("../1", None), ("../2", None),
        ]  # fmt: skip
        assert found.count == 3
        copied = copy_dataset(dataset, volume, "copy")
        assert copied.bad_count == 3
    volume.rename("n", "m")
    with volume.append("m") as writer:
        writer.add("more", b"1")
    with volume["m"] as dataset, volume["copy"] as copy:
        assert [one.version for one in dataset.bad_records().records] == [1, 2, 2]
        assert [one.version for one in copy.bad_records().records] == [1, 2, 2]
    assert [each.bad_count for each in volume.versions("m")] == [1, 3, 3]
    volume.remove("copy")
    assert all(each.name == "m" for each in volume.datasets())


@pytest.mark.isolated
@pytest.mark.parametrize("write", [write_parquet, write_hdf5])
def test_another_process_passes_its_bad_records_on(
    volume: Volume, tmp_path: Path, write: Write
) -> None:
    written = write(tmp_path / "source", {0, 4, 8})
    report = import_some(volume, written, 3)
    assert report.bad.count == 3
    assert len({one.record for one in report.bad.records}) == 3
    assert samples_of(volume) == {
        written.names[i]: DATA[i] for i in range(COUNT) if i not in (0, 4, 8)
    }
    with refused(volume, FormatError, "expected at most 2 bad records"):
        import_some(volume, written, 2)
    with refused_somehow(volume, "expected at most 30 % bad records"):
        import_some(volume, written, "30%")


# ---- limits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["", "x", "-1", "-1%", "101%", "nan%", "1.5", "%"])
def test_other_limits_are_refused(tmp_path: Path, value: str) -> None:
    with pytest.raises(UsageError, match="expected the bad records to leave out as a number, or"):
        open_source(tmp_path, skip_bad=value)


def fill(bad: BadRecords, count: int) -> None:
    for i in range(count):
        bad.note("f", f"record {i}", FormatError(f"import f: record {i}: expected it"))


def test_the_share_is_checked_early() -> None:
    bad = BadRecords(SkipBad.parse("1%"))
    fill(bad, 11)
    bad.count_good(989)  # 1,000 records: too few
    with pytest.raises(TooManyBadError, match=r"got 11 of 1,001 records; such as f: record 10: "):
        bad.count_good(1)
    bad.count_good(99)
    bad.finish()
    fill(bad, 1)
    with pytest.raises(TooManyBadError, match="got 12 of 1,101 records"):
        bad.finish()


def test_a_known_number_of_samples_is_what_the_share_is_of() -> None:
    bad = BadRecords(SkipBad.parse("1%"))
    fill(bad, 50)
    bad.expect(4950)
    bad.count_good(10)
    fill(bad, 1)
    with pytest.raises(TooManyBadError, match="got 51 of 5,000 records"):
        bad.count_good(10)


def test_most_bad_records_are_only_counted() -> None:
    bad = BadRecords(SkipBad.parse("100%"))
    fill(bad, 1500)
    report = bad.report()
    assert (report.count, report.reasons, len(report.records)) == (1500, {"malformed": 1500}, 1000)
    assert report.records[7] == BadRecord("f", "record 7", "expected it")
    reasons, records = bad.take_new()
    assert (reasons, len(records)) == ({"malformed": 1500}, 1000)
    fill(bad, 1)
    assert bad.take_new() == ({"malformed": 1}, [])
    assert report + report == BadReport(3000, {"malformed": 3000}, report.records)


@given(st.sets(st.integers(0, 40)), st.integers(0, 40), st.none() | st.integers(0, 45))
def test_parts_have_all_records_but_the_bad_ones(
    bad: set[int], count: int, limit: int | None
) -> None:
    bad = {index for index in bad if index < count}
    found = BadRecords(None if limit is None else SkipBad(limit))

    def make(first: int, size: int) -> list[int]:
        part = [*range(first, first + size)]
        if bad & set(part):
            raise FormatError(f"{min(bad & set(part))}")
        return part

    def take() -> list[int]:
        parts = found.each_part(count, make, lambda index: ("f", f"{index}"))
        return [index for part in parts for index in part]

    if len(bad) > (limit or 0):
        with pytest.raises(FormatError):
            take()
        return
    assert take() == [index for index in range(count) if index not in bad]
    assert [one.record for one in found.report().records] == [f"{i}" for i in sorted(bad)]
