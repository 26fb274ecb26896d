"""Segments 3-D images whose samples have fields, an image and its mask, as UNet3D does.

    python examples/segment_volumes.py

Each sample is written with ``writer.add(path, {"image": ..., "mask": ...})``: arrays whose sizes
differ from sample to sample. One read brings both. The transform crops them at the same place,
which the loader's own random numbers choose: a resumed training sees the same crops.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn

import dlfs
from dlfs.adapters.torch import Loader, SampleContext

CASES, CROP, BATCH, EPOCHS = 160, 16, 8, 5
FIELDS = {"image": "<f4[?,?,?]", "mask": "|u1[?,?,?]", "spacing": "<f4[3]", "note": "text"}


def make_dataset(path: Path) -> None:
    """Write cases of different sizes: noise with a bright ellipsoid, which is the mask."""
    random = np.random.default_rng(0)
    path.parent.mkdir(parents=True, exist_ok=True)
    dlfs.format_volume(str(path), size_bytes=64 << 20)
    with dlfs.open(str(path)) as volume, volume.writer("cases", fields=FIELDS) as writer:
        for number in range(CASES):
            sizes = random.integers(CROP + 2, 26, 3)
            grid = np.meshgrid(*map(np.arange, sizes), indexing="ij")
            axes = zip(grid, sizes * random.uniform(0.35, 0.65, 3), strict=True)
            radii = random.uniform(4, 7, 3)
            inside = sum(((x - c) / r) ** 2 for (x, c), r in zip(axes, radii, strict=True)) < 1
            image = random.normal(size=sizes) + 1.2 * inside
            case = {
                "image": image.astype(np.float32),
                "mask": inside.astype(np.uint8),
                "spacing": np.array([2.5, 0.8, 0.8], np.float32),
                "note": f"case {number} of size {'x'.join(map(str, sizes))}",
            }
            writer.add(f"case{number:04}", case)


def crop(sample: dict[str, torch.Tensor], context: SampleContext) -> dict[str, torch.Tensor]:
    """Cut the same random cube out of image and mask, and mirror both or none."""
    starts = [int(context.numpy.integers(0, size - CROP + 1)) for size in sample["image"].shape]
    cube = tuple(slice(start, start + CROP) for start in starts)
    image, mask = sample["image"][cube], sample["mask"][cube]
    if context.numpy.random() < 0.5:
        image, mask = image.flip(2), mask.flip(2)
    return {"image": image[None], "mask": mask[None].float()}


class UNet(nn.Module):
    """A 3-D U-Net of two levels."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()

        def block(before: int, after: int) -> nn.Module:
            return nn.Sequential(nn.Conv3d(before, after, 3, padding=1), nn.ReLU())

        self.top, self.bottom = block(1, width), block(width, 2 * width)
        self.up = nn.ConvTranspose3d(2 * width, width, 2, stride=2)
        self.out = nn.Sequential(block(2 * width, width), nn.Conv3d(width, 1, 1))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Return the logits of the mask, ``[n, 1, d, h, w]``."""
        top = self.top(image)
        bottom = self.up(self.bottom(nn.functional.max_pool3d(top, 2)))
        return self.out(torch.cat([top, bottom], 1))


def dice(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the mean overlap of the predicted masks and the true ones, 0..1."""
    dims = (1, 2, 3, 4)
    return ((2 * (scores * mask).sum(dims) + 1) / ((scores + mask).sum(dims) + 1)).mean()


def train(cases: dlfs.Dataset) -> None:
    """Train on random crops, and print the Dice score of each epoch."""
    fields = ["image", "mask"]  # the transform gets these only
    loader = Loader(cases, BATCH, seed=1, fields=fields, transform=crop, with_context=True)
    torch.manual_seed(0)
    model = UNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    while loader.epoch < EPOCHS:
        epoch, scores = loader.epoch, []
        for batch in loader:  # batch["image"] and batch["mask"], float32[8, 1, 16, 16, 16]
            logits = model(batch["image"])
            score = dice(logits.sigmoid(), batch["mask"])
            entropy = nn.functional.binary_cross_entropy_with_logits(logits, batch["mask"])
            optimizer.zero_grad()
            (entropy + 1 - score).backward()
            optimizer.step()
            scores.append(float(score.detach()))
        print(f"epoch {epoch}: Dice score {np.mean(scores):.2f}")


def main() -> None:
    """Make the data in the first run, then train."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    default = Path(tempfile.gettempdir()) / "dlfs-segment-volumes"
    parser.add_argument("--folder", type=Path, default=default, help="for the data")
    path = parser.parse_args().folder / "volume.img"
    if not path.exists():
        make_dataset(path)
    with dlfs.open(str(path)) as volume, volume["cases"] as cases:
        print(f"{cases.sample(0)['note']}; fields {cases.fields}")
        train(cases)


if __name__ == "__main__":
    main()
