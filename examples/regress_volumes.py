"""Estimates cosmological parameters from 3-D volumes, straight from HDF5, as CosmoFlow does.

    python examples/regress_volumes.py

The first run makes an HDF5 file of simulated universes, each with the parameters that it was made
of, and imports it with one command: a row of each array is a field of a sample. From then on one
read brings the volume and the targets of a sample. h5py is not used in the training.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import h5py
import numpy as np
import torch
from torch import nn

import dlfs
from dlfs.adapters.torch import Loader

PARAMETERS = ("count", "mass", "width")
UNIVERSES, SIZE, BATCH, EPOCHS = 400, 16, 8, 5
DLFS = (sys.executable, "-m", "dlfs.cli")  # the command dlfs, also where it is not on PATH


def make_file(path: Path) -> None:
    """Write universes of round halos, ``float32[n, 1, SIZE, SIZE, SIZE]``, and their parameters."""
    random = np.random.default_rng(0)
    places = np.stack(np.meshgrid(*[np.arange(SIZE)] * 3, indexing="ij"), axis=-1)
    values = random.uniform(-1, 1, (len(PARAMETERS), UNIVERSES)).astype(np.float32)
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        shape = (UNIVERSES, 1, SIZE, SIZE, SIZE)
        universes = file.create_dataset("universes", shape, np.float32, chunks=(1, *shape[1:]))
        for number, (count, mass, width) in enumerate(values.T):
            density = random.normal(0, 0.1, shape[2:])
            for centre in random.uniform(0, SIZE, (int(9 + 6 * count), 3)):
                distance = np.sum((places - centre) ** 2, axis=-1)
                density += np.exp(mass - distance / (2 * (1.5 + 0.7 * width) ** 2))
            universes[number, 0] = density
        file["targets"] = values.T


def import_file(folder: Path) -> None:
    """Make the volume: the rows of ``universes`` and ``targets`` are the fields of a sample."""
    source, volume = folder / "universes.h5", folder / "volume.img"
    make_file(source)
    fields = ["--option", "fields=universes,targets"]
    subprocess.run([*DLFS, "format", volume, "--size", "64MiB"], check=True)
    subprocess.run([*DLFS, "import", source, volume, "--name", "universes", *fields], check=True)


def make_model() -> nn.Module:
    """Return a small 3-D convolutional network."""
    layers: list[nn.Module] = []
    for before, after in ((1, 8), (8, 16), (16, 32)):
        layers += [nn.Conv3d(before, after, 3, padding=1), nn.ReLU(), nn.AvgPool3d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 8, len(PARAMETERS)))


def train(dataset: dlfs.Dataset) -> None:
    """Train on nine tenths of the universes, and print the error on the others."""
    is_test = np.arange(len(dataset)) % 10 == 0
    loader = Loader(dataset, BATCH, seed=1, where=~is_test)
    test = Loader(dataset, BATCH, order=np.flatnonzero(is_test))
    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    while loader.epoch < EPOCHS:
        epoch, start = loader.epoch, time.perf_counter()
        for batch in loader:  # universes float32[8, 1, 16, 16, 16], targets float32[8, 3]
            loss = nn.functional.mse_loss(model(batch["universes"]), batch["targets"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        rate = np.sum(~is_test) / (time.perf_counter() - start)
        with torch.no_grad():
            pairs = [(model(batch["universes"]), batch["targets"]) for batch in test]
        errors = torch.cat([(found - targets).abs() for found, targets in pairs])
        each = ", ".join(f"{n} {e:.2f}" for n, e in zip(PARAMETERS, errors.mean(0), strict=True))
        print(f"epoch {epoch}: {rate:,.0f} universes/s; mean error of {each}")


def main() -> None:
    """Make and import the data in the first run, then train."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    default = Path(tempfile.gettempdir()) / "dlfs-regress-volumes"
    parser.add_argument("--folder", type=Path, default=default, help="for the data")
    folder = parser.parse_args().folder
    if not (folder / "volume.img").exists():
        import_file(folder)
    with dlfs.open(str(folder / "volume.img")) as volume, volume["universes"] as universes:
        print(f"{len(universes)} universes with the fields {universes.fields}")
        train(universes)


if __name__ == "__main__":
    main()
