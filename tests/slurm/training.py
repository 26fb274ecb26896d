"""One rank of a training without a framework: ``python -m tests.slurm.training FOLDER``.

It reads the dataset ``photos`` of ``$DLFS_BURST_BUFFER`` for one epoch. After each step it appends
a line to ``FOLDER/ATTEMPT.RANK``: the state of the epoch, and the paths of the samples, whose
contents it has compared. An attempt begins where all ranks of the one before have been: what one of
them has read beyond that is read again, as a training that was restored from a checkpoint does.

After ``PAUSE_STEP`` steps, a rank of attempt 0 waits for ``FOLDER/go``, so that a test can act in
mid-epoch.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import dlfs
from tests.support.waiting import wait_for

BATCH = 10
PAUSE_STEP = 5
DATASET = "photos"
SAMPLES = 600


def sample_of(path: str) -> bytes:
    """Return the contents of a sample, which its path determines."""
    return random.Random(path).randbytes(3000 + 7 * int(path))


def write_source(folder: Path) -> None:
    """Write the files to import."""
    folder.mkdir()
    for number in range(SAMPLES):
        (folder / f"{number:04}").write_bytes(sample_of(f"{number:04}"))


def attempts(folder: Path) -> list[list[list[dict[str, Any]]]]:
    """Return the steps of each attempt: those that all of its ranks have logged, of each rank.

    The first one is a line without samples, which has the number of ranks.
    """
    found: list[list[list[dict[str, Any]]]] = []
    while paths := sorted(folder.glob(f"{len(found)}.*")):
        ranks = [_lines(path) for path in paths]
        is_complete = all(lines and lines[0]["world_size"] == len(paths) for lines in ranks)
        common = min(map(len, ranks)) if is_complete else 0
        found.append([lines[:common] for lines in ranks])
    return found


def _lines(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a log; a killed rank may have left a part of one."""
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def last_state(folder: Path) -> Any:
    """Return the state after the last step of the attempts so far; None: the beginning."""
    for ranks in reversed(attempts(folder)):
        if ranks[0][1:]:
            return ranks[0][-1]["state"]
    return None


def trained(folder: Path) -> list[str]:
    """Return the paths of all samples that were trained on, over all attempts."""
    steps = [step for ranks in attempts(folder) for rank in ranks for step in rank]
    return [path for step in steps for path in step["paths"]]


def main(folder: Path) -> None:
    """Train for the rest of the epoch."""
    attempt, rank = int(os.environ["ATTEMPT"]), int(os.environ["SLURM_PROCID"])
    world_size = int(os.environ["SLURM_NTASKS"])
    state = last_state(folder)  # of the attempts before: this one's files have no step yet
    with (
        (folder / f"{attempt}.{rank}").open("w") as log,
        dlfs.open(os.environ["DLFS_BURST_BUFFER"], memory_bytes=8 << 20) as volume,
        volume[DATASET] as dataset,
    ):
        print(json.dumps({"world_size": world_size, "paths": []}), file=log, flush=True)
        epoch = dataset.batches(BATCH, seed=3, shuffle="global")
        if state is not None:
            epoch.resume(state)
        for step, batch in enumerate(epoch, 1):
            with batch:
                paths = [path.decode() for path in dataset.paths_of(batch.indices)]
                for path, sample in zip(paths, batch, strict=True):
                    assert sample == sample_of(path), path
            print(json.dumps({"state": epoch.state(), "paths": paths}), file=log, flush=True)
            if attempt == 0 and step == PAUSE_STEP:
                (folder / f"paused.{rank}").touch()
                wait_for((folder / "go").exists, "the test to go on")
    (folder / f"done.{attempt}.{rank}").touch()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
