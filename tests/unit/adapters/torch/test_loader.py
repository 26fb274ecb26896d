"""The loader in one process: tensors, labels, transforms, errors, and where it stands."""

from __future__ import annotations

import io
import json
import pickle
import threading
import weakref
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

import dlfs
from dlfs.base.units import KIB, MIB
from dlfs.errors import ChecksumError, TransformError, UsageError
from tests.support.datasets import random_samples
from tests.unit.adapters.torch.conftest import COUNT, SHAPE, array
from tests.unit.adapters.torch.orders import order, reference, take_all

torch = pytest.importorskip("torch")

from dlfs.adapters.torch import (  # noqa: E402
    FolderLabels,
    Jagged,
    Loader,
    SampleDataset,
    SampleViews,
    TensorBatch,
)
from dlfs.adapters.torch.tensors import view_array  # noqa: E402
from tests.support.files import flip_bit  # noqa: E402
from tests.support.volumes import new_volume, write_dataset  # noqa: E402

pytestmark = pytest.mark.torch


# ---- tensors -------------------------------------------------------------------------------------


def test_samples_are_views_of_the_batches_memory(samples):
    loader = Loader(samples, 16, seed=4)
    batches = list(loader)
    assert order(batches) == reference(samples, seed=4)
    for batch in batches:
        assert isinstance(batch.samples, SampleViews)
        assert len(batch) == len(batch.samples) == len(batch.indices)
        assert batch.labels is None
        # One memory below all of them, larger than any of them: nothing was copied.
        places = {sample.untyped_storage().data_ptr() for sample in batch.samples}
        assert len(places) == 1
        assert batch.samples[0].untyped_storage().nbytes() > sum(map(len, batch.samples))
        for index, sample in zip(batch.indices.tolist(), batch.samples, strict=True):
            assert sample.dtype == torch.uint8
            assert sample.numpy().tobytes() == samples[index]


@pytest.mark.parametrize("options", [{"collate": "jagged"}, {"transform": bytes, "lookahead": 0}])
def test_a_batch_is_released_before_the_next_one_is_read(samples, options):
    class Watching(Loader):
        alive: ClassVar[list[int]] = []
        read: ClassVar[list[weakref.ref]] = []

        def _read_one(self, *args):
            self.alive.append(sum(batch() is not None for batch in self.read))
            one = super()._read_one(*args)
            self.read.append(weakref.ref(one[0]))
            return one

    assert len(list(Watching(samples, 16, **options))) > 2
    assert set(Watching.alive) == {0}


def test_views_outlive_batch_epoch_and_dataset(opened):
    dataset = opened("bytes", memory_bytes=1 * MIB)
    expected = [dataset[index] for index in range(COUNT)]
    kept = [(batch.indices.tolist(), batch.samples[:]) for batch in Loader(dataset, 7)]
    dataset.close()
    for indices, views in kept:
        assert [view.numpy().tobytes() for view in views] == [expected[i] for i in indices]


def test_views_are_sent_as_one_tensor(samples):
    batch = next(iter(Loader(samples, 16)))
    data = pickle.dumps(batch)
    assert len(data) < sum(map(len, batch.samples)) + 8 * KIB
    loaded = pickle.loads(data)
    assert loaded.state == batch.state
    assert [s.tolist() for s in loaded.samples] == [s.tolist() for s in batch.samples]
    assert loaded.samples[3].untyped_storage().nbytes() == sum(map(len, batch.samples))
    assert pickle.loads(pickle.dumps(SampleViews())) == []


def test_jagged(samples):
    batch = next(iter(Loader(samples, 16, collate="jagged")))
    assert isinstance(batch.samples, Jagged)
    expected = [samples[index] for index in batch.indices.tolist()]
    assert len(batch.samples) == 16
    assert [one.numpy().tobytes() for one in batch.samples] == expected
    assert batch.samples[-1].numpy().tobytes() == expected[-1]
    with pytest.raises(IndexError, match="sample 16 of 16"):
        batch.samples[16]
    padded = batch.samples.padded(255)
    assert padded.shape == (16, max(map(len, expected)))
    for row, data in zip(padded.numpy(), expected, strict=True):
        assert row.tobytes() == data + b"\xff" * (len(row) - len(data))
    nested = batch.samples.nested()
    assert [one.numpy().tobytes() for one in nested.unbind()] == expected
    empty = Jagged(torch.empty(0, 3), torch.zeros(1, dtype=torch.int64))
    assert (list(empty), empty.padded().shape) == ([], (0, 0, 3))


def test_arrays_are_stacked(arrays):
    for batch in Loader(arrays, 50, dtype="float32", shape=SHAPE):
        assert batch.samples.dtype == torch.float32
        expected = np.stack([array(index) for index in batch.indices.tolist()])
        assert np.array_equal(batch.samples.numpy(), expected)
    first = next(iter(Loader(arrays, 5, collate="stack")))
    assert first.samples.shape == (5, 24)
    assert first.samples[2].numpy().tobytes() == arrays[int(first.indices[2])]


def test_lengths_that_do_not_fit_are_told(samples, arrays):
    with pytest.raises(UsageError, match="stack a batch: expected samples of"):
        next(iter(Loader(samples, 5, collate="stack")))
    with pytest.raises(UsageError, match="stack a batch: expected samples of 28 bytes"):
        next(iter(Loader(arrays, 5, dtype="float32", shape=(7,))))
    with pytest.raises(UsageError, match="stack a batch: expected samples of 28 bytes"):
        next(iter(Loader(arrays, 5, dtype="float32", shape=(7,), transform=len)))


def test_arrays_as_the_dataset_says(arrays, opened):
    for batch in Loader(arrays, 50, arrays=True):
        expected = np.stack([array(index) for index in batch.indices.tolist()])
        assert np.array_equal(batch.samples.numpy(), expected)
    loader = Loader(arrays, 10, arrays=True, transform=torch.sum)
    batch = next(iter(loader))
    assert batch.samples.tolist() == [array(i).sum() for i in batch.indices.tolist()]
    mixed = opened("mixed")
    for workers in (0, 1):
        for batch in Loader(mixed, 6, arrays=True, collate="list", num_workers=workers):
            for index, sample in zip(batch.indices.tolist(), batch.samples, strict=True):
                shape = SHAPE if index % 2 else SHAPE[::-1]
                assert np.array_equal(sample.numpy(), array(index).reshape(shape))
    with pytest.raises(UsageError, match="expected all of one form"):
        next(iter(Loader(mixed, 20, arrays=True)))
    dataset = SampleDataset(arrays, arrays=True)
    assert np.array_equal(dataset[7].numpy(), array(7))


@pytest.mark.parametrize("options", [{"arrays": True}, {"dtype": "float32", "shape": SHAPE}])
def test_a_transform_may_change_arrays_in_place(opened, options):
    arrays = opened("arrays")
    loader = Loader(arrays, 16, transform=lambda sample: sample.sub_(1000), **options)
    for _ in range(2):
        for batch in loader:
            expected = np.stack([array(index) - 1000 for index in batch.indices.tolist()])
            assert np.array_equal(batch.samples.numpy(), expected)
    for batch in Loader(arrays, 16, **options):
        expected = np.stack([array(index) for index in batch.indices.tolist()])
        assert np.array_equal(batch.samples.numpy(), expected)


@pytest.mark.parametrize("transform", [None, lambda sample: sample.sub_(1000)])
@pytest.mark.parametrize("options", [{"arrays": True}, {"dtype": "float32", "shape": SHAPE}])
def test_arrays_by_index_may_be_changed_in_place(opened, options, transform):
    arrays = opened("arrays")
    dataset = SampleDataset(arrays, transform=transform, **options)
    moved = 0 if transform is None else 1000
    for _ in range(2):
        for index in range(COUNT):
            sample = dataset[index]
            assert np.array_equal(sample.numpy(), array(index) - moved)
            sample.zero_()
    for index in range(COUNT):
        assert arrays[index] == array(index).tobytes()


def test_bytes_by_index_may_be_changed_in_place(samples):
    dataset = SampleDataset(samples)
    expected = [samples[index] for index in range(COUNT)]
    for _ in range(2):
        for index in range(COUNT):
            sample = dataset[index]
            assert sample.numpy().tobytes() == expected[index]
            sample.zero_()


def test_views_of_arrays_are_no_copies(arrays):
    batch = arrays.read([5, 9])
    found = batch.arrays(stack=False)
    assert [view_array(one).data_ptr() for one in found] == [one.ctypes.data for one in found]
    unaligned = np.frombuffer(b"-" + array(3).tobytes(), np.float32, offset=1)
    assert view_array(unaligned).tolist() == array(3).ravel().tolist()


def test_a_batch_is_moved_with_all_that_is_in_it(samples):
    def collate(items):
        return {"views": SampleViews(items), "pair": (items[0], Jagged(items[0], items[1])), "n": 3}

    loader = Loader(samples, 4, collate=collate, labels=FolderLabels(samples))
    batch = next(iter(loader)).map(lambda tensor: tensor.to(torch.float64))
    assert isinstance(batch, TensorBatch)
    assert batch.labels.dtype == batch.indices.dtype == torch.float64
    assert {one.dtype for one in batch.samples["views"]} == {torch.float64}
    assert batch.samples["pair"][0].dtype == batch.samples["pair"][1].offsets.dtype == torch.float64
    assert batch.samples["n"] == 3
    assert next(iter(Loader(samples, 4))).to("meta").samples[0].is_meta


def test_pinning_needs_an_accelerator(samples):
    if torch.accelerator.is_available():
        batch = next(iter(Loader(samples, 4, pin_memory=True, collate="jagged")))
        assert batch.samples.values.is_pinned()
        return
    with pytest.warns(UserWarning, match="there is no accelerator"):
        loader = Loader(samples, 4, pin_memory=True)
    assert len(next(iter(loader)).samples) == 4


def test_pinned_memory(samples):
    if not torch.accelerator.is_available():
        pytest.skip("no accelerator to pin memory for")
    for workers in (0, 2):
        batch = next(iter(Loader(samples, 4, pin_memory=True, num_workers=workers)))
        assert batch.indices.is_pinned()
        assert all(sample.is_pinned() for sample in batch.samples)


# ---- labels --------------------------------------------------------------------------------------


def write(path: Path, names: list[bytes]) -> dlfs.Dataset:
    dlfs.format_volume(str(path), size_bytes=8 * MIB)
    with dlfs.open(str(path)) as volume:
        write_dataset(volume, "ds", {name: name for name in names})
        return volume.dataset("ds")


def test_labels_of_deeper_folders(tmp_path):
    # "a-b/" comes before "a/" in path order, and after it in the order of names.
    names = [b"test/a/1", b"train/a-b/1", b"train/a/2", b"train/a/x/3", b"train/b/4"]
    with write(tmp_path / "volume.img", names) as dataset:
        labels = FolderLabels(dataset, level=1)
        assert labels.classes == ("a", "a-b", "b")
        found = dict(zip(dataset.paths(), labels(np.arange(5, dtype=np.uint64)), strict=True))
        assert found == dict(zip(names, [0, 1, 0, 0, 2], strict=True))
        assert FolderLabels(dataset).classes == ("test", "train")
        with pytest.raises(UsageError, match="paths of 3 folders or more, got 'test/a/1'"):
            FolderLabels(dataset, level=2)
        with pytest.raises(UsageError, match="level >= 0"):
            FolderLabels(dataset, level=-1)


def test_names_of_classes_are_text(tmp_path):
    with (
        write(tmp_path / "volume.img", [b"\xff/1"]) as dataset,
        pytest.raises(UsageError, match=r"expected UTF-8, got '\\xff'"),
    ):
        FolderLabels(dataset)


# ---- transforms ----------------------------------------------------------------------------------


@pytest.mark.parametrize("lookahead", [0, 1, 3])
def test_transforms_run_in_threads_in_order_and_not_far_ahead(samples, lookahead):
    threads: set[str] = set()
    done: list[int] = []
    both = threading.Barrier(2)

    def transform(sample):
        if len(threads) < 2:
            threads.add(threading.current_thread().name)
            both.wait(30)  # two threads are at it, or this never ends
        done.append(len(sample))
        return torch.tensor([len(sample), sum(sample)])

    loader = Loader(samples, 10, transform=transform, threads=2, lookahead=lookahead)
    for number, batch in enumerate(loader, 1):
        assert len(done) <= (number + lookahead) * 10
        for index, row in zip(batch.indices.tolist(), batch.samples.tolist(), strict=True):
            assert row == [len(samples[index]), sum(samples[index])]
    assert len(done) == COUNT
    assert len(threads) == 2
    assert not [t for t in threading.enumerate() if t.name.startswith("dlfs-transform")]


def test_a_transform_is_given_read_only_bytes_or_a_tensor(samples, arrays):
    kinds: set[tuple[type, bool]] = set()

    def transform(sample):
        kinds.add((type(sample), sample.readonly))
        return io.BytesIO(sample).read(1)

    batch = next(iter(Loader(samples, 3, transform=transform, collate="list")))
    assert kinds == {(memoryview, True)}
    assert batch.samples == [samples[index][:1] for index in batch.indices.tolist()]
    loader = Loader(arrays, 3, dtype="float32", shape=SHAPE, transform=torch.sum)
    batch = next(iter(loader))
    assert batch.samples.tolist() == [array(i).sum() for i in batch.indices.tolist()]


def test_an_error_of_a_transform_names_the_sample_and_comes_in_its_turn(samples):
    bad = reference(samples, seed=1)[35]

    def transform(sample):
        if bytes(sample) == content:
            raise ValueError("no image")
        return len(sample)

    content = samples[bad]
    loader = Loader(samples, 10, seed=1, transform=transform, lookahead=3)
    given = []
    message = rf"transform sample {bad} 'class\d/\d+' of dataset 'bytes': ValueError: no image"
    with pytest.raises(TransformError, match=message) as caught:
        take_all(loader, given)
    assert isinstance(caught.value.__cause__, ValueError)
    assert order(given) == reference(samples, seed=1)[:30]
    assert loader.position == 30
    with pytest.raises(TransformError):
        next(iter(loader))  # it stands before the bad batch
    content = b""
    assert order(loader) == reference(samples, seed=1)[30:]


def test_samples_that_cannot_be_read(tmp_path):
    path = new_volume(tmp_path / "volume.img", size_bytes=8 * MIB)
    with dlfs.open(str(path)) as volume:
        write_dataset(volume, "ds", random_samples(60, low=20))
        with volume.dataset("ds") as dataset:
            expected = reference(dataset, seed=3)
            offset = dataset.stat(expected[25]).offset_bytes
    flip_bit(path, offset)
    with dlfs.open(str(path)) as volume, volume.dataset("ds") as dataset:
        for transform in (None, bytes):
            common = {"seed": 3, "transform": transform, "collate": "list"}
            given = []
            loader = Loader(dataset, 10, **common)
            with pytest.raises(ChecksumError, match=f"sample {expected[25]} "):
                take_all(loader, given)
            assert order(given) == expected[:20]
            assert loader.position == 20
            batches = list(Loader(dataset, 10, on_error="skip", **common))
            assert order(batches) == expected[:25] + expected[26:]
            assert [len(batch.failures) for batch in batches] == [0, 0, 1, 0, 0, 0]
            assert batches[2].failures[0].index == expected[25]
            assert pickle.loads(pickle.dumps(batches[2])).failures == batches[2].failures
            replaced = order(Loader(dataset, 10, on_error="replace", **common))
            assert len(replaced) == 60
            assert replaced[25] == (expected[25] + 1) % 60


# ---- where it stands -----------------------------------------------------------------------------


def test_epochs_follow_each_other(samples):
    loader = Loader(samples, 25, seed=2)
    for epoch in range(3):
        assert (loader.epoch, loader.position, len(loader)) == (epoch, 0, 10)
        loader.set_epoch(epoch)  # as some loops do
        assert order(loader) == reference(samples, seed=2, epoch=epoch)
    loader.set_epoch(1)
    assert order(loader) == reference(samples, seed=2, epoch=1)
    with pytest.raises(UsageError, match="expected 0 or more, got -1"):
        loader.set_epoch(-1)


def test_an_iteration_goes_on_where_the_last_one_was_left(samples):
    loader = Loader(samples, 25, seed=2)
    given = []
    for batch in loader:
        given.append(batch)
        if len(given) % 3 == 0:
            break
    loader.set_epoch(0)
    assert (loader.position, len(loader)) == (75, 10)  # of a whole epoch, always
    assert order([*given, *loader]) == reference(samples, seed=2)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("options", [{"order": range(COUNT)[::-1]}, {"shuffle": None}])
def test_an_iteration_in_a_fixed_order_begins_anew(samples, options, workers):
    loader = Loader(samples, 25, num_workers=workers, **options)
    expected = reference(samples, **options)
    for _ in range(2):
        batch = next(iter(loader))
        assert loader.position == 25  # until the next iteration begins
        assert order([batch]) == expected[:25]
    assert order(loader) == expected
    assert (loader.epoch, loader.position) == (1, 0)
    next(iter(loader))
    loader.load_state_dict(batch.state)
    assert order(loader) == expected[25:]
    loader.load_state_dict(batch.state)
    next(iter(loader))
    assert order(loader) == expected
    loader.close()


@pytest.mark.parametrize("shuffle", ["global", "chunk", None])
def test_a_state_is_plain_and_good_for_another_process_world_and_batch(samples, shuffle):
    first = [
        Loader(samples, 10, seed=8, shuffle=shuffle, rank=rank, world_size=3) for rank in range(3)
    ]
    taken = [-1] * 60
    for rank, loader in enumerate(first):
        loader.set_epoch(5)
        for step, batch in zip(range(2), loader, strict=False):
            taken[step * 30 + rank : (step + 1) * 30 : 3] = batch.indices.tolist()
            assert batch.state == loader.state_dict()
    states = [json.loads(json.dumps(loader.state_dict())) for loader in first]
    assert states[0] == states[1] == states[2]
    assert (states[0]["seed"], states[0]["epoch"], states[0]["position"]) == (8, 5, 60)
    second = [Loader(samples, 7, rank=rank, world_size=2) for rank in range(2)]
    rest = [-1] * (COUNT - 60)
    for rank, loader in enumerate(second):
        loader.load_state_dict(states[0])
        rest[rank::2] = order(loader)
        assert loader.epoch == 6
        assert loader.state_dict()["seed"] == 8
    assert taken + rest == reference(samples, seed=8, epoch=5, shuffle=shuffle)


def test_drop_last(samples):
    for rank in range(2):
        loader = Loader(samples, 20, drop_last=True, rank=rank, world_size=2)
        assert len(loader) == 5
        assert [len(batch) for batch in loader] == [20] * 5
        assert loader.epoch == 1


def test_states_of_others_are_refused(samples, arrays):
    loader = Loader(samples, 4)
    with pytest.raises(UsageError, match="this checkpoint is of another dataset: expected dataset"):
        loader.load_state_dict(Loader(arrays, 4).state_dict())
    good = loader.state_dict()
    for bad in ({}, {"a": {"b": 1}}, {**good, "version": 9}, {**good, "position": COUNT + 1}):
        with pytest.raises(UsageError):
            loader.load_state_dict(bad)
    assert loader.state_dict() == good


@pytest.mark.parametrize(
    "arguments",
    [
        {"batch_size": 0},
        {"lookahead": -1},
        {"num_workers": -1},
        {"threads": 0},
        {"collate": "stacked"},
        {"shape": (3,)},
        {"dtype": "uint8", "arrays": True},
        {"shuffle": "yes"},
        {"seed": -1},
        {"on_error": "ignore"},
        {"rank": 1},
        {"rank": 2, "world_size": 2},
        {"rank": -1, "world_size": 2},
    ],
)
def test_wrong_arguments(samples, arguments):
    with pytest.raises(UsageError):
        Loader(samples, **{"batch_size": 4, **arguments})


def test_rank_and_world_size_of_the_environment(samples, monkeypatch):
    loader = Loader(samples, 4)  # made before the launcher's variables are there
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(UsageError, match="environment's RANK and WORLD_SIZE, got"):
        next(iter(loader))
    monkeypatch.setenv("WORLD_SIZE", "three")
    with pytest.raises(UsageError, match="environment's RANK and WORLD_SIZE, got"):
        next(iter(loader))
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert (loader.rank, loader.world_size) == (1, 3)
    loader = Loader(samples, 4, rank=0, world_size=1)
    assert (loader.rank, loader.world_size) == (0, 1)


@pytest.mark.parametrize("collate", ["auto", "stack"])
def test_results_of_several_shapes_are_not_stacked(samples, collate):
    loader = Loader(samples, 5, transform=lambda data: torch.zeros(len(data)), collate=collate)
    with pytest.raises(UsageError, match=r"tensors of one shape, got shapes .*collate='jagged'"):
        next(iter(loader))
