"""``python -m bench report``: everything there is to say about this machine, under one index.

A part is a program of its own, ``python -m MODULE --results DIR`` with what else it takes, that
leaves Markdown, JSON and pictures in the results' folder. What a part left is linked from the
index; one that fails is named there, and the others go on.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.machine import ROOT, describe

RESULTS = ROOT / "bench" / "results"
INDEX = "index.md"


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the report.

    Attributes:
        name: what ``--parts`` selects.
        title: in the index.
        words: of its command, after the interpreter.
        takes: which of ``--dir``, ``--corpus`` are for it.
        quick: its own words for ``--quick``.
    """

    name: str
    title: str
    words: tuple[str, ...]
    takes: tuple[str, ...] = ()
    quick: tuple[str, ...] = ("--quick",)

    @property
    def exists(self) -> bool:
        """Whether the module is there."""
        return importlib.util.find_spec(self.words[1]) is not None


PARTS = (
    Part(
        "cases",
        "DLFS, plain files and the limits of the machine",
        ("-m", "bench"),
        ("--dir", "--corpus"),
    ),
    Part("peers", "DLFS beside its peers", ("-m", "bench.peers"), ("--dir", "--corpus")),
    Part("shuffle", "How well chunk shuffle shuffles", ("-m", "bench.shuffle"), quick=("--tiny",)),
    Part(
        "profile",
        "Where the time goes",
        ("-m", "bench.profile"),
        ("--dir",),
        ("--seconds", "1", "--size", "64MiB", "--steps", "50"),
    ),
)


@dataclass(frozen=True, slots=True)
class Ended:
    """What became of a part.

    Attributes:
        part: which.
        code: of its exit.
        seconds: that it took.
        files: that it left, in order of their names.
    """

    part: Part
    code: int
    seconds: float
    files: tuple[str, ...]


def run_part(part: Part, arguments: argparse.Namespace) -> Ended:
    """Run a part to its end; its output goes where ours goes."""
    results: Path = arguments.results
    command = [sys.executable, *part.words, "--results", str(results)]
    for option, value in (("--dir", arguments.dir), ("--corpus", arguments.corpus)):
        command += [option, str(value)] if value and option in part.takes else []
    command += part.quick if arguments.quick else []
    before = set(os.listdir(results))
    start = time.monotonic()
    code = subprocess.run(command, check=False, cwd=ROOT).returncode
    fresh = sorted(set(os.listdir(results)) - before)
    return Ended(part, code, time.monotonic() - start, tuple(fresh))


def index(ended: Sequence[Ended], facts: dict[str, object]) -> str:
    """The one page that leads to all the others."""
    lines = ["# Benchmark of this machine", ""]
    lines += [f"- {key}: {value}" for key, value in facts.items()]
    for one in ended:
        lines += ["", f"## {one.part.title}", ""]
        command = " ".join(["python", *one.part.words])
        if one.code:
            lines.append(f"`{command}` FAILED with exit code {one.code}.")
        lines.append(f"`{command}`, {one.seconds / 60:.1f} minutes:")
        lines.append("")
        lines += [f"- [{name}]({name})" for name in one.files if not name.endswith(".png")]
        lines += [f"\n![{name}]({name})" for name in one.files if name.endswith(".png")]
    return "\n".join([*lines, ""])


def main(words: Sequence[str] | None = None) -> int:
    """Run all parts, or those that were chosen; 1 when one failed."""
    parser = argparse.ArgumentParser(prog="python -m bench report", description=__doc__)
    add = parser.add_argument
    add("--quick", action="store_true", help="small data, one round: minutes")
    add("--dir", type=Path, default=ROOT / "build" / "bench", help="on the disk under test")
    add("--corpus", metavar="DIR|deb", help="real files, too; deb: Debian's linux-source-6.1")
    add("--parts", help=f"these only, with commas between [{','.join(p.name for p in PARTS)}]")
    add("--results", type=Path, default=RESULTS, help="where results are written")
    arguments = parser.parse_args(words)
    wanted = arguments.parts.split(",") if arguments.parts else [part.name for part in PARTS]
    if unknown := set(wanted) - {part.name for part in PARTS}:
        parser.error(f"--parts: there is no {', '.join(sorted(unknown))}")
    arguments.dir.mkdir(parents=True, exist_ok=True)
    arguments.results.mkdir(parents=True, exist_ok=True)
    facts = describe(arguments.dir)
    ended = [run_part(part, arguments) for part in PARTS if part.name in wanted and part.exists]
    page = arguments.results / INDEX
    page.write_text(index(ended, facts), encoding="utf-8")
    print(f"the whole report is in {page}")
    return int(any(one.code for one in ended))
