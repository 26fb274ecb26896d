"""A target that is killed and restarted repeatedly, while readers and writers run.

All randomness comes from printed seeds. Every sample of an epoch arrives exactly once. A write
succeeds or fails with an error, and flushed data is on media. At the end, the counts of file
descriptors and threads, and the memory in use, are as before. DLFS_RESTARTS sets the number of
restarts.
"""

from __future__ import annotations

import gc
import os
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

import dlfs
from dlfs.base.units import KIB, MIB
from dlfs.block import BlockDevice, aligned_buffer, open_device
from dlfs.errors import DeviceError, DlfsError
from tests.fault.nvme_world import (
    INITIATORS,
    check_honest,
    check_nothing_left,
    check_typed,
    resources,
    uri_through,
)
from tests.support.datasets import random_samples
from tests.support.nvme import DEFAULT_NQN, Namespace, ScriptedTarget, Subsystem
from tests.support.volumes import new_volume, write_dataset

RESTARTS = int(os.environ.get("DLFS_RESTARTS", "30"))
RESTARTS_PER_SEED = 5
COUNT = 600
OPTIONS = {"timeout_ms": 2000, "connect_ms": 1000, "keepalive_ms": 5000, "reconnect_ms": 15000}
GROWTH_BYTES_MAX = 16 * MIB

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


class Killer:
    """Ends connections of a target at random moments, in a thread.

    A moment is a number of commands seen, so that the speed of the machine does not matter. The
    target is killed and comes back after a while, drops its connections, or falls silent for a
    moment.
    """

    def __init__(self, target: ScriptedTarget, seed: int, *, lose_cache: bool = False) -> None:
        self.target = target
        self.chance = random.Random(seed)
        self.lose_cache = lose_cache
        self.done = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Killer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.is_set():
            seen = self.target.counters.commands.total()
            wanted = seen + self.chance.randrange(1, 120)
            while self.target.counters.commands.total() < wanted and not self._over.wait(0.0005):
                pass
            if not self._over.is_set():
                self._strike()
                self.done += 1

    def _strike(self) -> None:
        kind = self.chance.random()
        if kind < 0.2 and not self.lose_cache:
            self.target.drop_connections(reset=kind < 0.1)
            return
        self.target.kill()
        self._over.wait(self.chance.choice([0, 0, 0.002, 0.03]))
        self.target.restart(lose_cache=self.lose_cache)


@contextmanager
def volume_target(samples: dict[bytes, bytes]) -> Iterator[ScriptedTarget]:
    """Make a target with a volume, and write the samples to the volume through the target."""
    subsystem = Subsystem(DEFAULT_NQN, [Namespace(24 * MIB, block_bytes=4096)])
    with ScriptedTarget([subsystem]) as target:
        uri = new_volume(target.uri(**OPTIONS), chunk_bytes=64 * KIB)
        write_dataset(uri, "data", samples)
        while target.connections:
            pass  # the target has not seen yet that they ended
        yield target


def resident_bytes() -> int:
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def read_epoch(dataset: dlfs.Dataset, samples: dict[bytes, bytes], seed: int, plan: str) -> None:
    """Read an epoch in global order; check that every sample arrives once, intact."""
    seen = []
    for batch in dataset.batches(16, seed=seed, epoch=seed, shuffle="global", plan=plan):
        with batch:
            for index, sample in zip(batch.indices.tolist(), batch, strict=True):
                assert sample == samples[dataset.path(index)], f"wrong bytes of sample {index}"
                seen.append(index)
    assert sorted(seen) == list(range(len(samples)))


def test_epochs_survive_restarts() -> None:
    samples = random_samples(COUNT, 3, high=20_000)
    with volume_target(samples) as target:
        before = resources()
        restarts, seed, growth = 0, 0, []
        while restarts < RESTARTS:
            seed += 1
            print(f"seed {seed}")
            with (
                dlfs.open(target.uri(**OPTIONS), memory_bytes=2 * MIB) as volume,
                volume["data"] as dataset,
                Killer(target, seed) as killer,
            ):
                while killer.done < min(RESTARTS_PER_SEED, RESTARTS - restarts):
                    read_epoch(dataset, samples, seed, ("direct", "auto")[seed % 2])
            restarts += killer.done
            growth.append(resident_bytes())
        check_nothing_left(before)
        assert target.violations == []
        assert max(growth[1:]) - growth[0] < GROWTH_BYTES_MAX, growth


def test_a_target_that_stays_lost_is_one_error_until_it_returns() -> None:
    samples = random_samples(COUNT, 4, high=20_000)  # larger than the sample memory
    options = OPTIONS | {"reconnect_ms": 1000}
    with volume_target(samples) as target:
        before = resources()
        with (
            dlfs.open(target.uri(**options), memory_bytes=2 * MIB) as volume,
            volume["data"] as dataset,
        ):
            read_epoch(dataset, samples, 1, "direct")
            target.kill()
            with pytest.raises(DlfsError) as caught:
                read_epoch(dataset, samples, 2, "direct")
            check_typed(caught.value, target)
            target.restart()
            while True:
                try:
                    read_epoch(dataset, samples, 3, "direct")
                    break
                except DlfsError as error:
                    check_typed(error, target)
        check_nothing_left(before)


# ---- writes --------------------------------------------------------------------------------------

SPACE_BYTES = 2 * MIB
PIECE_BYTES = 16 * KIB


class Journal:
    """Contents written to each offset, and the contents it may have after power losses."""

    def __init__(self) -> None:
        self.durable: dict[int, bytes] = {}
        self.possible: dict[int, set[bytes]] = {}

    def wrote(self, offset: int, data: bytes) -> None:
        """Note a submitted write. It may be on media or lost until a flush succeeds."""
        self.possible.setdefault(offset, {self.durable.get(offset, bytes(PIECE_BYTES))}).add(data)

    def flushed(self, latest: dict[int, bytes]) -> None:
        """Note a successful flush, which makes the last acknowledged writes durable."""
        for offset, data in latest.items():
            self.durable[offset] = data
            self.possible[offset] = {data}


def write_some(device: BlockDevice, chance: random.Random, journal: Journal) -> dict[int, bytes]:
    """Write at random offsets; return the last acknowledged content of each offset."""
    latest: dict[int, bytes] = {}
    buffer = aligned_buffer(PIECE_BYTES, 4096)
    for _ in range(24):
        offset = chance.randrange(SPACE_BYTES // PIECE_BYTES) * PIECE_BYTES
        data = chance.randbytes(PIECE_BYTES)
        buffer[:] = np.frombuffer(data, np.uint8)
        journal.wrote(offset, data)
        device.write(offset, buffer)
        latest[offset] = data
    return latest


@pytest.mark.parametrize("initiator", INITIATORS)
@pytest.mark.parametrize("lose_cache", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_no_flushed_write_is_lost(initiator: str, seed: int, lose_cache: bool) -> None:
    """Run rounds of writes and a flush; after a failed flush, its round's writes may be lost."""
    print(f"seed {seed}")
    chance, journal = random.Random(seed), Journal()
    before = resources()
    subsystem = Subsystem(DEFAULT_NQN, [Namespace(SPACE_BYTES)])
    with (
        ScriptedTarget([subsystem]) as target,
        open_device(uri_through(initiator, target, **OPTIONS), writable=True) as device,
    ):
        flushed = 0
        with Killer(target, seed, lose_cache=lose_cache) as killer:
            while killer.done < 6 or flushed < 3:
                try:
                    latest = write_some(device, chance, journal)
                    device.flush()
                except DeviceError as error:
                    check_typed(error, target)
                    continue
                journal.flushed(latest)
                flushed += 1
        for offset, possible in journal.possible.items():
            assert device.read(offset, PIECE_BYTES) in possible, f"seed {seed}, byte {offset}"
        check_honest(initiator, target)
    if initiator == "nvme-tcp":  # SPDK's environment stays initialized
        check_nothing_left(before)
