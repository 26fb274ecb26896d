"""One rank of the job: reads its share of an epoch, and logs which samples it got.

torchrun starts it in each rank, and again after the loss of one. Each step ends with an all-reduce;
then rank 0 writes the state. So the state is never ahead of what all ranks have logged.

A run waits for the benchmark before its first step (``ready``, ``go``) and behind its last
(``done``, ``end``), so that CPU times of services are of the epoch alone.

Files of the run's folder: ``state.json``; ``ATTEMPT-RANK.jsonl`` with the ranks, the first position
and the indices of each step; and ``cpu-RANK.json`` at the end of the epoch.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import dlfs
from dlfs.adapters.torch import Loader

SEED = 7


def parse() -> argparse.Namespace:
    """Return the arguments of a rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("source", help="socket of the node service, or folder of files")
    parser.add_argument("run", type=Path, help="folder of the logs and the state")
    parser.add_argument("--global-batch", type=int, required=True)
    parser.add_argument("--pause", type=float, default=0, help="seconds of each step")
    return parser.parse_args()


class Files(torch.utils.data.Dataset[Any]):  # type: ignore[misc] # of Any, without PyTorch
    """Files of a folder in the order of their names, as pairs of index and bytes."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._names = sorted(os.listdir(folder))

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: int) -> tuple[int, bytes]:
        with open(f"{self._folder}/{self._names[index]}", "rb") as file:
            return index, file.read()


def read_files(folder: str, batch_size: int) -> Iterator[tuple[None, list[int]]]:
    """Yield no state for each batch of files, and the indices of this rank."""
    dataset = Files(folder)
    sampler = torch.utils.data.DistributedSampler(dataset, seed=SEED)
    loader = torch.utils.data.DataLoader(dataset, batch_size, sampler=sampler, collate_fn=list)
    for batch in loader:
        yield None, [index for index, _ in batch]


def read_volume(
    socket: str, batch_size: int, state: Path
) -> Iterator[tuple[dict[str, Any], list[int]]]:
    """Yield the state behind each batch of a dataset, and the indices of this rank."""
    with dlfs.connect(f"unix:{socket}") as volume, volume["files"] as dataset:
        loader = Loader(dataset, batch_size, seed=SEED)
        if state.exists():
            loader.load_state_dict(json.loads(state.read_text()))
        while loader.epoch == 0:
            for batch in loader:
                yield loader.state_dict(), batch.indices.tolist()


def main() -> None:
    """Run the rank to the end of the epoch."""
    arguments = parse()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    batch_size, state = arguments.global_batch // ranks, arguments.run / "state.json"
    batches: Iterator[tuple[dict[str, Any] | None, list[int]]]
    if os.path.isdir(arguments.source):
        batches = read_files(arguments.source, batch_size)
    else:
        batches = read_volume(arguments.source, batch_size, state)
    position = json.loads(state.read_text())["position"] if state.exists() else 0
    _wait(arguments.run, "ready", "go")
    used, count = _cpu_seconds(), 0
    with (arguments.run / f"{time.time_ns()}-{rank}.jsonl").open("w") as log:
        for behind, indices in batches:
            line = {"position": position, "ranks": ranks, "rank": rank, "indices": indices}
            log.write(f"{json.dumps(line)}\n")
            log.flush()
            position += len(indices) * ranks
            count += len(indices)
            dist.all_reduce(torch.ones(1))
            if rank == 0 and behind is not None:
                (arguments.run / "state.new").write_text(json.dumps(behind))
                (arguments.run / "state.new").replace(state)
            time.sleep(arguments.pause)
    report = {"samples": count, "cpu_seconds": _cpu_seconds() - used}
    (arguments.run / f"cpu-{rank}.json").write_text(json.dumps(report))
    _wait(arguments.run, "done", "end")
    dist.destroy_process_group()


def _wait(run: Path, here: str, there: str) -> None:
    """Wait for all ranks, say so by a file, and wait for a file of the benchmark."""
    dist.barrier()
    (run / here).touch()
    while not (run / there).exists():
        time.sleep(0.05)
    dist.barrier()


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
