"""``python -m bench.profile``: show where the CPU time of a sample goes, by purpose.

perf samples the CPU time, the kernel's too.
"""

from __future__ import annotations

import argparse

from bench.command import Session, command_line
from bench.errors import Unavailable
from bench.process import run_program
from bench.profile.recorders import record_perf
from bench.profile.report import Profile, make_report
from bench.profile.workload import CASES, Job, scene_of
from bench.progress import Stretch
from dlfs.base.units import parse_bytes


def profile_case(job: Job) -> Profile:
    """Record a case, if perf works here."""
    about = (CASES[job.case].__doc__ or "").strip().rstrip(".").lower()
    try:
        return Profile(job.case, about, record_perf(job))
    except Unavailable as reason:
        return Profile(job.case, about, None, str(reason))


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = command_line("bench.profile", __doc__, "dir", "results")
    add = parser.add_argument
    add("cases", nargs="*", help=f"of {', '.join(CASES)} [cached cold mount]")
    add("--size", type=parse_bytes, default="512MiB", help="size of the data [512MiB]")
    add("--seconds", type=float, default=5.0, help="duration of the sampling of a case [5]")
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
            profiles.append(profile_case(job))

    code = session.measure(measure)
    if profiles:
        report = make_report(session.facts, profiles)
        session.console.print(report.markdown(), markup=False)
        session.write(report, arguments.results)
    return code


if __name__ == "__main__":
    run_program(main)
