"""Bare loops in C, which show the limits of the machine: reads by io_uring, and memcpy."""

from __future__ import annotations

import contextlib
import json
import mmap
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.contenders.samples import DEPTH
from bench.errors import WrongBytesError
from bench.measurement import CHECKED, Environment, Measurement, check_bytes
from bench.process import output_of
from bench.resources import timed
from dlfs.base.units import MIB

URING_BYTES_MAX = 4 * MIB
"""Largest sample that the io_uring reader reads: larger ones would need gigabytes of buffers."""


def run_bare(program: Path, *arguments: object) -> Measurement:
    """Run a program of ``bench/native``, which prints its measurement as JSON."""
    return Measurement(**json.loads(output_of(program, *arguments)))


@dataclass(frozen=True)
class BareUring:
    """Random samples of the volume's file by io_uring with O_DIRECT, one read a sample.

    It computes no checksums, does not sort its reads, and returns no buffers. It costs what the
    device and the kernel cost.

    Attributes:
        depth: reads in flight.
    """

    depth: int = DEPTH

    @property
    def label(self) -> str:
        return f"bare io_uring reader, depth {self.depth}"

    def run(self, environment: Environment) -> Measurement:
        scene = environment.scene
        order = scene.random_order(environment.round, 11)
        lengths = scene.source.lengths[order]
        order = order[(lengths > 0) & (lengths <= URING_BYTES_MAX)]
        locations, output = scene.folder / "locations", scene.folder / "samples"
        scene.locations(order).tofile(locations)
        program = environment.machine.program("bare_uring")
        sample = run_bare(
            program,
            scene.volume,
            locations,
            self.depth,
            environment.limits.seconds,
            CHECKED,
            output,
        )
        data, found, at = output.read_bytes(), {}, 0
        for index in order[:CHECKED].tolist():
            length = int(scene.source.lengths[index])
            found[index] = data[at : at + length]
            at += length
        if at != len(data):
            raise WrongBytesError(f"bare_uring: expected {at} bytes, got {len(data)}")
        sample.checked = check_bytes(scene.source, found)
        return sample


@dataclass(frozen=True)
class BareCopy:
    """Random batches of samples, copied by memcpy from memory to memory."""

    label = "memcpy of each sample"

    def run(self, environment: Environment) -> Measurement:
        scene = environment.scene
        order = scene.random_order(environment.round, 13)
        lengths = scene.source.lengths
        offsets = np.concatenate(([0], np.cumsum(lengths)[:-1]))
        locations = scene.folder / "locations"
        np.stack([offsets[order], lengths[order]], axis=1).astype(np.uint64).tofile(locations)
        program = environment.machine.program("bare_copy")
        return run_bare(program, locations, scene.spec.batch, environment.limits.seconds)


@dataclass(frozen=True)
class FreshMemory:
    """The first write to as much memory as the data needs, in huge pages where there are any.

    An epoch that caches all its data pays this once. A tool that reads into one buffer does not. On
    virtual machines whose host takes free memory back, it may cost more than the disk.
    """

    label = "first touch of as much memory"

    def run(self, environment: Environment) -> Measurement:
        scene = environment.scene
        environment.machine.drop_caches()
        with mmap.mmap(-1, scene.data_bytes) as memory:
            with contextlib.suppress(OSError):  # a kernel without huge pages
                memory.madvise(mmap.MADV_HUGEPAGE)
            with timed() as watch:
                np.frombuffer(memory, np.uint8).fill(1)
        return Measurement(len(scene), scene.sample_bytes, watch.seconds, watch.cpu_seconds)
