"""Samples with fields in a volume: written, read, chosen, in epochs and views; damaged columns."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dlfs
from dlfs.base.units import MIB
from dlfs.errors import FormatError, UsageError
from tests.support.volumes import new_volume
from tests.support.writers import other_writer

COUNT = 60
TYPES = {
    "image": "bytes",
    "caption": "text",
    "label": "<i8[]",
    "box": "<f4[4]",
    "mask": "|u1[?,?]",
    "points": "<f4[?,3]",
}


def sample_of(number: int) -> dict[str, Any]:
    return {
        "image": bytes([number]) * (number * 7 % 400),
        "caption": f"a cät {number}",
        "label": number,
        "box": np.arange(4, dtype="<f4") + number,
        "mask": np.full((1 + number % 3, 2 + number % 4), number, np.uint8),
        "points": np.full((number % 5, 3), number, "<f4"),
    }


def path_of(number: int) -> str:
    return f"{number:03}"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = new_volume(str(tmp_path_factory.mktemp("fields") / "volume.img"), size_bytes=32 * MIB)
    with dlfs.open(made) as volume:
        with volume.writer("fields", fields=TYPES) as writer:
            for number in range(COUNT):
                writer.add(path_of(number), sample_of(number), attributes={"even": number % 2 == 0})
        with volume.writer("more", fields=TYPES) as writer:
            for number in range(COUNT, 2 * COUNT):
                writer.add(path_of(number), sample_of(number))
        with volume.writer("other") as writer:
            writer.add("x", {"image": b"x", "weights": [0.5, 1.5]})
        with volume.writer("bytes") as writer:
            writer.add("x", b"x")
        with volume.writer("empty", fields=TYPES):
            pass
    return made


@pytest.fixture
def volume(path: str) -> Iterator[dlfs.Volume]:
    with dlfs.open(path, memory_bytes=4 * MIB) as opened:
        yield opened


def check(batch: dlfs.Batch, numbers: list[int]) -> None:
    """Check every field of a batch against the samples that were written."""
    expected = [sample_of(number) for number in numbers]
    assert isinstance(batch["image"], dlfs.Batch)
    assert batch["image"].to_list() == [one["image"] for one in expected]
    assert batch["caption"] == [one["caption"] for one in expected]
    assert batch["label"].tolist() == numbers
    assert batch["box"].shape == (len(numbers), 4)
    assert np.array_equal(batch["box"], [one["box"] for one in expected])
    for name in ("mask", "points"):
        for got, one in zip(batch[name], expected, strict=True):
            assert np.array_equal(got, one[name])
            assert got.dtype == one[name].dtype


def test_fields_are_read(volume: dlfs.Volume) -> None:
    with volume["fields"] as dataset:
        assert dataset.fields == TYPES
        assert list(dataset.fields) == list(TYPES)
        assert dataset.column("even").sum() == COUNT // 2
        numbers = [5, 0, 59, 5]
        batch = dataset.read(numbers)
        check(batch, numbers)
        values, offsets = batch.ragged("points")
        assert offsets.tolist() == [0, 0, 0, 4, 4]
        assert np.array_equal(values, np.full((4, 3), 59, "<f4"))
        assert batch.ragged("box")[0].shape == (16,)


def test_a_field_of_bytes_shares_the_memory_of_the_batch(volume: dlfs.Volume) -> None:
    with volume["fields"] as dataset:
        batch = dataset.read([7, 8])
        images = batch["image"]
        assert np.shares_memory(images.data, batch.data)
        assert np.shares_memory(batch["mask"][0], batch.data)
        assert images.pack()[0].tobytes() == sample_of(7)["image"] + sample_of(8)["image"]
        batch.release()
        assert images.to_list() == [sample_of(n)["image"] for n in (7, 8)]


def test_one_sample_is_a_dictionary(volume: dlfs.Volume) -> None:
    with volume["fields"] as dataset:
        sample = dataset.sample(-1)
        assert list(sample) == list(TYPES)
        expected = sample_of(COUNT - 1)
        assert bytes(sample["image"]) == expected["image"]
        assert sample["caption"] == expected["caption"]
        assert sample["label"] == COUNT - 1
        assert not sample["mask"].flags.writeable
        assert np.array_equal(sample["points"], expected["points"])
        # The sample's bytes are the fields, for readers that know none.
        assert dataset[-1].startswith(expected["image"])


def test_epochs_have_fields(volume: dlfs.Volume) -> None:
    with volume["fields"] as dataset:
        seen = []
        for batch in dataset.batches(16, seed=3):
            check(batch, batch.indices.tolist())
            seen += batch["label"].tolist()
        assert sorted(seen) == list(range(COUNT))


def test_batches_have_the_chosen_fields_only(volume: dlfs.Volume) -> None:
    with volume["fields"] as dataset:
        batches = [
            dataset.read([1, 2], fields=["label", "image"]),
            next(dataset.batches(2, order=[1, 2], fields=["label", "image"])),
        ]
        for batch in batches:
            assert list(batch.fields) == ["label", "image"]
            assert batch["label"].tolist() == [1, 2]
            assert list(batch.sample(0)) == ["label", "image"]
            with pytest.raises(UsageError, match=r"'caption'.*no such field.*'image' and 'label'"):
                batch["caption"]
        for wrong in (["nothing"], [], ["label", "label"]):
            with pytest.raises(UsageError, match="field"):
                dataset.read([1], fields=wrong)
            with pytest.raises(UsageError, match="field"):
                dataset.batches(1, fields=wrong)


def test_samples_of_bytes_have_no_fields(volume: dlfs.Volume) -> None:
    with volume["bytes"] as dataset:
        assert dataset.fields == {}
        with pytest.raises(UsageError, match="no such field; there are: none"):
            dataset[:]["image"]
        with pytest.raises(UsageError, match="there are: none"):
            dataset.sample(0)
        with pytest.raises(UsageError, match="there are: none"):
            dataset.batches(1, fields=["image"])


def test_empty_batches_have_fields(volume: dlfs.Volume) -> None:
    with volume["fields"] as dataset:
        batch = dataset.read([])
        assert batch.fields == TYPES
        assert batch["box"].shape == (0, 4)
        assert batch["caption"] == batch["mask"] == []
        assert len(batch["image"]) == 0
        assert batch.ragged("points")[0].shape == (0, 3)
        assert list(dataset.read([], fields=["label"]).fields) == ["label"]
    with volume["empty"] as dataset:
        assert dataset.fields == {}


def test_views_have_the_fields_that_all_datasets_have(volume: dlfs.Volume) -> None:
    with volume["fields"] as one, volume["more"] as two, volume["other"] as other:
        view = dlfs.concat([one, two])
        assert view.fields == TYPES
        check(view.read([3, COUNT + 3]), [3, COUNT + 3])
        assert view.sample(COUNT)["label"] == COUNT
        numbers = [batch["label"].tolist() for batch in view.batches(32, fields=["label"])]
        assert sorted(chain.from_iterable(numbers)) == list(range(2 * COUNT))
        mixed = dlfs.concat([one, other])
        assert mixed.fields == {}
        with pytest.raises(UsageError, match="expected the same ones in all samples"):
            mixed.read([0, COUNT])["image"]


def test_arrays_that_differ_elsewhere_are_not_joined(volume: dlfs.Volume) -> None:
    with volume["fields"] as dataset:
        batch = dataset[:]
        for name in ("mask", "label", "image", "caption"):
            with pytest.raises(UsageError, match=f"join field '{name}'.*first dimension only"):
                batch.ragged(name)
        same = dataset.read([0, 12])  # masks of one width
        assert same.ragged("mask")[0].shape == (2, 2)


# ---- writing -------------------------------------------------------------------------------------


def test_bytes_and_fields_are_not_mixed(tmp_path: Path) -> None:
    made = new_volume(str(tmp_path / "volume.img"), size_bytes=16 * MIB)
    one = np.zeros(1, np.int64), np.ones(1, np.int64)
    with dlfs.open(made) as volume:
        with volume.writer("a") as writer:
            writer.add("a", b"x")
            with pytest.raises(UsageError, match="'b': expected bytes as in the samples before"):
                writer.add("b", {"x": 1})
        with volume.writer("b") as writer:
            writer.add("a", {"x": 1})
            with pytest.raises(UsageError, match="'b': expected the fields x, got bytes"):
                writer.add("b", b"x")
            with pytest.raises(UsageError, match="'b': expected the fields x, got bytes"):
                writer.add_batch([b"b"], b"x", *one)
            with pytest.raises(UsageError, match=r"'b': field 'x': expected <i8\[\], got float64"):
                writer.add("b", {"x": 1.5})
            writer.add("b", {"x": 2})
        with volume.writer("c", fields={"x": "text"}) as writer:
            with pytest.raises(UsageError, match="'b': expected the fields x, got bytes"):
                writer.add("b", b"x")
            with pytest.raises(UsageError, match="expected the fields x, got 3"):
                writer.add("b", {3: "x"})
        with pytest.raises(UsageError, match="write the dataset 'd': field 'x': expected a type"):
            volume.writer("d", fields={"x": "jpeg"})
        with volume.writer("e") as writer:
            with pytest.raises(UsageError, match="'a': field 'x': expected bytes, text"):
                writer.add("a", {"x": None})
            writer.add("a", b"nothing was decided")
        with volume["b"] as dataset:
            assert dataset[:]["x"].tolist() == [1, 2]


# ---- columns from media --------------------------------------------------------------------------

JSON = '{"a":"bytes","b":"<i4[?]"}'
GOOD = {"dlfs:fields": JSON, "dlfs:field:a:bytes": 2, "dlfs:field:b:shape": "2"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dlfs:fields": "x"}, "JSON"),
        ({"dlfs:fields": '{"a":"O[]"}'}, "field 'a': expected elements"),
        ({"dlfs:field:a:bytes": None}, "read field 'a': .*no such column"),
        ({"dlfs:field:a:bytes": -1}, "field 'a': sample 0: expected a length of 0"),
        ({"dlfs:field:a:bytes": 1 << 50}, "field 'a': sample 0: expected a length of 0"),
        ({"dlfs:field:a:bytes": 13}, "field 'a': sample 0: expected an end in 12 bytes"),
        ({"dlfs:field:b:shape": None}, "read field 'b': .*no such column"),
        ({"dlfs:field:b:shape": "2,1"}, "field 'b': sample 0: expected the shape of <i4"),
        ({"dlfs:field:b:shape": "-2"}, "field 'b': sample 0: expected lengths"),
        ({"dlfs:field:b:shape": "9" * 30}, "field 'b': sample 0: expected the shape"),
        ({"dlfs:field:b:shape": "3"}, "field 'b': sample 0: expected an end in 12 bytes"),
        ({"dlfs:field:b:shape": "1"}, "sample 0: expected 8 bytes up to the end of field 'b'"),
    ],
)
def test_damaged_columns_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    made = str(tmp_path / "volume.img")
    dlfs.format_volume(made, size_bytes=16 * MIB)
    columns = {name: [value] for name, value in {**GOOD, **changes}.items() if value is not None}
    with dlfs.open(made) as volume:
        with other_writer(), volume.writer("a") as writer:
            places = np.zeros(1, np.int64), np.full(1, 12, np.int64)
            writer.add_batch([b"x"], b"ab\0\0\1\0\0\0\2\0\0\0", *places, attributes=columns)
        with volume["a"] as dataset, pytest.raises(FormatError, match=message):
            dataset[:]["b"]


def test_text_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    made = str(tmp_path / "volume.img")
    dlfs.format_volume(made, size_bytes=16 * MIB)
    columns = {"dlfs:fields": ['{"a":"text"}'], "dlfs:field:a:bytes": [1]}
    with dlfs.open(made) as volume:
        with volume.writer("a") as writer:
            places = np.zeros(1, np.int64), np.ones(1, np.int64)
            writer.add_batch([b"x"], b"\xff", *places, attributes=columns)
        with volume["a"] as dataset, pytest.raises(FormatError, match="'a': sample 0: 'utf-8'"):
            dataset[:]["a"]
