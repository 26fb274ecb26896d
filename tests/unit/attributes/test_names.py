"""All samples of a dataset have the same attributes, or declared values of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dlfs
from dlfs.base.units import KIB, MIB
from dlfs.errors import UsageError

ZERO = np.zeros(2, np.int64)


@pytest.fixture
def path(tmp_path: Path) -> str:
    made = str(tmp_path / "volume.img")
    dlfs.format_volume(made, size_bytes=8 * MIB, chunk_bytes=16 * KIB)
    return made


@pytest.fixture
def volume(path: str) -> Iterator[dlfs.Volume]:
    with dlfs.open(path) as opened:
        yield opened


GIVEN: list[Any] = [
    {"label": 3},
    {"text": "a", "label": 3},
    {"vector": [1, 2]},
    {"flag": True, "weight": 0.5},
]


@pytest.mark.parametrize("first", [{}, *GIVEN])
@pytest.mark.parametrize("then", [{}, *GIVEN])
def test_other_attributes_than_those_of_the_samples_before_are_refused(volume, first, then) -> None:
    batch = {name: [value] * 2 for name, value in then.items()}
    if first == then:
        return
    with volume.writer("a") as writer:
        writer.add("0", b"", attributes=first)
        with pytest.raises(UsageError, match=r"add the sample 'new'.*expected the attributes of"):
            writer.add("new", b"", attributes=then)
        with pytest.raises(UsageError, match=r"add the sample 'new'.*declare a default"):
            writer.add_batch([b"new", b"other"], b"", ZERO, ZERO, attributes=batch)
        writer.add("1", b"", attributes=first)
    with volume.append("a") as writer:
        with pytest.raises(UsageError, match=r"add the sample 'new'.*expected the attributes of"):
            writer.add("new", b"", attributes=then)
        with pytest.raises(UsageError, match=r"add the sample 'new'.*expected the attributes of"):
            writer.add_batch([b"new", b"other"], b"", ZERO, ZERO, attributes=batch)
    with volume["a"] as dataset:
        assert dataset.paths() == [b"0", b"1"]
        assert list(dataset.columns) == list(first)


def test_the_message_says_what_is_missing(volume) -> None:
    with volume.writer("a") as writer:
        writer.add("0", b"", attributes={"label": 3, "text": "a"})
        with pytest.raises(UsageError) as raised:
            writer.add("1", b"", attributes={"text": "b"})
        assert str(raised.value) == (
            "add the sample '1': expected the attributes of the samples before, 'label' and "
            "'text', got none of 'label'; give all samples the same attributes, or declare a "
            "default for those without one"
        )
        writer.add("1", b"", attributes={"text": "b", "label": 2})
        with pytest.raises(UsageError, match="got 'more' as well"):
            writer.add("2", b"", attributes={"text": "b", "label": 2, "more": 1})


def test_declared_values_are_those_of_samples_without_one(volume) -> None:
    defaults = {"label": -1, "text": "none", "vector": [0.5, 1], "weight": np.nan, "unused": True}
    given = {"label": 3, "text": "a", "vector": [2, 3.5], "weight": 1.0}
    with volume.writer("a", defaults=defaults) as writer:
        writer.add("0", b"")
        writer.add("1", b"", attributes=given)
        batch = {"text": np.array(["b", "c"], object)}
        writer.add_batch([b"2", b"3"], b"", ZERO, ZERO, attributes=batch)
    with volume.append("a", defaults={"new": 7, "label": -2, "text": "later"}) as writer:
        with pytest.raises(UsageError, match="got none of 'unused', 'vector' and 'weight'"):
            writer.add("4", b"")
        more = {"vector": [0, 0], "weight": 0.0, "unused": False}
        writer.add("4", b"", attributes=more)
        writer.add("5", b"", attributes={**more, "new": 8})
    with volume["a"] as dataset:
        assert dataset.column("label").tolist() == [-1, 3, -1, -1, -2, -2]
        assert dataset.column("text").tolist() == ["none", "a", "b", "c", "later", "later"]
        assert dataset.column("vector")[:4].tolist() == [[0.5, 1], [2, 3.5], [0.5, 1], [0.5, 1]]
        assert (
            np.isnan(dataset.column("weight")).tolist() == [True, False, True, True] + [False] * 2
        )
        assert dataset.column("unused").tolist() == [True] * 4 + [False] * 2
        assert dataset.column("new").tolist() == [7] * 5 + [8]


def test_a_declared_value_has_the_type_of_its_column(volume) -> None:
    with volume.writer("a", defaults={"label": 0.5}) as writer:
        writer.add("0", b"", attributes={"label": 1})
        with pytest.raises(UsageError, match=r"'label'.*expected int64, got float64 0\.5"):
            writer.add("1", b"")
        writer.add("1", b"", attributes={"label": 2})
    for wrong, message in (
        ({"dlfs:dtype": ""}, "expected no reserved name"),
        ({"x": [[1, 2]]}, "expected a value or a vector"),
    ):
        with pytest.raises(UsageError, match=message):
            volume.writer("b", defaults=wrong)
    with volume.writer("b"):  # the volume is not locked
        pass


def test_samples_with_fields_have_the_same_attributes(volume) -> None:
    with volume.writer("a", defaults={"extra": 0}) as writer:
        writer.add("0", {"image": b"x", "mask": np.zeros((2, 3))}, attributes={"label": 1})
        with pytest.raises(UsageError, match="got none of 'label'"):
            writer.add("1", {"image": b"x", "mask": np.zeros((2, 3))})
        writer.add("1", {"image": b"y", "mask": np.ones((1, 3))}, attributes={"label": 2})
    with volume["a"] as dataset:
        assert dataset.column("extra").tolist() == [0, 0]
        assert dataset.sample(1)["image"] == b"y"


def test_an_array_may_lie_next_to_bytes(volume) -> None:
    with volume.writer("a") as writer:
        writer.add("0", bytes(8), attributes={"dlfs:dtype": "<f4", "dlfs:shape": "2"})
        writer.add("1", b"bytes")
    with volume["a"] as dataset:
        assert dataset.attributes.column("dlfs:dtype").tolist() == ["<f4", ""]


def test_a_file_of_fsspec_has_no_attributes(path) -> None:
    fsspec = pytest.importorskip("fsspec")
    with dlfs.open(path) as volume, volume.writer("a") as writer:
        writer.add("0", b"", attributes={"label": 3})
    fs = fsspec.filesystem("dlfs", volume=path, skip_instance_cache=True)
    with pytest.raises(UsageError, match="expected a dataset without attributes, got 'label'"):
        fs.open("a/1", "wb")
