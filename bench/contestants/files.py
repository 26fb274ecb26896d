"""Plain files: opened, read and closed one by one from Python, as a training loop does.

And as fast as threads in C can, which is what an import has to keep up with.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.contestant import (
    CHECKED,
    Ground,
    Sample,
    check_bytes,
    drop_caches_for,
    timed,
)
from bench.contestants.bare import run_bare

LOOK_AT_CLOCK = 64
THREADS = 8


def read_files(
    root: bytes, paths: Sequence[bytes], sizes: Sequence[int], seconds: float
) -> tuple[int, int, dict[int, bytes]]:
    """Open, read and close files until they or the time are over: three calls a file.

    Returns:
        Files and bytes read, and the bytes of some by their position.
    """
    until = time.perf_counter() + seconds
    count = total = 0
    kept: dict[int, bytes] = {}
    for path, size in zip(paths, sizes, strict=True):
        descriptor = os.open(root + path, os.O_RDONLY)
        try:
            data = os.read(descriptor, size)
        finally:
            os.close(descriptor)
        total += len(data)
        if count % LOOK_AT_CLOCK == 0:
            if len(kept) < CHECKED:
                kept[count] = data
            if time.perf_counter() > until:
                return count + 1, total, kept
        count += 1
    return count, total, kept


@dataclass(frozen=True)
class Files:
    """Plain files in random order, one process, one at a time.

    Attributes:
        cold: with the kernel's caches dropped; else read once before.
    """

    cold: bool

    @property
    def label(self) -> str:
        """In tables."""
        return f"plain files, {'cold' if self.cold else 'warm'}"

    def run(self, ground: Ground) -> Sample:
        """Files in random order."""
        scene, root = ground.scene, os.fsencode(ground.scene.files) + b"/"
        order = scene.file_order(ground.round)
        paths = [scene.source.path(index) for index in order.tolist()]
        sizes = scene.source.lengths[order].tolist()
        drop_caches_for(ground.machine, self.cold)
        if not self.cold:
            count, _, _ = read_files(root, paths, sizes, ground.limits.seconds * 2)
            del paths[count:], sizes[count:]
        with timed() as watch:
            count, total, kept = read_files(root, paths, sizes, ground.limits.seconds)
        checked = check_bytes(scene, {int(order[at]): data for at, data in kept.items()})
        return Sample(count, total, watch.seconds, watch.cpu_seconds, checked)


@dataclass(frozen=True)
class ParallelFiles:
    """All plain files in path order by threads in C, with cold caches: what the source can give."""

    @property
    def label(self) -> str:
        """In tables."""
        return f"plain files, cold, {THREADS} threads in C, path order"

    def run(self, ground: Ground) -> Sample:
        """All files once."""
        scene = ground.scene
        listing: Path = scene.folder / "paths"
        paths = [scene.source.path(index) for index in scene.file_indices.tolist()]
        listing.write_bytes(b"".join(path + b"\0" for path in paths))
        program = ground.machine.program("bare_files")
        drop_caches_for(ground.machine, cold=True)
        return run_bare(program, scene.files, listing, THREADS)
