"""The work that is profiled, in a child process of its own.

The child sets up, answers with the processes that work, waits for ``work``, works, answers with
what it did, and waits for ``end``, so that a recorder can read its memory map before it ends.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import dlfs
from bench.contenders.files import FileList
from bench.contenders.mounts import open_tree
from bench.contenders.samples import UNLIMITED_SECONDS, WHOLE, fill_memory, open_dataset
from bench.contenders.service import open_served, serve_scene
from bench.datasets import Scene, make_scene, spec_of
from bench.process import Parent, run_child, run_program
from bench.resources import timed

BATCH = 256
STEPS_BEFORE = 20
"""Steps before the recording: the first batches have costs that later ones have not."""
BUDGET = 1 / 16
"""Memory as a share of the data, for cases that read from the device."""


@dataclass(frozen=True, slots=True)
class Job:
    """A case to run for some seconds."""

    case: str
    folder: str
    size_bytes: int
    seconds: float = 5.0


@dataclass(frozen=True)
class Done:
    """The work that a case did.

    Attributes:
        samples: number of samples read.
        seconds: elapsed time.
        cpu_seconds: CPU time of all processes of the case.
    """

    samples: int
    seconds: float
    cpu_seconds: float


Work = Callable[[], Generator[int, None, None]]
"""Reads without end, and yields the number of samples of each step."""


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


@contextmanager
def cached(scene: Scene) -> Iterator[tuple[dict[int, str], Work]]:
    """Random batches of samples in memory."""
    with open_dataset(scene, WHOLE) as dataset:
        fill_memory(dataset, BATCH)
        yield {}, _batches(dataset, scene.random_order(5))


@contextmanager
def cold(scene: Scene) -> Iterator[tuple[dict[int, str], Work]]:
    """Random batches by ``read()``, with memory for a sixteenth of the data."""
    with open_dataset(scene, BUDGET) as dataset:
        yield {}, _batches(dataset, scene.random_order(5))


@contextmanager
def epoch(scene: Scene) -> Iterator[tuple[dict[int, str], Work]]:
    """An epoch in global order, read ahead, with memory for a sixteenth of the data."""
    with open_dataset(scene, BUDGET) as dataset:
        yield {}, _epochs(dataset)


@contextmanager
def service(scene: Scene) -> Iterator[tuple[dict[int, str], Work]]:
    """Random batches of samples in a service's memory."""
    with serve_scene(scene) as served, open_served(served) as dataset:
        fill_memory(dataset, BATCH)
        yield {served.pid: "service"}, _batches(dataset, scene.random_order(5))


@contextmanager
def mount(scene: Scene) -> Iterator[tuple[dict[int, str], Work]]:
    """Open, read and close of random files through the mount, warm."""
    with open_tree(scene, "auto") as mounted:
        files = FileList(mounted.files, scene.source, scene.file_order(0))
        files.read(UNLIMITED_SECONDS)

        def work() -> Generator[int, None, None]:
            while True:
                for first in range(0, len(files), BATCH):
                    yield files.read(UNLIMITED_SECONDS, slice(first, first + BATCH))[0]

        yield {mounted.pid: "mount"}, work


CASES = {case.__wrapped__.__name__: case for case in (cached, cold, epoch, mount, service)}


def scene_of(folder: Path, size_bytes: int) -> Scene:
    """Return the scene of the data set of 4 KiB samples; write it unless it exists."""
    return make_scene(
        spec_of("4k"), folder, total_bytes=size_bytes, files_max=10_000, seed=1, corpus=None
    )


def run(work: Iterator[int], processes: Iterable[int], seconds: float) -> Done:
    """Work for a duration."""
    others = [process for process in processes if process != os.getpid()]
    until, samples = time.perf_counter() + seconds, 0
    # This process's own clock is more exact than the ticks of /proc.
    with timed(time.process_time, servers=others) as watch:
        for count in work:
            samples += count
            if time.perf_counter() > until:
                break
    return Done(samples, watch.seconds, watch.cpu_seconds)


def work(job: Job, parent: Parent) -> None:
    """Run a case as the job says."""
    scene = scene_of(Path(job.folder), job.size_bytes)
    with CASES[job.case](scene) as (others, begin), closing(begin()) as steps:
        processes = {os.getpid(): "reader", **others}
        for _ in range(STEPS_BEFORE):
            next(steps)
        parent.answer(**{str(pid): name for pid, name in processes.items()})
        parent.wait_for("work")
        parent.answer(**asdict(run(steps, processes, job.seconds)))
        parent.wait_for("end")


if __name__ == "__main__":
    run_program(lambda: run_child(Job, work))
