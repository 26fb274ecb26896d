"""Shared parts of the benchmarks' command lines: options, the run, and its results.

A benchmark's ``main`` makes a parser by `command_line`, then a `Session`. The session runs the
measurements, turns their errors into an exit code, and writes the report with its pictures.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.errors import BenchmarkError, Unavailable
from bench.machine import describe
from bench.process import INTERRUPTED, ROOT
from bench.progress import Progress, Stretch
from bench.report import Report

RESULTS = ROOT / "bench" / "results"

OPTIONS: dict[str, dict[str, Any]] = {
    "list": {"action": "store_true", "help": "list what can be chosen, and exit"},
    "dir": {
        "type": Path,
        "default": ROOT / "build" / "bench",
        "help": "folder on the disk under test",
    },
    "corpus": {"metavar": "DIR|deb", "help": "real files; deb: Debian's linux-source-6.1"},
    "rounds": {"type": int, "help": "runs of each contender [3]"},
    "minutes": {"type": float, "help": "time limit; when late, fewer rounds, but at least one"},
    "seed": {"type": int, "default": 1, "help": "seed of data and orders [1]"},
    "quick": {"action": "store_true", "help": "small data, one round: minutes"},
    "keep": {"action": "store_true", "help": "leave the data for the next run"},
    "results": {"type": Path, "default": RESULTS, "help": "folder for the results"},
}
"""Options that several benchmarks have."""


def command_line(program: str, description: str | None, *options: str) -> argparse.ArgumentParser:
    """Return a parser with some of the shared options."""
    parser = argparse.ArgumentParser(prog=f"python -m {program}", description=description)
    for option in options:
        parser.add_argument(f"--{option}", **OPTIONS[option])
    return parser


def matches(name: str, patterns: Sequence[str] | None) -> bool:
    """Return True if a name matches any shell pattern; without patterns every name does."""
    return any(fnmatchcase(name, pattern) for pattern in patterns or ["*"])


def plain_arguments(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the arguments that have a value, as strings for the JSON file."""
    return {name: str(value) for name, value in vars(arguments).items() if value is not None}


class Session:
    """One run of a benchmark.

    Attributes:
        console: console for tables and progress.
        facts: facts of the machine, taken at the start; the load also at the end.

    Args:
        name: name of the benchmark, shown with its progress.
        directory: folder on the disk under test; created if it is missing.
        width: columns of the output where it is no terminal.
    """

    def __init__(
        self,
        name: str,
        directory: Path,
        *,
        width: int = 140,
    ) -> None:
        self.console = Console(width=None if sys.stdout.isatty() else width)
        self._name = name
        directory.mkdir(parents=True, exist_ok=True)
        self.facts = describe(directory)

    def measure(self, work: Callable[[Stretch], None], minutes: float | None = None) -> int:
        """Run the measurements and return an exit code: 0, that of a BenchmarkError, or 130.

        Args:
            work: makes the measurements. It keeps its results where the caller finds them, because
                results up to an error or an interrupt are reported, too.
            minutes: time limit; None: unlimited.
        """
        code = 0
        try:
            with Progress(self.console, self._name, minutes) as progress:
                work(progress.whole())
        except (BenchmarkError, Unavailable) as error:
            self.console.print(str(error), style="red", markup=False, highlight=False)
            code = error.exit_code
        except KeyboardInterrupt:
            code = INTERRUPTED
        self.facts["load_average_after"] = os.getloadavg()[0]
        return code

    def write(self, report: Report, folder: Path) -> None:
        """Write the report, and print where it is."""
        path = report.write(folder)
        page = path.with_suffix(".md")
        self.console.print(f"every run is in {path}, the tables in {page}", markup=False)
