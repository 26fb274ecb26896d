"""Initiators of NVMe-oF on one core against one target: DLFS's two, and SPDK's own perf tool.

All read random blocks of one sample of the same namespace at the same depth. SPDK's tool polls
without pause and discards what it reads. DLFS verifies every sample and returns batches.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import dlfs
from bench.contenders.bare import run_bare
from bench.datasets import DATASET
from bench.errors import Unavailable
from bench.measurement import Environment, Measurement, Tally, check_bytes
from bench.process import bound_to, find_program, output_of
from bench.resources import cpu_seconds_of_children, timed
from bench.targets import uri_of
from dlfs.base.units import KIB
from dlfs.block import NvmeTcpUri, SpdkUri, open_device, parse_uri
from dlfs.fabric.keys import key_directory

BUDGET = 1 / 4
"""Memory as a share of the data: enough for reading ahead. Epochs keep some samples in it."""
PERF_MEMORY_MIB = 256
IDLE_QUEUES = 4


@dataclass(frozen=True)
class Initiator:
    """Random batches through the sample API.

    Attributes:
        scheme: scheme of the URI: ``nvme-tcp`` or ``spdk``.
        depth: reads in flight.
        ahead: read an epoch in global order ahead; else batches on demand.
    """

    scheme: str
    depth: int
    ahead: bool = False

    @property
    def label(self) -> str:
        way = "global epoch" if self.ahead else "read() of random batches"
        return f"DLFS {self.scheme}: {way}, depth {self.depth}"

    def run(self, environment: Environment) -> Measurement:
        scene = environment.scene
        uri = uri_of(environment.scene.uris, self.scheme)
        options = {"memory_bytes": scene.memory_bytes(BUDGET), "depth": self.depth}
        with (
            bound_to(environment.machine.core),
            dlfs.open(uri, **options) as volume,
            volume.dataset(DATASET) as dataset,
        ):
            read = self._ahead if self.ahead else self._read
            batches = read(dataset, environment)
            # Until the kernel has provided all pages of the memory: an epoch caches samples in it
            # up to its end.
            left_bytes = scene.source.total_bytes() if self.ahead else scene.memory_bytes(BUDGET)
            while left_bytes > 0:
                with next(batches) as batch:
                    left_bytes -= int(batch.lengths.sum())
            tally = Tally()
            with timed() as watch:
                until = time.perf_counter() + environment.limits.seconds
                while time.perf_counter() < until:
                    batch = next(batches)
                    tally.add_batch(batch)
                    batch.release()
            batches.close()
            return tally.result(scene.source, watch, stats=dataset.stats())

    def _read(self, dataset: dlfs.Dataset, environment: Environment) -> Iterator[dlfs.Batch]:
        scene = environment.scene
        for number in itertools.count():
            order = scene.random_order(environment.round, 17, number)
            for first in range(0, len(order), scene.spec.batch):
                yield dataset.read(order[first : first + scene.spec.batch])

    def _ahead(self, dataset: dlfs.Dataset, environment: Environment) -> Iterator[dlfs.Batch]:
        batch, epoch = environment.scene.spec.batch, 1000 * environment.round
        while True:
            seed = environment.limits.seed
            with dataset.batches(batch, seed=seed, epoch=epoch, plan="direct") as batches:
                yield from batches
            epoch += 1


@dataclass(frozen=True)
class SpdkPerf:
    """SPDK's own tool, ``spdk_nvme_perf``: random reads on the same core, by polling.

    It reads for whole seconds, at least one. Its CPU time includes its set-up.

    Attributes:
        block_bytes: bytes of a read.
        depth: reads in flight.
    """

    block_bytes: int
    depth: int

    @property
    def label(self) -> str:
        return f"spdk_nvme_perf, {self.block_bytes // KIB} KiB random reads, depth {self.depth}"

    def run(self, environment: Environment) -> Measurement:
        program = find_program(environment.machine.perf, "SPDK (its Getting Started guide)")
        seconds = max(1, round(environment.limits.seconds))
        options = ["--no-huge", "-s", PERF_MEMORY_MIB, "-w", "randread", "-t", seconds]
        options += ["-q", self.depth, "-o", self.block_bytes]
        options += ["-c", hex(1 << environment.machine.core)]
        options += ["-r", transport_id(environment.scene.uris)]
        options += tls_options(environment.scene.uris)
        with timed(cpu_seconds_of_children) as watch:
            text = output_of(program, *options)
        total = re.search(r"^Total\s*:\s*([0-9.]+)", text, re.MULTILINE)
        if total is None:
            raise Unavailable("spdk_nvme_perf printed no total")
        reads = round(float(total[1]) * seconds)
        return Measurement(reads, reads * self.block_bytes, seconds, watch.cpu_seconds)


@dataclass(frozen=True)
class BareInitiator:
    """DLFS's NVMe/TCP initiator alone, driven by a loop in C that reads random blocks.

    Attributes:
        block_bytes: bytes of a read.
        depth: reads in flight.
        as_batch: read into as many buffers as a batch has samples, and compute the CRC32C of each.
            Else read into one buffer for each read in flight; these stay in the processor's caches.
    """

    block_bytes: int
    depth: int
    as_batch: bool = False

    @property
    def label(self) -> str:
        way = "a batch's memory, with CRC32C" if self.as_batch else f"{self.depth} buffers"
        return f"nvme-tcp from C into {way}, depth {self.depth}"

    def run(self, environment: Environment) -> Measurement:
        uri = parse_uri(uri_of(environment.scene.uris, "nvme-tcp"))
        assert isinstance(uri, NvmeTcpUri)
        if uri.options.tls_psk is not None:
            raise Unavailable("the loop in C has no TLS")
        host, port = uri.paths[0]
        program = environment.machine.program("bare_nvme")
        buffers = max(self.depth, environment.scene.spec.batch) if self.as_batch else self.depth
        with bound_to(environment.machine.core):
            return run_bare(
                program, host, port, uri.subsystem_nqn, uri.nsid, self.block_bytes, self.depth,
                buffers, int(self.as_batch), environment.limits.seconds,
            )  # fmt: skip


def transport_id(uris: Sequence[str]) -> str:
    """Return the namespace as a transport ID of SPDK."""
    uri = parse_uri(uris[0])
    if isinstance(uri, SpdkUri):
        words = (*uri.transport_id, ("ns", str(uri.nsid)))
    elif isinstance(uri, NvmeTcpUri):
        host, port = uri.paths[0]
        family = "IPv6" if ":" in host else "IPv4"
        words = (
            ("trtype", "TCP"), ("adrfam", family), ("traddr", host), ("trsvcid", str(port)),
            ("subnqn", uri.subsystem_nqn), ("ns", str(uri.nsid)),
        )  # fmt: skip
        if uri.options.host_nqn is not None:
            words = (*words, ("hostnqn", uri.options.host_nqn))
    else:
        raise Unavailable(f"spdk_nvme_perf cannot read {uri}")
    return " ".join(f"{key}:{value}" for key, value in words)


def tls_options(uris: Sequence[str]) -> list[str]:
    """Return the options of SPDK's tool for the TLS key that the namespace's URI names."""
    uri = parse_uri(uris[0])
    name = uri.options.tls_psk if isinstance(uri, NvmeTcpUri) else None
    if name is None:
        return []
    return ["-S", "ssl", "--psk-path", str(key_directory().absolute() / name)]


@dataclass(frozen=True)
class Idle:
    """Idle queue pairs. One "sample" is one second of one queue pair.

    Attributes:
        scheme: scheme of the URI.
    """

    scheme: str

    @property
    def label(self) -> str:
        return f"DLFS {self.scheme}: {IDLE_QUEUES} idle queue pairs"

    def run(self, environment: Environment) -> Measurement:
        scene = environment.scene
        uri = uri_of(environment.scene.uris, self.scheme)
        with bound_to(environment.machine.core), open_device(uri) as device:
            queues = [device.queue_pair(32) for _ in range(IDLE_QUEUES)]
            device.read(0, 4096)
            with timed() as watch:
                time.sleep(environment.limits.seconds)
            for queue in queues:
                queue.close()
        with dlfs.open(uri) as volume, volume.dataset(DATASET) as dataset:
            checked = check_bytes(scene.source, {0: dataset.get(scene.source.path(0))})
        seconds = IDLE_QUEUES * watch.seconds
        percent = 100 * watch.cpu_seconds / watch.seconds
        note = {"plan": f"{percent:.2f}% of a core for all of them"}
        waited = max(1, round(seconds))
        return Measurement(waited, 0, watch.seconds, watch.cpu_seconds, checked, note)
