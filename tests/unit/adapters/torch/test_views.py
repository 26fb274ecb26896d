"""Loaders and samplers over views of several datasets."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import dlfs
from dlfs.base.units import KIB, MIB

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader  # noqa: E402

from dlfs.adapters.torch import (  # noqa: E402
    ColumnLabels,
    DistributedBatchSampler,
    FolderLabels,
    Loader,
    SampleDataset,
)
from tests.support.torch_processes import PROCESSES  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def view(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dlfs.DatasetView]:
    path = tmp_path_factory.mktemp("views") / "volume.img"
    dlfs.format_volume(path, size_bytes=16 * MIB, chunk_bytes=16 * KIB)
    with dlfs.open(path, memory_bytes=MIB) as volume:
        for name, size in (("a", 70), ("b", 30)):
            with volume.writer(name) as writer:
                for index in range(size):
                    folder = f"{name if index % 3 else 'both'}/{index:04}"
                    data = np.full(4, index, np.uint8).tobytes() + name.encode() * 4
                    writer.add(folder, data, attributes={"label": index % 7})
        with volume["a"] as a, volume["b"] as b:
            yield dlfs.mix({a: 0.5, dlfs.split(b, 1.0)[0]: 0.5}, samples=80)


@pytest.mark.parametrize(
    "workers", [{}, {"num_workers": 2}, {"num_workers": 1, "multiprocessing_context": PROCESSES}]
)
def test_a_loader_gives_a_mix_with_its_labels(view, workers) -> None:
    labels = ColumnLabels(view, "label")
    with_workers = Loader(view, 16, labels=labels, collate="stack", **workers)
    plain = Loader(view, 16, labels=labels, collate="stack")
    try:
        batches = list(with_workers)
    finally:
        with_workers.close()
    assert len(batches) == len(plain) == 5
    for batch, expected in zip(batches, plain, strict=True):
        assert batch["samples"].equal(expected["samples"])
        assert batch["labels"].equal(batch["samples"][:, 0] % 7)
        names = batch["samples"][:, 4]
        assert sorted(set(names.tolist())) == [ord("a"), ord("b")]


def test_a_loader_of_a_view_resumes(view) -> None:
    loader = Loader(view, 8, seed=3)
    iterator = iter(loader)
    for _ in range(4):
        next(iterator)
    state = loader.state_dict()
    rest = [batch.indices.tolist() for batch in iterator]
    again = Loader(view, 8)
    again.load_state_dict(state)
    assert [batch.indices.tolist() for batch in again] == rest
    assert len(rest) == 6


def test_folders_of_all_datasets_are_classes(view) -> None:
    labels = FolderLabels(view)
    assert labels.classes == ("a", "b", "both")
    indices = np.arange(len(view), dtype=np.uint64)
    expected = [view.path(index).split(b"/")[0].decode() for index in range(len(view))]
    assert [labels.classes[label] for label in labels(indices).tolist()] == expected


def test_map_style_samples_of_a_view(view) -> None:
    samples = SampleDataset(view, labels=ColumnLabels(view, "label"))
    sampler = DistributedBatchSampler(view, 10, rank=0, num_replicas=2)
    with_samples = [
        (sample, label)
        for batch in DataLoader(samples, batch_sampler=sampler, collate_fn=list)
        for sample, label in batch
    ]
    assert len(with_samples) == 40
    assert all(int(sample[0]) % 7 == label for sample, label in with_samples)
