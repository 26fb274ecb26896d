"""Labels and views: each label is that of its sample, whatever the labels were made of.

The truth is in the sample: its bytes are its path, and its path says what its attributes are.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

import dlfs
from dlfs.adapters.grain import Source
from dlfs.base.units import KIB, MIB

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader  # noqa: E402

from dlfs.adapters.torch import (  # noqa: E402
    ColumnLabels,
    DistributedBatchSampler,
    DistributedSampler,
    FolderLabels,
    Loader,
    SampleDataset,
    collate_list,
)

pytestmark = pytest.mark.torch

SIZES = {"a": 90, "b": 40, "c": 25}


def folder_of(name: str, number: int) -> str:
    """Return the class of a sample; the datasets have one class in common and others alone."""
    return f"{name}{number % 3}" if number % 4 else "common"


def number_of(path: str) -> int:
    return zlib.crc32(path.encode()) % 1000


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, dlfs.Dataset]]:
    """Three datasets, a newer version of the first, and a copy of it with other paths."""
    path = str(tmp_path_factory.mktemp("bound") / "volume.img")
    dlfs.format_volume(path, size_bytes=16 * MIB, chunk_bytes=16 * KIB)
    with dlfs.open(path, memory_bytes=MIB) as volume:
        for name, size in (*SIZES.items(), ("a", SIZES["a"] + 1)):
            with volume.writer(name) as writer:
                for number in range(size):
                    full = f"{folder_of(name, number)}/{name}{number:04}"
                    value = number_of(full)
                    attributes = {
                        "text": full.split("/")[0],
                        "number": value,
                        "float": np.float32(value) / 8,
                        "vector": [value, value + 1],
                    }
                    writer.add(full, full.encode(), attributes=attributes)
        opened = {name: volume[f"{name}@1"] for name in SIZES}
        opened["newer"] = volume["a"]
        yield opened
        for one in opened.values():
            one.close()


def even(dataset: Any) -> Any:
    return np.arange(len(dataset)) % 2 == 0


VIEWS: dict[str, Callable[..., Any]] = {
    "dataset": lambda a, b, c: a,
    "train": lambda a, b, c: dlfs.split(a, 0.7, seed=1)[0],
    "test": lambda a, b, c: dlfs.split(a, 0.7, seed=1)[1],
    "groups": lambda a, b, c: dlfs.split(a, 0.5, by="group", seed=3)[0],
    "values": lambda a, b, c: dlfs.split(a, 0.5, by="attribute", column="text")[1],
    "concat": lambda a, b, c: dlfs.concat([c, a, b]),
    "concat of parts": lambda a, b, c: dlfs.concat([dlfs.split(b, 0.5)[1], a, c]),
    "twice": lambda a, b, c: dlfs.concat([a, a]),
    "part of a concat": lambda a, b, c: dlfs.split(dlfs.concat([b, a, c]), 0.6)[1],
    "part of a part": lambda a, b, c: dlfs.split(dlfs.split(a, 0.7)[0], 0.5, seed=5)[1],
    "select": lambda a, b, c: dlfs.select(a, a.column("number") % 2 == 0),
    "selected of a concat": lambda a, b, c: dlfs.select(dlfs.concat([c, a]), range(7, 99, 3)),
    "selected of a mix": lambda a, b, c: dlfs.select(dlfs.mix({a: 1, b: 2}), range(5, 120)),
    "mix": lambda a, b, c: dlfs.mix({b: 0.3, a: 0.5, c: 0.2}, samples=150),
    "mix of parts": lambda a, b, c: dlfs.mix({dlfs.split(a, 0.5)[1]: 1, dlfs.concat([c, b]): 3}),
}

LABELS: dict[str, tuple[Callable[[Any], Any], Callable[[str], Any]]] = {
    "folder": (FolderLabels, lambda path: path.split("/")[0]),
    "text": (lambda of: ColumnLabels(of, "text"), lambda path: path.split("/")[0]),
    "number": (lambda of: ColumnLabels(of, "number"), number_of),
    "float": (lambda of: ColumnLabels(of, "float"), lambda path: number_of(path) / 8),
    "vector": (
        lambda of: ColumnLabels(of, "vector"),
        lambda path: [number_of(path), number_of(path) + 1],
    ),
}


def check(labels: Any, truth: Callable[[str], Any], paths: Any, given: Any) -> None:
    """Compare labels with those that the paths say."""
    values = given.tolist() if isinstance(given, torch.Tensor) else given
    names = values if labels.classes is None else [labels.classes[one] for one in values]
    assert names == [truth(path) for path in paths]


def text_of(sample: Any) -> str:
    return bytes(sample.tolist() if isinstance(sample, torch.Tensor) else sample).decode()


def read_all(reader: Any) -> tuple[list[str], list[Any]]:
    """Return the paths and the labels of all samples that a loader gives."""
    paths: list[str] = []
    labels: list[Any] = []
    for samples, found in reader:
        paths += map(text_of, samples)
        labels += found.tolist()
    return paths, labels


def readers(view: Any, labels: Any) -> Iterator[tuple[str, Any]]:
    """Yield the ways in which a program reads a view with labels."""
    yield "loader", Loader(view, 16, labels=labels, as_pairs=True, seed=2)
    for options in ({"shuffle": None}, {"order": range(0, len(view), 3)}):
        yield str(options), Loader(view, 16, labels=labels, as_pairs=True, **options)
    if getattr(view, "weights", None) is None:
        chosen = {"where": even(view), "seed": 3}
        yield "where", Loader(view, 16, labels=labels, as_pairs=True, **chosen)
        yield "pad", Loader(view, 8, labels=labels, as_pairs=True, rank=1, world_size=3)
    samples = SampleDataset(view, labels=labels)
    collated = partial(DataLoader, samples, collate_fn=collate_list)
    yield "samples", collated(batch_size=8, shuffle=True)
    sampler = DistributedSampler(samples, num_replicas=2, rank=1, seed=4)
    yield "sampler", collated(batch_size=8, sampler=sampler)
    batches = DistributedBatchSampler(view, 8, num_replicas=2, rank=0)
    yield "batch sampler", collated(batch_sampler=batches)
    wrapped = Loader(view, 16, labels=lambda indices: labels(indices), as_pairs=True)
    yield "a function of the caller", wrapped
    yield "its slices", Loader(view, 16, labels=partial(in_halves, labels), as_pairs=True)


def in_halves(labels: Any, indices: Any) -> Any:
    half = len(indices) // 2
    return np.concatenate([labels(indices[:half]), labels(indices[half:])])


@pytest.mark.parametrize("kind", LABELS)
@pytest.mark.parametrize("name", VIEWS)
def test_labels_are_those_of_the_samples(datasets, name, kind) -> None:
    a, b, c = (datasets[one] for one in "abc")
    make, truth = LABELS[kind]
    view = VIEWS[name](a, b, c)
    everything = make(dlfs.concat([a, b, c]))
    for labels in (make(view), everything):
        for way, reader in readers(view, labels):
            paths, given = read_all(reader)
            assert paths, way
            check(labels, truth, paths, given)


@pytest.mark.parametrize("kind", LABELS)
@pytest.mark.parametrize("made_of", ["dataset", "train", "test", "groups", "values"])
def test_labels_of_a_dataset_and_of_its_parts_are_the_same(datasets, made_of, kind) -> None:
    a, b, c = (datasets[one] for one in "abc")
    make, truth = LABELS[kind]
    labels = make(VIEWS[made_of](a, b, c))
    assert labels.classes == make(a).classes
    for name in ("dataset", "train", "test", "groups", "twice", "part of a part"):
        view = VIEWS[name](a, b, c)
        check(labels, truth, *read_all(Loader(view, 16, labels=labels, as_pairs=True, seed=2)))
        indices = np.arange(len(view), dtype=np.uint64)
        paths = [path.decode() for path in view.paths_of(indices)]
        check(labels, truth, paths, labels.bind(view)(indices).tolist())


def test_labels_in_worker_processes(datasets) -> None:
    a, b, c = (datasets[one] for one in "abc")
    view = VIEWS["part of a concat"](a, b, c)
    for make, truth in (LABELS["folder"], LABELS["text"]):
        labels = pickle.loads(pickle.dumps(make(dlfs.concat([a, b, c]))))
        loader = Loader(view, 8, labels=labels, as_pairs=True, num_workers=2)
        check(labels, truth, *read_all(loader))
        loader.close()


@pytest.mark.parametrize("kind", LABELS)
@pytest.mark.parametrize(
    "read",
    [
        lambda a, b, newer: newer,
        lambda a, b, newer: b,
        lambda a, b, newer: dlfs.concat([a, b]),
        lambda a, b, newer: dlfs.split(newer, 0.5)[0],
        lambda a, b, newer: dlfs.mix({a: 1, newer: 1}),
    ],
)
def test_labels_of_other_samples_are_refused(datasets, kind, read) -> None:
    a, b, newer = datasets["a"], datasets["b"], datasets["newer"]
    other = read(a, b, newer)
    for made_of in (a, dlfs.split(a, 0.5)[1], dlfs.concat([a, datasets["c"]])):
        labels = LABELS[kind][0](made_of)
        expected = "dataset 'a' version 1.*, of which the labels were made, got samples of dataset"
        for make in (partial(Loader, other, 4), partial(SampleDataset, other)):
            with pytest.raises(dlfs.UsageError, match=expected):
                make(labels=labels)
        with pytest.raises(dlfs.UsageError, match=expected):
            next(iter(Loader(other, 4, labels=lambda indices: labels(indices))))  # noqa: B023


def test_what_is_calculated_of_indices_is_the_callers(datasets) -> None:
    a, b = datasets["a"], datasets["b"]
    labels = FolderLabels(b)
    view = dlfs.concat([a, b])

    def second_only(indices):
        inside = indices >= len(a)
        assert type(indices.max()) is np.uint64
        return np.where(inside, labels(np.where(inside, indices - len(a), 0)), -1)

    for batch in Loader(view, 16, labels=second_only):
        for sample, label in zip(batch.samples, batch.labels.tolist(), strict=True):
            path = text_of(sample)
            assert label == (-1 if "/a" in path else labels.class_to_idx[path.split("/")[0]])


def test_an_index_out_of_range_is_refused(datasets) -> None:
    a = datasets["a"]
    for labels in (FolderLabels(a), ColumnLabels(a, "text"), FolderLabels(dlfs.concat([a]))):
        with pytest.raises(dlfs.UsageError, match=r"label samples of a: expected indices 0\.\.89"):
            labels(np.array([90], np.uint64))


def test_classes_may_be_given(datasets) -> None:
    a, b = datasets["a"], datasets["b"]
    for make, what in ((FolderLabels, "folders"), (partial(ColumnLabels, name="text"), "column")):
        first = make(dlfs.concat([a, b]))
        own = make(b)
        assert own.classes != first.classes
        given = make(b, classes=first.classes)
        assert (given.classes, given.class_to_idx) == (first.classes, first.class_to_idx)
        paths, found = read_all(Loader(b, 8, labels=given, as_pairs=True))
        check(first, LABELS["folder"][1], paths, found)
        problem = f"{what}.*: expected samples of the given classes 'b0', 'b1', got 'b2', 'common'"
        with pytest.raises(dlfs.UsageError, match=problem):
            make(b, classes=["b0", "b1"])
        for wrong in (["b0", "b0"], "b0"):
            with pytest.raises(dlfs.UsageError, match="classes as a list of names, each once"):
                make(b, classes=wrong)
    with pytest.raises(dlfs.UsageError, match="expected no classes for a column of int64"):
        ColumnLabels(a, "number", classes=["1"])


@pytest.mark.parametrize("name", VIEWS)
def test_a_source_for_grain_takes_views(datasets, name) -> None:
    a, b, c = (datasets[one] for one in "abc")
    view = VIEWS[name](a, b, c)
    labels = FolderLabels(view)
    one = np.zeros(1, np.uint64)

    def decode(index: int, sample: memoryview) -> tuple[str, str]:
        return bytes(sample).decode(), labels.classes[int(labels(one + np.uint64(index))[0])]

    is_mix = getattr(view, "weights", None) is not None
    for options in ({}, {"order": [3, 0, 2]}, {} if is_mix else {"where": [5, 2]}):
        source = Source(view, decode, **options)
        elements = [*source.__getitems__(range(len(source))), source[-1], source[0]]
        assert len(elements) == len(source) + 2
        assert all(path.split("/")[0] == folder for path, folder in elements)
        assert view.digests.content in repr(source)
