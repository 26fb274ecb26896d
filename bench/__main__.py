"""``python -m bench``: choose cases, run them, show and keep the results.

``python -m bench peers`` races the peers, ``python -m bench report`` does everything there is.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from rich.console import Console

from bench import gather, report
from bench.cases import CASES, Case
from bench.contestant import Limits, WrongBytesError
from bench.datasets import TARGET_KEYS, find_corpus
from bench.ending import INTERRUPTED, run_program
from bench.machine import ROOT, describe
from bench.peers.__main__ import main as race_peers
from bench.progress import Progress
from bench.runner import Result, Settings, Stage
from bench.targets import OccupiedError, Targets
from dlfs.units import parse_bytes

RESULTS = Path(__file__).parent / "results"
TARGET_HELP = "an empty namespace in RAM, nvme-tcp: or spdk:; give both for the same one"
QUICK_FILES = 20_000
QUICK_LIMITS = Limits(seconds=1.0, mount_files=2000, paths=200_000)
FULL_PATHS = 10_000_000


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    add = parser.add_argument
    add("--list", action="store_true", help="list the cases and end")
    add("--cases", metavar="GLOB", action="append", help="only these; may be given again")
    add("--dir", type=Path, default=ROOT / "build" / "bench", help="on the disk under test")
    add("--size", type=parse_bytes, help="of every data set [512MiB, 1GiB and 1.5GiB]")
    add("--files", type=int, help="plain files of a data set, at most [60000]")
    add("--rounds", type=int, help="runs of each contestant [3]")
    add("--seconds", type=float, help="time for a contestant that can stop early [1.5]")
    add("--minutes", type=float, help="for all: late cases make fewer rounds, one at least")
    add("--paths", type=int, help="of the synthetic directory [1000000]")
    add("--corpus", metavar="DIR|deb", help="real files; deb: Debian's linux-source-6.1")
    add("--seed", type=int, default=1, help="of data and orders [1]")
    add("--quick", action="store_true", help="small data, one round: minutes")
    add("--full", action="store_true", help="a directory of ten million paths")
    add("--keep", action="store_true", help="leave the data for the next run")
    add("--target", metavar="URI", action="append", default=[], help=TARGET_HELP)
    add("--force", action="store_true", help="overwrite what the target's namespace holds")
    add("--core", type=int, help="of initiators in cases on --target [the last one]")
    add("--perf", default="spdk_nvme_perf", help="SPDK's own tool [spdk_nvme_perf in PATH]")
    add("--results", type=Path, default=RESULTS, help="where results are written")
    return parser.parse_args(words)


def settings_of(arguments: argparse.Namespace) -> Settings:
    """What the arguments mean."""
    quick = arguments.quick
    limits = replace(QUICK_LIMITS if quick else Limits(), seed=arguments.seed)
    if arguments.full:
        limits = replace(limits, paths=FULL_PATHS)
    if arguments.seconds is not None:
        limits = replace(limits, seconds=arguments.seconds)
    if arguments.paths is not None:
        limits = replace(limits, paths=arguments.paths)
    folder = arguments.dir / "dlfs-bench"
    return Settings(
        directory=arguments.dir,
        rounds=arguments.rounds or (1 if quick else 3),
        minutes=arguments.minutes,
        quick=quick,
        total_bytes=arguments.size,
        files_max=arguments.files or (QUICK_FILES if quick else 60_000),
        corpus=find_corpus(arguments.corpus, folder) if arguments.corpus else None,
        keep=arguments.keep,
        limits=limits,
        targets=Targets(tuple(arguments.target), arguments.force),
        core=arguments.core,
        perf=arguments.perf,
    )


def choose(patterns: list[str] | None, *, corpus: bool, target: bool = False) -> list[Case]:
    """The cases that any pattern matches; those on a corpus or a target only when there is one."""
    wanted = patterns or ["*"]
    return [
        case
        for case in CASES
        if any(fnmatchcase(case.name, pattern) for pattern in wanted)
        and (corpus or case.dataset != "corpus")
        and (target or case.dataset not in TARGET_KEYS)
    ]


def run(settings: Settings, cases: list[Case], console: Console, results: list[Result]) -> None:
    """Run cases one after the other, show each, and add it to the results."""
    stage = Stage(settings)
    runs = [len(case.contestants) for case in cases]
    try:
        with Progress(console, "cases") as progress:
            for number, case in enumerate(cases):
                begin, end = (sum(runs[:at]) / sum(runs) for at in (number, number + 1))
                result = stage.run(case, progress.between(begin, end), due=end)
                report.print_case(console, result)
                results.append(result)
    finally:
        stage.close()


OTHERS = {"peers": race_peers, "report": gather.main}


def main(words: list[str] | None = None) -> int:
    """Run what the command line says."""
    words = sys.argv[1:] if words is None else words
    if words and words[0] in OTHERS:
        return OTHERS[words[0]](words[1:])
    arguments = parse_arguments(words)
    console = Console(width=None if sys.stdout.isatty() else 140)
    if arguments.list:
        for case in CASES:
            console.print(f"{case.name:16} {case.about}", highlight=False)
        return 0
    arguments.dir.mkdir(parents=True, exist_ok=True)
    try:
        settings = settings_of(arguments)
    except FileNotFoundError as error:
        console.print(str(error), style="red", markup=False)
        return 2
    target = bool(settings.targets.uris)
    cases = choose(arguments.cases, corpus=settings.corpus is not None, target=target)
    if not cases:
        console.print("no case has such a name: see --list (some need --corpus or --target)")
        return 2
    facts, code = describe(arguments.dir), 0
    results: list[Result] = []
    try:
        run(settings, cases, console, results)
    except WrongBytesError as error:
        console.print(f"wrong bytes: {error}", style="red", markup=False)
        code = 1
    except OccupiedError as error:
        console.print(str(error), style="red", markup=False)
        return 2
    except KeyboardInterrupt:
        code = INTERRUPTED
    if not results:
        return code
    report.print_floors(console, results)
    plain = {name: str(value) for name, value in vars(arguments).items() if value is not None}
    facts["load_average_after"] = os.getloadavg()[0]
    path = report.write(arguments.results, facts, plain, results)
    console.print(f"every run is in {path}, the tables in {path.with_suffix('.md')}", markup=False)
    return code


if __name__ == "__main__":
    run_program(main)
