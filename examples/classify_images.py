"""Classifies images with DistributedDataParallel, and resumes where it was stopped.

    torchrun --nproc-per-node 2 examples/classify_images.py --stop-after 12  # as if killed there
    torchrun --nproc-per-node 3 examples/classify_images.py  # continues with other ranks
    python examples/classify_images.py --restart  # from the beginning, in one process

The first run makes JPEG files of three classes, one folder for each, and imports the folder. All
ranks share each epoch exactly. The checkpoint holds the loader's state next to the model, so that
no image is trained on twice in an epoch, and none is left out, whatever number of ranks resumes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchvision.io import decode_jpeg, write_jpeg

import dlfs
from dlfs.adapters.torch import FolderLabels, Loader

CLASSES = ("cross", "ring", "square")
IMAGES, SIZE, BATCH, EPOCHS = 600, 32, 20, 4
DLFS = (sys.executable, "-m", "dlfs.cli")  # the command dlfs, also where it is not on PATH


def make_images(folder: Path) -> None:
    """Write JPEG files of noisy shapes: a folder for each class."""
    random = np.random.default_rng(0)
    y, x = np.mgrid[:SIZE, :SIZE]
    for number in range(IMAGES):
        name = CLASSES[number % len(CLASSES)]
        dy, dx = (np.abs(axis - random.integers(10, 22)) for axis in (y, x))
        half = random.integers(5, 9)
        shape = {
            "cross": (np.minimum(dy, dx) < 2) & (np.maximum(dy, dx) < half),
            "ring": abs(np.hypot(dy, dx) - half) < 2,
            "square": np.maximum(dy, dx) < half,
        }[name]
        image = 180 * shape * random.uniform(0.4, 1, (3, 1, 1))
        image += random.integers(0, 60, (3, SIZE, SIZE))
        (folder / name).mkdir(parents=True, exist_ok=True)
        pixels = torch.from_numpy(image.clip(0, 255).astype(np.uint8))
        write_jpeg(pixels, str(folder / name / f"{number:04}.jpg"))


def import_images(folder: Path) -> None:
    """Make the images, and a volume with the dataset of them."""
    volume = folder / "volume.img"
    make_images(folder / "shapes")
    subprocess.run([*DLFS, "format", volume, "--size", "64MiB"], check=True)
    subprocess.run([*DLFS, "import", folder / "shapes", volume, "--name", "shapes"], check=True)


def decode(sample: memoryview) -> torch.Tensor:
    """Decode one JPEG. The loader's threads call this; torchvision lets them run at once."""
    pixels = decode_jpeg(torch.frombuffer(bytearray(sample), dtype=torch.uint8))
    return pixels.float() / 255


def make_model() -> nn.Module:
    """Return a small convolutional network."""
    blocks = [
        nn.Sequential(nn.Conv2d(a, b, 3, 2, 1), nn.ReLU()) for a, b in ((3, 16), (16, 32), (32, 64))
    ]
    return nn.Sequential(*blocks, nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(64, 3))


def train(folder: Path, loader: Loader, stop_after: int | None) -> None:
    """Train to the last epoch, with a checkpoint after each step."""
    torch.manual_seed(0)
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    checkpoint, step = folder / "checkpoint.pt", 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
        where = f"epoch {loader.epoch} at image {loader.position}"
        print(f"rank {loader.rank} of {loader.world_size} resumes {where}")
    while loader.epoch < EPOCHS:
        epoch, right, seen = loader.epoch, 0, 0
        for batch in loader:
            scores = model(batch.samples)
            loss = nn.functional.cross_entropy(scores, batch.labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step, seen = step + 1, seen + len(batch)
            right += int((scores.argmax(1) == batch.labels).sum())
            if loader.rank == 0:
                parts = {"model": model.module, "optimizer": optimizer, "loader": loader}
                state = {name: part.state_dict() for name, part in parts.items()}
                torch.save(state, folder / "checkpoint.new")
                os.replace(folder / "checkpoint.new", checkpoint)  # whole, or as before
            if step == stop_after:
                return
        if loader.rank == 0:
            print(f"epoch {epoch}: loss {loss:.3f}, {right} of {seen} images right on rank 0")


def main() -> None:
    """Make the data in the first process, then train in all of them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    default = Path(tempfile.gettempdir()) / "dlfs-classify-images"
    parser.add_argument("--folder", type=Path, default=default, help="for the data")
    parser.add_argument("--stop-after", type=int, metavar="STEPS", help="end as if killed")
    parser.add_argument("--restart", action="store_true", help="forget the checkpoint")
    arguments = parser.parse_args()
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}.items():
        os.environ.setdefault(name, value)  # torchrun sets them
    os.environ.setdefault("MASTER_PORT", "29511")
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        if not (arguments.folder / "volume.img").exists():
            import_images(arguments.folder)
        if arguments.restart:
            (arguments.folder / "checkpoint.pt").unlink(missing_ok=True)
    dist.barrier()
    with dlfs.open(str(arguments.folder / "volume.img")) as volume, volume["shapes"] as shapes:
        loader = Loader(shapes, BATCH, seed=1, transform=decode, labels=FolderLabels(shapes))
        train(arguments.folder, loader, arguments.stop_after)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
