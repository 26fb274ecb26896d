"""The demo's training with PyTorch, which may be killed any time.

``python -m examples.demo.trainer`` learns the digits. After each batch it writes a checkpoint: the
model, the optimizer, the loader's state, and the indices of all samples learned so far. A new
process resumes from the checkpoint, with the same or another number of worker processes. After each
batch it prints epoch and position, and at the end its accuracy on the test digits.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from PIL import Image
from torch import nn

import dlfs
from dlfs.adapters.torch import FolderLabels, Loader, TensorBatch
from examples.demo.digits import CLASSES, HIDDEN, PIXELS, is_test_sample

BATCH = 64
SEED = 7
RATE = 0.05
MOMENTUM = 0.9
CHECKPOINT = "checkpoint.pt"


def decode(sample: memoryview) -> torch.Tensor:
    """Decode a PNG file to ``float32[64]``, 0..1."""
    image = np.asarray(Image.open(io.BytesIO(sample)), np.float32)
    return torch.from_numpy(image.reshape(PIXELS) / 255)


class Training:
    """A training and its checkpoint.

    Args:
        dataset: dataset of the digits.
        folder: folder of the checkpoint.
        workers: number of processes that read and decode; 0 uses this process.

    Attributes:
        order: indices of the samples learned so far, epoch after epoch.
    """

    def __init__(self, dataset: dlfs.Dataset, folder: Path, workers: int) -> None:
        torch.manual_seed(SEED)
        torch.set_num_threads(1)  # a fixed order of sums gives the same weights in every run
        self._checkpoint = folder / CHECKPOINT
        self._model = nn.Sequential(
            nn.Linear(PIXELS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES)
        )
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=RATE, momentum=MOMENTUM)
        self.loader = Loader(
            dataset,
            BATCH,
            seed=SEED,
            transform=decode,
            labels=FolderLabels(dataset),
            num_workers=workers,
        )
        self.order: list[int] = []
        if self._checkpoint.exists():
            self._load()

    def _load(self) -> None:
        checkpoint = torch.load(self._checkpoint, weights_only=True)
        self._model.load_state_dict(checkpoint["model"])
        self._optimizer.load_state_dict(checkpoint["optimizer"])
        self.loader.load_state_dict(checkpoint["loader"])
        self.order = checkpoint["order"]

    def _save(self) -> None:
        checkpoint = {
            "model": self._model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "loader": self.loader.state_dict(),
            "order": self.order,
        }
        new = self._checkpoint.with_suffix(".new")
        torch.save(checkpoint, new)
        os.replace(new, self._checkpoint)  # the file is always complete, the old or the new one

    def step(self, batch: TensorBatch) -> None:
        """Learn from a batch without its test samples, and write a checkpoint."""
        assert batch.labels is not None
        learned = torch.from_numpy(~is_test_sample(batch.indices.numpy()))
        self._optimizer.zero_grad()
        guesses = self._model(batch.samples[learned])
        loss = nn.functional.cross_entropy(guesses, batch.labels[learned], reduction="sum")
        (loss / BATCH).backward()
        self._optimizer.step()
        self.order += batch.indices.tolist()
        self._save()

    def accuracy(self, dataset: dlfs.Dataset) -> float:
        """Return the fraction of the test digits that the model classifies correctly."""
        indices = np.arange(len(dataset), dtype=np.uint64)
        indices = indices[is_test_sample(indices)]
        with dataset.read(indices) as batch:
            images = torch.stack([decode(sample) for sample in batch])
        with torch.no_grad():
            guesses = self._model(images).argmax(1).numpy()
        return float((guesses == FolderLabels(dataset)(indices)).mean())


def train(
    volume: Annotated[
        str, typer.Argument(help="Holds the dataset `digits`: its URI, or unix: and a service's.")
    ],
    folder: Annotated[Path, typer.Argument(help="For the checkpoint.")],
    epochs: Annotated[int, typer.Option(help="To train in all.")] = 3,
    workers: Annotated[int, typer.Option(help="Processes that read and decode.")] = 2,
) -> None:
    """Train, or resume a training."""
    opener = dlfs.connect if volume.startswith("unix:") else dlfs.open
    with opener(volume) as opened, opened.dataset("digits") as dataset:
        training = Training(dataset, folder, workers)
        while training.loader.epoch < epochs:
            for batch in training.loader:
                training.step(batch)
                typer.echo(f"{batch.state['epoch']} {batch.state['position']}")
        training.loader.close()
        typer.echo(f"accuracy {training.accuracy(dataset):.4f}")


def load_checkpoint(folder: Path) -> dict[str, Any]:
    """Return the checkpoint after the last step of a training."""
    checkpoint: dict[str, Any] = torch.load(folder / CHECKPOINT, weights_only=True)
    return checkpoint


if __name__ == "__main__":
    typer.run(train)
