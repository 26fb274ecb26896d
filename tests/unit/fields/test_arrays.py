"""Samples read as the arrays that the dataset says they are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pytest

import dlfs
from dlfs.attributes import AttributesBuilder, AttributeTable
from dlfs.base.units import MIB
from dlfs.errors import FormatError, UsageError
from dlfs.fields.arrays import ArrayForm, forms_of
from dlfs.ingest.source import array_attributes
from tests.support.volumes import new_volume
from tests.support.writers import other_writer


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[dlfs.Volume]:
    with dlfs.open(new_volume(tmp_path / "volume.img", size_bytes=16 * MIB)) as opened:
        yield opened


def write(volume: dlfs.Volume, arrays: list[np.ndarray[Any, Any]]) -> dlfs.Dataset:
    with volume.writer("ds") as writer:
        for number, array in enumerate(arrays):
            columns = array_attributes(array.dtype, array.shape, 1)
            attributes = {name: column[0] for name, column in columns.items()}
            writer.add(b"%04d" % number, array.tobytes(), attributes=attributes)
    return volume["ds"]


@pytest.mark.parametrize("dtype", ["f4", ">i2", "?", "c16", "M8[ns]", "U3", "S2", "f2"])
def test_arrays_of_one_form_are_stacked(volume: dlfs.Volume, dtype: str) -> None:
    raw = np.random.default_rng(1).integers(0, 2, 20 * 2 * 3 * 16, np.uint8)
    arrays = list(np.resize(raw, (20, 6 * np.dtype(dtype).itemsize)).view(dtype).reshape(20, 2, 3))
    with write(volume, arrays) as dataset:
        stacked = dataset.read_arrays([3, 0, 3])
        assert stacked.dtype == np.dtype(dtype)
        np.testing.assert_array_equal(stacked, np.stack([arrays[3], arrays[0], arrays[3]]))
        for batch in dataset.batches(7, seed=2):
            expected = np.stack([arrays[int(index)] for index in batch.indices])
            np.testing.assert_array_equal(batch.arrays(), expected)
        one = dataset.array(-1)
        np.testing.assert_array_equal(one, arrays[-1])
        assert not one.flags.writeable
        with pytest.raises(IndexError, match=r"-20\.\.19, got 20"):
            dataset.array(20)
        assert dataset.read_arrays([]).shape[0] == 0
        assert dataset.read_arrays([], stack=False) == []


def test_scalars_and_empty_arrays(volume: dlfs.Volume) -> None:
    arrays = [np.array(5, "i4"), np.array(6, "i4"), np.empty((0, 3), "f4")]
    with write(volume, arrays) as dataset:
        assert dataset.read_arrays([0, 1]).tolist() == [5, 6]
        assert dataset.array(2).shape == (0, 3)


def test_arrays_of_several_forms_are_a_list(volume: dlfs.Volume) -> None:
    arrays = [np.arange(i, dtype="f4" if i % 2 else "i8") for i in range(1, 9)]
    with write(volume, arrays) as dataset:
        for got, expected in zip(dataset.read_arrays(range(8), stack=False), arrays, strict=True):
            np.testing.assert_array_equal(got, expected)
            assert got.dtype == expected.dtype
        with pytest.raises(UsageError, match=r"float32 of shape \(1,\) of sample 0 and int64 of "
                           r"shape \(2,\) of sample 1; stack=False"):  # fmt: skip
            dataset.read_arrays([0, 1])


def test_samples_that_are_no_arrays_are_named(volume: dlfs.Volume) -> None:
    with other_writer(), volume.writer("ds") as writer:
        attributes = {"dlfs:dtype": "<f4", "dlfs:shape": "2"}
        writer.add("a", bytes(8), attributes=attributes)
        writer.add("b", bytes(9), attributes=attributes)
        writer.add("c", bytes(8))
    with volume["ds"] as dataset:
        assert dataset.read_arrays([0, 0]).shape == (2, 2)
        with pytest.raises(UsageError, match=r"sample 1: expected 8 bytes, float32 .*, got 9"):
            dataset.read_arrays([0, 1])
        with pytest.raises(UsageError, match="expected arrays, got sample 2: bytes"):
            dataset.read_arrays([0, 2], stack=False)
    with volume.writer("plain") as writer:
        writer.add("a", bytes(8))
    with volume["plain"] as dataset, pytest.raises(UsageError, match="expected the columns dlfs:"):
        dataset.array(0)


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        ("O", "1"),
        ("i4,f4", "1"),
        ("V0", "1"),
        ("S0", "1"),
        ("nonsense", "1"),
        ("<f4", "-1"),
        ("<f4", "1,,2"),
        ("<f4", "²"),
        ("<f4", ",".join("1" * 33)),
        ("<f4", "1" * 2000),
        ("f" * 2000, "1"),
        ("(2,3", "1"),
        (",", "1"),
        ("(9999999999,)f4", "1"),
        ("M8[1000000s/7]", "1"),
        ("<f4", "0,9" + "9" * 30),
    ],
)
def test_forms_that_cannot_be_are_refused(dtype: str, shape: str) -> None:
    with pytest.raises(UsageError, match="describe arrays: expected"):
        ArrayForm.parse(dtype, shape)
    builder = AttributesBuilder()
    builder.append(builder.prepare({"dlfs:dtype": [dtype], "dlfs:shape": [shape]}, 1), 0)
    parts = builder.freeze(UUID(int=1), np.zeros(1, np.int64))
    table = AttributeTable.over(np.concatenate(parts), parts[0].nbytes)
    with pytest.raises(FormatError, match="read arrays: describe arrays"):
        forms_of(table, np.zeros(1, np.int64))


def test_sizes_beyond_64_bits_are_only_wrong(volume: dlfs.Volume) -> None:
    with other_writer(), volume.writer("ds") as writer:
        attributes = {"dlfs:dtype": "<f8", "dlfs:shape": ",".join(["4294967296"] * 3)}
        writer.add("a", bytes(8), attributes=attributes)
    with volume["ds"] as dataset, pytest.raises(UsageError, match="sample 0: expected 633825"):
        dataset.array(0)


def test_attributes_of_arrays() -> None:
    columns = array_attributes(np.float32, (28, 28), 3)
    assert {name: column.tolist() for name, column in columns.items()} == {
        "dlfs:dtype": ["<f4"] * 3, "dlfs:shape": ["28,28"] * 3
    }  # fmt: skip
    with pytest.raises(UsageError, match="0 or more"):
        array_attributes("f4", (-1,), 1)
    with pytest.raises(UsageError, match="expected a dtype of"):
        array_attributes(object, (1,), 1)
