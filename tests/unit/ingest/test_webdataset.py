"""WebDataset shards by keys: written by webdataset itself, in several compressions, and damaged."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset

from dlfs.errors import FormatError, TruncatedError, UsageError
from dlfs.ingest.formats.webdataset import WebDatasetOptions, split_key
from dlfs.ingest.importer import import_dataset, open_source
from dlfs.volume.volume import Volume
from tests.support.files import cut, flip_bit, tar
from tests.unit.ingest.taking import import_all, import_by_command, refused, take

COUNT = 40
IMAGES = [bytes([i]) * (i * 50) for i in range(COUNT)]


def members(i: int) -> dict[str, bytes]:
    """Return the members of one key, by extension."""
    return {
        "jpg": IMAGES[i],
        "cls": b"%d" % (i % 10),
        "txt": f"caption {i}".encode(),
        "json": json.dumps({"good": i % 2 == 0, "size": {"width": i / 2}, "tags": []}).encode(),
    }


def attributes(i: int) -> dict[str, Any]:
    return {
        "cls": i % 10,
        "txt": f"caption {i}",
        "json.good": i % 2 == 0,
        "json.size.width": i / 2,
    }


def write(path: Path, files: dict[str, bytes] | None = None) -> Path:
    """An archive of files, by default of all keys."""
    if files is None:
        keys = range(COUNT)
        files = {f"d/{i:04d}.{name}": data for i in keys for name, data in members(i).items()}
    data = tar(*files.items())
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


OPTIONS = {"attributes": "cls,txt,json.good,json.size.width"}
WANT = {f"d/{i:04d}.jpg": (IMAGES[i], attributes(i)) for i in range(COUNT)}


def take_webdataset(path: Path, **options: Any) -> Any:
    return take(open_source(path, format_name="webdataset", options=options))


@pytest.mark.parametrize("suffix", [".tar", ".tar.gz"])
def test_members_become_attributes_of_their_key(
    volume: Volume, tmp_path: Path, suffix: str
) -> None:
    path = write(tmp_path / f"x{suffix}")
    assert take_webdataset(path, **OPTIONS) == WANT
    import_dataset(volume, open_source(path, format_name="webdataset", options=OPTIONS), "n")
    with volume["n"] as dataset:
        for index, name in enumerate(dataset.paths()):
            data, values = WANT[name.decode()]
            assert dataset[index] == data
            for key, value in values.items():
                assert dataset.column(key, [index])[0] == value
    command = f"{path} V -f webdataset -o attributes=cls,txt,json.good"
    assert import_by_command(tmp_path, command) == {key: data for key, (data, _) in WANT.items()}


def test_what_webdataset_writes_is_read(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset", reason="webdataset is not installed")
    with webdataset.TarWriter(str(tmp_path / "x.tar")) as writer:
        for i in range(COUNT):
            writer.write({"__key__": f"d/{i:04d}", **members(i)})
    assert take_webdataset(tmp_path / "x.tar", **OPTIONS) == WANT


def test_all_other_members_are_samples_or_one_extension_is(tmp_path: Path) -> None:
    path = write(
        tmp_path / "x.tar", {"a.jpg": b"1", "a.seg.png": b"2", "a.cls": b"3", "b.cls": b"4"}
    )
    assert take_webdataset(path, attributes="cls") == {
        "a.jpg": (b"1", {"cls": 3}),
        "a.seg.png": (b"2", {"cls": 3}),
    }
    source = open_source(
        path, format_name="webdataset", options={"attributes": "cls", "column": ".JPG"}
    )
    assert take(source) == {"a.jpg": (b"1", {"cls": 3})}
    assert source.skipped == {"member of extension 'seg.png'": 1}
    assert len(take_webdataset(path)) == 4


def test_shards_come_by_pattern_and_by_folder_and_with_prefixes(tmp_path: Path) -> None:
    for part in range(3):
        write(tmp_path / f"s-{part}.tar", {f"{part}.jpg": b"%d" % part, f"{part}.cls": b"1"})
    options = {"attributes": "cls", "prefix_shards": True}
    want = {f"s-{part}/{part}.jpg": (b"%d" % part, {"cls": 1}) for part in range(3)}
    assert take_webdataset(tmp_path, **options) == want
    assert take_webdataset(tmp_path / "s-{0..2}.tar", **options) == want


@pytest.mark.parametrize(
    ("path", "key", "extension"),
    [
        (b"a/b.c/d.jpg", b"a/b.c/d", "jpg"),
        (b"d.SEG.png", b"d", "seg.png"),
        (b"a/b__c__.jpg", b"a/b__c__", "jpg"),
        (b"a/.hidden", b"a/", "hidden"),
    ],
)
def test_keys_end_at_the_first_dot_of_the_name(path: bytes, key: bytes, extension: str) -> None:
    assert split_key(path) == (key, extension)


def test_members_without_a_key_are_left_out_as_by_webdataset(tmp_path: Path) -> None:
    files = {
        "README": b"", "._a.jpg": b"", "a.jpg": b"1", "d/.hidden": b"", "__meta__/x.json": b"",
        "d/__info__": b"", "a.b.jpg": b"2", "d.e/f.jpg": b"3", "d.e/g": b"",
    }  # fmt: skip
    path = write(tmp_path / "x.tar", files)
    source = open_source(path, format_name="webdataset")
    got = take(source)
    assert set(got) == {"a.jpg", "a.b.jpg", "d.e/f.jpg", "d/.hidden"}
    left_out = set(files) - set(got)
    assert source.skipped == {f"member without a key: {name}": 1 for name in left_out}
    url = {"url": "x", "stream": io.BytesIO(path.read_bytes())}
    expand, group = webdataset.tariterators.tar_file_expander, webdataset.tariterators.group_by_keys
    samples = list(group(expand([url])))
    names = [(one["__key__"], name) for one in samples for name in one if name[:2] != "__"]
    assert {f"{key}.{name}" for key, name in names} == set(got)


def test_members_that_only_later_keys_have_are_not_dropped(tmp_path: Path) -> None:
    path = write(tmp_path / "x.tar", {"a.jpg": b"1", "b.jpg": b"2", "b.txt": b"two"})
    for fields in ("*", "jpg,*", "jpg,t*"):
        with pytest.raises(FormatError, match=r"key b: expected the members .*got txt too|t\*"):
            take_webdataset(path, fields=fields)
    source = open_source(path, format_name="webdataset", options={"fields": "jpg"})
    assert len(take(source)) == 2
    assert source.skipped == {"member of extension 'txt', which is no field": 1}


def test_what_is_no_file_is_left_out(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        for name, kind in (("d", tarfile.DIRTYPE), ("d/l", tarfile.SYMTYPE), ("a.x", b"0")):
            header = tarfile.TarInfo(name)
            header.type = kind
            archive.addfile(header)
    source = open_source(tmp_path / "x.tar", format_name="webdataset")
    assert take(source) == {"a.x": (b"", {})}
    assert source.skipped == {"member that is no file": 1}


# ---- damage --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a.jpg": b""}, "key a: expected a member of extension 'cls', got "),
        ({"a.jpg": b"", "a.cls": b"x"}, "key a: attribute cls: expected a whole number: .*'x'"),
        ({"a.jpg": b"", "a.cls": b"\xff"}, "key a: attribute cls: expected a whole number"),
        ({"a.jpg": b"", "a.JPG": b"", "a.cls": b""}, "key a: expected one member of extension"),
        ({"a.jpg": b"", "b.cls": b"1"}, "key a: expected a member of extension 'cls'"),
    ],
)
def test_keys_that_do_not_fit_are_reported(
    volume: Volume, tmp_path: Path, files: dict[str, bytes], message: str
) -> None:
    path = write(tmp_path / "x.tar", files)
    with refused(volume, FormatError, f"import {path}: {message}"):
        import_all(volume, path, format_name="webdataset", options={"attributes": "cls"})


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("json.none", "expected a field of JSON: 'none'"),
        ("json.tags", "expected a field of JSON: got list"),
        ("json.good.more", "expected a field of JSON"),
        ("txt.more", "expected a field of JSON"),
    ],
)
def test_fields_that_are_not_there_are_reported(
    volume: Volume, tmp_path: Path, field: str, message: str
) -> None:
    path = write(tmp_path / "x.tar")
    with refused(volume, FormatError, f"{path}: key d/0000: attribute {field}: {message}"):
        import_all(volume, path, format_name="webdataset", options={"attributes": field})


def test_values_of_several_types_are_reported(volume: Volume, tmp_path: Path) -> None:
    path = write(
        tmp_path / "x.tar", {"a.x": b"", "a.json": b'{"v":1}', "b.x": b"", "b.json": b'{"v":"1"}'}
    )
    with refused(
        volume, FormatError, "attribute json.v: expected values of one type, got int, str"
    ):
        import_all(volume, path, format_name="webdataset", options={"attributes": "json.v"})


@pytest.mark.parametrize("suffix", [".tar", ".tar.gz"])
def test_a_cut_archive_is_reported(volume: Volume, tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"x{suffix}")
    cut(path, path.stat().st_size // 2)
    with refused(volume, TruncatedError, rf"{path}: at byte \d+: the archive ends too early"):
        import_all(volume, path, format_name="webdataset", options=OPTIONS)


def test_a_flipped_bit_is_reported(volume: Volume, tmp_path: Path) -> None:
    path = write(tmp_path / "x.tar")
    flip_bit(path, 3)
    with refused(volume, FormatError, rf"{path}: at byte \d+: the archive is damaged"):
        import_all(volume, path, format_name="webdataset", options=OPTIONS)


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.zip").touch()
    with pytest.raises(UsageError, match="expected the name of an archive"):
        WebDatasetOptions().open([str(tmp_path / "x.zip")])
    with pytest.raises(UsageError, match="expected an archive in the folder, got none"):
        WebDatasetOptions().open([str(tmp_path)])


# ---- fields --------------------------------------------------------------------------------------


def npy(array: Any) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def test_the_members_of_a_key_become_fields(volume: Volume, tmp_path: Path) -> None:
    masks = [np.full((1 + i % 3, 2), i, np.uint8, order="F") for i in range(COUNT)]
    files = {}
    for i in range(COUNT):
        named = {**members(i), "mask.npy": npy(masks[i]), "other": b"left out"}
        files |= {f"d/{i:04d}.{name}": data for name, data in named.items()}
    path = write(tmp_path / "x.tar", files)
    options = {"fields": "jpg,mask.npy,CLS,txt", "attributes": "json.good"}
    source = open_source(path, format_name="webdataset", options=options)
    report = import_dataset(volume, source, "n")
    assert report.skipped["member of extension 'other', which is no field"] == COUNT
    with volume["n"] as dataset:
        assert dataset.fields == {
            "jpg": "bytes",
            "mask.npy": "|u1[?,?]",
            "cls": "<i8[]",
            "txt": "text",
        }
        assert dataset.paths() == [b"d/%04d" % i for i in range(COUNT)]
        batch = dataset[:]
        assert batch["jpg"].to_list() == IMAGES
        assert batch["txt"] == [f"caption {i}" for i in range(COUNT)]
        assert batch["cls"].tolist() == [i % 10 for i in range(COUNT)]
        assert all(map(np.array_equal, batch["mask.npy"], masks))
        assert dataset.column("json.good").tolist() == [i % 2 == 0 for i in range(COUNT)]


@pytest.mark.parametrize(
    ("files", "fields", "match"),
    [
        ({"a.jpg": b"x"}, "jpg,cls", "key a: expected a member of extension 'cls', got "),
        ({"a.cls": b"x"}, "cls", "key a: field cls: invalid literal"),
        ({"a.cls": b"9" * 30}, "cls", "key a: field cls"),
        ({"a.txt": b"\xff"}, "txt", "key a: field txt: 'utf-8'"),
        ({"a.npy": b"\x93NUMPY"}, "npy", "key a: field npy"),
        ({"a.npy": npy(np.zeros(3))[:-1]}, "npy", "key a: field npy"),
        ({"a.npy": npy(np.array([None]))}, "npy", "key a: field npy: an array of Python objects"),
        ({"a.npy": npy(1), "b.npy": npy(0.5)}, "npy", "key b: field 'npy': expected <i8"),
        ({"a.npy": npy(np.zeros(1, "i4,i4"))}, "npy", "key a: field 'npy': expected bytes, text"),
    ],
)
def test_damaged_fields_are_refused(
    volume: Volume, tmp_path: Path, files: dict[str, bytes], fields: str, match: str
) -> None:
    path = write(tmp_path / "x.tar", files)
    with refused(volume, FormatError, match):
        source = open_source(path, format_name="webdataset", options={"fields": fields})
        import_dataset(volume, source, "n")


@pytest.mark.parametrize("options", [{"column": "jpg"}, {"fields": "jpg,.JPG"}])
def test_fields_are_of_different_extensions(tmp_path: Path, options: dict[str, str]) -> None:
    path = write(tmp_path / "x.tar")
    with pytest.raises(UsageError, match="fields of different extensions and no column"):
        open_source(path, format_name="webdataset", options={"fields": "jpg", **options})
