"""``python -m bench.dlio``: lay workloads out, run each in every way, keep and show the figures."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.contestant import WrongBytesError
from bench.dlio import report
from bench.dlio.stage import Stage, find_dlio, lay_out
from bench.dlio.workloads import WAYS, WORKLOADS, Workload
from bench.ending import run_program, started
from bench.machine import ROOT, Unavailable, describe

RESULTS = Path(__file__).parents[1] / "results"
PREFIX_HELP = "a command that every timed run is started through, such as 'nice -n -5'"


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.dlio", description=__doc__)
    add = parser.add_argument
    add("--list", action="store_true", help="list the workloads and end")
    add("--workloads", metavar="GLOB", action="append", help="only these; may be given again")
    add("--dir", type=Path, default=ROOT / "build" / "bench", help="on the disk under test")
    add("--files", type=int, help="of each workload, instead of its own number")
    add("--rounds", type=int, help="runs of each way [3]")
    add("--epochs", type=int, default=2, help="of each run; the first is cold [2]")
    add("--ranks", type=int, default=1, help="processes that MPI starts [1]")
    add("--seed", type=int, default=1, help="of DLIO's orders [1]")
    add("--quick", action="store_true", help="little data, one round: minutes")
    add("--keep", action="store_true", help="leave the data for the next run")
    add("--prefix", type=shlex.split, default=[], metavar="COMMAND", help=PREFIX_HELP)
    add("--results", type=Path, default=RESULTS, help="where results are written")
    return parser.parse_args(words)


def choose(patterns: Sequence[str] | None) -> list[Workload]:
    """The workloads that any pattern matches."""
    return [
        workload
        for workload in WORKLOADS
        if any(fnmatchcase(workload.name, pattern) for pattern in patterns or ["*"])
    ]


def run_once(stage: Stage, way: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One run, in a process of its own behind the prefix.

    Raises:
        RuntimeError: it failed; with what it said.
    """
    command = [*arguments.prefix, sys.executable, "-m", "bench.dlio.run", str(stage.folder), way]
    command += ["--epochs", str(arguments.epochs), "--seed", str(arguments.seed)]
    pipe = subprocess.PIPE
    with started(command, stdout=pipe, stderr=pipe, text=True, cwd=ROOT) as process:
        told, errors = process.communicate()
    if process.returncode:
        raise RuntimeError(f"{shlex.join(command)} ended with {process.returncode}:\n{errors}")
    figures: dict[str, Any] = json.loads(told.splitlines()[-1])
    return figures


def race(stage: Stage, arguments: argparse.Namespace, rounds: int, status: Any) -> report.Race:
    """Run every way, round after round, every second round in the opposite order."""
    name = stage.workload.name
    status.update(f"{name}: DLIO generates its data")
    lay_out(stage)
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for number in range(rounds):
        for way in WAYS if number % 2 == 0 else reversed(WAYS):
            status.update(f"{name}: round {number + 1}: {way}")
            runs[way].append(run_once(stage, way, arguments))
    return report.Race(stage.workload, stage.files, stage.data_bytes(), runs)


def run(arguments: argparse.Namespace, console: Console) -> list[report.Race]:
    """Run the chosen workloads one after the other and show each."""
    rounds = arguments.rounds or (1 if arguments.quick else 3)
    folder, races = arguments.dir / "dlio", []
    try:
        with console.status("") as status:
            for workload in choose(arguments.workloads):
                own = workload.quick_files if arguments.quick else workload.files
                place = folder / workload.name
                stage = Stage(workload, place, arguments.files or own, arguments.ranks)
                races.append(race(stage, arguments, rounds, status))
                report.show(console, races[-1])
                if not arguments.keep:
                    shutil.rmtree(stage.folder)
    finally:
        if not arguments.keep:
            shutil.rmtree(folder, ignore_errors=True)
    return races


def main() -> int:
    """Run what the command line says."""
    arguments = parse_arguments()
    console = Console(width=None if sys.stdout.isatty() else 140)
    if arguments.list:
        for workload in WORKLOADS:
            console.print(f"{workload.name:20} {workload.about}", highlight=False)
        return 0
    if not choose(arguments.workloads):
        console.print("no workload has such a name: see --list")
        return 2
    arguments.dir = arguments.dir.absolute()
    arguments.dir.mkdir(parents=True, exist_ok=True)
    facts = describe(arguments.dir)
    try:
        find_dlio()
        races = run(arguments, console)
    except (Unavailable, WrongBytesError, RuntimeError) as error:
        console.print(str(error), style="red", markup=False, highlight=False)
        return 1
    facts["load_average_after"] = os.getloadavg()[0]
    plain = {name: str(value) for name, value in vars(arguments).items() if value is not None}
    path = report.write(arguments.results, facts, plain, races)
    console.print(f"every run is in {path}, the tables in {path.with_suffix('.md')}", markup=False)
    return 0


if __name__ == "__main__":
    run_program(main)
