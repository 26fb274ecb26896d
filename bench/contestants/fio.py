"""fio on the same disk: what the device gives by a tool that everybody knows.

Random reads go to the very bytes of the volume's file that the samples lie in; writes to a new file
beside it.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from typing import Any

from bench.contestant import Ground, Sample
from bench.machine import Unavailable
from dlfs.units import KIB, MIB

COMMON = ("--name=bench", "--ioengine=io_uring", "--direct=1", "--output-format=json")


def _run(ground: Ground, *arguments: str) -> dict[str, Any]:
    program = ground.machine.tool("fio", "fio")
    command = [program, *COMMON, *arguments]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, cwd=ground.scene.folder
    )
    if done.returncode:
        lines = (done.stderr + done.stdout).strip().splitlines() or ["no reason given"]
        raise Unavailable(f"fio: {lines[0]}")
    job: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    return job


def _sample(job: dict[str, Any], kind: str) -> Sample:
    side = job[kind]
    seconds = side["runtime"] / 1000
    cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
    return Sample(side["total_ios"], side["io_bytes"], max(seconds, 1e-3), cpu)


@dataclass(frozen=True)
class FioRead:
    """Reads by fio.

    Attributes:
        block_bytes: of a read.
        depth: reads in flight.
        random: else one behind the other.
    """

    block_bytes: int
    depth: int
    random: bool = True

    @property
    def label(self) -> str:
        """In tables."""
        way = "random" if self.random else "sequential"
        return f"fio {way} reads of {self.block_bytes // KIB} KiB, depth {self.depth}"

    def run(self, ground: Ground) -> Sample:
        """Reads until the time is over."""
        scene = ground.scene
        job = _run(
            ground,
            f"--filename={scene.volume.name}",
            "--readonly",
            f"--rw={'randread' if self.random else 'read'}",
            f"--bs={self.block_bytes}",
            f"--iodepth={self.depth}",
            f"--offset={scene.data_offset}",
            f"--size={scene.data_bytes}",
            f"--randseed={scene.seed + ground.round}",
            "--norandommap",
            "--fixedbufs",
            "--registerfiles",
            "--time_based",
            f"--runtime={max(1, round(ground.limits.seconds * 1000))}ms",
        )
        return _sample(job, "read")


@dataclass(frozen=True)
class FioWrite:
    """Sequential writes by fio of as many bytes as the plain files have, flushed at the end."""

    block_bytes: int = MIB
    depth: int = 8

    @property
    def label(self) -> str:
        """In tables."""
        return f"fio sequential writes of {self.block_bytes // KIB} KiB, depth {self.depth}"

    def run(self, ground: Ground) -> Sample:
        """All bytes once, into space that is allocated already."""
        scene = ground.scene
        target = scene.folder / "written"
        total = int(scene.source.lengths[scene.file_indices].sum())
        try:
            job = _run(
                ground,
                f"--filename={target.name}",
                "--rw=write",
                f"--bs={self.block_bytes}",
                f"--iodepth={self.depth}",
                f"--size={max(1, total // self.block_bytes) * self.block_bytes}",
                "--fallocate=native",
                "--end_fsync=1",
                "--refill_buffers",
            )
        finally:
            target.unlink(missing_ok=True)
        sample = _sample(job, "write")
        sample.seconds = max(sample.seconds, job["job_runtime"] / 1000)
        return sample
