"""The import of a folder of files into a sealed dataset, and what its disk allows."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import dlfs
from bench.contenders.files import ParallelFiles
from bench.contenders.fio import FioWrite
from bench.datasets import DATASET, volume_bytes
from bench.measurement import CHECKED, Environment, Measurement, check_bytes
from bench.resources import timed, tree_cpu_seconds
from dlfs.ingest.formats.folder import FolderSource
from dlfs.ingest.importer import import_dataset
from dlfs.ingest.source import Layout


@dataclass(frozen=True)
class Import:
    """The import of a folder into a new volume, with cold caches, until the data is on the disk.

    Attributes:
        layout: order in which samples are packed into chunks.
    """

    layout: Layout

    @property
    def label(self) -> str:
        return f"DLFS import of a folder, cold, layout {self.layout}"

    def run(self, environment: Environment) -> Measurement:
        scene = environment.scene
        target = scene.folder / "imported.img"
        total = int(scene.source.lengths[scene.file_indices].sum())
        size_bytes = volume_bytes(len(scene.file_indices), total)
        dlfs.format_volume(str(target), size_bytes=size_bytes, force=True)
        environment.machine.require_cold()
        try:
            with dlfs.open(str(target)) as volume:
                with timed() as watch:
                    source = FolderSource(scene.files, links="skip")
                    report = import_dataset(volume, source, DATASET, layout=self.layout)
                source.close()
                paths = {i: scene.source.path(i) for i in scene.file_order(0)[:CHECKED].tolist()}
                with volume.dataset(DATASET) as dataset:
                    found = {index: dataset.get(path) for index, path in paths.items()}
                checked = check_bytes(scene.source, found)
        finally:
            target.unlink()
        return Measurement(
            report.sample_count,
            report.sample_bytes,
            watch.seconds,
            watch.cpu_seconds,
            checked,
            {"walk_seconds": watch.seconds - report.seconds},
        )


PARTS = 16
"""Parts that an import by workers has at least: several for each worker."""


@dataclass(frozen=True)
class ImportByWorkers:
    """The program ``dlfs import`` with workers, from its start to its end, with cold caches.

    Attributes:
        workers: number of workers.
        latency_ms: time that opening a file takes longer, as over a network.
    """

    workers: int
    latency_ms: int = 0

    @property
    def label(self) -> str:
        latency = f", files {self.latency_ms} ms away" if self.latency_ms else ""
        return f"DLFS import, --workers {self.workers}{latency}"

    def run(self, environment: Environment) -> Measurement:
        scene = environment.scene
        target = scene.folder / "imported.img"
        count, total = len(scene.file_indices), int(scene.source.lengths[scene.file_indices].sum())
        dlfs.format_volume(str(target), size_bytes=volume_bytes(count, total), force=True)
        environment.machine.require_cold()
        settings = dict(os.environ)
        if self.latency_ms:
            settings |= {
                "LD_PRELOAD": str(environment.machine.program("slow_open")),
                "SLOW_OPEN_MS": str(self.latency_ms),
            }
        arguments = [sys.executable, "-m", "dlfs.cli", "import", "--quiet", "--links", "skip"]
        arguments += ["--workers", str(self.workers), "--step", str(total // PARTS)]
        arguments += ["--name", DATASET, str(scene.files), str(target)]
        try:
            with timed(cpu=tree_cpu_seconds) as watch:
                subprocess.run(arguments, check=True, env=settings)
            with dlfs.open(str(target)) as volume:
                paths = {i: scene.source.path(i) for i in scene.file_order(0)[:CHECKED].tolist()}
                with volume.dataset(DATASET) as dataset:
                    found = {index: dataset.get(path) for index, path in paths.items()}
                    packed = len(dataset)
            checked = check_bytes(scene.source, found)
        finally:
            target.unlink()
        return Measurement(packed, total, watch.seconds, watch.cpu_seconds, checked)


@dataclass(frozen=True)
class ReadBesideWrite:
    """All plain files read by threads in C while fio writes as many bytes, until both have ended.

    Files and volume are on one disk, which reads and writes more slowly at the same time.
    """

    label = "plain files, cold, read beside fio's writes"

    def run(self, environment: Environment) -> Measurement:
        with ThreadPoolExecutor() as executor:
            writing = executor.submit(FioWrite().run, environment)
            read = ParallelFiles().run(environment)
            written = writing.result()
        seconds = max(read.seconds, written.seconds)
        cpu_seconds = read.cpu_seconds + written.cpu_seconds
        return Measurement(read.samples, read.bytes, seconds, cpu_seconds)
