"""``python -m bench.scale.appends``: append to a dataset many times; what each append costs.

Each append adds 2,000 samples of 1 KiB to the newest version, with one attribute of int64, and the
older versions are removed then. What an append costs beyond the first one is divided by the samples
that were there: the CPU time of a sample that is carried over.
"""

from __future__ import annotations

import json
import time

import numpy as np

import dlfs
from bench.command import command_line
from bench.process import run_program
from dlfs.base.units import GIB, KIB

SAMPLE_BYTES = 1 * KIB
SHOWN = (1, 2, 10, 50, 100, 200, 500)


def main(argv: list[str] | None = None) -> int:
    """Append, and print a line of JSON for some of the appends, and for all."""
    parser = command_line("bench.scale.appends", __doc__, "dir")
    parser.add_argument("--appends", type=int, default=500, help="number of appends [500]")
    parser.add_argument("--samples", type=int, default=2000, help="samples of each [2000]")
    arguments = parser.parse_args(argv)
    arguments.dir.mkdir(parents=True, exist_ok=True)
    path = arguments.dir / "appends.img"
    count = arguments.samples
    data = np.random.default_rng(1).bytes(count * SAMPLE_BYTES)
    lengths = np.full(count, SAMPLE_BYTES)
    offsets = np.arange(count) * SAMPLE_BYTES
    chance = np.random.default_rng(2)
    size_bytes = 1 * GIB + 2 * arguments.appends * count * SAMPLE_BYTES
    dlfs.format_volume(str(path), size_bytes=size_bytes)
    spent = []
    try:
        with dlfs.open(str(path), memory_bytes=0) as volume:
            for number in range(1, arguments.appends + 1):
                folders = chance.integers(0, 1000, count)
                paths = [b"%03d/%04d%05d" % (f, number, n) for n, f in enumerate(folders)]
                since, cpu = time.monotonic(), time.process_time()
                with volume.append("x") if number > 1 else volume.writer("x") as writer:
                    columns = {"number": np.arange(count)}
                    writer.add_batch(paths, data, offsets, lengths, attributes=columns)
                spent.append((time.monotonic() - since, time.process_time() - cpu))
                volume.prune("x", keep=1)
                if number in SHOWN or number == arguments.appends:
                    carried = (number - 1) * count
                    more = (spent[-1][1] - spent[0][1]) / carried if carried else 0
                    figures = {
                        "append": number,
                        "ms": round(spent[-1][0] * 1e3, 1),
                        "cpu_ms": round(spent[-1][1] * 1e3, 1),
                        "cpu_ns_a_carried_sample": round(more * 1e9),
                    }
                    print(json.dumps(figures), flush=True)
    finally:
        path.unlink(missing_ok=True)
    total = np.array(spent).sum(axis=0)
    print(
        json.dumps(
            {"appends": len(spent), "seconds": round(total[0], 1), "cpu": round(total[1], 1)}
        )
    )
    return 0


if __name__ == "__main__":
    run_program(main)
