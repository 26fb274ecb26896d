"""``python -m bench.profile``: where the time of a sample goes, by what it is for.

perf samples where the time goes, the kernel's too; callgrind counts the instructions of the reading
process in user space, which do not depend on what else the machine does. What is not installed is
left out and named.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from bench.contestants.mounts import check_fuse
from bench.ending import run_program
from bench.machine import ROOT, Unavailable, describe
from bench.profile import report
from bench.profile.recorders import Job, Recording, record_callgrind, record_perf
from bench.profile.report import Profile
from bench.profile.workload import CASES, scene_of
from bench.progress import Progress
from dlfs.units import parse_bytes

RESULTS = Path(__file__).parents[1] / "results"
COUNTED = ("cached", "cold")
"""Where instructions in user space, of one process, are a good part of the whole."""
COUNTED_STEPS = 400


def about(case: str) -> str:
    """What a case does, in a line."""
    text = CASES[case].__doc__ or ""
    return text.strip().rstrip(".").lower()


def profile_case(job: Job, tools: list[str], steps: int) -> Profile:
    """Record a case by every tool that can."""
    found: dict[str, Recording | None] = {"perf": None, "callgrind": None}
    missing = []
    for tool in tools:
        try:
            if job.case == "mount":
                check_fuse()
            if tool == "perf":
                found[tool] = record_perf(job)
            elif job.case in COUNTED:
                counted = Job(job.case, job.folder, job.size_bytes, steps=steps)
                found[tool] = record_callgrind(counted)
        except Unavailable as reason:
            missing.append(f"{tool}: {reason}")
    return Profile(job.case, about(job.case), found["perf"], found["callgrind"], missing)


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.profile", description=__doc__)
    add = parser.add_argument
    add("cases", nargs="*", help=f"of {', '.join(CASES)} [cached cold mount]")
    add("--dir", type=Path, default=ROOT / "build" / "bench", help="on the disk under test")
    add("--size", type=parse_bytes, default="512MiB", help="of the data [512MiB]")
    add("--seconds", type=float, default=5.0, help="that a case is sampled [5]")
    add("--steps", type=int, default=COUNTED_STEPS, help="batches whose instructions count [400]")
    add("--tool", choices=["perf", "callgrind"], action="append", help="[both]")
    add("--results", type=Path, default=RESULTS, help="where results are written")
    arguments = parser.parse_args(words)
    unknown = [case for case in arguments.cases if case not in CASES]
    if unknown:
        parser.error(f"no case is called {', '.join(unknown)}")
    return arguments


def main(words: list[str] | None = None) -> int:
    """Run what the command line says."""
    arguments = parse_arguments(words)
    console = Console(width=None if sys.stdout.isatty() else 140)
    folder = arguments.dir / "dlfs-profile"
    folder.mkdir(parents=True, exist_ok=True)
    facts, profiles = describe(arguments.dir), []
    cases = arguments.cases or ["cached", "cold", "mount"]
    with Progress(console, "profile") as progress:
        progress.tell("laying out the data", 0.0)
        scene_of(folder, arguments.size)
        for number, case in enumerate(cases):
            progress.tell(case, number / len(cases))
            job = Job(case, folder, arguments.size, seconds=arguments.seconds)
            tools = arguments.tool or ["perf", "callgrind"]
            profiles.append(profile_case(job, tools, arguments.steps))
    path = report.write(facts, profiles, arguments.results)
    console.print(path.with_suffix(".md").read_text(encoding="utf-8"), markup=False)
    console.print(str(path), markup=False)
    return 0


if __name__ == "__main__":
    run_program(main)
