"""Ranges of large samples under faults, from a seed: each byte is right, or its read fails.

Threads read ranges, whole samples and batches of small ones with one reader and little memory,
while the devices fail, flip bits and delay completions. With two replicas, one member is lost and
returns meanwhile, and no read may fail. DLFS_STRESS_SEEDS sets the number of seeds.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest

from dlfs.errors import ChecksumError, DeviceError, TruncatedError
from dlfs.reader import read_into
from tests.fault.test_reader_stress import CHUNK_BYTES, LASTING, PASSING, SEEDS, Stress
from tests.support.datasets import random_samples

LARGE = [5 * CHUNK_BYTES + 4321, 40 * CHUNK_BYTES, 17 * CHUNK_BYTES + 1]
"""Bytes of the samples that are larger than a chunk."""
SMALL = 60
THREADS = 4
TURNS = 60


@contextmanager
def ranges_of(
    request: pytest.FixtureRequest, seed: int, options: dict[str, int], replicas: int = 1
) -> Iterator[Stress]:
    """Make a dataset of large and small samples on devices that fail, and a reader of it."""
    random = np.random.default_rng(seed)
    large = {b"a%d" % i: random.bytes(size) for i, size in enumerate(LARGE)}
    samples = large | random_samples(SMALL, seed, high=6000)
    made = Stress(seed, request.node.name, options, replicas=replicas, samples=samples)
    try:
        yield made
    finally:
        made.close()


def _take_turns(ranges: Stress, seed: int, *, loses: bool) -> tuple[int, int]:
    """Read in turns; return how many reads gave bytes, and how many failed."""
    random = np.random.default_rng(seed)
    given, failed = 0, 0
    for _ in range(TURNS):
        if loses:
            victim = ranges.natives[seed % len(ranges.natives)]
            victim.lose(bool(random.integers(0, 3)))
        index = int(random.integers(0, len(LARGE)))
        data = ranges.laid.samples[index]
        try:
            if random.integers(0, 4) == 0:
                wanted = random.choice([0, *range(len(LARGE), len(ranges.laid.samples))], 5)
                batch = ranges.reader.read(wanted)
                got = [bytes(view) for view in batch]
                assert got == [ranges.laid.samples[one] for one in wanted]
            else:
                start = int(random.integers(0, len(data)))
                room = bytearray(int(random.integers(1, 3 * CHUNK_BYTES)))
                length = read_into(ranges.reader, index, room, start)
                assert length == min(len(room), len(data) - start)
                assert room[:length] == data[start : start + length]
        except (ChecksumError, DeviceError, TruncatedError) as error:
            print(f"{type(error).__name__}: {error}")
            failed += 1
        else:
            given += 1
    return given, failed


def _run(ranges: Stress, seed: int, *, loses: bool = False) -> tuple[int, int]:
    """Have threads take turns; one of them loses a member if asked to. Return the sums."""
    print(f"seed {seed}, {len(ranges.devices)} members, {ranges.faults}")
    with ThreadPoolExecutor(THREADS) as pool:
        runs = [
            pool.submit(_take_turns, ranges, seed * THREADS + i, loses=loses and i == 0)
            for i in range(THREADS)
        ]
        counts = [run.result() for run in runs]
    return sum(given for given, _ in counts), sum(failed for _, failed in counts)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_ranges_are_right_or_fail(request: pytest.FixtureRequest, seed: int) -> None:
    with ranges_of(request, seed, LASTING) as ranges:
        given, failed = _run(ranges, seed)
        assert given + failed == THREADS * TURNS
        assert given > 0


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("seed", range(SEEDS))
def test_ranges_outlast_faults_that_pass(
    request: pytest.FixtureRequest, seed: int, replicas: int
) -> None:
    with ranges_of(request, seed, PASSING, replicas) as ranges:
        assert _run(ranges, seed, loses=replicas > 1) == (THREADS * TURNS, 0)
