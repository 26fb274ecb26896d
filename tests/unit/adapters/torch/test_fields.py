"""Samples with fields as tensors: Loader, SampleDataset, workers, transforms, collation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import dlfs
from dlfs.base.units import MIB
from dlfs.errors import TransformError, UsageError

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader  # noqa: E402

from dlfs.adapters.torch import ColumnLabels, Jagged, Loader, SampleDataset  # noqa: E402

pytestmark = pytest.mark.torch

COUNT = 40
TYPES = {
    "image": "bytes",
    "caption": "text",
    "label": "<i8[]",
    "box": ">f4[4]",
    "half": "bfloat16[2]",
    "mask": "|u1[?,?]",
    "points": "<f4[?,3]",
    "codes": "bfloat16[?]",
    "day": "<M8[D][]",
}


def sample_of(number: int) -> dict[str, Any]:
    return {
        "image": bytes([number]) * (number * 7 % 100),
        "caption": f"cät {number}",
        "label": number,
        "box": np.arange(4, dtype=np.float32) + number,
        "half": np.array([0x3F80, 0x4000], np.uint16),
        "mask": np.full((1 + number % 3, 2), number, np.uint8),
        "points": np.full((number % 5, 3), number, np.float32),
        "codes": np.full(number % 3, 0x3F80, np.uint16),
        "day": np.datetime64("2026-01-01", "D") + number,
    }


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = str(tmp_path_factory.mktemp("fields") / "volume.img")
    dlfs.format_volume(made, size_bytes=16 * MIB)
    with dlfs.open(made) as volume, volume.writer("scenes", fields=TYPES) as writer:
        for number in range(COUNT):
            attributes = {"class": number % 4}
            writer.add(f"{number:03}", sample_of(number), attributes=attributes)
    return made


@pytest.fixture
def scenes(path: str) -> Iterator[dlfs.Dataset]:
    with dlfs.open(path, memory_bytes=4 * MIB) as volume, volume["scenes"] as dataset:
        yield dataset


def check(batch: Any, numbers: list[int]) -> None:
    """Check a batch as ``collate='auto'`` makes it."""
    expected = [sample_of(number) for number in numbers]
    assert [bytes(one.numpy()) for one in batch["image"]] == [one["image"] for one in expected]
    assert batch["caption"] == [one["caption"] for one in expected]
    assert batch["label"].tolist() == numbers
    assert batch["box"].tolist() == [one["box"].tolist() for one in expected]
    assert batch["half"].dtype == torch.bfloat16
    assert batch["half"].tolist() == [[1.0, 2.0]] * len(numbers)
    for name in ("mask", "points"):
        for got, one in zip(batch[name], expected, strict=True):
            assert np.array_equal(got.numpy(), one[name])
    assert [one.tolist() for one in batch["codes"]] == [[1.0] * (n % 3) for n in numbers]
    assert all(one.dtype == torch.bfloat16 for one in batch["codes"])
    assert [day for day in batch["day"]] == [one["day"] for one in expected]  # noqa: C416


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_has_a_key_for_each_field(scenes: dlfs.Dataset, workers: int) -> None:
    loader = Loader(scenes, 8, seed=2, num_workers=workers)
    seen: list[int] = []
    for batch in loader:
        assert list(batch) == list(TYPES)
        assert len(batch) == 8
        check(batch, batch.indices.tolist())
        assert batch.samples["label"] is batch["label"]
        seen += batch["label"].tolist()
    assert sorted(seen) == list(range(COUNT))
    loader.close()


def test_chosen_fields_are_the_keys(scenes: dlfs.Dataset) -> None:
    loader = Loader(scenes, 16, fields=["label", "caption"], world_size=3, rank=0, uneven="pad")
    batches = list(loader)
    assert all(list(batch) == ["label", "caption"] for batch in batches)
    with pytest.raises(UsageError, match="no such field"):
        Loader(scenes, 16, fields=["nothing"])


def test_arrays_that_vary_are_joined_as_collate_says(scenes: dlfs.Dataset) -> None:
    order = [5, 6, 9]
    jagged = next(
        iter(Loader(scenes, 3, order=order, collate="jagged", fields=["points", "codes"]))
    )
    assert isinstance(jagged["points"], Jagged)
    assert jagged["points"].offsets.tolist() == [0, 0, 1, 5]
    assert jagged["points"].values.shape == (5, 3)
    assert jagged["codes"].values.dtype == torch.bfloat16
    stacked = next(iter(Loader(scenes, 2, order=[3, 6], collate="stack", fields=["mask"])))
    assert stacked["mask"].shape == (2, 1, 2)
    listed = next(iter(Loader(scenes, 3, order=order, collate="list", fields=["label"])))
    assert [one["label"].item() for one in listed.samples] == order
    custom = next(iter(Loader(scenes, 3, order=order, collate=len)))
    assert custom.samples == 3


def test_labels_and_pairs(scenes: dlfs.Dataset) -> None:
    labels = ColumnLabels(scenes, "class")
    pairs = Loader(scenes, 4, order=range(4), labels=labels, fields=["label"], as_pairs=True)
    samples, classes = next(iter(pairs))
    assert samples["label"].tolist() == classes.tolist() == [0, 1, 2, 3]


def test_a_transform_gets_the_fields_of_a_sample(scenes: dlfs.Dataset) -> None:
    def transform(sample: dict[str, Any]) -> dict[str, Any]:
        assert isinstance(sample["image"], memoryview)
        sample["mask"] += 1  # a copy
        return {
            "size": len(sample["image"]),
            "sum": sample["mask"].sum(),
            "text": sample["caption"],
        }

    batch = next(iter(Loader(scenes, 4, order=[1, 2, 3, 4], transform=transform)))
    assert batch["size"].tolist() == [7, 14, 21, 28]
    assert batch["text"] == [f"cät {number}" for number in (1, 2, 3, 4)]
    assert batch["sum"].tolist() == [8, 18, 8, 20]
    assert scenes.sample(1)["mask"].sum() == 4
    with pytest.raises(TransformError, match="sample 1"):
        next(iter(Loader(scenes, 1, order=[1], transform=lambda sample: sample["nothing"])))


@pytest.mark.parametrize("workers", [0, 2])
def test_dataloader_collates_the_samples_of_a_dataset(scenes: dlfs.Dataset, workers: int) -> None:
    samples = SampleDataset(scenes)
    assert samples[-1]["caption"] == f"cät {COUNT - 1}"
    numbers = []
    for batch in DataLoader(samples, batch_size=16, num_workers=workers):
        check(batch, batch["label"].tolist())
        numbers += batch["label"].tolist()
    assert numbers == list(range(COUNT))
    labelled = SampleDataset(scenes, labels=ColumnLabels(scenes, "class"))
    fields, classes = next(iter(DataLoader(labelled, batch_size=3)))
    check(fields, [0, 1, 2])
    assert classes.tolist() == [0, 1, 2]


def test_a_dtype_makes_arrays_of_whole_samples(scenes: dlfs.Dataset) -> None:
    batch = next(iter(Loader(scenes, 1, order=[0], dtype=np.uint8, collate="list")))
    assert batch.samples[0].numpy().tobytes() == scenes[0]
