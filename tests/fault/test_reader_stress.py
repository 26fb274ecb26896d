"""Readers under many kinds of load and faults at once, from a seed that a failure prints.

Epochs of every plan and single reads share one reader with little memory. The devices fail, flip
bits, and delay and reorder completions. Batches stay referenced, and epochs end early and resume
with another number of ranks. Every returned sample must be intact, every other sample reported, and
all memory free at the end. With two replicas, one member is lost and returns meanwhile, and no read
may fail. DLFS_STRESS_SEEDS sets the number of seeds.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from dlfs.base.units import KIB, MIB
from dlfs.block.memory import MemoryDevice
from dlfs.reader import Batch, ReaderOptions, SampleReader, Where, make_native_reader
from tests.support.datasets import LaidDataset, lay_dataset, random_samples
from tests.support.devices import Faults, FaultyNativeDevice
from tests.unit.reader.conftest import batches_of

CHUNK_BYTES = 16 * KIB
COUNT = 400
WORKERS = 3
SEEDS = int(os.environ.get("DLFS_STRESS_SEEDS", "16"))
PLANS = ("auto", "direct", "chunks", "chunk_copy")

# Transient faults are retried until the sample is read; faults of the second kind lose samples.
PASSING = {"timeout_ms": 60_000, "retry_count": 60}
LASTING = {"timeout_ms": 20, "retry_count": 1}


class Stress:
    """A dataset on devices that fail, and a reader of it, made from a seed.

    Args:
        seed: draws the devices, the samples, the faults and the reader's limits.
        name: name that no other test has.
        options: options of the reader about faults.
        replicas: copies of each chunk.
        samples: the samples, instead of small ones that are drawn.
    """

    def __init__(
        self,
        seed: int,
        name: str,
        options: dict[str, int],
        *,
        replicas: int = 1,
        samples: dict[bytes, bytes] | None = None,
    ) -> None:
        random = np.random.default_rng(seed)
        members = max(int(random.integers(1, 4)), replicas)
        self.devices = [
            MemoryDevice(f"{name}-{seed}-{member}", 64 * MIB, writable=True)
            for member in range(members)
        ]
        high = int(random.choice([600, 6000, 30_000]))
        self.laid: LaidDataset = lay_dataset(
            self.devices,
            samples or random_samples(COUNT, seed, high=high),
            chunk_bytes=CHUNK_BYTES,
            fragment_chunks=int(random.integers(0, 4)),
            replicas=replicas,
        )
        self.faults = Faults(
            seed=seed,
            error_per_million=int(random.choice([0, 20_000])),
            short_per_million=int(random.choice([0, 10_000])),
            flip_per_million=int(random.choice([0, 30_000])),
            stall_per_million=int(random.choice([0, 30_000])),
            stall_ms=int(random.choice([1, 60])) if options is LASTING else 2,
            reorder=bool(random.integers(0, 2)),
        )
        self.slots = int(random.choice([4, 5, 9, 24, 60, 1000]))
        self.natives = [
            FaultyNativeDevice(one.native, self.faults, uri=one.uri) for one in self.devices
        ]
        native = make_native_reader(
            self.natives,
            self.laid.geometry,
            self.laid.runs,
            self.laid.directory,
            ReaderOptions(
                memory_bytes=self.slots * CHUNK_BYTES,
                depth=int(random.choice([1, 4, 32])),
                gap_bytes=int(random.choice([0, 8 * KIB])),
                **options,
            ),
        )
        where = Where("stress", tuple(one.uri for one in self.devices))
        self.reader = SampleReader(native, self.laid.geometry, self.laid.directory, where)

    def check(self, batch: Batch) -> None:
        for index, view in zip(batch.indices.tolist(), batch, strict=True):
            assert view == self.laid.samples[index], f"wrong bytes of sample {index}"

    def close(self) -> None:
        self.reader.close()
        for device in self.devices:
            device.close()
            MemoryDevice.forget(device.name)


class Worker:
    """A consumer of a reader: takes whole and partial epochs, and reads between their batches."""

    def __init__(self, stress: Stress, seed: int, plans: tuple[str, ...]) -> None:
        self.stress = stress
        self.random = np.random.default_rng(seed)
        self.plans = plans
        self.retained: list[Batch | None] = [None] * int(self.random.integers(1, 6))

    def run(self) -> None:
        for _ in range(2):
            self._epoch()
        for batch in self.retained:
            if batch is not None:
                self.stress.check(batch)

    def _retain(self, batch: Batch) -> None:
        """Retain a batch in place of an older one; check that the older one did not change."""
        self.stress.check(batch)
        place = int(self.random.integers(0, len(self.retained)))
        old = self.retained[place]
        if old is not None:
            self.stress.check(old)
        self.retained[place] = batch

    def _epoch(self) -> None:
        """Take an epoch in two parts with different numbers of ranks; the second may end early."""
        random, reader = self.random, self.stress.reader
        order: dict[str, Any] = {
            "seed": int(random.integers(0, 5)),
            "shuffle": [None, "global", "chunk"][random.integers(0, 3)],
            "window_chunks": int(random.integers(1, 9)),
            "on_error": "skip",
        }
        size = int(random.choice([1, 7, 40, COUNT]))
        seen: list[int] = []
        with batches_of(reader, size, plan=str(random.choice(self.plans)), **order) as epoch:
            for _, batch in zip(range(int(random.integers(0, 9))), epoch, strict=False):
                seen += self._take(batch)
            state = epoch.state()
        ranks = int(random.integers(1, 3))
        for rank in range(ranks):
            plan = str(random.choice(self.plans))
            with batches_of(
                reader,
                int(random.choice([3, 50])),
                rank=rank,
                world_size=ranks,
                plan=plan,
                on_error="skip",
            ).resume(state) as resumed:
                for batch in resumed:
                    seen += self._take(batch)
                    if random.integers(0, 60) == 0:
                        return
        assert sorted(seen) == list(range(COUNT))

    def _take(self, batch: Batch) -> list[int]:
        """Retain a batch; return the indices of its samples and of its reported failures."""
        self._retain(batch)
        if self.random.integers(0, 8) == 0:
            wanted = self.random.integers(0, COUNT, int(self.random.integers(0, 60)))
            read = self.stress.reader.read(wanted, on_error="skip")
            assert len(read) + len(read.failures) == len(wanted)
            self._retain(read)
        return batch.indices.tolist() + [failure.index for failure in batch.failures]


class Killer:
    """Loses one member and brings it back, at every batch that any worker takes."""

    def __init__(self, stress: Stress, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.victim = stress.natives[int(self.random.integers(0, len(stress.natives)))]

    def strike(self) -> None:
        self.victim.lose(bool(self.random.integers(0, 3)))


class Sufferer(Worker):
    """A consumer none of whose reads may fail."""

    def __init__(self, stress: Stress, seed: int, killer: Killer) -> None:
        super().__init__(stress, seed, PLANS)
        self.killer = killer

    def _take(self, batch: Batch) -> list[int]:
        self.killer.strike()
        assert batch.failures == ()
        return super()._take(batch)


@pytest.fixture
def stress(request: pytest.FixtureRequest, seed: int, options: dict[str, int]) -> Iterator[Stress]:
    made = Stress(seed, request.node.name, options)
    yield made
    made.close()


@pytest.mark.parametrize("options", [PASSING, LASTING], ids=["passing", "lasting"])
@pytest.mark.parametrize("seed", range(SEEDS))
def test_all_loads_and_faults_at_once(stress: Stress, seed: int, options: dict[str, int]) -> None:
    random = np.random.default_rng(seed)
    plans = PLANS if random.integers(0, 2) else (str(random.choice(PLANS)),)
    print(f"seed {seed}, {plans}, {stress.slots} slots, {stress.faults}")
    with ThreadPoolExecutor(WORKERS) as pool:
        runs = [pool.submit(Worker(stress, seed * WORKERS + i, plans).run) for i in range(WORKERS)]
        for run in runs:
            run.result()
    del runs, run
    if options is PASSING:
        assert_memory_is_back(stress)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_member_is_lost_again_and_again(request: pytest.FixtureRequest, seed: int) -> None:
    stress = Stress(seed, request.node.name, PASSING, replicas=2)
    killer = Killer(stress, seed)
    print(f"seed {seed}, {stress.slots} slots, {stress.faults}")
    try:
        with ThreadPoolExecutor(WORKERS) as pool:
            workers = [Sufferer(stress, seed * WORKERS + i, killer) for i in range(WORKERS)]
            runs = [pool.submit(worker.run) for worker in workers]
            for run in runs:
                run.result()
        del runs, run, workers
        assert_memory_is_back(stress)
    finally:
        stress.close()


def assert_memory_is_back(stress: Stress) -> None:
    """Check that as many small samples as there are slots fit at once, without private memory.

    Only samples that are read from the devices count: one that lies in the cache pins the run of
    slots that it was packed into, so its batch goes before the next read.
    """
    reader = stress.reader
    lengths = stress.laid.directory.lengths()
    chunk_count = sum(run.chunk_count for run in stress.laid.runs)
    limit = min(stress.slots, chunk_count)
    before = reader.stats()["private_batches"]
    batches: list[Batch] = []
    for index in np.flatnonzero((lengths > 0) & (lengths < CHUNK_BYTES)):
        hits = reader.stats()["cache_hits"]
        batch = reader.read([index])
        if reader.stats()["cache_hits"] == hits:
            batches.append(batch)
        del batch
        if len(batches) == limit:
            break
    assert reader.stats()["private_batches"] == before
