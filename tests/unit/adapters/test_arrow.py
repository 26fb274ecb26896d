"""Tables of samples: every column equals what the dataset itself returns."""

from __future__ import annotations

import pickle

import numpy as np
import pyarrow
import pytest

import dlfs
from dlfs.adapters.arrow import Part, TableFormat, divide, tables
from dlfs.base.units import MIB
from dlfs.epoch.options import EpochOptions
from dlfs.errors import UsageError
from tests.support.volumes import new_volume
from tests.unit.adapters.conftest import COUNT

FIELDS = {
    "image": "bytes",
    "caption": "text",
    "label": "<i8[]",
    "box": ">i2[2,2]",
    "points": "<f4[?,2]",
    "mask": "|u1[?,?]",
}


def rows_of(found):
    return [row for table in found for row in table.to_pylist()]


@pytest.fixture(scope="module")
def scenes_path(tmp_path_factory):
    """A volume with the dataset ``scenes``: fields of every kind, and attributes."""
    path = new_volume(tmp_path_factory.mktemp("scenes") / "volume.img", size_bytes=32 * MIB)
    with dlfs.open(str(path)) as volume, volume.writer("scenes", fields=FIELDS) as writer:
        for number in range(60):
            writer.add(f"é/{number:03}", scene(number), attributes={"light": number / 4})
    return path


def scene(number):
    return {
        "image": bytes([number]) * (number % 20),
        "caption": f"scene {number}",
        "label": number,
        "box": np.arange(4, dtype=">i2").reshape(2, 2) + number,
        "points": np.full((number % 3, 2), number, np.float32),
        "mask": np.full((number % 4, 1 + number % 2), number, np.uint8),
    }


@pytest.fixture
def scenes(scenes_path):
    with dlfs.open(str(scenes_path)) as volume, volume["scenes"] as opened:
        yield opened


def test_all_columns_of_plain_samples(numbers, ordered):
    found = list(tables(numbers))
    assert found[0].schema == TableFormat.of(numbers, None).schema()
    rows = rows_of(found)
    assert [row["index"] for row in rows] == numbers.sequence(shuffle=None).indices().tolist()
    assert len(rows) == COUNT
    for row in rows:
        assert row["sample"] == ordered[row["index"]]
        assert row["path"].encode() == numbers.path(row["index"])


def test_fields_and_attributes(scenes):
    found = list(tables(scenes))
    schema = TableFormat.of(scenes, None).schema()
    assert found[0].schema == schema
    assert schema.names == ["index", "path", *scene(0), "light"]
    assert str(schema.field("points").type) == "list<item: fixed_size_list<item: float>[2]>"
    for row in rows_of(found):
        number = row.pop("index")
        assert (row.pop("path"), row.pop("light")) == (f"é/{number:03}", number / 4)
        expected = {
            name: value.tolist() if isinstance(value, np.ndarray) else value
            for name, value in scene(number).items()
        }
        assert row == expected


def test_chosen_columns_and_samples(scenes):
    wanted = ["light", "label"]
    found = rows_of(tables(scenes, columns=wanted, where=[5, 50, 7], shuffle="global", seed=3))
    assert [*found[0]] == wanted
    order = scenes.sequence(where=[5, 50, 7], seed=3).indices().tolist()
    assert [row["label"] for row in found] == order
    assert next(tables(scenes, columns=["caption"])).column_names == ["caption"]
    with pytest.raises(
        UsageError, match=r"expected columns out of \['index', 'path', 'image'.*'x'"
    ):
        tables(scenes, columns=["x"])


@pytest.mark.parametrize("where", [range(100, 140), [0, 299], [7]])
def test_paths_of_near_and_far_samples(numbers, where):
    found = rows_of(tables(numbers, columns=["index", "path"], where=where))
    assert {row["index"]: row["path"].encode() for row in found} == {
        index: numbers.path(index) for index in where
    }


def test_columns_of_the_directory_read_no_sample(scenes):
    before = scenes.stats()
    found = rows_of(tables(scenes, columns=["index", "path", "light"]))
    assert sorted(row["light"] for row in found) == [number / 4 for number in range(60)]
    assert scenes.stats() == before


def test_bytes_are_not_copied_and_stay_valid(numbers, ordered):
    first = next(tables(numbers, columns=["index", "sample"]))
    assert first.schema.field("sample").type == pyarrow.binary_view()
    numbers.read(range(COUNT))  # would reuse the memory
    assert [row["sample"] for row in first.to_pylist()] == [
        ordered[index] for index in first["index"].to_pylist()
    ]


def test_an_attribute_takes_the_place_of_a_column(tmp_path):
    with dlfs.open(new_volume(tmp_path / "volume.img", size_bytes=16 * MIB)) as volume:
        with volume.writer("numbers") as writer:
            for number in range(5):
                writer.add(b"%d" % number, b"x", attributes={"path": f"own {number}", "index": 7})
        with volume["numbers"] as opened:
            rows = rows_of(tables(opened))
    assert sorted(row["path"] for row in rows) == [f"own {number}" for number in range(5)]
    assert {row["index"] for row in rows} == {7}


def test_what_arrow_cannot_express(tmp_path):
    path = str(tmp_path / "volume.img")
    dlfs.format_volume(path, size_bytes=16 * MIB)
    with dlfs.open(path) as volume:
        with volume.writer("waves") as writer:
            writer.add(b"\xff", {"wave": np.ones(3, np.complex64), "label": 1})
        with volume["waves"] as opened:
            with pytest.raises(UsageError, match=r"types that Arrow has, got 'wave' of type <c8\["):
                tables(opened)
            with pytest.raises(UsageError, match="expected paths in UTF-8"):
                list(tables(opened, columns=["path", "label"]))
            assert rows_of(tables(opened, columns=["label"])) == [{"label": 1}]


@pytest.mark.parametrize("count", [1, 2, 7, 60, 100])
@pytest.mark.parametrize("where", [None, [1, 2, 3, 5, 8, 13, 21, 34, 55]])
def test_parts_are_the_whole_epoch(scenes, count, where):
    options = EpochOptions(where=where, shuffle="global", seed=7, epoch=2)
    parts = divide(TableFormat.of(scenes, ["label"]), options, count)
    expected = scenes.order_epoch(options).indices().tolist()
    assert len(parts) == min(count, len(expected))
    assert max(part.count for part in parts) - min(part.count for part in parts) <= 1
    loaded: list[Part] = pickle.loads(pickle.dumps(parts))
    found = [
        row["label"] for part in loaded for table in part.tables() for row in table.to_pylist()
    ]
    assert found == expected
    assert sum(part.sample_bytes() for part in parts) == scenes.lengths(expected).sum()


def test_no_samples(scenes):
    assert list(tables(scenes, where=[])) == []


def test_views(scenes, numbers):
    train, test = dlfs.split(scenes, 0.5)
    labels = [row["label"] for view in (train, test) for row in rows_of(tables(view))]
    assert sorted(labels) == list(range(60))
    both = dlfs.concat([numbers, numbers])
    assert len(rows_of(tables(both, columns=["sample"]))) == 2 * COUNT
