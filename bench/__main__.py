"""``python -m bench``: the cases; ``peers``, ``gpu``, ``report`` and ``figures``: the others."""

from __future__ import annotations

import sys

from bench import figures, gather
from bench.cases import command as cases
from bench.gpu import __main__ as gpu
from bench.peers import __main__ as peers
from bench.process import run_program

COMMANDS = {
    "figures": figures.main,
    "gpu": gpu.main,
    "peers": peers.main,
    "report": gather.main,
}


def main(words: list[str] | None = None) -> int:
    """Run the benchmark that the first argument names."""
    words = sys.argv[1:] if words is None else words
    if words and words[0] in COMMANDS:
        return COMMANDS[words[0]](words[1:])
    return cases.main(words)


if __name__ == "__main__":
    run_program(main)
