"""Reads that one call begins and another ends."""

from __future__ import annotations

import time
import weakref

import pytest

from dlfs.errors import ClosedError
from tests.support.datasets import random_samples

SECONDS_MAX = 100
"""Longest wait for a read that is in time, in seconds; slow test machines need it."""


def connected(made, **options):
    """Return a reader that has read once: nothing begins on a device that is not connected."""
    reader = made.reader(**options)
    reader.read([0]).release()
    return reader


def get_begun(reader, index, length_bytes):
    """Return a sample by a read that is begun; a busy machine may need several."""
    until = time.monotonic() + SECONDS_MAX
    found = None
    while found is None:
        begun = reader.begin(index)
        assert begun is not None
        assert time.monotonic() < until
        found = begun.get(length_bytes)
    return found


@pytest.mark.parametrize("memory_bytes", [1 << 16, 1 << 20])
def test_every_sample(bench, memory_bytes) -> None:
    made = bench(random_samples(200))
    reader = connected(made, memory_bytes=memory_bytes)
    for index, sample in enumerate(made.laid.samples):
        if index % 3:
            assert get_begun(reader, index, len(sample)) == sample
        else:
            reader.begin(index).cancel()
    assert reader.get(7) == made.laid.samples[7]


def test_a_large_sample_among_small_ones(bench) -> None:
    """The buffer of the thread grows with the sample."""
    samples = [b"small", bytes(range(256)) * 4000]
    made = bench({b"%d" % number: data for number, data in enumerate(samples)})
    reader = connected(made, memory_bytes=4 << 20)
    for index in (0, 1, 0):
        assert get_begun(reader, index, len(samples[index])) == samples[index]


def test_a_reader_that_has_not_connected_begins_nothing(bench) -> None:
    made = bench(random_samples(10))
    made.reader().close()  # and the queue pairs that wrote the dataset with it
    assert made.reader().begin(1) is None


def test_a_damaged_sample_is_not_returned(bench) -> None:
    made = bench(random_samples(50))
    made.corrupt(49)
    reader = connected(made, memory_bytes=1 << 16)
    until = time.monotonic() + SECONDS_MAX
    while not reader.stats()["checksum_errors"]:  # a busy machine may read nothing in time
        assert reader.begin(49).get(len(made.laid.samples[49])) is None
        assert time.monotonic() < until


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_reader_is_closed_after_what_has_begun(bench, cancelled) -> None:
    made = bench(random_samples(20))
    reader = connected(made)
    begun = reader.begin(3)
    owner = weakref.ref(reader.native.handle)
    reader.native.close()
    assert owner() is not None
    if cancelled:
        begun.cancel()
    else:
        assert begun.get(len(made.laid.samples[3])) in (made.laid.samples[3], None)
    assert owner() is None
    with pytest.raises(ClosedError):
        reader.begin(5)


def test_a_read_that_is_forgotten_is_given_up(bench) -> None:
    reader = connected(bench(random_samples(20)))
    owner = weakref.ref(reader.native.handle)
    begun = reader.begin(3)
    reader.native.close()
    assert owner() is not None
    del begun
    assert owner() is None


def test_a_read_ends_once(bench) -> None:
    made = bench(random_samples(20))
    reader = connected(made)
    begun = reader.begin(3)
    begun.cancel()
    begun.cancel()
    assert begun.get(len(made.laid.samples[3])) is None
    assert reader.get(3) == made.laid.samples[3]
