"""MDS shards: what MosaicML's writer made, what this file's makes after the layout, and damage."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import json
import re
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
import zstandard

from dlfs.base.extras import install_command
from dlfs.errors import (
    ChecksumError,
    DlfsError,
    FormatError,
    LimitError,
    NotFoundError,
    TruncatedError,
    UsageError,
    VersionError,
)
from dlfs.ingest.formats.mds import MdsOptions
from dlfs.ingest.importer import open_source
from dlfs.volume.volume import Volume
from tests.support.files import cut, flip_bit, write_at
from tests.support.shards import encode_mds
from tests.unit.ingest.taking import import_all, import_by_command, refused, take

GOLDEN_CONFIG = (
    '{"column_encodings": ["bytes", "int"], "column_names": ["image", "label"], "column_sizes": '
    '[null, 8], "compression": null, "format": "mds", "hashes": ["sha1"], "size_limit": 67108864, '
    '"version": 2}'
)
GOLDEN_SHARD = (
    b"\x02\0\0\0\xd5\0\0\0\xe4\0\0\0\xf5\0\0\0"
    + GOLDEN_CONFIG.encode()
    + b"\x03\0\0\0one\x01\0\0\0\0\0\0\0\x05\0\0\0three\xfd\xff\xff\xff\xff\xff\xff\xff"
)
GOLDEN_INDEX = (
    '{"shards": [{"column_encodings": ["bytes", "int"], "column_names": ["image", "label"], '
    '"column_sizes": [null, 8], "compression": null, "format": "mds", "hashes": ["sha1"], '
    '"raw_data": {"basename": "shard.00000.mds", "bytes": 245, "hashes": {"sha1": '
    '"16acf37cfd462c013ddc9092f08f29f7cb1a8ba8"}}, "samples": 2, "size_limit": 67108864, '
    '"version": 2, "zip_data": null}], "version": 2}'
)
"""Shards that MDSWriter of mosaicml-streaming 0.13 wrote."""

COUNT = 200
COLUMNS = {
    "exact": ("str_int", None),
    "good": ("uint8", 1),
    "image": ("jpeg", None),
    "label": ("int", 8),
    "meta": ("json", None),
    "name": ("str", None),
    "weight": ("float32", 4),
}
ENCODERS: dict[str, Callable[[Any], bytes]] = {
    "str_int": lambda value: str(value).encode(),
    "uint8": lambda value: bytes([value]),
    "jpeg": bytes,
    "int": lambda value: struct.pack("<q", value),
    "json": lambda value: json.dumps(value).encode(),
    "str": str.encode,
    "float32": lambda value: struct.pack("<f", value),
}
PACKERS = {
    "zstd:7": zstandard.ZstdCompressor(level=7).compress,
    "gz": gzip.compress,
    "bz2": bz2.compress,
}


def row(i: int) -> dict[str, Any]:
    return {
        "exact": 10**12 * i,
        "good": i % 2,
        "image": bytes([i % 251]) * (i * 17 % 500),
        "label": i - 100,
        "meta": {"i": i},
        "name": f"d{i % 3}/{i}.jpg",
        "weight": i / 4,
    }


def attributes(i: int) -> dict[str, Any]:
    return {name: value for name, value in row(i).items() if name not in ("image", "meta")}


def encode(i: int) -> list[bytes]:
    return [ENCODERS[kind](row(i)[name]) for name, (kind, _) in COLUMNS.items()]


def write(folder: Path, compression: str | None = None, hashes: bool = True) -> Path:
    """Three shards with their index."""
    folder.mkdir()
    shards = []
    for number, first in enumerate(range(0, COUNT, 80)):
        rows = [encode(i) for i in range(first, min(first + 80, COUNT))]
        raw = encode_mds([size for _, size in COLUMNS.values()], rows)
        files = {"raw_data": (f"shard.{number:05d}.mds", raw)}
        if compression is not None:
            name = f"shard.{number:05d}.mds.{compression.partition(':')[0]}"
            files["zip_data"] = (name, PACKERS[compression](raw))
        shard: dict[str, Any] = {
            "column_encodings": [kind for kind, _ in COLUMNS.values()],
            "column_names": list(COLUMNS),
            "column_sizes": [size for _, size in COLUMNS.values()],
            "compression": compression,
            "format": "mds",
            "samples": min(80, COUNT - first),
            "version": 2,
            "zip_data": None,
        }
        for key, (name, data) in files.items():
            digests = {
                "sha1": hashlib.sha1(data).hexdigest(),
                "xxh64": xxhash.xxh64_hexdigest(data),
            }
            shard[key] = {"basename": name, "bytes": len(data), "hashes": digests if hashes else {}}
        name, data = files.get("zip_data", files["raw_data"])
        (folder / name).write_bytes(data)
        shards.append(shard)
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))
    return folder


def change(folder: Path, number: int, **values: Any) -> None:
    """Write other values into a shard's part of the index."""
    index = json.loads((folder / "index.json").read_text())
    index["shards"][number].update(values)
    (folder / "index.json").write_text(json.dumps(index))


def path_of(i: int) -> str:
    return f"shard.{i // 80:05d}/{i % 80:08d}"


def test_what_the_writer_of_mosaicml_made_is_read(volume: Volume, tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text(GOLDEN_INDEX)
    (tmp_path / "shard.00000.mds").write_bytes(GOLDEN_SHARD)
    assert take(open_source(tmp_path)) == {
        "shard.00000/00000000": (b"one", {"label": 1}),
        "shard.00000/00000001": (b"three", {"label": -3}),
    }
    assert list(import_all(volume, tmp_path).values()) == [b"one", b"three"]


def test_what_an_installed_writer_makes_is_read(tmp_path: Path) -> None:
    streaming = pytest.importorskip("streaming", reason="mosaicml-streaming needs PyTorch")
    kinds = {name: kind for name, (kind, _) in COLUMNS.items()} | {"image": "bytes"}
    with streaming.MDSWriter(
        out=str(tmp_path / "m"), columns=kinds, compression="zstd", hashes=["sha1"], size_limit=9000
    ) as writer:
        for i in range(COUNT):
            writer.write(row(i))
    got = list(take(open_source(tmp_path / "m")).values())
    assert got == [(row(i)["image"], attributes(i)) for i in range(COUNT)]


@pytest.mark.parametrize("compression", [None, *PACKERS])
def test_a_column_is_the_sample_and_others_attributes(
    volume: Volume, tmp_path: Path, compression: str | None
) -> None:
    folder = write(tmp_path / "mds", compression)
    source = open_source(folder)
    assert source.sample_count == COUNT
    assert source.skipped == {"column that is not used: meta": 1}
    want = {path_of(i): (row(i)["image"], attributes(i)) for i in range(COUNT)}
    assert take(source) == want
    shuffled = list(take(open_source(folder), layout="shuffled", seed=3))
    assert shuffled != list(want)
    assert sorted(shuffled) == sorted(want)
    samples = {path: data for path, (data, _) in want.items()}
    assert import_all(volume, folder) == samples
    assert import_by_command(tmp_path, f"{folder} V") == samples


def test_columns_are_chosen(tmp_path: Path) -> None:
    folder = write(tmp_path / "mds")
    options = {"column": "meta", "attributes": "label", "path": "name"}
    source = open_source(folder, options=options)
    assert source.skipped == {"column that is not used: exact, good, image, weight": 4}
    assert take(source) == {
        row(i)["name"]: (json.dumps({"i": i}).encode(), {"label": i - 100}) for i in range(COUNT)
    }


def test_numbers_keep_their_types(tmp_path: Path) -> None:
    block = next(open_source(write(tmp_path / "mds")).blocks(layout="path", seed=0))
    types = {name: values.dtype for name, values in block.attributes.items()}
    assert types == {
        "exact": np.int64,
        "good": np.uint8,
        "label": np.int64,
        "name": object,
        "weight": np.float32,
    }


def test_arrays_of_a_fixed_form_are_read_as_arrays(volume: Volume, tmp_path: Path) -> None:
    folder = write(tmp_path / "mds", hashes=False)
    for number in range(3):
        kinds = [kind for kind, _ in COLUMNS.values()]
        sizes = [size for _, size in COLUMNS.values()]
        kinds[3], sizes[3] = "ndarray:int16:2,2", 8  # the label's eight bytes
        change(folder, number, column_encodings=kinds, column_sizes=sizes)
    import_all(volume, folder, options={"column": "label", "attributes": ()})
    with volume["n"] as dataset:
        assert dataset.read_arrays([0, 199]).tolist() == [
            np.array([i], "<i8").view("<i2").reshape(2, 2).tolist() for i in (-100, 99)
        ]
    for form in ("ndarray:int16:2,x", "ndarray:nothing:2"):
        kinds[3] = form
        for number in range(3):
            change(folder, number, column_encodings=kinds)
        with refused(volume, FormatError, "expected an array's form, got 'ndarray"):
            import_all(volume, folder, options={"column": "label", "attributes": ()})


# ---- damage --------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", [None, "zstd:7"])
def test_a_flipped_bit_does_not_pass_the_hashes(
    volume: Volume, tmp_path: Path, compression: str | None
) -> None:
    folder = write(tmp_path / "mds", compression)
    path = folder / f"shard.00001.mds{'.zstd' if compression else ''}"
    flip_bit(path, -1)
    with refused(volume, ChecksumError, f"{path}: expected sha1 .*, got"):
        import_all(volume, folder)


@pytest.mark.parametrize("compression", [None, "zstd:7", "gz", "bz2"])
def test_a_cut_shard_is_reported(volume: Volume, tmp_path: Path, compression: str | None) -> None:
    folder = write(tmp_path / "mds", compression)
    suffix = f".{compression.partition(':')[0]}" if compression else ""
    path = folder / f"shard.00001.mds{suffix}"
    cut(path, -7)
    with refused(volume, TruncatedError, rf"{path}: expected \d+ bytes, got \d+"):
        import_all(volume, folder)
    if compression is not None:
        change(folder, 1, zip_data={"basename": path.name, "bytes": path.stat().st_size})
        with refused(volume, FormatError, r"shard.00001.mds: (the .* stream is damaged|expected)"):
            import_all(volume, folder)


def test_a_shard_that_is_gone_is_reported(volume: Volume, tmp_path: Path) -> None:
    folder = write(tmp_path / "mds")
    (folder / "shard.00002.mds").unlink()
    with refused(volume, NotFoundError, "shard.00002.mds: there is no such shard"):
        import_all(volume, folder)


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (0, 81, "expected 80 samples, got 81"),
        (4 * 11, 1, r"sample 9: expected rising offsets from 328 to \d+, got \d+ and 1"),
        (4, 8, "sample 0: expected rising offsets from 328 to .*, got 8"),
        (330, 9999, r"sample 0: expected columns of \d+ bytes in all"),
    ],
)
def test_damage_without_hashes_names_file_and_sample(
    volume: Volume, tmp_path: Path, offset: int, value: int, message: str
) -> None:
    folder = write(tmp_path / "mds", hashes=False)
    write_at(folder / "shard.00001.mds", offset, struct.pack("<I", value))
    with refused(volume, FormatError, f"shard.00001.mds: {message}"):
        import_all(volume, folder)


def test_a_value_that_is_none_names_file_and_sample(volume: Volume, tmp_path: Path) -> None:
    folder = write(tmp_path / "mds")
    data = (folder / "shard.00001.mds").read_bytes()
    for old, new in ((b"d1/100.jpg", b"\xff1/100.jpg"), (b"%d" % (10**12 * 100), b"x" * 15)):
        (folder / "shard.00001.mds").write_bytes(data.replace(old, new))
        with refused(volume, FormatError, "shard.00001.mds: sample 20: column .*: expected str"):
            import_all(volume, folder, options={"hashes": "no"})


def test_paths_may_not_lead_out(volume: Volume, tmp_path: Path) -> None:
    folder = write(tmp_path / "mds")
    data = (folder / "shard.00000.mds").read_bytes()
    (folder / "shard.00000.mds").write_bytes(data.replace(b"d1/7.jpg", b"../7.jpg"))
    with refused(volume, FormatError, "shard.00000.mds: sample 7: expected a name without '..'"):
        import_all(volume, folder, options={"path": "name", "hashes": False})


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"version": 1}, VersionError, "expected version 2"),
        ({"format": "json"}, FormatError, "expected shards of format mds"),
        ({"samples": "many"}, FormatError, "shard 1: expected a shard's description"),
        ({"samples": -1}, FormatError, "shard 1: expected as many encodings"),
        ({"column_sizes": [None]}, FormatError, "shard 1: expected as many encodings"),
        ({"column_names": ["a"] * 7}, FormatError, "shard 1: expected columns of different names"),
        ({"raw_data": None}, FormatError, "shard 1: expected a shard's description"),
        (
            {"raw_data": {"basename": "../x", "bytes": 1}},
            FormatError,
            "shard 1: expected a file's name, got '../x'",
        ),
        (
            {"raw_data": {"basename": "x", "bytes": 1 << 40}},
            LimitError,
            "shard 1: expected at most",
        ),
        (
            {"column_names": list("abcdefg")},
            FormatError,
            "column exact: expected str_int as in .*shard.00000.mds, got none",
        ),
    ],
)
def test_an_index_that_makes_no_sense_is_reported(
    volume: Volume, tmp_path: Path, values: Any, error: type[DlfsError], message: str
) -> None:
    folder = write(tmp_path / "mds")
    change(folder, 1, **values)
    with refused(volume, error, message):
        import_all(volume, folder)


@pytest.mark.parametrize("text", ["{", "[]", '{"version": 2}', '{"version": 2, "shards": [1]}'])
def test_what_is_no_index_is_reported(volume: Volume, tmp_path: Path, text: str) -> None:
    (tmp_path / "index.json").write_text(text)
    with refused(volume, FormatError, r"index.json: expected an index of shards"):
        import_all(volume, tmp_path, format_name="mds")


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"column": "pixels"}, "expected column pixels, got exact, good, image"),
        ({"attributes": "meta"}, "expected a number or text in column meta, got json"),
        ({"column": ""}, "expected column , got"),
        ({"path": "file"}, "expected column file"),
    ],
)
def test_columns_that_do_not_fit_are_reported(
    tmp_path: Path, options: dict[str, str], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        open_source(write(tmp_path / "mds"), options=options)


def test_several_possible_samples_are_the_fields_of_one(volume: Volume, tmp_path: Path) -> None:
    folder = write(tmp_path / "mds", hashes=False)
    for kinds, fields in (
        (["bytes", "int8", "png", "int64", "json", "str", "float32"], ["exact", "image"]),
        (["int8", "str", "str", "int64", "json", "int8", "float32"], ["good", "image"]),
    ):
        for number in range(3):
            change(folder, number, column_encodings=kinds)
        assert list(open_source(folder)._fields) == fields
    for number in range(3):
        kinds = ["bytes", "int8", "png", "int64", "json", "str", "float32"]
        change(folder, number, column_encodings=kinds)
    import_all(volume, folder)
    with volume["n"] as dataset:
        assert dataset.fields == {"exact": "bytes", "image": "bytes"}
        assert bytes(dataset.sample(7)["image"]) == row(7)["image"]
        assert dataset.column("label", [7]).tolist() == [7 - 100]
        assert dataset.column("weight", [7]).dtype == np.float32


def test_a_sample_column_has_to_be_named_where_none_can_be_it(tmp_path: Path) -> None:
    folder = write(tmp_path / "mds")
    for number in range(3):
        change(folder, number, column_encodings=["int"] * 7)
    names = "exact, good, image, label, meta, name, weight"
    with pytest.raises(UsageError, match=f"got the columns {names}; option fields=\\* makes all"):
        open_source(folder)


def test_what_is_not_known_here_is_reported(
    volume: Volume, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "mds", "gz")
    change(folder, 0, compression="br")
    with refused(volume, UsageError, "expected compression zstd, gz or bz2, got br"):
        import_all(volume, folder)
    folder = write(tmp_path / "other")
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with refused(volume, UsageError, re.escape(install_command("mds"))):
        import_all(volume, folder)
    monkeypatch.undo()
    size = (folder / "shard.00000.mds").stat().st_size
    for name in ("crc99", "shake_128"):
        raw = {"basename": "shard.00000.mds", "bytes": size, "hashes": {name: ""}}
        change(folder, 0, raw_data=raw)
        with refused(volume, UsageError, f"hash {name} is unknown"):
            import_all(volume, folder)


def test_one_folder_with_an_index_is_wanted(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"index.json: there is no such file"):
        MdsOptions().open([str(tmp_path)])
    with pytest.raises(UsageError, match="expected one folder of shards, got 2"):
        MdsOptions().open([str(tmp_path), str(tmp_path)])
