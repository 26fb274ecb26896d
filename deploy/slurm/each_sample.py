"""Computes something of each sample of a dataset, in any number of tasks and starts of a job.

    srun python each_sample.py DATASET FOLDER
    python each_sample.py FOLDER                 prints the results

Each task writes its results to FOLDER after every ``STEPS`` batches, as a **part**. A part counts
when all tasks of a start have written theirs of this number: the global order is then done up to
there. The first task of the next start writes down how many parts count, once for all, and all its
tasks continue behind them, however many tasks there are. What is written later by the earlier
start, such as by a task on a node that Slurm has lost, does not count. So the parts that count have
each sample exactly once; samples of other parts are computed again. At the end, the first task
waits for the last parts of all others, and fails if one is missing.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import dlfs

BATCH = 8
STEPS = 4
WAIT_S = float(os.environ.get("WAIT_S", "300"))
"""Time that the first task waits for the others at the end, in seconds."""
PAUSE_S = float(os.environ.get("PAUSE_S", "0"))
"""Time that a part takes longer, in seconds: for trials."""


def read_part(folder: Path, start: int, number: int) -> list[dict[str, Any]]:
    """Return what the tasks of a start wrote of a part."""
    paths = sorted(folder.glob(f"{start}.{number}.*.json"))
    return [json.loads(path.read_text()) for path in paths]


def count_parts(folder: Path, start: int) -> int:
    """Return the number of parts of a start that all its tasks have written."""
    number, through = 0, 0
    while part := read_part(folder, start, number):
        if through + len(part) < part[0]["tasks"]:
            break
        through += sum(each["last"] for each in part)  # these tasks have no later parts
        number += 1
    return number


def parts_before(folder: Path, start: int) -> dict[int, int]:
    """Return how many parts of each earlier start count; the first task to ask decides it."""
    decided = folder / f"{start}.before.json"
    if not decided.exists():
        mine = folder / f"{start}.before.{os.environ['SLURM_PROCID']}"
        mine.write_text(json.dumps(parts_until(folder, start)))
        with contextlib.suppress(FileExistsError):
            os.link(mine, decided)
        mine.unlink()
    return {int(earlier): parts for earlier, parts in json.loads(decided.read_text()).items()}


def parts_until(folder: Path, start: int) -> dict[int, int]:
    """Return how many parts of each start before one count now."""
    for earlier in reversed(range(start)):
        if (folder / f"{earlier}.before.json").exists():
            return {**parts_before(folder, earlier), earlier: count_parts(folder, earlier)}
    return {}


def wait_for_tasks(folder: Path, start: int, tasks: int) -> None:
    """Wait until all tasks of a start have written their last part.

    With --no-kill or --wait, srun returns 0 although tasks were lost.
    """
    deadline = time.monotonic() + WAIT_S
    while True:
        parts = (json.loads(path.read_text()) for path in folder.glob(f"{start}.*.*.json"))
        ended = sum(part["last"] for part in parts)
        if ended == tasks:
            return
        if time.monotonic() > deadline:
            sys.exit(f"waited {WAIT_S:g} s for the last parts of {tasks} tasks, found {ended}")
        time.sleep(1)


def compute(dataset: str, folder: Path) -> None:
    """Compute this task's share, from where the earlier starts of the job ended."""
    start = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    rank, tasks = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    state = None
    for earlier, parts in sorted(parts_before(folder, start).items()):
        for number in range(parts):
            part = read_part(folder, earlier, number)
            state = next((each["state"] for each in part if not each["last"]), None)
            if state is None:
                return  # the end of the epoch
    service = os.environ["DLFS_SERVICE"]
    with dlfs.connect(service, timeout_s=120) as volume, volume[dataset] as samples:
        epoch = samples.batches(BATCH, seed=1, epoch=0, shuffle="global")
        if state is not None:
            epoch.resume(state)
        number, last = 0, False
        while not last:
            results: dict[int, float] = {}
            for _ in range(STEPS):
                batch = next(epoch, None)
                if batch is None:
                    last = True
                    break
                with batch:
                    for index, sample in zip(batch.indices.tolist(), batch, strict=True):
                        results[index] = float(np.frombuffer(sample, np.uint8).mean())
            part = {"tasks": tasks, "last": last, "state": epoch.state(), "results": results}
            written = folder / f"{start}.{number}.{rank}.new"
            written.write_text(json.dumps(part))
            written.rename(written.with_suffix(".json"))
            number += 1
            time.sleep(PAUSE_S)
    if rank == 0:
        wait_for_tasks(folder, start, tasks)


def main() -> None:
    """Compute a share, or print the results."""
    *dataset, folder = sys.argv[1:]
    if dataset:
        Path(folder).mkdir(parents=True, exist_ok=True)
        compute(dataset[0], Path(folder))
        return
    starts = [int(path.name.partition(".")[0]) for path in Path(folder).glob("*.before.json")]
    for start, parts in sorted(parts_until(Path(folder), max(starts, default=-1) + 1).items()):
        for number in range(parts):
            for part in read_part(Path(folder), start, number):
                for index, mean in part["results"].items():
                    print(index, mean)


if __name__ == "__main__":
    main()
