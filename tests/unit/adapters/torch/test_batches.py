"""A batch as the frameworks take it: a dictionary that they move, convert, slice and unpack.

Accelerate, Lightning and Transformers are not needed by the other tests; theirs are skipped without
them.
"""

from __future__ import annotations

import copy
import pickle
from importlib import import_module

import numpy as np
import pytest

from dlfs.errors import UsageError
from tests.unit.adapters.torch.conftest import SHAPE
from tests.unit.adapters.torch.orders import order, reference

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader, default_convert  # noqa: E402
from torch.utils.data._utils.pin_memory import pin_memory  # noqa: E402

from dlfs.adapters.torch import (  # noqa: E402
    ColumnLabels,
    FolderLabels,
    Jagged,
    Loader,
    SampleViews,
    TensorBatch,
)

pytestmark = pytest.mark.torch


def load_arrays(arrays, **options):
    """A loader of stacked arrays and integer labels."""
    options = {"labels": ColumnLabels(arrays, "number"), **options}
    return Loader(arrays, 16, dtype="float32", shape=SHAPE, **options)


@pytest.fixture
def batch(arrays):
    return next(iter(load_arrays(arrays)))


def name_pixels(items):
    """A collate function that names its samples as a model of Transformers does."""
    return {"pixel_values": torch.stack(list(items)), "mask": torch.ones(len(items))}


class Linear(torch.nn.Module):
    """A model that takes a batch by its keys, and notes the labels that it was given."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(6, 5)
        self.seen = []

    def forward(self, samples, labels=None):
        found = self.layer(samples.flatten(1))
        if labels is None:
            return {"logits": found}
        self.seen += labels.tolist()
        return {"loss": torch.nn.functional.cross_entropy(found, labels), "logits": found}


# ---- the dictionary ------------------------------------------------------------------------------


def test_a_batch_is_a_dictionary_of_what_a_model_takes(batch, arrays):
    assert isinstance(batch, dict)
    assert set(batch) == set({**batch}) == {"samples", "labels"}
    assert batch["samples"] is batch.samples
    assert batch["labels"] is batch.labels
    assert len(batch) == 16
    assert repr(batch) == "TensorBatch(16 samples, keys ['labels', 'samples'])"
    unlabelled = next(iter(Loader(arrays, 5, collate="stack")))
    assert (list(unlabelled), unlabelled.labels) == (["samples"], None)
    assert batch != unlabelled
    assert batch == batch
    with pytest.raises(KeyError, match=r"read 'pixels' of a batch: expected one of \['labels'"):
        batch["pixels"]
    with pytest.raises(KeyError, match=r"Loader\(as_pairs=True\) gives"):
        batch[0]


def test_samples_that_stay_a_list_have_no_key(samples):
    batch = next(iter(Loader(samples, 5, labels=FolderLabels(samples))))
    assert list(batch) == ["labels"]
    assert isinstance(batch.samples, SampleViews)
    with pytest.raises(KeyError, match=r"list of samples has no key, read batch\.samples"):
        batch["samples"]
    moved = batch.to("meta")
    assert all(one.is_meta for one in [*moved.samples, moved.labels])
    assert len(copy.copy(moved).samples) == len(moved) == 5
    made = TensorBatch(dict(batch))
    assert len(made) == 5
    with pytest.raises(AttributeError, match="read samples of a batch: expected a batch as the"):
        made.samples  # noqa: B018


def test_lists_of_anything_are_sent(arrays, opened):
    for dataset, transform in (
        (opened("mixed"), None),
        (arrays, lambda sample: {"n": len(sample)}),
    ):
        loader = Loader(dataset, 10, collate="list", arrays=True, transform=transform)
        batch = next(iter(loader))
        loaded = pickle.loads(pickle.dumps(batch))
        assert isinstance(loaded.samples, SampleViews)
        for one, other in zip(loaded.samples, batch.samples, strict=True):
            assert torch.equal(one, other) if transform is None else one == other


def test_the_keys_of_collates_dictionary_are_the_batches(arrays):
    batch = next(iter(load_arrays(arrays, collate=name_pixels)))
    assert set(batch) == {"labels", "mask", "pixel_values"}
    assert set(batch.samples) == {"mask", "pixel_values"}
    assert len(batch) == len(batch.labels) == 16
    samples, labels = next(iter(load_arrays(arrays, collate=name_pixels, as_pairs=True)))
    assert set(samples) == {"mask", "pixel_values"}
    assert torch.equal(labels, batch.labels)


def test_labels_come_from_one_place(arrays):
    def collate(items):
        return {"input_ids": torch.stack(list(items)), "labels": torch.zeros(len(items))}

    batch = next(iter(Loader(arrays, 4, collate=collate)))
    assert set(batch) == {"input_ids", "labels"}
    assert batch.labels.tolist() == [0] * 4
    assert set(batch.samples) == {"input_ids"}
    with pytest.raises(UsageError, match="from the loader or from collate's dictionary, got both"):
        next(iter(load_arrays(arrays, collate=collate)))


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda b: pickle.loads(pickle.dumps(b))]
)
def test_copies_have_the_attributes(batch, copied):
    made = copied(batch)
    assert (type(made), made.state, made.failures) == (TensorBatch, batch.state, ())
    assert torch.equal(made.indices, batch.indices)
    assert torch.equal(made["samples"], batch["samples"])
    made.pop("labels")
    assert batch.labels is not None


def test_what_a_framework_makes_of_the_values_is_a_batch_without_state(batch):
    made = type(batch)({key: value[:3] for key, value in batch.items()})
    assert (len(made), len(made.samples), made.labels.tolist()) == (3, 3, batch.labels[:3].tolist())
    assert made.failures == ()
    assert not hasattr(made, "state")
    with pytest.raises(AttributeError, match="read indices of a batch: expected a batch as the"):
        made.indices  # noqa: B018
    with pytest.raises(AttributeError, match="'TensorBatch' object has no attribute 'sample'"):
        made.sample  # noqa: B018
    assert len(made.to("meta")) == 3
    assert (len(TensorBatch({})), len(TensorBatch({"n": torch.tensor(1)}))) == (0, 0)


def test_moving_a_batch_keeps_all_of_it(batch, samples):
    moved = batch.to("meta", non_blocking=True)
    assert moved["samples"].is_meta
    assert moved["labels"].is_meta
    assert moved.indices.is_meta
    assert moved.state is batch.state
    assert not batch.samples.is_meta
    with pytest.raises(UsageError, match=r"expected a device, got torch\.float16"):
        batch.to(torch.float16)
    jagged = next(iter(Loader(samples, 4, collate="jagged")))
    assert jagged.to("meta").samples.values.is_meta
    assert jagged.samples.to("meta").offsets.is_meta


@pytest.mark.parametrize("workers", [0, 2])
def test_pairs_unpack_as_torchvisions_do(arrays, workers):
    loader = load_arrays(arrays, as_pairs=True, num_workers=workers, seed=3)
    seen = [(samples, labels) for samples, labels in loader]
    assert [len(samples) for samples, _ in seen] == [16] * 14 + [6]
    assert [int(n) for _, labels in seen for n in labels] == [
        index % 5 for index in reference(arrays, seed=3)
    ]
    loader.close()
    assert [labels for _, labels in Loader(arrays, 115, as_pairs=True)] == [None, None]


def test_the_state_goes_on_behind_a_pair(arrays):
    loader = load_arrays(arrays, as_pairs=True)
    given = iter(loader)
    next(given)
    rest = load_arrays(arrays)
    rest.load_state_dict(loader.state_dict())
    assert order(rest) == reference(arrays)[16:]


# ---- torch.utils.data ----------------------------------------------------------------------------


@pytest.mark.parametrize("collate", ["list", "jagged"])
def test_torchs_own_conversion_keeps_a_batch(samples, collate):
    batch = next(iter(Loader(samples, 4, collate=collate, labels=FolderLabels(samples))))
    made = default_convert(batch)
    assert (type(made), type(made.samples)) == (TensorBatch, type(batch.samples))
    assert made.state == batch.state
    for one, other in zip(made.samples, batch.samples, strict=True):
        assert one.data_ptr() == other.data_ptr()


@pytest.mark.parametrize(
    ("options", "workers"),
    [({}, 0), ({"as_pairs": True}, 0), ({"as_pairs": True, "labels": None}, 0), ({}, 1)],
)
def test_batches_are_not_collated_once_more(arrays, options, workers):
    for batch_size in (1, 4):
        over = DataLoader(load_arrays(arrays, **options), batch_size, num_workers=workers)
        with pytest.raises(UsageError, match="make the DataLoader over it with batch_size=None"):
            next(iter(over))


@pytest.mark.parametrize("workers", [0, 1])
def test_pairs_of_a_dataloader_over_a_loader(arrays, workers):
    loader = Loader(arrays, 16, arrays=True, labels=np.array, as_pairs=True)
    direct = [(taken.clone(), labels) for taken, labels in loader]
    loader.set_epoch(0)
    over = DataLoader(loader, batch_size=None, num_workers=workers)
    for (taken, labels), (expected, numbers) in zip(over, direct, strict=True):
        assert (taken.tolist(), labels.tolist()) == (expected.tolist(), numbers.tolist())


@pytest.mark.parametrize("workers", [0, 1])
def test_arrays_of_a_collate_function_stay_arrays(arrays, workers):
    loader = Loader(arrays, 50, collate=lambda items: np.stack(items), num_workers=workers)
    assert type(next(iter(loader)).samples) is np.ndarray
    loader.close()


def test_pinning_by_torch_pins_all_tensors(batch, samples, monkeypatch):
    pinned = []

    def pin(tensor, device=None):
        pinned.append(tensor)
        return tensor.clone()

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    made = pin_memory(batch)
    assert (type(made), made.state) == (TensorBatch, batch.state)
    assert {id(one) for one in pinned} == {id(batch[k]) for k in batch} | {id(batch.indices)}
    del pinned[:]
    jagged = next(iter(Loader(samples, 4, collate="jagged"))).samples
    assert isinstance(pin_memory([jagged])[0], Jagged)
    assert len(pinned) == 2


# ---- Accelerate ----------------------------------------------------------------------------------


@pytest.mark.frameworks
def test_accelerate_moves_slices_and_joins(batch):
    operations = import_module("accelerate.utils.operations")
    moved = operations.send_to_device(batch, "meta", non_blocking=True)
    assert moved.samples.is_meta
    assert moved.state is batch.state
    assert operations.find_batch_size(batch) == 16
    half = operations.slice_tensors(batch, slice(0, 8))
    other = operations.slice_tensors(batch, slice(8, 16))
    both = operations.concatenate([half, other])
    assert type(both) is TensorBatch
    assert torch.equal(both.samples, batch.samples)
    assert torch.equal(both.labels, batch.labels)
    shape = operations.get_data_structure(batch)
    assert shape["samples"].shape == batch.samples.shape


@pytest.mark.frameworks
@pytest.mark.parametrize("collate", ["list", "jagged"])
def test_accelerate_does_not_cut_samples_of_any_length(samples, collate):
    accelerate = import_module("accelerate")
    options = {"collate": collate, "labels": FolderLabels(samples)}
    batch = next(iter(Loader(samples, 7, **options)))
    assert accelerate.utils.operations.find_batch_size(batch) == 7
    accelerator = accelerate.Accelerator(cpu=True)
    dispatched = next(iter(accelerator.prepare(DataLoader(Loader(samples, 7, **options), None))))
    assert torch.equal(dispatched.labels, batch.labels)
    if collate == "jagged":
        assert torch.equal(dispatched.samples.values, batch.samples.values)
    else:
        assert not hasattr(dispatched, "samples")
    prepared = next(iter(accelerator.prepare(Loader(samples, 7, **options))))
    assert [len(one) for one in prepared.samples] == [len(one) for one in batch.samples]


@pytest.mark.frameworks
def test_accelerate_prepares_a_loader(arrays):
    accelerate = import_module("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    loader = accelerator.prepare(load_arrays(arrays, seed=2))
    assert order(loader) == reference(arrays, seed=2)
    over = accelerator.prepare(DataLoader(load_arrays(arrays, seed=2), batch_size=None))
    batches = list(over)
    assert {type(batch) for batch in batches} == {TensorBatch}
    assert [int(n) for one in batches for n in one.labels] == [
        index % 5 for index in reference(arrays, seed=2)
    ]


# ---- Transformers --------------------------------------------------------------------------------


@pytest.mark.frameworks
@pytest.mark.filterwarnings("ignore")  # what other packages deprecate
@pytest.mark.parametrize("own_loss", [False, True])
def test_the_trainer_of_transformers_trains_and_evaluates(arrays, tmp_path, own_loss):
    transformers = import_module("transformers")

    class Trainer(transformers.Trainer):
        def get_train_dataloader(self):
            return load_arrays(arrays, seed=6)

        def get_test_dataloader(self, test_dataset):
            return load_arrays(arrays, shuffle=None)

    def find_loss(outputs, labels, num_items_in_batch=None):
        return torch.nn.functional.cross_entropy(outputs["logits"], labels, reduction="sum") / 16

    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=5, report_to=[], use_cpu=True, disable_tqdm=True
    )
    model = Linear()
    trainer = Trainer(model, arguments, compute_loss_func=find_loss if own_loss else None)
    before = model.layer.weight.detach().clone()
    trainer.train()
    assert not torch.equal(model.layer.weight, before)
    expected = [index % 5 for index in reference(arrays, seed=6)[: 5 * 16]]
    assert model.seen == ([] if own_loss else expected)
    found = trainer.predict(None)
    expected = [index % 5 for index in reference(arrays, shuffle=None)]
    assert found.label_ids.tolist() == expected


# ---- Lightning -----------------------------------------------------------------------------------


@pytest.mark.frameworks
@pytest.mark.filterwarnings("ignore")  # what other packages deprecate
def test_lightning_moves_and_converts(batch, samples):
    utilities = import_module("lightning.fabric.utilities.apply_func")
    data = import_module("lightning.pytorch.utilities.data")
    functions = import_module("lightning_utilities.core.apply_func")
    moved = utilities.move_data_to_device(batch, torch.device("meta"))
    assert moved.samples.is_meta
    assert moved.state is batch.state

    def halve(tensor):
        return tensor.half() if tensor.is_floating_point() else tensor

    halved = functions.apply_to_collection(batch, torch.Tensor, halve)
    assert type(halved) is TensorBatch
    assert (halved.samples.dtype, halved.labels.dtype) == (torch.float16, torch.int64)
    assert data.extract_batch_size(batch) == 16
    jagged = next(iter(Loader(samples, 7, collate="jagged", labels=FolderLabels(samples))))
    made = functions.apply_to_collection(jagged, torch.Tensor, torch.clone)
    assert isinstance(made.samples, Jagged)
    assert torch.equal(made.samples.values, jagged.samples.values)
    views = utilities.move_data_to_device(next(iter(Loader(samples, 7))), torch.device("meta"))
    assert all(one.is_meta for one in views.samples)
