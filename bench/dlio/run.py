"""One run of one workload in one way.

The run is a process of its own, so that all of it, the service too, can be started at a chosen
priority or on chosen processors (``--prefix`` of ``python -m bench.dlio``). `run_once` is called in
the parent; `train` is the work of that process.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.dlio.feed import DATASET, VOLUME
from bench.dlio.stage import Stage, run_dlio, serve
from bench.dlio.workloads import PLUGIN
from bench.machine import Machine
from bench.process import Parent, run_child, run_program, start_child
from bench.resources import cpu_seconds_of


@dataclass(frozen=True, slots=True)
class Job:
    """A run to make; its attributes are the arguments of `train`, with the stage's folder."""

    folder: str
    way: str
    epochs: int
    seed: int


@dataclass(frozen=True, slots=True)
class Epoch:
    """DLIO's results for an epoch.

    Attributes:
        utilisation: share of time that the accelerator was busy, in per cent; DLIO leaves the first
            batch out.
        rate: samples/s over the whole epoch, its start included.
        first_seconds: time until the first batch.
    """

    utilisation: float
    rate: float
    first_seconds: float


def run_once(job: Job, prefix: Sequence[str]) -> dict[str, Any]:
    """Run a workload once, in a process of its own behind a prefix, and return its results."""
    log = Path(job.folder) / f"run-{job.way}.log"
    with start_child("bench.dlio.run", job, log, prefix=prefix) as child:
        return child.answer()


def read_results(output: Path) -> list[Epoch]:
    """Read DLIO's results, by epoch, from its output folder."""
    try:
        metric = json.loads((output / "summary.json").read_text(encoding="utf-8"))["metric"]
        steps = json.loads((output / "0_output.json").read_text(encoding="utf-8"))
        rates = metric["train_throughput_samples_per_second"]
        return [
            Epoch(utilisation, rate, steps[str(number)]["load"]["block1"][0])
            for number, (utilisation, rate) in enumerate(
                zip(metric["train_au_percentage"], rates, strict=True), start=1
            )
        ]
    except (KeyError, IndexError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"read DLIO's results in {output}: {error!r}") from error


def train(stage: Stage, way: str, *, epochs: int, seed: int) -> dict[str, Any]:
    """Drop the kernel's caches, train in one of `WAYS`, and return DLIO's results."""
    output = stage.folder / f"output-{way}"
    shutil.rmtree(output, ignore_errors=True)
    folder = stage.plain if way == "ext4" else stage.mounted / stage.workload.name
    options = stage.workload.options_of(
        folder, output, files=stage.files, ranks=stage.ranks, seed=seed
    )
    options += [f"++workload.train.epochs={epochs}", "++workload.workflow.train=True"]
    cold = Machine(stage.folder).drop_caches()
    log, service_seconds = stage.folder / f"train-{way}.log", 0.0
    if way == "ext4":
        run_dlio(stage, options, log)
    else:
        with serve(stage) as served:
            before, variables = cpu_seconds_of(served.pid), {}
            if way == "plugin":
                options.append(f"++workload.reader.data_loader_classname={PLUGIN}")
                options.append("++workload.reader.data_loader_sampler=none")
                variables = {VOLUME: served.uri, DATASET: stage.dataset}
            run_dlio(stage, options, log, variables)
            service_seconds = cpu_seconds_of(served.pid) - before
    results = [asdict(epoch) for epoch in read_results(output)]
    return {"cold": cold, "epochs": results, "service_cpu_seconds": service_seconds}


def work(job: Job, parent: Parent) -> None:
    """Train as the job says, and answer with the results."""
    stage = Stage.load(Path(job.folder))
    parent.answer(**train(stage, job.way, epochs=job.epochs, seed=job.seed))


if __name__ == "__main__":
    run_program(lambda: run_child(Job, work))
