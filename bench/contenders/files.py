"""Plain files: one by one from Python, as a training loop reads them, and by threads in C.

The threads in C show how fast the files can be read at all, which limits an import.

Several programs are processes that are forked for the measurement, each with a part of the files.
Threads of one program would wait for Python's lock.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.contenders.bare import run_bare
from bench.datasets import Source
from bench.measurement import CHECKED, Environment, Measurement, check_bytes
from bench.resources import cpu_seconds_of_children, timed

CLOCK_EVERY = 64
"""Files between two looks at the clock."""
THREADS = 32


_Part = tuple[int, int, dict[int, bytes], float, float]
"""The result of `FileList.read` in one of several programs, and the times of its start and end."""


def programs_label(programs: int) -> str:
    """Return what a label says of the number of programs."""
    return "" if programs == 1 else f", {programs} programs"


class FileList:
    """Files that are opened, read and closed one after the other: three system calls a file.

    Args:
        root: root folder of the files.
        source: the samples that the files contain.
        indices: index of each file's sample, in the order of reading.
    """

    def __init__(self, root: Path, source: Source, indices: NDArray[np.int64]) -> None:
        top = os.fsencode(root) + b"/"
        self._source, self._indices = source, indices
        self._paths = [top + source.path(index) for index in indices.tolist()]
        self._sizes: list[int] = source.lengths[indices].tolist()

    def __len__(self) -> int:
        return len(self._paths)

    def read(self, seconds: float, part: slice = slice(None)) -> tuple[int, int, dict[int, bytes]]:
        """Read all files or a part of them until the time is over.

        Returns:
            Number of files and bytes read, and the bytes of some samples by index.
        """
        until = time.perf_counter() + seconds
        count = total = 0
        found: dict[int, bytes] = {}
        for path, size in zip(self._paths[part], self._sizes[part], strict=True):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                data = os.read(descriptor, size)
            finally:
                os.close(descriptor)
            total += len(data)
            if count % CLOCK_EVERY == 0:
                if len(found) < CHECKED:
                    found[int(self._indices[part][count])] = data
                if time.perf_counter() > until:
                    return count + 1, total, found
            count += 1
        return count, total, found

    def measure(self, seconds: float, part: slice = slice(None)) -> Measurement:
        """Measure `read`, and compare some files with the source."""
        with timed() as watch:
            count, total, found = self.read(seconds, part)
        checked = check_bytes(self._source, found)
        return Measurement(count, total, watch.seconds, watch.cpu_seconds, checked)

    def measure_programs(self, seconds: float, programs: int) -> Measurement:
        """Measure so many processes that read at the same time, each every so manyth file."""
        if programs == 1:
            return self.measure(seconds)
        context = multiprocessing.get_context("fork")
        results: multiprocessing.SimpleQueue[_Part] = context.SimpleQueue()
        start = context.Barrier(programs)

        def run(number: int) -> None:
            start.wait()
            begun = time.perf_counter()
            count, total, found = self.read(seconds, slice(number, None, programs))
            results.put((count, total, found, begun, time.perf_counter()))

        children = [context.Process(target=run, args=(number,)) for number in range(programs)]
        with timed(cpu_seconds_of_children) as watch:
            for child in children:
                child.start()
            parts = [results.get() for _ in children]
            for child in children:
                child.join()
        found = {index: data for part in parts for index, data in part[2].items()}
        elapsed = max(part[4] for part in parts) - min(part[3] for part in parts)
        count, total = sum(part[0] for part in parts), sum(part[1] for part in parts)
        checked = check_bytes(self._source, found)
        return Measurement(count, total, elapsed, watch.cpu_seconds, checked)


@dataclass(frozen=True)
class Files:
    """Plain files in random order; each program reads one at a time.

    Attributes:
        cold: drop the kernel's caches first; else read the files once before.
        programs: number of processes that read at the same time.
    """

    cold: bool
    programs: int = 1

    @property
    def label(self) -> str:
        return f"plain files, {'cold' if self.cold else 'warm'}{programs_label(self.programs)}"

    def run(self, environment: Environment) -> Measurement:
        scene = environment.scene
        files = FileList(scene.files, scene.source, scene.file_order(environment.round))
        environment.machine.require_cold(cold=self.cold)
        seconds = environment.limits.seconds
        count = len(files) if self.cold else files.read(seconds * 2)[0]
        if self.programs > 1:
            return files.measure_programs(seconds, self.programs)
        return files.measure(seconds, slice(count))


@dataclass(frozen=True)
class ParallelFiles:
    """All plain files in path order, with cold caches, read by threads in C."""

    label = f"plain files, cold, {THREADS} threads in C, path order"

    def run(self, environment: Environment) -> Measurement:
        scene = environment.scene
        listing: Path = scene.folder / "paths"
        paths = [scene.source.path(index) for index in scene.file_indices.tolist()]
        listing.write_bytes(b"".join(path + b"\0" for path in paths))
        program = environment.machine.program("bare_files")
        environment.machine.require_cold()
        return run_bare(program, scene.files, listing, THREADS)
