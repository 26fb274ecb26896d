"""The parts of a source, read by other processes, are what its blocks say, sample by sample."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlfs.base.arguments import Layout
from dlfs.base.units import KIB
from dlfs.errors import DeviceError, DlfsError, FormatError
from dlfs.format.journal import Cursor
from dlfs.ingest import order as order_module
from dlfs.ingest.attributes import ArrayRule, AttributedSource, PathRule, TableRule
from dlfs.ingest.importer import open_source
from dlfs.ingest.order import PartSize, part_ends
from dlfs.ingest.parts import open_part
from dlfs.ingest.source import Source
from tests.unit.ingest.part_reading import read_all, read_elsewhere, read_part
from tests.unit.ingest.step_sources import SOURCES, Made
from tests.unit.ingest.test_steps import everything, fresh, no_pauses, run

PART_BYTES = 200 * KIB
LAYOUTS: list[Layout] = ["shuffled", "path"]

__all__ = ["no_pauses"]

DIVIDED = {
    "folder": PART_BYTES,
    "list": PART_BYTES,
    "webdataset": PART_BYTES,
    "webdataset-nulls": PART_BYTES,
    "webdataset-fields": PART_BYTES,
    "tfrecord.gz": PART_BYTES,
    "parquet": PART_BYTES,
    "parquet-nulls": PART_BYTES,
    "arrow-file": PART_BYTES,
    "arrow-stream": PART_BYTES,
    "jsonl": PART_BYTES,
    "tar": PART_BYTES,
    "zip": PART_BYTES,
    "tfrecord": PART_BYTES,
    "examples": PART_BYTES,
}
"""Size of the parts of sources that can be divided, in bytes."""


def opened(made: Made, **options: Any) -> Source:
    source = open_source(made.path, format_name=made.format_name, options=made.options, **options)
    source.buffer_bytes = 64 * KIB
    return source


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", DIVIDED)
def test_parts_are_what_the_blocks_say(tmp_path: Path, name: str, layout: Layout) -> None:
    made, part_bytes = SOURCES[name](tmp_path), DIVIDED[name]
    with closing(opened(made)) as source:
        division = source.divide(layout=layout, seed=7, part_bytes=part_bytes)
        assert division is not None
        source.part_bytes = part_bytes
        parts, ends = read_all(source, layout, 7)
        assert len(division) == len(parts) > 1
        assert ends == [*range(len(parts) - 1)]
        assert read_elsewhere(division, tmp_path, layout, 7) == parts
    with closing(opened(made)) as source:
        whole, _ = read_all(source, layout, 7)
    assert sorted(whole[0], key=lambda one: one[0]) == sorted(
        (one for part in parts for one in part), key=lambda one: one[0]
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", DIVIDED)
def test_a_source_of_one_part_is_read_as_without_parts(
    tmp_path: Path, name: str, layout: Layout
) -> None:
    made = SOURCES[name](tmp_path)
    with closing(opened(made)) as source:
        whole, _ = read_all(source, layout, 3)
    with closing(opened(made)) as source:
        division = source.divide(layout=layout, seed=3, part_bytes=1 << 30)
        assert division is not None
        assert len(division) == 1
        source.part_bytes = 1 << 30
        assert read_all(source, layout, 3) == (whole, [])
        assert [read_part(division.describe(0), layout, 3)] == whole


def test_sources_that_are_not_divided_say_why(tmp_path: Path) -> None:
    for name in ("tar.gz", "lmdb", "mds"):
        (tmp_path / name).mkdir()
        with closing(opened(SOURCES[name](tmp_path / name))) as source:
            assert source.divide(layout="path", seed=0, part_bytes=PART_BYTES) is None
            assert source.undivided


def folder(place: Path, sizes: list[int]) -> Path:
    place.mkdir(exist_ok=True)
    for number, size in enumerate(sizes):
        name = b"%03d\xff" % number if number % 3 else b"%03d" % number
        (place / os.fsdecode(name)).write_bytes(random.Random(number).randbytes(size))
    return place


def test_parts_of_several_folders_and_class_folders(tmp_path: Path) -> None:
    for one in ("a", "b"):
        folder(tmp_path / one, [30_000] * 20)
    both = [tmp_path / "b", tmp_path / "a"]
    for paths, name in ((both, "folder"), (tmp_path, "imagefolder")):
        with closing(open_source(paths, format_name=name)) as source:
            source.buffer_bytes, source.part_bytes = 64 * KIB, PART_BYTES
            division = source.divide(layout="shuffled", seed=1, part_bytes=PART_BYTES)
            assert division is not None
            parts, _ = read_all(source, "shuffled", 1)
            found = [read_part(division.describe(n), "shuffled", 1) for n in range(len(division))]
            assert found == parts
            assert [sum(len(data) for _, data, _ in part) for part in parts] == [
                *division.part_bytes
            ]


def test_a_part_goes_on_at_a_cursor_of_the_whole_source(tmp_path: Path) -> None:
    with closing(open_source(folder(tmp_path / "f", [20_000] * 40))) as source:
        source.buffer_bytes, source.part_bytes = 64 * KIB, PART_BYTES
        division = source.divide(layout="shuffled", seed=1, part_bytes=PART_BYTES)
        assert division is not None
        parts, _ = read_all(source, "shuffled", 1)
    first = len(parts[0])
    with closing(open_part(division.describe(1))) as part:
        cursor = Cursor({"position": first + 3}, 3)
        assert part.seek(5, cursor) == 5
        assert read_all(part, "shuffled", 1)[0] == [parts[1][5:]]
    with closing(open_part(division.describe(1))) as part:
        assert part.seek(4) == 4
        assert read_all(part, "shuffled", 1)[0] == [parts[1][4:]]


def test_a_part_has_no_parts(tmp_path: Path) -> None:
    with closing(open_source(folder(tmp_path / "f", [10]))) as source:
        division = source.divide(layout="path", seed=0, part_bytes=1)
    assert division is not None
    with closing(open_part(division.describe(0))) as part:
        assert part.divide(layout="path", seed=0, part_bytes=1) is None


@pytest.mark.parametrize("name", ["folder", "parquet"])
def test_a_file_that_changed_since_the_division_is_an_error(tmp_path: Path, name: str) -> None:
    made = SOURCES[name](tmp_path)
    with closing(opened(made)) as source:
        division = source.divide(layout="path", seed=0, part_bytes=PART_BYTES)
    assert division is not None
    for file in made.path.rglob("*"):
        if file.is_file():
            os.utime(file, ns=(1, 1))
    with pytest.raises(DeviceError, match="changed during the import"):
        read_part(division.describe(0), "path", 0)
    (changed,) = set(made.path.rglob("0.parquet" if name == "parquet" else "000.bin"))
    changed.unlink()
    with pytest.raises(DlfsError):
        read_part(division.describe(0), "path", 0)


def test_bad_files_of_a_part_are_left_out_as_the_caller_allows(tmp_path: Path) -> None:
    place = folder(tmp_path / "f", [20_000] * 40)
    with closing(open_source(place)) as source:
        source.buffer_bytes = 64 * KIB
        division = source.divide(layout="path", seed=0, part_bytes=PART_BYTES)
    assert division is not None
    whole = read_part(division.describe(0), "path", 0)
    (place / "003").unlink()
    with pytest.raises(DeviceError, match="changed during the import"):
        read_part(division.describe(0), "path", 0)
    found = read_part(division.describe(0), "path", 0, skip_bad=1)
    assert found == [one for one in whole if one[0] != b"003"]


def test_attributes_of_paths_and_arrays_go_with_the_parts(tmp_path: Path) -> None:
    place = folder(tmp_path / "f", [20_000] * 40)
    rules = [PathRule("digit", "[0-9]"), ArrayRule("u1", "20000")]
    with closing(AttributedSource(open_source(place), rules)) as source:
        source.buffer_bytes, source.part_bytes = 64 * KIB, PART_BYTES
        division = source.divide(layout="shuffled", seed=1, part_bytes=PART_BYTES)
        assert division is not None
        parts, _ = read_all(source, "shuffled", 1)
    assert [read_part(division.describe(n), "shuffled", 1) for n in range(len(division))] == parts
    assert parts[0][0][2]["digit"] == "0"


def test_a_source_with_attributes_of_a_table_says_why_it_is_not_divided(tmp_path: Path) -> None:
    place = folder(tmp_path / "f", [10])
    (tmp_path / "t.csv").write_text("path,x\n000,1\n")
    with closing(AttributedSource(open_source(place), [TableRule(str(tmp_path / "t.csv"))])) as one:
        assert one.divide(layout="path", seed=0, part_bytes=1) is None
        assert "table" in one.undivided


# ---- descriptions that are none ------------------------------------------------------------------


def described(tmp_path: Path) -> bytes:
    with closing(open_source(folder(tmp_path / "f", [10, 20]))) as source:
        division = source.divide(layout="path", seed=0, part_bytes=100)
    assert division is not None
    return division.describe(0)


WRONG: dict[str, Callable[[dict[str, Any]], Any]] = {
    "another type": lambda part: part.update(type="Exception"),
    "no folder": lambda part: part.pop("folder"),
    "folder of no path": lambda part: part.update(folder=b"relative"),
    "NUL in the folder": lambda part: part.update(folder=b"/tmp\0"),
    "paths without an end": lambda part: part.update(paths=b"a\0b"),
    "an empty path": lambda part: part.update(paths=b"a\0\0"),
    "more paths": lambda part: part.update(paths=b"a\0b\0c\0"),
    "fewer sample paths": lambda part: part.update(sample_paths=b"a\0"),
    "sizes of objects": lambda part: part["sizes"].update(dtype="O"),
    "sizes of another type": lambda part: part["sizes"].update(dtype="<i8"),
    "sizes beyond all": lambda part: part["sizes"].update(data=b"\xff" * 16),
    "cut sizes": lambda part: part["sizes"].update(data=b"12345"),
    "fewer times": lambda part: part["modified_ns"].update(shape=[1], data=bytes(8)),
    "no dtype": lambda part: part["sizes"].update(dtype="no such"),
    "shape without end": lambda part: part["sizes"].update(shape=[1 << 62]),
    "an attribute of one": lambda part: part.update(
        attributes={b"x": {"dtype": "O", "shape": [1], "data": [b"a"]}}
    ),
    "no buffer": lambda part: part.update(buffer_bytes=0),
    "a negative position": lambda part: part.update(first=-1),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_hostile_description_is_an_error(tmp_path: Path, name: str) -> None:
    part = msgspec.msgpack.decode(described(tmp_path), strict=False)
    WRONG[name](part)
    with pytest.raises(FormatError, match="open a part of a source"):
        open_part(msgspec.msgpack.encode(part))


@given(st.binary(max_size=200))
def test_bytes_that_are_no_description_are_an_error(data: bytes) -> None:
    with pytest.raises(FormatError, match="open a part of a source"):
        open_part(data)


# ---- where parts end -----------------------------------------------------------------------------

SIZES = st.lists(st.integers(0, 300), max_size=60)


@settings(deadline=None)
@given(
    sizes=SIZES,
    part_bytes=st.integers(1, 600),
    block_bytes=st.integers(1, 400),
    whole_blocks=st.booleans(),
    disk_bytes=st.none() | st.integers(1, 40_000),
)
def test_parts_end_where_they_are_full(
    sizes: list[int], part_bytes: int, block_bytes: int, whole_blocks: bool, disk_bytes: int | None
) -> None:
    array = np.array(sizes, np.uint64)
    limits = PartSize(part_bytes, block_bytes, whole_blocks, disk_bytes)
    ends = part_ends(array, np.zeros(len(sizes), np.int64), limits)
    bounds = [0, *ends, len(sizes)]
    assert bounds == sorted(set(bounds)) or not sizes
    for first, last in pairwise(bounds):
        part = sizes[first:last]
        if not whole_blocks:
            assert sum(part[:-1]) < part_bytes
        if disk_bytes is None and last < len(sizes):
            assert sum(part) >= part_bytes


def test_the_description_of_a_part_has_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(order_module, "DESCRIBED_BYTES", 100)
    with closing(open_source(folder(tmp_path / "f", [10] * 50))) as source:
        source.part_bytes = 1 << 20
        for layout in LAYOUTS:
            division = source.divide(layout=layout, seed=1, part_bytes=1 << 20)
            assert division is not None
            assert len(division) > 4
            parts, _ = read_all(source, layout, 1)
            found = [read_part(division.describe(n), layout, 1) for n in range(len(division))]
            assert found == parts


# ---- imports of all parts ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["webdataset-fields", "webdataset-nulls", "parquet-nulls", "jsonl"]
)
def test_a_killed_import_of_parts_goes_on_to_the_same_dataset(tmp_path: Path, name: str) -> None:
    made = SOURCES[name](tmp_path)
    whole, killed = fresh(tmp_path / "whole.img"), fresh(tmp_path / "killed.img")
    report = run(whole, opened(made), step_bytes=PART_BYTES)
    assert report is not None
    found, kill_at = None, 2
    while found is None:
        found = run(killed, opened(made), kill_at=kill_at, step_bytes=PART_BYTES)
        kill_at += 5
    assert everything(killed) == everything(whole)
    assert found.skipped == report.skipped


WRONG_INDEX: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no files": lambda part: part.update(files=[]),
    "a relative file": lambda part: part["files"][0].__setitem__(0, b"x.tar"),
    "another format": lambda part: part["opener"].update(format_name=b"parquet"),
    "negative places": lambda part: part["places"].update(
        data=b"\xff" * len(part["places"]["data"])
    ),
    "places of other files": lambda part: part["places"].update(
        data=b"\x09\0\0\0\0\0\0\0" * (len(part["places"]["data"]) // 8)
    ),
    "fewer places": lambda part: part["places"].update(
        shape=[1, 3], data=part["places"]["data"][:24]
    ),
    "segments outside of samples": lambda part: part["segments"].update(
        shape=[1, 5], data=np.array([0, 1, 1 << 40, 0, 5]).tobytes()
    ),
    "fewer paths": lambda part: part.update(paths=b"a\0"),
}


@pytest.mark.parametrize("name", WRONG_INDEX)
def test_a_hostile_description_of_an_index_is_an_error(tmp_path: Path, name: str) -> None:
    with closing(opened(SOURCES["tar"](tmp_path))) as source:
        division = source.divide(layout="path", seed=0, part_bytes=PART_BYTES)
    assert division is not None
    part = msgspec.msgpack.decode(division.describe(0))
    WRONG_INDEX[name](part)
    with pytest.raises(FormatError, match="open a part of a source"):
        open_part(msgspec.msgpack.encode(part))


def test_a_part_of_an_index_goes_on_at_a_cursor_of_the_whole_source(tmp_path: Path) -> None:
    with closing(opened(SOURCES["zip"](tmp_path))) as source:
        source.part_bytes = PART_BYTES
        division = source.divide(layout="shuffled", seed=1, part_bytes=PART_BYTES)
        assert division is not None
        parts, _ = read_all(source, "shuffled", 1)
    first = len(parts[0])
    with closing(open_part(division.describe(1))) as part:
        assert part.seek(5, Cursor({"position": first + 3}, 3)) == 5
        assert read_all(part, "shuffled", 1)[0] == [parts[1][5:]]
