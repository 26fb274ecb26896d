"""fio, the common tool for measuring disks.

Random reads go to the bytes of the volume's file where the samples lie. Writes go to a new file
next to it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from bench.measurement import Environment, Measurement
from bench.process import find_program, output_of
from dlfs.base.units import KIB, MIB

COMMON = ("--name=bench", "--ioengine=io_uring", "--direct=1", "--output-format=json")
WRITE_BYTES, WRITE_DEPTH = MIB, 8
"""Bytes of a write, and writes in flight."""


def _run(environment: Environment, *arguments: str) -> dict[str, Any]:
    program = find_program("fio", "fio")
    text = output_of(program, *COMMON, *arguments, cwd=environment.scene.folder)
    job: dict[str, Any] = json.loads(text[text.index("{") :])["jobs"][0]
    return job


def _measurement(job: dict[str, Any], kind: str) -> Measurement:
    side = job[kind]
    seconds = side["runtime"] / 1000
    cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
    return Measurement(side["total_ios"], side["io_bytes"], max(seconds, 1e-3), cpu)


@dataclass(frozen=True)
class FioRead:
    """Reads by fio.

    Attributes:
        block_bytes: bytes of a read.
        depth: reads in flight.
        random: read in random order; else one after the other.
    """

    block_bytes: int
    depth: int
    random: bool = True

    @property
    def label(self) -> str:
        way = "random" if self.random else "sequential"
        return f"fio {way} reads of {self.block_bytes // KIB} KiB, depth {self.depth}"

    def run(self, environment: Environment) -> Measurement:
        scene = environment.scene
        job = _run(
            environment,
            f"--filename={scene.volume.name}",
            "--readonly",
            f"--rw={'randread' if self.random else 'read'}",
            f"--bs={self.block_bytes}",
            f"--iodepth={self.depth}",
            f"--offset={scene.data_offset}",
            f"--size={scene.data_bytes}",
            f"--randseed={scene.seed + environment.round}",
            "--norandommap",
            "--fixedbufs",
            "--registerfiles",
            "--time_based",
            f"--runtime={max(1, round(environment.limits.seconds * 1000))}ms",
        )
        return _measurement(job, "read")


@dataclass(frozen=True)
class FioWrite:
    """Sequential writes by fio, as many bytes as the plain files have, flushed at the end.

    The space of the file is allocated first.
    """

    label = f"fio sequential writes of {WRITE_BYTES // KIB} KiB, depth {WRITE_DEPTH}"

    def run(self, environment: Environment) -> Measurement:
        scene = environment.scene
        target = scene.folder / "written"
        total = int(scene.source.lengths[scene.file_indices].sum())
        try:
            job = _run(
                environment,
                f"--filename={target.name}",
                "--rw=write",
                f"--bs={WRITE_BYTES}",
                f"--iodepth={WRITE_DEPTH}",
                f"--size={max(1, total // WRITE_BYTES) * WRITE_BYTES}",
                "--fallocate=native",
                "--end_fsync=1",
                "--refill_buffers",
            )
        finally:
            target.unlink(missing_ok=True)
        found = _measurement(job, "write")
        found.seconds = max(found.seconds, job["job_runtime"] / 1000)
        return found
