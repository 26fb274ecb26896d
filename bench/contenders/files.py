"""Plain files: one by one from Python, as a training loop reads them, and by threads in C.

The threads in C show how fast the files can be read at all, which limits an import.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.contenders.bare import run_bare
from bench.measurement import CHECKED, Environment, Measurement, check_bytes
from bench.resources import timed

CLOCK_EVERY = 64
"""Files between two looks at the clock."""
THREADS = 8


def read_files(
    root: bytes, paths: Sequence[bytes], sizes: Sequence[int], seconds: float
) -> tuple[int, int, dict[int, bytes]]:
    """Open, read and close files until all are read or the time is over: three calls a file.

    Args:
        root: root folder, with a slash at its end.
        paths: paths of the files below it.
        sizes: exact size of each file in bytes.
        seconds: time limit.

    Returns:
        Number of files and bytes read, and the bytes of some files by position.
    """
    until = time.perf_counter() + seconds
    count = total = 0
    found: dict[int, bytes] = {}
    for path, size in zip(paths, sizes, strict=True):
        descriptor = os.open(root + path, os.O_RDONLY)
        try:
            data = os.read(descriptor, size)
        finally:
            os.close(descriptor)
        total += len(data)
        if count % CLOCK_EVERY == 0:
            if len(found) < CHECKED:
                found[count] = data
            if time.perf_counter() > until:
                return count + 1, total, found
        count += 1
    return count, total, found


def measure_files(
    environment: Environment,
    root: bytes,
    paths: Sequence[bytes],
    sizes: Sequence[int],
    order: NDArray[np.int64],
) -> Measurement:
    """Measure `read_files`, and compare some files with the source.

    Args:
        environment: as for every contender.
        root: root folder, with a slash at its end.
        paths: paths of the files below it.
        sizes: exact size of each file in bytes.
        order: index of each file's sample.
    """
    with timed() as watch:
        count, total, found = read_files(root, paths, sizes, environment.limits.seconds)
    samples = {int(order[position]): data for position, data in found.items()}
    checked = check_bytes(environment.scene.source, samples)
    return Measurement(count, total, watch.seconds, watch.cpu_seconds, checked)


@dataclass(frozen=True)
class Files:
    """Plain files in random order, one process, one at a time.

    Attributes:
        cold: drop the kernel's caches first; else read the files once before.
    """

    cold: bool

    @property
    def label(self) -> str:
        return f"plain files, {'cold' if self.cold else 'warm'}"

    def run(self, environment: Environment) -> Measurement:
        scene = environment.scene
        root = os.fsencode(scene.files) + b"/"
        order = scene.file_order(environment.round)
        paths = [scene.source.path(index) for index in order.tolist()]
        sizes = scene.source.lengths[order].tolist()
        environment.machine.require_cold(cold=self.cold)
        if not self.cold:
            count, _, _ = read_files(root, paths, sizes, environment.limits.seconds * 2)
            del paths[count:], sizes[count:]
        return measure_files(environment, root, paths, sizes, order)


@dataclass(frozen=True)
class ParallelFiles:
    """All plain files in path order, with cold caches, read by threads in C."""

    @property
    def label(self) -> str:
        return f"plain files, cold, {THREADS} threads in C, path order"

    def run(self, environment: Environment) -> Measurement:
        scene = environment.scene
        listing: Path = scene.folder / "paths"
        paths = [scene.source.path(index) for index in scene.file_indices.tolist()]
        listing.write_bytes(b"".join(path + b"\0" for path in paths))
        program = environment.machine.program("bare_files")
        environment.machine.require_cold()
        return run_bare(program, scene.files, listing, THREADS)
