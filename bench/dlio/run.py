"""One run of one workload one way: ``python -m bench.dlio.run``, its figures as JSON on stdout.

A process of its own, so that the whole of it, the service too, can be started at a chosen priority
or on chosen processors (``--prefix`` of ``python -m bench.dlio``).
"""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.contestant import cpu_seconds_of
from bench.dlio.feed import DATASET, VOLUME
from bench.dlio.stage import Stage, run_dlio, serve
from bench.dlio.workloads import PLUGIN, WAYS
from bench.ending import run_program
from bench.machine import Machine


@dataclass(frozen=True, slots=True)
class Epoch:
    """What DLIO says of an epoch.

    Attributes:
        utilisation: of the accelerator, in per cent; DLIO leaves the first batch out.
        rate: samples/s over the whole epoch, its start included.
        first_seconds: until the first batch was there.
    """

    utilisation: float
    rate: float
    first_seconds: float


def read_figures(output: Path) -> list[Epoch]:
    """What DLIO measured, by epoch.

    Args:
        output: DLIO's output folder.

    Raises:
        ValueError: its files are not what DLIO 2.0 writes.
    """
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
        raise ValueError(f"read DLIO's figures in {output}: {error!r}") from error


def train(stage: Stage, way: str, *, epochs: int, seed: int) -> dict[str, Any]:
    """Drop the kernel's caches, train, and say what DLIO measured.

    Args:
        stage: that was laid out.
        way: ``ext4``, ``mount`` or ``plugin``.
        epochs: of training; the first is cold.
        seed: of DLIO's orders.
    """
    output = stage.folder / f"output-{way}"
    shutil.rmtree(output, ignore_errors=True)
    folder = stage.plain if way == "ext4" else stage.mounted / stage.workload.name
    options = stage.workload.options_of(
        folder, output, files=stage.files, ranks=stage.ranks, seed=seed
    )
    options += [f"++workload.train.epochs={epochs}", "++workload.workflow.train=True"]
    cold = Machine(stage.folder).drop_caches()
    log, served_seconds = stage.folder / f"train-{way}.log", 0.0
    if way == "ext4":
        run_dlio(stage, options, log)
    else:
        with serve(stage) as served:
            before, more = cpu_seconds_of(served.pid), {}
            if way == "plugin":
                options.append(f"++workload.reader.data_loader_classname={PLUGIN}")
                options.append("++workload.reader.data_loader_sampler=none")
                more = {VOLUME: served.uri, DATASET: stage.dataset}
            run_dlio(stage, options, log, more)
            served_seconds = cpu_seconds_of(served.pid) - before
    epochs_read = [asdict(epoch) for epoch in read_figures(output)]
    return {"cold": cold, "epochs": epochs_read, "service_cpu_seconds": served_seconds}


def main() -> int:
    """Run what the command line says."""
    parser = argparse.ArgumentParser(prog="python -m bench.dlio.run", description=__doc__)
    parser.add_argument("folder", type=Path, help="that was laid out")
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    given = parser.parse_args()
    stage = Stage.load(given.folder)
    print(json.dumps(train(stage, given.way, epochs=given.epochs, seed=given.seed)))
    return 0


if __name__ == "__main__":
    run_program(main)
