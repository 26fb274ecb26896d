"""Bare loops in C: reads by io_uring and nothing else, memcpy and nothing else."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.contestant import CHECKED, Ground, Sample, WrongBytesError, check_bytes, timed
from bench.contestants.samples import DEPTH
from bench.machine import Unavailable
from dlfs.units import MIB

URING_BYTES_MAX = 4 * MIB
"""Longer samples, of which a corpus has a few, would need buffers of gigabytes: left out."""


def run_bare(program: Path, *arguments: object) -> Sample:
    """Run a program of ``bench/native``.

    Raises:
        Unavailable: it failed; says why.
    """
    command = [str(program), *map(os.fspath, map(_text, arguments))]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise Unavailable(f"{program.name}: {done.stderr.strip() or done.returncode}")
    return Sample(**json.loads(done.stdout))


def _text(argument: object) -> str:
    return os.fspath(argument) if isinstance(argument, Path) else str(argument)


@dataclass(frozen=True)
class BareUring:
    """The same samples from the same places by io_uring with O_DIRECT, each by one read.

    No checksums, no order of reads, no buffers handed out: what the device and the kernel cost.
    """

    depth: int = DEPTH

    @property
    def label(self) -> str:
        """In tables."""
        return f"bare io_uring reader, depth {self.depth}"

    def run(self, ground: Ground) -> Sample:
        """Random samples until the time is over."""
        scene = ground.scene
        random = np.random.default_rng([scene.seed, ground.round, 11])
        order = random.permutation(len(scene))
        lengths = scene.source.lengths[order]
        order = order[(lengths > 0) & (lengths <= URING_BYTES_MAX)]
        places, kept = scene.folder / "places", scene.folder / "kept"
        scene.places(order).tofile(places)
        program = ground.machine.program("bare_uring")
        sample = run_bare(
            program, scene.volume, places, self.depth, ground.limits.seconds, CHECKED, kept
        )
        data, found, at = kept.read_bytes(), {}, 0
        for index in order[:CHECKED].tolist():
            length = int(scene.source.lengths[index])
            found[index] = data[at : at + length]
            at += length
        if at != len(data):
            raise WrongBytesError(f"bare_uring: expected {at} bytes, got {len(data)}")
        sample.checked = check_bytes(scene, found)
        return sample


@dataclass(frozen=True)
class BareCopy:
    """The same samples by memcpy from memory, in batches, in random order."""

    @property
    def label(self) -> str:
        """In tables."""
        return "memcpy of each sample"

    def run(self, ground: Ground) -> Sample:
        """Random samples until the time is over."""
        scene = ground.scene
        order = np.random.default_rng([scene.seed, ground.round, 13]).permutation(len(scene))
        lengths = scene.source.lengths
        offsets = np.concatenate(([0], np.cumsum(lengths)[:-1]))
        places = scene.folder / "places"
        np.stack([offsets[order], lengths[order]], axis=1).astype(np.uint64).tofile(places)
        program = ground.machine.program("bare_copy")
        return run_bare(program, places, scene.spec.batch, ground.limits.seconds)


@dataclass(frozen=True)
class FreshMemory:
    """Writing as much memory as the data needs for the first time, in huge pages where there are.

    What an epoch that keeps all its data pays once, and a tool that reads into one buffer does not.
    On virtual machines whose host takes free memory back it may cost more than the disk.
    """

    @property
    def label(self) -> str:
        """In tables."""
        return "first touch of as much memory"

    def run(self, ground: Ground) -> Sample:
        """Once, one byte after the other."""
        scene = ground.scene
        ground.machine.drop_caches()
        with mmap.mmap(-1, scene.data_bytes) as memory:
            with contextlib.suppress(OSError):  # a kernel without huge pages
                memory.madvise(mmap.MADV_HUGEPAGE)
            with timed() as watch:
                np.frombuffer(memory, np.uint8).fill(1)
        return Sample(len(scene), scene.sample_bytes, watch.seconds, watch.cpu_seconds)
