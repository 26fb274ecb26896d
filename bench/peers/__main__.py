"""``python -m bench.peers``: race DLFS and its peers, show and write the results."""

from __future__ import annotations

import argparse

from bench.command import Session, command_line, matches, plain_arguments
from bench.datasets import find_corpus
from bench.errors import BadArgumentError
from bench.peers.outcome import Outcome
from bench.peers.peer import Peer, all_peers
from bench.peers.race import REFERENCES, ROUNDS, SECONDS, SIZES, STATES, TWO_AT, Race, Settings
from bench.peers.report import make_report, show
from bench.process import run_program
from bench.progress import Stretch
from dlfs.base.units import GIB, parse_bytes

QUICK_SECONDS = 0.3


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    shared = ("list", "dir", "rounds", "minutes", "corpus", "seed", "quick", "results")
    parser = command_line("bench peers", __doc__, *shared)
    add = parser.add_argument
    add("--only", metavar="GLOB", action="append", help="these peers; may be given again")
    add("--sizes", help=f"data sets, with commas between [{','.join(SIZES)}; corpus]")
    add("--size", type=parse_bytes, help="size of every data set [128MiB, 512MiB and 512MiB]")
    add("--room", type=parse_bytes, default=15 * GIB, help="disk for a group of peers [15GiB]")
    add("--seconds", type=float, help="duration of a timed part [0.5]")
    add("--processes", help=f"processes that read at once [1,2 with {TWO_AT}, else 1]")
    add("--states", default=",".join(STATES), help="states of memory and caches [cold,warm]")
    return parser.parse_args(words)


def settings_of(arguments: argparse.Namespace) -> Settings:
    """Return the settings that the arguments ask for."""
    quick = arguments.quick
    corpus = arguments.corpus and find_corpus(arguments.corpus, arguments.dir / "dlfs-bench")
    sizes = arguments.sizes.split(",") if arguments.sizes else [*SIZES, *["corpus"][: bool(corpus)]]
    if unknown := set(sizes) - {*SIZES, "corpus"}:
        raise BadArgumentError(f"--sizes: no data set is called {', '.join(sorted(unknown))}")
    if "corpus" in sizes and not corpus:
        raise BadArgumentError("--sizes corpus: which? Name it with --corpus")
    return Settings(
        directory=arguments.dir,
        sizes=tuple(sizes),
        total_bytes=arguments.size,
        corpus=corpus or None,
        seconds=arguments.seconds or (QUICK_SECONDS if quick else SECONDS),
        rounds=arguments.rounds or (1 if quick else ROUNDS),
        processes=tuple(int(word) for word in (arguments.processes or "1,2").split(",")),
        two_at="" if arguments.processes else TWO_AT,
        states=tuple(arguments.states.split(",")),
        room_bytes=arguments.room,
        seed=arguments.seed,
        quick=quick,
    )


def choose(patterns: list[str] | None) -> list[Peer]:
    """Return the peers that match a pattern, and the ways of DLFS that they are compared with."""
    return [
        peer for name, peer in all_peers().items() if name in REFERENCES or matches(name, patterns)
    ]


def main(words: list[str] | None = None) -> int:
    """Run the benchmark and return its exit code."""
    arguments = parse_arguments(words)
    if arguments.list:
        for peer in all_peers().values():
            print(f"{peer.name:20} {peer.about}")
        return 0
    session = Session("peers", arguments.dir, width=200)
    outcome = Outcome()

    def measure(whole: Stretch) -> None:
        Race(settings_of(arguments), outcome).run(choose(arguments.only), whole)

    code = session.measure(measure, arguments.minutes)
    if outcome.runs:
        show(session.console, outcome)
        report = make_report(session.facts, plain_arguments(arguments), outcome)
        session.write(report, arguments.results)
    return code


if __name__ == "__main__":
    run_program(main)
