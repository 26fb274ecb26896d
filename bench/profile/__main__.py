"""``python -m bench.profile``: show where the CPU time of a sample goes, by purpose.

perf samples the CPU time, the kernel's too. callgrind counts the instructions of the reading
process in user space, which do not depend on other load of the machine. A tool that is not
installed is left out and named.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

from bench.command import Session, command_line
from bench.errors import Unavailable
from bench.process import run_program
from bench.profile.recorders import Recording, record_callgrind, record_perf
from bench.profile.report import Profile, make_report
from bench.profile.workload import CASES, Job, scene_of
from bench.progress import Stretch
from dlfs.base.units import parse_bytes

COUNTED = ("cached", "cold")
"""Cases where one process in user space uses a good part of the CPU time."""
COUNTED_STEPS = 400
TOOLS = ("perf", "callgrind")


def profile_case(job: Job, tools: Sequence[str], steps: int) -> Profile:
    """Record a case by every tool that works here."""
    found: dict[str, Recording | None] = dict.fromkeys(TOOLS)
    missing = []
    for tool in tools:
        try:
            if tool == "perf":
                found[tool] = record_perf(job)
            elif job.case in COUNTED:
                found[tool] = record_callgrind(replace(job, steps=steps))
        except Unavailable as reason:
            missing.append(f"{tool}: {reason}")
    about = (CASES[job.case].__doc__ or "").strip().rstrip(".").lower()
    return Profile(job.case, about, found["perf"], found["callgrind"], missing)


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = command_line("bench.profile", __doc__, "dir", "results")
    add = parser.add_argument
    add("cases", nargs="*", help=f"of {', '.join(CASES)} [cached cold mount]")
    add("--size", type=parse_bytes, default="512MiB", help="size of the data [512MiB]")
    add("--seconds", type=float, default=5.0, help="duration of the sampling of a case [5]")
    add("--steps", type=int, default=COUNTED_STEPS, help="batches whose instructions count [400]")
    add("--tool", choices=TOOLS, action="append", help="[both]")
    arguments = parser.parse_args(words)
    unknown = [case for case in arguments.cases if case not in CASES]
    if unknown:
        parser.error(f"no case is called {', '.join(unknown)}")
    return arguments


def main(words: list[str] | None = None) -> int:
    """Run the benchmark and return its exit code."""
    arguments = parse_arguments(words)
    session = Session("profile", arguments.dir)
    folder = arguments.dir / "dlfs-profile"
    folder.mkdir(parents=True, exist_ok=True)
    cases = arguments.cases or ["cached", "cold", "mount"]
    profiles: list[Profile] = []

    def measure(whole: Stretch) -> None:
        whole.show("writing the data")
        scene_of(folder, arguments.size)
        for number, case in enumerate(cases):
            whole.show(case, number / len(cases))
            job = Job(case, str(folder), arguments.size, seconds=arguments.seconds)
            profiles.append(profile_case(job, arguments.tool or TOOLS, arguments.steps))

    code = session.measure(measure)
    if profiles:
        report = make_report(session.facts, profiles)
        session.console.print(report.markdown(), markup=False)
        session.write(report, arguments.results)
    return code


if __name__ == "__main__":
    run_program(main)
