"""DLFS through a node service: what the way there costs, and many clients on one cache.

The service is ``dlfs serve`` in a process of its own, with memory for all of the data; its CPU time
counts. What its clients share is looked up in their maps: PSS, a page's size divided by the number
of processes that have it, adds up to what there is when nothing is there twice.
"""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.connection
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import dlfs
from bench.contestant import Ground, Sample, check_bytes, cpu_seconds_of, timed
from bench.contestants.samples import Tally, read_batches
from bench.datasets import DATASET, Scene
from bench.ending import started
from bench.machine import Unavailable

SHARED = "memfd:dlfs"
"""In the names of what a service shares."""


@dataclass(frozen=True)
class Served:
    """A service that runs."""

    uri: str
    pid: int


@contextmanager
def serve(scene: Scene) -> Iterator[Served]:
    """Serve a scene's volume, with memory for all of it."""
    with serve_volume(str(scene.volume), 4 * scene.data_bytes + (1 << 30)) as served:
        yield served


@contextmanager
def serve_volume(volume: str, memory_bytes: int) -> Iterator[Served]:
    """Serve a volume.

    Raises:
        Unavailable: the service ended before it answered; says its words.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "dlfs.cli", "serve", volume, "--json"]
        command += ["--socket", f"{folder}/bench.sock", "--cache", str(memory_bytes)]
        pipe = subprocess.PIPE
        with started(command, stdout=pipe, stderr=pipe) as process:
            assert process.stdout is not None
            told = b""
            while not told.endswith(b"}\n"):
                line = process.stdout.readline()
                if not line:
                    words = process.communicate()[1].decode(errors="replace").strip()
                    raise Unavailable(f"dlfs serve ended: {words}")
                told += line
            yield Served(json.loads(told)["uri"], process.pid)


def _fill(dataset: dlfs.Dataset, size: int) -> None:
    """Bring all samples into the service's memory."""
    with dataset.batches(size, shuffle="chunk") as epoch:
        for batch in epoch:
            batch.release()


@dataclass(frozen=True)
class ServiceCached:
    """Random batches of samples that are in a service's memory, read by one client."""

    @property
    def label(self) -> str:
        """In tables."""
        return "DLFS read() of batches in a service's memory"

    def run(self, ground: Ground) -> Sample:
        """As ``Cached``, with a service between."""
        scene, size = ground.scene, ground.scene.spec.batch
        order = np.random.default_rng([scene.seed, ground.round]).permutation(len(scene))
        with (
            serve(scene) as served,
            dlfs.connect(served.uri) as volume,
            volume.dataset(DATASET) as dataset,
        ):
            _fill(dataset, size)
            read_batches(dataset, order, size, 600)
            before, cpu = dataset.stats(), cpu_seconds_of(served.pid)
            with timed() as watch:
                tally = read_batches(dataset, order, size, ground.limits.seconds, again=True)
            watch.cpu_seconds += cpu_seconds_of(served.pid) - cpu
            reads = dataset.stats()["reads"] - before["reads"]
            return tally.sample(scene, watch, reads=reads)


@dataclass(frozen=True)
class ServiceClients:
    """Processes that read random batches from one service, all at once.

    Attributes:
        count: of them.
    """

    count: int

    @property
    def label(self) -> str:
        """In tables."""
        return f"DLFS, {self.count} processes on one service"

    def run(self, ground: Ground) -> Sample:
        """All of them for the same time; what they read is added up."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        with serve(ground.scene) as served:
            with dlfs.connect(served.uri) as volume, volume.dataset(DATASET) as dataset:
                _fill(dataset, ground.scene.spec.batch)
            pipes, clients = [], []
            for number in range(self.count):
                here, there = context.Pipe()
                order = (len(ground.scene), ground.scene.spec.batch, ground.limits.seconds)
                seed = (ground.scene.seed, ground.round, number)
                arguments = (there, served.uri, *order, seed)
                clients.append(context.Process(target=_read, args=arguments))
                clients[-1].start()
                there.close()
                pipes.append(here)
            try:
                return _run(ground.scene, served, pipes, [c.pid or 0 for c in clients])
            finally:
                for pipe in pipes:
                    pipe.close()
                for client in clients:
                    client.join()


def _run(
    scene: Scene,
    served: Served,
    pipes: list[multiprocessing.connection.Connection],
    pids: list[int],
) -> Sample:
    """Let the clients read together; what each says is (samples, bytes, CPU time, kept)."""
    for pipe in pipes:
        pipe.recv()  # it has opened the dataset
    cpu = cpu_seconds_of(served.pid)
    with timed() as watch:
        for pipe in pipes:
            pipe.send("go")
        told = [pipe.recv() for pipe in pipes]
    service_seconds = cpu_seconds_of(served.pid) - cpu
    pss = sum(_shared_bytes(pid) for pid in (served.pid, *pids))
    resident = _shared_bytes(served.pid, "Rss")
    samples = sum(one[0] for one in told)
    total_seconds = service_seconds + sum(one[2] for one in told)
    notes = {
        "pss_bytes": pss,
        "resident_bytes": resident,
        "service_cpu_seconds": service_seconds,
        "cpu_us_per_sample": 1e6 * total_seconds / max(1, samples),
    }
    checked = sum(check_bytes(scene, one[3]) for one in told)
    size_bytes = sum(one[1] for one in told)
    return Sample(samples, size_bytes, watch.seconds, total_seconds, checked, notes)


def _read(
    pipe: multiprocessing.connection.Connection,
    uri: str,
    count: int,
    size: int,
    seconds: float,
    seed: tuple[int, ...],
) -> None:
    """What a client does."""
    order = np.random.default_rng(seed).permutation(count)
    with dlfs.connect(uri) as volume, volume.dataset(DATASET) as dataset:
        dataset.read(order[:size]).release()
        pipe.send("ready")
        pipe.recv()
        cpu, until = _own_cpu_seconds(), time.perf_counter() + seconds
        tally = Tally()
        while time.perf_counter() < until or not tally.samples:
            part = read_batches(dataset, order, size, until - time.perf_counter())
            tally.samples, tally.bytes = tally.samples + part.samples, tally.bytes + part.bytes
            tally.kept = tally.kept or part.kept
        pipe.send((tally.samples, tally.bytes, _own_cpu_seconds() - cpu, tally.kept))
        _wait_for_end(pipe)


def _wait_for_end(pipe: multiprocessing.connection.Connection) -> None:
    """Stay, to be looked at, until the other end is closed."""
    try:
        pipe.recv()
    except EOFError:
        return


def _own_cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _shared_bytes(pid: int, field: str = "Pss") -> int:
    """What a process has of the service's memory: its share (Pss), or all that it maps (Rss)."""
    total, ours = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text(errors="replace").splitlines():
        words: Any = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            ours = SHARED in line
        elif ours and words[0] == f"{field}:":
            total += int(words[1]) * 1024
    return total
