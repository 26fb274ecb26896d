"""Tests what two snapshots of counters give: rates, shares, latencies, a verdict."""

import pytest

from dlfs.service.statistics import (
    Activity,
    activity,
    latency_quantile,
    member_activity,
    verdict,
)


def seen(**changes: object) -> Activity:
    values: dict[str, object] = {
        "seconds": 2.0,
        "samples": 1000,
        "sample_bytes": 4_096_000,
        "cache_hits": 200,
        "requests": 400,
        "errors": 0,
        "retries": 0,
        "phase_seconds": {"device": 1.0, "checking": 0.5, "planning": 0.25, "rest": 0.25},
        "wait_seconds": 1.5,
    }
    return Activity(**{**values, **changes})  # type: ignore[arg-type]


def test_activity_is_the_growth_of_the_counters():
    before = {"samples": 10, "reads": 5, "read_errors": 1, "device_ns": 1_000_000_000}
    after = {
        "samples": 110,
        "cache_hits": 20,
        "reads": 45,
        "read_errors": 2,
        "checksum_errors": 3,
        "device_ns": 3_000_000_000,
        "wait_ns": 500_000_000,
    }
    found = activity(before, after, 4.0)
    assert (found.samples, found.cache_hits, found.requests, found.errors) == (100, 20, 40, 4)
    assert found.phase_seconds["device"] == 2.0
    assert found.wait_seconds == 0.5
    assert found.rate(found.samples) == 25.0
    assert found.coalescing == 2.0
    assert found.hit_share == 0.2


def test_shares_are_relative_to_the_time_of_the_readers():
    assert seen().phase_shares == {
        "device": 0.5,
        "checking": 0.25,
        "planning": 0.125,
        "rest": 0.125,
    }
    assert seen(phase_seconds={"device": 0.0}).phase_shares == {}


@pytest.mark.parametrize(
    ("share", "expected"), [(0.0, 0.0), (0.25, 1.0), (0.5, 2.0), (0.75, 6.0), (1.0, 8.0)]
)
def test_quantiles_within_buckets(share, expected):
    # two below 2 us, none below 4, two below 8
    assert latency_quantile([2, 0, 2, 0], share) == expected


def test_quantile_of_nothing():
    assert latency_quantile([0, 0], 0.5) == 0.0


def test_a_member_between_two_looks():
    before = {"reads": 10, "read_bytes": 100, "errors": 1, "latency_ns": 0, "latency": [10, 0]}
    after = {
        "uri": "a.img",
        "lost": True,
        "reads": 30,
        "read_bytes": 500,
        "errors": 1,
        "latency_ns": 8_000_000_000,
        "latency": [10, 20],
        "queue_pairs": 3,
        "queue_pairs_max": 8,
    }
    found = member_activity(before, after, 2.0)
    assert (found.reads, found.read_bytes, found.errors, found.lost) == (10.0, 200.0, 0, True)
    assert found.depth == 4.0  # eight seconds of latency in two
    assert found.median_us == 3.0
    assert (found.queue_pairs, found.queue_pairs_max) == (3, 8)


@pytest.mark.parametrize(
    ("changes", "waited", "word"),
    [
        ({}, 0.01, "consumer"),
        ({"phase_seconds": {"device": 0.3, "rest": 0.7}}, 0.3, "consumer"),
        ({"cache_hits": 1000, "requests": 0}, 0.9, "memory"),
        ({}, 0.9, "device"),
        ({"phase_seconds": {"device": 0.1, "checking": 0.9}}, 0.9, "checksums"),
        ({"phase_seconds": {"device": 0.1, "planning": 0.9}}, 0.9, "finds and sorts"),
        ({"samples": 0}, 0.9, "nothing"),
    ],
)
def test_verdicts(changes, waited, word):
    assert word in verdict(seen(**changes), waited)
