"""DLFS through a node service: the cost of the service, and many clients on one cache.

The service is ``dlfs serve`` in a process of its own, with memory for all of the data; its CPU time
counts. The memory that its clients share is found in their memory maps. PSS is a page's size
divided by the number of processes that map it. The PSS of all processes adds up to the shared
memory, unless something exists twice.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import dlfs
from bench.contenders.samples import fill_memory, measure_cached, read_batches
from bench.datasets import DATASET, Scene
from bench.measurement import Environment, Measurement, Tally, check_bytes
from bench.resources import cpu_seconds, cpu_seconds_of, timed
from bench.serving import Served, serve
from dlfs.units import GIB

SHARED = "memfd:dlfs"
"""Part of the names of memory that a service shares."""


def serve_scene(scene: Scene) -> AbstractContextManager[Served]:
    """Serve a scene's volume, with memory for all of it."""
    return serve(str(scene.volume), 4 * scene.data_bytes + GIB)


@dataclass(frozen=True)
class ServiceCached:
    """Random batches of samples that are in a service's memory, read by one client."""

    @property
    def label(self) -> str:
        return "DLFS read() of batches in a service's memory"

    def run(self, environment: Environment) -> Measurement:
        with (
            serve_scene(environment.scene) as served,
            dlfs.connect(served.uri) as volume,
            volume.dataset(DATASET) as dataset,
        ):
            return measure_cached(dataset, environment, served.pid)


@dataclass(frozen=True)
class ServiceClients:
    """Processes that read random batches from one service, all at once.

    Attributes:
        count: number of processes.
    """

    count: int

    @property
    def label(self) -> str:
        return f"DLFS, {self.count} processes on one service"

    def run(self, environment: Environment) -> Measurement:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        with serve_scene(environment.scene) as served:
            with dlfs.connect(served.uri) as volume, volume.dataset(DATASET) as dataset:
                fill_memory(dataset, environment.scene.spec.batch)
            pipes, clients = [], []
            for number in range(self.count):
                here, there = context.Pipe()
                order = (
                    len(environment.scene),
                    environment.scene.spec.batch,
                    environment.limits.seconds,
                )
                seed = (environment.scene.seed, environment.round, number)
                arguments = (there, served.uri, *order, seed)
                clients.append(context.Process(target=_read, args=arguments))
                clients[-1].start()
                there.close()
                pipes.append(here)
            try:
                return _run(environment.scene, served, pipes, [c.pid or 0 for c in clients])
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
) -> Measurement:
    """Let the clients read at once. Each sends samples, bytes, CPU time and samples to compare."""
    for pipe in pipes:
        pipe.recv()  # the client has opened the dataset
    cpu = cpu_seconds_of(served.pid)
    with timed() as watch:
        for pipe in pipes:
            pipe.send("go")
        results = [pipe.recv() for pipe in pipes]
    service_seconds = cpu_seconds_of(served.pid) - cpu
    pss = sum(_shared_bytes(pid) for pid in (served.pid, *pids))
    resident = _shared_bytes(served.pid, "Rss")
    samples = sum(one[0] for one in results)
    total_seconds = service_seconds + sum(one[2] for one in results)
    notes = {
        "pss_bytes": pss,
        "resident_bytes": resident,
        "service_cpu_seconds": service_seconds,
        "cpu_us_per_sample": 1e6 * total_seconds / max(1, samples),
    }
    checked = sum(check_bytes(scene.source, one[3]) for one in results)
    size_bytes = sum(one[1] for one in results)
    return Measurement(samples, size_bytes, watch.seconds, total_seconds, checked, notes)


def _read(
    pipe: multiprocessing.connection.Connection,
    uri: str,
    count: int,
    size: int,
    seconds: float,
    seed: tuple[int, ...],
) -> None:
    """Read as a client: connect, wait for the start, read random batches, send the results."""
    order = np.random.default_rng(seed).permutation(count)
    with dlfs.connect(uri) as volume, volume.dataset(DATASET) as dataset:
        dataset.read(order[:size]).release()
        pipe.send("ready")
        pipe.recv()
        cpu, until = cpu_seconds(), time.perf_counter() + seconds
        tally = Tally()
        while time.perf_counter() < until or not tally.samples:
            some = read_batches(dataset, order, size, until - time.perf_counter())
            tally.samples, tally.bytes = tally.samples + some.samples, tally.bytes + some.bytes
            tally.remembered = tally.remembered or some.remembered
        pipe.send((tally.samples, tally.bytes, cpu_seconds() - cpu, tally.remembered))
        _wait_for_end(pipe)


def _wait_for_end(pipe: multiprocessing.connection.Connection) -> None:
    """Wait until the other end is closed, so that the parent can read this process's memory map."""
    try:
        pipe.recv()
    except EOFError:
        return


def _shared_bytes(pid: int, field: str = "Pss") -> int:
    """Return a process's part of the service's memory: its share (Pss), or all it maps (Rss)."""
    total, is_shared = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text(errors="replace").splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            is_shared = SHARED in line
        elif is_shared and words[0] == f"{field}:":
            total += int(words[1]) * 1024
    return total
