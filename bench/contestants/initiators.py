"""Initiators of NVMe-oF on one core against one target: DLFS's two, and SPDK's own perf tool.

All read random samples' worth of the same namespace at the same depth. SPDK's tool polls without
pause and does nothing with what it reads; DLFS verifies every sample and hands out batches.
"""

from __future__ import annotations

import os
import re
import resource
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

import dlfs
from bench.contestant import Ground, Sample, check_bytes, timed
from bench.contestants.bare import run_bare
from bench.contestants.samples import Tally
from bench.datasets import DATASET
from bench.machine import Machine, Unavailable
from bench.targets import Targets
from dlfs.block import NvmeTcpUri, SpdkUri, open_device, parse_uri
from dlfs.units import KIB

BUDGET = 1 / 4
"""Memory as a share of the data: room for what is read ahead. Nothing of it is read twice."""
PERF_MEMORY_MIB = 256
IDLE_QUEUES = 4


@contextmanager
def _on_core(machine: Machine) -> Iterator[None]:
    """Bind this thread, and those that it starts, to the initiators' core."""
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {machine.core})
        yield
    except OSError as error:
        raise Unavailable(f"--core {machine.core}: {error.strerror}") from error
    finally:
        os.sched_setaffinity(0, before)


def _targets(ground: Ground) -> Targets:
    targets = ground.scene.targets
    assert targets is not None
    return targets


@dataclass(frozen=True)
class Initiator:
    """Random batches through the sample API.

    Attributes:
        scheme: of the URI: ``nvme-tcp`` or ``spdk``.
        depth: reads in flight.
        ahead: an epoch in global order, read ahead; else batches on demand.
    """

    scheme: str
    depth: int
    ahead: bool = False

    @property
    def label(self) -> str:
        """In tables."""
        way = "global epoch" if self.ahead else "read() of random batches"
        return f"DLFS {self.scheme}: {way}, depth {self.depth}"

    def run(self, ground: Ground) -> Sample:
        """Batches until the time is over."""
        scene = ground.scene
        uri = _targets(ground).uri(self.scheme)
        options = {"memory_bytes": scene.memory_bytes(BUDGET), "depth": self.depth}
        with (
            _on_core(ground.machine),
            dlfs.open(uri, **options) as volume,
            volume.dataset(DATASET) as dataset,
        ):
            batches = self._ahead(dataset, ground) if self.ahead else self._read(dataset, ground)
            self._touch(batches, scene.memory_bytes(BUDGET))
            tally = Tally()
            with timed() as watch:
                until = time.perf_counter() + ground.limits.seconds
                while time.perf_counter() < until:
                    batch = next(batches)
                    tally.add(batch)
                    batch.release()
            batches.close()
            return tally.sample(scene, watch, stats=dataset.stats())

    def _touch(self, batches: Iterator[dlfs.Batch], memory_bytes: int) -> None:
        """Read as much as the memory holds, so that the kernel gives its pages before the race."""
        while memory_bytes > 0:
            batch = next(batches)
            memory_bytes -= int(batch.lengths.sum())
            batch.release()

    def _read(self, dataset: dlfs.Dataset, ground: Ground) -> Iterator[dlfs.Batch]:
        scene = ground.scene
        random = np.random.default_rng([scene.seed, ground.round, 17])
        while True:
            order = random.permutation(len(scene))
            for first in range(0, len(order), scene.spec.batch):
                yield dataset.read(order[first : first + scene.spec.batch])

    def _ahead(self, dataset: dlfs.Dataset, ground: Ground) -> Iterator[dlfs.Batch]:
        batch, epoch = ground.scene.spec.batch, 1000 * ground.round
        while True:
            seed = ground.limits.seed
            with dataset.batches(batch, seed=seed, epoch=epoch, plan="direct") as batches:
                yield from batches
            epoch += 1


@dataclass(frozen=True)
class SpdkPerf:
    """SPDK's own tool, ``spdk_nvme_perf``: random reads, on the same core. It polls all the time.

    Attributes:
        block_bytes: of a read.
        depth: reads in flight.
    """

    block_bytes: int
    depth: int

    @property
    def label(self) -> str:
        """In tables."""
        return f"spdk_nvme_perf, {self.block_bytes // KIB} KiB random reads, depth {self.depth}"

    def run(self, ground: Ground) -> Sample:
        """Reads for whole seconds, at least one; CPU time with its set-up."""
        program = ground.machine.tool(ground.machine.perf, "SPDK (its Getting Started guide)")
        seconds = max(1, round(ground.limits.seconds))
        command = [program, "--no-huge", "-s", str(PERF_MEMORY_MIB), "-w", "randread"]
        command += ["-q", str(self.depth), "-o", str(self.block_bytes), "-t", str(seconds)]
        command += ["-c", hex(1 << ground.machine.core), "-r", transport_id(_targets(ground))]
        before = _children_cpu_seconds()
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        cpu = _children_cpu_seconds() - before
        total = re.search(r"^Total\s*:\s*([0-9.]+)", done.stdout, re.MULTILINE)
        if done.returncode or total is None:
            lines = (done.stderr + done.stdout).strip().splitlines() or ["no reason given"]
            raise Unavailable(f"spdk_nvme_perf: {lines[-1]}")
        reads = round(float(total[1]) * seconds)
        return Sample(reads, reads * self.block_bytes, seconds, cpu)


@dataclass(frozen=True)
class BareInitiator:
    """DLFS's NVMe/TCP initiator alone, from a loop in C: random blocks, nothing handed out.

    Attributes:
        block_bytes: of a read.
        depth: reads in flight.
        as_batch: into as many buffers as a batch has samples, computing the CRC32C of each; else
            into as many as reads are in flight, which stay in the processor's caches.
    """

    block_bytes: int
    depth: int
    as_batch: bool = False

    @property
    def label(self) -> str:
        """In tables."""
        way = "a batch's memory, with CRC32C" if self.as_batch else f"{self.depth} buffers"
        return f"nvme-tcp from C into {way}, depth {self.depth}"

    def run(self, ground: Ground) -> Sample:
        """Random blocks until the time is over."""
        uri = parse_uri(_targets(ground).uri("nvme-tcp"))
        assert isinstance(uri, NvmeTcpUri)
        host, port = uri.paths[0]
        program = ground.machine.program("bare_nvme")
        buffers = max(self.depth, ground.scene.spec.batch) if self.as_batch else self.depth
        with _on_core(ground.machine):
            return run_bare(
                program, host, port, uri.subsystem_nqn, uri.nsid, self.block_bytes, self.depth,
                buffers, int(self.as_batch), ground.limits.seconds,
            )  # fmt: skip


def transport_id(targets: Targets) -> str:
    """The namespace in SPDK's words, from whichever URI was given."""
    uri = parse_uri(targets.uris[0])
    if isinstance(uri, SpdkUri):
        words = (*uri.transport_id, ("ns", str(uri.nsid)))
    elif isinstance(uri, NvmeTcpUri):
        host, port = uri.paths[0]
        family = "IPv6" if ":" in host else "IPv4"
        words = (
            ("trtype", "TCP"), ("adrfam", family), ("traddr", host), ("trsvcid", str(port)),
            ("subnqn", uri.subsystem_nqn), ("ns", str(uri.nsid)),
        )  # fmt: skip
    else:
        raise Unavailable(f"spdk_nvme_perf cannot read {uri}")
    return " ".join(f"{key}:{value}" for key, value in words)


def _children_cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@dataclass(frozen=True)
class Idle:
    """Queue pairs that were used and wait: what they cost while nobody reads.

    Attributes:
        scheme: of the URI.
    """

    scheme: str

    @property
    def label(self) -> str:
        """In tables."""
        return f"DLFS {self.scheme}: {IDLE_QUEUES} idle queue pairs"

    def run(self, ground: Ground) -> Sample:
        """Waits; a sample is a queue pair's second."""
        scene = ground.scene
        uri = _targets(ground).uri(self.scheme)
        with _on_core(ground.machine), open_device(uri) as device:
            queues = [device.queue_pair(32) for _ in range(IDLE_QUEUES)]
            device.read(0, 4096)
            with timed() as watch:
                time.sleep(ground.limits.seconds)
            for queue in queues:
                queue.close()
        with dlfs.open(uri) as volume, volume.dataset(DATASET) as dataset:
            checked = check_bytes(scene, {0: dataset.get(scene.source.path(0))})
        seconds = IDLE_QUEUES * watch.seconds
        percent = 100 * watch.cpu_seconds / watch.seconds
        note = {"plan": f"{percent:.2f}% of a core for all of them"}
        waited = max(1, round(seconds))
        return Sample(waited, 0, watch.seconds, watch.cpu_seconds, checked, note)
