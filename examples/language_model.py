"""Trains a small language model on packed tokens of several datasets, mixed by weights.

    python examples/language_model.py

``dlfs.mix`` gives each dataset its share of the documents in every part of an epoch, and
``dlfs.token_batches`` packs the documents into sequences of one length. Attention does not cross
documents. The state that a checkpoint holds resumes in the middle of a document.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn

import dlfs

LENGTH, BATCH, STEPS, WIDTH, END = 64, 16, 150, 64, 0
WEIGHTS = {"sums": 0.5, "colours": 0.3, "counting": 0.2}


def make_datasets(path: Path) -> None:
    """Write three datasets of documents; a token is a byte of text, as ``uint16``."""
    random = np.random.default_rng(0)
    nouns, colours = ("sky", "grass", "snow", "coal"), ("blue", "green", "white", "black")

    def document(name: str) -> str:
        first, second = random.integers(0, 5, 2)
        if name == "sums":
            return f"{first}+{second}={first + second}."
        if name == "colours":
            return " ".join(f"{nouns[at]} is {colours[at]}." for at in (first % 4, second % 4))
        return " ".join(str(number) for number in range(first, first + 6)) + "."

    path.parent.mkdir(parents=True, exist_ok=True)
    dlfs.format_volume(str(path), size_bytes=64 << 20)
    with dlfs.open(str(path)) as volume:
        for name in WEIGHTS:
            with volume.writer(name) as writer:
                for number in range(8000):
                    tokens = np.frombuffer(document(name).encode(), np.uint8)
                    writer.add(f"{number:05}", tokens.astype(np.uint16).tobytes())


class Model(nn.Module):
    """A transformer of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        options = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        layers = [nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, **options) for _ in range(2)]
        self.layers, self.out = nn.ModuleList(layers), nn.Linear(WIDTH, 256)

    def forward(self, tokens: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
        """Return the scores of each next token, ``[n, length, 256]``."""
        length = tokens.shape[1]
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        other = documents[:, :, None] != documents[:, None, :]
        hidden = (later | other).repeat_interleave(4, 0)  # one mask for each head
        found = self.token(tokens) + self.place(torch.arange(length))
        for layer in self.layers:
            found = layer(found, src_mask=hidden)
        return self.out(found)

    @torch.no_grad()
    def complete(self, text: str) -> str:
        """Return a text with the most likely end."""
        tokens = list(text.encode())
        while tokens[-1] != END and len(tokens) < LENGTH:
            line = torch.tensor([tokens])
            tokens.append(int(self(line, torch.zeros_like(line))[0, -1].argmax()))
        return bytes(tokens).decode().rstrip("\0")


def train(mixed: dlfs.DatasetView) -> None:
    """Train for some steps; go on behind the last one as a checkpoint would."""
    torch.manual_seed(0)
    model, total = Model(), 0.0
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    options = {"batch_size": BATCH, "separator": END, "seed": 1}
    batches = dlfs.token_batches(mixed, LENGTH, **options)
    for step in range(1, STEPS + 1):
        batch = next(batches)  # tokens uint16[16, 64], documents int32[16, 64]
        tokens = torch.from_numpy(batch.tokens.astype(np.int64))
        documents = torch.from_numpy(batch.documents)
        scores = model(tokens[:, :-1], documents[:, :-1])
        loss = nn.functional.cross_entropy(scores.transpose(1, 2), tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += float(loss.detach())
        if step % 50 == 0:
            print(f"step {step}: loss {total / 50:.2f}; {batch.documents.max() + 1} documents")
            state, total = batches.state(), 0.0  # a small dictionary, for a checkpoint
            batches.close()
            batches = dlfs.token_batches(mixed, LENGTH, **options).resume(state)
    for text in ("3+4=", "snow is", "2 3 4"):
        print(f"{text!r} -> {model.complete(text)!r}")


def main() -> None:
    """Make the data in the first run, then train."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    default = Path(tempfile.gettempdir()) / "dlfs-language-model"
    parser.add_argument("--folder", type=Path, default=default, help="for the data")
    path = parser.parse_args().folder / "volume.img"
    if not path.exists():
        make_datasets(path)
    with dlfs.open(str(path)) as volume:
        mixed = dlfs.mix({volume[name]: weight for name, weight in WEIGHTS.items()}, seed=1)
        print(f"{mixed}: {mixed.epoch_samples} documents in an epoch")
        train(mixed)


if __name__ == "__main__":
    main()
