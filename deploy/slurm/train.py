"""Trains by DistributedDataParallel over any number of nodes and starts of a job, in one order.

    torchrun train.py DATASET FOLDER

Every ``STEPS`` steps, the first rank writes a checkpoint to FOLDER: model, optimizer and the
position in the order. The next start continues there, at any number of ranks: samples of later
steps, whose updates are lost, are read again. FOLDER also gets the indices that each rank read, a
line for each step.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import dlfs
from dlfs.adapters.torch import Loader

BATCH = 8
STEPS = 4
PAUSE_S = float(os.environ.get("PAUSE_S", "0"))
"""Time that a step takes longer, in seconds: for trials."""


def decode(sample: memoryview) -> torch.Tensor:
    """Return the mean and the deviation of a sample's bytes."""
    pixels = np.frombuffer(sample, np.uint8).astype(np.float32) / 255
    return torch.tensor([pixels.mean(), pixels.std()])


def main() -> None:
    """Train for an epoch."""
    dataset, folder = sys.argv[1], Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = folder / "checkpoint.pt"
    start = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    service = os.environ["DLFS_SERVICE"]
    with dlfs.connect(service, timeout_s=120) as volume, volume[dataset] as samples:
        loader = Loader(samples, BATCH, seed=1, transform=decode, uneven="drop")
        step = 0
        if checkpoint.exists():
            saved = torch.load(checkpoint)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            loader.load_state_dict(saved["loader"])
            step = saved["step"]
        dist.barrier()  # before the first write, all have read the checkpoint
        with (folder / f"order.{start}.{dist.get_rank()}").open("w") as order:
            for batch in loader:
                optimizer.zero_grad()
                model(batch.samples).square().mean().backward()
                optimizer.step()
                step += 1
                print(json.dumps([step, batch.indices.tolist()]), file=order, flush=True)
                if step % STEPS == 0 and dist.get_rank() == 0:
                    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                    torch.save(
                        {**saved, "loader": loader.state_dict(), "step": step}, f"{checkpoint}.new"
                    )
                    os.replace(f"{checkpoint}.new", checkpoint)
                time.sleep(PAUSE_S)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
