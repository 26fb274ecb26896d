"""Labels: the classes that they know, their types, and the samples that they are asked for."""

from __future__ import annotations

import numpy as np
import pytest

import dlfs
from dlfs.base.units import MIB
from dlfs.errors import NotFoundError, UsageError
from tests.unit.adapters.torch.orders import order, reference

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader  # noqa: E402

from dlfs.adapters.torch import (  # noqa: E402
    ColumnLabels,
    FolderLabels,
    Loader,
    SampleDataset,
)
from tests.support.files import write_at  # noqa: E402
from tests.support.volumes import new_volume  # noqa: E402

pytestmark = pytest.mark.torch

COUNT = 60


@pytest.fixture(scope="module")
def folder_volume(tmp_path_factory):
    """Samples in the folders cat and dog, of which one is damaged."""
    path = new_volume(tmp_path_factory.mktemp("labels") / "volume.img", size_bytes=16 * MIB)
    with dlfs.open(str(path)) as volume:
        with volume.writer("pets") as writer:
            for number in range(COUNT):
                name = f"{'cat' if number < 20 else 'dog'}/{number:02}"
                writer.add(name, bytes([number]) * 8, attributes={"even": number % 2 == 0})
        with volume.dataset("pets") as dataset:
            offset = dataset.stat(33).offset_bytes
    write_at(path, offset, b"\xff")
    return path


@pytest.fixture
def pets(folder_volume):
    with dlfs.open(str(folder_volume)) as volume, volume.dataset("pets") as dataset:
        yield dataset


def is_dog(indices):
    return [int(index >= 20) for index in indices.tolist()]


def test_classes_as_torchvisions_image_folder_has_them(pets, arrays):
    folders = FolderLabels(pets)
    assert folders.classes == ("cat", "dog")
    assert folders.class_to_idx == {"cat": 0, "dog": 1}
    names = ColumnLabels(arrays, "class")
    assert names.class_to_idx == {"name0": 0, "name1": 1, "name2": 2}
    numbers = ColumnLabels(arrays, "number")
    assert (numbers.classes, numbers.class_to_idx) == (None, None)
    with pytest.raises(NotFoundError):
        ColumnLabels(arrays, "colour")
    assert ColumnLabels(pets, "even")(np.array([3, 4], np.uint64)).tolist() == [0, 1]


@pytest.mark.parametrize("on_error", ["skip", "replace"])
@pytest.mark.parametrize("workers", [0, 2])
def test_labels_are_those_of_the_samples_that_are_given(pets, on_error, workers):
    labels = FolderLabels(pets)
    loader = Loader(pets, 7, labels=labels, on_error=on_error, num_workers=workers, seed=2)
    batches = list(loader)
    loader.close()
    assert sum(len(batch) for batch in batches) == COUNT - (on_error == "skip")
    for batch in batches:
        assert batch.labels.tolist() == is_dog(batch.indices)
        numbers = [int(sample[0]) for sample in batch.samples]
        assert numbers == batch.indices.tolist()
        assert len(batch.labels) == len(batch)


@pytest.mark.parametrize(
    "chosen",
    [
        {"where": range(10, 50)},
        {"weights": np.arange(COUNT), "draws": 100},
        {"order": [50, 3, 33, 3]},
    ],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_labels_of_chosen_samples(pets, chosen, workers):
    options = {"labels": FolderLabels(pets), "on_error": "skip", "num_workers": workers}
    loader = Loader(pets, 7, **options, **chosen)
    batches = list(loader)
    loader.close()
    assert order(batches) == reference(pets, **chosen, on_error="skip")
    for batch in batches:
        assert batch.labels.tolist() == is_dog(batch.indices)
        assert [int(sample[0]) for sample in batch.samples] == batch.indices.tolist()


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (lambda indices: np.array([f"n{i}" for i in indices]), lambda index: f"n{index}"),
        (lambda indices: np.array([b"%d" % i for i in indices]), lambda index: b"%d" % index),
        (lambda indices: np.array([str(i) for i in indices], object), str),
        (lambda indices: [str(i) for i in indices], str),
    ],
)
def test_strings_are_lists_as_torch_collates_them(arrays, labels, expected):
    batch = next(iter(Loader(arrays, 9, labels=labels, seed=1)))
    assert batch.labels == [expected(index) for index in batch.indices.tolist()]
    assert type(batch.labels[0]) in (str, bytes)
    assert batch.to("meta").labels == batch.labels
    assert len(type(batch)(dict(batch))) == 9
    pairs = next(iter(DataLoader(SampleDataset(arrays, labels=labels), 4)))
    assert list(pairs[1]) == [expected(index) for index in range(4)]


@pytest.mark.parametrize(
    ("labels", "dtype"),
    [
        (lambda indices: indices.astype(np.uint16), torch.int64),
        (lambda indices: (indices % 2).astype(bool), torch.bool),
        (lambda indices: indices.astype(np.uint8), torch.int64),
        (lambda indices: indices, torch.int64),
        (lambda indices: indices.astype(np.float32), torch.float32),
        (lambda indices: indices.tolist(), torch.int64),
        (lambda indices: torch.from_numpy(indices.astype(np.int32)), torch.int32),
        (lambda indices: np.ones((len(indices), 4), np.float32), torch.float32),
    ],
)
def test_numbers_are_tensors(arrays, labels, dtype):
    batch = next(iter(Loader(arrays, 9, labels=labels)))
    assert (batch.labels.dtype, len(batch.labels)) == (dtype, 9)
    pairs = next(iter(DataLoader(SampleDataset(arrays, labels=labels, arrays=True), 9)))
    assert (pairs[1].dtype, pairs[1].shape) == (dtype, batch.labels.shape)


def test_a_label_beyond_int64_is_refused(arrays):
    with pytest.raises(UsageError, match="expected labels of at most 9223372036854775807, got 184"):
        next(iter(Loader(arrays, 9, labels=lambda indices: ~indices)))


@pytest.mark.parametrize("labels", [lambda indices: 3, lambda indices: [1, 2]])
def test_one_label_for_each_sample(arrays, labels):
    with pytest.raises(UsageError, match="expected one label for each of 9 indices, got"):
        next(iter(Loader(arrays, 9, labels=labels)))


def test_without_labels(arrays):
    batch = next(iter(Loader(arrays, 9, collate="stack")))
    assert batch.labels is None
    assert "labels" not in batch
    assert SampleDataset(arrays)[0].shape == (24,)
    assert [len(batch) for batch in DataLoader(SampleDataset(arrays), 115)] == [115, 115]
    assert reference(arrays)[:9] == batch.indices.tolist()


def test_a_column_of_vectors_is_a_tensor_of_two_dimensions(tmp_path):
    with dlfs.open(new_volume(tmp_path / "volume.img", size_bytes=16 * MIB)) as volume:
        with volume.writer("a") as writer:
            for number in range(6):
                targets = np.full(4, number, np.float32)
                writer.add(str(number), b"x", attributes={"targets": targets, "box": [number, 2]})
        with volume["a"] as dataset:
            labels = ColumnLabels(dataset, "targets")
            assert labels.classes is None
            for batch in Loader(dataset, 4, labels=labels, seed=1):
                assert (batch.labels.dtype, batch.labels.shape[1:]) == (torch.float32, (4,))
                assert batch.labels[:, 3].tolist() == batch.indices.tolist()
            batch = next(iter(Loader(dataset, 6, labels=ColumnLabels(dataset, "box"))))
            assert (batch.labels.dtype, tuple(batch.labels.shape)) == (torch.int64, (6, 2))
