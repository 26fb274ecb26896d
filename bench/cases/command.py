"""The command line of the cases: choose cases, run them, show and write the results."""

from __future__ import annotations

import argparse
from dataclasses import replace

from bench.cases.report import case_table, floor_table, make_report
from bench.cases.runner import Result, Settings, Stage
from bench.cases.table import CASES, Case
from bench.command import Session, command_line, matches, plain_arguments
from bench.datasets import TARGET_KEYS, find_corpus
from bench.errors import BadArgumentError
from bench.measurement import Limits
from bench.progress import Stretch
from bench.targets import Targets
from dlfs.base.units import parse_bytes

DESCRIPTION = """Measure DLFS next to plain files and the limits of the machine.

``python -m bench peers`` measures it next to its peers, ``python -m bench report`` does all.
"""
TARGET_HELP = "an empty namespace in RAM, nvme-tcp: or spdk:; give both for the same one"
QUICK_FILES = 20_000
QUICK_LIMITS = Limits(seconds=1.0, mount_files=2000, paths=200_000, datasets=500)
FULL_PATHS = 10_000_000


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    shared = ("list", "dir", "rounds", "minutes", "corpus", "seed", "quick", "keep", "results")
    parser = command_line("bench", DESCRIPTION, *shared)
    add = parser.add_argument
    add("--cases", metavar="GLOB", action="append", help="only these; may be given again")
    add("--size", type=parse_bytes, help="size of every data set [512MiB, 1GiB and 1.5GiB]")
    add("--files", type=int, help="most plain files of a data set [60000]")
    add("--seconds", type=float, help="time of a contender that can stop early [1.5]")
    add("--paths", type=int, help="paths of the synthetic directory [1000000]")
    add("--full", action="store_true", help="a directory of ten million paths")
    add("--target", metavar="URI", action="append", default=[], help=TARGET_HELP)
    add("--force", action="store_true", help="overwrite the data of the target's namespace")
    add("--core", type=int, help="processor of initiators in cases on --target [the last one]")
    add("--perf", default="spdk_nvme_perf", help="SPDK's own tool [spdk_nvme_perf in PATH]")
    return parser.parse_args(words)


def settings_of(arguments: argparse.Namespace) -> Settings:
    """Return the settings that the arguments ask for."""
    quick = arguments.quick
    limits = QUICK_LIMITS if quick else Limits()
    limits = replace(
        limits,
        seconds=limits.seconds if arguments.seconds is None else arguments.seconds,
        paths=arguments.paths or (FULL_PATHS if arguments.full else limits.paths),
        seed=arguments.seed,
    )
    folder = arguments.dir / "dlfs-bench"
    return Settings(
        directory=arguments.dir,
        rounds=arguments.rounds or (1 if quick else 3),
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
    """Return the cases that match a pattern; those on a corpus or a target only if there is one."""
    return [
        case
        for case in CASES
        if matches(case.name, patterns)
        and (corpus or case.dataset != "corpus")
        and (target or case.dataset not in TARGET_KEYS)
    ]


def main(words: list[str] | None = None) -> int:
    """Run the benchmark and return its exit code."""
    arguments = parse_arguments(words)
    if arguments.list:
        for case in CASES:
            print(f"{case.name:16} {case.about}")
        return 0
    session = Session("cases", arguments.dir)
    results: list[Result] = []

    def run_cases(whole: Stretch) -> None:
        settings = settings_of(arguments)
        has_target = bool(arguments.target)
        cases = choose(arguments.cases, corpus=settings.corpus is not None, target=has_target)
        if not cases:
            text = "no case has such a name: see --list (some need --corpus or --target)"
            raise BadArgumentError(text)
        stage = Stage(settings)
        total, done = sum(len(case.contenders) for case in cases), 0
        try:
            for case in cases:
                begin, done = done, done + len(case.contenders)
                stretch = whole.part(begin / total, done / total, case.name)
                results.append(stage.run(case, stretch))
                case_table(results[-1]).show(session.console)
        finally:
            stage.close()

    code = session.measure(run_cases, arguments.minutes)
    if results:
        floor_table(results, "Floors").show(session.console)
        report = make_report(session.facts, plain_arguments(arguments), results)
        session.write(report, arguments.results)
    return code
