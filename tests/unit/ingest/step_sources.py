"""Makes a source of each format, of a size that an import divides into steps."""

from __future__ import annotations

import gzip
import io
import json
import random
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.shards import write_examples, write_mds
from tests.unit.ingest.array_writers import WRITERS

SAMPLES = 120
GROUP = 25
"""Rows of a row group, a record batch or a chunk."""


@dataclass(frozen=True)
class Made:
    """A source that was made: its path, format and options."""

    path: Path
    format_name: str
    options: dict[str, object] = field(default_factory=dict)


def contents(seed: int = 1) -> list[bytes]:
    chance = random.Random(seed)
    return [chance.randbytes(chance.choice([0, 10, 5000, 9000, 40000])) for _ in range(SAMPLES)]


def names() -> list[str]:
    return [f"{'ab'[number % 2]}/{number:03}.bin" for number in range(SAMPLES)]


def folder(place: Path) -> Made:
    for name, data in zip(names(), contents(), strict=True):
        file = place / "folder" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    (place / "folder" / "empty").mkdir()
    return Made(place / "folder", "folder")


def file_list(place: Path) -> Made:
    root = folder(place).path
    lines = [f"{name},{number}" for number, name in enumerate(names()) if number != 7]
    (root / "list.csv").write_text("\n".join(["path,number", *lines]) + "\n")
    return Made(root / "list.csv", "list")


def tar(place: Path, mode: Any = "w", suffix: str = ".tar") -> Made:
    """Make two archives, with folders, links and a special file."""
    root = folder(place).path
    (root / "a" / "link").symlink_to("000.bin")
    (root / "b" / "hard").hardlink_to(root / "b" / "001.bin")
    (place / "archives").mkdir()
    for number, part in enumerate(("a", "b")):
        with tarfile.open(place / "archives" / f"{number}{suffix}", mode) as archive:
            archive.add(root / part, part)
            archive.add(root / "empty", f"empty{number}")
            special = tarfile.TarInfo(f"{part}/fifo")
            special.type = tarfile.FIFOTYPE
            archive.addfile(special)
    return Made(place / "archives" / f"*{suffix}", "tar")


def tar_gz(place: Path) -> Made:
    return tar(place, "w:gz", ".tar.gz")


def tar_gz_files(place: Path) -> Made:
    """Make archives of files, of which the last has a folder, and a link to a file of the first."""
    (place / "archives").mkdir()
    for shard in range(4):
        with tarfile.open(place / "archives" / f"{shard}.tar.gz", "w:gz") as archive:
            for name, data in [*zip(names(), contents(), strict=True)][shard * 30 :][:30]:
                info = tarfile.TarInfo(name)
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
            info = tarfile.TarInfo(f"fifo{shard}")
            info.type = tarfile.FIFOTYPE
            archive.addfile(info)
            if shard == 3:
                info = tarfile.TarInfo("a")
                info.type = tarfile.DIRTYPE
                archive.addfile(info)
                info = tarfile.TarInfo("link")
                info.type, info.linkname = tarfile.SYMTYPE, names()[0]
                archive.addfile(info)
    return Made(place / "archives" / "*.tar.gz", "tar")


def zip_archive(place: Path) -> Made:
    with zipfile.ZipFile(place / "x.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("__MACOSX/._x", b"left out")
        archive.mkdir("empty")
        for name, data in zip(names(), contents(), strict=True):
            archive.writestr(name, data)
    return Made(place / "x.zip", "zip")


def webdataset(place: Path, **options: object) -> Made:
    """Make three shards: members without a key, of another extension, and with an attribute."""
    (place / "shards").mkdir()
    for shard in range(3):
        with tarfile.open(place / "shards" / f"{shard}.tar", "w") as archive:
            for number, data in enumerate(contents(shard)[:40]):
                key = f"{shard}/{number:03}"
                members = {f"{key}.bin": data, f"{key}.cls": b"%d" % number, f"{key}.x": b"other"}
                if number % 7 == 0:
                    members |= {f"{shard}/none{number}": b"no key"}
                if number % 9 == 5:
                    del members[f"{key}.cls"]
                if options.get("nulls", "error") == "error":
                    members[f"{key}.cls"] = b"1"
                for name, value in members.items():
                    info = tarfile.TarInfo(name)
                    info.size = len(value)
                    archive.addfile(info, io.BytesIO(value))
    options = {"attributes": ("cls",), "column": "bin", **options}
    return Made(place / "shards", "webdataset", options)


def webdataset_nulls(place: Path) -> Made:
    return webdataset(place, nulls="skip")


def webdataset_fields(place: Path) -> Made:
    return webdataset(place, column=None, attributes=("cls",), fields=("bin",))


def tfrecord(place: Path, suffix: str = "") -> Made:
    folder = place / "records"
    folder.mkdir()
    for shard in range(2):
        half = contents()[shard * 60 : (shard + 1) * 60]
        examples: list[dict[str, Any]] = [
            {
                "image": (data, "byte"),
                "label": (number, "int"),
                **({"rare": (1, "int")} if number % 5 == 0 else {}),
                **({"score": (number / 2, "float")} if number % 11 else {}),
            }
            for number, data in enumerate(half)
        ]
        file = write_examples(folder / f"{shard}.tfrecord", examples)
        if suffix:
            Path(f"{file}{suffix}").write_bytes(gzip.compress(file.read_bytes(), 1))
            file.unlink()
    return Made(folder, "tfrecord")


def tfrecord_gz(place: Path) -> Made:
    return tfrecord(place, ".gz")


def array_record(place: Path) -> Made:
    module = pytest.importorskip("array_record.python.array_record_module")
    (place / "records").mkdir()
    for shard in range(3):
        path = place / "records" / f"{shard}.arrayrecord"
        writer = module.ArrayRecordWriter(str(path), "group_size:4")
        for data in contents()[shard * 40 : (shard + 1) * 40]:
            writer.write(data)
        writer.close()
    return Made(place / "records", "arrayrecord")


def examples(place: Path) -> Made:
    """Make records of which some lack an attribute, and some have another feature."""
    options = {"column": "image", "attributes": ("label", "score"), "nulls": "skip"}
    return Made(tfrecord(place).path, "tfrecord", options)


def rows(shard: int = 0) -> dict[str, list[Any]]:
    return {
        "image": contents(shard),
        "label": list(range(SAMPLES)),
        "text": [f"t{number % 7}" for number in range(SAMPLES)],
    }


def parquet(place: Path, **options: object) -> Made:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    (place / "tables").mkdir()
    for shard in range(2):
        found = rows(shard)
        if options.get("nulls") == "skip":
            found["label"][3::10] = [None] * 12
        file = place / "tables" / f"{shard}.parquet"
        pq.write_table(pa.table(found), file, row_group_size=GROUP)
    return Made(place / "tables", "parquet", dict(options))


def parquet_nulls(place: Path) -> Made:
    return parquet(place, nulls="skip")


def arrow_file(place: Path, *, is_stream: bool = False) -> Made:
    pa = pytest.importorskip("pyarrow")
    (place / "tables").mkdir()
    for shard in range(2):
        found = rows(shard)
        table = pa.table({**found, "text": pa.array(found["text"]).dictionary_encode()})
        make = pa.ipc.new_stream if is_stream else pa.ipc.new_file
        path = place / "tables" / f"{shard}.arrow"
        with make(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=GROUP)
    return Made(place / "tables", "arrow")


def arrow_stream(place: Path) -> Made:
    return arrow_file(place, is_stream=True)


def json_lines(place: Path) -> Made:
    pytest.importorskip("pyarrow")
    (place / "tables").mkdir()
    for shard in range(2):
        lines = [
            json.dumps({"text": data.hex()[:20000], "label": number})
            for number, data in enumerate(contents(shard))
        ]
        (place / "tables" / f"{shard}.jsonl").write_text("\n".join(lines) + "\n")
    return Made(place / "tables", "jsonl")


def arrays(name: str) -> Callable[[Path], Made]:
    def make(place: Path) -> Made:
        chance = np.random.default_rng(1)
        values = {
            "first": chance.integers(0, 256, (70, 5000), np.uint8),
            "second": chance.random((90, 700)),
        }
        suffix, write = WRITERS[name]
        chunks = {"hdf5": {"chunks": (9, 700)}, "zarr": {"chunks": (9, 700)}}.get(name, {})
        write(place / f"x{suffix}", values, **chunks)
        return Made(place / f"x{suffix}", name.partition("-")[0])

    return make


def hdf5_fields(place: Path) -> Made:
    chance = np.random.default_rng(1)
    values = {
        "image": chance.integers(0, 256, (SAMPLES, 70, 70), np.uint8),
        "label": np.arange(SAMPLES),
    }
    WRITERS["hdf5"][1](place / "x.h5", values)
    return Made(place / "x.h5", "hdf5", {"fields": ("image", "label")})


def npy(place: Path) -> Made:
    (place / "arrays").mkdir()
    for number in range(2):
        values = np.random.default_rng(number).integers(0, 256, (SAMPLES, 5000), np.uint8)
        np.save(place / "arrays" / f"{number}.npy", values)
    return Made(place / "arrays" / "*.npy", "npy")


def lmdb(place: Path) -> Made:
    library = pytest.importorskip("lmdb")
    with (
        library.open(str(place / "x.lmdb"), 32 << 20, subdir=False) as environment,
        environment.begin(write=True) as transaction,
    ):
        transaction.put(b"__len__", b"120")
        for name, data in zip(names(), contents(), strict=True):
            transaction.put(name.encode(), data)
    return Made(place / "x.lmdb", "lmdb", {"select": "[ab]*"})


def mds(place: Path) -> Made:
    (place / "mds").mkdir()
    found = [[data, b"%d" % number] for number, data in enumerate(contents())]
    columns = {"image": ("bytes", None), "label": ("str_int", None)}
    return Made(write_mds(place / "mds", columns, found, shard_rows=GROUP), "mds")


def mds_fields(place: Path) -> Made:
    """Make shards whose arrays have no type in the index: the first sample gives it."""
    (place / "mds").mkdir()
    lengths = [1 + number % 3 for number in range(SAMPLES)]
    masks = [bytes([8, 4, length, *range(length)]) for length in lengths]
    found = [*zip(contents(), masks, strict=True)]
    columns = {"image": ("bytes", None), "mask": ("ndarray", None)}
    return Made(
        write_mds(place / "mds", columns, found, shard_rows=GROUP),
        "mds",
        {"fields": ("image", "mask")},
    )


SOURCES: dict[str, Callable[[Path], Made]] = {
    "folder": folder,
    "list": file_list,
    "tar": tar,
    "tar.gz": tar_gz,
    "tar.gz-files": tar_gz_files,
    "zip": zip_archive,
    "webdataset": webdataset,
    "webdataset-nulls": webdataset_nulls,
    "webdataset-fields": webdataset_fields,
    "tfrecord": tfrecord,
    "tfrecord.gz": tfrecord_gz,
    "examples": examples,
    "arrayrecord": array_record,
    "parquet": parquet,
    "parquet-nulls": parquet_nulls,
    "arrow-file": arrow_file,
    "arrow-stream": arrow_stream,
    "jsonl": json_lines,
    **{name: arrays(name) for name in WRITERS},
    "hdf5-fields": hdf5_fields,
    "npy": npy,
    "lmdb": lmdb,
    "mds": mds,
    "mds-fields": mds_fields,
}
"""Function that makes a source, by the format and what is special in it."""
