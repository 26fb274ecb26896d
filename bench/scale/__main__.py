"""``python -m bench.scale --samples 1e7``: import so many generated samples, open and read them.

The samples are of 24 bytes, with paths like ``017/1234567.bin`` and one attribute of int64. Their
source makes them in path order, or in an order in which all folders mix (``--order hashed``). They
are shuffled within a step; ``--two-passes`` packs them once more, so that all mix. Each part runs
in a process of its own and reports, as a line of JSON, its time, its CPU time, and the greatest
memory that it had (VmHWM). The memory of what is generated is part of it.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import dlfs
from bench.command import command_line
from bench.process import ROOT, run_program
from dlfs.base.arguments import Layout
from dlfs.base.units import GIB, MIB
from dlfs.ingest.importer import import_dataset
from dlfs.ingest.progress import Progress
from dlfs.ingest.source import PassingSource, SampleBlock

SAMPLE_BYTES = 24
BLOCK_SAMPLES = 1 << 16
FOLDERS = 1000
READS = 1 << 18
BATCH = 1024
_VOLUME_BYTES_A_SAMPLE = 160  # samples, journals and directories


class Generated(PassingSource):
    """A source of generated samples.

    Args:
        count: number of samples.
        hashed: True if folders mix.
    """

    gives_shuffled = False

    def __init__(self, count: int, *, hashed: bool) -> None:
        self.name = f"{count} generated samples"
        self.sample_count, self.sample_bytes = count, count * SAMPLE_BYTES
        self.fingerprint = f"{count} {hashed}"
        self._hashed = hashed

    def blocks(self, *, layout: Layout, seed: int) -> Generator[SampleBlock, None, None]:
        """Yield the samples; neither layout nor seed matters."""
        del layout, seed
        count = self.sample_count or 0
        data = np.random.default_rng(1).bytes(BLOCK_SAMPLES * SAMPLE_BYTES)
        for first in range(0, count, BLOCK_SAMPLES):
            numbers = np.arange(first, min(first + BLOCK_SAMPLES, count))
            if self.passes(len(numbers)):
                continue
            size = len(numbers)
            yield SampleBlock(
                self.paths(numbers),
                data[: size * SAMPLE_BYTES],
                np.arange(size) * SAMPLE_BYTES,
                np.full(size, SAMPLE_BYTES),
                {"number": numbers},
            )

    def paths(self, numbers: NDArray[np.int64]) -> list[bytes]:
        """Return the paths of samples, each 17 bytes long."""
        per_folder = -(-(self.sample_count or 0) // FOLDERS)
        folder, file = np.divmod(numbers, per_folder)
        if self._hashed:
            file, folder = np.divmod(numbers, FOLDERS)
            folder = folder * 577 % FOLDERS
        text = np.empty((len(numbers), 17), np.uint8)
        text[:] = np.frombuffer(b"000/000000000.bin", np.uint8)
        for value, first, last in ((folder, 0, 3), (file, 4, 13)):
            left = value.copy()
            for place in range(last - 1, first - 1, -1):
                left, digit = np.divmod(left, 10)
                text[:, place] += digit.astype(np.uint8)
        return text.view("S17").ravel().tolist()


def peak_bytes() -> int:
    """Return the greatest resident memory of this process so far."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def report(part: str, count: int, since: tuple[float, float], **more: Any) -> None:
    """Print what a part took, since it began."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    seconds, cpu = time.monotonic() - since[0], usage.ru_utime + usage.ru_stime - since[1]
    figures = {
        "part": part,
        "samples": count,
        "seconds": round(seconds, 2),
        "cpu_seconds": round(cpu, 2),
        "cpu_ns_a_sample": round(cpu / count * 1e9),
        "peak_bytes": peak_bytes(),
        **more,
    }
    print(json.dumps(figures), flush=True)


def now() -> tuple[float, float]:
    """Return the time, and the CPU time of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return time.monotonic(), usage.ru_utime + usage.ru_stime


def run_generate(_volume: Path, count: int, hashed: bool, _two_passes: bool) -> None:
    """Make the samples, and nothing of them."""
    since = now()
    for _ in Generated(count, hashed=hashed).blocks(layout="path", seed=0):
        pass
    report("generate", count, since)


def run_import(volume: Path, count: int, hashed: bool, two_passes: bool = False) -> None:
    """Import the samples; each pass is reported, and the seal apart from the steps before it."""
    size_bytes = 256 * MIB + count * _VOLUME_BYTES_A_SAMPLE * (2 if two_passes else 1)
    dlfs.format_volume(str(volume), size_bytes=min(size_bytes, 40 * GIB))
    before = peak_bytes()
    since = now()
    steps: list[tuple[float, float]] = []

    def note(progress: Progress) -> None:
        if progress.samples_done == count and progress.second_pass == len(steps):
            began = steps[-1] if steps else since
            steps.append(now())
            part = "second pass" if progress.second_pass else "steps"
            report(part, count, began, peak_before=before)

    with dlfs.open(volume, memory_bytes=0) as opened:
        source = Generated(count, hashed=hashed)
        import_dataset(opened, source, "x", one_pass=not two_passes, progress=note)
        record = opened._opened().catalog.find(b"x")[-1]
    extent = record.attribute_extent
    assert extent is not None
    directory = record.entries_bytes + record.names_bytes + extent.segment_bytes
    report("seal", count, steps[-1])
    beside = (peak_bytes() - before - directory) / count
    report(
        "import", count, since, directory_bytes=directory, beside_bytes_a_sample=round(beside, 1)
    )


def run_read(volume: Path, count: int, _hashed: bool, _two_passes: bool) -> None:
    """Open the dataset, read samples at random, and one epoch."""
    since = now()
    with dlfs.open(volume) as opened, opened["x"] as dataset:
        assert len(dataset) == count
        report("open", count, since)
        chance = np.random.default_rng(2)
        since = now()
        for _ in range(READS // BATCH):
            with dataset.read(chance.integers(0, count, BATCH)):
                pass
        report("read at random", READS, since)
        since = now()
        seen = 0
        for batch in dataset.batches(BATCH, seed=1, epoch=0, shuffle="chunk"):
            with batch:
                seen += len(batch)
        assert seen == count
        report("epoch", count, since)


PARTS = {"generate": run_generate, "import": run_import, "read": run_read}


def main(argv: list[str] | None = None) -> int:
    """Run the parts, each in a process of its own."""
    parser = command_line("bench.scale", __doc__, "dir")
    parser.add_argument("--samples", type=float, default=1e6, help="number of samples [1e6]")
    parser.add_argument("--order", choices=["sorted", "hashed"], default="sorted")
    parser.add_argument("--two-passes", action="store_true", help="pack all samples twice")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    arguments.dir.mkdir(parents=True, exist_ok=True)
    volume = arguments.dir / "scale.img"
    count, hashed = int(arguments.samples), arguments.order == "hashed"
    if arguments.part:
        PARTS[arguments.part](volume, count, hashed, arguments.two_passes)
        return 0
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        for part in PARTS:
            command = [sys.executable, "-m", "bench.scale", *given, "--part", part]
            subprocess.run(command, cwd=ROOT, check=True)
    finally:
        volume.unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    run_program(main)
