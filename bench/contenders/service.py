"""DLFS through a node service: the cost of the service, and many clients on one cache.

The service is ``dlfs serve`` in a process of its own; its CPU time counts. Unless a contender says
otherwise, it has memory for all of the data. The memory that its clients share is found in their
memory maps. PSS is a page's size divided by the number of processes that map it. The PSS of all
processes adds up to the shared memory, unless something exists twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import dlfs
from bench.contenders.samples import (
    fill_memory,
    measure_batches,
    measure_cached,
    measure_epoch,
    read_batches,
    share_text,
)
from bench.datasets import DATASET, Scene
from bench.measurement import Environment, Measurement, check_bytes
from bench.process import Child, Parent, run_child, run_program, start_child
from bench.resources import cpu_seconds_of, timed
from bench.serving import Served, serve
from dlfs.base.units import GIB

SHARED = "memfd:dlfs"
"""Part of the names of memory that a service shares."""


def serve_scene(scene: Scene) -> AbstractContextManager[Served]:
    """Serve a scene's volume, with memory for all of it."""
    return serve(str(scene.volume), 4 * scene.data_bytes + GIB)


@contextmanager
def open_served(served: Served) -> Iterator[dlfs.Dataset]:
    """Open a scene's dataset at a service."""
    with dlfs.connect(served.uri) as volume, volume.dataset(DATASET) as dataset:
        yield dataset.open()


@contextmanager
def serve_cold(environment: Environment, share: float) -> Iterator[tuple[Served, dlfs.Dataset]]:
    """Serve a scene's volume by a new service, and open its dataset, with nothing in memory.

    Args:
        environment: the environment of the measurement.
        share: the service's memory as a share of the data.
    """
    scene = environment.scene
    environment.machine.drop_caches()
    with (
        serve(str(scene.volume), scene.memory_bytes(share)) as served,
        open_served(served) as dataset,
    ):
        yield served, dataset


@dataclass(frozen=True)
class ServiceEpoch:
    """A cold epoch in global order through a new service.

    Attributes:
        share: the service's memory as a share of the data; of four chunks at least.
        whole: read to the end; else stop when the time is over.
    """

    share: float
    whole: bool = True

    @property
    def label(self) -> str:
        return f"DLFS global epoch through a service, {share_text(self.share)}"

    def run(self, environment: Environment) -> Measurement:
        with serve_cold(environment, self.share) as (served, dataset):
            return measure_epoch(
                dataset, environment, "global", whole=self.whole, servers=[served.pid]
            )


@dataclass(frozen=True)
class ServiceBatches:
    """Cold random batches through a new service.

    Attributes:
        share: the service's memory as a share of the data; of four chunks at least.
    """

    share: float

    @property
    def label(self) -> str:
        return f"DLFS read() of random batches through a service, {share_text(self.share)}"

    def run(self, environment: Environment) -> Measurement:
        with serve_cold(environment, self.share) as (served, dataset):
            return measure_batches(dataset, environment, [served.pid])


@dataclass(frozen=True)
class ServiceCached:
    """Random batches of samples that are in a service's memory, read by one client."""

    label = "DLFS read() of batches in a service's memory"

    def run(self, environment: Environment) -> Measurement:
        with (
            serve_scene(environment.scene) as served,
            open_served(served) as dataset,
        ):
            return measure_cached(dataset, environment, [served.pid])


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
        scene = environment.scene
        with serve_scene(scene) as served, ExitStack() as stack:
            with dlfs.connect(served.uri) as volume, volume.dataset(DATASET) as dataset:
                fill_memory(dataset, scene.spec.batch)
            clients = []
            for number in range(min(self.count, environment.limits.clients)):
                seed = (scene.seed, environment.round, number)
                size = (len(scene), scene.spec.batch, environment.limits.seconds)
                log = scene.folder / f"client-{number}.log"
                job = Job(served.uri, *size, seed)
                clients.append(stack.enter_context(start_child(__name__, job, log)))
            return _measure(scene, served, clients)


def _measure(scene: Scene, served: Served, clients: list[Child]) -> Measurement:
    """Let the clients read at once; they wait until their memory maps have been read."""
    for client in clients:
        client.answer()  # it has opened the dataset
    cpu = cpu_seconds_of(served.pid)
    with timed() as watch:
        for client in clients:
            client.send("go")
        results = [client.answer() for client in clients]
    service_seconds = cpu_seconds_of(served.pid) - cpu
    samples = sum(one["samples"] for one in results)
    total_seconds = service_seconds + sum(one["cpu_seconds"] for one in results)
    notes = {
        "pss_bytes": sum(_shared_bytes(pid) for pid in (served.pid, *(c.pid for c in clients))),
        "resident_bytes": _shared_bytes(served.pid, "Rss"),
        "service_cpu_seconds": service_seconds,
        "cpu_us_per_sample": 1e6 * total_seconds / max(1, samples),
    }
    checked = 0
    for client in clients:
        client.send("check")
        found = {int(index): bytes.fromhex(data) for index, data in client.answer().items()}
        checked += check_bytes(scene.source, found)
    size_bytes = sum(one["bytes"] for one in results)
    return Measurement(samples, size_bytes, watch.seconds, total_seconds, checked, notes)


@dataclass(frozen=True, slots=True)
class Job:
    """The work of a client: random batches for some seconds, in the order of its own seed."""

    uri: str
    samples: int
    batch: int
    seconds: float
    seed: tuple[int, ...]


def work(job: Job, parent: Parent) -> None:
    """Read as a client: connect, wait for the start, read random batches, send the results."""
    order = np.random.default_rng(job.seed).permutation(job.samples)
    with dlfs.connect(job.uri) as volume, volume.dataset(DATASET) as dataset:
        dataset.read(order[: job.batch]).release()
        parent.answer(ready=True)
        parent.wait_for("go")
        with timed() as watch:
            tally = read_batches(dataset, order, job.batch, job.seconds, again=True)
        parent.answer(samples=tally.samples, bytes=tally.bytes, cpu_seconds=watch.cpu_seconds)
        parent.wait_for("check")
        parent.answer(**{str(index): data.hex() for index, data in tally.remembered.items()})


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


if __name__ == "__main__":
    run_program(lambda: run_child(Job, work))
