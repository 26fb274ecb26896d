"""Checkpoints of frameworks on a volume: Lightning through fsspec, Transformers by a callback."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path

import pytest

import dlfs
from dlfs.base.units import MIB

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint.state_dict import get_state_dict  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from dlfs.adapters.torch.checkpoint import StorageReader, StorageWriter  # noqa: E402

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore"),  # what other packages deprecate
]

EPOCHS = 2


@pytest.fixture
def volume(tmp_path: Path) -> str:
    path = str(tmp_path / "volume.img")
    dlfs.format_volume(path, size_bytes=32 * MIB)
    return path


def test_lightning_saves_and_resumes_through_fsspec(volume: str) -> None:
    lightning = import_module("lightning")
    callbacks = import_module("lightning.pytorch.callbacks")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 1)

        def training_step(self, batch, number):
            return self.linear(batch).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    folder = f"dlfs://{volume}!/run"
    quiet = {
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    data = DataLoader(torch.arange(32.0).reshape(8, 4), batch_size=4)
    each_epoch = callbacks.ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1)
    module = Module()
    lightning.Trainer(max_epochs=EPOCHS, callbacks=[each_epoch], **quiet).fit(module, data)
    with dlfs.open(volume) as opened, opened["run"] as dataset:
        assert dataset.paths() == [b"epoch=%d.ckpt" % epoch for epoch in range(EPOCHS)]
    resumed = Module()
    trainer = lightning.Trainer(max_epochs=EPOCHS, enable_checkpointing=False, **quiet)
    trainer.fit(resumed, data, ckpt_path=f"{folder}/epoch={EPOCHS - 1}.ckpt")
    assert trainer.global_step == EPOCHS * 2  # all steps were done before
    assert torch.equal(resumed.linear.weight, module.linear.weight)


@pytest.mark.parametrize("options", [{"save_top_k": 1}, {"save_top_k": -1, "save_last": True}])
def test_lightning_is_told_at_its_start_that_files_are_not_removed(volume: str, options) -> None:
    lightning = import_module("lightning")
    callbacks = import_module("lightning.pytorch.callbacks")

    class Module(lightning.LightningModule):
        def training_step(self, batch, number):
            raise AssertionError("training began")

        def configure_optimizers(self):
            return None

    keep = callbacks.ModelCheckpoint(dirpath=f"dlfs://{volume}!/run", **options)
    trainer = lightning.Trainer(accelerator="cpu", logger=False, callbacks=[keep])
    with pytest.raises(dlfs.UsageError, match=r"expected ModelCheckpoint\(save_top_k=-1\)"):
        trainer.fit(Module(), DataLoader(torch.ones(4, 4)))


def test_a_callback_saves_for_the_trainer_of_transformers(volume: str, tmp_path: Path) -> None:
    transformers = import_module("transformers")

    class SaveToVolume(transformers.TrainerCallback):
        def __init__(self) -> None:
            self.writer = StorageWriter(volume, "trainer", keep=2)

        def on_save(self, args, state, control, model=None, optimizer=None, **_):
            inner = getattr(optimizer, "optimizer", optimizer)  # Accelerate wraps it
            content = dict(zip(["model", "optimizer"], get_state_dict(model, inner), strict=True))
            dcp.save(content, checkpoint_id=state.global_step, storage_writer=self.writer)

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 1)

        def forward(self, x=None, labels=None):
            logits = self.linear(x)
            return {"loss": (logits[:, 0] - labels).square().mean(), "logits": logits}

    model = Net()
    data = [{"x": torch.ones(4), "labels": torch.tensor(1.0)}] * 16
    options = transformers.TrainingArguments(
        os.fspath(tmp_path / "out"),
        max_steps=6,
        save_steps=2,
        per_device_train_batch_size=4,
        use_cpu=True,
        report_to=[],
        logging_strategy="no",
        disable_tqdm=True,
    )
    transformers.Trainer(model, options, train_dataset=data, callbacks=[SaveToVolume()]).train()
    reader = StorageReader(volume, "trainer")
    assert [one.step for one in reader.checkpoints()] == ["4", "6"]
    found = {"model": {name: torch.empty_like(t) for name, t in model.state_dict().items()}}
    dcp.load(found, storage_reader=reader)
    assert torch.equal(found["model"]["linear.weight"], model.linear.weight)
