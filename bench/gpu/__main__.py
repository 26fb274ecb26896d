"""``python -m bench gpu``: samples into a GPU's memory, next to other loaders, in four minutes."""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from bench.command import Session, command_line, matches, plain_arguments
from bench.errors import BadArgumentError, BenchmarkError, Unavailable
from bench.gpu.feeds import FEEDS, Feed
from bench.gpu.measuring import PROBE, SIZES, Job, Result
from bench.gpu.report import Findings, make_report
from bench.process import run_program, start_child
from bench.progress import Stretch
from dlfs.base.json_records import to_record
from dlfs.base.units import parse_bytes

FOLDER = "dlfs-gpu"
MODULE = "bench.gpu.measuring"
MINUTES = 4.0
PROBE_SECONDS = 60
FEED_SECONDS_MIN = 15
"""Least time for a feed; with less, the rest is left out."""
LOG_CHARACTERS = 4000
"""Characters of the log of a feed that failed that the report keeps."""
END_SECONDS = 5
"""Time that is kept for removing the data and writing the report."""


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = command_line("bench gpu", __doc__, "list", "dir", "minutes", "seed", "keep", "results")
    add = parser.add_argument
    add("--device", default="cuda", help="the GPU; cpu runs all of it without one [cuda]")
    add("--only", metavar="GLOB", action="append", help="these feeds; may be given again")
    add("--sizes", default=",".join(size.key for size in SIZES), help="lengths [4k,110k,1m]")
    add("--size", type=parse_bytes, default=0, help="all samples of a size [128, 256, 512 MiB]")
    add("--seconds", type=float, default=1.5, help="duration of each timed part [1.5]")
    arguments = parser.parse_args(words)
    arguments.minutes = MINUTES if arguments.minutes is None else arguments.minutes
    return arguments


class Run:
    """One run of the benchmark, which ends within its time limit.

    Args:
        arguments: of the command line.
        sizes: keys of the sizes.
        findings: gets the results.
    """

    def __init__(
        self, arguments: argparse.Namespace, sizes: tuple[str, ...], findings: Findings
    ) -> None:
        self._arguments, self._sizes, self._findings = arguments, sizes, findings
        self._ends = time.monotonic() + 60 * arguments.minutes - END_SECONDS
        self._folder: Path = arguments.dir / FOLDER

    def measure(self, feeds: Sequence[Feed], stretch: Stretch) -> None:
        """Describe the device, then measure one feed after the other.

        Raises:
            Unavailable: there is no such device.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            stretch.show("the device")
            self._findings.device = self._probe()
            for number, feed in enumerate(feeds):
                stretch.show(feed.name, (number + 1) / (len(feeds) + 1))
                self._measure_feed(feed, len(feeds) - number)
        finally:
            if not self._arguments.keep:
                shutil.rmtree(self._folder, ignore_errors=True)

    def _job(self, name: str, seconds: float, sizes: tuple[str, ...] = ()) -> Job:
        given = self._arguments
        return Job(
            feed=name,
            folder=str(self._folder),
            device=given.device,
            sizes=sizes,
            total_bytes=given.size,
            seconds=given.seconds,
            seed=given.seed,
            limit_seconds=round(seconds) + END_SECONDS,
        )

    def _probe(self) -> dict[str, object]:
        log = self._folder / "device.log"
        with start_child(MODULE, self._job(PROBE, PROBE_SECONDS), log, grace_seconds=5) as child:
            facts: dict[str, object] = child.answer(PROBE_SECONDS)["facts"]
            return facts

    def _measure_feed(self, feed: Feed, feeds_left: int) -> None:
        """Measure a feed at each size; after a failure, the other sizes in a new process."""
        self._findings.results[feed.name] = []
        left = self._ends - time.monotonic()
        # Others may be faster than their share; the first ones also write data for others.
        ends = time.monotonic() + min(left, 2 * left / feeds_left)
        sizes = list(self._sizes)
        while sizes:
            if ends - time.monotonic() < FEED_SECONDS_MIN:
                self._note(feed, sizes, "no time was left")
                return
            self._measure_sizes(feed, sizes, ends)

    def _measure_sizes(self, feed: Feed, sizes: list[str], ends: float) -> None:
        """Measure in one process; take the sizes that are done, or cannot be, out of the list."""
        log = self._folder / f"{feed.name}.log"
        job = self._job(feed.name, ends - time.monotonic(), tuple(sizes))
        try:
            with start_child(MODULE, job, log, grace_seconds=5) as child:
                while sizes:
                    answer = child.answer(max(1.0, ends - time.monotonic()))
                    if "missing" in answer:
                        self._note(feed, sizes, answer["missing"])
                        sizes.clear()
                        return
                    result = to_record(answer["result"], Result)
                    self._findings.results[feed.name].append(result)
                    sizes.remove(result.size)
        except (Unavailable, BenchmarkError) as reason:
            self._findings.logs[feed.name] = log.read_text("utf-8", "replace")[-LOG_CHARACTERS:]
            self._note(feed, [sizes.pop(0)], str(reason))

    def _note(self, feed: Feed, sizes: list[str], reason: str) -> None:
        missing = self._findings.missing.setdefault(feed.name, {})
        missing.update(dict.fromkeys(sizes, reason))


def main(words: list[str] | None = None) -> int:
    """Run the benchmark and return its exit code, which is 1 if a feed failed."""
    arguments = parse_arguments(words)
    if arguments.list:
        for feed in FEEDS:
            print(f"{feed.name:14} {feed.about}")
        return 0
    known = [size.key for size in SIZES]
    sizes = tuple(arguments.sizes.split(","))
    feeds = [feed for feed in FEEDS if matches(feed.name, arguments.only)]
    session = Session("gpu", arguments.dir)
    findings = Findings()

    def measure(whole: Stretch) -> None:
        if unknown := set(sizes) - set(known):
            raise BadArgumentError(f"--sizes: expected some of {known}, got {sorted(unknown)}")
        if not feeds:
            raise BadArgumentError(f"--only: no feed is called {', '.join(arguments.only)}")
        Run(arguments, sizes, findings).measure(feeds, whole)

    code = session.measure(measure, arguments.minutes)
    if findings.device:
        report = make_report(session.facts, plain_arguments(arguments), sizes, findings)
        session.console.print(report.markdown(), markup=False)
        session.write(report, arguments.results)
    return code or int(bool(findings.logs))


if __name__ == "__main__":
    run_program(main)
