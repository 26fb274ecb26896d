"""Three epochs under the frameworks that people train with, and one resumed in mid-epoch.

Each training logs the indices that it is given: every sample once an epoch, in the order of
``Dataset.batches``, another one each epoch; and a training that was stopped behind some step and
goes on from its checkpoint logs what one that was not stopped does.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from tests.unit.adapters.torch.conftest import COUNT, SHAPE
from tests.unit.adapters.torch.orders import reference

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from dlfs.adapters.torch import (  # noqa: E402
    DistributedBatchSampler,
    Loader,
    SampleDataset,
    TensorBatch,
)

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore"),  # what other packages deprecate
]

EPOCHS = 3
BATCH = 32
STEPS = -(-COUNT // BATCH)
STOP = STEPS + 3
"""The step behind which a training is stopped: in the middle of its second epoch."""


class Stop(Exception):
    """Ends a training as a kill does."""


class SimpleBatch:
    """Samples and labels that a DataLoader collates."""

    def __init__(self, items) -> None:
        samples, labels = zip(*items, strict=True)
        self.samples, self.labels = torch.stack(samples), torch.tensor(labels)


class Model(nn.Module):
    """Learns from arrays, and logs the labels, which are the indices."""

    def __init__(self, stop: int | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 1)
        self.log: list[int] = []
        self.steps = 0
        self.stop = stop

    def forward(self, samples, labels):
        if self.steps == self.stop:
            raise Stop
        self.steps += 1
        self.log += labels.tolist()
        return {"loss": self.linear(samples.flatten(1)).square().mean()}


def number(indices):
    return indices.astype("int64")


def load(arrays, batch=BATCH, **options) -> Loader:
    return Loader(arrays, batch, seed=3, dtype="float32", shape=SHAPE, labels=number, **options)


@pytest.fixture
def expected(arrays) -> list[int]:
    """The indices of three epochs, each sample once in each and no two epochs alike."""
    epochs = [reference(arrays, seed=3, epoch=epoch) for epoch in range(EPOCHS)]
    assert all(sorted(one) == list(range(COUNT)) for one in epochs)
    assert len({tuple(one) for one in epochs}) == EPOCHS
    return [index for one in epochs for index in one]


def check(stopped: Model, resumed: Model, expected: list[int], stop: int = STOP) -> None:
    assert (
        len(stopped.log)
        == min(stop, STEPS) * BATCH
        - (stop >= STEPS) * (STEPS * BATCH - COUNT)
        + max(0, stop - STEPS) * BATCH
    )
    assert stopped.log + resumed.log == expected


# ---- Lightning -----------------------------------------------------------------------------------


def fit_with_lightning(
    folder: Path, loader, stop: int | None, checkpoint: str | None, *, evaluation=None, **options
) -> Model:
    lightning = import_module("lightning")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def training_step(self, batch, number):
            if not isinstance(batch, TensorBatch | SimpleBatch):  # of combined loaders
                if batch["short"] is not None:  # it ended before the longer one
                    self.model.log += [-1 - index for index in batch["short"].labels.tolist()]
                batch = batch["long"]
            return self.model(batch.samples, batch.labels)["loss"]

        def validation_step(self, batch, number) -> None:
            pass

        def on_train_batch_end(self, *arguments) -> None:
            if self.model.steps == stop:
                self.trainer.save_checkpoint(folder / "stopped.ckpt")
                raise Stop

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = lightning.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **{"enable_checkpointing": False, **options},
    )
    module = Module()
    if stop is None:
        trainer.fit(module, loader, evaluation, ckpt_path=checkpoint, weights_only=True)
    else:
        with pytest.raises(Stop):
            trainer.fit(module, loader)
    return module.model


@pytest.mark.parametrize("workers", [0, 2])
def test_lightning(arrays, tmp_path, expected, workers):
    loader = load(arrays, num_workers=workers)
    assert fit_with_lightning(tmp_path, loader, None, None).log == expected
    loader.close()
    first, second = load(arrays, num_workers=workers), load(arrays)
    stopped = fit_with_lightning(tmp_path, first, STOP, None)
    first.close()
    resumed = fit_with_lightning(tmp_path, second, None, str(tmp_path / "stopped.ckpt"))
    check(stopped, resumed, expected)


@pytest.mark.parametrize("workers", [0, 2])
def test_lightning_from_the_end_of_an_epoch(arrays, tmp_path, expected, workers):
    def fit(checkpoint: Path | None, folder: Path) -> Model:
        callbacks = import_module("lightning.pytorch.callbacks")
        keep = callbacks.ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1)
        loader = load(arrays, num_workers=workers)
        options = {"enable_checkpointing": True, "callbacks": [keep]}
        model = fit_with_lightning(folder, loader, None, checkpoint and str(checkpoint), **options)
        loader.close()
        return model

    assert fit(None, tmp_path / "first").log == expected
    for epoch in range(EPOCHS):
        resumed = fit(tmp_path / "first" / f"epoch={epoch}.ckpt", tmp_path / f"{epoch}")
        assert resumed.log == expected[(epoch + 1) * COUNT :]


@pytest.mark.parametrize("stop", [STEPS - 1, STEPS, STEPS + 1, STOP, STOP + 3])
@pytest.mark.parametrize("batch", [7, 16, 50, 96])
def test_lightning_resumes_at_another_batch_size(arrays, tmp_path, expected, batch, stop):
    """As it does at another number of devices: the samples of a global batch change."""
    stopped = fit_with_lightning(tmp_path, load(arrays), stop, None)
    checkpoint = str(tmp_path / "stopped.ckpt")
    resumed = fit_with_lightning(tmp_path, load(arrays, batch), None, checkpoint)
    check(stopped, resumed, expected, stop)


@pytest.mark.parametrize("kind", ["loader", "sampler"])
def test_lightning_resumes_a_stateful_dataloader(arrays, tmp_path, expected, kind):
    module = import_module("torchdata.stateful_dataloader")

    def make(batch):
        if kind == "loader":
            return module.StatefulDataLoader(load(arrays, batch), batch_size=None)
        dataset = SampleDataset(arrays, dtype="float32", shape=SHAPE, labels=number)
        sampler = DistributedBatchSampler(arrays, batch, 1, 0, seed=3)
        return module.StatefulDataLoader(
            dataset, batch_sampler=sampler, collate_fn=lambda items: SimpleBatch(items)
        )

    stopped = fit_with_lightning(tmp_path, make(BATCH), STOP, None)
    resumed = fit_with_lightning(tmp_path, make(20), None, str(tmp_path / "stopped.ckpt"))
    check(stopped, resumed, expected)


def test_lightning_overfits_the_same_batches(arrays, tmp_path):
    model = fit_with_lightning(tmp_path, load(arrays), None, None, overfit_batches=2)
    assert model.log == EPOCHS * reference(arrays, seed=3)[: 2 * BATCH]


@pytest.mark.parametrize("mode", ["max_size_cycle", "max_size", "min_size"])
def test_lightning_resumes_combined_loaders(arrays, tmp_path, mode):
    """The shorter loader begins again within an epoch of the longer one."""
    combined = import_module("lightning.pytorch.utilities.combined_loader")

    def make(batch=BATCH):
        short = load(arrays, batch, where=range(70))
        return combined.CombinedLoader({"long": load(arrays, batch), "short": short}, mode)

    whole = fit_with_lightning(tmp_path, make(), None, None)
    steps = whole.steps // EPOCHS
    for stop in range(1, 2 * steps):
        stopped = fit_with_lightning(tmp_path, make(), stop, None)
        resumed = fit_with_lightning(tmp_path, make(), None, str(tmp_path / "stopped.ckpt"))
        assert stopped.log + resumed.log == whole.log, stop


@pytest.mark.parametrize("limit", [None, 3])
@pytest.mark.parametrize("wrapped", [None, 0, 2])
def test_lightning_validates_the_same_samples(arrays, tmp_path, expected, wrapped, limit):
    """All of them, or as many batches as ``limit_val_batches`` says; behind two to try it."""
    lightning = import_module("lightning")
    validations = []

    class Validation(lightning.Callback):
        def on_validation_epoch_start(self, *arguments) -> None:
            validations.append([])

        def on_validation_batch_end(self, _trainer, _module, _outputs, batch, *arguments) -> None:
            validations[-1] += batch.labels.tolist()

    evaluation = load(arrays, order=range(COUNT))
    if wrapped is not None:
        evaluation = DataLoader(evaluation, batch_size=None, num_workers=wrapped)
    options = {"callbacks": [Validation()], "limit_val_batches": limit}
    model = fit_with_lightning(tmp_path, load(arrays), None, None, evaluation=evaluation, **options)
    count = COUNT if limit is None else limit * BATCH
    assert validations == [list(range(2 * BATCH)), *[list(range(count))] * EPOCHS]
    assert model.log == expected


def test_lightning_over_dataloaders(arrays, tmp_path, expected):
    outer = DataLoader(load(arrays), batch_size=None, num_workers=2)
    assert fit_with_lightning(tmp_path, outer, None, None).log == expected


# ---- Accelerate ----------------------------------------------------------------------------------


def train(model: Model, loader, epochs: int = EPOCHS) -> None:
    for _ in range(epochs):
        for batch in loader:
            model(batch.samples, batch.labels)["loss"].backward()


@pytest.mark.parametrize("workers", [0, 2])
def test_accelerate(arrays, tmp_path, expected, workers):
    accelerate = import_module("accelerate")

    def prepare(model):
        accelerator = accelerate.Accelerator(cpu=True)
        prepared, loader = accelerator.prepare(model, load(arrays, num_workers=workers))
        accelerator.register_for_checkpointing(loader)
        return accelerator, prepared, loader

    accelerator, model, loader = prepare(Model())
    train(model, loader)
    assert model.log == expected
    loader.close()
    accelerator, stopped, loader = prepare(Model(STOP))
    for _ in range(2):
        for batch in loader:
            if stopped.steps == STOP:
                break
            stopped(batch.samples, batch.labels)
            if stopped.steps == STOP:
                accelerator.save_state(tmp_path / "state")
    loader.close()
    accelerator, resumed, loader = prepare(Model())
    accelerator.load_state(tmp_path / "state")
    while loader.epoch < EPOCHS:
        train(resumed, loader, 1)
    loader.close()
    check(stopped, resumed, expected)


@pytest.mark.parametrize("workers", [0, 2])
def test_accelerate_over_a_dataloader(arrays, expected, workers):
    accelerate = import_module("accelerate")

    def prepare(loader):
        return accelerate.Accelerator(cpu=True).prepare(
            DataLoader(loader, batch_size=None, num_workers=workers)
        )

    model = Model()
    train(model, prepare(load(arrays)))
    assert model.log == expected
    resumed = Model()
    prepared = prepare(load(arrays))
    prepared.set_epoch(1)
    train(resumed, accelerate.skip_first_batches(prepared, STOP - STEPS), 1)
    prepared.set_epoch(2)
    train(resumed, prepared, 1)
    assert resumed.log == expected[COUNT + (STOP - STEPS) * BATCH :]


# ---- Transformers --------------------------------------------------------------------------------


def train_with_transformers(
    folder: Path, arrays, *, own: bool, stop: int | None = None, resume: bool = False
) -> Model:
    transformers = import_module("transformers")

    class Trainer(transformers.Trainer):
        """Takes a loader as it is, whose state is kept here; or one that it skips through."""

        def get_train_dataloader(self):
            self.loader = load(arrays)
            if not own:
                return self.accelerator.prepare(DataLoader(self.loader, batch_size=None))
            if resume:
                self.loader.load_state_dict(torch.load(folder / "loader.pt"))
            return self.loader

    class Keep(transformers.TrainerCallback):
        def on_save(self, *arguments, **options):
            torch.save(trainer.loader.state_dict(), folder / "loader.pt")

    arguments = transformers.TrainingArguments(
        str(folder),
        num_train_epochs=EPOCHS,
        save_steps=STOP,
        ignore_data_skip=own,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model=Model(stop), args=arguments, callbacks=[Keep()])
    if stop is None:
        trainer.train(resume_from_checkpoint=resume)
    else:
        with pytest.raises(Stop):
            trainer.train()
    return trainer.model


@pytest.mark.parametrize("own", [False, True])
def test_transformers(arrays, tmp_path, expected, own):
    whole = train_with_transformers(tmp_path / "whole", arrays, own=own)
    assert whole.log == expected
    folder = tmp_path / "parts"
    stopped = train_with_transformers(folder, arrays, own=own, stop=STOP)
    resumed = train_with_transformers(folder, arrays, own=own, resume=True)
    check(stopped, resumed, expected)


# ---- torchdata -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["loader", "sampler"])
@pytest.mark.parametrize("workers", [0, 2])
def test_torchdata(arrays, expected, workers, kind):
    module = import_module("torchdata.stateful_dataloader")

    def make():
        if kind == "loader":
            return module.StatefulDataLoader(load(arrays), batch_size=None, num_workers=workers)
        dataset = SampleDataset(arrays, dtype="float32", shape=SHAPE, labels=number)
        sampler = DistributedBatchSampler(arrays, BATCH, 1, 0, seed=3)
        return module.StatefulDataLoader(dataset, batch_sampler=sampler, num_workers=workers)

    def learn(model, loader, stop=None) -> None:
        for batch in loader:
            samples, labels = (batch.samples, batch.labels) if kind == "loader" else batch
            model(samples, labels)
            if model.steps == stop:
                break

    model = Model()
    loader = make()
    for _ in range(EPOCHS):
        for _, batch in zip(range(len(loader)), loader, strict=False):  # none more is asked for
            labels = batch.labels if kind == "loader" else batch[1]
            model.log += labels.tolist()
    assert model.log == expected
    stopped, resumed = Model(), Model()
    loader = make()
    learn(stopped, loader)
    learn(stopped, loader, STOP)
    state = loader.state_dict()
    loader = make()
    loader.load_state_dict(state)
    learn(resumed, loader)
    learn(resumed, loader)
    check(stopped, resumed, expected)
