"""``python -m bench report``: all benchmarks of this machine, under one index.

A part is a program of its own, ``python -m MODULE --results DIR``, that writes Markdown and JSON
into the results folder. The index begins with a summary: the floors of the cases, and DLFS
next to each peer. It links the files of each part. A part that fails is named there, and the next
one runs. Ctrl-C or SIGTERM ends the running part, which removes its data; the index then has the
parts that ran. All data is removed in the end.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.command import command_line
from bench.datasets import CORPUS_ARCHIVE, CORPUS_PACKAGE, find_corpus
from bench.errors import BadArgumentError
from bench.machine import describe
from bench.process import INTERRUPTED, ROOT, started
from bench.report import facts_list, section_of

INDEX = "index.md"
SUMMARY = ("Floors", "How many times")
"""Headings of the sections of the parts' pages that the index begins with."""
CORPUS = "dlfs-bench-corpus"
DATA = ("dlfs-bench", "dlfs-bench-peers", "dlfs-profile", CORPUS)
"""Folders that the parts and this module create in the folder of ``--dir``."""
DISK_GIB = 20
"""Most disk space of a part, in GiB. Each part removes its data before the next one begins."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the report.

    Attributes:
        name: name that ``--parts`` selects.
        title: heading in the index.
        words: arguments of the interpreter.
        minutes: usual duration in minutes, given as ``--minutes`` to parts that take it.
        options: which of ``--dir``, ``--corpus``, ``--minutes`` the part takes.
        quick: arguments for a quick run.
    """

    name: str
    title: str
    words: tuple[str, ...]
    minutes: int
    options: tuple[str, ...] = ()
    quick: tuple[str, ...] = ("--quick",)


ALL_OPTIONS = ("--dir", "--corpus", "--minutes")
PARTS = (
    Part(
        "cases", "DLFS, plain files and the limits of the machine", ("-m", "bench"), 17, ALL_OPTIONS
    ),
    Part("peers", "DLFS next to its peers", ("-m", "bench.peers"), 26, ALL_OPTIONS),
    Part(
        "shuffle", "How well chunk shuffle shuffles", ("-m", "bench.shuffle"), 2, quick=("--tiny",)
    ),
    Part(
        "profile",
        "Where the time goes",
        ("-m", "bench.profile"),
        2,
        ("--dir",),
        ("--seconds", "1", "--size", "64MiB"),
    ),
)


@dataclass(frozen=True, slots=True)
class Ended:
    """A part that has ended: its command line, exit code, and the names of its files, sorted."""

    part: Part
    command: str
    code: int
    seconds: float
    files: tuple[str, ...]


def run_part(part: Part, arguments: argparse.Namespace, corpus: Path | None) -> Ended:
    """Run a part to its end; its output goes where the output of this program goes."""
    results: Path = arguments.results
    words = [*part.words, "--results", str(results)]
    minutes = None if arguments.quick else part.minutes
    given = {"--dir": arguments.dir, "--corpus": corpus, "--minutes": minutes}
    for option, value in given.items():
        words += [option, str(value)] if value and option in part.options else []
    words += part.quick if arguments.quick else []
    before = set(os.listdir(results))
    start = time.monotonic()
    try:
        with started([sys.executable, *words], cwd=ROOT) as process:
            code = process.wait()
    except KeyboardInterrupt:
        code = INTERRUPTED
    files = tuple(sorted(set(os.listdir(results)) - before))
    return Ended(part, shlex.join(["python", *words]), code, time.monotonic() - start, files)


def run_parts(parts: Sequence[Part], arguments: argparse.Namespace) -> tuple[list[Ended], str]:
    """Run parts until one is interrupted; return those that ended, and a sentence on the corpus."""
    ended: list[Ended] = []
    try:
        corpus, remark = choose_corpus(arguments)
        for number, part in enumerate(parts):
            minutes = sum(other.minutes for other in parts[number:])
            left = "" if arguments.quick else f", about {minutes} min left in all"
            clock = time.strftime("%H:%M:%S")
            print(f"{clock} part {number + 1} of {len(parts)}: {part.name}{left}", flush=True)
            ended.append(run_part(part, arguments, corpus))
            if ended[-1].code == INTERRUPTED:
                break
    finally:
        for name in DATA:
            shutil.rmtree(arguments.dir / name, ignore_errors=True)
    return ended, remark


def choose_corpus(arguments: argparse.Namespace) -> tuple[Path | None, str]:
    """Return the folder of real files and a sentence about it.

    Without ``--corpus``, Debian's Linux sources are used where they are installed.
    """
    given = arguments.corpus or ("deb" if CORPUS_ARCHIVE.exists() else "none")
    if given == "none":
        how = f"apt-get install --no-install-recommends {CORPUS_PACKAGE}"
        return None, f"No real files were read: name a folder by --corpus, or `{how}`."
    corpus = find_corpus(given, arguments.dir / CORPUS)
    what = f"{CORPUS_PACKAGE} of Debian" if given == "deb" else str(corpus)
    return corpus, f"The corpus is {what}."


# ---- the index -----------------------------------------------------------------------------------


def index(ended: Sequence[Ended], facts: Mapping[str, Any], remark: str, folder: Path) -> str:
    """Return the page that links all others, the summary first."""
    lines = ["# Benchmark of this machine", "", *facts_list(facts), f"- {remark}"]
    for name in (name for one in ended for name in one.files if name.endswith(".md")):
        for heading in SUMMARY:
            lines += ["", *section_of(folder / name, heading)]
    for one in ended:
        lines += ["", f"## {one.part.title}", ""]
        if one.code:
            ending = "was interrupted" if one.code == INTERRUPTED else f"FAILED: exit {one.code}"
            lines += [f"`{one.command}` {ending} after {one.seconds / 60:.1f} minutes."]
        else:
            lines += [f"`{one.command}`, {one.seconds / 60:.1f} minutes:"]
        lines += ["", *(f"- [{name}]({name})" for name in one.files)]
    return "\n".join([*lines, ""])


def main(words: Sequence[str] | None = None) -> int:
    """Run all parts or the chosen ones; return 1 if one failed, 130 if one was interrupted."""
    parser = command_line("bench report", __doc__, "quick", "dir", "results")
    add = parser.add_argument
    add(
        "--corpus",
        metavar="DIR|deb|none",
        help="real files, too; deb: Debian's linux-source-6.1 [deb where that is installed]",
    )
    add("--parts", help=f"these only, with commas between [{','.join(p.name for p in PARTS)}]")
    arguments = parser.parse_args(words)
    wanted = arguments.parts.split(",") if arguments.parts else [part.name for part in PARTS]
    if unknown := set(wanted) - {part.name for part in PARTS}:
        parser.error(f"--parts: there is no {', '.join(sorted(unknown))}")
    for folder in (arguments.dir, arguments.results):
        folder.mkdir(parents=True, exist_ok=True)
    free_gib = shutil.disk_usage(arguments.dir).free >> 30
    if free_gib < DISK_GIB and not arguments.quick:
        print(f"{arguments.dir} has {free_gib} GiB free; the report takes up to {DISK_GIB} GiB")
    facts = describe(arguments.dir)
    try:
        ended, remark = run_parts([part for part in PARTS if part.name in wanted], arguments)
    except BadArgumentError as error:
        parser.error(str(error))
    facts["load_average_after"] = os.getloadavg()[0]
    written = arguments.results / INDEX
    written.write_text(index(ended, facts, remark, arguments.results), encoding="utf-8")
    print(f"the whole report is in {written}")
    codes = [one.code for one in ended]
    return INTERRUPTED if INTERRUPTED in codes else int(any(codes))
