"""The part of ``ranks_of_frameworks`` that needs Lightning, whose classes are pickled by name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist

from dlfs.errors import DlfsError
from tests.unit.adapters.torch.ranks_of_frameworks import (
    EPOCHS,
    WORLD,
    Log,
    is_epoch,
    labels_of,
    loader,
    make,
)


class Module(lightning.LightningModule):
    """Writes down the indices of each epoch."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(6, 1)
        self.results = log
        self.taken: list[list[int]] = []

    def training_step(self, batch, number):
        self.taken += [[] for _ in range(len(self.taken), self.current_epoch + 1)]
        self.taken[-1] += labels_of(batch)
        return self.linear(torch.ones(1, 6)).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_end(self) -> None:
        self.results.write(dist.get_rank(), {"epochs": self.taken})


class Samples(lightning.LightningDataModule):
    """Makes the loader in each rank."""

    def __init__(self, kind: str, dataset) -> None:
        super().__init__()
        self.kind = kind
        self.dataset = dataset

    def train_dataloader(self):
        return make(self.kind, self.dataset)


def run(dataset, out: Path, how: str, before: bool, kinds: list[str]) -> None:
    """Run ``fit``, which makes the ranks itself, once for each kind."""
    if kinds[0][0].isdigit():
        run_parts(dataset, out, how, kinds)
        return
    for kind in kinds:
        log = Log(out, how, "before" if before else "after", kind)
        source: Any = make(kind, dataset) if before else Samples(kind, dataset)
        trainer = lightning.Trainer(
            max_epochs=1 if is_epoch(source) and before else EPOCHS,
            accelerator="cpu",
            devices=WORLD,
            strategy=how,
            use_distributed_sampler=not kind.startswith(("batch-sampler", "stateful-sampler")),
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        try:
            trainer.fit(Module(log), source)
        except (DlfsError, TypeError) as error:
            rank = int(os.environ.get("LOCAL_RANK", "0"))
            log.write(rank, {"error": f"{type(error).__name__}: {error}"})


class Stopping(Module):
    """Writes a checkpoint behind its last step."""

    def __init__(self, log: Log, stop: int, checkpoint: Path) -> None:
        super().__init__(log)
        self.stop, self.checkpoint = stop, checkpoint

    def on_train_batch_end(self, *arguments) -> None:
        if self.trainer.global_step == self.stop:
            self.trainer.save_checkpoint(self.checkpoint)


def run_parts(dataset, out: Path, how: str, kinds: list[str]) -> None:
    """Run a training in two parts, the second with other devices and another batch size.

    Args:
        dataset: dataset that is read.
        out: folder of the results.
        how: strategy.
        kinds: ``STOP:DEVICESxBATCH:DEVICESxBATCH``: the step behind which the first part stops, and
            the ranks of both parts.
    """
    for kind in kinds:
        stop, *parts = kind.split(":")
        checkpoint = out / f"{kind}.ckpt"
        for number, part in enumerate(parts):
            devices, batch = map(int, part.split("x"))
            log = Log(out, how, "part", f"{kind}-{number}")
            model = Module(log) if number else Stopping(log, int(stop), checkpoint)
            trainer = lightning.Trainer(
                max_epochs=EPOCHS,
                max_steps=-1 if number else int(stop),
                accelerator="cpu",
                devices=devices,
                strategy=how,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
            resumed = {"ckpt_path": str(checkpoint), "weights_only": True} if number else {}
            trainer.fit(model, loader(dataset, batch), **resumed)
