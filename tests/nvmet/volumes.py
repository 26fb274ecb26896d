"""Volumes over two kernel targets: their namespaces, their samples, and reading them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import dlfs
from dlfs.base.units import MIB
from tests.support.datasets import random_samples
from tests.support.volumes import write_dataset

MEMBERS = ("nqn.2024-01.org.dlfs.test:member0", "nqn.2024-01.org.dlfs.test:member1")
"""Members of a volume without replicas; blocks of 512 and of 4096 bytes."""
COPIES = ("nqn.2024-01.org.dlfs.test:copy0", "nqn.2024-01.org.dlfs.test:copy1")
"""Members of a volume with two copies; blocks of 512 and of 4096 bytes."""
MEMBER_BYTES = 24 * MIB
LARGE = random_samples(400, seed=3, low=4000, high=40_000)
"""Samples of more than ``MEMORY_BYTES``, so that an epoch reads from the devices to its end."""
MEMORY_BYTES = 2 * MIB


def add_large(volume: dlfs.Volume, name: str = "large") -> None:
    """Write ``LARGE`` as a dataset."""
    write_dataset(volume, name, LARGE, seed=6)


def read_epoch(dataset: dlfs.Dataset, seed: int) -> Iterator[dict[bytes, bytes]]:
    """Read an epoch in global order; return the samples of each batch by their paths."""
    paths = dataset.paths()
    with dataset.batches(16, seed=seed, shuffle="global") as batches:
        for batch in batches:
            with batch:
                indices = batch.indices.tolist()
                assert len(set(indices)) == len(indices)
                yield {paths[index]: batch.tobytes(i) for i, index in enumerate(indices)}


def assert_whole(batches: Iterable[dict[bytes, bytes]], expected: dict[bytes, bytes]) -> None:
    """Check that every sample was read exactly once with the right contents."""
    seen: dict[bytes, bytes] = {}
    for batch in batches:
        assert not seen.keys() & batch.keys()
        seen |= batch
    assert seen == expected
