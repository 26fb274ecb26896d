"""``python -m bench peers``: race DLFS and its peers, show and keep the results."""

from __future__ import annotations

import argparse
import os
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.contestant import WrongBytesError
from bench.datasets import find_corpus
from bench.ending import INTERRUPTED, run_program
from bench.machine import ROOT, Unavailable, describe
from bench.peers import plots, report
from bench.peers.outcome import Outcome
from bench.peers.peer import Peer
from bench.peers.race import REFERENCES, ROUNDS, SECONDS, SIZES, STATES, TWO_AT, Course, Race
from bench.peers.registry import all_peers
from bench.progress import Progress
from dlfs.units import GIB, parse_bytes

RESULTS = ROOT / "bench" / "results"
QUICK_SECONDS = 0.3


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench peers", description=__doc__)
    add = parser.add_argument
    add("--list", action="store_true", help="list the peers and end")
    add("--only", metavar="GLOB", action="append", help="these peers; may be given again")
    add("--sizes", help=f"data sets, with commas between [{','.join(SIZES)}; corpus]")
    add("--dir", type=Path, default=ROOT / "build" / "bench", help="on the disk under test")
    add("--size", type=parse_bytes, help="of every data set [128MiB, 512MiB and 512MiB]")
    add("--room", type=parse_bytes, default=15 * GIB, help="disk for a group of peers [15GiB]")
    add("--corpus", metavar="DIR|deb", help="real files; deb: Debian's linux-source-6.1")
    add("--seconds", type=float, help="of a timed part [0.5]")
    add("--rounds", type=int, help="runs of each peer [3]")
    add("--minutes", type=float, help="for all: who is late makes fewer rounds, one at least")
    add("--processes", help=f"at once [1,2 with {TWO_AT}, else 1]")
    add("--states", default=",".join(STATES), help="of memory and caches [cold,warm]")
    add("--depths", action="store_true", help="sweep over the reads in flight, with --only too")
    add("--seed", type=int, default=1, help="of data and orders [1]")
    add("--quick", action="store_true", help="small data, one round: minutes")
    add("--results", type=Path, default=RESULTS, help="where results are written")
    add("--join", type=Path, nargs="+", help="no race: one report of several JSON files")
    return parser.parse_args(words)


def course_of(arguments: argparse.Namespace) -> Course:
    """What the arguments mean.

    Raises:
        FileNotFoundError: there is no such corpus.
    """
    quick = arguments.quick
    corpus = arguments.corpus and find_corpus(arguments.corpus, arguments.dir / "dlfs-bench")
    sizes = arguments.sizes.split(",") if arguments.sizes else [*SIZES, *["corpus"][: bool(corpus)]]
    if unknown := set(sizes) - {*SIZES, "corpus"}:
        raise FileNotFoundError(f"--sizes: no data set is called {', '.join(sorted(unknown))}")
    if "corpus" in sizes and not corpus:
        raise FileNotFoundError("--sizes corpus: which? Name it with --corpus")
    return Course(
        directory=arguments.dir,
        sizes=tuple(sizes),
        total_bytes=arguments.size,
        corpus=corpus or None,
        seconds=arguments.seconds or (QUICK_SECONDS if quick else SECONDS),
        rounds=arguments.rounds or (1 if quick else ROUNDS),
        minutes=arguments.minutes,
        processes=tuple(int(word) for word in (arguments.processes or "1,2").split(",")),
        two_at="" if arguments.processes else TWO_AT,
        states=tuple(arguments.states.split(",")),
        room_bytes=arguments.room,
        seed=arguments.seed,
        depths=arguments.only is None or arguments.depths,
        quick=quick,
    )


def choose(patterns: list[str] | None) -> list[Peer]:
    """The peers that any pattern matches, with the ways of DLFS that they are compared with."""
    wanted = [*(patterns or ["*"]), *REFERENCES]
    return [
        peer
        for name, peer in all_peers().items()
        if any(fnmatchcase(name, pattern) for pattern in wanted)
    ]


def keep(
    folder: Path, facts: dict[str, Any], plain: dict[str, Any], outcome: Outcome, console: Console
) -> None:
    """Show and write everything."""
    report.show(console, outcome)
    path = report.write(folder, facts, plain, outcome)
    try:
        pictures = plots.draw(outcome, folder, path.stem)
    except Unavailable as reason:
        console.print(f"no pictures: {reason}", markup=False)
        pictures = []
    with open(path.with_suffix(".md"), "a", encoding="utf-8") as file:
        for picture in pictures:
            file.write(f"\n![{picture.stem}]({picture.name})\n")
    console.print(f"every run is in {path}, the tables in {path.with_suffix('.md')}", markup=False)


def main(words: list[str] | None = None) -> int:
    """Run what the command line says."""
    arguments = parse_arguments(words)
    console = Console(width=None if sys.stdout.isatty() else 200)
    if arguments.list:
        for peer in all_peers().values():
            console.print(f"{peer.name:20} {peer.about}", highlight=False, markup=False)
        return 0
    if arguments.join:
        keep(arguments.results, *report.read(arguments.join), console)
        return 0
    arguments.dir.mkdir(parents=True, exist_ok=True)
    try:
        course = course_of(arguments)
    except FileNotFoundError as error:
        console.print(str(error), style="red", markup=False)
        return 2
    facts, code = describe(arguments.dir), 0
    with Progress(console, "peers") as progress:
        race = Race(course, progress.tell)
        try:
            race.run(choose(arguments.only))
        except WrongBytesError as error:
            console.print(f"wrong bytes: {error}", style="red", markup=False)
            code = 1
        except KeyboardInterrupt:
            code = INTERRUPTED
    facts["load_average_after"] = os.getloadavg()[0]
    plain = {name: str(value) for name, value in vars(arguments).items() if value is not None}
    if race.outcome.runs:  # what there is, even when it ended early
        keep(arguments.results, facts, plain, race.outcome, console)
    return code


if __name__ == "__main__":
    run_program(main)
