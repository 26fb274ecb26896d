"""``python -m bench.dlio``: run DLIO's workloads in every way, show and write the results."""

from __future__ import annotations

import argparse
import shlex
import shutil
from collections.abc import Iterator, Sequence

from bench.command import Session, command_line, matches, plain_arguments
from bench.dlio.report import Race, make_report, race_table
from bench.dlio.run import Job, run_once
from bench.dlio.stage import Stage, find_dlio, lay_out
from bench.dlio.workloads import WAYS, WORKLOADS, Workload
from bench.errors import BenchmarkError, Unavailable
from bench.process import run_program
from bench.progress import Stretch
from bench.rounds import run_rounds

PREFIX_HELP = "a command that every timed run is started through, such as 'nice -n -5'"


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    shared = ("list", "dir", "rounds", "seed", "quick", "keep", "results")
    parser = command_line("bench.dlio", __doc__, *shared)
    add = parser.add_argument
    add("--workloads", metavar="GLOB", action="append", help="only these; may be given again")
    add("--files", type=int, help="files of each workload, instead of its own number")
    add("--epochs", type=int, default=2, help="epochs of each run; the first is cold [2]")
    add("--ranks", type=int, default=1, help="processes that MPI starts [1]")
    add("--prefix", type=shlex.split, default=[], metavar="COMMAND", help=PREFIX_HELP)
    return parser.parse_args(words)


def choose(patterns: Sequence[str] | None) -> list[Workload]:
    """Return the workloads that match a pattern."""
    return [workload for workload in WORKLOADS if matches(workload.name, patterns)]


def race(stage: Stage, arguments: argparse.Namespace, stretch: Stretch) -> Race:
    """Generate a workload's data and run it in every way, round after round."""

    def run(way: str, _number: int) -> dict[str, object]:
        job = Job(str(stage.folder), way, arguments.epochs, arguments.seed)
        try:
            return run_once(job, arguments.prefix)
        except Unavailable as reason:
            raise BenchmarkError(str(reason)) from reason

    stretch.show("DLIO generates its data")
    lay_out(stage)
    rounds = arguments.rounds or (1 if arguments.quick else 3)
    found = run_rounds({way: way for way in WAYS}, rounds, run, stretch)
    return Race(stage.workload, stage.files, stage.data_bytes(), found.runs)


def run(arguments: argparse.Namespace, whole: Stretch) -> Iterator[Race]:
    """Run the chosen workloads one after the other and yield each."""
    folder = arguments.dir / "dlio"
    workloads = choose(arguments.workloads)
    try:
        for number, workload in enumerate(workloads):
            own = workload.quick_files if arguments.quick else workload.files
            files = arguments.files or own
            stage = Stage(workload, folder / workload.name, files, arguments.ranks)
            begin, end = number / len(workloads), (number + 1) / len(workloads)
            yield race(stage, arguments, whole.part(begin, end, workload.name))
            if not arguments.keep:
                shutil.rmtree(stage.folder)
    finally:
        if not arguments.keep:
            shutil.rmtree(folder, ignore_errors=True)


def main(words: Sequence[str] | None = None) -> int:
    """Run the benchmark and return its exit code."""
    arguments = parse_arguments(words)
    if arguments.list:
        for workload in WORKLOADS:
            print(f"{workload.name:20} {workload.about}")
        return 0
    if not choose(arguments.workloads):
        print("no workload has such a name: see --list")
        return 2
    arguments.dir = arguments.dir.absolute()
    session = Session("dlio", arguments.dir)
    races: list[Race] = []

    def measure(whole: Stretch) -> None:
        find_dlio()
        for done in run(arguments, whole):
            races.append(done)
            race_table(done).show(session.console)

    code = session.measure(measure)
    if races:
        report = make_report(session.facts, plain_arguments(arguments), races)
        session.write(report, arguments.results)
    return code


if __name__ == "__main__":
    run_program(main)
