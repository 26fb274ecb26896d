"""What is profiled, in a process of its own: ``python -m bench.profile.workload CASE DIR ...``.

It sets up, tells in a line of JSON which processes are at work, waits for a line on its standard
input, works, and tells in another line what it did. It ends with its input, so that a recorder has
time to look at it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import dlfs
from bench.contestant import cpu_seconds_of
from bench.contestants.files import read_files
from bench.contestants.samples import DEPTH, WHOLE
from bench.contestants.service import serve
from bench.datasets import DATASET, SPECS, Scene, make_scene
from bench.ending import run_program
from dlfs.mount.background import mount_volume
from dlfs.mount.mountpoint import unmount

BATCH = 256
STEPS_BEFORE = 20
BUDGET = 1 / 16
"""Of the data, for what reads from the device."""


@dataclass(frozen=True)
class Done:
    """What was done.

    Attributes:
        samples: read.
        seconds: on the clock.
        cpu_seconds: of each process.
    """

    samples: int
    seconds: float
    cpu_seconds: dict[int, float]


Work = Callable[[], Generator[int, None, None]]
"""Reads for ever; gives the number of samples of each step."""


def _batches(dataset: dlfs.Dataset, order: NDArray[np.int64]) -> Work:
    def work() -> Generator[int, None, None]:
        while True:
            for first in range(0, len(order) - BATCH + 1, BATCH):
                with dataset.read(order[first : first + BATCH]):
                    yield BATCH

    return work


def _epochs(dataset: dlfs.Dataset) -> Work:
    def work() -> Generator[int, None, None]:
        for number in itertools.count():
            with dataset.batches(BATCH, epoch=number) as epoch:
                for batch in epoch:
                    with batch:
                        yield len(batch)

    return work


def _open(stack: ExitStack, uri: str, memory_bytes: int | None) -> dlfs.Dataset:
    if memory_bytes is None:
        volume = stack.enter_context(dlfs.connect(uri))
    else:
        volume = stack.enter_context(dlfs.open(uri, memory_bytes=memory_bytes, depth=DEPTH))
    return stack.enter_context(volume.dataset(DATASET)).open()


def _fill(dataset: dlfs.Dataset) -> None:
    with dataset.batches(BATCH, shuffle="chunk") as epoch:
        for batch in epoch:
            batch.release()


@contextmanager
def cached(scene: Scene) -> Iterator[tuple[dict[int, str], Work]]:
    """Random batches of samples in memory."""
    with ExitStack() as stack:
        dataset = _open(stack, str(scene.volume), scene.memory_bytes(WHOLE))
        _fill(dataset)
        yield {}, _batches(dataset, _random(scene))


@contextmanager
def cold(scene: Scene) -> Iterator[tuple[dict[int, str], Work]]:
    """Random batches by ``read()``, with memory for a sixteenth of the data."""
    with ExitStack() as stack:
        dataset = _open(stack, str(scene.volume), scene.memory_bytes(BUDGET))
        yield {}, _batches(dataset, _random(scene))


@contextmanager
def epoch(scene: Scene) -> Iterator[tuple[dict[int, str], Work]]:
    """An epoch in global order, read ahead, with memory for a sixteenth of the data."""
    with ExitStack() as stack:
        dataset = _open(stack, str(scene.volume), scene.memory_bytes(BUDGET))
        yield {}, _epochs(dataset)


@contextmanager
def service(scene: Scene) -> Iterator[tuple[dict[int, str], Work]]:
    """Random batches of samples in a service's memory."""
    with ExitStack() as stack:
        served = stack.enter_context(serve(scene))
        dataset = _open(stack, served.uri, None)
        _fill(dataset)
        yield {served.pid: "service"}, _batches(dataset, _random(scene))


@contextmanager
def mount(scene: Scene) -> Iterator[tuple[dict[int, str], Work]]:
    """Open, read and close of random files through the mount, warm."""
    point = scene.folder / "mnt"
    point.mkdir(exist_ok=True)
    mounted = mount_volume(str(scene.volume), point, log=scene.folder / "mount.log")
    try:
        order = scene.file_order(0).tolist()
        root = os.fsencode(point / DATASET) + b"/"
        paths = [scene.source.path(index) for index in order]
        sizes = scene.source.lengths[order].tolist()
        read_files(root, paths, sizes, 600.0)

        def work() -> Generator[int, None, None]:
            while True:
                for first in range(0, len(paths), BATCH):
                    part = slice(first, first + BATCH)
                    yield read_files(root, paths[part], sizes[part], 600.0)[0]

        yield {mounted.pid: "mount"}, work
    finally:
        unmount(point, lazy=True)  # interrupted, it may have a file open


CASES = {case.__wrapped__.__name__: case for case in (cached, cold, epoch, mount, service)}


def _random(scene: Scene) -> NDArray[np.int64]:
    return np.random.default_rng([scene.seed, 5]).permutation(len(scene))


def scene_of(folder: Path, size_bytes: int) -> Scene:
    """The data set of 4 KiB samples; made, unless it is there."""
    spec = next(spec for spec in SPECS if spec.key == "4k")
    return make_scene(spec, folder, total_bytes=size_bytes, files_max=10_000, seed=1, corpus=None)


def run(work: Iterator[int], processes: dict[int, str], seconds: float, steps: int) -> Done:
    """Work for a time, or so many steps where that is not 0."""
    before = {process: cpu_seconds_of(process) for process in processes}
    own, start = time.process_time(), time.perf_counter()
    samples = 0
    for number, count in enumerate(work, 1):
        samples += count
        if number == steps if steps else time.perf_counter() - start > seconds:
            break
    spent = {process: cpu_seconds_of(process) - before[process] for process in processes}
    spent[os.getpid()] = time.process_time() - own  # finer than the ticks of /proc
    return Done(samples, time.perf_counter() - start, spent)


def main() -> int:
    """Set up, tell, work, tell."""
    parser = argparse.ArgumentParser(prog="python -m bench.profile.workload")
    parser.add_argument("case", choices=list(CASES))
    parser.add_argument("folder", type=Path)
    parser.add_argument("size_bytes", type=int)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--steps", type=int, default=0)
    arguments = parser.parse_args()
    scene = scene_of(arguments.folder, arguments.size_bytes)
    with (
        CASES[arguments.case](scene) as (others, work),
        closing(work()) as steps,
    ):
        processes = {os.getpid(): "reader", **others}
        for _ in range(STEPS_BEFORE):  # what only the first batches pay
            next(steps)
        print(json.dumps(processes), flush=True)
        if not sys.stdin.readline():
            return 1
        done = run(steps, processes, arguments.seconds, arguments.steps)
        print(json.dumps(asdict(done)), flush=True)
        sys.stdin.readline()
    return 0


if __name__ == "__main__":
    run_program(main)
