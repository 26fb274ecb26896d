"""``python -m bench report``: everything there is to say about this machine, under one index.

A part is a program of its own, ``python -m MODULE --results DIR`` with what else it takes, that
leaves Markdown, JSON and pictures in the results' folder. The index begins with a summary: the
floors, and DLFS beside each peer. What a part left is linked from it; one that fails is named
there, and the others go on. Ctrl-C or SIGTERM ends the part that runs, which removes its data; the
index then has what there is. All data is removed in the end.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench import page
from bench.datasets import CORPUS_ARCHIVE, CORPUS_PACKAGE, find_corpus
from bench.ending import INTERRUPTED, started
from bench.machine import ROOT, describe
from bench.peers.report import read as read_races
from bench.peers.report import summary as peers_summary

RESULTS = ROOT / "bench" / "results"
INDEX = "index.md"
CORPUS = "dlfs-bench-corpus"
DATA = ("dlfs-bench", "dlfs-bench-peers", "dlfs-profile", CORPUS)
"""Folders that the parts and this one make under ``--dir``."""
DISK_GIB = 20
"""That the parts take at most: each removes its data before the next begins."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the report.

    Attributes:
        name: what ``--parts`` selects.
        title: in the index.
        words: of its command, after the interpreter.
        minutes: that it takes, about; with ``--minutes`` it makes fewer rounds where it is late.
        takes: which of ``--dir``, ``--corpus``, ``--minutes`` are for it.
        quick: its own words for ``--quick``.
    """

    name: str
    title: str
    words: tuple[str, ...]
    minutes: int
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
        17,
        ("--dir", "--corpus", "--minutes"),
    ),
    Part(
        "peers",
        "DLFS beside its peers",
        ("-m", "bench.peers"),
        26,
        ("--dir", "--corpus", "--minutes"),
    ),
    Part(
        "shuffle", "How well chunk shuffle shuffles", ("-m", "bench.shuffle"), 2, quick=("--tiny",)
    ),
    Part(
        "profile",
        "Where the time goes",
        ("-m", "bench.profile"),
        2,
        ("--dir",),
        ("--seconds", "1", "--size", "64MiB", "--steps", "50"),
    ),
)


@dataclass(frozen=True, slots=True)
class Ended:
    """What became of a part.

    Attributes:
        part: which.
        command: that ran it.
        code: of its exit.
        seconds: that it took.
        files: that it left, in order of their names.
    """

    part: Part
    command: str
    code: int
    seconds: float
    files: tuple[str, ...]

    def json(self, folder: Path) -> dict[str, Any] | None:
        """What it found, as plain values; None where it left nothing."""
        names = [name for name in self.files if name.endswith(".json")]
        if not names:
            return None
        found: dict[str, Any] = json.loads((folder / names[0]).read_text(encoding="utf-8"))
        return found


def run_part(part: Part, arguments: argparse.Namespace, corpus: Path | None) -> Ended:
    """Run a part to its end; its output goes where ours goes."""
    results: Path = arguments.results
    words = [*part.words, "--results", str(results)]
    minutes = None if arguments.quick else part.minutes
    given = {"--dir": arguments.dir, "--corpus": corpus, "--minutes": minutes}
    for option, value in given.items():
        words += [option, str(value)] if value and option in part.takes else []
    words += part.quick if arguments.quick else []
    before = set(os.listdir(results))
    start = time.monotonic()
    try:
        with started([sys.executable, *words], cwd=ROOT) as process:
            code = process.wait()
    except KeyboardInterrupt:
        code = INTERRUPTED
    fresh = sorted(set(os.listdir(results)) - before)
    command = shlex.join(["python", *words])
    return Ended(part, command, code, time.monotonic() - start, tuple(fresh))


def run_parts(parts: Sequence[Part], arguments: argparse.Namespace) -> tuple[list[Ended], str]:
    """Run parts one after the other until one is interrupted.

    Returns:
        What became of them, and what there is to say about the corpus.
    """
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
    """The folder of real files, Debian's sources where they are installed; and a remark.

    Raises:
        FileNotFoundError: there is no such folder.
    """
    given = arguments.corpus or ("deb" if CORPUS_ARCHIVE.exists() else "none")
    if given == "none":
        how = f"apt-get install --no-install-recommends {CORPUS_PACKAGE}"
        return None, f"No real files were read: name a folder by --corpus, or `{how}`."
    corpus = find_corpus(given, arguments.dir / CORPUS)
    what = f"{CORPUS_PACKAGE} of Debian" if given == "deb" else str(corpus)
    return corpus, f"The corpus is {what}."


# ---- the index -----------------------------------------------------------------------------------


def index(ended: Sequence[Ended], facts: dict[str, Any], remark: str, folder: Path) -> str:
    """The one page that leads to all the others, the summary first."""
    lines = ["# Benchmark of this machine", "", *page.head(facts), f"- {remark}"]
    found = {one.part.name: one.json(folder) for one in ended}
    if cases := found.get("cases"):
        lines += floors(cases["cases"])
    if found.get("peers"):
        names = next(one.files for one in ended if one.part.name == "peers")
        race = read_races([folder / name for name in names if name.endswith(".json")])[2]
        lines += ["", "## How many times as fast as its peers DLFS is", "", *peers_summary(race)]
    for one in ended:
        lines += ["", f"## {one.part.title}", ""]
        if one.code:
            ending = "was interrupted" if one.code == INTERRUPTED else f"FAILED: exit {one.code}"
            lines += [f"`{one.command}` {ending} after {one.seconds / 60:.1f} minutes."]
        else:
            lines += [f"`{one.command}`, {one.seconds / 60:.1f} minutes:"]
        lines += ["", *(f"- [{name}]({name})" for name in one.files if not name.endswith(".png"))]
        lines += [f"\n![{name}]({name})" for name in one.files if name.endswith(".png")]
    return "\n".join([*lines, ""])


def floors(cases: Sequence[dict[str, Any]]) -> list[str]:
    """The floors of the cases: how many are met, and a row each; those that are missed first."""
    rows = []
    for case in cases:
        for floor in case["floors"]:
            ratios = floor["ratios"]
            verdict = floor["verdict"].replace("MISSED", "**MISSED**")
            measured = f"{median(ratios):.2f}" if ratios else "-"
            spread = f"{min(ratios):.2f} - {max(ratios):.2f}" if ratios else ""
            what = (case["case"], f"{floor['of']}: {floor['text']}", f"{floor['at_least']:.3g}")
            rows.append((*what, measured, spread, verdict))
    verdicts = [row[-1] for row in rows]
    counts = [f"{verdicts.count(one)} {one}" for one in dict.fromkeys(sorted(verdicts))]
    columns = ("case", "floor", "at least, times", "measured, times", "from - to", "")
    rows.sort(key=lambda row: row[-1].startswith("met"))
    return ["", f"## Floors: {', '.join(counts)}", "", *page.table(columns, rows)]


def main(words: Sequence[str] | None = None) -> int:
    """Run all parts, or those that were chosen; 1 when one failed."""
    parser = argparse.ArgumentParser(prog="python -m bench report", description=__doc__)
    add = parser.add_argument
    add("--quick", action="store_true", help="small data, one round: minutes")
    add("--dir", type=Path, default=ROOT / "build" / "bench", help="on the disk under test")
    add(
        "--corpus",
        metavar="DIR|deb|none",
        help="real files, too; deb: Debian's linux-source-6.1 [deb where that is installed]",
    )
    add("--parts", help=f"these only, with commas between [{','.join(p.name for p in PARTS)}]")
    add("--results", type=Path, default=RESULTS, help="where results are written")
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
    parts = [part for part in PARTS if part.name in wanted and part.exists]
    try:
        ended, remark = run_parts(parts, arguments)
    except FileNotFoundError as error:
        parser.error(str(error))
    facts["load_average_after"] = os.getloadavg()[0]
    written = arguments.results / INDEX
    written.write_text(index(ended, facts, remark, arguments.results), encoding="utf-8")
    print(f"the whole report is in {written}")
    return max((one.code for one in ended if one.code == INTERRUPTED), default=0) or int(
        any(one.code for one in ended)
    )
