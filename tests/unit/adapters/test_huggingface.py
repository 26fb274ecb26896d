"""A dataset as a stream of Hugging Face datasets, with that package itself."""

from __future__ import annotations

import io
import itertools
from importlib import import_module

import numpy as np
import pytest
from PIL import Image

import dlfs
from dlfs.adapters.arrow import tables
from dlfs.adapters.huggingface import stream
from tests.support.documents import run_framework
from tests.unit.adapters.conftest import COUNT

pytestmark = pytest.mark.filterwarnings("ignore")  # what other packages deprecate


@pytest.fixture
def datasets():
    """The package, which takes seconds to import."""
    return import_module("datasets")


def indices_of(rows):
    return [row["index"] for row in rows]


def test_three_epochs(numbers, ordered):
    for epoch in range(3):
        rows = list(stream(numbers, shuffle="global", seed=7, epoch=epoch))
        expected = numbers.sequence(seed=7, epoch=epoch).indices().tolist()
        assert indices_of(rows) == expected
        assert [row["sample"] for row in rows] == [ordered[index] for index in expected]


def test_rows_are_mapped_filtered_and_batched(datasets, numbers, ordered):
    rows = stream(numbers, columns=["index", "sample"])
    assert isinstance(rows, datasets.IterableDataset)
    assert rows.column_names == ["index", "sample"]
    sizes = rows.map(lambda row: {"size": len(row["sample"])}, remove_columns="sample")
    assert sum(row["size"] for row in sizes) == sum(map(len, ordered))
    large = rows.filter(lambda row: len(row["sample"]) > 3000)
    assert len(list(large)) == sum(len(sample) > 3000 for sample in ordered)
    first = next(iter(rows.with_format("numpy").batch(10)))
    assert isinstance(first["index"], np.ndarray)
    assert len(first["sample"]) == 10


def test_images_are_decoded(datasets, make_volume):
    def png(number):
        stored = io.BytesIO()
        Image.new("L", (4, 3), number).save(stored, "PNG")
        return stored.getvalue()

    path = make_volume(images={f"{number:03}": png(number) for number in range(30)})
    with dlfs.open(str(path)) as volume, volume["images"] as images:
        rows = stream(images, shuffle="global").cast_column("sample", datasets.Image())
        found = {row["index"]: row["sample"] for row in rows}
        assert sorted(found) == list(range(30))
        assert all(image.getpixel((0, 0)) == number for number, image in found.items())


@pytest.mark.parametrize("stop", [1, 57, 150, COUNT - 1])
def test_a_stream_resumes_in_mid_epoch(numbers, stop):
    def begin():
        return stream(numbers, columns=["index"], shuffle="global", seed=3, shards=7)

    whole = indices_of(begin())
    first = begin()
    begun = indices_of(itertools.islice(first, stop))
    state = first.state_dict()
    second = begin()
    second.load_state_dict(state)
    assert begun + indices_of(second) == whole


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_ranks_share_an_epoch(numbers, ranks):
    rows = stream(numbers, columns=["index"], where=np.arange(COUNT) % 2 == 0, shards=24)
    split = import_module("datasets.distributed").split_dataset_by_node
    parts = [split(rows, rank, ranks) for rank in range(ranks)]
    found = [indices_of(part) for part in parts]
    assert sorted(index for part in found for index in part) == list(range(0, COUNT, 2))
    assert all(found)


def test_a_map_style_dataset_of_tables(datasets, numbers, ordered):
    """Nothing is copied: the tables keep the memory into which samples were read."""
    import pyarrow

    rows = datasets.Dataset(pyarrow.concat_tables(tables(numbers, columns=["index", "sample"])))
    assert len(rows) == COUNT
    for row in (rows[5], rows[299], *rows.select([7, 3])):
        assert row["sample"] == ordered[row["index"]]


def test_the_documented_example(tmp_path):
    run_framework("Hugging Face datasets", tmp_path)
