"""A child of the GPU benchmark that fails at the first size, and measures the others."""

from __future__ import annotations

import sys
from dataclasses import asdict

from bench.gpu.measuring import PROBE, Job, Result
from bench.process import Parent, run_child, run_program


def measure(job: Job, parent: Parent) -> None:
    """Answer as `bench.gpu.measuring.measure` does."""
    if job.feed == PROBE:
        parent.answer(facts={"gpu": "a stand-in", "torch": "0"})
        return
    if job.feed == "mds":
        parent.answer(missing="streaming is missing")
        return
    for key in job.sizes:
        if key == "4k":
            print("the last words of the driver", file=sys.stderr)
            sys.exit(3)
        parent.answer(result=asdict(Result(key, 8, 1000.0, 2.5, None, 10, 1.0, 0.25)))


if __name__ == "__main__":
    run_program(lambda: run_child(Job, measure))
